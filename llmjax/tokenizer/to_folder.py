"""A tokenizer as a model folder of the Hugging Face hub has it."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import processors

from .from_folder import NAMED_TOKENS
from .tokenizer import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat templates, which
    `tokenizer_from_folder` and transformers read; ids that end a text are generation_config.json's.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if tokenizer.prefix or tokenizer.suffix:
        backend.post_processor = _template(tokenizer)
    backend.save(str(folder / "tokenizer.json"))
    variables = tokenizer.template_variables
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {name: variables[name] for name in NAMED_TOKENS if name in variables}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    for name, source in tokenizer.chat_templates.items():
        file = folder / "chat_template.jinja"
        if name != "default":
            file = folder / "additional_chat_templates" / f"{name}.jinja"
            file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8")


def _template(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    ids = dict.fromkeys([*tokenizer.prefix, *tokenizer.suffix])
    names = {i: tokenizer.backend.id_to_token(i) for i in ids}
    before, after = ([names[i] for i in part] for part in (tokenizer.prefix, tokenizer.suffix))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(name, i) for i, name in names.items()],
    )
