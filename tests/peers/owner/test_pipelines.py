"""Several pipelines side by side: each walks some of a step's micro-batches, and all together train what one process would.

The idea: gradients are added up between the pipelines in the order of the micro-batches, so equal means every bit
(test_exact_pipelines.py has more models); with groups in them it means 1e-9 in double precision. Whoever holds a parameter must
end with the same bits, which the owner checks by digest each time it collects.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from meshcee.capture import capture
from meshcee.errors import ProtocolError
from meshcee.events import Event
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.plan import Member as PlanMember
from meshcee.plan import Pipeline, Plan, Stage
from meshcee.role import Sum
from meshcee.stage.runner import StageRunner
from peers.groups import chain_sum
from peers.state.manifest import CopySet, StageCopy
from peers.state.policy import FarCadence, near_keepers
from peers.wire.offer import Offer, Terms
from tests.peers.groups.test_groups import assert_close, double, mixing_job
from tests.peers.groups.test_live_groups import Lopsided, lopsided, losses_of
from tests.peers.groups.test_live_groups import assert_close as assert_live
from tests.peers.groups.test_live_groups import train as train_live
from tests.peers.member.test_training import make_job
from tests.rig.faults import (
    LEFT_WITHIN_S,
    STRUCK,
    Fault,
    Told,
    assert_done_again,
    beside_plan,
    captured_job,
    job_of,
    trained,
)
from tests.rig.mesh_fixture import Trained, beside, train
from tests.rig.reference import reference
from tests.rig.virtual_time import quiet, run, virtual_time

SIX = (6,)
ROWS: dict[str, tuple[int, Any]] = {
    "two of two stages": (3, ((2, ((2, SIX), (0, SIX))), (1, ((3, SIX), (0, SIX))))),
    "one device and two stages": (3, ((1, ((0, SIX),)), (2, ((2, SIX), (0, SIX))))),
    "groups in both": (3, ((2, ((2, (4, 2)), (0, SIX))), (1, ((3, (1, 5)), (0, (3, 2, 1)))))),
    "three": (4, ((1, ((1, SIX), (3, SIX), (0, SIX))), (2, ((0, SIX),)), (1, ((4, SIX), (0, SIX))))),
}


def laid(plan: Plan, rows: Any) -> Plan:
    """`beside` with 0 for the last block's end."""
    blocks = plan.num_blocks
    return beside(plan, *((count, [(end or blocks, shares) for end, shares in stages]) for count, stages in rows))


def points(count: int) -> list[tuple[torch.Tensor, int]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=made), i % 3) for i in range(count)]


async def train_beside(job: Any, rows: Any, **options: Any) -> Trained:
    return await train(job, 1, 6, adapt=lambda plan: laid(plan, rows), **options)


@pytest.mark.parametrize(
    ("which", "options"),
    [
        pytest.param("two of two stages", {}, marks=pytest.mark.slow),
        ("groups in both", {"clip_norm": None, "recompute": True, "direct_sums": True}),
        pytest.param("one device and two stages", {}, marks=pytest.mark.slow),
        pytest.param("three", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
async def test_pipelines_with_dropout_tied_weights_and_clipping_train_what_one_would(which: str, options: Any) -> None:
    micros, rows = ROWS[which]
    job = double("char_gpt", batch_size=6 * micros, **options)
    assert_close(await train_beside(job, rows), job, 1e-9)


@functools.cache
def undisturbed(clip_norm: float | None) -> Told:
    with tempfile.TemporaryDirectory(prefix="meshcee-run-") as folder:
        return run(trained(job_of(clip_norm), beside_plan(), Path(folder)))


@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_two_pipelines_that_are_cut_differently_train_what_one_would(clip_norm: float | None) -> None:
    told, job = undisturbed(clip_norm), job_of(clip_norm)
    expected = reference(job)
    assert list(told.losses[0].values()) == losses_of(expected)
    for name, tensor in told.state.items():
        assert torch.equal(tensor, expected.state[name]), name


@pytest.mark.parametrize(("samples", "micros"), [(20, [2, 2]), (5, [0, 1])])
async def test_an_evaluation_is_divided(samples: int, micros: list[int]) -> None:
    """Of four micro-batches, the last one small; and of one, which is too few for both."""

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
        return float((output.argmax(-1) == target).float().mean())

    job = mixing_job("", batch_size=18, data=points(36), steps=3, eval_every=1, eval_data=points(samples))
    job, captured = replace(job, metrics={"accuracy": accuracy}), capture(job)
    rows = (2, ((1, SIX), (0, SIX))), (1, ((0, SIX),))
    found, alone = await train_beside(job, rows, captured=captured), await train(job, 2, 6, captured=captured)
    assert [end - first for first, end in found.plan.shares_of(-(-samples // 6))] == micros
    assert found.losses == alone.losses
    assert [ours.metrics for ours in found.reports] == [theirs.metrics for theirs in alone.reports]


async def test_batch_statistics_are_those_of_one_pipeline() -> None:
    micros, rows = ROWS["two of two stages"]
    job = make_job(batch_size=6 * micros)
    found, alone = await train_beside(job, rows), await train(job, 2, 6)
    assert found.losses == alone.losses
    assert any(name.endswith("running_var") for name in found.state)
    for name, tensor in alone.state.items():
        assert torch.equal(found.state[name], tensor), name


# -- the sum over the pipelines ----------------------------------------------------------------------------------------


def test_a_flipped_bit_of_a_sum_shows_in_losses_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(0.5)
    added, turns = chain_sum.folded, itertools.count()

    def flipped(*of: Any) -> chain_sum.Numbers:
        present, total = added(*of)
        if not next(turns):
            total.view(torch.int64)[0] ^= 1 << 45
        return present, total

    monkeypatch.setattr(chain_sum, "folded", flipped)
    told = run(trained(job_of(0.5), beside_plan(), tmp_path))
    assert told.losses[0].keys() == expected.losses[0].keys()
    assert told.losses != expected.losses
    assert any(not torch.equal(tensor, expected.state[name]) for name, tensor in told.state.items())


async def test_a_member_that_ends_with_other_weights_than_the_other_pipeline_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply, turns = StageRunner.apply, itertools.count(1)

    def flipped(self: StageRunner, *args: Any) -> None:
        mine = next(turns)
        apply(self, *args)
        if mine == 3:
            with torch.no_grad():
                next(iter(self.trainable.values())).flatten()[0] += 1e-3

    monkeypatch.setattr(StageRunner, "apply", flipped)
    rows = (1, ((1, SIX), (0, SIX))), (1, ((2, SIX), (0, SIX)))
    with pytest.raises(ProtocolError, match=r"p\d \(stage 1\.\d\) ends with other weights than .*p\d \(stage 0\.\d\)"):
        await train_beside(mixing_job("", batch_size=12), rows)


def test_who_adds_up_what_follows_from_the_cuts() -> None:
    """Blocks that the same members hold are one sum; a tied weight belongs to the first block that uses it."""
    captured = captured_job()
    terms = Terms.of(job_of(), captured, 60.0)
    offers = [
        Offer(terms, beside_plan(), (1, 1), (1, "c"), peer, captured.train, None, {}) for peer in beside_plan().peers
    ]
    first, second = offers[0].sums
    assert all(offer.sums == (first, second) for offer in offers)
    assert (first, second) == (
        Sum(0, ("p0", "p2"), ("embed.weight",)),
        Sum(1, ("p1", "p2"), ("middle.weight", "middle.bias")),
    )
    assert [[one.number for one in offer.place.sums] for offer in offers] == [[0], [1], [0, 1], []]
    assert [offer.place.above for offer in offers] == [None, "p0", "p0", "p2"]
    assert [offer.place.below for offer in offers] == [("p1", "p2"), (), ("p3",), ()]


# -- what breaks inside a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip_norm", "kind", "sender", "receiver", "how"),
    [
        (0.5, "part", "p1", "p2", "kill"),
        (None, "part", "p0", "p2", "stall"),
        (None, "sum", "p2", "p0", "cut"),
        (0.5, "sum", "p2", "p1", "kill"),
        (0.5, "norms", "p2", "p0", "stall"),  # the second pipeline's vote
        (None, "commit", "p0", "p2", "cut"),
    ],
)
def test_a_fault_between_pipelines(
    tmp_path: Path, clip_norm: float | None, kind: str, sender: str, receiver: str, how: str
) -> None:
    with quiet():
        told = run(trained(job_of(clip_norm), beside_plan(), tmp_path, Fault(how, kind, sender, receiver)))
    assert told.left_s <= LEFT_WITHIN_S[how]
    assert told.applied.count(STRUCK) <= (2 if kind == "commit" else 0)  # the first pipeline has heard of it
    assert_done_again(told, undisturbed(clip_norm), STRUCK)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_pipelines_are_copies_of_each_other() -> None:
    plan = beside_plan()
    assert near_keepers(plan, {}) == {}
    a, b = {"w": "1"}, {"v": "2"}
    copied = CopySet(4, (StageCopy(a, {}, {"p0"}), StageCopy(b, {}, {"p1"}), StageCopy(a | b, {}, {"p2"})))
    assert copied.is_whole
    copied.stages[0].holders.clear()
    assert copied.is_whole
    assert copied.sources({"w"}) == ("p2",)
    copied.stages[2].holders.clear()
    assert not copied.is_whole
    assert copied.stages[0].clashes({"w": "3"}, {})
    assert not copied.stages[0].clashes({"w": "1", "u": "5"}, {})


# -- a live mesh -------------------------------------------------------------------------------------------------------

HOME = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}


def stage(first: int, end: int, peer: str) -> Stage:
    return Stage(first, end, (PlanMember(peer, 8),), window=3, live_cap=5)


def given() -> tuple[Job, Plan]:
    """A pipeline in each of two regions."""
    job = lopsided(model=Lopsided(2).double(), cuts=("first", "heavy.0", "heavy.1"), groups=False, codec="none")
    stages = [(0, 3, "a0"), (3, 4, "a1")], [(0, 1, "b0"), (1, 4, "b1")]
    pipelines = (Pipeline(2, tuple(stage(a, b, peer) for a, b, peer in row)) for row in stages)
    return job, Plan(8, tuple(pipelines))


@pytest.mark.slow
@virtual_time
async def test_a_step_takes_as_long_as_was_simulated() -> None:
    job, plan = given()
    result, names, step_s = await train_live(job, dict.fromkeys(HOME, 1e8), HOME, plan=plan)
    assert result.plan is not None
    assert [[names[p] for s in line.stages for p in s.peers] for line in result.plan.pipelines] == [
        ["a0", "a1"],
        ["b0", "b1"],
    ]
    assert result.plan.predicted is not None
    assert step_s == pytest.approx(result.plan.predicted.step_s, rel=0.03)
    assert_live(result, job)


@virtual_time
async def test_the_run_goes_on_without_a_member_of_a_pipeline(tmp_path: Path) -> None:
    """Its blocks are read from the other pipeline's copies; the coordinator plans for those who are left."""
    job, plan = given()
    job = replace(job, steps=18, checkpoint_every=100, adapt=False)  # copies are made every second, and fed steps ahead
    with structlog.testing.capture_logs() as told:
        dies = 14, "a0"
        result, names, _ = await train_live(job, dict.fromkeys(HOME, 1e8), HOME, dies=dies, folder=tmp_path, plan=plan)
    (found,) = [line for line in told if line["event"] == Event.STATE_FOUND]
    assert found["with_peers"]
    assert result.plan is not None
    assert "a0" not in {names[peer] for peer in result.plan.peers}
    assert Home(tmp_path).run("last").info["rounds"] == [False, False], (
        "whoever resumes it expects the plain loop's numbers"
    )
    assert_live(result, job)


@pytest.mark.slow
@virtual_time
async def test_a_region_that_holds_some_blocks_alone_is_lost_and_the_run_goes_on_from_far_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pipelines have their first stages in one region; there is no checkpoint to go back to."""
    monkeypatch.setattr(FarCadence, "LEAST_S", 0.0)
    monkeypatch.setattr(FarCadence, "SHARE", 1.0)
    job, plan = given()
    job = replace(job, steps=24, checkpoint_every=100, adapt=False)
    lines = ("a0", "b0"), ("a1", "b1")
    pipelines = (
        Pipeline(2, (stage(0, end, first), stage(end, 4, last)))
        for end, (first, last) in zip((3, 2), lines, strict=True)
    )
    plan = replace(plan, pipelines=tuple(pipelines))
    with structlog.testing.capture_logs() as told:
        dies = 18, "a0", "a1"
        result, names, _ = await train_live(job, dict.fromkeys(HOME, 1e8), HOME, dies=dies, folder=tmp_path, plan=plan)
    (found,) = [line for line in told if line["event"] == Event.STATE_FOUND]
    assert found["with_peers"]
    assert found["next_step"] > 0
    assert result.plan is not None
    assert {names[peer] for peer in result.plan.peers} <= {"b0", "b1"}
    assert_live(result, job)


@virtual_time
async def test_micro_batches_move_from_a_slow_pipeline_within_two_steps_and_no_number_changes() -> None:
    """One that computes at half the speed: of 8 micro-batches 5 or 6 are for the other one."""
    job, plan = given()
    job = replace(job, batch_size=64, steps=10)
    plan = replace(plan, pipelines=tuple(replace(p, num_micro=4) for p in plan.pipelines))
    with structlog.testing.capture_logs() as told:
        paces = {"a0": 1e8, "a1": 1e8, "b0": 0.5e8, "b1": 0.5e8}
        result, _, step_s = await train_live(job, paces, HOME, plan=plan)
    moved = [(line["step"], line["shares"]) for line in told if line["event"] == Event.SHARES]
    assert moved[0][0] <= 2
    assert moved[0][1] == (6, 2)
    assert not result.changes
    assert result.plan is not None
    assert result.plan.predicted is not None
    assert step_s < 0.85 * result.plan.predicted.step_s
    expected = reference(job)
    assert result.losses == losses_of(expected)
    for name, tensor in result.state.items():
        assert torch.equal(tensor, expected.state[name]), name
