"""A longer search beside a running job: one process at a time, which ends with its answer, with the job or with this process.

The idea: the search is in meshcee/adapt/longer.py; here is who starts it and when. It begins when nothing has changed for a while.
"""

from __future__ import annotations

import asyncio
import math
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable

import structlog

from meshcee.errors import MeshceeError
from meshcee.figures import JobCosts, Measured
from meshcee.plan import Plan
from peers.device import own_python
from peers.mesh_view import MeshView
from peers.planning.coordinator import PlanRequest

__all__ = ["Longer"]

log = structlog.get_logger()

WITHIN_S = 3600.0  # an answer that comes later is of another mesh
WORTH_S = 300.0  # that a job still takes, at least: a few percent of less are not worth half a minute of computing
SHARE = 0.1  # of the time, at most, searches run


class Longer:
    """One job's."""

    def __init__(self, agent: MeshView, *, is_wanted: bool = True) -> None:
        self._found: tuple[Plan, ...] = ()  # that nobody has taken yet
        self._agent = agent
        self._is_wanted = is_wanted
        self._is_due = is_wanted  # something has changed since the last answer
        self._not_before_s = -math.inf
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Another search is worth its time. One that is under way goes on: what it finds is priced under the figures of then."""
        self._is_due = self._is_wanted

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def take(self) -> tuple[Plan, ...]:
        """What has been found since the last time."""
        found, self._found = self._found, ()
        return found

    def look(self, measured: Callable[[], Measured], request: PlanRequest, plan: Plan, left_s: float) -> None:
        """Begin, if there is reason to: called with every step of a plan under which nothing has changed for a while."""
        if (
            not self._is_due
            or self._task is not None
            or self._agent.monotonic() < self._not_before_s
            or left_s < WORTH_S
        ):
            return
        self._is_due, mesh = False, measured()
        if len(mesh.devices) > 1 and self._is_apart(mesh, plan):
            self._task = self._agent.spawn(self._search(mesh, request.job, request.stages))

    def _is_apart(self, mesh: Measured, plan: Plan) -> bool:
        """Whether no member computes on this machine's processor: its steps would show a slower device."""
        here = self._agent.host
        return bool(here) and not any(
            (d := mesh.devices.get(p)) and d.kind == "cpu" and d.host == here for p in plan.peers
        )

    async def _search(self, mesh: Measured, job: JobCosts, stages: int | None) -> None:
        from meshcee.adapt.longer import LongerQuestion, plans_of

        began_s = self._agent.monotonic()
        question = await asyncio.to_thread(LongerQuestion.of(mesh, job, stages).pack)
        try:
            async with asyncio.timeout(WITHIN_S):
                answer = await _answer(question)
            self._found = tuple(await asyncio.to_thread(plans_of, answer))
        except (MeshceeError, OSError, TimeoutError) as error:  # the job has a plan
            log.info("no longer search", error=str(error))
        took_s = self._agent.monotonic() - began_s
        self._not_before_s = self._agent.monotonic() + took_s / SHARE
        self._task = None
        log.info("a longer search has ended", took_s=round(took_s, 1), plans=len(self._found))


async def _answer(question: bytes) -> bytes:
    """Of a process that is gone afterwards, whatever happens. MeshceeError where it fails, OSError where none can be started."""
    command = own_python("meshcee.adapt.longer")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question)
        await process.stdin.drain()
        answer = await process.stdout.read()  # standard input stays open: its end would end the search
        if await process.wait():
            raise MeshceeError(f"the search has ended with status {process.returncode}")
        return answer
    finally:
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await asyncio.shield(process.wait())
