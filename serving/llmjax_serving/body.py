"""HTTP bodies -> JSON values."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from .errors import ApiError


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def read_json(request: web.Request) -> Any:
    """The body as JSON.

    Raises:
        ApiError: 415 where it is declared as something else, 400 where it is not JSON.
    """
    if request.content_type != "application/json":
        raise ApiError(415, f"Content-Type is {request.content_type}, allowed: application/json")
    raw = await request.read()
    try:
        body = json.loads(raw, parse_constant=refuse_constant)
        if b"\\u" in raw:
            # Half of a surrogate pair is legal JSON, but not text that can be encoded.
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has a lone surrogate (\\ud800 to \\udfff)") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return body
