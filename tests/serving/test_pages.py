"""The pages a browser shows, and the playground at / in a real one."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from llmjax_serving import pages
from llmjax_serving.config import ServerConfig

from .browser import PROGRAM, browser
from .double import EngineDouble, client_of, run_async

in_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
KEY = ServerConfig(api_key=("s3cret",))
LAST = "[...document.querySelectorAll('.said.assistant > p:not(.quiet)')].at(-1)?.textContent"


@run_async
async def test_pages_are_open():
    async with client_of(EngineDouble(), KEY) as client:
        for path, (_, content_type) in pages.PAGES.items():
            response = await client.get(path)
            assert response.status == 200
            assert response.content_type == content_type
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]


def test_nothing_comes_from_elsewhere():
    for name, _ in pages.PAGES.values():
        text = (pages.WEB / name).read_text()
        links = re.findall(r"https?://[^\s\"')]+|url\(|@import|\bimport\b", text)
        assert set(links) <= {"http://www.w3.org/2000/svg"}, links
        assert "innerHTML" not in text and " style=" not in text


async def say(tab, text):
    await tab.value(f"document.getElementById('text').value = {json.dumps(text)}")
    await tab.value("document.getElementById('say').requestSubmit()")


@in_browser
@pytest.mark.parametrize("width", [360, 1200])
@run_async
async def test_a_conversation(tmp_path, width):
    engine = EngineDouble(says=["<b>Hel", "lo</b>", " you"])
    async with client_of(engine) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/")), width=width, height=800, mobile=width < 700)
        await tab.until("document.getElementById('model').textContent == 'double'")
        await say(tab, "How are you?")
        await tab.until("document.querySelector('.said.assistant .quiet')")
        assert await tab.value(LAST) == "<b>Hello</b> you"
        assert "tokens" in await tab.value("document.querySelector('.said .quiet').textContent")
        assert await tab.value("document.documentElement.scrollWidth") <= width
        await say(tab, "And now?")
        await tab.until("document.querySelectorAll('.said .quiet').length == 2")
        sent = bytes(engine.seen[-1][0]).decode()
        assert sent == "<user>How are you?<assistant><b>Hello</b> you<user>And now?<assistant>"
        await tab.value("document.getElementById('again').click()")
        await tab.until("document.querySelectorAll('.said .quiet').length == 2")
        await tab.value("document.getElementById('clear').click()")
        assert await tab.value("document.querySelectorAll('.said').length") == 0
        assert all(url.startswith(str(client.make_url("/"))) for url in tab.asked)
        assert not tab.complaints


@in_browser
@run_async
async def test_settings_a_schema_and_the_colours_of_tokens(tmp_path):
    engine = EngineDouble()
    async with client_of(engine) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/")), width=900, height=800)
        await tab.until("document.getElementById('model').textContent == 'double'")
        given = {
            "temperature": "0.5",
            "max_tokens": "7",
            "seed": "3",
            "system": "Be brief.",
            "schema": '{"type": "integer"}',
        }
        for name, value in given.items():
            await tab.value(f"document.getElementById({name!r}).value = {json.dumps(value)}")
        await tab.value("document.getElementById('logprobs').checked = true")
        await say(tab, "Hm?")
        await tab.until("document.querySelectorAll('.token').length == 5")
        assert await tab.value(LAST) == "Hello"
        assert await tab.value("document.querySelector('.token').style.background != ''")
        _, params = engine.seen[-1]
        assert (params.temperature, params.max_tokens, params.seed) == (0.5, 7, 3)
        assert params.structured_outputs.value == '{"type": "integer"}'
        assert bytes(engine.seen[-1][0]).startswith(b"<system>Be brief.<user>Hm?")
        await tab.value("document.getElementById('schema').value = '{'")
        await say(tab, "And?")
        await tab.until("document.querySelector('.said.failed')")
        assert "no JSON" in await tab.value("document.querySelector('.failed').textContent")


@in_browser
@run_async
async def test_an_answer_can_be_stopped(tmp_path):
    engine = EngineDouble(says=["Hel", "lo"], gate=asyncio.Event())
    async with client_of(engine) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/")), width=900, height=800)
        await tab.until("document.getElementById('model').textContent == 'double'")
        await say(tab, "Hm?")
        await tab.until(f"{LAST} == 'Hel'")
        await tab.value("document.getElementById('halt').click()")
        await tab.until("document.querySelector('.said.assistant .quiet')")
        assert "stopped" in await tab.value("document.querySelector('.said .quiet').textContent")
        for _ in range(100):
            if not engine.running:
                break
            await asyncio.sleep(0.02)
        assert not engine.running


@in_browser
@run_async
async def test_it_asks_for_the_key(tmp_path):
    async with client_of(EngineDouble(), KEY) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/")), width=900, height=800)
        await tab.until("!document.getElementById('login').hidden")
        for key in ("wrong", "s3cret"):
            await tab.value(f"document.getElementById('key').value = '{key}'")
            await tab.value("document.getElementById('login').requestSubmit()")
            if key == "wrong":
                await tab.until("!document.getElementById('refused').hidden")
        await tab.until("document.getElementById('model').textContent == 'double'")
        await say(tab, "Hm?")
        await tab.until(f"{LAST} == 'Hello'")
