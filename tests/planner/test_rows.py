"""Rows of groups: single changes keep devices apart, and annealing finds what the neighbours of the best rows do not lead to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.effort import case
from meshcee.planner.cut import classes_of
from meshcee.planner.proposals import Proposals
from meshcee.planner.rows import Beam, RowMoves, Rows
from meshcee.planner.rules import Runs
from meshcee.planner.search import Effort

WORK = 6_000_000


@given(st.integers(0, 60), st.sampled_from((None, 1)), st.randoms(use_true_random=False))
def test_a_change_of_a_row_uses_no_device_twice_and_none_that_another_pipeline_has(
    seed: int, group: int | None, rng: random.Random
) -> None:
    cluster, workload = case(seed)
    rows = Rows(cluster, workload, classes_of(cluster), Runs(group=group))
    first, *others = list(cluster.devices)
    elsewhere = set(others[: len(others) // 3])
    moves, row = RowMoves(rows, rng), ((first,),)
    for _ in range(40):
        used = elsewhere.union(*row)
        other = moves.propose(row, used)
        if other is not None:
            peers = [peer for peers in other for peer in peers]
            assert peers
            assert all(other)
            assert len(set(peers)) == len(peers)
            assert elsewhere.isdisjoint(peers)
            assert group is None or all(len(of) == 1 for of in other)
            row = other


@pytest.mark.parametrize("seed", [19, 24, 26])
def test_annealing_finds_rows_that_neighbours_of_the_best_do_not_lead_to(seed: int) -> None:
    cluster, workload = case(seed)
    runs = Runs(group=1)

    def best_s(annealed: int) -> float:
        proposals = Proposals(cluster, workload, ("bf16",), Effort(), runs)
        beam = Beam(proposals.rows, 2, "bf16", 4)
        for row in proposals.beginnings():
            beam.judge(row)
        begun_s, begun = beam.best_s, proposals.rows.work
        beam.run(WORK - annealed)
        beam.anneal(annealed)
        assert proposals.rows.work - begun < 1.2 * WORK
        assert beam.best_s <= begun_s
        assert beam.ranked()[0][0] == beam.best_s
        return beam.best_s

    assert best_s(WORK * 7 // 10) < 0.95 * best_s(0)


def test_annealing_of_nothing_that_fits_ends() -> None:
    cluster, workload = case(0)
    Beam(Proposals(cluster, workload, ("bf16",), Effort(), Runs()).rows, 2, "bf16", 4).anneal(WORK)
