"""Reads the page as a browser does, in a process of its own: the files once, then the live stream, each message decoded.

An address on standard input opens the page, an empty line closes it. A line is printed when the first figures are here, and another
with what was read when it is closed: `benchmarks.ui_turns` talks to it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

from peers.cli.ui.page import FILES

MOST_BYTES = 64 << 20  # of a message


async def read(address: str) -> None:
    """Until it is cancelled."""
    root, _, token = address.partition("?token=")
    found = {"messages": 0, "bytes": 0}
    cookies = aiohttp.CookieJar(unsafe=True)  # the host is an address
    try:
        async with aiohttp.ClientSession(cookie_jar=cookies, read_bufsize=MOST_BYTES) as session:
            for name in (f"?token={token}", *(name for name in FILES if name != "index.html")):
                async with session.get(root + name) as answer:
                    answer.raise_for_status()
                    found["bytes"] += len(await answer.read())
            wait = aiohttp.ClientTimeout(total=None)
            async with session.get(f"{root}live", timeout=wait) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    found["bytes"] += len(line)
                    if line.startswith(b"data: "):
                        json.loads(line[6:])
                        found["messages"] += 1
                        if found["messages"] == 1:
                            print("open", flush=True)
    finally:
        print(json.dumps({**found, "cpu_s": time.process_time()}), flush=True)


async def main() -> None:
    reading: asyncio.Task[None] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])
        reading = asyncio.create_task(read(line.strip())) if line.strip() else None


if __name__ == "__main__":
    asyncio.run(main())
