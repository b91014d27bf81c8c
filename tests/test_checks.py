"""Options and parameters of the wrong type: refused by name, with what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmjax.checks import cut, shown
from llmjax.config import EngineConfig, SchedulerConfig
from llmjax.errors import ConfigError, InvalidRequestError
from llmjax.request import SamplingParams, longest
from llmjax_serving.config import ServerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model is None, allowed: a string"),
        ({"model": 5}, "model is 5, allowed: a string"),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4', allowed: an integer"),
        ({"max_num_seqs": 4.0}, "max_num_seqs is 4.0, allowed: an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True, allowed: an integer"),
        ({"max_model_len": "1k"}, "max_model_len is '1k', allowed: an integer or None"),
        ({"dtype": None}, "dtype is None, allowed: a string"),
        ({"seed": 1.5}, "seed is 1.5, allowed: an integer or None"),
        ({"block_size": None}, "block_size is None, allowed: an integer"),
        ({"gpu_memory_utilization": "0.5"}, "is '0.5', allowed: a number or None"),
        ({"max_paddings": [0.1]}, r"max_paddings is \[0.1\], allowed: a number"),
        ({"forecast_margin": -1}, "forecast_margin is -1, allowed: 0 to 100, or none"),
        ({"background": "yes"}, "background is 'yes', allowed: True or False"),
        ({"background": 1}, "background is 1, allowed: True or False"),
        ({"token_buckets": 32}, "token_buckets is 32, allowed: a list of integers or None"),
        ({"token_buckets": (32, "x")}, "allowed: a list of integers or None"),
        ({"chat_template": 5}, "chat_template is 5, allowed: a string or None"),
        ({"max_logprobs": None}, "max_logprobs is None, allowed: an integer"),
        ({"max_num_seqs": "x" * 1000}, r"x\.\.\., allowed: an integer$"),
    ],
)
def test_options(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**{"model": "m", **options})


def test_server_options():
    with pytest.raises(ConfigError, match="port is '80', allowed: an integer"):
        ServerConfig(port="80")
    with pytest.raises(ConfigError, match=r"allowed_origins is '\*', allowed: a list of strings"):
        ServerConfig(allowed_origins="*")
    with pytest.raises(ConfigError, match="scheduler is 5, allowed: a SchedulerConfig"):
        EngineConfig(model=EngineConfig.of("m").model, scheduler=5)


def test_what_stands_for_the_type_is_taken():
    config = EngineConfig.of(Path("a/b"), token_buckets=[32], max_paddings=0, seed=None)
    assert config.model.model == "a/b"
    assert config.scheduler == SchedulerConfig(max_paddings=0)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"stop": 5}, "a string, a list of strings or None"),
        ({"stop": [5]}, "a string, a list of strings or None"),
        ({"stop_token_ids": 5}, "a list of integers or None"),
        ({"stop_token_ids": ["a"]}, "a list of integers or None"),
        ({"logit_bias": [1]}, "a dict from integers to numbers or None"),
        ({"logit_bias": {"5": 1.0}}, "a dict from integers to numbers or None"),
        ({"logit_bias": {5: "x"}}, "a dict from integers to numbers or None"),
        ({"temperature": "hot"}, "a number"),
        ({"temperature": None}, "a number"),
        ({"temperature": True}, "a number"),
        ({"top_p": [1]}, "a number"),
        ({"top_k": 1.5}, "an integer"),
        ({"n": None}, "an integer"),
        ({"max_tokens": "8"}, "an integer or None"),
        ({"seed": "x"}, "an integer or None"),
        ({"ignore_eos": 1}, "True or False"),
    ],
)
def test_sampling_parameters(params, allowed):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)
    ((name, value),) = params.items()
    assert str(caught.value) == f"{name} is {value!r}, allowed: {allowed}"
    assert caught.value.param == name


def test_values_out_of_range_are_quoted_in_part():
    with pytest.raises(InvalidRequestError, match="seed is <int>, allowed: an integer from"):
        SamplingParams(seed=10**5000)
    with pytest.raises(InvalidRequestError, match=r"stop is \('', '', .*\.\.\., allowed: up to 64"):
        SamplingParams(stop=[""] * 1000)
    for value in (float("nan"), float("inf"), 10**400):
        with pytest.raises(InvalidRequestError, match="temperature is "):
            SamplingParams(temperature=value)


def test_quotes_are_short():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    assert shown(Broken()) == "<Broken>"
    assert len(shown(["x" * 1000] * 1000)) == len(cut("x" * 1000)) == 80
    assert cut("x" * 80) == "x" * 80


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "ends"), [(1, None, 10), (9, None, 10), (9, 1, 10), (3, 4, 7)]
)
def test_what_fits_the_context(prompt_len, max_tokens, ends):
    assert longest(prompt_len, max_tokens, 10) == ends


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "param", "message"),
    [
        (0, None, "messages", "empty prompt"),
        (10, None, "messages", "10 tokens and at least 1 are asked for, together 11; .* holds 10"),
        (10, 1, "messages", "10 tokens and 1 are asked for, together 11"),
        (9, 2, "max_tokens", "9 tokens and 2 are asked for, together 11"),
    ],
)
def test_what_does_not_fit_the_context(prompt_len, max_tokens, param, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        longest(prompt_len, max_tokens, 10, param="messages")
    assert caught.value.param == param
    assert caught.value.code == ("context_length_exceeded" if prompt_len else None)
