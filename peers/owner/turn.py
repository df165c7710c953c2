"""One job at a time: an owner waits until every job that came to the mesh before its own has ended.

The idea: owners announce their job before it runs, with the time at which they came. Who sees an earlier one waits
until it is over. A record that expires without a word is of a dead owner. For some seconds a standby may still go on with its run,
or who resumes it: that one goes before all who wait. Records travel, so two owners that come at once may both begin; then a peer
that is taken refuses one of them, and that one goes back to its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from dht import RunRecord
from meshcee.errors import NotPermittedError
from meshcee.plan import Epoch, Plan
from peers.mesh_view import MeshView

__all__ = ["Turn", "claims"]

TAKEN_UP_S = 30.0  # in which a standby goes on with the run of an owner that is dead


class Turn:
    """One job's. `tell` is given a sentence whenever what it waits for has changed; without it, nothing is waited for.

    `goes_on`: it goes on with a run that had begun. `after` is the owner whose run that was: its record may outlive it.
    """

    def __init__(
        self, agent: MeshView, job: str, tell: Callable[[str], None] | None, after: str = "", *, goes_on: bool = False
    ) -> None:
        self._agent = agent
        self._tell = tell
        self._ours = {agent.peer_id, after}
        self._goes_on = goes_on
        self._seen: dict[str, tuple[RunRecord, float]] = {}  # by owner: running, and when it was last heard of
        self._record = RunRecord(agent.peer_id, 0.0, job[:100], since=agent.clock())
        self._reported_s = -math.inf

    async def wait(self, key: str) -> bool:
        """Return when no job is before this one, which then is announced as running; whether there was one. NotPermittedError
        where that is the run of this key: another standby was quicker."""
        directory, claim = self._agent.directory, _claim(key, 0, self._agent.peer_id)
        told, missed = list[str](), set[str]()
        if self._tell is not None:
            await self._publish(replace(self._record, state="waiting", claim=claim))
            await directory.refresh()
            while before := self._before(key):
                if new := {r.peer_id for r in before} - directory.runs.keys() - missed:
                    missed |= new
                    await directory.refresh()  # runs are read more rarely than peers: it may have ended before it went
                    continue
                self._give_way(key, 0, [r for r in before if r.state == "running" and r.peer_id in directory.runs])
                if (text := self._describe(before)) not in told[-1:]:
                    told.append(text)
                    self._tell(text)
                await directory.wait_for_change()
        await self._publish(replace(self._record, state="running", claim=claim))
        return bool(told)

    def _before(self, key: str) -> list[RunRecord]:
        """Jobs that run, or that somebody may go on with, and those that wait and came earlier, in their order."""
        directory, now_s = self._agent.directory, self._agent.monotonic()
        here = {p: r for p, r in directory.runs.items() if p not in self._ours}
        gone = {
            p: x for p, x in self._seen.items() if p not in here and p not in directory.over and not claims(x[0], key)
        }
        self._seen = {p: x for p, x in gone.items() if now_s - x[1] < TAKEN_UP_S}
        self._seen |= {p: (r, now_s) for p, r in here.items() if r.state == "running"}
        waiting = [r for r in here.values() if r.state == "waiting" and not self._goes_on]
        waiting = [r for r in waiting if _order(r) < _order(self._record)]
        return [*sorted((r for r, _ in self._seen.values()), key=_order), *sorted(waiting, key=_order)]

    def _describe(self, before: list[RunRecord]) -> str:
        first = before[0]
        owner = self._agent.names().get(first.peer_id, "owner")
        more = f", {len(before) - 1} more before this one" if len(before) > 1 else ""
        gone = first.peer_id not in self._agent.directory.runs
        return f"waiting: {first.job!r} of {owner} is {'gone, and may go on elsewhere' if gone else first.state}{more}"

    def report(self, key: str, epoch: Epoch, step: int, loss: float, plan: Plan) -> None:
        """Tell the mesh, now and then, how far the run of this key is. NotPermittedError where a later owner goes on with it."""
        now_s, me = self._agent.monotonic(), self._agent.peer_id
        if now_s - self._reported_s > self._agent.timeouts.announce_every_s:
            self._reported_s, claim = now_s, _claim(key, epoch[0], me)
            self._record = replace(self._record, epoch=epoch, step=step, loss=loss, plan=plan.to_json(), claim=claim)
            self._agent.directory.tell(self._record)
            self._give_way(key, epoch[0], self._agent.directory.runs.values())

    def _give_way(self, key: str, incarnation: int, others: Iterable[RunRecord]) -> None:
        """Members follow the later of two owners by themselves, but two may share none."""
        for other in others:
            later = (other.epoch[0], other.peer_id) > (incarnation, self._agent.peer_id if incarnation else "")
            if later and claims(other, key):
                name = self._agent.names().get(other.peer_id, other.peer_id)
                raise NotPermittedError(f"{name} owns the run now: it goes on there")

    async def end(self) -> None:
        """The next one may begin."""
        await self._agent.directory.withdraw(RunRecord)
        with contextlib.suppress(TimeoutError):  # then the record expires
            async with asyncio.timeout(self._agent.timeouts.shutdown_s):
                await self._agent.directory.write(replace(self._record, state="over"), is_news=True)

    async def _publish(self, record: RunRecord) -> None:
        self._record = record
        await self._agent.directory.publish(record)


def _order(record: RunRecord) -> tuple[float, str]:
    return record.since, record.peer_id


def claims(record: RunRecord, key: str) -> bool:
    """Whether the record is of the run of this key."""
    return record.claim == _claim(key, record.epoch[0], record.peer_id)


def _claim(key: str, incarnation: int, owner: str) -> str:
    """Who may follow the run, as everybody with the role `own`, or is a member of it, knows its key; nobody else can claim it."""
    return hmac.digest(key.encode(), f"{incarnation} {owner}".encode(), "sha256").hex()
