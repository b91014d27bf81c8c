"""The API's own description, made from the tables that requests are read by."""

from __future__ import annotations

from functools import cache
from typing import Any

from aiohttp import web

from llmjax import __version__

from . import batches, ledger
from .pages import PAGES
from .schema import chat, completion, messages, pooling, responses, tokens
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
    "Response": shape(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "status": {"enum": ["completed", "failed", "in_progress", "cancelled", "incomplete"]},
            "error": nullable(shape({"code": TEXT, "message": TEXT})),
            "incomplete_details": nullable(shape({"reason": TEXT})),
            "model": TEXT,
            "output": listed(ref("ResponseItem")),
        },
        usage=shape({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT}),
    ),
    "ResponseItem": shape(
        {"id": TEXT, "type": {"enum": ["message", "reasoning", "function_call"]}},
        content=listed(shape({"type": TEXT, "text": TEXT})),
        call_id=TEXT,
        name=TEXT,
        arguments=TEXT,
    ),
    "InputItems": shape(
        {
            "object": {"const": "list"},
            "data": listed(shape({"id": TEXT, "type": TEXT})),
            "first_id": TEXT,
            "last_id": TEXT,
            "has_more": {"type": "boolean"},
        }
    ),
    "Deleted": shape({"id": TEXT, "object": TEXT, "deleted": {"const": True}}),
    "File": shape(
        {"id": TEXT, "object": {"const": "file"}, "bytes": COUNT, "created_at": COUNT},
        filename=TEXT,
        purpose=TEXT,
        status=TEXT,
    ),
    "Files": shape({"object": {"const": "list"}, "data": listed(ref("File"))}),
    "Batch": shape(
        {
            "id": TEXT,
            "object": {"const": "batch"},
            "endpoint": TEXT,
            "input_file_id": TEXT,
            "status": TEXT,
            "created_at": COUNT,
            "output_file_id": nullable(TEXT),
            "error_file_id": nullable(TEXT),
            "request_counts": shape({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        }
    ),
    "Batches": shape({"object": {"const": "list"}, "data": listed(ref("Batch"))}),
    "Tokens": shape(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": listed(COUNT),
            "token_strs": nullable(listed(TEXT)),
        }
    ),
    "Rendered": shape({"prompt": TEXT, "prompt_token_ids": listed(COUNT), "count": COUNT}),
    "Text": shape({"prompt": TEXT}),
    "TokenizerInfo": shape(
        {
            **{name: nullable(TEXT) for name in ("bos_token", "eos_token", "chat_template")},
            "model_max_length": COUNT,
            "vocab_size": COUNT,
        }
    ),
    "PoolingUsage": shape({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    "Embeddings": shape(
        {
            "object": {"const": "list"},
            "data": listed(shape({"index": COUNT, "embedding": {"anyOf": [TEXT, listed(NUMBER)]}})),
            "model": TEXT,
            "usage": ref("PoolingUsage"),
        }
    ),
    "Pooled": shape(
        {
            "id": TEXT,
            "object": {"const": "list"},
            "created": COUNT,
            "data": listed(
                shape(
                    {
                        "index": COUNT,
                        "object": {"const": "pooling"},
                        "data": {"anyOf": [TEXT, listed(NUMBER), listed(listed(NUMBER))]},
                    }
                )
            ),
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
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1}},
    {"name": "after", "in": "query", "schema": TEXT},
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
        "get": operation("Files", "Files", parameters=OF_LIST),
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
