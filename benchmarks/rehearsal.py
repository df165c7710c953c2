"""The network of `benchmarks/adaptation.py`, and the adapter of a live job rehearsed on it: no process, no socket, no waiting.

The idea: two devices near one another and one far away, nearly as fast as both; with all three a job is much faster than with
one side alone, until the link between them drops to a quarter. The rehearsal is the product's `Adaptation` with its senses, search,
prices and rule; what is made up is the mesh: steps take what the simulator says, show the links that they cross as these are, and
a link that somebody asks about is known a step later. What a member's own steps show of its links is known at once, as by gossip.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from benchmarks import adaptation_job as work
from meshcee.adapt.senses import as_shown
from meshcee.figures.measured import JobCosts, Measured
from meshcee.figures.observed import Observed
from meshcee.figures.profile import BlockCost, Cluster, Device, DeviceProfile, LinkProfile
from meshcee.figures.scenario import Scenario
from meshcee.figures.timing import BlockTimes
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner.live import choose, situation
from meshcee.planner.search import Choice
from meshcee.simulator import period_s
from peers.measure.link_report import LinkReport
from peers.owner import adaptation
from peers.owner.adaptation import Adaptation, Change, Newcomers
from peers.owner.epoch import Report
from peers.planning.coordinator import PlanRequest
from peers.transport.base import Frame
from peers.wire.neighbour_link import Crossed

__all__ = [
    "FLOPS",
    "POOR",
    "REGIONS",
    "SPEEDS",
    "Played",
    "costs",
    "flaps",
    "fresh",
    "hindsight_s",
    "mesh",
    "profiles",
    "rehearse",
    "scenario",
    "step_s",
]

STEP_S = 0.8  # of all three together, were they never to wait
SHARES = {"near-0": 1.0, "near-1": 1.0, "far": 1.8}  # of the speed
REGIONS = {"near-0": "near", "near-1": "near", "far": "far"}
POOR = 0.25  # of the link's bandwidth
SLOW = 20.0  # times as long, that a slow device computes
BLOCK_FLOPS = 2.0 * work.TOKENS * work.WIDTH**2
BOUNDARY_BYTES = 4 * work.TOKENS * work.WIDTH
FLOPS = 3 * (work.LAYERS + 1) * BLOCK_FLOPS * work.MICRO * work.MICROS
SPEEDS = {name: share * FLOPS / STEP_S / sum(SHARES.values()) for name, share in SHARES.items()}
INSIDE = LinkProfile(0.00025, 125e6)
BETWEEN = LinkProfile(0.01, work.MICRO * BOUNDARY_BYTES / (0.8 * STEP_S / work.MICROS))  # the link is eight tenths full
SLOW_BACK = 5  # steps after it has left
CHANGE_S = 2.0  # until an epoch has begun


def costs() -> JobCosts:
    size = 4 * work.WIDTH * (work.WIDTH + 1)
    block = BlockCost("layer", BLOCK_FLOPS, size, size, 2 * BOUNDARY_BYTES, BOUNDARY_BYTES, BOUNDARY_BYTES)
    return JobCosts([block] * (work.LAYERS + 1), work.MICRO * work.MICROS, work.MICRO)


def profiles(off: Mapping[str, float]) -> dict[str, BlockTimes]:
    """What these devices would have measured of a block, were they so many times as slow as they are."""

    def seconds(name: str) -> tuple[float, float, float]:
        return (off[name] * BLOCK_FLOPS * work.MICRO / SPEEDS[name],) * 3

    return {n: BlockTimes((0,), (work.MICRO,), (((seconds(n),),),) * 3, (0.0,)) for n in off}


def mesh(factor: float, at: float = 0.0, present: Collection[str] = tuple(SPEEDS), slow: str = "") -> Measured:
    """What peers have measured of one another, with this share of the bandwidth between near and far; one may be `slow`."""
    speeds = {name: SPEEDS[name] / (SLOW if name == slow else 1.0) for name in present}
    devices = {name: DeviceProfile("cpu", "paced", 1 << 33, speed) for name, speed in speeds.items()}
    return Measured(devices, {pair: link_of(pair, factor, at) for pair in itertools.permutations(present, 2)}, {}, {})


def link_of(pair: tuple[str, str], factor: float, at: float) -> LinkProfile:
    inside = REGIONS[pair[0]] == REGIONS[pair[1]]
    link, share = (INSIDE, 1.0) if inside else (BETWEEN, factor)
    return LinkProfile(link.latency_s, share * link.bandwidth_bytes_per_s, at)


def scenario(factor: float = 1.0) -> Scenario:
    """For the lab."""
    devices = [Device(name, name, REGIONS[name], 1 << 33, INSIDE.bandwidth_bytes_per_s) for name in SPEEDS]
    link = LinkProfile(BETWEEN.latency_s, factor * BETWEEN.bandwidth_bytes_per_s)
    cluster = Cluster(
        devices,
        inside_latency_s=dict.fromkeys(REGIONS.values(), INSIDE.latency_s),
        between={("near", "far"): link, ("far", "near"): link},
    )
    return Scenario("near and far", cluster, situation(mesh(factor), costs())[1])


def flaps(every: int, steps: int) -> list[float]:
    """The link's share of its bandwidth in each step."""
    return [POOR if step // every % 2 else 1.0 for step in range(steps)]


class Planner:
    """The search, each network once: rehearsals meet the same few again and again."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Choice, Cluster, Workload]] = {}

    def choose(self, mesh: Measured, job: JobCosts, stages: int | None = None) -> tuple[Choice, Cluster, Workload]:
        key = (
            tuple(mesh.devices),
            *((peer, round(math.log2(t.seconds[0][0][0][1]), 2)) for peer, t in sorted(mesh.times.items())),
            *((pair, round(math.log2(link.bandwidth_bytes_per_s), 1)) for pair, link in sorted(mesh.links.items())),
        )
        if key not in self._found:
            self._found[key] = choose(mesh, job, stages)
        return self._found[key]


PLANNER = Planner()


def step_s(plan: Plan, factor: float, slow: str = "") -> float:
    """Of this plan under this network, as simulated."""
    return period_s(plan, *situation(mesh(factor, slow=slow), costs()))


def fresh(factor: float, present: Collection[str] = tuple(SPEEDS)) -> Plan:
    """The plan of a run that starts under this network, with these devices."""
    return PLANNER.choose(mesh(factor, present=present), costs())[0].best


@dataclass
class Played:
    """`plans[k]` ran step k; `changes` are the steps before which another plan began."""

    factors: Sequence[float]
    plans: list[Plan] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    results: list[Change] = field(default_factory=list)  # as the user is told
    searches: int = 0
    sounded: int = 0  # times that a peer was asked to probe a link
    told: int = 0  # times that members told what their steps had shown of a link
    profiled: int = 0  # times that devices which had come were asked for a profile

    @property
    def total_s(self) -> float:
        return sum(self.steps_s) + CHANGE_S * len(self.changes)


def hindsight_s(factors: Sequence[float], plans: Collection[Plan]) -> float:
    """The least time that all steps take under one of these plans."""
    return min(sum(step_s(plan, factor) for factor in factors) for plan in plans)


class FakeMesh:
    """What `Adaptation` asks of an agent."""

    host = ""

    def __init__(self, played: Played, gossips: bool, once: float) -> None:
        self.now_s = 0.0
        self.factor = 1.0
        self.present = dict.fromkeys(SPEEDS, 0)  # which process of it
        self.gone: dict[str, int] = {}  # likewise, whose record is still there
        self.answer: tuple[str, ...] = ()
        self._known = {
            pair: as_shown(link_of(pair, once, 0.0), link.bandwidth_bytes_per_s)
            for pair, link in mesh(played.factors[0]).links.items()
        }
        self._gossips = gossips
        self._own: dict[str, LinkReport] = {}
        self._crossed: dict[str, Crossed] = {}
        self._asked: list[tuple[str, str]] = []
        self._played = played
        self.transport = self.directory = self

    def clock(self) -> float:
        return 1e9 + self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def names(self) -> dict[str, str]:
        return {name: name for name in SPEEDS}

    def addresses_of(self, peers: Collection[str]) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(peers, ())

    @property
    def peers(self) -> Mapping[str, Any]:
        return {name: SimpleNamespace(instance=str(n)) for name, n in (self.gone | self.present).items()}

    def devices(self, free: Collection[str]) -> Mapping[str, DeviceProfile]:
        return mesh(1.0, present=sorted(self.present)).devices

    def links(self, free: Collection[str]) -> Mapping[tuple[str, str], LinkProfile]:
        return {pair: link for pair, link in self._known.items() if self.present.keys() >= {*pair}}

    def measured(self, free: Collection[str]) -> Measured:
        return Measured(self.devices(free), self.links(free), {}, {})

    def parted(self) -> tuple[tuple[str, str], ...]:
        return ()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    async def profiles(self, without: Collection[str]) -> dict[str, BlockTimes]:
        """Of those who `answer`: the others deliver here what they claim."""
        self._played.profiled += 1
        return profiles(dict.fromkeys(self.answer, 1.0))

    async def open(self, source: str, purpose: str, addresses: Sequence[str]) -> Any:
        async def send(frame: Frame) -> None:
            self._asked.append((source, frame.header["peer"]))
            self._played.sounded += 1

        async def aclose() -> None:
            return None

        return SimpleNamespace(send=send, aclose=aclose)

    def probe(self, leftover: float) -> None:
        """Everybody, everything."""
        for pair in self._known:
            self._known[pair] = link_of(pair, leftover * self.factor, self.clock())

    def begin(self) -> None:
        """A plan: whoever has measured links starts to watch them anew."""
        for name in SPEEDS:
            own = self._own[name] = LinkReport(name, cast(Any, self), clock=self.clock, monotonic=self.monotonic)
            own.known = {b: link for (a, b), link in self._known.items() if a == name}
            self._crossed[name] = own.begin()

    def cross(self, rates: Mapping[tuple[str, str], float]) -> None:
        """A step has; what members make of that, all know."""
        for name, own in self._own.items() if self._gossips else ():
            before = dict(own.known)
            self._crossed[name]({b: rate for (a, b), rate in rates.items() if a == name}, {})
            told = {(name, b): link for b, link in own.known.items() if link != before[b]}
            self._played.told += len(told)
            self._known |= told

    def pass_by(self, seconds: float) -> None:
        """A step has run: what was asked before it is known."""
        self.now_s += seconds
        for pair in self._asked:
            self._known[pair] = link_of(pair, self.factor, self.clock())
        self._asked.clear()


async def rehearse(
    factors: Sequence[float],
    *,
    steps: int = 1000,
    leftover: float = 1.0,
    search_s: float = 0.0,
    comes: tuple[str, int] | None = None,
    off: Mapping[str, float] | None = None,
    real: Callable[[Plan, float], float] = step_s,
    gossips: bool = True,
    once: float | None = None,
    late_s: float | None = None,
    lingers: bool = False,
    slow: tuple[str, range] | None = None,
    stays: bool = False,
) -> Played:
    """A job of so many steps, watched for as many as there are factors. Links that are not crossed were probed beside it, and
    showed this share of what they have; a search takes its owner so many seconds; `comes` is a device and the step at which
    it joins; `off` is how many times the seconds that blocks take are in devices' profiles (none has one otherwise); `real` is
    what steps take; without `gossips` no member tells what its steps show; `once` is what the links had, as records tell, before
    they had the first factor; `late_s` is how long moments hold up the first step after a change whose end was seen, too.
    Where it `lingers`, `comes` is started anew: the record of its last process is there until then. `slow` is a device that
    computes SLOW times as long in these steps; then it leaves, and is back SLOW_BACK steps later, unless it `stays`."""
    played = Played(factors)
    here = FakeMesh(played, gossips, factors[0] if once is None else once)
    if comes is not None:
        del here.present[comes[0]]
        here.gone |= {comes[0]: 0} if lingers else {}
    plan, begins = fresh(factors[0], sorted(here.present)), 0
    following: Plan | None = None
    job = replace(costs(), alike=(0,) * (work.LAYERS + 1)) if off else costs()
    newcomers = Newcomers(cast(Any, here), here.profiles, profiles(off or {}))
    adapter = Adaptation(
        cast(Any, here), PlanRequest(job), plan, played.results, newcomers, check=lambda plan, kinds: None
    )
    here.now_s += CHANGE_S
    here.begin()

    def search(*asked: Any) -> tuple[Choice, Cluster, Workload]:
        played.searches += 1
        here.now_s += search_s
        return PLANNER.choose(*asked)

    with mock.patch.object(adaptation, "choose", search), mock.patch.object(adaptation, "PROMPT_S", 600.0):
        for step, here.factor in enumerate(factors):
            held_up_s = 0.0
            if following is not None and step == begins:
                assert adapter.moved(following, None if late_s is None else here.now_s)
                held_up_s = late_s or 0.0
                plan, following = following, None
                played.changes.append(step)
                here.now_s += CHANGE_S
                here.begin()
            if comes is not None and step == comes[1]:
                here.present[comes[0]] = 1
            name, steps_slow = slow or ("", range(0))
            if slow is not None and stays and step == steps_slow.stop:
                here.answer = (name,)
            elif slow is not None and step == steps_slow.stop:
                del here.present[name]
            if slow is not None and step == steps_slow.stop + SLOW_BACK:
                here.present[name] = 1
            now_slow = name if step in steps_slow else ""
            seconds = (step_s(plan, here.factor, now_slow) if now_slow else real(plan, here.factor)) + held_up_s
            played.plans.append(plan)
            played.steps_s.append(seconds)
            here.pass_by(seconds)
            await asyncio.sleep(0)
            if leftover < 1:
                here.probe(leftover)
            report = report_of(step, steps, plan, seconds, here.factor, now_slow)
            here.cross(report.observed.rates)
            if following is None:
                following = await adapter.hear(report, can_move=True)
                begins = step + 2  # the step that is fed already runs as it was planned
    return played


def report_of(step: int, steps: int, plan: Plan, seconds: float, factor: float, slow: str = "") -> Report:
    stages = plan.pipelines[0].stages
    compute_s = {}
    rates = {}
    for stage in stages:
        flops = FLOPS * (stage.end - stage.first) / (work.LAYERS + 1)
        compute_s[stage.peers[0]] = flops / SPEEDS[stage.peers[0]] * (SLOW if stage.peers[0] == slow else 1.0)
    for a, b in itertools.pairwise(stages):
        for pair in ((a.peers[0], b.peers[0]), (b.peers[0], a.peers[0])):
            rates[pair] = link_of(pair, factor, 0.0).bandwidth_bytes_per_s
    samples_per_s = work.MICRO * work.MICROS / seconds
    seen = Observed(compute_s, rates)
    return Report(step, steps, 1.0, seconds, samples_per_s, seconds * (steps - step), "", observed=seen)


async def main() -> None:
    """What the benchmark may expect in the lab."""
    good, poor = fresh(1.0), fresh(POOR)
    for name, plan in (("good", good), ("poor", poor)):
        where = ", ".join(f"{s.peers[0]} {s.first}..{s.end - 1}" for s in plan.pipelines[0].stages)
        print(
            f"{name}: {where}; {step_s(plan, 1.0):.3f} s on the good network, {step_s(plan, POOR):.3f} s on the poor one"
        )
    played = await rehearse([1.0] * 15 + [POOR] * 55 + [1.0] * 40)
    print(f"drops after 15 steps, recovers after 70: changes before steps {played.changes}, {played.sounded} soundings")
    for every in (3, 6, 12, 25):
        factors = flaps(every, 100)
        played = await rehearse(factors)
        ratio = played.total_s / hindsight_s(factors, (good, poor))
        print(f"flaps every {every}: changes before steps {played.changes}, {ratio:.3f} of the best plan in hindsight")


if __name__ == "__main__":
    asyncio.run(main())
