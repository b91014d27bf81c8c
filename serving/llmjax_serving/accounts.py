"""Each POST request on the account of its key: limits before it, usage as it goes on."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from llmjax.output import RequestOutput

from .errors import ApiError, Handler
from .keys import ApiKey
from .ledger import Ledger, Tally, Used
from .limits import Account, Accounts
from .schema.fields import shown
from .state import STATE

LEDGER = web.AppKey("ledger", Ledger)
TALLY = web.AppKey("tally", Tally)
"""Where usage is counted: the ledger, or what goes there later."""
LIMITER = web.AppKey("limiter", Accounts)
KEY = web.RequestKey("api_key", ApiKey)
ACCOUNT = web.RequestKey("account", Account)

MAX_DAYS = 31
"""Of /usage, where nothing else is asked for."""


@dataclass
class Meter:
    """Charges one HTTP request to its key; the request itself counts with its first tokens."""

    key: ApiKey
    model: str
    tally: Tally
    account: Account
    _is_counted: bool = False

    def charge(self, prompt: int, cached: int, generated: int) -> None:
        """Tokens; of those of the prompt, `cached` were in the prefix cache."""
        used = Used(int(not self._is_counted), prompt, cached, generated)
        self._is_counted = True
        self.tally.add(self.key.name, self.model, used)
        self.account.charge(prompt + generated)

    def charge_output(self, output: RequestOutput, *, is_first: bool) -> None:
        """The news of a prompt, and the prompt itself with the first of them."""
        generated = sum(len(choice.token_ids) for choice in output.outputs)
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
        self.charge(*((prompt, cached) if is_first else (0, 0)), generated)


METER = web.RequestKey("meter", Meter)


def meter_of(request: web.Request) -> Meter:
    """What the handler of a POST request charges."""
    return request[METER]


def check_access(key: ApiKey, model: str) -> None:
    if not key.may_use(model):
        raise ApiError(
            403,
            f"this API key has no access to the model {shown(model)}",
            param="model",
            code="model_not_found",
        )


@web.middleware
async def account_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what the key of a POST request has no room for (429), or no right to (403)."""
    if request.method != "POST":
        return await handler(request)
    app, key, model = request.app, request[KEY], request.app[STATE].model_name
    check_access(key, model)
    account = request[ACCOUNT] = app[LIMITER].account(key)
    await account.enter()
    try:
        request[METER] = Meter(key, model, app[TALLY], account)
        return await handler(request)
    finally:
        account.leave()


async def add_limit_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal for `on_response_prepare`: refusals and streams tell where the key stands too."""
    if ACCOUNT in request:
        response.headers.update(await request[ACCOUNT].headers())


async def keep_ledger(app: web.Application) -> AsyncIterator[None]:
    """For `cleanup_ctx`: the ledger is written to while the app runs, and once more at its end."""
    app[TALLY] = app[LEDGER] = ledger = Ledger(app[STATE].config.usage_db)
    async with ledger.flushed():
        yield


async def show_usage(request: web.Request) -> web.Response:
    """GET /usage: rows by day, key and model; an admin sees everyone's."""
    since, until, name = parse_query(dict(request.query))
    key = request[KEY]
    if not key.admin and name not in (None, key.name):
        raise ApiError(403, "only an admin sees the usage of other keys", param="key")
    await request.app[STATE].gather()
    rows = await request.app[LEDGER].read(name if key.admin else key.name, since, until)
    return web.json_response({"object": "list", "data": rows})


def parse_query(query: dict[str, Any]) -> tuple[str, str, str | None]:
    """First and last day, and the name of a key."""
    today = datetime.datetime.now(datetime.UTC).date()
    since = today - datetime.timedelta(days=MAX_DAYS - 1)
    days = {
        name: query.pop(name, str(default))
        for name, default in (("since", since), ("until", today))
    }
    key = query.pop("key", None)
    for name, day in days.items():
        if not _is_day(day):
            message = f"{name} is {shown(day)}, allowed: a day as {today}"
            raise ApiError(400, message, param=name)
    if query:
        unknown = min(query)
        message = f"{shown(unknown)} is unknown, allowed: since, until, key"
        raise ApiError(400, message, param=unknown)
    return days["since"], days["until"], key


def _is_day(text: str) -> bool:
    try:
        return str(datetime.date.fromisoformat(text)) == text
    except ValueError:
        return False
