"""Micro-batches move between pipelines from step to step, by what steps took: soon, enough, and not for noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcee.adapt import Shares, evened
from meshcee.plan import Member, Pipeline, Plan, Stage


def plan_of(counts: Sequence[int], stages: Sequence[int]) -> Plan:
    """Pipelines of so many micro-batches and stages."""
    made = []
    for i, (count, length) in enumerate(zip(counts, stages)):
        blocks = [(k, k + 1) for k in range(length - 1)] + [(length - 1, max(stages))]
        line = (Stage(a, b, (Member(f"p{i}.{a}", 2),), window=9, live_cap=9) for a, b in blocks)
        made.append(Pipeline(count, tuple(line)))
    return Plan(2, tuple(made))


def ends_s(counts: Sequence[int], stages: Sequence[int], paces: Sequence[float]) -> list[float]:
    return [pace * (n + s - 1) for n, s, pace in zip(counts, stages, paces)]


def best_s(total: int, stages: Sequence[int], paces: Sequence[float]) -> float:
    """By trying every division."""
    every = (c for c in product(range(1, total), repeat=len(stages)) if sum(c) == total)
    return min(max(ends_s(c, stages, paces)) for c in every)


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4), st.floats(0.1, 4.0)), min_size=2, max_size=3),
    st.lists(st.floats(0.25, 4.0), min_size=3, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_two_steps_after_a_change_shares_are_within_five_percent_of_the_best(
    pipelines: Sequence[tuple[int, int, float]], change: Sequence[float]
) -> None:
    counts, stages, paces = zip(*pipelines)
    shares = Shares(plan_of(counts, stages), [sum(counts)] * len(counts))
    changed = [p * c for p, c in zip(paces, change)]
    for speeds, steps in ((paces, 3), (changed, 2)):  # of the first one nothing is believed
        for _ in range(steps):
            shares.hear(shares.counts, ends_s(shares.counts, stages, speeds))
        assert sum(shares.counts) == sum(counts)
        assert max(ends_s(shares.counts, stages, speeds)) <= 1.05 * best_s(sum(counts), stages, speeds)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_what_varies_by_itself_moves_nothing_to_and_fro(noise: float) -> None:
    chance, stages = random.Random(0), (2, 2)
    shares, changes = Shares(plan_of((16, 16), stages), (32, 32)), 0
    for _ in range(500):
        paces = [1.0 + chance.uniform(-noise, noise) for _ in stages]
        changes += shares.hear(shares.counts, ends_s(shares.counts, stages, paces))
    assert changes <= 500 * noise
    assert max(ends_s(shares.counts, stages, (1.0, 1.0))) <= 1.15 * best_s(32, stages, (1.0, 1.0))


def test_nobody_gets_more_than_there_is_memory_for() -> None:
    shares = Shares(plan_of((4, 4), (1, 1)), (8, 5))
    assert not shares.hear((4, 4), (40.0, 4.0))  # the first step loads what later ones have
    shares.hear((4, 4), (40.0, 4.0))
    assert shares.counts == (3, 5)
    fixed = Shares(plan_of((4, 4), (1, 1)))  # nobody has said how much memory there is
    assert not fixed.hear((4, 4), (40.0, 4.0))
    assert fixed.counts == (4, 4)


def test_a_plan_is_priced_with_the_shares_that_its_paces_lead_to() -> None:
    plan = plan_of([8, 8, 8], [1, 2, 1])
    assert [p.num_micro for p in evened(plan, [2.0, 1.0, 1.0], [24] * 3).pipelines] == [5, 10, 9]
    assert [p.num_micro for p in evened(plan, [2.0, 1.0, 1.0], [24, 24, 8]).pipelines] == [5, 11, 8]
    assert evened(plan, [1.0] * 3, [24] * 3) == plan


def test_a_step_of_which_nothing_was_heard_moves_nothing() -> None:
    shares = Shares(plan_of((4, 4), (1, 1)), (8, 8))
    assert not shares.hear((4, 4), (0.0, 4.0))


def test_shares_do_not_swing_after_one_disturbed_step() -> None:
    """Steps are fed two ahead. A rule that is sure of what the first passage costs swings for ever."""
    took = {1: 3.6, 2: 7.0, 3: 10.5}  # as measured where the first passage overlaps with the step before
    shares, changes = Shares(plan_of((2, 2), (2, 2)), (4, 4)), 0
    fed = [shares.counts, shares.counts]
    for step in range(40):
        counts = fed.pop(0)
        seconds = [took[n] for n in counts]
        if not step:
            seconds[0] = 10.0
        changes += shares.hear(counts, seconds)
        fed.append(shares.counts)
    assert changes <= 3
    assert shares.counts == (2, 2)
