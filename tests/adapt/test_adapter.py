"""The rule that says when to change plans, and what a change costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.adapter import NETWORKS, optimum_s, thresholds, total_s, work_function
from benchmarks.migration import Move, moves, moving_s
from meshcee.adapt.rule import MOST_CANDIDATES, SETTLING_STEPS, Adapter, Level, WorkFunction, level_of
from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import Workload
from meshcee.plan import Member, Pipeline, Plan, Predicted, Stage
from meshcee.simulator import period_s
from tests.rig.small import workload

BLOCKS, BATCH = 4, 8


def cluster(bytes_per_s: float = 1e9) -> Cluster:
    links = {pair: LinkProfile(0.01, bytes_per_s) for pair in (("east", "west"), ("west", "east"))}
    devices = [Device(n, "k", r, 1 << 40) for n, r in (("a", "east"), ("b", "west"), ("c", "east"))]
    return Cluster(devices, inside_latency_s={"east": 0.0, "west": 0.0}, between=links)


def chain(*stages: tuple[int, int, str], micro_batch: int = 1, window: int = 4) -> Plan:
    made = [Stage(f, e, (Member(p, micro_batch),), window, window + 1) for f, e, p in stages]
    return Plan(micro_batch, (Pipeline(BATCH // micro_batch, tuple(made)),))


WIDE = chain((0, 2, "a"), (2, 4, "b"))
ALONE = chain((0, 4, "a"))


def test_levels_are_told_from_the_deepest_difference() -> None:
    assert level_of(WIDE, WIDE) is Level.ABSORB
    assert level_of(WIDE, chain((0, 2, "a"), (2, 4, "b"), window=2)) is Level.REWINDOW
    assert level_of(WIDE, chain((0, 2, "a"), (2, 4, "b"), micro_batch=2, window=2)) is Level.REALLOCATE
    first, last = WIDE.pipelines[0].stages
    coded = Plan(1, (Pipeline(BATCH, (replace(first, codec_out="int8"), last)),))
    assert level_of(WIDE, coded) is Level.REALLOCATE
    assert level_of(WIDE, chain((0, 1, "a"), (1, 4, "b"))) is Level.SHIFT
    assert level_of(WIDE, chain((0, 2, "c"), (2, 4, "b"))) is Level.REGROUP
    assert level_of(WIDE, ALONE) is Level.REGROUP


def test_only_what_is_not_there_moves() -> None:
    assert moves(WIDE, chain((0, 1, "a"), (1, 4, "b"))) == [Move(1, "a", "b")]
    assert moves(WIDE, ALONE) == [Move(2, "b", "a"), Move(3, "b", "a")]
    assert moves(WIDE, ALONE, gone={"b"}) == [Move(2, None, "a"), Move(3, None, "a")]
    assert moves(WIDE, chain((0, 2, "a"), (2, 4, "b"), window=2)) == []


def test_moving_shares_the_lines() -> None:
    job = _workload()
    both, one = moves(WIDE, ALONE), moves(WIDE, chain((0, 3, "a"), (3, 4, "b")))
    size = 0.75 * sum(job.state_bytes[2:4])
    assert moving_s(both, cluster(1e6), job) == pytest.approx(0.01 + size / 1e6)
    assert moving_s(one, cluster(1e6), job) == pytest.approx(0.01 + 0.75 * job.state_bytes[2] / 1e6)
    assert moving_s([], cluster(), job) == 0.0
    apart = Cluster(
        [Device("a", "k", "east", 1), Device("b", "k", "west", 1)],
        inside_latency_s={"east": 0.0, "west": 0.0},
        between={},
    )
    assert moving_s(both, apart, job) == float("inf")


def _workload() -> Workload:
    return workload(blocks=BLOCKS, batch=BATCH, state=1000, boundary=10_000, f=0.01, b=0.01, w=0.01)


MOVING = [[0.0, 8.0], [5.0, 0.0]]


def test_a_lasting_change_is_followed_and_a_short_one_is_not() -> None:
    rule = WorkFunction(0, MOVING)
    assert [rule.observe([1.0, 2.0]) for _ in range(50)] == [0] * 50
    assert [rule.observe([4.0, 2.0]) for _ in range(2)] == [0, 0]
    assert [rule.observe([1.0, 2.0]) for _ in range(50)] == [0] * 50
    followed = [rule.observe([4.0, 2.0]) for _ in range(15)]
    assert followed[0] == 0
    assert followed[-1] == 1


@pytest.mark.parametrize("every", [3, 6, 12, 25])
def test_a_flapping_link_causes_few_changes(every: int) -> None:
    step_s = [[1.0, 2.0] if k // every % 2 else [4.0, 2.0] for k in range(50)]
    choice = work_function(step_s, [[0.0, 16.0], [16.0, 0.0]])
    assert sum(a != b for a, b in pairwise(choice)) <= 1


@given(
    prices=st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=1, max_size=60),
    far=st.lists(st.floats(0.5, 50), min_size=3, max_size=3),
)
def test_the_rule_is_competitive(prices: list[list[float]], far: list[float]) -> None:
    # On a metric of n points the work function pays at most 2n - 1 times the optimum, and a constant (Borodin et al.).
    ab, bc, ac = far
    ab, bc, ac = min(ab, bc + ac), min(bc, ab + ac), min(ac, ab + bc)
    moving = [[0.0, ab, ac], [ab, 0.0, bc], [ac, bc, 0.0]]
    rule, total = WorkFunction(0, moving), 0.0
    for step_s in prices:  # here it sees a step before it runs it, as in the theorem
        before = rule.current
        after = rule.observe(step_s)
        total += moving[before][after] + step_s[after]
    assert total <= 5 * optimum_s(prices, moving) + 5 * max(far) + 1e-6


def test_it_beats_thresholds_where_links_flap() -> None:
    # Three plans: good on the whole network, good on the poor one, fair on both.
    periods = [[1.0, 1.6, 1.2], [1.5, 1.6, 1.25], [4.0, 1.7, 1.5], [9.0, 1.8, 2.2]]
    moving = [[0.0 if a == b else 8.0 for b in range(3)] for a in range(3)]
    worst = {"rule": 0.0, "thresholds": 0.0, "never": 0.0}
    for network in NETWORKS.values():
        step_s = [periods[level] for level in network(random.Random(1))]
        best = optimum_s(step_s, moving)
        choices = {"rule": work_function, "thresholds": thresholds, "never": lambda s, _: [0] * len(s)}
        for name, choose in choices.items():
            worst[name] = max(worst[name], total_s(choose(step_s, moving), step_s, moving) / best)
    assert worst["rule"] < 1.35
    assert worst["rule"] < worst["thresholds"] < worst["never"]


def test_the_adapter_prices_its_plans_and_follows_the_network() -> None:
    job, good, poor = _workload(), cluster(1e9), cluster(2e4)
    adapter = Adapter(WIDE, lambda p: period_s(p, good, job), lambda a, b: moving_s(moves(a, b), good, job))
    adapter.weather(lambda p: period_s(p, good, job), [ALONE, WIDE])
    assert len(adapter.plans) == 2
    stays = [adapter.observe() for _ in range(20)]
    assert {d.level for d in stays} == {Level.ABSORB}
    assert stays[0].step_s[0] < stays[0].step_s[1], "two devices are faster while the link is"
    adapter.weather(lambda p: period_s(p, poor, job))
    decisions = []
    while adapter.plan is WIDE and len(decisions) < 2000:
        decisions.append(adapter.observe())
    assert decisions[-1].plan is ALONE
    assert decisions[-1].level is Level.REGROUP
    assert decisions[-1].gain > 1
    assert decisions[-1].moving_s > SETTLING_STEPS * stays[0].step_s[0]


def test_a_plan_found_late_has_the_history_of_the_others() -> None:
    job, good = _workload(), cluster(1e9)
    adapter = Adapter(ALONE, lambda p: period_s(p, good, job), lambda a, b: 1.0)
    for _ in range(10):
        adapter.observe()
    predicted = replace(ALONE, predicted=Predicted(1.0, 1.0, 1.0))
    adapter.weather(lambda p: period_s(p, good, job), [WIDE, predicted])
    assert adapter.plans == [ALONE, WIDE], "the same plan with other words is no other plan"
    assert adapter.observe().plan is ALONE, "what it would gain has to pay for the move first"
    steps = 1
    while adapter.plan is ALONE and steps < 1000:
        adapter.observe()
        steps += 1
    assert adapter.plan is WIDE


def test_a_plan_that_cannot_run_is_never_chosen() -> None:
    adapter = Adapter(WIDE, lambda p: 10.0, lambda a, b: 0.0)
    adapter.weather(lambda p: 10.0 if p is WIDE else math.inf, [ALONE])
    assert {adapter.observe().plan for _ in range(100)} == {WIDE}


def test_after_a_change_better_weather_alone_is_no_reason_for_another() -> None:
    good, poor = [1.0, 2.0, 3.0], [4.0, 2.0, 3.0]
    rule = WorkFunction(0, [[0.0 if a == b else 4.0 for b in range(3)] for a in range(3)], rest_steps=50)
    went = [rule.observe(poor) for _ in range(10)].index(1)
    assert went < 6
    back = [rule.observe(good) for _ in range(60)].index(0)
    assert back == 50 - (10 - went - 1), "it rests for fifty steps, and not longer"
    again = [rule.observe(poor) for _ in range(20)]
    assert 1 in again[:10], "worse weather is a reason at any time"
    for _ in range(5):
        assert {rule.observe(good) for _ in range(25)} == {1}
        assert {rule.observe(poor) for _ in range(25)} == {1}, "better weather that passes shows that the link flaps"
    assert 2 in [rule.observe([9.0, 9.0, 3.0]) for _ in range(10)]


def test_what_was_late_counts_at_once() -> None:
    def made() -> Adapter:
        adapter = Adapter(WIDE, lambda p: 1.0, lambda a, b: 0.0, settle_s=4.0)
        adapter.weather(lambda p: 4.0 if p is WIDE else 2.0, [ALONE])
        return adapter

    slow, quick = made(), made()
    assert [slow.observe().plan is ALONE for _ in range(4)] == [False, False, False, True]
    decision = quick.observe(4)
    assert decision.plan is ALONE
    assert decision.gain == 2.0
    assert decision.moving_s == 4.0


def test_a_change_that_is_refused_may_be_decided_on_again() -> None:
    adapter = Adapter(WIDE, lambda p: 1.0, lambda a, b: 0.0, settle_s=4.0)
    adapter.weather(lambda p: 4.0 if p is WIDE else 2.0, [ALONE])
    first = adapter.observe(4)
    for _ in range(3):
        adapter.stay()
        assert adapter.plan is WIDE
        assert adapter.observe() == first, "it would still gain as much"
    adapter.stay()
    adapter.weather(lambda p: 1.0 if p is WIDE else 2.0)
    assert {adapter.observe().plan for _ in range(100)} == {WIDE}, (
        "what was refused is not done later, without a reason"
    )


def test_a_change_that_is_refused_begins_no_rest() -> None:
    rule = WorkFunction(0, [[0.0, 4.0], [4.0, 0.0]], rest_steps=50)
    assert [rule.observe([4.0, 2.0]) for _ in range(4)] == [0, 0, 0, 1]
    rule.stay()
    assert rule.observe([1.0, 0.2]) == 1, "better weather alone is reason enough"


def crowded() -> tuple[Adapter, list[Plan]]:
    """An adapter that has met more plans than it keeps, each in the place of a slower one, and those plans."""
    plans = [chain((0, 1 + i % 3, "a"), (1 + i % 3, 4, f"p{i}")) for i in range(4 * MOST_CANDIDATES)]
    adapter = Adapter(WIDE, lambda p: 1.0, lambda a, b: 10.0)
    for i in range(0, len(plans), 3):
        adapter.weather(lambda p: 1.0 if p is WIDE else 2.0 - plans.index(p) / 1000, plans[i : i + 3])
        assert {adapter.observe().plan for _ in range(5)} == {WIDE}
    return adapter, plans


def test_however_many_plans_it_has_met_it_hears_of_a_better_one() -> None:
    adapter, plans = crowded()
    assert len(adapter.plans) == MOST_CANDIDATES
    assert WIDE in adapter.plans
    assert plans[-1] in adapter.plans, "the latest and fastest"
    adapter.weather(lambda p: 0.02 if p is ALONE else 1.0, [ALONE])
    assert ALONE in [adapter.observe().plan for _ in range(2000)]


def test_plans_of_peers_that_have_gone_make_room_first() -> None:
    adapter, _ = crowded()
    gone, *rest = (p for p in sorted(adapter.plans, key=lambda p: p.hash()) if p is not WIDE)
    adapter.weather(lambda p: math.inf if p is gone else 1.0, [ALONE])
    assert set(map(Plan.hash, adapter.plans)) == set(map(Plan.hash, [WIDE, *rest, ALONE]))
    before = adapter.observe()
    assert before.plan is WIDE
    assert len(before.step_s) == MOST_CANDIDATES
