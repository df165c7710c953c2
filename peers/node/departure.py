"""How a peer leaves: politely, when a signal or another member of the mesh asks it to.

The idea: a peer that holds a stage says that it leaves and goes on computing. The owner of the job finishes the step,
takes the state, and begins the next epoch without it. That makes the peer idle, and then it goes. An idle peer goes at
once, and after `leave_s` any peer does: the owner then goes on as after a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from dht import PeerRecord
from meshcee.config import LONGEST_LEAVE_S
from meshcee.errors import JoinError, ProtocolError, UsageError
from peers.node.agent import Agent
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages, need

__all__ = ["Departure", "ask_to_leave", "find_peer", "matching"]

log = structlog.get_logger()

SHOWN = 8  # characters at the end of a peer id, which `meshcee status` prints


class Departure:
    """One agent's. `run` returns when it is time to end the agent; serves the stream `leave`."""

    def __init__(self, agent: Agent) -> None:
        self.is_drained = False  # another member has asked: it shall not come back by itself
        self._agent = agent
        self._asked = asyncio.Event()
        self._over = asyncio.Event()
        self._asking: list[Stream] = []
        agent.transport.serve("leave", self.serve)

    def ask(self) -> None:
        self._asked.set()

    async def run(self) -> bool:
        """Wait until somebody asks, then leave; whether no job has lost a stage with this peer."""
        await self._asked.wait()
        log.info("leaving", within_s=self._agent.timeouts.leave_s)
        in_time = await self._agent.leave()
        for stream in self._asking:
            with contextlib.suppress(StreamClosed, TimeoutError):
                async with asyncio.timeout(self._agent.timeouts.shutdown_s):
                    await stream.send(Frame(messages.LEFT, {"in_time": in_time}))
                    await stream.aclose()
        self._over.set()
        return in_time

    async def serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = 0
        async with asyncio.timeout(self._agent.timeouts.join_s):
            frame = await stream.recv()
        _expected(messages.LEAVE, frame)
        log.info("asked to leave", by=stream.peer_id)
        supplies = sorted(self._agent.data.supplies) if self._agent.data is not None else []
        await stream.send(Frame(messages.LEAVING, {"within_s": self._agent.timeouts.leave_s, "supplies": supplies}))
        self._asking.append(stream)
        self.is_drained = True
        self.ask()
        await self._over.wait()


def matching(known: Mapping[str, PeerRecord], wanted: str) -> list[PeerRecord]:
    """The peer of this id, else all of this name and all whose id begins or ends so: no name stands in for part of an id."""
    if wanted in known:
        return [known[wanted]]
    ending = wanted.removeprefix("…")
    parts = {p for p in known if len(ending) >= SHOWN and (p.startswith(wanted) or p.endswith(ending))}
    return [r for p, r in known.items() if r.name == wanted or p in parts]


def find_peer(known: Mapping[str, PeerRecord], wanted: str) -> PeerRecord:
    """The peer of this name, or whose id begins like this or ends like this, as `meshcee status` shows it.

    Raises UsageError when none does, several do, or it lends no device.
    """
    found = matching(known, wanted)
    lending = sorted(f"{r.name} ({p})" for p, r in known.items() if r.device is not None)
    if not found:
        raise UsageError(f"no peer of this mesh is called {wanted!r}; there are {', '.join(lending) or 'none'}")
    if len(found) > 1:
        which = ", ".join(sorted(f"{r.name} ({r.peer_id})" for r in found))
        raise UsageError(f"{wanted!r} means {len(found)} peers: {which}; give a whole id")
    if found[0].device is None:
        raise UsageError(f"{found[0].name} lends no device: it owns a job; end that with `meshcee run stop` there")
    return found[0]


async def ask_to_leave(agent: Agent, peer_id: str, hear: Callable[[float, list[str]], None]) -> bool:
    """Ask; return when the peer has gone: whether it left without a job losing a stage.

    `hear` is told once how many seconds it may take, and the names of the peer's sets that jobs are fed from. Raises JoinError when
    the peer does not answer, or stays.
    """
    name = agent.names().get(peer_id, peer_id)
    stream = await agent.transport.open(peer_id, "leave", agent.addresses_of([peer_id]).get(peer_id, ()))
    stream.max_payload_bytes = 0
    in_time = False
    try:
        async with asyncio.timeout(agent.timeouts.join_s) as limit:
            await stream.send(Frame(messages.LEAVE))
            header = _expected(messages.LEAVING, await stream.recv())
            within_s = need(header, "within_s", float)
            if not 0 <= within_s <= LONGEST_LEAVE_S:
                raise ProtocolError(f"peer {name} wants to leave within {within_s} s")
            hear(within_s, need({"supplies": [], **header}, "supplies", list[str]))
            limit.reschedule(asyncio.get_running_loop().time() + within_s + agent.timeouts.join_s)
            in_time = need(_expected(messages.LEFT, await stream.recv()), "in_time", bool)
    except StreamClosed:
        pass  # it went at once: somebody asked twice, or it died
    except TimeoutError as error:
        raise JoinError(f"peer {name} was asked to leave and does not: try a second signal on its machine") from error
    finally:
        stream.abort()
    with contextlib.suppress(TimeoutError):  # its last word, or else its record expires
        async with asyncio.timeout(agent.timeouts.shutdown_s + agent.timeouts.record_ttl_s):
            await agent.directory.wait_for(lambda: peer_id not in agent.directory.peers)
    return in_time


def _expected(kind: str, frame: Frame) -> Mapping[str, Any]:
    if frame.kind != kind:
        raise ProtocolError(f"expected {kind!r}, got a frame of kind {frame.kind!r}")
    return frame.header
