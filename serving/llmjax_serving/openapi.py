"""The API's own description, made from the tables that requests are read by."""

from __future__ import annotations

from functools import cache
from typing import Any

from aiohttp import web

from llmjax import __version__

from . import batches
from .files import MOST_LISTED
from .openapi_answers import ANSWERS, TEXT, Schema, ref, shape
from .pages import PAGES
from .schema import chat, completion, messages, pooling, responses, tokens
from .schema.fields import object_schema

REQUESTS: dict[str, Schema] = {
    "CompletionRequest": object_schema(completion.FIELDS, completion.COMPLETION_NO_OPS),
    "ChatRequest": object_schema(chat.FIELDS, chat.CHAT_NO_OPS),
    "MessagesRequest": object_schema(messages.FIELDS, messages.NO_OPS),
    "CountRequest": object_schema(messages.PROMPT, messages.NO_OPS),
    "ResponseRequest": object_schema(responses.FIELDS, responses.NO_OPS),
    "BatchRequest": object_schema(batches.FIELDS, batches.NO_OPS),
    "TokenizeRequest": {
        "anyOf": [
            object_schema(tokens.TOKENIZE_TEXT),
            object_schema(tokens.TOKENIZE_CHAT, chat.PROMPT_NO_OPS),
        ]
    },
    "DetokenizeRequest": object_schema(tokens.DETOKENIZE),
    "EmbeddingRequest": object_schema(pooling.EMBEDDING_FIELDS, pooling.POOLING_NO_OPS),
    "PoolingRequest": object_schema(pooling.POOLING_FIELDS, pooling.POOLING_NO_OPS),
    "ScoreRequest": object_schema(pooling.SCORE_FIELDS, pooling.POOLING_NO_OPS),
    "RerankRequest": object_schema(pooling.RERANK_FIELDS, pooling.POOLING_NO_OPS),
}


STREAMED = {"Completion", "ChatCompletion", "Message", "Response"}
"""Answers that come as server-sent events where a request asks for that."""


def operation(summary: str, answer: str, request: str | None = None, **more: Any) -> Schema:
    content = {"application/json": {"schema": ref(answer)}}
    if answer in STREAMED and request is not None:
        content["text/event-stream"] = {"schema": TEXT}
    error = "AnthropicError" if answer in ("Message", "Count") else "Error"
    failed = {"application/json": {"schema": ref(error)}}
    told = {
        "summary": summary,
        "responses": {
            "200": {"description": "what was asked for", "content": content},
            "default": {"description": "what was wrong, and what is allowed", "content": failed},
        },
        **more,
    }
    if request is not None:
        body = {"application/json": {"schema": ref(request)}}
        told["requestBody"] = {"required": True, "content": body}
    return told


def text_operation(summary: str, content_type: str = "text/plain") -> Schema:
    told = operation(summary, "Error")
    content = {content_type: {"schema": TEXT}}
    told["responses"]["200"] = {"description": "text", "content": content}
    return told


SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
"""Where vLLM has them, and Jina and Cohere."""


def in_path(name: str) -> list[Schema]:
    return [{"name": name, "in": "path", "required": True, "schema": TEXT}]


def in_query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


OF_RESPONSE = in_path("response_id")
OF_PAGE = [
    in_query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    in_query("order", {"enum": ["asc", "desc"], "default": "desc"}),
    in_query("after", TEXT),
]
UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": shape({"file": TEXT | {"format": "binary"}, "purpose": {"const": "batch"}})
            | {"additionalProperties": False}
        }
    },
}
OF_LIST = [
    in_query("limit", {"type": "integer", "minimum": 1, "maximum": MOST_LISTED}),
    *OF_PAGE[1:],
]
PATHS: dict[str, dict[str, Schema]] = {
    "/v1/completions": {"post": operation("Go on with prompts", "Completion", "CompletionRequest")},
    "/v1/chat/completions": {
        "post": operation("Answer a conversation", "ChatCompletion", "ChatRequest")
    },
    "/v1/messages": {
        "post": operation("Answer a conversation, as Anthropic's", "Message", "MessagesRequest")
    },
    "/v1/messages/count_tokens": {
        "post": operation("Tokens of such a conversation", "Count", "CountRequest")
    },
    "/v1/responses": {
        "post": operation("Answer a conversation, in items", "Response", "ResponseRequest")
    },
    "/v1/responses/{response_id}": {
        "get": operation("A stored response", "Response", parameters=OF_RESPONSE),
        "delete": operation("Forget a response", "Deleted", parameters=OF_RESPONSE),
    },
    "/v1/responses/{response_id}/cancel": {
        "post": operation("End a response that runs", "Response", parameters=OF_RESPONSE)
    },
    "/v1/responses/{response_id}/input_items": {
        "get": operation(
            "The conversation a response answers", "InputItems", parameters=OF_RESPONSE + OF_PAGE
        )
    },
    "/v1/models": {"get": operation("What is served", "Models")},
    "/v1/models/{model}": {"get": operation("One model", "Model", parameters=in_path("model"))},
    "/v1/files": {
        "post": operation("Upload a batch file", "File", requestBody=UPLOAD),
        "get": operation("Files", "Files", parameters=[*OF_LIST, in_query("purpose", TEXT)]),
    },
    "/v1/files/{id}": {
        "get": operation("One file", "File", parameters=in_path("id")),
        "delete": operation("Delete a file", "Deleted", parameters=in_path("id")),
    },
    "/v1/files/{id}/content": {
        "get": text_operation("What is in a file", "application/octet-stream")
        | {"parameters": in_path("id")}
    },
    "/v1/batches": {
        "post": operation("Answer a file of requests", "Batch", "BatchRequest"),
        "get": operation("Batches", "Batches", parameters=OF_LIST),
    },
    "/v1/batches/{id}": {"get": operation("One batch", "Batch", parameters=in_path("id"))},
    "/v1/batches/{id}/cancel": {
        "post": operation("End a batch", "Batch", parameters=in_path("id"))
    },
    "/v1/chat/completions/render": {
        "post": operation("The prompt of a conversation", "Rendered", "ChatRequest")
    },
    "/pooling": {"post": operation("Texts to what the model makes", "Pooled", "PoolingRequest")},
    "/v1/embeddings": {"post": operation("Texts to vectors", "Embeddings", "EmbeddingRequest")},
    **{
        path: {"post": operation("How well texts go together", "Scores", "ScoreRequest")}
        for path in SCORE
    },
    **{
        path: {"post": operation("Documents that answer a query", "Ranking", "RerankRequest")}
        for path in RERANK
    },
    "/tokenize": {"post": operation("Text or messages to token ids", "Tokens", "TokenizeRequest")},
    "/detokenize": {"post": operation("Token ids to text", "Text", "DetokenizeRequest")},
    "/tokenizer_info": {"get": operation("Special tokens and the chat template", "TokenizerInfo")},
    "/health": {"get": operation("Whether steps get done", "Status", security=[])},
    "/ready": {"get": operation("Whether a request would be taken", "Status", security=[])},
    "/ping": {"get": operation("As /health", "Status")},
    "/load": {"get": operation("How busy the server is", "Load")},
    "/usage": {
        "get": operation(
            "What keys have used, by day and model",
            "UsageRows",
            parameters=[in_query(name, TEXT) for name in ("since", "until", "key")],
        )
    },
    "/version": {"get": operation("The version", "Version")},
    "/metrics": {"get": text_operation("Prometheus metrics")},
}
UNDESCRIBED = {"/dashboard/state", "/openapi.json", *PAGES}
"""Routes for pages."""


@cache
def document() -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmjax",
            "version": __version__,
            "description": "OpenAI's API and vLLM's extras. Unknown fields are refused by name.",
        },
        "paths": PATHS,
        "components": {
            "schemas": REQUESTS | ANSWERS,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"header": []}, {}],
    }


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(document())
