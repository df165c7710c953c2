"""Chaos on virtual time: the same blows as benchmarks/chaos.py and more, at any instant, hundreds of them in minutes.

`python -m benchmarks.chaos --virtual 2000 [--first 0]` prints a JSON line for each seed. Everything above the transport is the
product: election, planning, offers, training, snapshots, recovery; the network is the in-process one, with 20 ms and 10 ms of
jitter on every link, and devices are paced. A blow falls at a random instant of a step or of a recovery, so between any two
messages. The idea: what must hold is asked of the whole run, not of a part: its losses are the undisturbed run's, each told of
once; no epoch ever had two plans; and once the network is whole again, all who live soon believe in one coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from benchmarks.going_back import going_back
from benchmarks.storm_job import MICRO, STEPS, captured_job, expected, job_of
from dht.election import CHANCE
from dht.signing import Identity
from dht.store import SharedMemory
from dht.terms import TermFile
from meshcee.config import Timeouts
from meshcee.errors import ClockError, MeshceeError
from meshcee.files import disk
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.planner.proposals import Effort
from peers.device.compute import Pace
from peers.member.executor import Executor
from peers.member.service import Session
from peers.node.agent import Agent
from peers.node.assemble import InProcess, JoinOptions
from peers.node.mesh import Mesh
from peers.owner.epoch import Report
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire.messages import Round
from tests.rig.disks import RefusingDisk
from tests.rig.virtual_time import Still, run

__all__ = [
    "BLOWS",
    "MICRO",
    "STEPS",
    "TIMES",
    "Activations",
    "Storm",
    "captured_job",
    "expected",
    "job_of",
    "now",
    "play",
    "quick_planning",
    "stormy",
    "train",
]

LINK = Impairment(latency_s=0.02, bandwidth_bytes_per_s=12.5e6, jitter_s=0.01)
PACE = Pace(4e4)  # a step takes some seconds
PEERS, STAGES = 4, 3
TIMES = replace(Timeouts(), regroup_s=180.0)  # a storm may last
AGREED_WITHIN_S = 40.0  # of all who live on one coordinator, once the network is whole
ENDS_WITHIN_S = 1800.0
BLOWS = (
    "kill a member",
    "kill the coordinator",
    "kill two",
    "kill a holder and its keeper",
    "restart",
    "restart without its term",
    "stop",
    "cut",
    "silent link",
    "partition",
    "slow",
    "lossy",
    "join",
    "hung device",
    "full device",
    "disk full",
    "read-only disk",
    "clock step",
    "slow loris",
    "suspend",
    "lose a region",
    "kill the owner",
)
REFUSALS = {"disk full": errno.ENOSPC, "read-only disk": errno.EROFS}
KILLS = ("kill a member", "kill the coordinator", "kill two", "kill a holder and its keeper")
STEP_S = 2.0, 3600.0  # of a clock
SUSPENDED_S = 5.0, 200.0
LORIS_BYTES_PER_S = 20.0, 400.0


def now() -> float:
    return asyncio.get_running_loop().time()


def quick_planning() -> Any:
    """Which plan is found does not matter here, and a search of half a second after every blow would."""
    return mock.patch("meshcee.planner.live.EFFORT", Effort(events=1_000, rows=10_000))


@contextlib.contextmanager
def devices_fill_up(full: set[str]) -> Iterator[None]:
    """The next step of each of these peers fails once, as that of a device without memory does."""
    run = Executor.take_actions

    async def walked(executor: Executor, step: Round) -> None:
        if (peer := executor.place.peer) in full:
            full.remove(peer)
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(peer)}.00 GiB")
        await run(executor, step)

    with mock.patch.object(Executor, "take_actions", walked):
        yield


@dataclass
class Activations:
    """Which plans members have begun to run, by owner and epoch."""

    plans: dict[tuple[str, tuple[int, int]], set[str]] = field(default_factory=lambda: defaultdict(set))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        link, plans = Session._link, self.plans

        async def linked(session: Session) -> None:
            offer = session.offer
            plans[session._stream.peer_id, offer.epoch].add(offer.plan.hash())
            await link(session)

        with mock.patch.object(Session, "_link", linked):
            yield

    @property
    def doubled(self) -> list[Any]:
        return [epoch for epoch, plans in self.plans.items() if len(plans) > 1]


def _merge(into: SharedMemory, other: SharedMemory) -> None:
    """What the other side of a partition has written; of two values the one that expires last stays."""
    for key, table in other.entries.items():
        own = into.entries.setdefault(key, {})
        for subkey, entry in table.items():
            if subkey not in own or own[subkey][1] < entry[1]:
                own[subkey] = entry


class Storm:
    """A mesh on virtual time, and what can befall it. `done` tells what did."""

    def __init__(self, here: InProcess, mesh: Mesh, folder: Path, seed: int) -> None:
        self.here, self.mesh, self.seed, self.chance = here, mesh, seed, random.Random(seed)
        self.done: list[str] = []
        self._folder = folder
        self._numbers = iter(range(1000))
        self._away: dict[str, Identity] = {}  # killed peers that may come back
        self._doomed: set[str] = set()  # who is cut off and will be lost
        self._asleep: set[str] = set()  # lives that are suspended
        self._has_filled = False  # a device was out of memory
        self._hung: set[str] = set()
        self.full: set[str] = set()  # peer ids
        self.disk = RefusingDisk(folder)
        self.owner, self.heir = "owner", ""  # who owns the run, and who stands by
        self.heir_mesh: Mesh | None = None
        self.still = Still()
        self._ahead_s: dict[str, float] = defaultdict(float)  # wall clocks, of the mesh's
        self._lives: dict[str, str] = {}  # of who was started twice, the second
        self._apart: SharedMemory | None = None
        self._identities: dict[str, Identity] = {}
        self._later: set[asyncio.Task[None]] = set()

    async def start(self, name: str, *, forget: bool = False) -> Agent:
        if name not in self._identities:
            key = Ed25519PrivateKey.from_private_bytes(random.Random(f"{self.seed} {name}").randbytes(32))
            self._identities[name] = Identity(key)
        identity = self._identities[name]
        file = self._folder / name / "terms"
        if forget:
            file.unlink(missing_ok=True)
        with self.new_life(name):
            return await self.here.start(
                name, identity=identity, terms=TermFile(file), pace=PACE, clock=self.clock_of(name)
            )

    async def own(self, name: str, folder: Path) -> Mesh:
        with self.new_life(name):
            return await self.here.own(name, Home(folder), self.clock_of(name))

    def new_life(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What is started inside is that of this peer from now on, until it is started anew."""
        self._lives[name] = f"{name}, life {next(self._numbers)}"
        return self.still.of(self._lives[name])

    async def clocks_right(self) -> None:
        while any(self._ahead_s.values()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(1)

    def in_life(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.still.of(self._lives[name])

    def clock_of(self, name: str) -> Callable[[], float]:
        return lambda: now() + self._ahead_s[name]

    # -- who is there

    @property
    def lending(self) -> list[str]:
        """Living peers with a device, by name."""
        return [name for name, agent in self.here.agents.items() if agent.lends and name not in self._away]

    @property
    def staying(self) -> list[str]:
        """Those of them whom no blow takes yet, and whom a first plan can count on."""
        asleep = self._asleep if self.mesh.result.plan is None else set()
        return [name for name in self.lending if name not in self._doomed and self._lives[name] not in asleep]

    @property
    def can_lose_the_owner(self) -> bool:
        """A standby knows of the run by now, and it is not over: nobody would go on with it."""
        if not self.heir or self.owner == self.heir or not self.here.stores[self.owner].reachable:
            return False
        if len(self.mesh.result.losses) == STEPS:
            return False
        return any(run.info and run.reports() for run in Home(self._folder / self.heir).runs())

    @property
    def names(self) -> dict[str, str]:
        """Of all who were ever there, by id."""
        return {agent.peer_id: name for name, agent in self.here.agents.items()}

    def name_of(self, peer_id: str) -> str | None:
        return next((name for name in self.lending if self.here.agents[name].peer_id == peer_id), None)

    def members(self) -> list[str]:
        """Living members of the running plan in order of their stages, or whoever lives."""
        plan = self.mesh.result.plan
        found = [self.name_of(peer_id) for peer_id in plan.peers] if plan is not None else []
        return [name for name in found if name is not None] or self.lending

    def coordinator(self) -> str | None:
        lease = self.mesh.agent.lease
        return None if lease is None else self.name_of(lease.peer_id)

    def keeper_of(self, name: str) -> str:
        """Who keeps the copies of this member's stage; itself where nobody does."""
        training = self.mesh.training
        if training is None or training.owner is None:
            return name
        chosen = training.owner._kept.keepers.near  # links may have been measured since it was made
        return self.name_of(chosen.get(self.here.agents[name].peer_id, "")) or name

    # -- blows

    async def strike(self, kind: str) -> None:
        """One blow. Whatever it breaks for a while is whole again after `last_s`; two peers or more stay, and until the
        first plan the owner can reach as many as the job asks for."""
        what = await self._strike(kind)
        self.done.append(f"{now() - 1000:.2f} s: {what}")

    async def _strike(self, kind: str) -> str:
        chance, last_s = self.chance, self.chance.uniform(1.0, 25.0)
        if kind in ("restart", "restart without its term") and self._away:
            name = chance.choice(sorted(self._away))
            del self._away[name]
            await self.start(name, forget=kind != "restart")
            return f"{name} {kind}"
        two = kind in ("kill two", "kill a holder and its keeper")
        least = STAGES if self.mesh.result.plan is None else 2
        if kind in KILLS and len(self.staying) > least + two:
            return self._kill(kind)
        if kind == "kill the owner" and self.can_lose_the_owner:
            return self._kill_owner()
        if kind == "lose a region" and len(self.staying) >= least + 2:
            return self._lose_region(chance.randint(2, len(self.staying) - least), last_s)
        if kind in REFUSALS and self.disk.error is None:
            return self._refuse(kind, last_s)
        if kind == "clock step":
            return self._step_clock(chance.choice([*self.members(), self.owner]), last_s)
        if kind == "suspend":
            spared = self.mesh.result.plan is None and len(self.staying) <= least
            victims = [self.owner] if spared else [*self.members(), self.owner]
            return self.suspend(chance.choice(victims), chance.uniform(*SUSPENDED_S))
        if kind == "slow loris":
            victim, rate = chance.choice(self.members()), math.exp(chance.uniform(*map(math.log, LORIS_BYTES_PER_S)))
            self._answer(victim, replace(LINK, bandwidth_bytes_per_s=rate))
            asyncio.get_running_loop().call_later(last_s, self._answer, victim, LINK)
            return f"{victim} answers with {rate:.0f} bytes a second for {last_s:.1f} s"
        if kind == "stop":
            victim = chance.choice(self.members())
            self._impair(victim, replace(LINK, latency_s=last_s), last_s)
            return f"{victim} stopped for {last_s:.1f} s"
        if kind == "cut":
            a, b = chance.sample([*self.lending, self.owner], 2)
            self.here.network.cut(self.here.agents[a].peer_id, self.here.agents[b].peer_id)
            asyncio.get_running_loop().call_later(last_s, self.heal)
            return f"{a} and {b} cut off from each other for {last_s:.1f} s"
        if kind == "silent link":
            a, b = chance.sample([*self.lending, self.owner], 2)
            self._between(a, b, replace(LINK, latency_s=last_s))
            asyncio.get_running_loop().call_later(last_s, self._between, a, b, LINK)
            return f"nothing arrives between {a} and {b} for {last_s:.1f} s"
        if kind == "partition" and self._apart is None:
            return self._partition(last_s)
        if kind == "slow":
            victim = chance.choice(self.members())
            self._impair(victim, replace(LINK, bandwidth_bytes_per_s=2e4), last_s)
            return f"{victim} on slow links for {last_s:.1f} s"
        if kind == "hung device" and len(self.lending) - len(self._hung) > least:
            return self._hang(last_s * 20)
        if (
            kind == "full device" and not self._has_filled
        ):  # two that fail alike on the same work end a run, as they should
            self._has_filled = True
            victim = chance.choice(self.members())
            self.full.add(self.here.agents[victim].peer_id)
            return f"{victim} is out of memory in its next call"
        if kind == "lossy":
            victim = chance.choice(self.members())
            self._impair(victim, replace(LINK, loss=0.02), last_s)
            return f"{victim} on lossy links for {last_s:.1f} s"
        name = f"new-{next(self._numbers)}"
        await self.start(name)
        return f"{name} joined"

    def _hang(self, last_s: float) -> str:
        """Its device takes a call and does not end it; the peer itself answers, and becomes ready for anything."""
        victim = self.chance.choice(self.members())
        compute = self.here.agents[victim].compute
        assert compute is not None
        compute.pace = Pace(1e-9)
        self._hung.add(victim)

        def recover() -> None:
            compute.pace = PACE
            self._hung.discard(victim)

        asyncio.get_running_loop().call_later(last_s, recover)
        return f"the device of {victim} hangs for {last_s:.0f} s"

    def _kill(self, kind: str) -> str:
        members = self.members()
        first = self.chance.randrange(len(members))
        victims = members[first : first + 2] if kind == "kill two" else [members[first]]
        if kind == "kill a holder and its keeper":
            victims = list(dict.fromkeys([victims[0], self.keeper_of(victims[0])]))
        if kind == "kill the coordinator" and (coordinator := self.coordinator()) is not None:
            victims = [coordinator]
        for victim in victims:
            self.kill(victim)
        return f"{' and '.join(victims)} killed"

    def kill(self, name: str) -> None:
        self.here.crash(name)
        self._away[name] = self._identities[name]

    def _kill_owner(self) -> str:
        """Nothing of it runs any more: what it would do next, it has not done."""
        self.here.crash(self.owner)
        self.still.begin(self._lives[self.owner])
        return "the owner killed"

    def _lose_region(self, count: int, last_s: float) -> str:
        """Members beside each other die at once, or are cut off from all others and die then; later they are there again."""
        members, chance = self.members(), self.chance
        first = chance.randrange(max(1, len(members) - count + 1))
        victims = members[first : first + count]
        victims += chance.sample(sorted(set(self.lending) - set(victims)), count - len(victims))
        cut_off = self._apart is None and chance.random() < 0.5
        if cut_off:
            self.part(victims)
            self._doomed.update(victims)
        away_s = chance.uniform(5, 60)

        async def lose() -> None:
            if cut_off:
                await asyncio.sleep(last_s)
            for victim in victims:
                self.kill(victim)
            self._doomed.difference_update(victims)
            if cut_off:
                self.heal()
            await asyncio.sleep(away_s)
            for victim in victims:
                if self._away.pop(victim, None) is not None:
                    await self.start(victim)

        if not cut_off:
            for victim in victims:
                self.kill(victim)
        task = asyncio.get_running_loop().create_task(lose())
        self._later.add(task)
        how = f"cut off from the rest for {last_s:.1f} s, then lost" if cut_off else "lost at once"
        return f"{', '.join(victims)} {how}; there again {away_s:.0f} s later"

    def _refuse(self, kind: str, last_s: float) -> str:
        """The disk of the owner, once there is a first step (before, that is an error), or of a member."""
        names = [*self.members(), *([self.owner] * 3 if self.mesh.result.losses else [])]
        victim = self.chance.choice(names)
        homes = {"owner": self._folder / "runs", "heir": self._folder / "heir" / "runs"}
        self.disk.folder, self.disk.error = homes.get(victim, self._folder / victim), REFUSALS[kind]
        asyncio.get_running_loop().call_later(last_s, setattr, self.disk, "error", None)
        return f"{kind} at {victim} for {last_s:.1f} s"

    def _step_clock(self, victim: str, last_s: float) -> str:
        """Its wall clock, until somebody sets it right."""
        step_s = math.exp(self.chance.uniform(*map(math.log, STEP_S))) * self.chance.choice((-1, 1))
        self._ahead_s[victim] = step_s
        asyncio.get_running_loop().call_later(last_s, self._ahead_s.pop, victim, None)
        return f"the clock of {victim} is {step_s:+.0f} s off for {last_s:.1f} s"

    def suspend(self, victim: str, last_s: float) -> str:
        life = self._lives[victim]
        self.still.begin(life)
        self._asleep.add(life)
        asyncio.get_running_loop().call_later(last_s, self._wake, victim, life)
        return f"{victim} suspended for {last_s:.0f} s"

    def _wake(self, name: str, life: str) -> None:
        if name != "owner" or self.here.stores[name].reachable:  # who was killed meanwhile does not wake
            self._asleep.discard(life)
            self.still.end(life)

    def _answer(self, victim: str, how: Impairment) -> None:
        """All that it sends."""
        ids = {name: agent.peer_id for name, agent in self.here.agents.items()}
        for name in ids.keys() - {victim}:
            self.here.network.impair(ids[victim], ids[name], how)

    def end(self) -> None:
        """Everything that lives is whole again."""
        self.heal()
        for name in self.lending:
            self._set(name, LINK)
        self.disk.error = None
        self._ahead_s.clear()
        for name, life in self._lives.items():
            self._wake(name, life)

    async def calm_down(self) -> None:
        """Nothing that was to happen later happens any more."""
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)

    def _impair(self, victim: str, how: Impairment, last_s: float) -> None:
        self._set(victim, how)
        asyncio.get_running_loop().call_later(last_s, self._set, victim, LINK)

    def _set(self, victim: str, how: Impairment) -> None:
        for name in self.here.agents.keys() - {victim}:
            self._between(victim, name, how)

    def _between(self, a: str, b: str, how: Impairment) -> None:
        one, other = self.here.agents[a].peer_id, self.here.agents[b].peer_id
        self.here.network.impair(one, other, how)
        self.here.network.impair(other, one, how)

    def _partition(self, last_s: float) -> str:
        names = [*self.lending, self.owner]
        other = self.chance.sample(names, self.chance.randrange(1, len(names)))
        beside_owner = [n for n in self.lending if (n in other) == (self.owner in other)]
        if self.mesh.result.plan is None and len(beside_owner) < STAGES:
            other = self.chance.sample(self.lending, len(self.lending) - STAGES)
        self.part(other)
        asyncio.get_running_loop().call_later(last_s, self.heal)
        return f"{', '.join(other)} apart from the rest for {last_s:.1f} s"

    def part(self, other: Collection[str]) -> None:
        """Network and store: these and the rest each go on by themselves."""
        names = [*self.lending, self.owner]
        sides = [[self.here.agents[n].peer_id for n in names if (n in other) == side] for side in (False, True)]
        self.here.network.partition(*sides)
        self._apart = SharedMemory(now)
        _merge(self._apart, self.here.memory)
        for name in other:
            self.here.stores[name].shared = self._apart

    def heal(self) -> None:
        """The network is whole again, and whoever was apart meets what the others have written."""
        self.here.network.heal()
        if self._apart is not None:
            _merge(self.here.memory, self._apart)
            self._apart = None
        for store in self.here.stores.values():
            store.shared = self.here.memory

    async def agreed(self) -> float:
        """Seconds until all who live believe in one coordinator, who lives; TimeoutError if not soon enough."""
        began_s = now()
        async with asyncio.timeout(AGREED_WITHIN_S):
            while True:
                believed = {self.here.agents[name].lease for name in [*self.lending, self.owner]}
                terms = {lease.term if lease else None for lease in believed}
                if len(terms) == 1 and (term := terms.pop()) is not None and self.name_of(term[1]) is not None:
                    return now() - began_s
                await asyncio.sleep(0.25)


@asynccontextmanager
async def stormy(seed: int, folder: Path, *, standby: bool = False) -> AsyncIterator[Storm]:
    """A mesh of PEERS and an owner, and one that stands by for it if wanted, on a loop of virtual time."""
    network = MemoryNetwork(seed=seed, impairment=LINK)
    async with InProcess(JoinOptions(), network, TIMES, clock=now, monotonic=now) as here:
        storm = Storm(here, None, folder, seed)  # type: ignore[arg-type]
        with storm.still.possible(), devices_fill_up(storm.full):
            for i in range(PEERS):
                await storm.start(f"p{i}")
            storm.mesh = await storm.own("owner", folder)
            if standby:
                storm.heir, storm.heir_mesh = "heir", await storm.own("heir", folder / "heir")
            try:
                yield storm
            finally:
                await storm.calm_down()


async def train(
    storm: Storm,
    hear: Callable[[Report], None] = lambda report: None,
    job: Job | None = None,
    augmented: bool = False,
    **more: Any,
) -> str:
    """Train under whatever befalls; "equal", or in what the run differs from an undisturbed one."""
    told: dict[str, list[Report]] = defaultdict(list)
    job = job or job_of(augmented)

    async def own(name: str, mesh: Mesh, **how: Any) -> None:
        with storm.in_life(name):
            async with contextlib.aclosing(mesh.train(job, captured=captured_job(), **how, **more)) as training:
                async for report in training:
                    told[name].append(report)
                    hear(report)

    async def begin() -> None:
        try:
            await own("owner", storm.mesh, stages=min(STAGES, len(storm.mesh.agent.devices())))
        except ClockError as error:  # refused before the first step; the user sets the clock right, and types it again
            storm.done.append(f"{now() - 1000:.2f} s: {error}")
            await storm.clocks_right()
            await own("owner", storm.mesh, stages=STAGES)

    owning = begin()
    if storm.heir_mesh is None:
        await owning
    else:
        await _with_standby(storm, storm.heir_mesh, owning, own, job)
    losses, state = expected(augmented)
    done = 0
    for reports in told.values():  # who goes on may tell again of what was told in the owner's last moments
        steps = [report.step for report in reports]
        if steps and (steps[0] > done or steps != list(range(steps[0], steps[-1] + 1))):
            return "steps were lost or told of twice"
        done = max([done, *(s + 1 for s in steps)])
        if [report.loss for report in reports] != [losses[s] for s in steps]:
            return "other losses"
    if done != STEPS:
        return "steps were lost"
    if storm.mesh.result.losses != losses:
        return "other losses"
    found = storm.mesh.result.state_dict
    if not all(torch.equal(found[name], tensor) for name, tensor in state.items()):
        return "other weights"
    return "equal"


async def _with_standby(
    storm: Storm, heir: Mesh, owning: Coroutine[Any, Any, None], own: Callable[..., Awaitable[None]], job: Job
) -> None:
    """The run that the owner begins; who stands by ends it, if the owner is gone."""
    first = asyncio.get_running_loop().create_task(owning)
    try:
        with storm.in_life(storm.heir):
            followed = await heir.stand_by(job, captured_job())
        if followed is None:
            await asyncio.wait({first})  # has an end though the owner stands still
            return first.result()
        storm.owner, storm.mesh = storm.heir, heir
        storm.done.append(f"{now() - 1000:.2f} s: the standby goes on")
        await own(storm.heir, heir, resume=followed[0], after=followed[1])
    finally:
        storm.still.end()  # what is dead may end
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError, MeshceeError):
            await first


async def one(
    seed: int,
    logged: Sequence[Mapping[str, Any]],
    augmented: bool = False,
    kinds: Sequence[str] = BLOWS,
    blows: int = 3,
) -> dict[str, Any]:
    """A run under blows from the seed, whose log goes to `logged`; "outcome" is "equal", or what went wrong."""
    began_s, chance = time.perf_counter(), random.Random(f"blows {seed}")
    CHANCE.seed(seed)  # who claims first
    activations, nobodys = Activations(), contextvars.copy_context()
    steps = sorted(chance.choices(range(-1, STEPS - 2), k=blows))  # -1: while it is planned and offered
    drawn = chance.choices(kinds, k=blows)
    standby = "kill the owner" in drawn
    outcome, agreed_s, storm = "never began", None, None
    try:
        with tempfile.TemporaryDirectory(prefix="meshcee-storm-") as folder, activations.watched():
            weather = stormy(seed, Path(folder), standby=standby)
            async with weather as storm, asyncio.TaskGroup() as group:
                striking: list[asyncio.Task[None]] = []

                async def befall(pause_s: float, kind: str) -> None:
                    await asyncio.sleep(pause_s)
                    assert storm is not None
                    await storm.strike(kind)

                def strike(pause_s: float) -> None:
                    steps.pop(0)
                    work = befall(pause_s, drawn.pop())
                    striking.append(group.create_task(work, context=nobodys.copy()))

                def hear(report: Report) -> None:
                    while steps and steps[0] <= report.step:
                        # now, in this step or the next; or while the mesh is busy with the blow before
                        strike(chance.choice((chance.uniform(0, 1), chance.uniform(0, 10))))

                while steps and steps[0] < 0:
                    strike(chance.uniform(0, 4))
                with disk.using(storm.disk):
                    async with asyncio.timeout(ENDS_WITHIN_S):
                        outcome = await train(storm, hear, augmented=augmented)
                    for task in striking:
                        task.cancel()
                    await storm.calm_down()
                    storm.end()
                    agreed_s = round(await storm.agreed(), 2)
    except BaseExceptionGroup as group:
        outcome = "; ".join(f"{type(e).__name__}: {e}" for e in leaves(group))
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    if activations.doubled:
        outcome = f"two plans in one epoch: {activations.doubled}"
    past = going_back(logged, storm.names if storm is not None else {})
    if outcome == "equal" and past.wrong and not (standby and storm is not None and storm.owner != "owner"):
        # the log of a second owner does not begin with what the first one knew
        outcome = "; ".join(past.wrong)
    return {
        "seed": seed,
        "blows": storm.done if storm is not None else [],
        "outcome": outcome,
        "epochs": len(activations.plans),
        "back": [back.to_json() for back in past.backs],
        "copies_every": past.every,
        "virtual_s": round(now() - 1000, 1),
        "agreed_s": agreed_s,
        "seconds": round(time.perf_counter() - began_s, 2),
    }


def play(seed: int, augmented: bool = False, kinds: Sequence[str] = BLOWS) -> dict[str, Any]:
    """The run of a seed, on a loop of its own; its samples may be augmented, its blows of these kinds.

    The log of a run that did not end as it should is kept, as the same seed may go another way the next time.
    """
    with capture_logs() as logged, quick_planning(), one_thread():
        result = run(one(seed, logged, augmented, kinds), inline=True)
    if result["outcome"] != "equal":
        Path(tempfile.gettempdir(), f"meshcee-chaos-{seed}.log").write_text("\n".join(map(str, logged)))
    return result


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch's kernels here are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [e for x in group.exceptions for e in (leaves(x) if isinstance(x, BaseExceptionGroup) else [x])]
