"""Bound outputs in the tokens of tokenizers that change a text before they split it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llmjax import SamplingParams, StructuredOutputs
from llmjax.structured import GrammarCompiler, fill_masks
from llmjax.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CASES = {
    "json": ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "n"}),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "abc[0-9]{2,4}Z"}, lambda text: re.fullmatch("abc[0-9]{2,4}Z", text)),
    "choice": ({"choice": ['{"a": 1}', "Ab c"]}, lambda text: text in ('{"a": 1}', "Ab c")),
}


def with_space_first() -> Tokenizer:
    """As Llama 2's: a space before all text, and bytes where there is no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    tokens += list('abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-')
    tokens += ['▁"', '":', "▁{", '▁{"', '{"']
    merges = [("▁", '"'), ('"', ":"), ("▁", "{"), ("▁{", '"'), ("{", '"')]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=[2])


def bytes_of(normalizer=None, space_first=False) -> Tokenizer:
    tokens = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_first)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_token_ids=[0])


TOKENIZERS = {
    "a space first": with_space_first,
    "bytes, a space first": lambda: bytes_of(space_first=True),
    "small letters": lambda: bytes_of(normalizers.Lowercase()),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("text", ["", "{", '{"name":', "Ab c", " a", "é\n", "ab" * 50])
def test_a_text_within_another_is_spelled_as_it_is(tokenizer, text):
    ids = tokenizer.encode_within(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert len(ids) <= len(text.encode())


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_what_they_must_be(tokenizer, name):
    wanted, is_right = CASES[name]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    params = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    rules = compiler.compile(params).result()
    compiler.close()
    [eos] = tokenizer.eos_token_ids
    for seed in range(6):
        rng, said = np.random.default_rng(seed), []
        constraint = rules.start(160)
        while len(said) < 160 and not constraint.is_complete:
            mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
            fill_masks(mask, [(0, constraint)], parallel=False)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            token = int(rng.choice(allowed))
            constraint.accept(token)
            if token == eos:
                break
            said.append(token)
        text = b"".join(map(tokenizer.token_bytes, said)).decode(errors="replace")
        assert is_right(text), text
