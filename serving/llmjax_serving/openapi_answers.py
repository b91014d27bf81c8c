"""What answers are, for the API's own description."""

from __future__ import annotations

from typing import Any

from . import ledger

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
