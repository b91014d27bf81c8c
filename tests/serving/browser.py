"""Chromium without a screen, driven over its debugging socket (the Chrome DevTools Protocol)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--remote-debugging-port=0"),
)


class Tab:
    """One page.

    Attributes:
        complaints: what the page wrote to the console as an error, or threw.
        asked: URLs that it asked for.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self.asked: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=20)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")

    async def open(self, url: str, *, width: int, height: int, mobile: bool = False) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)
        await self.until("location.href != 'about:blank' && document.readyState == 'complete'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        for _ in range(300):
            if await self.value(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"it did not come about in 15 s: {expression}")

    async def screenshot(self, path: Path) -> None:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A fresh browser with an empty page; its profile is kept in `folder`."""
    assert PROGRAM is not None
    process = await asyncio.create_subprocess_exec(
        *(PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if b"DevTools listening on " in line:
                break
        port = line.decode().split("127.0.0.1:")[1].split("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                pages = [page for page in await response.json() if page["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.kill()
        await process.communicate()
