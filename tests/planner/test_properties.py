"""What holds for every plan: it is valid or there is a reason, more never hurts, names do not matter."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from meshcee.errors import PlanError
from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner.rules import lower_bound_s, shortages
from meshcee.planner.search import Effort, plans
from meshcee.planner.steady import NEARLY
from meshcee.simulator import period_s
from tests.planner.oracle import random_case, random_wide_case

QUICK = Effort(events=60_000, rows=3_000_000)
SEEDS = [*range(200, 204), -1, -3, -9]  # below zero: few devices, light gradients, so that several pipelines pay


def case(seed: int) -> tuple[Cluster, Workload]:
    return random_wide_case(-seed) if seed < 0 else random_case(seed)


def planned(where: Cluster, work: Workload, start: Plan | None = None) -> Plan | None:
    try:
        return plans(where, work, start=start, effort=QUICK).best
    except PlanError as error:
        if "are missing" not in str(error) and "cannot be spread" not in str(error):
            raise
        return None


def changed(
    where: Cluster, *, faster: float = 1.0, memory: float = 1.0, more: Device | None = None, gone: Iterable[str] = ()
) -> Cluster:
    devices = [
        replace(d, memory_bytes=int(d.memory_bytes * memory)) for d in where.devices.values() if d.name not in gone
    ]
    if more is not None:
        devices.append(more)
    between = {
        (a[1:], b[1:]): LinkProfile(e["latency"], e["bandwidth"] * faster)
        for a, b, e in where.graph.edges(data=True)
        if a[0] == b[0] == "@"
    }
    return Cluster(devices, inside_latency_s=where.inside_latency_s, between=between)


def step(plan: Plan | None) -> float:
    return math.inf if plan is None or plan.predicted is None else plan.predicted.step_s


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_valid_accounted_for_and_no_slower_than_any_device_alone(seed: int) -> None:
    where, work = case(seed)
    plan = planned(where, work)
    if plan is None:
        return
    assert plan.num_blocks == work.num_blocks
    assert plan.global_batch == work.global_batch
    assert shortages(plan, where, work) == []
    assert {*plan.peers, *(x.peer for x in plan.left_out)} == set(where.devices)
    assert all(x.why for x in plan.left_out)
    assert plan.predicted is not None
    assert plan.predicted.step_s == pytest.approx(period_s(plan, where, work))
    assert lower_bound_s(where, work) <= plan.predicted.step_s
    for name in where.devices:
        alone = planned(changed(where, gone=set(where.devices) - {name}), work)
        assert step(plan) <= step(alone) * (1 + 1e-9)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_more_never_makes_a_step_slower(seed: int) -> None:
    where, work = case(seed)
    old = planned(where, work)
    first = next(iter(where.devices.values()))
    for better in (
        changed(where, faster=2.0),
        changed(where, memory=2.0),
        changed(where, more=replace(first, name="another")),
    ):
        assert step(planned(better, work)) <= step(old) * 1.03
        if old is not None:
            assert step(planned(better, work, start=old)) <= step(old) * (1 + 1e-9)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_names_do_not_matter_and_the_same_question_has_the_same_answer(seed: int) -> None:
    where, work = case(seed)
    plan = planned(where, work)
    again = planned(where, work)
    letters = [f"{chr(ord('z') - i)}eer" for i in range(len(where.devices))]
    random.Random(seed).shuffle(letters)
    name = dict(zip(where.devices, letters))
    other = changed(where)
    renamed = Cluster(
        [replace(d, name=name[d.name]) for d in where.devices.values()],
        inside_latency_s=where.inside_latency_s,
        between={
            (a[1:], b[1:]): LinkProfile(e["latency"], e["bandwidth"])
            for a, b, e in other.graph.edges(data=True)
            if a[0] == b[0] == "@"
        },
    )
    third = planned(renamed, work)
    if plan is None:
        assert again is None
        assert third is None
        return
    assert again is not None
    assert third is not None
    assert again.hash() == plan.hash()
    assert [name[p] for p in plan.peers] == list(third.peers)
    assert step(third) == step(plan)


def test_some_of_these_plans_have_two_pipelines() -> None:
    plans_of = [planned(*case(seed)) for seed in SEEDS if seed < 0]
    assert any(p is not None and len(p.pipelines) > 1 for p in plans_of)


@pytest.mark.parametrize("steady", [False, True])
def test_runners_up_are_ready_and_slower(steady: bool) -> None:
    """Or hardly faster, where the best is the steadiest of those that are as good as equally fast."""
    where, work = random_case(9)
    choice = plans(where, work, effort=QUICK, steady=steady)
    assert choice.runners_up
    assert all(step(choice.best) <= (NEARLY if steady else 1.0) * step(p) for p in choice.runners_up)
    assert choice.single is not None
    assert step(choice.best) <= choice.single[1]


def test_a_plan_of_devices_that_have_gone_is_no_start() -> None:
    where, work = random_case(9)
    old = planned(where, work)
    assert old is not None
    smaller = changed(where, gone=[old.peers[0]])
    new = planned(smaller, work, start=old)
    assert step(new) > step(old)
    assert new is None or old.peers[0] not in new.peers


def test_a_missing_link_is_not_crossed_and_a_region_without_any_is_left_out() -> None:
    where, work = random_case(9)
    a, b, *others = where.regions
    between = {(r, s): LinkProfile(0.02, 1e8) for r in (b, *others) for s in (b, *others) if r != s}
    alone = Cluster(where.devices.values(), inside_latency_s=where.inside_latency_s, between=between)
    choice = plans(alone, work, effort=QUICK)
    for plan in (choice.best, *choice.runners_up):
        assert len({alone.devices[p].region == a for p in plan.peers}) == 1
        assert step(plan) == pytest.approx(period_s(plan, alone, work))
    used = {alone.devices[p].region for p in choice.best.peers}
    whys = {x.why for x in choice.best.left_out if (alone.devices[x.peer].region == a) != (a in used)}
    assert whys == {"no link joins it to the devices of the plan"}


def test_a_device_in_no_profile_is_refused() -> None:
    where, work = random_case(1)
    alien = Device("alien", "unheard-of", next(iter(where.inside_latency_s)), 10**9)
    with pytest.raises(PlanError, match="in no profile"):
        plans(changed(where, more=alien), work)


def test_a_shortage_says_how_much_is_missing() -> None:
    where, work = random_case(1)
    with pytest.raises(PlanError, match=r"[\d.]+ (B|KiB|MiB|GiB|TiB) are missing"):
        plans(changed(where, memory=1e-3), work)
