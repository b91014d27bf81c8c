"""The arithmetic beside figures that were worked out by hand, of Llama 3 8B and 70B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmjax.advise.advisor import advise_on
from llmjax.advise.estimate import (
    Estimate,
    best_size,
    estimate,
    find_memory,
    make_machine,
    most_that,
    scheduler_for,
    sizes,
)
from llmjax.advise.model import find
from llmjax.advise.question import Question
from llmjax.advise.schemes import weights_here
from llmjax.errors import ConfigError
from llmjax.simulate.device import DEVICES

# Weights: a layer of 8B has 4096 x (2 x (32 + 8) x 128 + 3 x 14336), the head 128256 x 4096.
LAYERS_8B, HEAD_8B = 32 * 218_103_808, 525_336_576
LAYERS_70B, HEAD_70B = 80 * 855_638_016, 1_050_673_152
KV_8B, KV_70B = 131_072, 327_680


def of(model: str, gpu: str, scheme: str = "bf16", kv: str = "bfloat16", gpus: int = 1, **asked):
    """An estimate, and the memory that it begins from."""
    question = Question(model, gpu, **asked)
    figures = DEVICES["a100-80gb" if gpu == "a100" else gpu]
    found = find(model)
    weights = weights_here(found.shape, figures)[scheme]
    machine = make_machine(question, found, figures, weights, kv, gpus)
    memory = find_memory(question, machine)
    return memory, estimate(question, machine, memory) if memory.fits else None


@pytest.mark.parametrize(
    ("model", "scheme", "expected"),
    [
        ("llama-3-8b", "bf16", 16_059_990_016),
        ("llama-3-70b", "bf16", 141_104_775_168),
        # 8 bits in the layers, embedding and head in 16.
        ("llama-3-8b", "fp8", LAYERS_8B + 4 * HEAD_8B),
        ("llama-3-70b", "smoothquant", LAYERS_70B + 4 * HEAD_70B),
        # 4 bits, and 20 for a scale and a zero point of 128.
        ("llama-3-8b", "awq", LAYERS_8B * 133 // 256 + 4 * HEAD_8B),
        ("llama-3-70b", "gptq", LAYERS_70B * 133 // 256 + 4 * HEAD_70B),
        # Everything in groups of 32: 8.5 bits; 5, but the head 8.5.
        ("llama-3-8b", "int8", (LAYERS_8B + 2 * HEAD_8B) * 17 // 16),
        ("llama-3-8b", "int4", (LAYERS_8B + HEAD_8B) * 5 // 8 + HEAD_8B * 17 // 16),
    ],
)
def test_bytes_of_weights(model, scheme, expected):
    assert of(model, "h100", scheme)[0].weights == expected


@pytest.mark.parametrize(
    ("scheme", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25), ("fp8", 8), ("awq", 4.15625)]
)
def test_bytes_of_weights_on_blackwell(scheme, bits):
    assert of("llama-3-8b", "b200", scheme)[0].weights == LAYERS_8B * bits // 8 + 4 * HEAD_8B


def test_bytes_of_keys_and_values():
    assert of("llama-3-8b", "h100")[0].kv_token == 2 * 32 * 8 * 128 * 2 == KV_8B
    assert of("llama-3-70b", "h100")[0].kv_token == 2 * 80 * 8 * 128 * 2 == KV_70B
    # A byte a channel and a scale of four for each head.
    for kv in ("int8", "fp8_e4m3"):
        assert of("llama-3-8b", "h100", kv=kv)[0].kv_token == 2 * 32 * 8 * (128 + 4)
    # 40 key heads, one for each query head.
    assert of("llama-2-13b", "h100")[0].kv_token == 2 * 40 * 40 * 128 * 2


def test_requests_that_fit():
    memory, _ = of("llama-3-8b", "h100")
    assert memory.request == 80 * 16 * KV_8B  # 1,280 tokens in pages of 16
    # A step's temporaries: 4 float32 logits of each request, and activations of 8,192 tokens.
    activations = 4 * 8192 * (4 * 4096 + 3 * 14336 + 4 * 4096)
    left = 0.9 * 80e9 - 16_059_990_016 - activations
    assert memory.fits == left // (memory.request + 4 * 4 * 128_256) == 314
    assert memory.temporaries == activations + 314 * 16 * 128_256


def test_a_model_too_large_for_one_fits_on_more():
    assert of("llama-3-70b", "h100")[0].fits == 0
    assert of("llama-3-70b", "h100", gpus=2)[0].fits == 1
    assert of("llama-3-70b", "h100", "awq")[0].fits > 0


def test_seconds_of_a_decode_step():
    _, found = of("llama-3-8b", "h100", p99=1.73)
    assert found is not None
    assert found.batch == 1
    # Halfway through its answer a token sees 1,024 + 128 before it, and itself.
    read = 2 * (LAYERS_8B + HEAD_8B) + 1153 * KV_8B
    assert found.decode.read_bytes == read
    assert found.decode.read_s == pytest.approx(read / (0.8 * 3.35e12))
    assert found.decode.seconds == pytest.approx(found.decode.read_s + 1e-3)
    assert found.decode.bound == "bytes"


def test_seconds_of_a_prompt():
    products = 2 * LAYERS_8B * 1024
    beside = 2 * HEAD_8B + 4 * 32 * 128 * 32 * (1024 * 1025 // 2)
    for scheme, peak in (("bf16", 989.4e12), ("awq", 989.4e12), ("fp8", 1978.9e12)):
        _, found = of("llama-3-8b", "h100", scheme)
        assert found is not None
        expected = products / (0.6 * peak) + beside / (0.6 * 989.4e12)
        assert found.prompt.compute_s == pytest.approx(expected)
        assert found.prompt.seconds == pytest.approx(expected + 1e-3)
        assert found.prompt.bound == "operations"


def test_fp8_is_bytes_alone_where_a_gpu_does_not_multiply_it():
    _, floats = of("llama-3-8b", "a100")
    _, fp8 = of("llama-3-8b", "a100", "fp8")
    _, int8 = of("llama-3-8b", "a100", "smoothquant")
    assert floats is not None and fp8 is not None and int8 is not None
    assert fp8.prompt.compute_s == pytest.approx(floats.prompt.compute_s)
    assert int8.prompt.compute_s < 0.52 * floats.prompt.compute_s


def test_an_answer_is_its_prompt_and_steps_with_the_prompts_of_others():
    _, found = of("llama-3-8b", "h100", "bf16", p99=4.0)
    assert found is not None
    batch = found.batch
    # Of each of the others one prompt in 255 steps, whose operations are beside the decodes'.
    prompts = (batch - 1) / 255
    rows = batch + prompts * 1024
    assert rows == pytest.approx(119 + 473.85, abs=0.01)
    attended = batch * 32 * 1153 + prompts * 32 * (1024 * 1025 // 2)
    sampled = batch + prompts
    operations = 2 * (LAYERS_8B * rows + HEAD_8B * sampled) + 4 * 32 * 128 * attended
    assert found.mixed.compute_s == pytest.approx(operations / (0.6 * 989.4e12))
    assert found.mixed.bound == "operations"
    answer = found.prompt.seconds + 255 * (found.mixed.compute_s + 1e-3)
    assert found.answer_s == pytest.approx(answer)
    assert found.tokens_per_second == pytest.approx(batch * 256 / answer)
    assert found.answer_s <= 4 and found.keeps_p99
    # One more has its operations too: a prompt's, and those of 255 tokens.
    more = 2 * LAYERS_8B * (1024 + 255) / (0.6 * 989.4e12)
    assert found.answer_s + more > 4


def test_a_lone_answer_has_nothing_beside():
    _, found = of("llama-3-8b", "h100", p99=1.73)
    assert found is not None
    assert found.batch == 1 and found.mixed == found.decode
    alone = found.prompt.seconds + 255 * found.decode.seconds
    assert found.answer_s == pytest.approx(alone) == pytest.approx(found.alone_s)


def test_a_single_token_needs_no_step():
    _, found = of("llama-3-8b", "h100", output_len=1, p99=1.0)
    assert found is not None
    assert found.answer_s == pytest.approx(found.batch * found.prompt.seconds)


def test_chunks_hold_the_prompts_that_begin():
    question = Question("llama-3-8b", "h100")
    # 100 decodes and 398 tokens of prompts in a step; 311 and 1,245; more than a step may have.
    assert scheduler_for(question, 100).prefill_chunk_size == 512
    assert scheduler_for(question, 311).prefill_chunk_size == 2048
    assert scheduler_for(replace(question, output_len=2), 300).prefill_chunk_size == 8192


def test_all_reduces_of_tensor_parallelism():
    _, found = of("llama-3-70b", "h100", "fp8", gpus=2, p99=4.12)
    assert found is not None
    assert found.batch == 1
    read = LAYERS_70B + 2 * HEAD_70B + 1153 * KV_70B
    reduce = 2 * 80 * (10e-6 + 2 * (1 / 2) * 8192 * 2 / 450e9)
    expected = read / (2 * 0.8 * 3.35e12) + reduce + 1e-3
    assert found.decode.seconds == pytest.approx(expected)


def test_heads_say_how_many_devices_may_share():
    assert sizes(Question("m", "h100"), find("llama-3-8b")) == [1, 2, 4, 8]
    assert sizes(Question("m", "h100"), find("smollm2-135m")) == [1, 3]
    assert sizes(Question("m", "cpu"), find("llama-3-8b")) == [1]
    assert sizes(Question("m", "h100", gpus=2), find("llama-3-8b")) == [2]
    with pytest.raises(ConfigError, match="divisors of the 32 heads"):
        advise_on(Question("llama-3-8b", "h100", gpus=3))


def test_the_greatest_number_that_holds():
    for answer in range(6):
        assert most_that(lambda n, most=answer: n <= most, 5) == answer
    assert most_that(lambda n: n <= 9, 5) == 5


def test_how_many_devices_a_scheme_gets():
    def on(gpus: int, p99: float) -> Estimate:
        _, found = of("llama-3-8b", "l4", gpus=gpus, p99=p99)
        assert found is not None
        return found

    tried = [on(gpus, 60.0) for gpus in (1, 2, 4, 8)]
    assert best_size("latency", tried) is tried[0]
    # On one there is hardly room beside the weights: each of two does more.
    chosen = best_size("throughput", tried)
    assert chosen.gpus > 1
    assert all(chosen.per_gpu * 1.05 >= other.per_gpu for other in tried)
    assert all(chosen.per_gpu > 1.05 * other.per_gpu for other in tried[: tried.index(chosen)])
    soon = [on(gpus, 8.0) for gpus in (1, 2, 4, 8)]
    assert [each.keeps_p99 for each in soon] == [False, False, True, True]
    assert best_size("latency", soon) is soon[2]
    late = [on(gpus, 0.1) for gpus in (1, 2, 4, 8)]
    assert best_size("throughput", late) is min(late, key=lambda each: each.alone_s)
