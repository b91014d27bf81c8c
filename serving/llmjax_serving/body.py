"""HTTP bodies -> JSON objects."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from aiohttp import web

from llmjax.checks import cut

from .body_budget import BODY
from .errors import ApiError
from .schema.fields import shown


def refuse_constant(name: str) -> None:
    raise ApiError(400, f"the body is not valid JSON: {name} is not JSON")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys all differ: which of two values is meant, nobody can say."""
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ApiError(400, f"the body has the key {shown(twice)} twice", param=cut(twice))
    return value


def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 415 where it is declared as something else, 400 where it is not that.
    """
    if request.content_type != "application/json":
        given = cut(request.content_type)
        raise ApiError(415, f"Content-Type is {given}, allowed: application/json")
    body = parse(request[BODY])
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {shown(body)}, allowed: an object")
    return body


def size_of(request: web.Request) -> int:
    """Bytes of the body."""
    return len(request[BODY])


def parse(raw: bytes) -> Any:
    try:
        body = json.loads(raw, parse_constant=refuse_constant, object_pairs_hook=unique)
        if b"\\u" in raw:
            # Half of a surrogate pair is legal JSON, but not text that can be encoded.
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has a lone surrogate (\\ud800 to \\udfff)") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid JSON: it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError:
        # The one thing left that Python refuses: its time grows with the square of the digits.
        most = sys.get_int_max_str_digits()
        message = f"the body has an integer of too many digits, allowed: up to {most}"
        raise ApiError(400, message) from None
    return body
