"""Bytes of others, changed at random, are read or refused, for as long as one likes.

`python -m benchmarks.fuzz [--minutes 10] [--only frames records] [--first 0]` tries every reader of tests/rig/targets.py in
turns, each with its own share of the inputs, and prints a JSON line for each: inputs, inputs per second, how many were refused,
and what went wrong with the number that repeats it. Graphs go to a confined worker, as a peer sends them. Nothing may happen but
an error that is an answer, in bounded time and memory. `--again "TARGET" NUMBER` reads one input once more. Exit code 1 when
anything went wrong.

The idea: an input is its number, so nothing is kept of millions of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import structlog

from benchmarks.measure import machine
from meshcee.config import Limits, Timeouts
from meshcee.errors import GraphError
from peers.device.worker import Workers
from tests.rig.resident import growth
from tests.rig.targets import TARGETS, Target, attempt, case

TURN_S = 0.5  # of one target
MOST_TOLD = 5  # failures of a target
RESIDENT_BYTES = 256 << 20  # by which the process may grow in a turn: what torch holds is not Python's
ENDED = "ended the process", "was not checked within", "needs more memory"  # what a worker is there for


class Tally:
    """Of one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.inputs = self.refused = self.ended = 0
        self.seconds = 0.0
        self.wrong: dict[str, int] = {}

    def add(self, number: int, wrong: str) -> None:
        if len(self.wrong) < MOST_TOLD:
            self.wrong.setdefault(wrong, number)

    def turn(self, first: int, until_s: float) -> None:
        """As many inputs as there is time for, from where the last turn ended; one at least."""
        grown, began_s = growth(), time.monotonic()
        while True:
            number = first + self.inputs
            refused, wrong = attempt(self.target, case(self.target, number))
            self.inputs, self.refused = self.inputs + 1, self.refused + refused
            if wrong:
                self.add(number, wrong)
            if time.monotonic() >= until_s:
                break
        self.seconds += time.monotonic() - began_s
        if (size := grown()) > RESIDENT_BYTES:
            self.add(number, f"the process grew by {size >> 20} MiB in the turn up to this input")

    def to_json(self) -> dict[str, Any]:
        told = {"target": self.target.name, "inputs": self.inputs, "per_s": round(self.inputs / self.seconds)}
        ended = {"ended_a_worker": self.ended} if self.ended else {}
        wrong = [{"number": number, "what": what} for what, number in self.wrong.items()]
        return {**told, "refused": self.refused, **ended, **({"wrong": wrong} if wrong else {})}


@contextlib.asynccontextmanager
async def tallies_of(targets: Sequence[Target]) -> AsyncIterator[list[Tally]]:
    """Graphs are read by a worker, the rest here."""
    async with Workers(Limits(), Timeouts()) as workers:
        await workers.get_ready()
        loop = asyncio.get_running_loop()
        tallies = [Tally(target) for target in targets]

        def read(data: bytes) -> None:
            try:
                asyncio.run_coroutine_threadsafe(workers.read([data]), loop).result()
            except GraphError as error:
                graphs.ended += any(words in str(error) for words in ENDED)
                raise

        for graphs in (tally for tally in tallies if tally.target.name == "graphs"):
            graphs.target = replace(graphs.target, read=read)
        yield tallies


async def run(targets: Sequence[Target], minutes: float, first: int) -> int:
    """How many failures there were."""
    end_s = time.monotonic() + 60 * minutes
    async with tallies_of(targets) as tallies:
        while time.monotonic() < end_s:
            for tally in tallies:
                await asyncio.to_thread(tally.turn, first, min(end_s, time.monotonic() + TURN_S * tally.target.share))
    for tally in tallies:
        print(json.dumps(tally.to_json()), flush=True)
    inputs, seconds = sum(tally.inputs for tally in tallies), sum(tally.seconds for tally in tallies)
    wrong = sum(len(tally.wrong) for tally in tallies)
    print(json.dumps({"inputs": inputs, "per_s": round(inputs / seconds), "wrong": wrong, "machine": machine()}))
    return wrong


def again(name: str, number: int) -> int:
    """One input, with the traceback of what goes wrong."""
    target = next(target for target in TARGETS if target.name == name)
    value = case(target, number)
    print(repr(value)[:4000])
    refused, wrong = attempt(target, value)
    print("refused" if refused else "read", wrong)
    if not refused:
        target.read(value)
    return bool(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="targets with one of these in their names"
    )
    parser.add_argument("--again", nargs=2, metavar=("TARGET", "NUMBER"))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if options.again:
        sys.exit(again(options.again[0], int(options.again[1])))
    chosen = [target for target in TARGETS if any(word in target.name for word in options.only)]
    sys.exit(1 if asyncio.run(run(chosen, options.minutes, options.first)) else 0)


if __name__ == "__main__":
    main()
