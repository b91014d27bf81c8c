"""What is chosen, by which rule, and what is said where arithmetic disagrees."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

import llmjax
from llmjax.advise import quality
from llmjax.advise.advice import Advice, Candidate
from llmjax.advise.quality import Figure
from llmjax.advise.rules import rule_for
from llmjax.errors import ConfigError
from llmjax.simulate.device import DEVICES

CPU = {"bandwidth_gbs": 24.0, "int8_tops": 1.5, "memory_gb": 64.0, "gpu_memory_utilization": 0.9}


def ask(gpu: str, model: str = "llama-3-8b", **options) -> Advice:
    return llmjax.advise(model, gpu, **options)


def best(advice: Advice) -> Candidate:
    assert advice.best is not None
    return advice.best


def said(advice: Advice, start: str) -> str:
    """The reason that begins so."""
    [line] = [reason for reason in advice.reasons if reason.startswith(start)]
    return line


@pytest.mark.parametrize(
    ("gpu", "goal", "accuracy", "scheme", "speculation"),
    [
        ("h100", "throughput", "normal", "fp8", True),
        ("h100", "latency", "normal", "fp8", False),
        ("h200", "throughput", "critical", "fp8", True),
        ("a100-80gb", "throughput", "normal", "awq", False),
        ("a100-80gb", "latency", "critical", "awq", False),
        ("l4", "throughput", "normal", "gptq", False),
        ("t4", "latency", "normal", "gptq", False),
        ("b200", "throughput", "normal", "nvfp4", False),
        ("b200", "latency", "normal", "nvfp4", False),
        ("cpu", "throughput", "normal", "q4_k_m", False),
        ("cpu", "latency", "critical", "q8_0", False),
    ],
)
def test_the_table_of_rules(gpu, goal, accuracy, scheme, speculation):
    rule = rule_for(DEVICES[gpu], goal, accuracy)
    assert (rule.scheme, rule.speculation) == (scheme, speculation)


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        ("h100", {"goal": "throughput"}),
        ("a100", {"goal": "latency"}),
        ("t4", {"goal": "latency"}),
        ("b200", {"goal": "throughput"}),
        ("cpu", {"goal": "throughput", **CPU}),
        ("cpu", {"goal": "latency", "accuracy": "critical", **CPU}),
    ],
)
def test_where_arithmetic_agrees_with_the_rule(gpu, options):
    advice = ask(gpu, **options)
    assert best(advice).scheme == advice.rule.scheme
    assert f"By arithmetic too it is {advice.rule.scheme}." in said(advice, "Rule of thumb")


def test_prompts_on_an_a100_are_computed_in_int8():
    advice = ask("a100", p99=20.0)
    assert best(advice).scheme == "smoothquant"
    line = said(advice, "Rule of thumb: AWQ int4 on an A100. Arithmetic disagrees.")
    assert "matrices multiply in int8 (624 Top/s at most) against bfloat16 (312 Top/s" in line


def test_a_lone_answer_on_an_h100_reads_4_bits():
    advice = ask("h100", goal="latency")
    assert best(advice).scheme in ("awq", "gptq")
    line = said(advice, "Rule of thumb: FP8 on Hopper. Arithmetic disagrees.")
    assert "a step of 1 request takes 2.80 ms (for bytes, 4.83 GB) against 4.05 ms" in line


def test_a_rule_that_is_not_accurate_enough():
    advice = ask("a100", goal="latency", accuracy="critical")
    assert best(advice).kv_dtype == "bfloat16"
    assert best(advice).scheme not in ("awq", "gptq", "int4")
    line = said(advice, "Rule of thumb: AWQ")
    assert "not accurate enough (4 bits a weight, and not measured on this model)" in line


def test_more_prompts_and_less_decoding_favour_what_multiplies_faster():
    prompts = ask("h100", input_len=4000, output_len=8)
    answers = ask("h100", input_len=8, output_len=1000, gpus=1, p99=3.0)
    assert best(prompts).scheme == "fp8"
    assert best(prompts).estimate.prompt.bound == "operations"
    assert best(answers).scheme in ("awq", "gptq")
    assert best(answers).estimate.decode.bound == "bytes"


def test_speculation_pays_where_bytes_decide():
    lone = ask("h100", goal="latency").speculation
    assert lone is not None
    # A step that verifies 7 positions reads what one of 1 reads.
    assert lone.bound == "bytes" and lone.pays and lone.batch == 1
    assert lone.verify_s == pytest.approx(lone.step_s, rel=0.01)
    assert lone.tokens == pytest.approx(sum(0.7**i for i in range(lone.drafts + 1)))
    assert lone.draft_s == pytest.approx(lone.drafts * 0.05 * (lone.step_s - 1e-3))
    chosen = best(ask("h100", goal="latency")).estimate
    rounds_s = 255 * (lone.verify_s + lone.draft_s) / lone.tokens
    drafting_s = chosen.prompt.seconds + rounds_s + 0.05 * (chosen.prompt.seconds - 1e-3)
    assert lone.speedup == pytest.approx(chosen.alone_s / drafting_s)
    assert "It pays, but llmjax does not speculate yet" in said(
        ask("h100", goal="latency"), "Speculation, 1 request at once, if 70% of drafts"
    )


def test_speculation_does_not_pay_where_operations_decide():
    advice = ask("h100", "llama-3-70b", p99=20.0)
    assert advice.rule.speculation
    assert advice.speculation is not None
    assert advice.speculation.bound == "operations" and not advice.speculation.pays
    assert advice.speculation.speedup < 1
    assert "The rule has it, but it does not pay" in said(advice, "Speculation, 145 requests")


def test_drafts_that_are_never_accepted_do_not_pay():
    found = ask("h100", goal="latency", acceptance=0.0).speculation
    assert found is not None
    assert found.tokens == 1 and found.speedup < 1 and not found.pays


def test_the_order_is_that_of_the_goal():
    for goal in ("throughput", "latency"):
        advice = ask("l4", goal=goal, p99=40.0, accuracy="critical")
        possible = [c for c in advice.candidates if c.is_possible]
        assert list(advice.candidates[: len(possible)]) == possible
        estimates = [c.estimate for c in possible]
        if goal == "throughput":
            rates = [e.per_gpu for e in estimates if e]
            assert rates == sorted(rates, reverse=True)
        else:
            order = [(e.gpus, e.alone_s) for e in estimates if e]
            assert order == sorted(order)
        top = possible[0].score(goal)
        assert best(advice).score(goal) * 1.05 >= top


def test_of_what_is_alike_the_rule_goes_first_then_what_loses_less():
    advice = ask("t4", goal="latency")
    # AWQ and GPTQ are alike to the byte, and a lone answer hardly reads its keys and values.
    assert (best(advice).scheme, best(advice).kv_dtype) == ("gptq", "bfloat16")
    assert best(ask("a100", goal="latency")).scheme == "awq"


def test_keys_and_values_in_8_bits_have_a_reason():
    advice = ask("l4", gpus=1)
    assert best(advice).kv_dtype == "int8"  # as fp8_e4m3 was measured to lose more
    line = said(advice, "Why not fp8 with KV in bfloat16")
    assert "113 run at once against 59" in line
    assert best(ask("h100", p99=20.0)).kv_dtype == "bfloat16"  # there is room enough


def test_more_devices_where_one_is_too_small():
    advice = ask("h100", "llama-3-70b", goal="latency")
    by_name = {(c.scheme, c.kv_dtype): c for c in advice.candidates}
    floats = by_name["bf16", "bfloat16"].estimate
    four_bits = by_name["awq", "bfloat16"].estimate
    assert floats is not None and four_bits is not None
    assert (floats.gpus, four_bits.gpus) == (2, 1)
    assert "it needs 2 GPUs, not 1" in said(advice, "Why not bf16")
    assert [ask("h100", "llama-3-70b", gpus=n).candidates[0].estimate.gpus for n in (4, 8)] == [
        4,
        8,
    ]


def test_a_p99_that_none_keeps_is_said_with_its_numbers():
    advice = ask("h100", p99=0.1)
    assert advice.best is None and advice.speculation is None and advice.today is None
    assert "Nothing that is accurate enough keeps p99 of 0.1 s" in advice.reasons[0]
    assert "0.482 s for a lone answer" in advice.reasons[0]
    assert not any(candidate.is_possible for candidate in advice.candidates)


def test_a_p99_that_only_what_is_not_accurate_keeps():
    # On one L4 only 4 bits are read in time.
    advice = ask("l4", gpus=1, p99=7.0, accuracy="critical")
    assert advice.best is None
    assert advice.reasons[0].startswith("What keeps p99 of 7 s is not accurate enough: awq")
    assert best(ask("l4", gpus=1, p99=7.0)).scheme in ("awq", "gptq")


def test_answers_of_one_token_are_prompts_alone():
    advice = ask("h100", output_len=1, gpus=1, p99=1.0)
    assert best(advice).scheme == "fp8" and advice.speculation is None
    assert not any(reason.startswith("Decoding") for reason in advice.reasons)
    assert said(advice, "An answer, prompts one after the other: 1.00 s, within the 1 s of p99")


def test_what_is_accurate_enough_may_not_fit():
    advice = ask("h100", "llama-3-70b", gpus=1, accuracy="critical")
    assert advice.best is None
    assert advice.reasons[0].startswith("What fits is not accurate enough: awq with KV in int8: 4 ")
    assert advice.reasons[1] == "What is accurate enough (critical) does not fit."


def test_a_model_that_fits_nowhere_is_refused_with_the_numbers():
    message = (
        r"llama-3-70b does not fit on 1 t4: awq with KV in int8, which takes least, has 39\.77 GB "
        r"of weights, .* of 14\.40 GB that may be filled of 16\.00"
    )
    with pytest.raises(ConfigError, match=message):
        ask("t4", "llama-3-70b", gpus=1)


def test_figures_of_the_user_take_the_place_of_others():
    small = ask("a100", memory_gb=40.0, bandwidth_gbs=1555.0)
    assert small.figures.memory == 40e9 and small.figures.bandwidth == 1.555e12
    assert small.figures.source.endswith("given: memory_gb, bandwidth_gbs")
    cpu = ask("cpu", **CPU)
    assert (cpu.figures.bandwidth, cpu.figures.int8, cpu.figures.peak) == (24e9, 1.5e12, 0.375e12)


def test_a_cpu_is_measured_where_nothing_is_given(monkeypatch):
    from llmjax.bench import roofline

    measured = roofline.Roofline(read=30e9, int8=2e12, threads=2, instruction_set="avx2")
    monkeypatch.setattr(roofline, "measure", lambda: measured)
    figures = ask("cpu", "smollm2-135m").figures
    assert (figures.bandwidth, figures.int8) == (30e9, 2e12)
    assert "measured with 2 threads (avx2)" in figures.source
    assert figures.memory > 0
    given = ask("cpu", "smollm2-135m", bandwidth_gbs=10.0).figures
    assert (given.bandwidth, given.int8) == (10e9, 2e12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "x100"}, "gpu is 'x100', allowed: a100, b200, cpu, h100, h200, l4, t4"),
        ({"goal": "speed"}, "goal is 'speed', allowed: throughput, latency"),
        ({"accuracy": "high"}, "accuracy is 'high', allowed: critical, normal"),
        ({"p99": 0.0}, "p99 is 0.0, allowed: above 0"),
        ({"p99": float("inf")}, "p99 is inf, allowed: above 0"),
        ({"p99": float("nan")}, "p99 is nan, allowed: above 0"),
        ({"input_len": 0}, "input_len is 0, allowed: 1 to"),
        ({"output_len": 0}, "output_len is 0, allowed: 1 to"),
        ({"input_len": 8000}, "8,256 together, allowed: the 8,192 tokens"),
        ({"gpus": 9}, "gpus is 9, allowed: 1 to 8"),
        ({"gpu": "cpu", "gpus": 2}, "gpus is 2, allowed: 1 to 1"),
        ({"acceptance": 1.5}, "acceptance is 1.5, allowed: 0 to 1"),
        (
            {"gpu_memory_utilization": 1.1},
            "gpu_memory_utilization is 1.1, allowed: above 0 up to 1",
        ),
        ({"memory_efficiency": 0.0}, "memory_efficiency is 0.0, allowed: above 0 up to 1"),
        ({"step_overhead_ms": -1.0}, "step_overhead_ms is -1.0, allowed: 0 to"),
        ({"int8_tops": 1.0}, "int8_tops is 1.0, allowed: with gpu cpu"),
        ({"memory_gb": -1.0}, "memory_gb is -1.0, allowed: above 0"),
        ({"batch": 3}, r"unknown option\(s\): batch"),
        ({"p99": "10"}, "p99 is '10', allowed: a number or None"),
    ],
)
def test_what_cannot_be_asked(options, message):
    options = {"gpu": "h100", **options}
    with pytest.raises(ConfigError, match=message):
        llmjax.advise("llama-3-8b", **options)


def test_the_function_is_there_whoever_imports_its_room():
    import llmjax.advise.report

    assert callable(llmjax.advise)


def test_advice_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ask("h100").best = None  # type: ignore[misc]


# Quality.


@pytest.fixture
def measured(monkeypatch):
    """Puts figures in the place of those that were measured."""

    def put(*figures: Figure) -> None:
        monkeypatch.setattr(quality, "figures", lambda: figures)

    return put


def figure(part: str, name: str, perplexity: float, model: str = "llama-3-8b") -> Figure:
    return Figure(part, name, model, perplexity, 10.0, "a test")


def test_what_was_measured_decides_for_its_model(measured):
    assert best(ask("h100", goal="latency", accuracy="critical")).scheme not in ("awq", "gptq")
    measured(figure("weights", "awq", 10.05))
    assert best(ask("h100", goal="latency", accuracy="critical")).scheme == "awq"
    measured(figure("weights", "awq", 10.2), figure("weights", "fp8", 10.5))
    critical = best(ask("h100", goal="latency", accuracy="critical"))
    assert critical.scheme not in ("awq", "gptq", "fp8")
    measured(figure("weights", "awq", 11.5), figure("weights", "gptq", 10.9))
    assert best(ask("h100", goal="latency")).scheme == "gptq"


def test_weights_and_keys_lose_together(measured):
    measured(figure("weights", "fp8", 10.08), figure("kv", "int8", 10.08))
    advice = ask("h100", accuracy="critical", p99=20.0)
    by_name = {(c.scheme, c.kv_dtype): c for c in advice.candidates}
    assert by_name["fp8", "bfloat16"].objection is None
    assert by_name["bf16", "int8"].objection is None
    both = by_name["fp8", "int8"].objection
    assert both == "measured: 1.016 times the perplexity, allowed up to 1.01"


def test_another_models_figures_are_told_and_do_not_decide(measured):
    measured(figure("weights", "awq", 20.0, model="other"))
    advice = ask("h100", goal="latency")
    assert best(advice).scheme in ("awq", "gptq")
    [awq, *_] = [c for c in advice.candidates if c.scheme == "awq"]
    assert str(awq.weights_quality) == "not measured (2.000 on other)"
    assert awq.weights_quality.ratio is None


def test_of_several_figures_the_worst_counts(measured):
    measured(figure("weights", "awq", 10.05), figure("weights", "awq", 10.2))
    assert quality.known("weights", "awq", "llama-3-8b").ratio == pytest.approx(1.02)


def test_what_was_not_measured_is_not_invented(measured):
    measured()
    advice = ask("h100")
    for candidate in advice.candidates:
        own = candidate.weights_quality.ratio
        assert own == (1.0 if candidate.scheme == "bf16" else None)
    assert "weights not measured, KV 1.000" in said(advice, "Perplexity")
    line = said(ask("l4", gpus=1), "Perplexity")
    assert line.endswith("weights not measured, KV not measured.")


def test_the_file_of_figures():
    found = quality.figures()
    known = {"weights": quality.SCHEMES, "kv": ("int8", "fp8_e4m3", "fp8_e5m2")}
    assert found
    for each in found:
        assert each.name in known[each.part]
        assert each.perplexity > 0 and each.reference > 0 and each.source
        assert each.model == each.model.lower()
    [int8] = [f for f in found if (f.part, f.name) == ("weights", "int8")]
    assert int8.ratio == pytest.approx(1.0027, abs=1e-4)  # README: 29.60 to 29.68


# What llmjax serves.


def test_what_is_advised_and_not_served_has_the_best_that_is():
    advice = ask("b200", goal="latency")
    assert best(advice).scheme == "nvfp4" and not best(advice).served.today
    assert "nvfp4 in a byte a weight" in said(advice, "llmjax does not serve")
    assert advice.today is not None and advice.today.served.today
    line = said(advice, f"llmjax serves today {advice.today.name}")
    assert advice.today.scheme == "awq" and "it needs a checkpoint of it that" in line


def test_what_is_advised_and_served():
    advice = ask("h100", p99=20.0)
    assert advice.today is advice.best
    assert said(advice, "llmjax serves today: llmjax serve MODEL --quantization fp8")


def test_quantising_is_for_any_number_of_devices():
    advice = ask("h100", "llama-3-70b", p99=20.0)
    assert best(advice).scheme == "fp8" and best(advice).estimate.gpus == 2
    assert "--tensor-parallel-size 2 --quantization fp8" in best(advice).served.how


def test_checkpoints_of_others_methods():
    from llmjax.advise.served import served

    advice = ask("a100", "llama-3-8b")
    [awq] = [c for c in advice.candidates if (c.scheme, c.kv_dtype) == ("awq", "bfloat16")]
    assert awq.served.today and "--quantization" not in awq.served.how
    assert awq.served.needs == "a checkpoint of it that `llmjax quantize --method awq` makes"
    stored = replace(advice.model, quantised="awq")
    options = awq.scheme, awq.kv_dtype, awq.estimate
    assert served(advice.question, stored, advice.figures, *options).needs is None
    [gptq] = [c for c in ask("t4").candidates if (c.scheme, c.kv_dtype) == ("gptq", "bfloat16")]
    assert gptq.served.how == "llmjax has kernels for gptq from A100 on"


def test_files_that_are_quantised_already(tmp_path):
    from llmjax.advise.served import served

    advice = ask("cpu", **CPU)
    [q4] = [c for c in advice.candidates if (c.scheme, c.kv_dtype) == ("q4_k_m", "int8")]
    [int8] = [c for c in advice.candidates if (c.scheme, c.kv_dtype) == ("int8", "int8")]
    stored = replace(advice.model, quantised="Q4_K_M")

    def needs(candidate: Candidate, model) -> str | None:
        options = candidate.scheme, candidate.kv_dtype, candidate.estimate
        return served(advice.question, model, advice.figures, *options).needs

    assert needs(q4, advice.model) == "a GGUF file of it in Q4_K_M"
    assert needs(q4, stored) is None
    assert needs(int8, advice.model) is None
    assert needs(int8, stored) == "a checkpoint in floats: this one is Q4_K_M"
