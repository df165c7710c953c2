"""`python -m benchmarks.ten_minutes`: from nothing to a training run in view, on two machines, by four commands.

Two namespaces of the WAN lab are the machines anna and ben, on a LAN; it needs root, as the lab does. Each command is what a user
types, each line what it said, with the time since the first one. With --write the transcript goes into docs/ten-minutes.md.

The idea: what the pages promise is played once for real, and what was seen is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lab import Host, Lab, Link, Network
from meshcee.errors import MeshceeError, unwrap

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ten-minutes.md"
LAN = Network((Host("anna", "office", 125e6), Host("ben", "office", 125e6)), (Link("office", "office", 0.0002),))
WITHIN_S = 600.0  # all of it
LOG = re.compile(r"\d\d:\d\d:\d\d \[(info|debug) *\]")  # its lines are left out
SEEN_STEPS = 20  # that the page has shown
LOOK = """
import json, sys, time, urllib.request
address, steps = sys.argv[1].replace("/?", "/picture.json?"), int(sys.argv[2])
while True:
    shown = json.load(urllib.request.urlopen(address, timeout=30))
    run, plan, mesh = shown["run"], shown["plan"], shown["mesh"]
    if run and plan and run["step"] >= steps and run["loss"] is not None:
        seats = ", ".join(f"stage {seat['label']} on {seat['name']}" for seat in plan["seats"])
        peers = ", ".join(peer["name"] for peer in mesh["peers"] if peer["device"])
        print(f"(on the page) {run['name']}: step {run['step']}, loss {run['loss']:.4f}; {seats}; devices of {peers}")
        break
    time.sleep(1)
"""


@dataclass
class Transcript:
    """Lines with the seconds since the first, and the machine that they stand on."""

    begun_s: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, host: str, text: str) -> None:
        if text.strip() and not LOG.match(shortened(text)):
            self.lines.append((time.monotonic() - self.begun_s, host, shortened(text.rstrip())))
            print(self.line(-1), flush=True)

    def line(self, number: int) -> str:
        at_s, host, text = self.lines[number]
        return f"{int(at_s) // 60}:{int(at_s) % 60:02d}  {host:<5} {text}"

    def text(self) -> str:
        return "\n".join(map(self.line, range(len(self.lines))))


def shortened(text: str) -> str:
    """Without what nobody can use later: the rest of a line to join with, ids, a token, colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    text = re.sub(r"(meshcee2\.[\w-]{12})\S+", r"\1...", text)
    text = re.sub(r"(12D3KooW)\w{40}(\w{4})", r"\1...\2", text)
    return re.sub(r"(token=[\w-]{4})[\w-]+", r"\1...", text)


@dataclass
class Machine:
    """A namespace with a home folder of its own."""

    lab: Lab
    name: str
    home: Path
    told: Transcript

    @asynccontextmanager
    async def types(self, *words: str, shown: str = "") -> AsyncIterator[Command]:
        """A command in a terminal of its own, until the block ends; then Ctrl-C, as its user would."""
        self.told.add(self.name, f"$ {shown or ' '.join(('meshcee', *words))}")
        async with self.starts(sys.executable, "-m", "meshcee", *words) as command:
            yield command

    @asynccontextmanager
    async def starts(self, *words: str) -> AsyncIterator[Command]:
        names = {"MESHCEE_NAME": self.name, "MESHCEE_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **names, "MESHCEE_HOME": str(self.home / ".meshcee"), "PYTHONPATH": str(ROOT)}
        process = await self.lab.run(
            self.name, words, env=environment, cwd=self.home,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        command = Command(process)
        async with asyncio.TaskGroup() as group:
            hearing = group.create_task(command.hear(lambda text: self.told.add(self.name, text)))
            try:
                yield command
            finally:
                if process.returncode is None:
                    process.send_signal(signal.SIGINT)
                try:
                    async with asyncio.timeout(60):
                        await hearing
                        await process.wait()
                except TimeoutError:
                    process.kill()


class Command:
    """What runs in one terminal, and what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._said: list[str] = []
        self._more = asyncio.Event()

    async def hear(self, tell: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self._said.append(line.decode(errors="replace"))
            tell(self._said[-1])
            self._more.set()
        self._said.append("")
        self._more.set()

    async def until(self, pattern: str) -> str:
        """The first group of what it has said that matches; MeshceeError where it ends without saying so."""
        while not (found := re.search(pattern, "".join(self._said))):
            if self._said[-1:] == [""]:
                raise MeshceeError(f"a command has ended without {pattern!r}: {''.join(self._said)[-2000:]}")
            self._more.clear()
            await self._more.wait()
        return found[1]


async def play(job: str, told: Transcript) -> None:
    """MeshceeError where a command does not say what it should."""
    with tempfile.TemporaryDirectory(prefix="meshcee-ten-minutes-") as folder:
        async with asyncio.timeout(WITHIN_S), Lab(LAN) as lab:
            anna, ben = (Machine(lab, name, Path(folder) / name, told) for name in ("anna", "ben"))
            for machine in (anna, ben):
                machine.home.mkdir()
                (machine.home / "examples").symlink_to(ROOT / "examples")
            told.begun_s = time.monotonic()
            async with anna.types("peer") as first:
                line = await first.until(r"meshcee peer --join (\S+)")
                async with ben.types("peer", "--join", line) as second:
                    await second.until(r"(joined .*)\n")
                    async with (
                        anna.types("train", job, "--join", line) as training,
                        ben.types("ui", "--join", line) as page,
                    ):
                        address = await page.until(r"the page: (\S+)")
                        await training.until(r"(step +\d+/)")
                        async with ben.starts(sys.executable, "-c", LOOK, address, str(SEEN_STEPS)) as look:
                            await look.until(r"(on the page)")
                        told.add("anna", "^C, once it was seen")


SECTION = """## What they said

The two machines are network namespaces on one Linux machine, each peer with one thread. Lines to join with, ids and tokens are
cut short, and the log is left out. The first column is minutes and seconds since the first command. The job is so small that
one device may be as fast as two: here the plan takes both, another time one of them; `--stages 2` asks for both.
"""


def write(told: Transcript) -> None:
    """Into the page, between its marks."""
    begin, end = "<!-- transcript -->\n", "<!-- end of transcript -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n{SECTION}\n```text\n{told.text()}\n```\n\n{end}{rest.partition(end)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ten_minutes", description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="examples/digits.py")
    parser.add_argument("--write", action="store_true", help="put the transcript into docs/ten-minutes.md")
    options = parser.parse_args()
    told = Transcript()
    try:
        asyncio.run(play(options.job, told))
    except (MeshceeError, TimeoutError, ExceptionGroup) as error:
        why = unwrap(error)
        sys.exit(f"ten_minutes: {f'not done within {WITHIN_S:.0f} s' if isinstance(why, TimeoutError) else why}")
    seen_s = next(at_s for at_s, _, text in told.lines if text.startswith("(on the page)"))
    print(f"\nin view after {seen_s:.0f} s")
    if options.write:
        write(told)


if __name__ == "__main__":
    main()
