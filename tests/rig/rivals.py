"""Owners that all believe a run theirs, standbys that take over, and members that restart: in simulated time, by seed.

The idea: whom members follow (peers/member/service.py), what an owner does when it is refused (meshcee/epochs/course.py) and how it
hears of another one (peers/owner/turn.py) are the product's, over the in-process network. Played is what has no part in that: a
session that applies steps, the planner, and the shell around the state machine. What must hold is asked as it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from dht.records import RunRecord
from meshcee.config import Limits, Timeouts
from meshcee.epochs import course, moves
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, PeerLostError, PlanError
from peers.device.calls import Calls
from peers.device.graphs import Graphs
from peers.member.service import Member
from peers.owner.recovery import ANSWER_S
from peers.owner.standby import AGAIN_S, RETURNS_S
from peers.owner.turn import Turn
from peers.transport import Frame, Stream, StreamClosed
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire import messages, unless_silent, while_alive
from peers.wire.suspects import Suspects
from tests.rig.mesh_fixture import agreed

__all__ = ["FAULTS", "Order", "World"]

TIMES = Timeouts()
KEY, JOB, STAGES, STEPS = "the run's key", "job", 2, 10**6
LINK = Impairment(latency_s=0.02, jitter_s=0.05)
FAULTS = (
    "kill a member",
    "restart a member",
    "kill an owner",
    "resume",
    "partition",
    "cut",
    "owners apart",
    "heal",
    "late",
    "an old offer again",
)
AGREED_WITHIN_S = 90.0


class Order(NamedTuple):
    """Of owners of one run; the greater is the later."""

    incarnation: int
    owner: str


NOBODY = Order(0, "")


@dataclass
class Host:
    """A machine that owns the run, or stands by for who does. `counter`, `seen` and `told` are on its disk."""

    name: str
    counter: int = 0
    seen: Order = NOBODY  # the newest owner that it has heard of
    told: dict[int, float] = field(default_factory=dict)
    order: Order | None = None  # while it owns
    ended: MeshceeError | None = None  # why it owns no more
    life: asyncio.Task[None] | None = None
    done: int = 0
    runs: dict[str, RunRecord] = field(default_factory=dict)  # as its directory knows them
    members: tuple[str, ...] = ()


class Work:
    """A session as far as owners are concerned: it is ready, and applies the steps that it is told to."""

    def __init__(self, world: World, member: str, life: int, stream: Stream, frame: Frame) -> None:
        self._world, self._member, self._life, self._stream = world, member, life, stream
        self._order = Order(messages.epoch_of(frame.header)[0], stream.peer_id)
        self.offer = SimpleNamespace(job=JOB, place=SimpleNamespace(index=0), blocks=1)
        self.ending = False
        self.executor = SimpleNamespace(
            settlement=SimpleNamespace(abort=_nothing),
            close=_nothing,
            untouched=dict,
            max_live=0,
            max_in_flight=0,
            step=0,
        )

    async def run(self) -> None:
        with contextlib.suppress(StreamClosed):
            await self._stream.send(Frame(messages.READY))
            await while_alive(partial(unless_silent, self._apply, self._stream, TIMES), self._stream, TIMES)

    async def _apply(self) -> None:
        while True:
            frame = await self._stream.recv()
            if frame.kind == messages.STEP:
                with self._world.applying(self._member, self._life, self._order):
                    await asyncio.sleep(self._world.random.uniform(0.2, 2.0))
                await self._stream.send(Frame(messages.APPLIED, frame.header))

    def leave(self) -> None:
        raise AssertionError("nobody leaves here")

    def close(self) -> None:
        pass


async def _nothing() -> None:
    pass


class World:
    """Members p0, p1, ... and hosts a, b, ...; the first host owns the run, and the others stand by."""

    def __init__(self, seed: int, members: int, hosts: int) -> None:
        self.random = random.Random(seed)
        self.network = MemoryNetwork(seed=seed, impairment=LINK)
        self.members: dict[str, asyncio.Task[None] | None] = {f"p{i}": None for i in range(members)}
        self.hosts = {name: Host(name) for name in "abcdef"[:hosts]}
        self.lives: dict[str, int] = defaultdict(int)
        self.followed: dict[tuple[str, int], list[Order]] = defaultdict(list)  # by a member's life: whom it worked for
        self.taken: dict[str, Order] = {}  # by whom members were taken last
        self.busy: dict[str, Order] = {}  # members in a step, and whose
        self.orders: list[Order] = []  # of all owners there ever were
        self.offers: list[tuple[str, str, Frame]] = []
        self.forgot: list[str] = []  # members that were started anew and worked for a lower owner than before
        self.wrong: list[str] = []
        self._cut: set[frozenset[str]] = set()
        self._transports: dict[str, Any] = {}

    async def play(self, what: Iterable[tuple[float, str, int]], lasts_s: float) -> None:
        """From the first step on; then all is made whole, and what must hold of that is checked."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for name in self.members:
                    self.start(name)
                for host in self.hosts.values():
                    self.begin(host, owns=host.name == "a")
                while not self.hosts["a"].told:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.5)
                began_s = _now()
                for when, kind, n in sorted(what):
                    await asyncio.sleep(max(0.0, began_s + when - _now()))
                    self.befall(kind, n)
                await asyncio.sleep(max(0.0, began_s + lasts_s - _now()))
                await self.check_recovers()
                for task in (*self.members.values(), *(host.life for host in self.hosts.values())):
                    if task is not None:
                        task.cancel()
        except* asyncio.CancelledError:
            raise
        assert self.wrong == []

    # -- what befalls them

    def befall(self, kind: str, n: int) -> None:
        """A fault by name; `n` says whom it concerns."""
        members, hosts = list(self.members), list(self.hosts.values())
        everybody = [*members, *self.hosts]
        a, b = everybody[n % len(everybody)], everybody[(n // 7 + n + 1) % len(everybody)]
        member, host = members[n % len(members)], hosts[n % len(hosts)]
        match kind:
            case "kill a member":
                self.kill(member)
            case "restart a member":
                self.kill(member)
                self.start(member)
            case "kill an owner":
                self.kill_host(host)
            case "resume" if host.life is None or host.order is None:
                self.kill_host(host)
                self.begin(host, owns=host.seen.incarnation > 0)
            case "partition":
                self._part(*([p for i, p in enumerate(everybody) if (n >> i) & 1 == side] for side in (0, 1)))
            case "cut" if a != b:
                self._part([a], [b])
            case "owners apart":  # members reach them all, and every standby believes the owner dead
                self._part([host.name], self.hosts.keys() - {host.name})
            case "heal":
                self._heal()
            case "late" if a != b:
                late = replace(LINK, latency_s=self.random.uniform(1, 15))
                self.network.impair(a, b, late)
                asyncio.get_running_loop().call_later(20.0, self.network.impair, a, b, LINK)
            case "an old offer again" if self.offers:
                self._group.create_task(self._again(*self.offers[n % len(self.offers)]))

    def _part(self, these: Iterable[str], those: Iterable[str]) -> None:
        these, those = sorted(these), sorted(those)
        self._cut |= {frozenset((x, y)) for x in these for y in those}
        self.network.partition(these, those)

    def _heal(self) -> None:
        self._cut.clear()
        self.network.heal()

    async def _again(self, owner: str, member: str, frame: Frame) -> None:
        """A copy of what was sent once, whose sender has no part in it any more."""
        with contextlib.suppress(MeshceeError, StreamClosed, KeyError):
            stream = await self._transports[owner].open(member, "job")
            await stream.send(frame)
            await asyncio.sleep(self.random.uniform(0, 5))
            stream.abort()

    def reaches(self, a: str, b: str) -> bool:
        return a == b or (frozenset((a, b)) not in self._cut and b in self._transports)

    # -- members

    def start(self, name: str) -> None:
        if self.members[name] is None:
            self.lives[name] += 1
            self.members[name] = self._group.create_task(self._live(name, self.lives[name]))

    def kill(self, name: str) -> None:
        task, self.members[name] = self.members[name], None
        self._end(name, task)

    def _end(self, name: str, task: asyncio.Task[None] | None) -> None:
        self._transports.pop(name, None)
        self.network.kill(name)
        if task is not None:
            task.cancel()

    async def _live(self, name: str, life: int) -> None:
        compute: Any = SimpleNamespace(done=0, running=0, calls=Calls())
        async with self.network.transport(name, timeouts=TIMES) as here:
            self._transports[name] = here
            member = Member(here, compute, memory_bytes=1, timeouts=TIMES, graphs=Graphs(Limits()), accept=agreed)

            async def prepare(stream: Stream, frame: Frame, *more: Any) -> Work:
                self.taken[name] = Order(messages.epoch_of(frame.header)[0], stream.peer_id)
                await asyncio.sleep(self.random.uniform(0, 1))
                return Work(self, name, life, stream, frame)

            member.prepare = prepare  # type: ignore[method-assign, assignment]
            await asyncio.Event().wait()

    @contextlib.contextmanager
    def applying(self, member: str, life: int, order: Order) -> Any:
        """A step of this owner's. A process of a member never works for a lower owner after a higher one, nor for two at once."""
        if (other := self.busy.get(member)) not in (None, order) and self.lives[member] == life:
            self.wrong.append(f"{member} applies a step of {order} within one of {other}")
        followed = self.followed[member, life]
        if followed and followed[-1] > order:
            self.wrong.append(f"{member} works for {order} after {followed[-1]}")
        if followed[-1:] != [order]:
            followed.append(order)
            if any(order < earlier for n in range(1, life) for earlier in self.followed[member, n]):
                self.forgot.append(member)
        self.busy[member] = order
        try:
            yield
        finally:
            if self.busy.get(member) == order:
                del self.busy[member]

    # -- hosts

    def begin(self, host: Host, *, owns: bool) -> None:
        host.life = self._group.create_task(self._host(host, owns))

    def kill_host(self, host: Host) -> None:
        task, host.life, host.order = host.life, None, None
        self._end(host.name, task)

    async def _host(self, host: Host, owns: bool) -> None:
        host.ended = None
        async with self.network.transport(host.name, timeouts=TIMES) as here:
            self._transports[host.name] = here
            if not owns:
                await self._stand_by(host)
            host.counter = max(host.counter, host.seen.incarnation) + 1
            host.order = host.seen = Order(host.counter, host.name)
            self.orders.append(host.order)
            try:
                await Owning(self, host, here).run()
            except MeshceeError as error:
                if isinstance(error, NotPermittedError) and host.order == max(self.orders):
                    self.wrong.append(f"{host.order} was told that it is over: {error}")
                host.ended = error
            host.order = None
            await asyncio.Event().wait()

    async def _stand_by(self, host: Host) -> None:
        """Until the owner that is followed is gone, as far as this host can tell: it may be wrong."""
        owner, lost_s = "", -1.0
        doubts = self.random.random() < 0.5  # believes what itself sees only, as where the mesh too hears nothing
        while True:
            seen = {o: h for o, h in self.hosts.items() if h.order is not None and o != host.name}
            near = {o: h for o, h in seen.items() if self.reaches(host.name, o)}
            if owner in near:
                followed, lost_s = near[owner], -1.0
                host.seen = max(host.seen, followed.order or NOBODY)
                host.told, host.members = dict(followed.told), followed.members
            elif near and (not owner or not doubts):
                owner = max(near, key=lambda o: near[o].order or NOBODY)
            elif owner and lost_s < 0:
                lost_s = _now()
            elif owner and _now() - lost_s > RETURNS_S:
                return
            await asyncio.sleep(AGAIN_S)

    def announce(self, record: RunRecord) -> None:
        """It comes to others after a while, and expires."""
        loop, owner = asyncio.get_running_loop(), record.peer_id

        def expires(host: Host) -> None:
            if host.runs.get(owner) is record:
                del host.runs[owner]

        def arrives(host: Host) -> None:
            if self.reaches(owner, host.name):
                host.runs[owner] = record
                loop.call_later(TIMES.record_ttl_s, expires, host)

        for host in self.hosts.values():
            loop.call_later(self.random.uniform(0.1, 3.0), arrives, host)

    # -- what must hold in the end

    async def check_recovers(self) -> None:
        """Once all is whole, the highest owner that lives is the only one, and gets on."""
        self._heal()
        for a in (*self.members, *self.hosts):
            for b in (*self.members, *self.hosts):
                self.network.impair(a, b, LINK)
        for name in self.members:
            self.start(name)
        await asyncio.sleep(AGREED_WITHIN_S)
        owning = {host.order: host for host in self.hosts.values() if host.order is not None}
        highest = max(self.orders)
        if highest not in owning:  # it is dead, or standbys wait for nobody: whoever comes next is higher
            return
        assert set(owning) == {highest}
        before = owning[highest].done
        await asyncio.sleep(AGREED_WITHIN_S / 2)
        assert owning[highest].done > before


class Owning:
    """One life of an owner: the product's state machine, and around it a shell as thin as can be."""

    def __init__(self, world: World, host: Host, transport: Any) -> None:
        assert host.order is not None
        self._world, self._host, self._transport, self._order = world, host, transport, host.order
        directory = SimpleNamespace(runs=host.runs, tell=world.announce)
        agent: Any = SimpleNamespace(
            peer_id=host.name, directory=directory, clock=_now, monotonic=_now, timeouts=TIMES, names=dict
        )
        self._turn = Turn(agent, JOB, None)
        self._shunned: set[str] = set()
        self._course = course.Course(
            STEPS,
            told=host.told,
            done=len(host.told),
            keeps=True,
            blame=Suspects().hear,
            members=host.members or None,
        )

    async def run(self) -> None:
        commands = self._course.begin()
        while self._course.state is not course.State.OVER:
            commands = self._course.handle(await self._do(commands))
        await self._do(commands)

    async def _do(self, commands: list[moves.Command]) -> Any:
        event = None
        for command in commands:
            event = await self._carry_out(command)
        return event

    def _here(self, peers: Iterable[str] | None = None) -> frozenset[str]:
        world = self._world
        return frozenset(p for p in peers or world.members if world.reaches(self._host.name, p))

    async def _carry_out(self, command: moves.Command) -> moves.Event | None:
        match command:
            case moves.TakeTurn():
                return moves.Turned(False)
            case moves.Profile():
                return moves.Profiled()
            case moves.AskPlan():
                while (found := self._plan(())) is None:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(1)
                return moves.Found(found)
            case moves.AskPlanOf(_, without):
                await asyncio.sleep(0.1)
                found = self._plan(without)
                return moves.NoPlan(PlanError("too few")) if found is None else moves.Found(found)
            case moves.Meet():
                return moves.Met()
            case moves.Offer(proposal, number):
                return await self._epoch(proposal.members, number)
            case moves.CallRoll(members):
                await asyncio.sleep(ANSWER_S)
                return moves.Called(self._here(members) if members else frozenset(), _now())
            case moves.FindStates():
                return moves.States(self._host.done, None)
            case moves.LookAround(missed):
                return moves.Around(dict.fromkeys(self._here(missed) if missed else (), _now()), self._here(), _now())
            case moves.See():
                return moves.Seen()
            case moves.Forgive():
                some, self._shunned = bool(self._shunned), set()
                return moves.Forgiven(some)
            case moves.AwaitChange() | moves.AwaitTerm():
                await asyncio.sleep(1)
                return moves.Changed()
            case moves.Pause(for_s):
                await asyncio.sleep(for_s)
            case moves.Shun(peers):
                self._shunned |= peers
            case moves.Consider():
                return moves.Better(None)
            case moves.Fail(error) | moves.GiveUp(_, error):
                raise error
        return None

    def _plan(self, without: Iterable[str]) -> moves.Proposal | None:
        able = sorted(self._here() - {*without} - self._shunned)
        if len(able) < STAGES:
            return None
        return moves.Proposal(tuple(self._world.random.sample(able, STAGES)), (1, "c"))

    async def _epoch(self, members: tuple[str, ...], number: int) -> moves.Failed:
        self._host.members = members
        streams: dict[str, Stream] = {}
        stuck: set[str] = set()
        try:
            async with asyncio.TaskGroup() as offers:
                for member in members:
                    offers.create_task(self._offer(member, number, streams, stuck))
            while True:
                step = self._course.done
                for stream in streams.values():
                    await stream.send(Frame(messages.STEP, {"step": step}))
                for stream in streams.values():
                    await self._hear(stream, messages.APPLIED)
                self._host.done = step + 1
                plan: Any = SimpleNamespace(to_json=lambda: None)
                self._turn.report(KEY, (self._order.incarnation, number), step, 0.5, plan)
                event: Any = moves.Stepped(step, 0.5)
                while event is not None:
                    event = await self._do(self._course.handle(event))
        except* (MeshceeError, StreamClosed) as failures:
            found = list(_leaves(failures))
            refused = next((e for e in found if isinstance(e, NotPermittedError)), found[0])
            error = refused if isinstance(refused, MeshceeError) else PeerLostError(str(refused))
        finally:
            for stream in streams.values():
                stream.abort()
        if isinstance(error, JoinError):
            error = PeerLostError(str(error))
        return moves.Failed(error, moves.Losses(_now(), frozenset(stuck)))

    async def _offer(self, member: str, number: int, streams: dict[str, Stream], stuck: set[str]) -> None:
        header = {"epoch": [self._order.incarnation, number], "term": [1, "c"], "resumes": False, "run": KEY}
        frame = Frame(messages.OFFER, header)
        self._world.offers.append((self._host.name, member, frame))
        streams[member] = stream = await self._transport.open(member, "job")
        await stream.send(frame)
        try:
            await self._hear(stream, messages.READY)
        except PlanError:  # it is taken
            if (other := self._world.taken[member]) < self._order:
                self._world.wrong.append(f"{member} stays with {other} when {self._order} has come")
            stuck.add(member)
            raise

    async def _hear(self, stream: Stream, kind: str) -> None:
        while (frame := await unless_silent(stream.recv, stream, TIMES)).kind != kind:
            if frame.kind in (messages.REFUSED, messages.FAILED):
                raise messages.error_from(frame.header)


def _leaves(group: BaseExceptionGroup[Any]) -> Iterable[BaseException]:
    for one in group.exceptions:
        yield from _leaves(one) if isinstance(one, BaseExceptionGroup) else (one,)


def _now() -> float:
    return asyncio.get_running_loop().time()
