"""A longer search for a plan than the first one, in a process of its own, with time that nothing else on the machine wants.

The idea: a job waits for its first plan, so that plan is found in a second or two. With LONGER times the effort the same search
finds plans that are 3 % faster in the mean, and 16 % at most (docs/benchmarks/planner.md). It takes half a minute, and nobody waits
for that. Figures go in and plans come out as msgpack: no torch, no pickle. Whoever asks keeps standard input open, and this process
ends when standard input is closed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgpack
from msgspec import Meta

from meshcee.errors import PlanError
from meshcee.fields import plain, read, unpack
from meshcee.figures import JobCosts, LinkProfile, Measured
from meshcee.plan import Plan
from meshcee.planner import EFFORT, choose

__all__ = ["LONGER", "LongerQuestion", "main", "plans_of"]

LONGER = 50  # times the effort of the first search
MOST_BYTES = 64 << 20
LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class LongerQuestion:
    """What to plan, on what, with how much effort."""

    mesh: Measured  # without its links, as a key of a map in msgpack is no pair
    links: tuple[tuple[str, str, LinkProfile], ...]
    job: JobCosts
    stages: Annotated[int, Meta(ge=1)] | None = None
    times: float = 1.0

    @classmethod
    def of(cls, mesh: Measured, job: JobCosts, stages: int | None) -> LongerQuestion:
        blocks = [replace(cost, parameters=()) for cost in job.blocks]  # a planner needs no names of parameters
        links = tuple((a, b, link) for (a, b), link in mesh.links.items())
        return cls(replace(mesh, links={}), links, replace(job, blocks=blocks), stages, LONGER)

    def pack(self) -> bytes:
        """As `main` reads it."""
        data = bytes(msgpack.packb(plain(self)))
        return LENGTH.pack(len(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> LongerQuestion:
        return read(unpack(data, MOST_BYTES, "a question"), cls, "a question")

    def answer(self) -> bytes:
        """The best plan and the next ones, best first; none where nothing fits."""
        mesh = replace(self.mesh, links={(a, b): link for a, b, link in self.links})
        found: list[Plan] = []
        with contextlib.suppress(PlanError):
            choice, _, _ = choose(mesh, self.job, self.stages, EFFORT.times(self.times, rows=self.times))
            found = choice.candidates
        return bytes(msgpack.packb([plan.to_json() for plan in found]))


def plans_of(answer: bytes) -> list[Plan]:
    """What `answer` has packed. ProtocolError or PlanError for anything else."""
    told: list[Any] = read(unpack(answer, MOST_BYTES, "an answer"), list[dict[str, Any]], "an answer")
    return [Plan.from_json(each) for each in told]


def main() -> None:
    """A question from standard input, its answer to standard output."""
    _give_way()
    [size] = LENGTH.unpack(sys.stdin.buffer.read(LENGTH.size))
    question = LongerQuestion.unpack(sys.stdin.buffer.read(min(size, MOST_BYTES)))
    threading.Thread(target=_end_with_who_asked, daemon=True).start()
    sys.stdout.buffer.write(question.answer())
    sys.stdout.buffer.flush()


def _give_way() -> None:
    """Run only where nothing else wants to run; on other systems than Linux, behind everything else."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _end_with_who_asked() -> None:
    os.read(sys.stdin.fileno(), 1)  # below Python's buffer, whose lock this thread would hold when Python ends
    os._exit(1)
