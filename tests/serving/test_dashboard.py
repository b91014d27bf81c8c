"""/dashboard: the state it is fed, and what a browser makes of it."""

from __future__ import annotations

import asyncio

import pytest

from llmjax import SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine import engine_thread
from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import EngineDeadError, ShutdownError
from llmjax.metrics import Metrics
from llmjax_serving.config import ServerConfig

from .browser import PROGRAM, browser
from .double import MODEL, EngineDouble, client_of, run_async, until

in_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
KEY = ServerConfig(api_key=("s3cret",))
BEARER = {"Authorization": "Bearer s3cret"}
SECRET = "<b>the words of a prompt</b>"


@run_async
async def test_what_the_page_draws_wants_the_key():
    async with client_of(EngineDouble(), KEY) as client:
        assert (await client.get("/dashboard/state")).status == 401
        assert (await client.get("/dashboard/other")).status == 401
        response = await client.get("/dashboard/state", headers=BEARER)
        assert response.status == 200
        told = await response.json()
    assert told["totals"]["generation_tokens_total"] == 0
    assert told["draining"] is False


@run_async
async def test_a_loading_server_says_so():
    async with client_of(None) as client:
        assert (await client.get("/dashboard")).status == 200
        response = await client.get("/dashboard/state")
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "loading"


@run_async
async def test_many_who_look_cost_no_more_than_one(monkeypatch):
    engine, now = EngineDouble(), [0.0]
    monkeypatch.setattr("llmjax_serving.dashboard.time.monotonic", lambda: now[0])
    async with client_of(engine) as client:
        answers = await asyncio.gather(*(client.get("/dashboard/state") for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert engine.snapshots == 1
        now[0] += 0.4
        await client.get("/dashboard/state")
        assert engine.snapshots == 1
        now[0] += 0.2
        await client.get("/dashboard/state")
        assert engine.snapshots == 2


@run_async
async def test_one_engine_of_several_is_shown():
    config = EngineConfig.of("some/path", data_parallel_size=2)
    async with client_of(EngineDouble(config=config)) as client:
        for asked, number in ((None, 0), ("0", 0), ("1", 1)):
            params = {} if asked is None else {"engine": asked}
            told = await (await client.get("/dashboard/state", params=params)).json()
            assert (told["engine"], told["engines"]) == (number, 2)
        for asked in ("2", "-1", "", "x", "9" * 5000):
            answer = await client.get("/dashboard/state", params={"engine": asked})
            assert answer.status == 400
            assert "allowed: 0 to 1" in (await answer.json())["error"]["message"]


@pytest.fixture
def engine(tiny_model):
    """Loaded before the test's time runs, which starts it."""
    sizes = {
        "max_model_len": 256,
        "block_size": 4,
        "max_num_seqs": 4,
        "token_buckets": (16, 64),
        "seq_buckets": (4,),
        "num_gpu_blocks_override": 300,
        "background": False,
    }
    engine = AsyncEngine(EngineConfig.of(str(tiny_model), **sizes))
    yield engine
    engine.close()


@run_async
async def test_the_state_of_a_real_engine_while_it_runs(engine):
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    engine.start()
    async with client_of(engine) as client:

        async def one(number):
            async for _ in engine.generate(f"r{number}", [number + 3] * 40, params):
                pass

        busy = []
        for _ in range(50):  # a snapshot is kept for half a second: it may miss a fast round
            tasks = [asyncio.ensure_future(one(i)) for i in range(6)]
            while not all(task.done() for task in tasks):
                told = await (await client.get("/dashboard/state")).json()
                busy += [told] if told["running"] else []
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)
            if busy:
                break
        assert busy, "it was asked while requests ran"
        assert all(len(told["running"]) + len(told["waiting"]) <= 6 for told in busy)
        for told in busy:
            assert len(told["pages"]["cells"]) == told["num_pages"] == 300
        engine.stop()
        await until(lambda: not engine.is_alive)
        with pytest.raises(ShutdownError):
            await engine.snapshot()


@run_async
async def test_a_step_without_end_is_told(engine, monkeypatch):
    monkeypatch.setattr(engine_thread, "SNAPSHOT_SECONDS", 0.05)
    hold, loop = asyncio.Event(), asyncio.get_running_loop()

    def abort(*args):
        asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(10)
        return []

    monkeypatch.setattr(engine.engine, "abort", abort)
    engine.start()
    engine.thread.end("no such request")
    with pytest.raises(EngineDeadError, match=r"not come to the end of a step for 0\.05 s"):
        await engine.snapshot()
    hold.set()
    monkeypatch.setattr(engine_thread, "SNAPSHOT_SECONDS", 10.0)
    assert (await engine.snapshot())["running"] == []


@in_browser
@run_async
async def test_the_page_asks_for_the_key_and_draws_the_engine(tmp_path):
    engine = EngineDouble(gate=asyncio.Event())
    async with client_of(engine, KEY) as client, browser(tmp_path) as tab:
        answer = asyncio.ensure_future(
            client.post("/v1/completions", json={"prompt": SECRET}, headers=BEARER)
        )
        await tab.open(str(client.make_url("/dashboard")), width=1200, height=900)
        await tab.until("!document.getElementById('login').hidden")
        assert await tab.value("document.getElementById('board').hidden")

        async def enter(key):
            await tab.value(f"document.getElementById('key').value = '{key}'")
            await tab.value("document.querySelector('#login button').click()")

        await enter("wrong")
        await tab.until("!document.getElementById('refused').hidden")
        tab.complaints.clear()  # the browser itself remarks on each 401
        await enter("s3cret")
        await tab.until("!document.getElementById('board').hidden")
        await tab.until("document.querySelectorAll('#running tbody tr').length == 2")
        text = await tab.value("document.body.innerText")
        for words in (
            "live, 12 steps",
            "30 of 60",
            "priority -2",
            "1,024 forgotten",
            "64 pages, each of 16 tokens of one of 2 groups of layers",
            "7 of 20",
            "400 tokens",
            "9 hits",
            "and 3 more",
        ):
            assert words in text, (words, text)
        assert await tab.value("document.querySelectorAll('#waiting tbody tr').length") == 3
        assert "and 4 more" in text  # of those that wait
        # A fork is closed until it is opened, and then stays open.
        assert "17 tokens" not in text
        await tab.value("document.querySelectorAll('#tree summary')[1].click()")
        await tab.until("document.body.innerText.includes('17 tokens')")
        polls = engine.snapshots
        while engine.snapshots < polls + 2:
            await asyncio.sleep(0.05)
        assert "17 tokens" in await tab.value("document.body.innerText")
        # Cells have colours: as many as there are kinds of them.
        assert await tab.value(COLOURS) == 5
        engine.gate.set()
        assert (await answer).status == 200
        await tab.until("Number(document.querySelector('#charts polyline').points.length) > 1")
        assert SECRET not in await tab.value("document.documentElement.outerHTML")
        assert "words" not in await tab.value("document.documentElement.outerHTML")
        assert not tab.complaints
        origin = str(client.make_url("/"))
        assert {url for url in tab.asked if not url.startswith((origin, "data:"))} == set()


@in_browser
@run_async
async def test_the_head_of_the_page_chooses_the_engine(tmp_path):
    config = EngineConfig.of("some/path", data_parallel_size=2)
    engine = EngineDouble(config=config)
    Metrics(MODEL, 1, engine.metrics)
    async with client_of(engine) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/dashboard")), width=1200, height=900)
        await tab.until("document.getElementById('engine').options.length == 2")
        assert not await tab.value("document.getElementById('engine').hidden")
        assert await tab.value("shown.engine") == 0
        select = "const select = document.getElementById('engine'); select.value = '1';"
        await tab.value(f"(() => {{ {select} select.dispatchEvent(new Event('change')); }})()")
        await tab.until("shown && shown.engine == 1")
        assert await tab.value("document.getElementById('engine').value") == "1"
        assert not tab.complaints


COLOURS = """(() => {
  const map = document.getElementById('map');
  const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
  const seen = {};
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255) seen[[data[i], data[i + 1], data[i + 2]]] = 1;
  return Object.keys(seen).length;
})()"""


@in_browser
@pytest.mark.parametrize("width", [320, 390, 768, 1400])
@run_async
async def test_it_fits_every_screen(tmp_path, width):
    async with client_of(EngineDouble()) as client, browser(tmp_path) as tab:
        await tab.open(
            str(client.make_url("/dashboard")), width=width, height=800, mobile=width < 700
        )
        await tab.until("document.querySelectorAll('#running tbody tr').length == 2")
        assert await tab.value("document.documentElement.scrollWidth") <= width
        assert await tab.value("document.getElementById('map').clientWidth") > width / 3
        assert not tab.complaints


@in_browser
@run_async
async def test_it_says_when_the_engine_is_gone_and_goes_on_when_it_is_back(tmp_path):
    engine = EngineDouble()
    async with client_of(engine) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/dashboard")), width=800, height=800)
        await tab.until("document.getElementById('status').textContent.startsWith('live')")
        engine.dead = "the engine has stopped: out of memory"
        await tab.until("document.getElementById('status').textContent.includes('out of memory')")
        engine.dead = None
        await tab.until("document.getElementById('status').textContent.startsWith('live')")
