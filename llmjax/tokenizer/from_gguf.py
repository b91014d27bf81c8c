"""A tokenizer from the metadata of a GGUF file, with the ids that llama.cpp gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ..errors import CheckpointFormatError, UnsupportedModelError
from . import pre_tokenizers as named
from .scored_merges import merges_by_score
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SPACE = "\u2581"

END_OF_GENERATION = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> "  # noqa: SIM905
    "<end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> "
    "<end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ "
    # Fill in the middle: padding, and the start of another file or repository.
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
"""What ends a generation, by its text, as in llama.cpp: files declare one or two ids at best."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Family(NamedTuple):
    """A `tokenizer.ggml.model`, and what holds where a file does not say."""

    build: Callable[[_Vocabulary], tokenizers.Tokenizer]
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None


class _Vocabulary:
    """The `tokenizer.*` entries of a GGUF file.

    Attributes:
        tokens: text of each id; `ids` is its inverse.
        types: `TokenType` of each id.
        ends: ids that end a generation.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self.model = metadata.get("tokenizer.ggml.model")
        if self.model not in _FAMILIES:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model is {self.model!r}; supported: {', '.join(_FAMILIES)}"
            )
        self.family = _FAMILIES[self.model]
        self.tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(self.get("tokens", ()))]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens) or not self.tokens:
            raise CheckpointFormatError("tokenizer.ggml.tokens is missing or lists a token twice")
        self.types = self.array("token_type") or [TokenType.NORMAL] * len(self.tokens)
        self.bos = self.id("bos", self.family.bos)
        self.eos = self.id("eos", self.family.eos)
        self.unknown = self.id("unknown", self.family.unknown)
        self.ends = self._ends()

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def array(self, key: str) -> list[Any]:
        """An array with an entry a token; empty where the file has none."""
        values = list(self.get(key, ()))
        if values and len(values) != len(self.tokens):
            raise CheckpointFormatError(
                f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens"
            )
        return values

    def id(self, name: str, default: int | None = None) -> int | None:
        """A special token's id; writers put an id out of range for none."""
        for value in (self.get(f"{name}_token_id"), default):
            if value is not None and 0 <= value < len(self.tokens):
                return int(value)
        return None

    @cached_property
    def cut(self) -> named.PreTokenizer:
        name = self.get("pre")
        if name is None:
            logger.warning("the GGUF file names no pre-tokenizer; 'default' may be wrong")
        return named.find(name or "default")

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def _ends(self) -> set[int]:
        # llama.cpp takes ordinary tokens for these too; but </s> is a tag of HTML to Qwen.
        ends = {
            text
            for text in END_OF_GENERATION & self.ids.keys()
            if "|" in text or self.types[self.ids[text]] != TokenType.NORMAL
        }
        # In these vocabularies <|end|> ends a message, not a turn, and </s> is plain text.
        if ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
            ends -= {"<|end|>"}
        if "<|tool_response>" in ends:
            ends -= {"</s>"}
        declared = {self.eos, self.id("eot"), self.id("eom")} - {None}
        return {self.ids[text] for text in ends} | declared  # type: ignore[operator]

    def require(self, name: str, token_id: int | None) -> int:
        if token_id is None:
            raise CheckpointFormatError(
                f"tokenizer.ggml.{name}_token_id is missing or out of range, but texts need it"
            )
        return token_id


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Args:
        metadata: key -> value of the whole file, arrays as lists.

    Raises:
        UnsupportedModelError: `tokenizer.ggml.model` or `.pre` is not known; lists those
            that are.
        CheckpointFormatError: entries are missing or contradict each other.
    """
    vocabulary = _Vocabulary(metadata)
    try:
        backend = vocabulary.family.build(vocabulary)
    except (UnsupportedModelError, CheckpointFormatError):
        raise
    except Exception as error:
        # The library raises plain Exception for every contradiction it finds.
        raise CheckpointFormatError(f"the tokenizer in the GGUF file is broken: {error}") from error
    _add_tokens(backend, vocabulary, metadata.get("general.name", ""))
    prefix, suffix = _affixes(vocabulary)
    names = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unk": vocabulary.unknown}
    names["pad"] = vocabulary.id("padding")
    return Tokenizer(
        backend,
        bos_token_id=vocabulary.bos,
        eos_token_ids=vocabulary.ends,
        prefix=prefix,
        suffix=suffix,
        chat_templates=_chat_templates(metadata),
        template_variables={
            f"{name}_token": vocabulary.tokens[i] for name, i in names.items() if i is not None
        },
    )


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    cut = vocabulary.cut
    merges = [_pair(merge) for merge in vocabulary.get("merges", ())]
    model = models.BPE(vocabulary.ids, merges, ignore_merges=cut.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = named.build(cut)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")
    if not space:
        raise CheckpointFormatError(f"tokenizer.ggml.merges has {merge!r}, not two parts")
    return merge[0] + left, right


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    merges = [_pair(merge) for merge in vocabulary.get("merges", ())]
    model = models.BPE(
        vocabulary.ids,
        merges or _merges_by_score(vocabulary),
        unk_token=vocabulary.text(vocabulary.unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    if vocabulary.get("add_space_prefix", True):
        prepend = normalizers.Prepend(_SPACE)
        backend.normalizer = normalizers.Sequence([prepend, backend.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    scores = vocabulary.array("scores")
    if not scores:
        raise CheckpointFormatError("tokenizer.ggml.scores is missing")
    inner = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
    return merges_by_score(vocabulary.tokens, scores, ~np.isin(vocabulary.types, inner))


def _wordpiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """GGUF marks the start of words; WordPiece marks what continues them."""

    def spelling(token: str, kind: int) -> str:
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token[0] + token[-1] == "[]":
            return token
        return token[1:] if token[0] == _SPACE else "##" + token

    zipped = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ids = {spelling(t, k): i for i, (t, k) in enumerate(zipped)}
    unknown = vocabulary.text(vocabulary.unknown) or "[UNK]"
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    lowercase = vocabulary.get("normalizer.lowercase", True)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=vocabulary.get("normalizer.strip_accents", lowercase)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


_FAMILIES = {
    "gpt2": _Family(_byte_level),
    "llama": _Family(_sentencepiece, bos=1, eos=2, unknown=0),
    "bert": _Family(_wordpiece, bos=101, unknown=100),
}


def _affixes(vocabulary: _Vocabulary) -> tuple[list[int], list[int]]:
    """Ids before and after a text."""
    if vocabulary.model == "bert":
        separator = vocabulary.id("seperator", 102)  # GGUF's own spelling
        return [vocabulary.require("bos", vocabulary.bos)], [
            vocabulary.require("seperator", separator)
        ]
    add_bos = vocabulary.model == "llama" or vocabulary.cut.add_bos
    prefix, suffix = [], []
    if vocabulary.get("add_bos_token", add_bos):
        prefix = [vocabulary.require("bos", vocabulary.bos)]
    if vocabulary.get("add_eos_token", False):
        suffix = [vocabulary.require("eos", vocabulary.eos)]
    return prefix, suffix


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, model_name: str) -> None:
    """Declare what is found whole in a text before anything else."""
    # Phi-3 files do not carry what its tokenizer.json says: no space after these counts.
    swallows = any(name in model_name.lower() for name in ("phi-3", "phi3"))
    spares = {"<unk>", "<s>", "<|endoftext|>"}
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    marked = np.flatnonzero(np.isin(vocabulary.types, kinds)).tolist()
    added = []
    for token_id in sorted(vocabulary.ends.union(marked)):
        text, kind = vocabulary.tokens[token_id], vocabulary.types[token_id]
        special = kind != TokenType.USER_DEFINED or token_id in vocabulary.ends
        rstrip = swallows and text not in spares
        added.append(tokenizers.AddedToken(text, rstrip=rstrip, normalized=False, special=special))
    backend.add_tokens(added)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(key + "."): metadata[name]
        for name in metadata
        if name.startswith(key + ".")
    }
    return templates | ({"default": metadata[key]} if key in metadata else {})
