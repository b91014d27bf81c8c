"""A tokenizer from a model folder as the Hugging Face hub has them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointFormatError, ModelNotFoundError, UnsupportedModelError
from .tokenizer import Tokenizer

NAMED_TOKENS = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def tokenizer_from_folder(path: str | Path) -> Tokenizer:
    """Read tokenizer.json and the files beside it that say how to use it.

    Those are tokenizer_config.json, special_tokens_map.json, chat_template.jinja or .json,
    additional_chat_templates/, generation_config.json and config.json (end-of-sequence ids).

    Raises:
        ModelNotFoundError: there is no tokenizer in the folder.
        UnsupportedModelError: there is one of a kind that is not read.
        CheckpointFormatError: a file is not what its name says.
    """
    folder = Path(path)
    backend = _backend(folder)
    declared = _read(folder / "tokenizer_config.json")
    config = _named(folder / "special_tokens_map.json")
    config |= {name: value for name, value in declared.items() if value is not None}
    tokens = {name: _content(config[name]) for name in NAMED_TOKENS if name in config}
    extra = config.get("extra_special_tokens") or {}
    if isinstance(extra, dict):
        tokens |= {name: _content(value) for name, value in extra.items()}
    _add_tokens(backend, config, tokens.values())
    bos = _token_id(backend, tokens.get("bos_token"))
    prefix, suffix = _affixes(backend, config, bos, _token_id(backend, tokens.get("eos_token")))
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=_eos_ids(folder, backend, tokens.get("eos_token")),
        prefix=prefix,
        suffix=suffix,
        chat_templates=_chat_templates(folder, config),
        template_variables=tokens,
    )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        others = [p.name for p in folder.glob("*") if p.name in _OTHER_FORMATS]
        if others:
            raise UnsupportedModelError(
                f"{folder} has its tokenizer as {', '.join(sorted(others))} only; expected "
                "tokenizer.json (transformers' save_pretrained writes it)"
            )
        raise ModelNotFoundError(f"{folder} has no tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises plain Exception for every way that a file can be wrong.
        raise CheckpointFormatError(f"{file} is not a tokenizer: {error}") from error


_OTHER_FORMATS = {"tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt"}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointFormatError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(f"{file} holds no JSON object")
    return content


def _named(file: Path) -> dict[str, Any]:
    return {name: value for name, value in _read(file).items() if name in NAMED_TOKENS}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: Iterable[str]
) -> None:
    """Declare what tokenizer_config.json adds to, or says otherwise than, tokenizer.json."""
    known = backend.get_added_tokens_decoder()
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    declared = config.get("added_tokens_decoder") or {}
    for token_id, spec in sorted(declared.items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(
            spec["content"], **{flag: spec[flag] for flag in flags if flag in spec}
        )
        if repr(known.get(int(token_id))) != repr(token):
            backend.add_tokens([token])
    extra = config.get("additional_special_tokens") or []
    listed = config.get("extra_special_tokens")
    extra = [*extra, *(listed if isinstance(listed, list) else [])]
    known_special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for text in [*special, *map(_content, extra)]:
        if text not in known_special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False)])


def _affixes(
    backend: tokenizers.Tokenizer, config: dict[str, Any], bos: int | None, eos: int | None
) -> tuple[list[int], list[int]]:
    """Ids that stand before and after a text.

    The flags of tokenizer_config.json overrule tokenizer.json, as in transformers 5: a
    model's owner edits them without knowing the other's template.
    """
    if "add_bos_token" in config or "add_eos_token" in config:
        prefix = [bos] if config.get("add_bos_token") and bos is not None else []
        suffix = [eos] if config.get("add_eos_token") and eos is not None else []
        return prefix, suffix
    if backend.post_processor is None:
        return [], []
    return _template(json.loads(backend.post_processor.__getstate__()))


def _template(spec: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids before and after a text that a post-processor of `tokenizers` writes."""
    kind = spec["type"]
    if kind == "ByteLevel":
        return [], []
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [spec["cls"][1]], [spec["sep"][1]]
    prefix: list[int] = []
    suffix: list[int] = []
    if kind == "Sequence":
        for before, after in map(_template, spec["processors"]):
            prefix, suffix = before + prefix, suffix + after
        return prefix, suffix
    side = prefix
    for item in spec["single"]:
        if "Sequence" in item:
            side = suffix
        else:
            side += spec["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    return prefix, suffix


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, token: str | None) -> set[int]:
    """The union of all that the files declare."""
    declared = [_token_id(backend, token)]
    named = _named(folder / "special_tokens_map.json").get("eos_token")
    declared.append(_token_id(backend, _content(named) if named else None))
    for name in ("generation_config.json", "config.json"):
        config = _read(folder / name)
        for section in (config, config.get("text_config") or {}):
            ids = section.get("eos_token_id")
            declared += ids if isinstance(ids, list) else [ids]
    return {token_id for token_id in declared if token_id is not None}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Jinja source by name; a file of its own overrules tokenizer_config.json."""
    declared = config.get("chat_template") or {}
    if isinstance(declared, str):
        declared = {"default": declared}
    elif isinstance(declared, list):
        declared = {entry["name"]: entry["template"] for entry in declared}
    templates = dict(declared)
    legacy = _read(folder / "chat_template.json").get("chat_template")
    if legacy:
        templates["default"] = legacy
    files = {"default": folder / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    return templates | {
        name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
    }
