"""How many pages there are: what weights and the largest step, as compiled, leave."""

from __future__ import annotations

import re

import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import CacheConfig
from llmjax.engine import memory, setup
from llmjax.engine.step import temporaries_of
from llmjax.errors import ConfigError

LIMIT = 1_400_000
GIB = 2**30
SIZES = {
    "max_model_len": 256,
    "block_size": 16,
    "max_num_seqs": 8,
    "token_buckets": (16, 64),
    "seq_buckets": (8,),
    "prefill_chunk_size": 32,
    "max_num_batched_tokens": 64,
    "background": False,
    "dtype": "float32",
}


@pytest.fixture
def own_memory(monkeypatch):
    """As on an accelerator: XLA serves, and the device says how much it has."""
    monkeypatch.setenv("LLMJAX_KERNELS", "xla")

    def limit(size):
        monkeypatch.setattr(memory, "_bytes_limit", lambda: size)

    return limit


# Of 48 steps as one the results take more than the largest step does.
@pytest.mark.parametrize("options", [{}, {"num_scheduler_steps": 48, "max_logprobs": 200}])
def test_pages_are_what_weights_and_the_compiled_step_leave(tiny_model, own_memory, options):
    own_memory(LIMIT)
    with LLM(str(tiny_model), gpu_memory_utilization=0.9, **SIZES, **options) as llm:
        engine = llm.engine
        # The programs that run, with all the pages there are, need no more than was planned for.
        ready = [engine.runner.programs[bucket] for bucket in engine.buckets.ready]
        most = max(map(temporaries_of, ready))
        pool = engine.num_pages * engine.page_bytes
        taken = engine.model.weight_bytes + pool + most
        assert 0.9 * LIMIT - engine.page_bytes < taken <= 0.9 * LIMIT
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        assert len(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids) == 5


def test_a_device_too_small_says_what_takes_how_much(tiny_model, own_memory):
    own_memory(LIMIT // 8)
    with pytest.raises(ConfigError, match="no memory is left for KV pages") as error:
        LLM(str(tiny_model), **SIZES)
    assert re.search(r"0\.9 of .* of weights and .* of a step's temporaries", str(error.value))


@pytest.mark.parametrize("pages", [99_999_999_999, 100_000_000])
def test_pages_that_memory_does_not_hold_are_refused(tiny_model, monkeypatch, pages):
    monkeypatch.setattr(memory, "total_bytes", lambda: GIB)
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_model), num_gpu_blocks_override=pages, **SIZES)
    found = re.fullmatch(
        r"num_gpu_blocks_override is (\d+), which takes (\d+) GiB, allowed: up to (\d+), as of "
        r"1\.00 GiB of memory weights take 0\.00 GiB",
        str(error.value),
    )
    assert found is not None, error.value
    asked, takes, most = map(int, found.groups())
    assert asked == pages and most < pages
    assert takes == pytest.approx(pages / most, rel=0.01)  # of one GiB, but for the weights


def test_as_many_pages_as_the_device_holds_are_allowed(tiny_model, own_memory):
    own_memory(LIMIT)
    with pytest.raises(ConfigError, match=r"allowed: up to \d+") as error:
        LLM(str(tiny_model), num_gpu_blocks_override=10**6, **SIZES)
    most = int(re.search(r"up to (\d+)", str(error.value))[1])
    with LLM(str(tiny_model), num_gpu_blocks_override=most, **SIZES) as llm:
        engine = llm.engine
        taken = engine.model.weight_bytes + most * engine.page_bytes
        assert LIMIT - engine.page_bytes < taken <= LIMIT
    with pytest.raises(ConfigError, match=f"num_gpu_blocks_override is {most + 1}, which takes"):
        LLM(str(tiny_model), num_gpu_blocks_override=most + 1, **SIZES)


@pytest.mark.parametrize(
    ("options", "asked", "how"),
    [
        ({"swap_space": 1e5}, "swap_space is 100000.0 GiB", ""),
        ({"kv_offloading_size": 1e5}, "kv_offloading_size is 100000.0 GiB", ""),
        (
            {"swap_space": 0.75, "kv_offloading_size": 0.5},
            "swap_space is 0.75 GiB and kv_offloading_size is 0.5 GiB",
            " together",
        ),
    ],
)
def test_host_memory_that_there_is_not_is_refused_before_weights_are_loaded(
    tiny_model, monkeypatch, options, asked, how
):
    monkeypatch.setattr(memory, "total_bytes", lambda: GIB)
    monkeypatch.setattr(setup, "load_model", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_model), **SIZES, **options)
    assert str(error.value) == f"{asked}, allowed: up to 1.00 GiB{how}, the host's memory"


def test_the_default_swap_space_is_no_more_than_there_is(monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda: GIB)
    assert memory.host_space(CacheConfig()) == (1.0, 0.0)
    assert memory.host_space(CacheConfig(kv_offloading_size=0.75)) == (0.25, 0.75)
    assert memory.host_space(CacheConfig(swap_space=0.5, kv_offloading_size=0.5)) == (0.5, 0.5)
    monkeypatch.setattr(memory, "total_bytes", lambda: 64 * GIB)
    assert memory.host_space(CacheConfig()) == (4.0, 0.0)


def test_an_engine_starts_where_the_host_has_less_than_the_default_swap_space(
    tiny_model, monkeypatch
):
    monkeypatch.setattr(memory, "total_bytes", lambda: GIB // 8)
    with LLM(str(tiny_model), num_gpu_blocks_override=60, **SIZES) as llm:
        assert llm.engine.host.num_slots == GIB // 8 // llm.engine.page_bytes
