"""One job at a time: an owner waits until every job that came to the mesh before its own has ended.

The idea: owners announce their job before it runs, with the time at which they came. Who sees an earlier one waits
until it is over, or its record has expired. Records travel, so two owners that come at once may both begin; then a peer
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

__all__ = ["Turn"]


class Turn:
    """One job's. `tell` is given a sentence whenever what it waits for has changed; without it, nothing is waited for.

    `after` is the owner whose run this one goes on with: its record may outlive it.
    """

    def __init__(self, agent: MeshView, job: str, tell: Callable[[str], None] | None, after: str = "") -> None:
        self._agent = agent
        self._tell = tell
        self._ours = {agent.peer_id, after}
        self._record = RunRecord(agent.peer_id, 0.0, job[:100], since=agent.clock())
        self._reported_s = -math.inf

    async def wait(self, key: str) -> bool:
        """Return when no job is before this one, which then is announced as running; whether there was one. NotPermittedError
        where that is the run of this key: another standby was quicker."""
        directory, claim = self._agent.directory, _claim(key, 0, self._agent.peer_id)
        told: list[str] = []
        if self._tell is not None:
            await self._publish(replace(self._record, state="waiting", claim=claim))
            await directory.refresh()
            while before := self._before():
                self._give_way(key, 0, [record for record in before if record.state == "running"])
                if (text := self._describe(before)) not in told[-1:]:
                    told.append(text)
                    self._tell(text)
                await directory.wait_for_change()
        await self._publish(replace(self._record, state="running", claim=claim))
        return bool(told)

    def _before(self) -> list[RunRecord]:
        """Jobs that run, and those that wait and came earlier, in their order."""
        mine = (self._record.since, self._agent.peer_id)
        others = [r for p, r in self._agent.directory.runs.items() if p not in self._ours]
        before = [r for r in others if r.state == "running" or (r.since, r.peer_id) < mine]
        return sorted(before, key=lambda r: (r.state != "running", r.since, r.peer_id))

    def _describe(self, before: list[RunRecord]) -> str:
        owner = self._agent.names().get(before[0].peer_id, "owner")
        more = f", {len(before) - 1} more before this one" if len(before) > 1 else ""
        return f"waiting: {before[0].job!r} of {owner} is {before[0].state}{more}"

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
            if later and other.claim == _claim(key, other.epoch[0], other.peer_id):
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


def _claim(key: str, incarnation: int, owner: str) -> str:
    """Whoever may own the run, or is a member of it, knows its key; nobody else can claim it."""
    return hmac.digest(key.encode(), f"{incarnation} {owner}".encode(), "sha256").hex()
