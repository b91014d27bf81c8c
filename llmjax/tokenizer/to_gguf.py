"""A tokenizer as the metadata of a GGUF file has it: the inverse of `from_gguf`.

Byte-level BPE becomes "gpt2" with its merges and the name of how it cuts text; BPE over characters
with bytes to fall back on, which is what SentencePiece's becomes, becomes "llama" with scores.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from ..errors import LlmjaxError, UnsupportedModelError
from .from_gguf import END_OF_GENERATION, TokenType, tokenizer_from_gguf
from .pre_tokenizers import GPT2, name_of
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_NO_MERGE = -1e6
"""The score of what no merge makes, so that it is made last."""

_PROBES = (
    "Hello, world! It's 12345 o'clock; we'll see.",
    "  two spaces\n\n\tand a tab, 3.14 + 2,718 = x_y(z)[0]  ",
    "def f(x):\n    return x ** 2  # caf\u00e9 na\u00efve \u20ac5",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155 "
    "\u043f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600\U0001f469\u200d\U0001f4bb emoji, URL https://example.org/a?b=c&d=%20",
    "I'M HERE'S aBcDe WORD2VEC 1st 22nd\r\n\r\nend",
)
"""Texts that a file must be read to have the same ids for."""


def gguf_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.*` keys; lists are of one type each.

    Args:
        vocab_size: ids that the model has a row for; the file lists as many tokens.

    Raises:
        UnsupportedModelError: GGUF has no such tokenizer; says what it is about this one.
    """
    spec = json.loads(tokenizer.backend.to_str())
    if spec["model"]["type"] != "BPE":
        raise _unsupported(f"its model is {spec['model']['type']}, allowed: BPE")
    vocabulary = _Vocabulary(tokenizer, spec, vocab_size)
    keys = _byte_level(vocabulary) if _is_byte_level(spec) else _sentencepiece(vocabulary)
    keys |= {"tokens": vocabulary.tokens, "token_type": vocabulary.types}
    keys |= _special_ids(tokenizer, vocab_size) | _affixes(tokenizer)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata |= _chat_templates(tokenizer)
    _require_alike(tokenizer, metadata, vocab_size)
    return metadata


def _unsupported(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the tokenizer cannot be written as GGUF: {why}")


class _Vocabulary:
    """Tokens by id.

    Attributes:
        tokens, types: as long as the model's vocabulary; ids of no token are "[PAD5]".
        spec: tokenizer.json's content.
    """

    def __init__(self, tokenizer: Tokenizer, spec: Mapping[str, Any], vocab_size: int):
        self.spec = spec
        self.tokens = [f"[PAD{i}]" for i in range(vocab_size)]
        self.types = [int(TokenType.UNUSED)] * vocab_size
        for text, i in spec["model"]["vocab"].items():
            if i < vocab_size:
                self.tokens[i], self.types[i] = text, TokenType.NORMAL
        odd = []
        for i, token in tokenizer.backend.get_added_tokens_decoder().items():
            if i < vocab_size:
                kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
                self.tokens[i], self.types[i] = token.content, kind
                odd += [token.content] if token.lstrip or token.rstrip or token.single_word else []
        if odd:
            some = ", ".join(odd[:5])
            log.warning("GGUF does not say that spaces beside these tokens are their own: %s", some)
        self.types = [int(kind) for kind in self.types]

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs; a tokenizer.json may have them in one string each."""
        found = self.spec["model"]["merges"]
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in found)
        return [(left, right) for left, right in pairs]


def _flat(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[inner] for step in _flat(one, inner)]
    return [part]


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    steps = _flat(spec["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    spec = vocabulary.spec
    # NFC changes no text that is composed already, and llama.cpp's readers have no normaliser.
    for step in _flat(spec["normalizer"], "normalizers"):
        if step["type"] != "NFC":
            raise _unsupported(f"it normalises by {step['type']}, allowed: NFC, or nothing")
    patterns = tuple(
        pattern
        for step in _flat(spec["pre_tokenizer"], "pretokenizers")
        for pattern in _patterns(step)
    )
    name = name_of(patterns, bool(spec["model"].get("ignore_merges")))
    if name is None:
        raise _unsupported(f"no tokenizer.ggml.pre is known that cuts text by {patterns}")
    merges = [f"{left} {right}" for left, right in vocabulary.merges]
    if not merges:
        raise _unsupported("it has no merges, without which llama.cpp does not read it")
    return {"model": "gpt2", "pre": name, "merges": merges}


def _patterns(step: Mapping[str, Any]) -> list[str]:
    """The regular expressions of one step."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
            return [GPT2] if regex else []
        case {"type": "Digits", "individual_digits": single}:
            return [r"\p{N}" if single else r"\p{N}+"]
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
            return [regex]
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Removed", "invert": True}:
            return [regex]
    raise _unsupported(f"it cuts text by {dict(step)}")


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    spec = vocabulary.spec
    if not spec["model"].get("byte_fallback"):
        raise _unsupported("it is BPE neither over bytes nor with bytes to fall back on")
    unknown = spec["model"].get("unk_token")
    for i, text in enumerate(vocabulary.tokens):
        if text == unknown:
            vocabulary.types[i] = int(TokenType.UNKNOWN)
        elif _BYTE.fullmatch(text):
            vocabulary.types[i] = int(TokenType.BYTE)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(vocabulary.merges):
        ranks.setdefault(left + right, rank)
    normal = int(TokenType.NORMAL)
    scores = [
        0.0 if kind != normal else float(-ranks[text]) if text in ranks else _NO_MERGE
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    return {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "add_space_prefix": _adds_space(spec),
    }


def _adds_space(spec: Mapping[str, Any]) -> bool:
    """Whether a text gets a space in front; every space becomes the character for it."""
    adds = marks = False
    for step in _flat(spec["normalizer"], "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": char} if char == _SPACE:
                adds = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": char} if char == _SPACE:
                marks = True
            case _:
                raise _unsupported(f"it normalises by {dict(step)}")
    for step in _flat(spec["pre_tokenizer"], "pretokenizers"):
        match step:
            case {"type": "Metaspace", "replacement": char} if char == _SPACE:
                adds, marks = adds or step.get("prepend_scheme") != "never", True
            case {"type": "Split", "pattern": {"String": " "}}:
                pass  # of Gemma: no space is left by then
            case _:
                raise _unsupported(f"it cuts text by {dict(step)}")
    if not marks:
        raise _unsupported("it does not turn spaces into U+2581")
    return adds


def _special_ids(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    names = {"eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    ids: dict[str, int] = {}
    if tokenizer.bos_token_id is not None:
        ids["bos_token_id"] = tokenizer.bos_token_id
    for ours, theirs in names.items():
        text = tokenizer.template_variables.get(f"{ours}_token")
        found = None if text is None else tokenizer.backend.token_to_id(text)
        if found is not None:
            ids[f"{theirs}_token_id"] = found
    # What ends a generation by its text needs no entry.
    ends = sorted(
        i
        for i in tokenizer.eos_token_ids - {ids.get("eos_token_id")}
        if tokenizer.backend.id_to_token(i) not in END_OF_GENERATION
    )
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        if name not in ids and ends:
            ids[name] = ends.pop(0)
    return {name: i for name, i in ids.items() if i < vocab_size}


def _affixes(tokenizer: Tokenizer) -> dict[str, bool]:
    """What stands before and after a text."""
    eos = tokenizer.backend.token_to_id(tokenizer.template_variables.get("eos_token", ""))
    prefix, suffix = tokenizer.prefix, tokenizer.suffix
    if prefix not in ([], [tokenizer.bos_token_id]) or suffix not in ([], [eos]):
        raise _unsupported(
            f"texts begin with the ids {prefix} and end with {suffix}, allowed: BOS and EOS"
        )
    return {"add_bos_token": bool(prefix), "add_eos_token": bool(suffix)}


def _chat_templates(tokenizer: Tokenizer) -> dict[str, Any]:
    key, templates = "tokenizer.chat_template", tokenizer.chat_templates
    named = {f"{key}.{name}": text for name, text in templates.items() if name != "default"}
    keys: dict[str, Any] = {"tokenizer.chat_templates": sorted(templates.keys() - {"default"})}
    keys = keys | named if named else {}
    return keys | ({key: templates["default"]} if "default" in templates else {})


def _require_alike(tokenizer: Tokenizer, metadata: Mapping[str, Any], vocab_size: int) -> None:
    """Raises where the file would be read to have other ids; says so where it ends otherwise."""
    try:
        found = tokenizer_from_gguf(metadata)
    except LlmjaxError as error:
        raise _unsupported(f"it is not read back: {error}") from error
    for text in _PROBES:
        ours, theirs = tokenizer.encode(text), found.encode(text)
        if ours != theirs and max(ours, default=0) < vocab_size:
            raise _unsupported(f"{text!r} would have the ids {theirs} instead of {ours}")
    lost = sorted(tokenizer.eos_token_ids - found.eos_token_ids)
    if lost:
        log.warning("GGUF has no room for these ids that end a generation: %s", lost)
