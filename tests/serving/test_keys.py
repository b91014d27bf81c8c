"""API keys: who is let in, where from, and to what."""

from __future__ import annotations

import hashlib
import hmac
import json
import os

import pytest

from llmjax.errors import ConfigError
from llmjax_serving import watch
from llmjax_serving.config import ServerConfig
from llmjax_serving.keys import KeyRing
from llmjax_serving.pages import PAGES

from .double import MODEL, EngineDouble, client_of, run_async, until

PROMPT = {"prompt": "abc"}
OPEN = {"/health", "/ready", *PAGES}
"""A browser loads pages before it can send a key; they themselves tell nothing."""


def key_file(tmp_path, *entries) -> str:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(list(entries)))
    return str(path)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@run_async
async def test_every_route_but_what_tells_nothing_wants_a_key():
    config = ServerConfig(api_key=("s3cret", "other"))
    async with client_of(EngineDouble(), config) as client:
        routes = {(r.method, r.resource.canonical) for r in client.server.app.router.routes()}
        paths = {path for _, path in routes}
        assert paths > OPEN and {"/v1/completions", "/metrics", "/usage", "/ping"} <= paths
        checked = {(m, path.replace("{model}", MODEL)) for m, path in routes if path not in OPEN}
        for method, url in checked | {("POST", path) for path in paths - OPEN}:
            for headers in (
                {},
                bearer("wrong"),
                bearer(""),
                {"Authorization": "Basic s3cret"},
                {"Authorization": "s3cret"},
                bearer("s3cret\u00e9"),
                bearer("s3cret,other"),
                {"x-api-key": "wrong"},
            ):
                response = await client.request(method, url, headers=headers)
                assert response.status == 401, (method, url)
                if method != "HEAD" and not url.startswith("/v1/messages"):  # it has no codes
                    error = (await response.json())["error"]
                    assert error["code"] == "invalid_api_key"
                    assert "s3cret" not in error["message"]
        assert (await client.get("/nowhere")).status == 401
        assert (await client.get("/HEALTH")).status == 401
        assert (await client.get("/health/")).status == 401
        for path in OPEN:
            assert (await client.get(path)).status == 200
        for key in (bearer("s3cret"), bearer("other"), {"x-api-key": "other"}):
            assert (await client.post("/v1/completions", json=PROMPT, headers=key)).status == 200
            assert (await client.get("/metrics", headers=key)).status == 200


def test_a_key_is_compared_with_all_others_however_early_it_is_found(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def compare(a, b):
        compared.append(b)
        return real(a, b)

    ring = KeyRing(["a", "b", "c"])
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for secret, name in (("a", "api-key-1"), ("c", "api-key-3"), ("no", None)):
        compared.clear()
        found = ring.find(secret)
        assert (found.name if found else None) == name
        assert len(compared) == 3


def test_keys_of_a_file(tmp_path):
    digest = hashlib.sha256(b"hashed").hexdigest().upper()
    path = key_file(
        tmp_path,
        {"name": "alice", "key": "clear", "requests_per_minute": 3, "models": ["m"]},
        {"name": "bob", "sha256": digest, "tokens_per_minute": 9, "max_concurrent": 1},
        {"name": "root", "key": "r", "admin": True},
    )
    ring = KeyRing(["given"], path)
    alice, bob = ring.find("clear"), ring.find("hashed")
    assert (alice.name, alice.requests_per_minute, alice.tokens_per_minute) == ("alice", 3, None)
    assert alice.may_use("m") and not alice.may_use("n") and not alice.admin
    assert (bob.name, bob.tokens_per_minute, bob.max_concurrent) == ("bob", 9, 1)
    assert bob.may_use("n")
    assert ring.find("r").admin and ring.find("given").admin
    assert ring.find("") is None and ring.find(digest) is None
    assert not any(secret in repr(vars(ring)) for secret in ("clear", "hashed", "'given'"))
    assert not ring.is_open and KeyRing().is_open
    assert not KeyRing(path=key_file(tmp_path)).is_open, "an empty list lets nobody in"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read: Expecting value"),
        ("{}", "is no JSON list"),
        ("[3]", "entry 1 is no object"),
        ('[{"key": "s3cret"}]', "entry 1 needs a name"),
        ('[{"name": "", "key": "s3cret"}]', "entry 1 needs a name"),
        ('[{"name": "a"}]', r"entry 1 \('a'\) needs one of key and sha256"),
        ('[{"name": "a", "key": "s3cret", "sha256": "ff"}]', "needs one of key and sha256"),
        ('[{"name": "a", "key": ""}]', "has a key that is no text"),
        ('[{"name": "a", "sha256": "s3cret"}]', "has a sha256 that is not 64 hex digits"),
        ('[{"name": "a", "key": "s3cret", "rpm": 1}]', r"has \['rpm'\], allowed: admin, key"),
        ('[{"name": "a", "key": "s3cret", "max_concurrent": 0}]', "max_concurrent 0, allowed: 1"),
        ('[{"name": "a", "key": "s3cret", "admin": 1}]', "admin is 1, allowed: True or False"),
        ('[{"name": "a", "key": "s3cret", "models": "m"}]', "models is 'm', allowed: a list"),
        ('[{"name": "a", "key": "x"}, {"name": "a", "key": "y"}]', "the name 'a' comes twice"),
        ('[{"name": "a", "key": "s3cret"}, {"name": "b", "key": "s3cret"}]', "'b' has the key of"),
    ],
)
def test_a_bad_file_is_refused_by_what_is_wrong_with_it(tmp_path, text, message):
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        KeyRing(path=str(path))
    assert "s3cret" not in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing(path=str(tmp_path / "none.json"))


@run_async
async def test_a_file_is_read_again_as_it_changes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.01)
    path = key_file(tmp_path, {"name": "alice", "key": "a"})
    config = ServerConfig(api_key_file=path)
    async with client_of(EngineDouble(), config) as client:

        async def status(secret):
            return (await client.get("/version", headers=bearer(secret))).status

        assert await status("a") == 200
        key_file(tmp_path, {"name": "bob", "key": "bb"})
        for _ in range(200):
            if await status("bb") == 200:
                break
        assert [await status(s) for s in ("a", "bb")] == [401, 200]
        (tmp_path / "keys.json").write_text("[{")
        await until(lambda: "the API keys stay as they were" in caplog.text)
        assert await status("bb") == 200
        os.unlink(path)
        await until(lambda: "No such file" in caplog.text)
        assert [await status(s) for s in ("a", "bb")] == [401, 200]


@run_async
async def test_a_key_sees_and_uses_its_models_only(tmp_path):
    path = key_file(
        tmp_path,
        {"name": "mine", "key": "m", "models": [MODEL]},
        {"name": "else", "key": "e", "models": ["other"]},
    )
    async with client_of(EngineDouble(), ServerConfig(api_key_file=path)) as client:
        for url, body in (("/v1/completions", PROMPT), ("/tokenize", PROMPT)):
            assert (await client.post(url, json=body, headers=bearer("m"))).status == 200
            refused = await client.post(url, json=body, headers=bearer("e"))
            assert refused.status == 403
            error = (await refused.json())["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await client.get(f"/v1/models/{MODEL}", headers=bearer("e"))).status == 403
        for secret, count in (("m", 1), ("e", 0)):
            listed = await (await client.get("/v1/models", headers=bearer(secret))).json()
            assert len(listed["data"]) == count
