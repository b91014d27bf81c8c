"""The API's own description, made from the tables that requests are read by."""

from __future__ import annotations

from functools import cache
from typing import Any

from aiohttp import web

from llmjax import __version__

from . import ledger
from .pages import PAGES
from .schema import chat, completion, tokens
from .schema.fields import object_schema

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def shape(required: dict[str, Schema], **optional: Schema) -> Schema:
    """An answer: at least these fields."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
    }


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANY: Schema = {}
FINISH_REASON = {"enum": ["stop", "length", "abort", "tool_calls", None]}

REQUESTS: dict[str, Schema] = {
    "CompletionRequest": object_schema(completion.FIELDS, completion.COMPLETION_NO_OPS),
    "ChatRequest": object_schema(chat.FIELDS, chat.CHAT_NO_OPS),
    "TokenizeRequest": {
        "anyOf": [
            object_schema(tokens.TOKENIZE_TEXT),
            object_schema(tokens.TOKENIZE_CHAT, chat.PROMPT_NO_OPS),
        ]
    },
    "DetokenizeRequest": object_schema(tokens.DETOKENIZE),
}
ANSWERS: dict[str, Schema] = {
    "Error": shape(
        {
            "error": shape(
                {
                    "message": TEXT,
                    "type": TEXT,
                    "param": nullable(TEXT),
                    "code": nullable(TEXT),
                }
            )
        }
    ),
    "Usage": shape(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        prompt_tokens_details=shape({"cached_tokens": COUNT}),
    ),
    "Completion": shape(
        {
            "id": TEXT,
            "object": {"const": "text_completion"},
            "created": COUNT,
            "model": TEXT,
            "choices": listed(
                shape(
                    {
                        "index": COUNT,
                        "text": TEXT,
                        "logprobs": nullable({"type": "object"}),
                        "finish_reason": FINISH_REASON,
                    },
                    stop_reason=ANY,
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "ChatCompletion": shape(
        {
            "id": TEXT,
            "object": {"const": "chat.completion"},
            "created": COUNT,
            "model": TEXT,
            "choices": listed(
                shape(
                    {
                        "index": COUNT,
                        "message": shape(
                            {"role": {"const": "assistant"}, "content": nullable(TEXT)}
                        ),
                        "logprobs": nullable({"type": "object"}),
                        "finish_reason": FINISH_REASON,
                    },
                    stop_reason=ANY,
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "Tokens": shape(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": listed(COUNT),
            "token_strs": nullable(listed(TEXT)),
        }
    ),
    "Text": shape({"prompt": TEXT}),
    "Model": shape({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT}),
    "Models": shape({"object": {"const": "list"}, "data": listed(ref("Model"))}),
    "Status": shape({"status": TEXT}),
    "Load": shape({"server_load": COUNT}),
    "UsageRows": shape(
        {
            "object": {"const": "list"},
            "data": listed(
                shape(
                    {"day": TEXT, "key": TEXT, "model": TEXT} | dict.fromkeys(ledger.COUNTS, COUNT)
                )
            ),
        }
    ),
    "Version": shape({"version": TEXT}),
}


def operation(summary: str, answer: str, request: str | None = None, **more: Any) -> Schema:
    content = {"application/json": {"schema": ref(answer)}}
    if answer in ("Completion", "ChatCompletion"):
        content["text/event-stream"] = {"schema": TEXT}
    failed = {"application/json": {"schema": ref("Error")}}
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
    content = {content_type: {"schema": TEXT}}
    return {"summary": summary, "responses": {"200": {"description": "text", "content": content}}}


MODEL_PARAMETER = {"name": "model", "in": "path", "required": True, "schema": TEXT}
PATHS: dict[str, dict[str, Schema]] = {
    "/v1/completions": {"post": operation("Go on with prompts", "Completion", "CompletionRequest")},
    "/v1/chat/completions": {
        "post": operation("Answer a conversation", "ChatCompletion", "ChatRequest")
    },
    "/v1/models": {"get": operation("What is served", "Models")},
    "/v1/models/{model}": {"get": operation("One model", "Model", parameters=[MODEL_PARAMETER])},
    "/tokenize": {"post": operation("Text or messages to token ids", "Tokens", "TokenizeRequest")},
    "/detokenize": {"post": operation("Token ids to text", "Text", "DetokenizeRequest")},
    "/health": {"get": operation("Whether steps get done", "Status", security=[])},
    "/ready": {"get": operation("Whether a request would be taken", "Status", security=[])},
    "/ping": {"get": operation("As /health", "Status")},
    "/load": {"get": operation("How busy the server is", "Load")},
    "/usage": {
        "get": operation(
            "What keys have used, by day and model",
            "UsageRows",
            parameters=[
                {"name": name, "in": "query", "schema": TEXT} for name in ("since", "until", "key")
            ],
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
