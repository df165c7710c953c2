"""A second owner in waiting: follows a run on another machine, and says when its owner is gone.

The idea: a standby takes over when it cannot reach the owner and the mesh has heard nothing of the owner either. It may be wrong,
where the mesh itself is cut in two. Then both go on; the members follow the one of the later incarnation (peers/member/service.py),
which is the standby's, and refuse the other. So nobody has to agree on who is dead, and some seconds of silence are enough.
A run whose owner died before there was a standby, or told peers more than this one, goes on from what they keep of its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from meshcee.capture import Capture
from meshcee.errors import JoinError, MeshceeError, NotPermittedError
from meshcee.fields import read
from meshcee.files import Trouble
from meshcee.files.home import About, Home, Run
from meshcee.job import Job
from meshcee.sampling.again import check_samples, sample_digests
from peers.mesh_view import MeshView
from peers.owner.turn import claims
from peers.state.checkpoint import check_same, check_weights, first_weights
from peers.state.journal import Found, Mirror, seek, take
from peers.state.shelf import Shelf
from peers.transport import StreamClosed

__all__ = ["lives", "same_run", "stand_by"]

log = structlog.get_logger()

RETURNS_S = 4.0  # in which an owner of whom nobody has heard any more may come back
AGAIN_S = 0.5
WHAT = "the run that is followed"


def same_run(job: Job, captured: Capture) -> Callable[[Mapping[str, Any]], None]:
    """Of what a run is; raises UsageError where this job could not go on with it."""
    own, samples = first_weights(captured), sample_digests(job)

    def check(info: Mapping[str, Any]) -> None:
        check_same(job, captured, info.get("job", {}), int(info.get("micro_batch", 0)))
        check_weights(own, (about := read(info, About, "the run", defaults=True)).weights, again=True)
        check_samples(samples, about.samples)

    return check


async def stand_by(
    agent: MeshView,
    own: Shelf,
    home: Home,
    job: str,
    check: Callable[[Mapping[str, Any]], None],
    tell: Callable[[str], None],
) -> tuple[str, str] | None:
    """Follow the run of this job: its id and its owner once that is gone, or None when it has ended by itself.

    `own` is what this peer itself keeps of journals. `check` is given what the run is, and raises where this machine could not
    go on with it.
    """
    loop = asyncio.get_running_loop()
    trouble = Trouble(loop.time)
    mirror: Mirror | None = None
    owner, process, followed, lost_s, silent_at = "", "", "", -1.0, math.inf
    told: list[str] = []

    def caught_up() -> None:
        nonlocal followed, process
        trouble.over(WHAT)
        process = process or _process(agent, owner)
        if followed != owner:
            followed = owner
            tell(f"standing by: following {job!r} of {agent.names().get(owner, owner)}")

    def told_once(text: str) -> None:
        if text not in told:
            told.append(text)
            tell(text)

    while True:
        if mirror is None or mirror.run is None:
            if (running := await _owner_of(agent, job)) is None:
                told_once(f"standing by: no run of {job!r} in this mesh yet")
                try:
                    if (left := await _orphan(agent, own, home, job, check, told_once)) is not None:
                        return left
                except OSError as error:
                    trouble.tell(WHAT, error)
                continue
            owner, process = running, ""
            mirror, lost_s = Mirror(home, owner, check), -1.0
        elif (other := _running(agent, job, but=owner, key=mirror.run.about.key or "")) is not None:
            owner, process = other, ""  # it was resumed elsewhere, or another standby was quicker
            mirror, lost_s = Mirror(home, owner, check), -1.0
        is_another = process not in ("", _process(agent, owner) or process)
        if is_another and mirror.run is not None and _goes_on(agent, owner, mirror.run.about.key or ""):
            process, is_another = "", False  # it was resumed where it was
        try:
            if is_another:
                raise JoinError("another process has its identity now, and does not run it")
            stream = await agent.transport.open(owner, "follow", agent.addresses_of([owner]).get(owner, ()))
            lost_s = -1.0
            async with contextlib.aclosing(stream):
                await mirror.follow(stream, job, agent.timeouts, caught_up)
            return None
        except (JoinError, NotPermittedError, StreamClosed, TimeoutError) as error:
            followed = ""
            log.info("the run's owner does not answer", owner=owner, error=str(error))
        except OSError as error:  # of this machine's disk; all is read anew
            trouble.tell(WHAT, error)
        run = mirror.run
        if run is not None and owner in agent.directory.over and not is_another:
            return None
        if not is_another and lives(agent, owner):
            sent_at = agent.directory.peers[owner].sent_at
            if run is None or owner in agent.directory.runs:
                silent_at = math.inf
            elif silent_at not in (math.inf, sent_at):
                return None  # it announces itself, and no run any more: its last word was lost
            else:  # the records of an owner that is dead expire one after the other
                silent_at = sent_at
            lost_s = loop.time()
        elif lost_s < 0:
            lost_s = loop.time()
        elif run is not None and loop.time() - lost_s > RETURNS_S:
            try:
                found, over = await seek(agent, own, job)
                if any(word.run == run.id and word.order >= (mirror.standing[0], owner) for word in over):
                    return None  # all but this machine have heard so
                owner = await _caught_up(agent, own, home, mirror, found) or owner
            except OSError as error:  # what is here already has to do
                trouble.tell(WHAT, error)
            tell(f"the owner of run {run.id} is gone: this machine goes on with it")
            return run.id, owner
        await asyncio.sleep(AGAIN_S)


def lives(agent: MeshView, peer: str) -> bool:
    """Whether the mesh still hears of a peer; its record expires some seconds after it has died."""
    return peer in agent.directory.peers


def _process(agent: MeshView, peer: str) -> str:
    """Which process the peer is now."""
    record = agent.directory.peers.get(peer)
    return record.instance if record is not None else ""


def _goes_on(agent: MeshView, owner: str, key: str) -> bool:
    """Whether the process that its owner is now runs it, by its record."""
    record, peer = agent.directory.runs.get(owner), agent.directory.peers.get(owner)
    return record is not None and claims(record, key) and peer is not None and record.sent_at >= peer.started_at


async def _owner_of(agent: MeshView, job: str) -> str | None:
    """The peer that runs this job; None where there is none for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RETURNS_S):
            while (owner := _running(agent, job)) is None:
                await agent.directory.wait_for_change()
            return owner
    return None


async def _orphan(
    agent: MeshView,
    own: Shelf,
    home: Home,
    job: str,
    check: Callable[[Mapping[str, Any]], None],
    tell: Callable[[str], None],
) -> tuple[str, str] | None:
    """A run of this job of which the mesh has a journal and no owner, taken up: its id and its owner."""
    found, _ = await seek(agent, own, job)
    dead = {f.seal.owner for f in found if f.seal.owner == agent.peer_id or not lives(agent, f.seal.owner)}
    heard = {f.seal.run for f in found if f.is_live or f.seal.owner not in dead}
    for run_id in dict.fromkeys(f.seal.run for f in found if f.seal.run not in heard):
        if Run(home.folder / "runs" / run_id).result:
            continue  # it has ended, on this machine
        mirror = Mirror(home, "", check)
        try:
            seal = await take(agent, own, home, mirror, [f for f in found if f.seal.run == run_id])
        except MeshceeError as error:  # of another job of this name
            tell(f"run {run_id}, whose owner is gone, is left alone: {error}")
            continue
        if seal is not None:
            tell(f"the owner of run {run_id} is gone: this machine goes on with it, from the journal that a peer keeps")
            return run_id, seal.owner
    return None


async def _caught_up(agent: MeshView, own: Shelf, home: Home, mirror: Mirror, found: Sequence[Found]) -> str | None:
    """Let the mirror of a run whose owner is gone have what peers know of it and this machine does not; its owner then."""
    assert mirror.run is not None
    run_id, standing = mirror.run.id, mirror.standing
    newer = [f for f in found if f.seal.run == run_id and f.seal.standing > standing]
    seal = await take(agent, own, home, mirror, newer)
    return seal.owner if seal is not None else None


def _running(agent: MeshView, job: str, but: str = "", key: str = "") -> str | None:
    """The owner of the newest run of this job that is not of the peer `but`, nor ours. With a `key` only of the run of that one:
    other jobs may have the same name."""
    found = [
        record
        for peer, record in agent.directory.runs.items()
        if record.job == job[:100] and record.state == "running" and peer not in (agent.peer_id, but)
    ]
    found = [record for record in found if not key or claims(record, key)]
    return max(found, key=lambda record: record.since).peer_id if found else None
