"""A real headless Chromium for tests, spoken to over its own debugging protocol: no driver, no other library.

The idea: a test opens a page, waits until an expression of JavaScript is true, and looks at it as a person does. What the page logs
as an error, or asks of another address, is kept for the test.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
WHY_NOT = "no Chromium is installed: apt-get install chromium"
WITHIN_S = 60.0


class Page:
    """One tab. `errors` are what it logged as errors, and exceptions; `asked` the addresses that it asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.asked: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                if (answer := self._answers.pop(told["id"], None)) is not None and not answer.done():
                    answer.set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"])[:2000])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(told["params"]["entry"]["text"])
            elif told["method"] == "Network.requestWillBeSent":
                self.asked.append(told["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WITHIN_S):
            told = await self._answers[number]
        if "error" in told:
            raise AssertionError(f"{method}: {told['error']}")
        found: dict[str, Any] = told["result"]
        return found

    async def open(self, address: str) -> None:
        for name in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{name}.enable")
        await self.call("Page.navigate", url=address)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str, within_s: float = WITHIN_S) -> Any:
        """Until it is true; what it was last, if it never is."""
        found = None
        try:
            async with asyncio.timeout(within_s):
                while not (found := await self.value(expression)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(f"{expression} is {found!r}; the page says: {text[:1500]}; {self.errors}") from None
        return found

    async def look(self, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """As it is in a window of this width."""
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await asyncio.sleep(0.8)

    async def picture(self, path: Path, *, height: float | None = None, scale: float = 1.0) -> None:
        """Write what it looks like to this file, to its end or so many pixels of it."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": scale}
        options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", **options))["data"]))


@asynccontextmanager
async def a_page(folder: Path, *flags: str) -> AsyncIterator[Page]:
    """An empty tab of a browser of its own, whose profile is in this folder; `flags` are Chromium's."""
    assert BROWSER is not None, WHY_NOT
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", *flags, "about:blank",
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    log = (folder / "chromium.log").open("wb")
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    log.close()
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        async with asyncio.timeout(WITHIN_S):
            while not port_file.exists() or not port_file.read_text().strip():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        port = int(port_file.read_text().split()[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (tab,) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(page.listen())
                    try:
                        yield page
                    finally:
                        listening.cancel()
    finally:
        process.kill()
        await process.wait()
