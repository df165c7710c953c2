"""What a step takes with the page open and without it, in turns of one run, and what the page takes of a core at the owner.

python -m benchmarks.ui_turns [--pairs N] [--window N] [--peers N] [--shown-peers N] [--shown-steps N] [--out docs/ui_turns.json]

The idea: real peers in processes of their own train the demo's GPT, and this process owns the run. Of two windows of steps that
follow each other one has the page open: its server runs in this process, and another process reads it as a browser does. The page
shows a mesh and a run that are made up, as large as wanted, with a new step whenever a real one is done. Which window of a pair has
the page alternates. Whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

from benchmarks.measure import Turns, machine, median_interval, row
from benchmarks.one_host import JOB, ROOT
from benchmarks.ui import Mesh as Shown
from benchmarks.ui import a_run, line
from meshcee.capture import capture
from meshcee.files.home import Home
from peers.cli.children import Children
from peers.cli.session import configure_logging, load_job
from peers.cli.ui.server import Site, serving
from peers.cli.ui.sources import MeshSource
from peers.mesh_view import MeshView
from peers.node import JoinOptions, Mesh, join

WARM_UP = 10  # steps before the first window
SETTLES = 2  # steps after the page was opened or closed that count for neither


@dataclass
class Window:
    """Steps that follow each other, all with the page open or all without."""

    steps_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    cpu_s: float = 0.0
    share: float = 0.0  # of a core, in this process

    def begin(self) -> None:
        self.began_s, self.cpu_s = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.share = (time.process_time() - self.cpu_s) / (time.perf_counter() - self.began_s)


class Reader:
    """The process that reads the page."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self.told: list[dict[str, Any]] = []

    async def opens(self, address: str) -> None:
        self._in.write(f"{address}\n".encode())
        answer = (await self._out.readline()).decode().strip()
        if answer != "open":
            raise SystemExit(f"the page was not read: {answer or 'the reader has ended'}")

    async def closes(self) -> None:
        self._in.write(b"\n")
        self.told.append(json.loads(await self._out.readline()))


@asynccontextmanager
async def a_reader() -> AsyncIterator[Reader]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.page_reader", stdin=pipe, stdout=pipe, cwd=ROOT
    )
    try:
        yield Reader(process)
    finally:
        process.kill()
        await process.wait()


class Page:
    """The page of a mesh and of a run that are made up. Its source is read to the end first, as by a page that is open for long."""

    def __init__(self, folder: Path, steps: int, peers: int, reader: Reader) -> None:
        self._run = a_run(Home(folder), steps, peers)
        self._file: TextIO = self._run.report_file.open("a")
        self._step, self._steps = steps, 2 * steps
        self._source = MeshSource(cast(MeshView, Shown(peers)), lambda: self._run, listens=True)
        self._reader = reader

    async def warm_up(self) -> None:
        while await self._source.refresh():
            pass

    def hear(self) -> None:
        """A step is done."""
        self._file.write(line(self._step, self._steps))
        self._file.flush()
        self._step += 1

    @asynccontextmanager
    async def is_open(self) -> AsyncIterator[None]:
        async with serving(Site(self._source, clock=time.time)) as site:
            await self._reader.opens(site.address)
            try:
                yield
            finally:
                await self._reader.closes()


async def windows(mesh: Mesh, page: Page, pairs: int, size: int, peers: int) -> list[dict[bool, Window]]:
    """Of each pair, by whether the page was open."""
    job = replace(load_job(JOB), steps=WARM_UP + 2 * pairs * (SETTLES + size), threads=1, adapt=False)
    training = mesh.train(job, captured=capture(job), stages=peers)
    found: list[dict[bool, Window]] = []

    async def steps(count: int, window: Window | None = None) -> None:
        for _ in range(count):
            report = await anext(training)
            page.hear()
            if window is not None:
                window.steps_s.append(report.step_s)

    async def measured() -> Window:
        await steps(SETTLES)
        window = Window()
        window.begin()
        await steps(size, window)
        window.end()
        return window

    await steps(WARM_UP)
    print(row("pair", "without, s a step", "with the page", "ratio", "of a core more"))
    for number in range(pairs):
        pair: dict[bool, Window] = {}
        for is_open in (True, False)[:: 1 if number % 2 else -1]:
            if is_open:
                async with page.is_open():
                    pair[True] = await measured()
            else:
                pair[False] = await measured()
        found.append(pair)
        without_s, with_s = (statistics.median(pair[which].steps_s) for which in (False, True))
        more = f"{pair[True].share - pair[False].share:.4f}"
        print(row(number, f"{without_s:.4f}", f"{with_s:.4f}", f"{without_s / with_s:.3f}", more), flush=True)
    async for _ in training:  # none is left
        pass
    return found


async def measure(pairs: int, size: int, peers: int, shown_steps: int, shown_peers: int) -> dict[str, Any]:
    about = machine()
    with tempfile.TemporaryDirectory(prefix="meshcee-ui-turns-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with a_reader() as reader, Children(folder / "home") as children:
            token = await children.start_peers(peers, threads=1)
            page = Page(folder / "shown", shown_steps, shown_peers, reader)
            await page.warm_up()
            async with join(JoinOptions(token=token, name="owner"), Home(folder / "home")) as mesh:
                await mesh.agent.wait_for_devices(peers)
                found = await windows(mesh, page, pairs, size, peers)
    turns = Turns(*([statistics.median(pair[which].steps_s) for pair in found] for which in (False, True)))
    low, high = turns.interval()
    more = [pair[True].share - pair[False].share for pair in found]
    return {
        "machine": about,
        "peers": peers,
        "window_steps": size,
        "shown_peers": shown_peers,
        "shown_steps": shown_steps,
        **turns.to_json(),
        "ratio_interval_95": [low, high],
        "owner_cpu_share": {
            "without": statistics.median(pair[False].share for pair in found),
            "with": statistics.median(pair[True].share for pair in found),
            "more": statistics.median(more),
            "more_interval_95": median_interval(more),
        },
        "read": {
            "bytes": sum(one["bytes"] for one in reader.told),
            "messages": sum(one["messages"] for one in reader.told),
        },
        "pairs": [
            {
                "without_s": statistics.median(pair[False].steps_s),
                "with_s": statistics.median(pair[True].steps_s),
                "without_share": pair[False].share,
                "with_share": pair[True].share,
            }
            for pair in found
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--window", type=int, default=20, help="steps of a window")
    parser.add_argument("--peers", type=int, default=2, help="that train")
    parser.add_argument("--shown-peers", type=int, default=50, help="on the page")
    parser.add_argument("--shown-steps", type=int, default=100_000, help="on the page")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    options = parser.parse_args()
    configure_logging(as_json=False, level="error")
    found = asyncio.run(measure(options.pairs, options.window, options.peers, options.shown_steps, options.shown_peers))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    cpu, (low, high) = found["owner_cpu_share"], found["ratio_interval_95"]
    print(
        f"step time without the page over with it: {found['ratio']:.3f}, 95 % interval {low:.3f} to {high:.3f}; "
        f"the owner takes {cpu['with']:.3f} of a core with it and {cpu['without']:.3f} without, {cpu['more']:.4f} more"
    )


if __name__ == "__main__":
    main()
