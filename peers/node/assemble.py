"""Puts a peer of real machines together: libp2p, the DHT, its agent, and who may be a member.

The idea: one place knows which transport goes with which store; everything above takes an Agent or a Mesh.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from dht import (
    MAX_ADDRESSES,
    Identity,
    Members,
    MeshKey,
    TermFile,
    Token,
    dialable,
    learn_list,
    peer_of,
    read_lists,
)
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, NotPermittedError
from meshcee.files import large_apart, settled
from meshcee.files.home import Home
from peers.device import Compute, Graphs, host_id, resolve_device
from peers.node.agent import Agent, AgentOptions
from peers.node.departure import Departure
from peers.node.early import JoinOptions
from peers.node.mesh import Mesh
from peers.transport import StreamClosed, Transport

if TYPE_CHECKING:
    from peers.device.emulation import Shape
    from peers.node.admission import Admin
    from peers.node.datasets.service import Source
    from peers.node.device_process import DeviceProcess
    from peers.transport.p2p import P2PDaemon

__all__ = ["Node", "a_peer", "an_owner"]

log = structlog.get_logger()

LEADS_NOWHERE = (
    "the line leads to this machine's own peer, which is not running: start it as before, with `meshcee peer`"
)
GREETINGS = 3  # tries to shake hands with a seed


@asynccontextmanager
async def an_owner(options: JoinOptions, home: Home | None = None) -> AsyncIterator[Mesh]:
    """A Mesh that may own jobs, of a peer that lends its device beside it if the options say `compute`."""
    home = home or Home()
    async with AsyncExitStack() as stack:
        lent: list[str] = []
        if options.compute:
            lending = replace(options, name=f"{options.name}-device", direct_sums=True)
            lent.append(await stack.enter_async_context(lender(lending, home, lent.clear)))
        node = await stack.enter_async_context(a_peer(replace(options, compute=False), home))
        await node.wait_for_peers(lent)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        mesh = Mesh(node, group, home, lent)
        stack.push_async_callback(mesh.end)
        yield mesh


@asynccontextmanager
async def lender(options: JoinOptions, home: Home, gone: Callable[[], None]) -> AsyncIterator[str]:
    """The owner's device as a peer of its own, fed as every other is. It may be asked to leave before the owner ends, or fail
    like any other; then `gone` is called. Yields its id."""
    up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def lend() -> None:
        try:
            async with a_peer(options, home) as lender:
                departure = Departure(lender)
                up.set_result(lender.peer_id)
                await departure.run()
        except Exception as error:
            if not up.done():
                up.set_exception(error)
            else:
                log.error("this machine's device is lost to the mesh", error=repr(error))
        finally:
            gone()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(lend())
        await asyncio.wait([up])
        if up.exception() is None:
            try:
                yield up.result()
            finally:
                task.cancel()
    up.result()  # raises why it could not join


@asynccontextmanager
async def a_peer(options: JoinOptions, home: Home) -> AsyncIterator[Node]:
    """A peer of a real mesh: p2pd, transport, DHT, agent, ended in the reverse order."""
    from dht.kademlia import KademliaStore
    from peers.measure import Measuring
    from peers.node.admission import Admin, Membership, enrol, is_more, ledger_of, stay_member
    from peers.node.authority import authority_of
    from peers.node.device_process import DeviceProcess
    from peers.node.founding import Founding, down, founders
    from peers.transport.p2p import Direct, Libp2pTransport, P2PDaemon, RelayedTransport

    timeouts, limits = options.over(Timeouts()), Limits()
    token = Token.parse(options.token) if options.token else None
    seeds = tuple(token.addresses) if token else ()
    async with AsyncExitStack() as stack:
        graphs, process = None, None
        datasets: Mapping[str, Source] = {}
        if options.datasets:
            from peers.node.datasets import Datasets

            datasets = await stack.enter_async_context(Datasets(options.datasets))
        if not options.compute:
            stack.enter_context(large_apart())  # an owner computes nothing: what it frees goes back to the system
        elif sys.platform == "linux":
            from peers.device.worker import Workers

            graphs = await stack.enter_async_context(Workers(limits, timeouts))  # starts beside what follows
        else:
            log.info(
                "graphs of others are checked in the process that holds this peer's keys: a process apart needs Linux"
            )
        if options.compute and options.device_process:
            process = await stack.enter_async_context(DeviceProcess(options.device, graphs or Graphs(limits)))
        founding, listen, chosen = None, options.listen, options.identity
        if token is None:
            founding = stack.enter_context(Founding.of(home, chosen, is_open=options.open))
            listen, chosen = founding.listen(listen), founding.identity
        here = authority_of(home, token) if token is not None and token.grant is not None else None
        apart = founders(home)
        if here is not None and not options.compute:  # a command is no peer that comes back
            apart.append(here.membership.identity)
        file = stack.enter_context(home.identity_file(chosen, apart))
        identity = Identity.load_or_create(file)
        announce = [options.announce] if options.announce else []
        root = founding.root if founding is not None else None
        mesh = root.peer_id if root is not None else token.grant.root if token is not None and token.grant else None
        before = Membership.load(file, mesh) if mesh is not None else None
        known = before.holds(identity.peer_id, time.time()) if before is not None else None
        needs_nobody = root is not None or known is not None or (here is not None and here.admin.lets_in)
        others = Membership.met(home, mesh) if mesh is not None and needs_nobody else ()
        joined = (*seeds, *others) if seeds else ()  # who founds a mesh calls others later, and needs none of them
        if seeds and {peer_of(address) for address in joined} <= {*down(home), identity.peer_id}:
            raise JoinError(LEADS_NOWHERE)
        daemon = P2PDaemon(identity, listen=[listen], announce=announce, seeds=joined, timeouts=timeouts)
        await stack.enter_async_context(daemon)
        kept, admin = None, None
        if founding is not None and root is not None:
            admin = Admin(root, root.peer_id, bytes, identity.peer_id, ledger_of(file, root.peer_id), time.time)
            certificate = admin.certify(identity.peer_id, "admin")
            kept = Membership(root.peer_id, founding.key, certificate, file=Membership.place(file, root.peer_id))
            if before is not None:
                kept.lists, kept.others = before.lists, before.others
        elif token is not None and token.grant is not None:
            kept = before
            if known is None or is_more(token.grant, known):
                if here is not None and here.admin.lets_in:
                    kept = here.let_in(identity)
                else:
                    shown = Members(token.grant.root, token.grant.pack())
                    door = Libp2pTransport(daemon.p2p, token.key, timeouts=timeouts, limits=limits, members=shown)
                    async with door:
                        place = Membership.place(file, token.grant.root)
                        kept = await enrol(door, token, place, timeouts)
                kept.others = before.others if before is not None else ()
                with home.writable():
                    kept.save()
        key = kept.key if kept else MeshKey()
        members = kept.members() if kept else Members()
        if kept is not None and admin is None and members.own is not None and members.own.role == "admin":
            ledger = ledger_of(file, kept.root)
            admin = Admin(identity, kept.root, lambda: members.shown, identity.peer_id, ledger, time.time)
        if admin is not None and admin.is_list_due(members):  # commands may have revoked peers while this one was down
            with home.writable():
                learn_list(admin.sealed_list(members, key, limits), key, limits, members, time.time())
        transport: Transport
        pace, shape = options.pace, None
        if options.shape and options.shape_device:
            from peers.device.emulation import emulate

            emulated = emulate(options.shape, options.shape_device, jitter_s=options.jitter_s)
            pace, shape = emulated.pace, emulated.shape
        real = RelayedTransport(
            daemon.p2p,
            key.secret,
            direct=Direct(daemon.listening, options.direct_port, timeouts) if options.direct_port >= 0 else None,
            timeouts=timeouts,
            limits=limits,
            members=members,
        )
        real.allow(identity, seeds, passes_on=options.relay and options.compute)
        if shape is None:
            transport = await stack.enter_async_context(real)
        else:
            from peers.device.emulation import ShapedTransport

            transport = await stack.enter_async_context(ShapedTransport(real, shape, limits=limits))
        real.addresses = daemon.addresses
        await _greet(transport, daemon, joined)
        store = await stack.enter_async_context(
            KademliaStore(
                daemon.p2p,
                seeds,
                identity=identity,
                mesh_key=key,
                client_mode=not options.compute,
                timeouts=timeouts,
                members=members,
                others=others,
            )
        )
        await read_lists(store, key, limits, members)  # who is revoked, before anybody's stream is served
        daemon.on_restart(real.rebind)
        daemon.on_restart(store.rebind)
        device: Compute | DeviceProcess | None = process
        if options.compute and process is None:
            device = await stack.enter_async_context(Compute(resolve_device(options.device), pace))
        node = Node(
            # Several peers of one machine must be told apart.
            AgentOptions(
                options.name or f"{socket.gethostname()}-{identity.peer_id[-4:]}",
                options.region,
                options.memory_bytes,
                options.observes,
                "" if pace is not None else host_id(key.secret),
                options.threads_said,
                options.direct_sums,
                Measuring,
                datasets,
            ),
            identity,
            key,
            transport,
            store,
            device,
            timeouts=timeouts,
            limits=limits,
            graphs=graphs,
            terms=TermFile(Path(f"{identity.path}.{key.fingerprint}.terms")),
            members=members,
        )
        node.admin, node.joined_by = admin, token

        async def move() -> None:
            real.addresses = daemon.addresses
            await node.announce()

        if admin is not None:
            admin.serve(transport, members, key, timeouts)
        await stack.enter_async_context(node)
        daemon.on_move(move)
        if kept is not None:
            if options.compute:
                kept.addresses = tuple(transport.addresses)
            with home.writable():
                kept.save()  # before anybody is told of this mesh: commands beside this peer read it
            node.spawn(stay_member(node, kept, admin))
        if founding is not None:
            founding.note(options.listen, ",".join(daemon.listening), file, node.invite(options.valid_s))
        if shape is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            naming = group.create_task(_name_peers(shape, node))
            stack.callback(naming.cancel)
        if options.compute:
            stack.enter_context(settled())
        yield node


async def _greet(transport: Transport, daemon: P2PDaemon, seeds: tuple[str, ...]) -> None:
    """Shake hands with one seed before anything else: a wrong key or version is told now, and in words.

    libp2p drops one of two connections that were dialled at the same moment, and the streams on it: hence the tries.
    """
    problem: Exception | None = None
    reached, refused = daemon.reached, set[str]()
    for attempt in range(GREETINGS):
        for peer_id in [p for p in dict.fromkeys(map(peer_of, seeds)) if p is not None and p in reached - refused]:
            try:
                stream = await transport.open(peer_id, "join", [s for s in seeds if s.endswith(peer_id)])
            except (JoinError, StreamClosed, NotPermittedError) as error:
                problem = error  # one that was revoked may be among the seeds, and still run
                refused |= {peer_id} if isinstance(error, NotPermittedError) else set()
            else:
                await stream.aclose()
                return
        reached = frozenset(p for p, why in (await daemon.connect(seeds)).items() if not why)  # also who took longer
        if reached <= refused:
            break
        await asyncio.sleep(0.2 * (attempt + 1))
    if problem is not None:
        raise problem


async def _name_peers(shape: Shape, node: Agent) -> None:
    """A shape speaks of devices by name: tell it which peer id each name has, as they appear."""
    while True:
        for peer_id, name in node.names().items():
            shape.alias(peer_id, name)
        await node.directory.wait_for_change()


class Node(Agent):
    """An Agent on a real network; knows how to invite others."""

    admin: Admin | None = None
    joined_by: Token | None = None

    def invite(self, valid_s: float) -> str:
        """A token for other machines (for this one only, when nothing but loopback is listened on).

        An admin's lets in any number, to own jobs. Another peer's is the one that it came by, with its own addresses too; so is
        that of an admin which lets nobody in.
        """
        here = tuple(self.transport.addresses)[:8]
        if self.admin is not None and self.admin.lets_in:
            return self.admin.invite(here, "own", None, valid_s).encode()
        if self.joined_by is None:
            return Token(here).encode()
        grant = self.joined_by.grant
        first = [a for a in self.joined_by.addresses if grant is None or a.endswith(grant.at)]
        rest = [a for a in (*here, *self.joined_by.addresses) if a not in first]
        return replace(self.joined_by, addresses=(*first, *rest)[:MAX_ADDRESSES]).encode()

    @property
    def reachable_from_elsewhere(self) -> bool:
        return bool(dialable(self.transport.addresses))
