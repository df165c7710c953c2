"""Chaos on virtual time: the same blows as benchmarks/chaos.py and more, at any instant, hundreds of them in minutes.

`python -m benchmarks.chaos --virtual 2000 [--first 0]` prints a JSON line for each seed. Everything above the transport is the
product: election, planning, offers, training, snapshots, recovery; the network is the in-process one, with 20 ms and 10 ms of
jitter on every link, and devices are paced. A blow falls at a random instant of a step or of a recovery, so between any two
messages. The idea: what must hold is asked of the whole run, not of a part: its losses are the undisturbed run's, each told of
once; no epoch ever had two plans; and once the network is whole again, all who live soon believe in one coordinator.
Plans hand over to others meanwhile, peers leave (benchmarks/blows.py), and some blows are aimed at just that (benchmarks/aims.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from benchmarks.aims import Aim, Moments, causes, drawn
from benchmarks.blows import BLOWS, LINK, Blows, restless
from benchmarks.going_back import going_back
from benchmarks.one_seed import REAL_S, decided_by
from benchmarks.storm_job import LONG, MICRO, STAGES, STEPS, Work, captured_job, expected, job_of, work_of
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
from peers.node.departure import Departure
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
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
    "sums",
    "train",
]

PACE = Pace(4e4)  # a step takes some seconds
PEERS = 4
TIMES = replace(Timeouts(), regroup_s=180.0)  # a storm may last
AGREED_WITHIN_S = 40.0  # of all who live on one coordinator, once the network is whole
ENDS_WITHIN_S = 1800.0


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

    def __init__(self, here: InProcess, mesh: Mesh, folder: Path, seed: int, work: Work, pace: Pace) -> None:
        self.here, self.mesh, self.seed = here, mesh, seed
        self.work, self.pace = work, pace
        self.blows = Blows(self, seed)
        self.done: list[str] = []
        self.departures: dict[str, Departure] = {}
        self.left: list[str] = []  # who has left politely
        self.paces: dict[str, Pace] = {}
        self._folder = folder
        self._numbers = iter(range(1000))
        self.away: dict[str, Identity] = {}  # killed peers that may come back
        self.doomed: set[str] = set()  # who leaves, or is cut off and will be lost
        self.asleep: set[str] = set()  # lives that are suspended
        self.full: set[str] = set()  # peer ids
        self.disk = RefusingDisk(folder)
        self.owner, self.heir = "owner", ""  # who owns the run, and who stands by
        self.heir_mesh: Mesh | None = None
        self.still = Still()
        self.ahead_s: dict[str, float] = defaultdict(float)  # wall clocks, of the mesh's
        self._lives: dict[str, str] = {}  # of who was started twice, the second
        self._apart: SharedMemory | None = None
        self._identities: dict[str, Identity] = {}
        self._later: list[asyncio.Task[Any]] = []

    async def start(self, name: str, *, forget: bool = False, times: float = 1.0) -> Agent:
        """A device of the usual pace, or so many times as fast."""
        if name not in self._identities:
            key = Ed25519PrivateKey.from_private_bytes(random.Random(f"{self.seed} {name}").randbytes(32))
            self._identities[name] = Identity(key)
        identity = self._identities[name]
        file = self._folder / name / "terms"
        if forget:
            file.unlink(missing_ok=True)
        self.paces.setdefault(name, replace(self.pace, speed_flops_per_s=times * self.pace.speed_flops_per_s))
        self.doomed.discard(name)
        with self.new_life(name):
            clock, pace = self.clock_of(name), self.paces[name]
            made = await self.here.start(name, identity=identity, terms=TermFile(file), pace=pace, clock=clock)
            self.departures[name] = Departure(made)
            self.later(self._depart(name, made))
        return made

    async def newcomer(self, times: float = 1.0) -> str:
        await self.start(name := f"new-{next(self._numbers)}", times=times)
        return name

    async def _depart(self, name: str, agent: Agent) -> None:
        """It ends when somebody has asked it to and its job has gone on without it, or when its time to leave is over."""
        in_time = await self.departures[name].run()
        if self.here.agents[name] is not agent or name in self.away:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMES.shutdown_s):
                await agent.elector.resign()
                await agent.directory.say_goodbye()
        if self.here.agents[name] is agent and name not in self.away:
            self.kill(name)
            self.doomed.discard(name)
            self.left.append(name)
            self.tell(f"{name} has left{'' if in_time else ', too late for its job'}")

    async def strike(self, kind: str, near: Collection[str] = (), when: str = "") -> None:
        self.tell(when + await self.blows.strike(kind, tuple(near)))

    def tell(self, what: str) -> None:
        self.done.append(f"{now() - 1000:.2f} s: {what}")

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self._later.append(asyncio.get_running_loop().create_task(work))

    async def own(self, name: str, folder: Path) -> Mesh:
        with self.new_life(name):
            return await self.here.own(name, Home(folder), self.clock_of(name))

    def runs_of(self, owner: str) -> Home:
        return Home(self._folder / "heir" if owner == "heir" else self._folder)

    def new_life(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What is started inside is that of this peer from now on, until it is started anew."""
        self._lives[name] = f"{name}, life {next(self._numbers)}"
        return self.still.of(self._lives[name])

    async def clocks_right(self) -> None:
        while any(self.ahead_s.values()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(1)

    def in_life(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.still.of(self._lives[name])

    def clock_of(self, name: str) -> Callable[[], float]:
        return lambda: now() + self.ahead_s[name]

    # -- who is there

    @property
    def lending(self) -> list[str]:
        """Living peers with a device, by name."""
        return [name for name, agent in self.here.agents.items() if agent.lends and name not in self.away]

    @property
    def staying(self) -> list[str]:
        """Those of them whom no blow takes yet, and whom a first plan can count on."""
        asleep = self.asleep if self.mesh.result.plan is None else set()
        return [name for name in self.lending if name not in self.doomed and self._lives[name] not in asleep]

    @property
    def can_lose_the_owner(self) -> bool:
        """A standby knows of the run by now, and it is not over: nobody would go on with it."""
        if not self.heir or self.owner == self.heir or not self.here.stores[self.owner].reachable:
            return False
        if len(self.mesh.result.losses) == self.work.job.steps:
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

    @property
    def least(self) -> int:
        """How many peers a blow must leave."""
        return min(STAGES, self.work.captured.train.num_blocks) if self.mesh.result.plan is None else 2

    # -- what blows are made of

    def kill(self, name: str) -> None:
        self.here.crash(name)
        self.away[name] = self._identities[name]

    def stand_still(self, name: str) -> str:
        """Nothing of it runs any more; its life."""
        self.still.begin(life := self._lives[name])
        return life

    def wake(self, name: str, life: str) -> None:
        if name != "owner" or self.here.stores[name].reachable:  # who was killed meanwhile does not wake
            self.asleep.discard(life)
            self.still.end(life)

    def home_of(self, name: str) -> Path:
        homes = {"owner": self._folder / "runs", "heir": self._folder / "heir" / "runs"}
        return homes.get(name, self._folder / name)

    def end(self) -> None:
        """Everything that lives is whole again."""
        self.heal()
        for name in self.lending:
            self.set_links(name, LINK)
        self.disk.error = None
        self.ahead_s.clear()
        for name, life in self._lives.items():
            self.wake(name, life)

    async def calm_down(self) -> None:
        """Nothing that was to happen later happens any more."""
        self.still.end()
        for task in self._later:
            task.cancel()
        found = await asyncio.gather(*self._later, return_exceptions=True)
        self._later.clear()
        for error in found:
            if isinstance(error, Exception):
                raise error

    def set_links(self, victim: str, how: Impairment) -> None:
        for name in self.here.agents.keys() - {victim}:
            self.between(victim, name, how)

    def between(self, a: str, b: str, how: Impairment) -> None:
        one, other = self.here.agents[a].peer_id, self.here.agents[b].peer_id
        self.here.network.impair(one, other, how)
        self.here.network.impair(other, one, how)

    @property
    def is_parted(self) -> bool:
        return self._apart is not None

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
async def stormy(
    seed: int, folder: Path, *, standby: bool = False, work: Work | None = None, pace: Pace | None = None
) -> AsyncIterator[Storm]:
    """A mesh of PEERS and an owner, and one that stands by for it if wanted, on a loop of virtual time."""
    network = MemoryNetwork(seed=seed, impairment=LINK)
    async with InProcess(JoinOptions(), network, TIMES, clock=now, monotonic=now) as here:
        storm = Storm(here, None, folder, seed, work or work_of(), pace or PACE)  # type: ignore[arg-type]
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
    **more: Any,
) -> str:
    """Train under whatever befalls; "equal", or in what the run differs from an undisturbed one.

    `job` is that of the storm, but for what changes no number.
    """
    told: list[list[Report]] = []  # by everybody who has owned the run, each time
    if job is not None:
        storm.work = work_of(job=job)
    work = storm.work

    async def own(name: str, mesh: Mesh, **how: Any) -> None:
        reports: list[Report] = []
        told.append(reports)
        breaks_at = work.breaks_at if "resume" not in how else None
        with storm.in_life(name):
            async with contextlib.aclosing(mesh.train(work.job, captured=work.captured, **how)) as training:
                async for report in training:
                    reports.append(report)
                    hear(report)
                    if report.step == breaks_at:
                        break
                else:
                    return
            storm.tell("the user leaves the run, and resumes it")
            storm.disk.error = None  # or it would be refused
            run = storm.runs_of(name).run("last").id
            await own(name, mesh, **work.callbacks(), resume=run)

    async def begin() -> None:
        how = {**work.how, **work.callbacks(), **more}
        if "stages" in how:
            how["stages"] = min(how["stages"], len(storm.mesh.agent.devices()))
        try:
            await own("owner", storm.mesh, **how)
        except ClockError as error:  # refused before the first step; the user sets the clock right, and types it again
            storm.tell(str(error))
            await storm.clocks_right()
            await own("owner", storm.mesh, **how)

    owning = begin()
    if storm.heir_mesh is None:
        await owning
    else:
        await _with_standby(storm, storm.heir_mesh, owning, own)
    done, losses = 0, work.losses
    for reports in told:  # who goes on may tell again of what was told in the owner's last moments
        steps = [report.step for report in reports]
        # Who has left the run did not hear of its last steps.
        goes_on = work.breaks_at is not None or not steps or steps[0] <= done
        in_order = goes_on and (not steps or steps == list(range(steps[0], steps[-1] + 1)))
        if not in_order and not work.job.audit:  # which may take steps back
            return "steps were lost or told of twice"
        done = max([done, *(s + 1 for s in steps)])
        if [report.loss for report in reports] != [losses[s] for s in steps]:
            return "other losses"
    if done != work.job.steps:
        return "steps were lost"
    if storm.mesh.result.losses != losses:
        return "other losses"
    return work.differs(storm.mesh.result, storm.runs_of(storm.owner)) or "equal"


async def _with_standby(
    storm: Storm, heir: Mesh, owning: Coroutine[Any, Any, None], own: Callable[..., Awaitable[None]]
) -> None:
    """The run that the owner begins; who stands by ends it, if the owner is gone."""
    first = asyncio.get_running_loop().create_task(owning)
    try:
        with storm.in_life(storm.heir):
            followed = await heir.stand_by(storm.work.job, storm.work.captured)
        if followed is None:
            await asyncio.wait({first})  # has an end though the owner stands still
            return first.result()
        storm.owner, storm.mesh = storm.heir, heir
        storm.tell("the standby goes on")
        await own(storm.heir, heir, **storm.work.callbacks(), resume=followed[0], after=followed[1])
    finally:
        storm.still.end()  # what is dead may end
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError, MeshceeError):
            await first


async def one(
    seed: int,
    logged: Sequence[Mapping[str, Any]],
    work: Work,
    kinds: Sequence[str] = BLOWS,
    blows: int = 2,
    aims: Sequence[Aim] | None = None,
    pace: Pace | None = None,
) -> dict[str, Any]:
    """A run under blows from the seed, whose log goes to `logged`; "outcome" is "equal", or what went wrong.

    So many blows fall at steps; others, drawn or given, at moments of the run, and what brings these about.
    """
    began_s, chance, steps = REAL_S(), random.Random(f"blows {seed}"), work.job.steps
    aiming = drawn(chance, kinds) if aims is None else list(aims)
    first = 0 if "plan" in work.how else -1  # while it is planned, unless that is done: a plan has to name who is there
    falls = [(chance.randrange(first, steps - 2), chance.choice(kinds)) for _ in range(blows)]
    falls = sorted(falls + causes(chance, aiming, steps // 2, turns=aims is None))
    activations, nobodys = Activations(), contextvars.copy_context()
    standby = "kill the owner" in {kind for _, kind in falls} | {aim.kind for aim in aiming}
    outcome, agreed_s, storm, aimed = "never began", None, None, 0
    moments = Moments(aiming, lambda *what: None)
    try:
        with tempfile.TemporaryDirectory(prefix="meshcee-storm-") as folder, activations.watched(), moments.watched():
            weather = stormy(seed, Path(folder), standby=standby, work=work, pace=pace)
            async with weather as storm, asyncio.TaskGroup() as group:
                striking: list[asyncio.Task[None]] = []

                async def befall(pause_s: float, *how: Any) -> None:
                    await asyncio.sleep(pause_s)
                    assert storm is not None
                    await storm.strike(*how)

                def strike(pause_s: float, *how: Any) -> None:
                    striking.append(group.create_task(befall(pause_s, *how), context=nobodys.copy()))

                def hear(report: Report) -> None:
                    while falls and falls[0][0] <= report.step:
                        # now, in this step or the next; or while the mesh is busy with the blow before
                        pause_s = chance.uniform(0, chance.choice((0.1, 0.5, 3)))
                        strike(pause_s, falls.pop(0)[1])

                def at(aim: Aim, kind: str, between: tuple[str, str]) -> None:
                    nonlocal aimed
                    assert storm is not None
                    names = [storm.names.get(peer, peer) for peer in between]
                    aimed += 1
                    strike(0, aim.kind, names, f"in a {aim.moment}, with {kind!r} from {' to '.join(names)}: ")

                moments.strike = at
                while falls and falls[0][0] < 0:
                    strike(chance.uniform(0, 4), falls.pop(0)[1])
                with disk.using(storm.disk), restless(storm.blows):
                    async with asyncio.timeout(ENDS_WITHIN_S):
                        outcome = await train(storm, hear)
                    moments.aims.clear()
                    for task in striking:
                        task.cancel()
                    storm.end()
                    await storm.calm_down()
                    agreed_s = round(await storm.agreed(), 2)
    except BaseExceptionGroup as group:
        outcome = "; ".join(f"{type(e).__name__}: {e}" for e in leaves(group))
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    if activations.doubled:
        outcome = f"two plans in one epoch: {activations.doubled}"
    slept = storm is not None and any("owner suspended" in blow for blow in storm.done)
    past = going_back(logged, storm.names if storm is not None else {}, slept=slept)
    # The log of a second owner does not begin with what the first one knew; and where members are in doubt, so is the disk.
    knows = not work.job.audit and not (standby and storm is not None and storm.owner != "owner")
    if outcome == "equal" and past.wrong and knows:
        outcome = "; ".join(past.wrong)
    return {
        "seed": seed,
        "blows": storm.done if storm is not None else [],
        "outcome": outcome,
        "epochs": len(activations.plans),
        "hand_overs": moments.hand_overs,
        "hand_overs_begun": moments.begun,
        "leaves": len(storm.left) if storm is not None else 0,
        "aimed": aimed,
        "refused": sum("checkpoints" in path.parts for path in storm.disk.refusals) if storm is not None else 0,
        "back": [back.to_json() for back in past.backs],
        "copies_every": past.every,
        "virtual_s": round(now() - 1000, 1),
        "agreed_s": agreed_s,
        "seconds": round(REAL_S() - began_s, 2),
    }


def play(
    seed: int,
    augmented: bool = False,
    kinds: Sequence[str] = BLOWS,
    blows: int = 2,
    aims: Sequence[Aim] | None = None,
    steps: int = LONG,
) -> dict[str, Any]:
    """The run of a seed, on a loop of its own; its samples may be augmented, its blows of these kinds, and aimed so.

    It goes the same way each time in one process. The log of a run that did not end as it should is kept.
    """
    with capture_logs([_stamped]) as logged, quick_planning(), one_thread():
        # Now, or the first storm of a process would be another one.
        work = work_of(augmented, job=replace(job_of(augmented, steps), adapt=True))
        with decided_by(seed):
            result = run(one(seed, logged, work, kinds, blows, aims), inline=True)
    if result["outcome"] != "equal":
        Path(tempfile.gettempdir(), f"meshcee-chaos-{seed}.log").write_text("\n".join(map(str, logged)))
    return result


def _stamped(logger: Any, method: str, entry: Any) -> Any:
    """With the loop's time, by which it is judged how long copies take."""
    with contextlib.suppress(RuntimeError):  # what no loop tells needs none
        entry["timestamp"] = datetime.fromtimestamp(asyncio.get_running_loop().time(), UTC).isoformat()
    return entry


def sums(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Over seeds: what was played, so that a storm that plays nothing of a kind is seen."""
    found = {"seeds": len(results), "equal": sum(r["outcome"] == "equal" for r in results)}
    found |= {what: sum(len(r[what]) for r in results) for what in ("blows", "back")}
    counted = ("epochs", "hand_overs_begun", "hand_overs", "leaves", "aimed")
    return found | {what: sum(r[what] for r in results) for what in counted}


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
