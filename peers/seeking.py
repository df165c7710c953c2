"""A standby asks peers for journals that they keep, of owners that are gone, and takes the newest that is whole.

The idea: every peer is asked, and what it says is believed as far as the owner has signed it. A journal comes into a folder of its
own, no larger than its seal says, and counts once its digests are right; a peer that has another one is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from meshcee import disk
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError
from peers import messages
from peers.home import Home
from peers.journal import MOST_BYTES, Mirror
from peers.mesh_view import MeshView
from peers.messages import need
from peers.shelf import CHUNK_BYTES, MOST_NAME_CHARACTERS, MOST_RUNS, MOST_SEAL_BYTES, REPORTS, Seal
from peers.transport.base import Frame, Stream, StreamClosed

__all__ = ["Found", "seek", "take"]

log = structlog.get_logger()

AT_ONCE = 16  # peers that are asked
ANSWERS_WITHIN_S = 4.0
FAILURES = MeshceeError, StreamClosed, TimeoutError


class Found(NamedTuple):
    """A journal that a peer keeps."""

    seal: Seal
    peer: str
    is_live: bool  # whether that peer still hears its owner


async def seek(agent: MeshView, job: str) -> list[Found]:
    """Of this job, at all peers; newest first within a run, and runs by their last word."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(peer: str) -> list[Found]:
        try:
            async with limit, asyncio.timeout(ANSWERS_WITHIN_S), _shelf(agent, peer, job) as (_, found):
                return found
        except FAILURES as error:
            log.debug("a peer does not say which journals it keeps", peer=peer, error=str(error))
            return []

    others = sorted(agent.directory.peers.keys() - {agent.peer_id})
    found = [one for answer in await asyncio.gather(*map(ask, others)) for one in answer]
    last = {seal.run: max(f.seal.sealed_at for f in found if f.seal.run == seal.run) for seal, _, _ in found}
    return sorted(found, key=lambda f: (last[f.seal.run], f.seal.run, f.seal.order), reverse=True)


async def take(agent: MeshView, home: Home, mirror: Mirror, found: Sequence[Found]) -> Seal | None:
    """Let the mirror have the first of these that its keeper gives whole; its seal."""
    for one in found:
        with _folder(home) as folder:
            try:
                seal = await _pull(agent, one, folder)
            except FAILURES as error:
                log.warning("a journal that a peer keeps is not taken", peer=one.peer, error=str(error))
                continue
            await asyncio.to_thread(mirror.adopt, seal, folder)
            return seal
    return None


@contextlib.contextmanager
def _folder(home: Home) -> Iterator[Path]:
    disk.make_folder(home.folder)
    with tempfile.TemporaryDirectory(prefix="journal-", dir=home.folder) as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def _shelf(agent: MeshView, peer: str, job: str) -> AsyncIterator[tuple[Stream, list[Found]]]:
    """A stream to what this peer keeps of the job, and what that is."""
    stream = await agent.transport.open(peer, "shelf", agent.addresses_of([peer]).get(peer, ()))
    try:
        stream.max_payload_bytes = MOST_RUNS * MOST_SEAL_BYTES
        await stream.send(Frame(messages.SEEK, {"job": job[:MOST_NAME_CHARACTERS]}))
        frame = await stream.recv()
        live = need(frame.header, "live", list)
        if frame.kind != messages.FOUND or len(live) != len(frame.payloads) or not all(type(x) is bool for x in live):
            raise ProtocolError("it did not say which journals it keeps")
        seals = [Seal.read(bytes(data)) for data in frame.payloads]
        if any(seal.job != job[:MOST_NAME_CHARACTERS] for seal in seals):
            raise ProtocolError("it has journals of another job")
        yield stream, [Found(seal, peer, is_live) for seal, is_live in zip(seals, live)]
    finally:
        stream.abort()


async def _pull(agent: MeshView, wanted: Found, folder: Path) -> Seal:
    """Its files as they are by now, checked, and their seal. ProtocolError where they are not what it says."""
    limit_s = agent.timeouts.join_s
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(limit_s):
            stream, found = await stack.enter_async_context(_shelf(agent, wanted.peer, wanted.seal.job))
            seal = next((f.seal for f in found if f.seal.run == wanted.seal.run), None)
            if seal is None or seal.order < wanted.seal.order:
                raise NotPermittedError("it has none any more, or an older one")
            if any(size > MOST_BYTES for name, (size, _) in seal.files.items() if name != REPORTS):
                raise ProtocolError(f"it has a file of more than {MOST_BYTES} bytes")
            await stream.send(Frame(messages.PULL, {"run": seal.run}))
        stream.max_payload_bytes = CHUNK_BYTES
        sizes, digests = dict.fromkeys(seal.files, 0), {name: hashlib.sha256() for name in seal.files}
        for name in seal.files:
            disk.append(folder / name, b"")
        while True:
            async with asyncio.timeout(limit_s):
                frame = await stream.recv()
            if frame.kind != messages.FILE:
                break
            name, data = need(frame.header, "name", str), b"".join(map(bytes, frame.payloads))
            if name not in sizes or not 0 < len(data) <= seal.files[name][0] - sizes[name]:
                raise ProtocolError("it sent more than the seal says")
            await asyncio.to_thread(disk.append, folder / name, data)
            sizes[name] += len(data)
            digests[name].update(data)
    if frame.kind != messages.FOLLOWED or {n: (sizes[n], digests[n].digest()) for n in sizes} != dict(seal.files):
        raise ProtocolError("its files are not what their owner has sealed")
    return seal
