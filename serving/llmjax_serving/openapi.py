"""The API's own description, made from the tables that requests are read by."""

from __future__ import annotations

from functools import cache
from typing import Any

from aiohttp import web

from llmjax import __version__

from .pages import PAGES
from .schema import chat, completion, messages, pooling, tokens
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
NUMBER: Schema = {"type": "number"}
ANY: Schema = {}
FINISH_REASON = {"enum": ["stop", "length", "abort", "tool_calls", None]}

TOOL_CALL = shape(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": shape({"name": TEXT, "arguments": TEXT}),
    }
)

REQUESTS: dict[str, Schema] = {
    "CompletionRequest": object_schema(completion.FIELDS, completion.COMPLETION_NO_OPS),
    "ChatRequest": object_schema(chat.FIELDS, chat.CHAT_NO_OPS),
    "MessagesRequest": object_schema(messages.FIELDS, messages.NO_OPS),
    "CountRequest": object_schema(messages.PROMPT, messages.NO_OPS),
    "TokenizeRequest": {
        "anyOf": [
            object_schema(tokens.TOKENIZE_TEXT),
            object_schema(tokens.TOKENIZE_CHAT, chat.PROMPT_NO_OPS),
        ]
    },
    "DetokenizeRequest": object_schema(tokens.DETOKENIZE),
    "EmbeddingRequest": object_schema(pooling.EMBEDDING_FIELDS, pooling.POOLING_NO_OPS),
    "ScoreRequest": object_schema(pooling.SCORE_FIELDS, pooling.POOLING_NO_OPS),
    "RerankRequest": object_schema(pooling.RERANK_FIELDS, pooling.POOLING_NO_OPS),
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
        completion_tokens_details=shape({"reasoning_tokens": COUNT}),
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
                            {"role": {"const": "assistant"}, "content": nullable(TEXT)},
                            reasoning=nullable(TEXT),
                            reasoning_content=nullable(TEXT),
                            tool_calls=listed(TOOL_CALL),
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
    "Message": shape(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": listed(shape({"type": {"enum": ["text", "thinking", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": nullable(TEXT),
            "usage": shape({"input_tokens": COUNT, "output_tokens": COUNT}),
        }
    ),
    "Count": shape({"input_tokens": COUNT}),
    "AnthropicError": shape(
        {"type": {"const": "error"}, "error": shape({"type": TEXT, "message": TEXT})}
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
    "PoolingUsage": shape({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    "Embeddings": shape(
        {
            "object": {"const": "list"},
            "data": listed(shape({"index": COUNT, "embedding": {"anyOf": [TEXT, listed(NUMBER)]}})),
            "model": TEXT,
            "usage": ref("PoolingUsage"),
        }
    ),
    "Scores": shape(
        {
            "object": {"const": "list"},
            "data": listed(shape({"index": COUNT, "score": NUMBER})),
            "model": TEXT,
            "usage": ref("PoolingUsage"),
        }
    ),
    "Ranking": shape(
        {
            "results": listed(
                shape({"index": COUNT, "relevance_score": NUMBER}, document=shape({"text": TEXT}))
            ),
            "model": TEXT,
            "usage": ref("PoolingUsage"),
        }
    ),
    "Model": shape({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT}),
    "Models": shape({"object": {"const": "list"}, "data": listed(ref("Model"))}),
    "Status": shape({"status": TEXT}),
    "Version": shape({"version": TEXT}),
}


def operation(summary: str, answer: str, request: str | None = None, **more: Any) -> Schema:
    content = {"application/json": {"schema": ref(answer)}}
    if answer in ("Completion", "ChatCompletion", "Message"):
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
    content = {content_type: {"schema": TEXT}}
    return {"summary": summary, "responses": {"200": {"description": "text", "content": content}}}


SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
"""Where vLLM has them, and Jina and Cohere."""
MODEL_PARAMETER = {"name": "model", "in": "path", "required": True, "schema": TEXT}
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
    "/v1/models": {"get": operation("What is served", "Models")},
    "/v1/models/{model}": {"get": operation("One model", "Model", parameters=[MODEL_PARAMETER])},
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
    "/health": {"get": operation("Whether steps get done", "Status", security=[])},
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
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(document())
