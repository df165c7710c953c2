"""What steps show of a mesh, and when that becomes another plan."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from benchmarks.rehearsal import (
    CHANGE_S,
    FLOPS,
    POOR,
    SPEEDS,
    FakeMesh,
    Played,
    costs,
    flaps,
    fresh,
    hindsight_s,
    mesh,
    profiles,
    rehearse,
    report_of,
    step_s,
)
from meshcee.adapt.paces import Paces
from meshcee.adapt.rule import Level
from meshcee.adapt.senses import (
    DOUBTFUL,
    FAST,
    LASTING_STEPS,
    Carries,
    Computes,
    Feeds,
    Joined,
    Profiled,
    Reads,
    Senses,
    together,
)
from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.events import Event
from meshcee.figures.measured import Measured
from meshcee.figures.observed import Observed
from meshcee.figures.profile import AT_HAND, LinkProfile
from meshcee.figures.timing import BlockTimes
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from meshcee.planner.live import situation
from meshcee.simulator import period_s
from peers.device.compute import Pace
from peers.measure.sounding import sound
from peers.node.early import JoinOptions
from peers.node.in_process import QUICK, InProcess
from peers.owner import adaptation
from peers.owner.adaptation import Adaptation, Change, Newcomers
from peers.owner.job_run import Result
from peers.planning.coordinator import PlanRequest
from peers.transport.memory import Impairment, MemoryNetwork


def about(times: float) -> Any:
    """As the text of a shift says it."""
    return pytest.approx(times, abs=0.005)


def step(compute_s: float = 1.0, rate: float = 1e6) -> Observed:
    return Observed({"a": compute_s, "b": 2.0}, {("a", "b"): rate})


def test_a_plans_change_names_each_thing_that_has_shifted_once() -> None:
    """A peer that slowed, recovered and slowed again stood there three times, with factors that contradict each other."""
    shifts = [Computes("a", 2.0), Carries(("a", "b"), 0.5), Joined("c"), Computes("a", 0.5), Carries(("b", "a"), 3.0)]
    shifts += [Computes("a", 3.0), Feeds("a", 2.0), Carries(("b", "a"), 1 / 3), Joined("c")]
    assert together(shifts) == (Computes("a", 3.0), Carries(("a", "b"), 0.5), Joined("c"), Feeds("a", 2.0))
    assert together([Computes("a", 2.0), Computes("a", 0.5)]) == (Computes("a", 1.0),), "there is a reason, always"


def warmed(**bandwidths: float) -> Senses:
    senses = Senses({("a", "b"): 1e6, **{(k[0], k[1]): v for k, v in bandwidths.items()}})
    for _ in range(LASTING_STEPS + 1):
        assert senses.hear(step()) == []
    return senses


def test_what_holds_is_told_once_and_what_passes_is_not() -> None:
    senses = warmed()
    for _ in range(LASTING_STEPS // 2):
        assert senses.hear(step(compute_s=3.0, rate=1e5)) == [], "it may pass"
    for _ in range(2 * LASTING_STEPS):
        assert senses.hear(step()) == []
    told = [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step(rate=2.5e5))]
    assert told == [Carries(("a", "b"), about(0.25))]
    assert senses.rates == {("a", "b"): 2.5e5}
    told = [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step())]
    assert told == [Carries(("a", "b"), about(4.00))]
    assert senses.rates == {("a", "b"): 1e6}


def test_a_shift_is_told_with_the_names_of_peers() -> None:
    names = {"a": "ann", "b": "ben"}
    told = [
        shift.text(names)
        for shift in (
            Computes("a", 1.5),
            Carries(("a", "b"), 0.25),
            Feeds("b", 2),
            Reads(0.17),
            Joined("c"),
            Profiled("c"),
        )
    ]
    assert told == [
        "ann takes 1.50 times as long to compute",
        "the link from ann to ben has 0.25 times its bandwidth",
        "the link that feeds ben has 2.00 times its bandwidth",
        "data: the samples of a step take 0.17 s",
        "c has joined",
        "c computes otherwise than when it was profiled before",
    ]


def test_a_slow_device_is_told_from_its_own_usual_time() -> None:
    senses = warmed()
    told = [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step(compute_s=1.5))]
    assert told == [Computes("a", about(1.50))]
    assert senses.slow == {"a": 1.5}
    senses.restart()  # other blocks: what is usual has to be learnt anew, and the first step warms up
    assert senses.hear(step(compute_s=40.0)) == []
    assert [shift for _ in range(3 * LASTING_STEPS) for shift in senses.hear(step(compute_s=4.0))] == []
    assert senses.slow == {"a": 1.5}, "what was learnt of the device stays"


def test_first_steps_that_were_disturbed_make_no_device_faster_than_its_profile() -> None:
    senses = Senses({})
    assert [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step(compute_s=3.0))] == []
    told = [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step(compute_s=1.0))]
    assert told == [Computes("a", about(0.33))], "what the first steps made known of it was wrong"
    assert senses.slow.get("a", 1.0) == 1.0
    told = [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step(compute_s=1.5))]
    assert told == [Computes("a", about(1.50))]
    told = [shift for _ in range(2 * LASTING_STEPS) for shift in senses.hear(step(compute_s=0.7))]
    assert senses.slow == {"a": 1.0}
    assert told == [Computes("a", about(0.67))]


def test_noise_and_links_faster_than_the_machine_are_no_shifts() -> None:
    noise = random.Random(0)
    senses = Senses({("a", "b"): 1e6, ("b", "a"): 1e9})
    for _ in range(300):
        seen = step(compute_s=noise.uniform(0.92, 1.08), rate=noise.uniform(0.92e6, 1.08e6))
        rates = {**seen.rates, ("b", "a"): noise.uniform(6e7, 5e8)}
        assert senses.hear(Observed(seen.compute_s, rates)) == []
    assert not senses.rates
    told = [s for _ in range(LASTING_STEPS) for s in senses.hear(Observed({}, {("b", "a"): 1e7}))]
    assert len(told) == 1, "a fast link that has become slow is one"


def test_probes_tell_of_links_that_no_step_crosses() -> None:
    senses = Senses({("a", "b"): 1e6})
    for _ in range(2 * LASTING_STEPS):
        senses.hear(step(rate=1e5))
    assert senses.rates == {("a", "b"): 1e5}
    assert senses.probed({("a", "b"): 1.2e5, ("b", "c"): 1e6}) == [], "probes are noisy, and the unknown is no shift"
    assert senses.probed({("a", "b"): 1e6}) == [Carries(("a", "b"), about(10.00))]
    assert senses.rates == {("a", "b"): 1e6}, "the probe counts"
    assert senses.probed({("a", "b"): 2e5}) == [], "something else may have crossed it"
    assert senses.probed({("a", "b"): 9e5}) == []
    assert senses.probed({("a", "b"): 2e5}) == []
    assert senses.probed({("a", "b"): 1e5}) == [Carries(("a", "b"), about(0.20))]


def test_what_others_show_of_a_line_takes_the_place_of_an_older_probe() -> None:
    """A plan that begins to cross a link which was last probed while the line was poor is not priced by that."""
    senses = Senses({("a", "b"): 1e6})
    for _ in range(2):
        senses.probed({("a", "b"): 2.5e5})
    assert senses.rates == {("a", "b"): 2.5e5}
    senses.assume(("a", "b"), 9e5)
    assert senses.rates == {("a", "b"): 9e5}
    assert senses.share(("a", "b")) == 0.9
    assert [told for _ in range(2 * LASTING_STEPS) for told in senses.hear(step())] == [], (
        "it has what was assumed, nearly"
    )
    senses.assume(("a", "b"), 1e9)
    assert senses.rates == {("a", "b"): FAST}, "that or more"


def test_a_link_that_nobody_had_measured_is_known_from_its_first_steps() -> None:
    senses = Senses({})
    for _ in range(LASTING_STEPS + 1):
        assert senses.hear(step()) == []
    assert len([s for _ in range(LASTING_STEPS) for s in senses.hear(step(rate=1e5))]) == 1


def test_links_that_were_better_once_are_doubtful() -> None:
    senses = warmed()
    assert senses.doubtful == set()
    for _ in range(DOUBTFUL):
        senses.hear(step(rate=2.5e5))
    assert senses.doubtful == {("a", "b")}
    senses.probed({("a", "b"): 9e5})
    for _ in range(DOUBTFUL):
        senses.hear(Observed())
        assert senses.doubtful == {("a", "b")}, "it may sag again"
    senses.hear(Observed())
    assert senses.doubtful == set()


async def test_a_peer_that_is_asked_probes_a_link_again_and_tells() -> None:
    async with InProcess(JoinOptions(), timeouts=QUICK) as here:
        a, b, c = [await here.start(name) for name in "abc"]
        pair = (a.peer_id, b.peer_id)
        async with asyncio.timeout(10):
            await c.directory.wait_for(lambda: pair in c.links())
            before = c.links()[pair].measured_at
            await sound(c, [pair, (b.peer_id, "nobody"), ("nobody", b.peer_id)])
            await c.directory.wait_for(lambda: c.links()[pair].measured_at > before)


def within(plans: list[Plan], factor: float) -> float:
    """Throughput at the end, of that of a fresh run under this network."""
    return step_s(fresh(factor), factor) / step_s(plans[-1], factor)


async def test_a_drop_and_a_recovery_are_followed_within_15_steps() -> None:
    dropped = [1.0] * 15 + [POOR] * 15
    played = await rehearse(dropped)
    assert step_s(played.plans[0], POOR) > 1.5 * step_s(fresh(POOR), POOR), "there is something to gain"
    assert within(played.plans, POOR) >= 0.95
    played = await rehearse([*dropped, *[POOR] * 40, *[1.0] * 15])
    assert played.sounded > 0, "no step crosses the link: somebody has to look"
    assert within(played.plans, 1.0) >= 0.95
    assert len(played.changes) == 2
    assert played.results[0].after_s is not None
    cut_off = await rehearse(
        dropped[: played.changes[0]]
    )  # the run ends, or loses a peer, before the other plan's first step
    assert (cut_off.changes, cut_off.results) == ([], [])


async def test_plans_are_priced_by_how_long_devices_compute_and_not_by_profiles_that_are_off() -> None:
    """The far device alone takes 1.69 s a step, the near two 1.52; by their profiles it would be the other way round."""
    played = await rehearse([1.0] * 15 + [POOR] * 15, off={"near-0": 1.04, "near-1": 1.04, "far": 0.88})
    assert len(played.changes) == 1
    assert set(played.plans[-1].peers) == {"near-0", "near-1"}
    assert within(played.plans, POOR) >= 0.95


@pytest.mark.slow
async def test_a_plan_that_ran_in_less_than_was_expected_is_gone_back_to() -> None:
    """When the link is nearly what it was, another plan is expected to take 2 % less than the first one, which took 7 % less."""
    first = fresh(1.0)

    def real(plan: Plan, factor: float) -> float:
        return step_s(plan, factor) * (0.93 if plan.hash() == first.hash() else 1.0)

    assert step_s(fresh(0.9), 0.9) < 0.99 * step_s(first, 0.9)
    factors = [1.0] * 15 + [POOR] * 55 + [0.9] * 15
    played = await rehearse(factors, real=real)
    assert played.plans[-1].hash() == first.hash()
    assert (await rehearse(factors)).plans[-1].hash() != first.hash()


def test_only_what_was_better_than_expected_changes_a_plans_price() -> None:
    good, poor, paces = fresh(1.0), fresh(POOR), Paces()
    assert paces.share(good) == 1.0
    paces.ran(good, 0.9, 1.0)
    paces.ran(poor, 1.1, 1.0)
    assert (paces.share(good), paces.share(poor)) == (0.9, 1.0)


def test_a_device_that_has_not_worked_is_taken_to_be_off_as_most_are() -> None:
    plan, paces = fresh(POOR), Paces()
    flops = {s.peers[0]: FLOPS * (s.end - s.first) / plan.num_blocks for s in plan.pipelines[0].stages}
    compute_s = {peer: 1.1 * found / SPEEDS[peer] for peer, found in flops.items()}
    here = Measured(mesh(1.0).devices, mesh(1.0).links, profiles(dict.fromkeys(SPEEDS, 1.0)), {})
    assert paces.applied(here, {}).times == here.times, "nothing is known yet"
    job = replace(costs(), alike=(0,) * plan.num_blocks)
    slow = {"near-0": 2.0}
    paces.hear(plan, *situation(here, job), {**compute_s, "near-0": 2 * compute_s["near-0"]}, slow)
    found = paces.applied(here, slow).times
    off = {p: t.seconds[0][0][0][1] / here.times[p].seconds[0][0][0][1] for p, t in found.items()}
    assert off == pytest.approx({"near-0": 2.2, "near-1": 1.1, "far": 1.1}), (
        "that one has become slow is its own affair"
    )


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-300, 1e12, 1e308])
def test_whatever_seconds_a_member_reports_plans_can_still_be_priced(seconds: float) -> None:
    plan, paces = fresh(POOR), Paces()
    here = Measured(mesh(1.0).devices, mesh(1.0).links, profiles(dict.fromkeys(SPEEDS, 1.0)), {})
    job = replace(costs(), alike=(0,) * plan.num_blocks)
    senses = Senses({})
    for reported in [1.0] * 6 + [seconds] * 5 + [1.0] * 5:
        senses.hear(Observed({plan.peers[0]: reported}, {}, {}))
        paces.hear(plan, *situation(here, job), dict.fromkeys(plan.peers, reported), senses.slow)
        found = situation(paces.applied(here, senses.slow), job)
        assert 0 < period_s(plan, *found) < math.inf
    assert senses.compute_s == {plan.peers[0]: 1.0}, "what comes behind that is heard again"


def test_a_stage_that_computes_next_to_nothing_says_nothing_of_its_device() -> None:
    """A device that held an empty block, and took what a call takes, was taken to be 11,000 times as slow as its profile."""
    plan, paces = fresh(POOR), Paces()
    (stage, *_), first = plan.pipelines[0].stages, plan.pipelines[0].stages[0].peers[0]
    assert stage.first == 0
    times = profiles(dict.fromkeys(SPEEDS, 1.0))
    job = replace(costs(), alike=(*(0 for _ in range(stage.end)), *(1 for _ in range(plan.num_blocks - stage.end))))

    def of(whole: BlockTimes) -> BlockTimes:
        empty = tuple(tuple(((1e-9, 1e-9, 1e-9), row[0]) for row in rows) for rows in whole.seconds)
        return replace(whole, blocks=(0, 1), seconds=empty, apply_s=(0.0, 0.0))

    here = Measured(mesh(1.0).devices, mesh(1.0).links, {p: of(t) for p, t in times.items()}, {})
    paces.hear(plan, *situation(here, job), {first: 0.05}, {})
    assert paces.applied(here, {}).times == here.times


async def test_figures_that_price_the_running_plan_far_above_its_steps_are_no_reason_to_leave_it() -> None:
    first = fresh(1.0)

    def real(plan: Plan, factor: float) -> float:
        return step_s(plan, 1.0 if plan.hash() == first.hash() else factor)

    played = await rehearse([1.0] * 15 + [POOR] * 30, real=real)
    assert (played.changes, played.searches > 0) == ([], True)


async def test_a_probe_beside_the_traffic_of_steps_says_nothing() -> None:
    """It gets what they leave of a line that all links between two regions share."""
    played = await rehearse([1.0] * 40, leftover=0.3)
    assert played.changes == []
    assert played.searches == 0


async def test_plans_that_are_known_are_priced_while_a_search_has_to_wait() -> None:
    played = await rehearse([1.0] * 15 + [POOR] * 55 + [1.0] * 15, search_s=20.0)
    assert played.searches == 1, "a tenth of the time is not over"
    assert within(played.plans, 1.0) >= 0.95


@pytest.mark.cases(2)
@pytest.mark.parametrize("every", [3, 6, 12, 25])
async def test_a_link_that_flaps_causes_one_change_in_fifty_steps_at_most(every: int) -> None:
    factors = flaps(every, 100)
    played = await rehearse(factors)
    assert all(b - a >= 50 for a, b in pairwise(played.changes))
    assert played.total_s <= 1.25 * hindsight_s(factors, [fresh(1.0), fresh(POOR)])


async def test_each_decision_is_told_with_its_cause_alternatives_and_gains() -> None:
    """The link recovers when so few steps are left that going back would not pay."""
    factors = [1.0] * 15 + [POOR] * 60 + [1.0] * 14
    with capture_logs() as logged:
        played = await rehearse(factors, steps=len(factors))
    kept, changed, late = Event.PLAN_STAYS, Event.PLAN_CHANGES, Event.PLAN_STAYS_TO_THE_END
    decisions = [entry for entry in logged if entry["event"] in (kept, changed, late)]
    assert [e["event"] for e in decisions] == [kept, changed, kept, late]
    for entry, times in zip(decisions, ("0.25", "0.25", "4.00", "4.00"), strict=True):
        assert all(f"has {times} times its bandwidth" in cause for cause in entry["cause"])
        assert entry["cause"]
        assert entry["alternatives_s"] == sorted(entry["alternatives_s"])
        assert entry["alternatives"] >= len(entry["alternatives_s"]) > 0
        assert (entry["gain"] > 1.5) == (entry["event"] is not kept)
        assert entry["takes_s"] >= 0
    (measured,) = [entry for entry in logged if entry["event"] == Event.PLAN_CHANGED]
    assert measured["gain"] == pytest.approx(decisions[1]["gain"], rel=0.05)
    assert len(played.changes) == 1


async def test_moments_that_held_up_the_first_step_are_part_of_what_a_change_takes() -> None:
    takes_s = []
    for late_s in (0.0, 3.0):
        with capture_logs() as logged:
            played = await rehearse([1.0] * 15 + [POOR] * 60 + [1.0] * 20, late_s=late_s)
        assert len(played.changes) == 2
        takes_s.append([entry["takes_s"] for entry in logged if entry["event"] == Event.PLAN_CHANGES])
    (first, second), (same, later) = takes_s
    assert same == first, "no plan had begun in the place of another"
    assert later == pytest.approx(second + 3.0, abs=0.1)


STEPS, MICRO = 60, 8
WELL, SAGGED = 1e8, 1e6  # bytes per second


class Wide(nn.Module):
    """Little state, large activations: 128 KiB a micro-batch at every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Noise:
    def __len__(self) -> int:
        return 320

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(i)
        x = torch.randn(64, 64, generator=made)
        return x, x.roll(1, 0)


def wide_job() -> Job:
    torch.manual_seed(0)
    return Job(
        model=Wide(),
        loss=nn.functional.mse_loss,
        data=Noise(),
        optimizer=Optimizer("AdamW", lr=1e-3),
        batch_size=4 * MICRO,
        micro_batch_size=MICRO,
        steps=STEPS,
        codec="none",
    )


async def run(home: Home) -> Result:
    """Three paced peers; after ten steps the links of the second stage's have a hundredth of their bandwidth."""
    options = JoinOptions(pace=Pace(4e8))
    network = MemoryNetwork(impairment=Impairment(latency_s=0.001, bandwidth_bytes_per_s=WELL))
    async with InProcess(options, network, timeouts=QUICK) as here:
        for i in range(3):
            await here.start(f"p{i}")
        mesh = await here.own("owner", home)
        job = wide_job()
        async for report in mesh.train(job, captured=capture(job)):
            if report.step == 10:
                assert mesh.result.plan is not None
                stages = mesh.result.plan.pipelines[0].stages
                assert len(stages) > 1, "paced devices are faster together"
                slow = stages[1].peers[0]
                for agent in here.agents.values():
                    if agent.peer_id != mesh.agent.peer_id:
                        for pair in ((slow, agent.peer_id), (agent.peer_id, slow)):
                            network.impair(*pair, Impairment(latency_s=0.001, bandwidth_bytes_per_s=SAGGED))
        return mesh.result


@pytest.mark.slow
async def test_a_link_that_sags_is_planned_around_and_no_number_changes(tmp_path: Path) -> None:
    result = await run(Home(tmp_path))
    assert result.plan is not None
    assert [c.level for c in result.changes] == [Level.REGROUP.name.lower()]
    change = result.changes[0]
    assert any("times its bandwidth" in cause for cause in change.cause)
    assert change.gain > 1.5
    assert change.after_s is not None
    assert change.after_s < change.before_s
    losses, _, model, _ = plain(wide_job(), STEPS, MICRO)
    assert result.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(result.state_dict[name], tensor), name


@pytest.mark.slow
async def test_a_peer_that_joins_a_running_job_is_given_blocks_and_no_number_changes(tmp_path: Path) -> None:
    options = JoinOptions(pace=Pace(4e8))
    network = MemoryNetwork(impairment=Impairment(latency_s=0.001, bandwidth_bytes_per_s=WELL))
    async with InProcess(options, network, timeouts=QUICK) as here, asyncio.TaskGroup() as group:
        await here.start("p0")
        mesh = await here.own("owner", Home(tmp_path))
        job = wide_job()
        async for report in mesh.train(job, captured=capture(job)):
            if report.step == 3:
                group.create_task(here.start("late"))
        result, late = mesh.result, here.agents["late"].peer_id
    assert result.plan is not None
    assert late in result.plan.peers
    assert "late has joined" in {cause for change in result.changes for cause in change.cause}
    losses, _, model, _ = plain(wide_job(), STEPS, MICRO)
    assert result.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(result.state_dict[name], tensor), name


async def test_a_poor_line_from_the_owner_is_adapted_to() -> None:
    """It feeds the first stage, whose link from the owner sags; another device is reached as well as before."""
    size, steps = 16_000_000, 200
    job = replace(costs(), feeds=((size // costs().batch_size, (0,)),))
    plan, changes, here = fresh(1.0), list[Change](), FakeMesh(Played([1.0]), True, 1.0)
    first = plan.peers[0]
    request = PlanRequest(job, feeds=dict.fromkeys(SPEEDS, LinkProfile(0.001, 4e7)))
    newcomers = Newcomers(cast(Any, here), here.profiles, profiles({}))
    adapter = Adaptation(cast(Any, here), request, plan, changes, newcomers, check=lambda plan, kinds: None)
    here.now_s += CHANGE_S
    found = None
    with capture_logs() as logged:
        for step in range(40):
            rate = 4e7 if step < 12 else 4e6
            seconds = max(step_s(plan, 1.0), size / rate)
            here.pass_by(seconds)
            report = report_of(step, steps, plan, seconds, 1.0)
            observed = replace(report.observed, fed={first: (size, rate)})
            found = await adapter.hear(replace(report, observed=observed), can_move=True)
            if found is not None:
                break
    assert found is not None
    assert step < 12 + 2 * LASTING_STEPS, "before long"
    assert found.peers[0] != first
    (entry,) = [entry for entry in logged if entry["event"] == Event.PLAN_CHANGES]
    assert entry["cause"] == (f"the link that feeds {first} has 0.10 times its bandwidth",)
    assert entry["gain"] > 3
    asked = adapter.learnt(request)  # after a loss, of another plan
    assert asked.feeds[first].bandwidth_bytes_per_s == 4e6, "as steps have shown"
    assert {link.bandwidth_bytes_per_s for peer, link in asked.feeds.items() if peer != first} == {4e7}
    assert asked.job == job


def test_a_device_whose_feeding_link_nobody_knows_is_priced_as_the_slowest_that_is_known() -> None:
    """It was fed for nothing, so it was taken in the place of one that had been measured."""
    size = 16_000_000
    job = replace(costs(), feeds=((size // costs().batch_size, (0,)),))
    plan, known = fresh(1.0, ["near-0"]), LinkProfile(0.001, 1e6)
    other = replace(plan.pipelines[0].stages[0].members[0], peer="near-1")
    stage = replace(plan.pipelines[0].stages[0], members=(other,))
    like = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))

    def priced_s(feeds: dict[str, LinkProfile]) -> tuple[float, float]:
        here = situation(replace(mesh(1.0), feeds=feeds), job)
        return period_s(plan, *here), period_s(like, *here)

    assert priced_s({"near-0": known}) == pytest.approx((size / 1e6, size / 1e6), rel=0.01)
    nothing_s = priced_s({})
    assert max(nothing_s) < size / 1e6 / 2
    own = priced_s({"near-0": known, "near-1": AT_HAND})
    assert own[1] == nothing_s[1], "the owner's own device is fed for nothing"
    assert priced_s({"near-1": AT_HAND}) == nothing_s


@pytest.fixture(autouse=True)
def _looks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, so that steps decide and not its clock."""
    monkeypatch.setattr(adaptation, "PROMPT_S", 600.0)


async def sagging(
    told_s: float, read_s: float, steps: int = 40, can_move: Callable[[int], bool] = lambda step: True
) -> tuple[Plan, Plan | None, list[Any]]:
    """The plan of a job whose data was said to take so long for a step, which it does not; a link sags after 12 steps. What it goes
    over to, and what was told of decisions. `can_move`: whether state can, after a step."""
    job = replace(costs(), data_s=told_s / costs().batch_size)
    plan, changes, here = fresh(1.0), list[Change](), FakeMesh(Played([1.0]), True, 1.0)
    newcomers = Newcomers(cast(Any, here), here.profiles, profiles({}))
    adapter = Adaptation(cast(Any, here), PlanRequest(job), plan, changes, newcomers, check=lambda plan, kinds: None)
    here.now_s += CHANGE_S
    with capture_logs() as logged:
        for step in range(steps):
            factor = 1.0 if step < 12 else POOR
            seconds = max(step_s(plan, factor), read_s)
            here.pass_by(seconds)
            report = report_of(step, 400, plan, seconds, factor)
            report = replace(report, observed=replace(report.observed, data_s=read_s))
            found = await adapter.hear(report, can_move=can_move(step))
            if found is not None:
                break
    kinds = (Event.PLAN_CHANGES, Event.PLAN_STAYS)
    return plan, found, [entry for entry in logged if entry["event"] in kinds]


async def test_data_that_was_slow_when_it_was_first_read_keeps_no_plan_for_ever() -> None:
    """A step cannot be shorter than reading its samples takes, so no plan would be better than another one."""
    long_s = 20 * step_s(fresh(1.0), POOR)
    plan, found, told = await sagging(long_s, 0.01)
    assert found is not None
    assert found.peers != plan.peers
    assert any("data: the samples of a step take 0.01 s" in entry["cause"] for entry in told)
    assert told[-1]["gain"] > 1.5


async def test_data_that_has_become_slow_is_no_reason_to_go_over() -> None:
    """The link of the plan sags as well, and another plan would wait for the data just so."""
    long_s = 2 * step_s(fresh(1.0), POOR)
    _, found, told = await sagging(0.0, long_s)
    assert found is None
    assert f"data: the samples of a step take {long_s:.2g} s" in told[0]["cause"]
    assert (await sagging(0.0, 0.0))[1] is not None


async def test_a_change_that_could_not_be_made_after_one_step_is_made_after_the_next() -> None:
    asked: list[int] = []
    for refused in (None, 0):
        steps: list[int] = []

        def can_move(step: int, steps: list[int] = steps, refused: int | None = refused) -> bool:
            steps.append(step)
            return refused is None or step != asked[0]

        assert (await sagging(0.0, 0.0, can_move=can_move))[1] is not None
        asked.append(steps[-1])
    assert asked[1] == asked[0] + 1


@pytest.mark.slow
async def test_reports_do_not_wait_for_a_long_search_and_its_plan_comes_with_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look of a plan that has changed meanwhile counts for nothing, and what made it necessary is looked at anew."""
    monkeypatch.setattr(adaptation, "PROMPT_S", 0.0)
    ready, looks = threading.Event(), 0

    def slow(*asked: Any) -> Any:
        nonlocal looks
        looks += 1
        assert ready.wait(60)
        return period_s(*asked)

    monkeypatch.setattr(adaptation, "period_s", slow)
    plan, changes, here = fresh(1.0), list[Change](), FakeMesh(Played([1.0]), True, 1.0)
    newcomers = Newcomers(cast(Any, here), here.profiles, profiles({}))
    adapter = Adaptation(
        cast(Any, here), PlanRequest(costs()), plan, changes, newcomers, check=lambda plan, kinds: None
    )
    here.now_s += CHANGE_S

    async def step(number: int, plan: Plan, factor: float) -> Plan | None:
        seconds = step_s(plan, factor)
        here.pass_by(seconds)
        return await adapter.hear(report_of(number, 400, plan, seconds, factor), can_move=True)

    for number in range(30):
        assert await step(number, plan, 1.0 if number < 12 else POOR) is None
    assert looks == 1, "one at a time"
    ready.set()
    found = None
    while found is None and number < 60:
        await asyncio.sleep(0.1)  # the thread gets on
        found = await step(number := number + 1, plan, POOR)
    assert found is not None
    assert found.peers != plan.peers

    ready.clear()
    before = looks
    while looks == before and number < 100:
        await asyncio.sleep(0.01)
        number += 1
        assert await step(number, plan, 1.0) in (None, found)
    assert looks == before + 1
    assert adapter.moved(found, here.now_s)
    ready.set()
    with capture_logs() as logged:
        while not logged and number < 140:
            await asyncio.sleep(0.1)
            number += 1
            assert await step(number, found, 1.0) in (None, plan)
    assert looks > before + 3, "it was looked at anew"
    assert logged[-1]["event"] in (Event.PLAN_STAYS, Event.PLAN_CHANGES)


async def test_a_change_that_did_not_pay_before_the_end_keeps_no_later_one_from_it() -> None:
    """The link sags a little, when so few steps are left that a change gains less than it takes; then there is next to none."""
    factors = [1.0] * 15 + [0.5] * 75 + [0.01] * 15
    with capture_logs() as logged:
        played = await rehearse(factors, steps=len(factors))
    told = [entry["event"] for entry in logged if entry["event"] != Event.PLAN_STAYS]
    assert told == [Event.PLAN_STAYS_TO_THE_END, Event.PLAN_CHANGES, Event.PLAN_CHANGED]
    assert [step >= 90 for step in played.changes] == [True]
