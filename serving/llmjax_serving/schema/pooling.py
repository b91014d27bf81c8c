"""The bodies of /v1/embeddings, /score and /rerank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmjax.errors import InvalidRequestError
from llmjax.pooled import POOLING_TASKS

from .completion import prompt_list
from .fields import (
    Field,
    Parse,
    array,
    boolean,
    described,
    integer,
    mapping,
    one_or_list_of,
    read,
    refuse,
    text,
)
from .sampling import Limits, token_ids, truncation

ENCODINGS = ("float", "base64")


@described({"enum": list(ENCODINGS)})
def encoding(value: Any, path: str) -> str:
    if value not in ENCODINGS:
        raise refuse(path, value, " or ".join(ENCODINGS))
    return value


@described({"enum": list(POOLING_TASKS)})
def task(value: Any, path: str) -> str:
    if value not in POOLING_TASKS:
        raise refuse(path, value, ", ".join(POOLING_TASKS))
    return value


@described(
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
                "additionalProperties": False,
            },
        ]
    }
)
def document(value: Any, path: str) -> str:
    """A text, or an object that has it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise refuse(path, value, 'a string, or an object with "text"')
    return read(mapping(value, path), {"text": Field(text, required=True)}, {}, f"{path}.")["text"]


@described({"type": "array", "items": document.__dict__["schema"], "minItems": 1})
def documents(value: Any, path: str) -> list[str]:
    if not array(value, path):
        raise refuse(path, value, "a list of at least one document")
    return [document(item, f"{path}[{i}]") for i, item in enumerate(value)]


_BOTH: dict[str, Field] = {
    "model": Field(text),
    "truncate_prompt_tokens": Field(truncation),
}
EMBEDDING_FIELDS: dict[str, Field] = {
    **_BOTH,
    "input": Field(prompt_list, required=True),
    "encoding_format": Field(encoding, "float"),
    "dimensions": Field(integer(1)),
    "add_special_tokens": Field(boolean, True),
    "prompt_name": Field(text),
}
POOLING_FIELDS: dict[str, Field] = {**EMBEDDING_FIELDS, "task": Field(task)}
SCORE_FIELDS: dict[str, Field] = {
    **_BOTH,
    "text_1": Field(one_or_list_of(text), required=True),
    "text_2": Field(one_or_list_of(text), required=True),
}
RERANK_FIELDS: dict[str, Field] = {
    **_BOTH,
    "query": Field(text, required=True),
    "documents": Field(documents, required=True),
    "top_n": Field(integer(1)),
    "return_documents": Field(boolean, True),
}
POOLING_NO_OPS: dict[str, Parse] = {"user": text}
"""A label that needs no answer."""


@dataclass(frozen=True)
class EmbeddingRequest:
    """Attributes:
    truncate: tokens that stay of a text; -1 is what the model takes.
    """

    model: str | None
    inputs: list[str | list[int]]
    base64: bool
    dimensions: int | None
    truncate: int | None
    add_special_tokens: bool
    prompt_name: str | None


@dataclass(frozen=True)
class ScoreRequest:
    model: str | None
    text_1: list[str]
    text_2: list[str]
    truncate: int | None


@dataclass(frozen=True)
class RerankRequest:
    model: str | None
    query: str
    documents: list[str]
    top_n: int | None
    return_documents: bool
    truncate: int | None


@dataclass(frozen=True)
class PoolingRequest:
    """Attributes:
    task: None is what the model does, of each token where it embeds.
    """

    texts: EmbeddingRequest
    task: str | None

    @property
    def model(self) -> str | None:
        return self.texts.model


def parse_embedding(body: dict[str, Any], limits: Limits) -> EmbeddingRequest:
    """Reads the JSON body of /v1/embeddings. Raises InvalidRequestError."""
    return _embedding(read(body, EMBEDDING_FIELDS, POOLING_NO_OPS), limits)


def parse_pooling(body: dict[str, Any], limits: Limits) -> PoolingRequest:
    """Reads the JSON body of /pooling. Raises InvalidRequestError."""
    values = read(body, POOLING_FIELDS, POOLING_NO_OPS)
    return PoolingRequest(_embedding(values, limits), values["task"])


def _embedding(values: dict[str, Any], limits: Limits) -> EmbeddingRequest:
    _check_count(len(values["input"]), limits, "input")
    return EmbeddingRequest(
        model=values["model"],
        inputs=[
            item if isinstance(item, str) else token_ids(item, limits, "input")
            for item in values["input"]
        ],
        base64=values["encoding_format"] == "base64",
        dimensions=values["dimensions"],
        truncate=values["truncate_prompt_tokens"],
        add_special_tokens=values["add_special_tokens"],
        prompt_name=values["prompt_name"],
    )


def parse_score(body: dict[str, Any], limits: Limits) -> ScoreRequest:
    """Reads the JSON body of /score. Raises InvalidRequestError."""
    values = read(body, SCORE_FIELDS, POOLING_NO_OPS)
    for name in ("text_1", "text_2"):
        _check_count(len(values[name]), limits, name)
    return ScoreRequest(
        values["model"], values["text_1"], values["text_2"], values["truncate_prompt_tokens"]
    )


def parse_rerank(body: dict[str, Any], limits: Limits) -> RerankRequest:
    """Reads the JSON body of /rerank. Raises InvalidRequestError."""
    values = read(body, RERANK_FIELDS, POOLING_NO_OPS)
    _check_count(len(values["documents"]), limits, "documents")
    return RerankRequest(
        model=values["model"],
        query=values["query"],
        documents=values["documents"],
        top_n=values["top_n"],
        return_documents=values["return_documents"],
        truncate=values["truncate_prompt_tokens"],
    )


def _check_count(count: int, limits: Limits, param: str) -> None:
    most = limits.max_prompts
    if most is not None and count > most:
        message = f"{count} texts were sent, allowed: {most} (the server's --max-queue-len)"
        raise InvalidRequestError(message, param=param)
