"""Callbacks hear of each event once and steer the run; what they change trains what a plain loop with the same change would."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import default_collate

import meshcee
from meshcee.callbacks import Callback, Control
from meshcee.capture import Capture, capture
from meshcee.capture.export import Unchanged
from meshcee.eager import plain, plain_steps
from meshcee.errors import UsageError, unwrap
from meshcee.events import Event
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.owner.job_run import Result
from peers.state.checkpoint import CheckpointStore
from tests.mutation import breaks, changed
from tests.peers.member.test_training import Pairs, make_job
from tests.peers.owner.test_recovery import a_mesh, stage_of

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS, MICRO = 10, 6


class Reachable(Optimizer):
    """The plain loop's torch optimizer, where a test can change its rates."""

    def build(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        self.built = super().build(named)
        return self.built


def job_of(**changes: object) -> Job:
    optimizer = Reachable("AdamW", lr=1e-2, groups={"*.bias": {"lr": 3e-3}})
    settings = {"steps": STEPS, "micro_batch_size": MICRO, "optimizer": optimizer, "schedule": None}
    return make_job(**{**settings, "eval_data": Pairs(21), **changes})


@functools.cache
def captured_job() -> Capture:
    return capture(job_of())


async def run(
    job: Job,
    callbacks: Sequence[Any],
    home: Home | None = None,
    *,
    stages: int = 3,
    until: int | None = None,
    resume: str | None = None,
    **more: Any,
) -> tuple[Result, list[Any]]:
    """Train in this process; `until` abandons the run, as a crash would, once that step is reported and a checkpoint is there."""
    found = []
    try:
        async with join(JoinOptions(local=stages), home) as mesh:
            async for report in mesh.train(
                job, captured=captured_job(), stages=stages, callbacks=callbacks, resume=resume, **more
            ):
                found.append(report)
                if report.step == until:
                    async with asyncio.timeout(60):
                        while home is not None and not CheckpointStore(home.run("last").checkpoints).complete():  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                    break
            return mesh.result, found
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


def assert_same(result: Result, losses: list[float], state: Mapping[str, torch.Tensor]) -> None:
    assert result.losses == losses
    assert result.state_dict.keys() == state.keys()
    for name, tensor in result.state_dict.items():
        assert torch.equal(tensor, state[name]), name


def evaluated(job: Job, model: nn.Module) -> float:
    """The loss over eval_data, as a plain loop would take it in the same micro-batches."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(job.eval_data), MICRO):
            rows = [job.eval_data[i] for i in range(first, min(first + MICRO, len(job.eval_data)))]
            x, y = (torch.as_tensor(column) for column in zip(*rows, strict=True))
            total += float(job.loss(model(x), y)) * len(rows)
    model.train()
    return total / len(job.eval_data)


# -- the learning rate


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
async def test_a_plateau_lowers_the_rate_as_torchs_own_class_in_a_plain_loop(stages: int) -> None:
    options: dict[str, Any] = {"factor": 0.3, "min_lr": 5e-4, "patience": 1, "threshold": 0.9, "cooldown": 1}
    job = job_of(eval_every=1)
    result, reports = await run(job, [meshcee.ReduceOnPlateau("loss", **options)], stages=stages)
    losses, rates, values = [], [], []
    for done in plain_steps(job, STEPS, MICRO):
        assert isinstance(job.optimizer, Reachable)
        if not done.step:
            rule = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer.built, eps=0.0, **options)
        losses.append(done.loss)
        rates.append(job.optimizer.built.param_groups[-1]["lr"])
        values.append(evaluated(job, done.module))
        rule.step(values[-1])
    assert_same(result, losses, done.state_dict)
    assert [report.lr for report in reports] == rates
    assert [report.metrics["loss"] for report in reports] == values
    assert len(set(rates)) >= 3


@pytest.mark.slow
async def test_a_rate_that_is_changed_from_a_step_on_is_that_of_a_schedule_with_this_step() -> None:
    def lower(run: Control, report: Any) -> None:
        if report.step == 1:
            assert run.scale_lr(0.1, step=7) == 7

    result, reports = await run(job_of(), [lower])
    expected = plain(job_of(schedule=Schedule("MultiStepLR", milestones=[7], gamma=0.1)), STEPS, MICRO)
    assert_same(result, expected.losses, expected.state_dict)
    assert [report.lr for report in reports] == [1e-2] * 7 + [1e-2 * 0.1] * 3
    assert result.losses != plain(job_of(), STEPS, MICRO).losses


class Lower(Callback):
    """The rate is a third after each step, until the sixth: what counts when is the same in every run."""

    waits = "steps"

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_step(self, run: Control, report: Any) -> None:
        if report.step < 6:
            self.at.append(run.scale_lr(0.3))


def lowered() -> tuple[list[float], dict[str, torch.Tensor]]:
    job, losses = job_of(), []
    for done in plain_steps(job, STEPS, MICRO):
        assert isinstance(job.optimizer, Reachable)
        losses.append(done.loss)
        for group in job.optimizer.built.param_groups if done.step < 6 else ():
            group["lr"] *= 0.3
    return losses, done.state_dict


async def test_no_step_begins_before_a_callback_that_waits_has_heard_of_the_one_before() -> None:
    lower = Lower()
    result, _ = await run(job_of(), [lower])
    assert_same(result, *lowered())
    assert lower.at == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("until", [2, 7])
async def test_a_resumed_run_has_the_rates_that_it_had(tmp_path: Path, until: int) -> None:
    """The second owner has the callback, too, or where everything is asked for already none: the run's own lines tell."""
    home = Home(tmp_path)
    job = job_of(checkpoint_every=2)
    await run(job, [Lower()], home, until=until)
    cut = home.run("last")
    on_disk = [c.next_step for c in CheckpointStore(cut.checkpoints).complete()]
    told = [step for line in cut.reports() for step, *_ in line.get("lr_changes", ())]
    assert told == list(range(1, len(told) + 1))
    assert len(told) > min(until, 5)  # or more: a step may be done between the report and the end
    again = Lower()
    result, _ = await run(job, [again] if until < 6 else [], home, stages=2, resume=f"{cut.id}@{on_disk[-1]}")
    assert_same(result, *lowered())
    lines = cut.reports()
    assert [line["lr_changes"] for line in lines if "lr_changes" in line] == [[[s, 0.3, 0.0]] for s in range(1, 7)]
    assert again.at == list(range(len(told) + 1, 7))


@pytest.mark.slow
async def test_a_loss_changes_no_rate_and_is_told_of_once(tmp_path: Path) -> None:
    class Hears(Lower):
        def __init__(self) -> None:
            super().__init__()
            self.plans: list[str] = []
            self.lost: list[tuple[str, Sequence[str]]] = []

        def on_plan(self, run: Control, plan: Any) -> None:
            self.plans.append(f"plan of {len(plan.peers)}")

        def on_change(self, run: Control, plan: Any) -> None:
            self.plans.append(f"change to {len(plan.peers)}")

        def on_loss(self, run: Control, error: str, peers: Sequence[str]) -> None:
            self.lost.append((error, peers))

    hears, steps = Hears(), []
    async with a_mesh(Home(tmp_path), 3) as (here, mesh):
        train = mesh.train(job_of(checkpoint_every=2), captured=captured_job(), stages=3, callbacks=[hears])
        async for report in train:
            steps.append(report.step)
            if report.step == 4:
                victim = stage_of(here, mesh, 1)
                here.crash(victim)
    assert_same(mesh.result, *lowered())
    assert steps == list(range(STEPS))
    assert hears.plans == ["plan of 3", "change to 2"]
    ((error, peers),) = hears.lost
    assert peers == (victim,)
    assert victim in error
    assert hears.at == sorted(hears.at)
    assert len(hears.at) == 6


# -- the end, evaluations and checkpoints


async def test_a_run_that_gets_no_better_ends_after_the_same_step_always() -> None:
    stop = meshcee.EarlyStop("loss", patience=2, min_delta=100.0)
    result, reports = await run(job_of(eval_every=2), [stop])
    assert result.stopped
    assert [report.step for report in reports if report.metrics] == [1, 3, 5]
    expected = plain(job_of(), 6, MICRO)
    assert_same(result, expected.losses, expected.state_dict)
    assert stop.best == (2, reports[1].metrics["loss"])


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("saved", [True, False])
async def test_a_run_that_has_so_ended_ends_there_when_it_is_resumed(tmp_path: Path, saved: bool) -> None:
    """It was left in the step whose evaluation ends it. Without its checkpoints every step is done again."""

    def stop() -> meshcee.EarlyStop:
        return meshcee.EarlyStop("loss", patience=2, min_delta=100.0)

    home, job = Home(tmp_path), job_of(eval_every=2, checkpoint_every=2)
    uncut, _ = await run(job, [stop()])
    await run(job, [stop()], home, until=5)
    cut = home.run("last")
    if not saved:
        shutil.rmtree(cut.checkpoints)
    with structlog.testing.capture_logs() as lines:
        resumed, reports = await run(job, [stop()], home, stages=2, resume=cut.id)
    assert resumed.stopped
    assert reports == []
    assert resumed.metrics == uncut.metrics
    assert_same(resumed, uncut.losses, uncut.state_dict)
    assert [line["evaluations"] for line in lines if line["event"] == Event.ENDED_EARLY] == [2]
    later = meshcee.EarlyStop("loss", patience=3, min_delta=100.0)
    longer, reports = await run(job, [later], home, stages=2, resume=cut.id)
    assert [report.step for report in reports] == [6, 7]
    assert longer.losses == plain(job_of(), 8, MICRO).losses


@pytest.mark.slow
async def test_a_run_that_a_callback_was_ending_ends_there_when_it_is_resumed(tmp_path: Path) -> None:
    """Its owner was killed before it could. Who resumes it once more trains on."""

    class Ends(Callback):
        waits = "steps"

        def on_step(self, run: Control, report: Any) -> None:
            if report.step == 3:
                run.stop()

    home, job = Home(tmp_path), job_of(checkpoint_every=2)
    await run(job, [Ends()], home, until=3)
    cut = home.run("last")
    (cut.folder / "result.json").unlink(missing_ok=True)
    resumed, reports = await run(job, [], home, stages=2, resume=cut.id)
    assert resumed.stopped
    assert reports == []
    expected = plain(job_of(), 4, MICRO)
    assert_same(resumed, expected.losses, expected.state_dict)
    await run(job, [], home, stages=2, resume=cut.id, until=6)
    (cut.folder / "result.json").unlink(missing_ok=True)
    whole, _ = await run(job, [], home, stages=2, resume=cut.id)
    assert whole.losses == plain(job_of(), STEPS, MICRO).losses


@pytest.mark.slow
async def test_the_best_state_outlives_newer_checkpoints(tmp_path: Path) -> None:
    """Here the first evaluation is the best, as the rate is far too high afterwards; every second step is saved."""

    class Spoil(Callback):
        def on_evaluate(self, run: Control, report: Any) -> None:
            run.set_lr(3.0)

    home, best = Home(tmp_path), meshcee.KeepBest("loss")
    await run(job_of(eval_every=3, checkpoint_every=2), [best, Spoil()], home)
    assert best.best is not None
    assert best.best[0] == 3
    cut = home.run("last")
    found = {c.next_step: c for c in CheckpointStore(cut.checkpoints).complete()}
    assert {3, 10} <= found.keys(), "the newest and the best"
    assert len(found) <= 3, "the two newest, and the best"
    saved, expected = found[3].weights(found[3].names), plain(job_of(), 3, MICRO)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.module.named_parameters())


@pytest.mark.slow
async def test_the_short_words_for_both_do_the_same(tmp_path: Path) -> None:
    def spoil(run: Control, report: Any) -> None:
        if not report.step:
            run.set_lr(3.0, step=2)

    job, by_words, by_callbacks = job_of(eval_every=2, checkpoint_every=2), Home(tmp_path / "a"), Home(tmp_path / "b")
    result, reports = await run(job, [spoil], by_words, keep_best="loss", early_stop=2)
    both = [spoil, meshcee.KeepBest("loss"), meshcee.EarlyStop("loss", patience=2)]
    expected, _ = await run(job, both, by_callbacks)
    assert result.stopped
    assert [report.step for report in reports if report.metrics] == [1, 3, 5]
    assert_same(result, expected.losses, expected.state_dict)
    for home in (by_words, by_callbacks):
        kept = {found.next_step for found in CheckpointStore(home.run("last").checkpoints).complete()}
        assert {2, 6} <= kept, "the best and the newest"
        assert len(kept) <= 3, "one more, which depends on how long the disk takes"


@pytest.mark.parametrize(
    ("changes", "asked", "says"),
    [
        ({"eval_data": None}, {"early_stop": 3}, "metrics of these are none: give the job eval_data"),
        ({}, {"keep_best": "accuracy"}, "looks at 'accuracy' of evaluations, and the metrics of these are loss"),
        ({"metrics": {"f1": lambda output, y: 1.0}}, {"keep_best": "f1"}, r"KeepBest\('f1', mode='max'\)"),
        ({}, {"keep_best": "loss"}, "KeepBest saves, and this run has no folder"),
        ({}, {"early_stop": 0}, "patience=0: a number of evaluations"),
        ({}, {"callbacks": [meshcee.EarlyStop("accuracy")]}, "looks at 'accuracy' of evaluations, and the metrics"),
        (
            {"schedule": Schedule("OneCycleLR", max_lr=0.1, total_steps=5)},
            {},
            "no rate for step 7 of steps=10: .*after step 6",
        ),
    ],
)
async def test_what_they_cannot_do_is_told_before_the_first_step(changes: Any, asked: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        await run(job_of(**changes), **{"callbacks": [], **asked})


def test_a_run_that_a_callback_needs_on_the_disk_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    best = meshcee.KeepBest("loss")
    result = meshcee.train(job_of(), local=1, callbacks=[best])
    assert best.best is not None
    assert {best.best[0]} <= {
        c.next_step for c in CheckpointStore(Home(tmp_path).run(result.run).checkpoints).complete()
    }


@pytest.mark.slow
async def test_the_best_state_is_still_the_best_when_the_run_is_resumed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    job = job_of(eval_every=3, checkpoint_every=2)
    spoil = [meshcee.KeepBest("loss"), lambda run, report: run.set_lr(3.0, step=3) if not report.step else None]
    await run(job, spoil, home, until=6)
    cut = home.run("last")
    best = meshcee.KeepBest("loss")
    await run(job, [best], home, stages=2, resume=cut.id)
    assert best.best is not None
    assert best.best[0] == 3
    found = {c.next_step for c in CheckpointStore(cut.checkpoints).complete()}
    assert {3, 10} <= found
    assert len(found) <= 3


async def test_evaluations_and_checkpoints_come_when_they_are_asked_for(tmp_path: Path) -> None:
    class Asks(Callback):
        waits = "steps"

        def __init__(self) -> None:
            self.saved: list[int] = []
            self.evaluated: list[int] = []
            self.ends: list[tuple[int, str | None]] = []

        def on_step(self, run: Control, report: Any) -> None:
            if report.step == 2:
                run.evaluate()
                run.checkpoint()

        def on_evaluate(self, run: Control, report: Any) -> None:
            self.evaluated.append(report.step)

        def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
            assert (folder / "manifest.json").exists()
            self.saved.append(steps)

        def on_end(self, run: Control, result: Any, error: str | None) -> None:
            self.ends.append((len(result.losses), error))

    asks = Asks()
    result, reports = await run(job_of(checkpoint_every=1000), [asks], Home(tmp_path))
    assert asks.evaluated == [3, 9] == [report.step for report in reports if report.metrics]
    assert asks.saved == [3, 10]
    assert asks.ends == [(STEPS, None)]
    expected = plain(job_of(), STEPS, MICRO)
    assert_same(result, expected.losses, expected.state_dict)


class Cut(Exception):
    """The end of an owner, in the middle of something."""


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("at", [3, 4])
async def test_a_resumed_run_evaluates_and_saves_when_that_was_asked_for(tmp_path: Path, at: int) -> None:
    """It is cut off before the step that is to be evaluated is told of, or behind it; its checkpoints are gone."""

    class Asks(Callback):
        waits = "steps"

        def on_step(self, run: Control, report: Any) -> None:
            if report.step == 2:
                run.evaluate()
                run.checkpoint(keep=True)
            if report.step == at:
                raise Cut

    class Hears(Callback):
        def __init__(self) -> None:
            self.saved: list[int] = []
            self.evaluated: list[int] = []

        def on_evaluate(self, run: Control, report: Any) -> None:
            self.evaluated.append(report.step)

        def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
            self.saved.append(steps)

    home, hears = Home(tmp_path), Hears()
    with pytest.raises(UsageError, match="Cut"):
        await run(job_of(checkpoint_every=1000), [Asks()], home)
    cut = home.run("last")
    for lost in CheckpointStore(cut.checkpoints).complete():
        shutil.rmtree(lost.folder)
    result, reports = await run(job_of(checkpoint_every=1000), [hears], home, stages=2, resume=cut.id)
    assert [step for step, _ in result.metrics] == [3, 9]
    assert [report.step for report in reports if report.metrics] == hears.evaluated == [3, 9][at - 3 :]
    assert hears.saved == [3, 10]
    assert {c.next_step for c in CheckpointStore(cut.checkpoints).complete()} == {3, 10}
    expected = plain(job_of(), STEPS, MICRO)
    assert_same(result, expected.losses, expected.state_dict)


@pytest.mark.slow
async def test_a_resumed_run_lowers_its_rate_after_an_evaluation_that_was_asked_for(tmp_path: Path) -> None:
    class Asks(Callback):
        waits = "steps"

        def __init__(self, cut: int | None = None) -> None:
            self.cut = cut

        def on_step(self, run: Control, report: Any) -> None:
            if report.step == 2:
                run.evaluate()
            if report.step == self.cut:
                raise Cut

    def callbacks(cut: int | None = None) -> list[Callback]:
        return [Asks(cut), meshcee.ReduceOnPlateau("loss", patience=0, threshold=0.9)]

    home = Home(tmp_path)
    job = job_of(eval_every=2, checkpoint_every=2)
    uncut, _ = await run(job, callbacks())
    with pytest.raises(UsageError, match="Cut"):
        await run(job, callbacks(3), home)
    resumed, _ = await run(job, callbacks(), home, stages=2, resume=home.run("last").id)
    assert resumed.metrics == uncut.metrics
    assert_same(resumed, uncut.losses, uncut.state_dict)


# -- what cannot be


def fails(run: Control, report: Any) -> None:
    raise ValueError("mine")


def saves(run: Control, report: Any) -> None:
    run.checkpoint()


def late(run: Control, report: Any) -> None:
    run.set_lr(1.0, step=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (fails, rf"failed at {__file__}:\d+: ValueError: mine"),
        (saves, "no folder"),
        (late, r"step 1 was to change, but step \d+ has begun"),
        (lambda run, report: run.scale_lr(-1.0), "a positive factor"),
        (Callback, "a meshcee.Callback or a function"),
    ],
)
async def test_a_callback_that_fails_ends_the_run_with_a_sentence(callback: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        await run(job_of(eval_every=1), [callback])


# -- what a callback may not change


class Anneals(Callback):
    """Writes where a plain loop would read it in the next step; and what nobody reads."""

    def __init__(self, what: str, model: Any, weight: list[float]) -> None:
        self.what, self.model, self.weight = what, model, weight

    def on_evaluate(self, run: Control, report: Any) -> None:
        self.model.eval()
        self.model.told.append(report.loss)
        self.model.load_state_dict(self.model.state_dict())
        self.model.train()
        if self.what == "freeze":
            self.model.norm.eval()

    def on_step(self, run: Control, report: Any) -> None:
        if self.what == "closure":
            self.weight[0] = 1.0
        elif self.what == "attribute":
            self.model.tau = 0.5
        elif self.what == "tensor":
            self.model.offset += 1
        elif self.what == "large tensor":
            self.model.bank.mul_(0.5)
        elif self.what == "large tensor's data":
            self.model.bank.data.mul_(0.5)
        elif self.what == "large array":
            self.model.table *= 0.5
        elif self.what == "buffer":
            self.model.scale.fill_(2.0)
        elif self.what == "thaw":
            self.model.first.requires_grad_(True)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Embedding(23, 12).requires_grad_(False),
            nn.BatchNorm1d(12),
            nn.Linear(12, 23),
        )
        self.register_buffer("scale", torch.ones(()))
        self.tau, self.offset, self.told = 1.0, torch.zeros(()), [0.0]
        self.bank, self.table = torch.ones(300_000), np.ones(200_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offset * self.bank.sum(), len(self.table)
        return self.last(self.norm(self.first(x))) * self.tau * self.scale + self.offset


CHANGED = {
    "closure": r"\[0\] of 'weight' in the closure of loss",
    "attribute": "attribute 'tau' of the model",
    "tensor": "attribute 'offset' of the model",
    "large tensor": "attribute 'bank' of the model",
    "large tensor's data": "attribute 'bank' of the model",
    "large array": "attribute 'table' of the model",
    "buffer": "the buffer 'scale'",
    "thaw": "requires_grad of 'first.weight'",
    "freeze": "attribute 'training' of module 'norm'",
    "nothing": "",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", CHANGED)
def test_what_the_graph_would_not_follow_ends_the_run(what: str) -> None:
    """KL annealing by a list, a temperature, thawed layers: a plain loop goes on with it, and the mesh trained on in silence."""

    def story() -> None:
        weight, model = [0.0], Annealed()

        def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(out, y) + weight[0] * out.pow(2).mean()

        steps = 2 if what == "attribute" else 3
        job = job_of(model=model, loss=loss, steps=steps, eval_every=1, optimizer=Optimizer("SGD", lr=0.1))
        callbacks = [Anneals(what, model, weight)]
        if what == "nothing":
            assert len(meshcee.train(job, local=1, callbacks=callbacks).losses) == 3
            return
        with pytest.raises(UsageError, match=f"{CHANGED[what]} is not what it was before the first step"):
            meshcee.train(job, local=1, callbacks=callbacks)

    story()
    if what != "nothing":
        with changed(Unchanged.__call__, "if places := self.changed():", "if places := []:"):
            assert breaks(story)


def elsewhere(where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a job and of `train`: what changes the loss's weight behind the first step."""
    weight, reports, pairs = [1.0], list[Any](), Pairs(48)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y) * weight[0]

    def count(given: Any) -> float:
        weight[0] = 0.5 if reports else 1.0
        return 1.0

    def collate(rows: list[Any]) -> Any:
        count(rows)
        return default_collate(rows)

    class Data:
        def __len__(self) -> int:
            return len(pairs)

        def __getitem__(self, index: int) -> Any:
            count(index)
            return pairs[index]

    def metric(out: torch.Tensor, y: torch.Tensor) -> float:
        return count(y)

    def report(given: Any) -> None:
        reports.append(given)
        if where == "report":
            count(given)

    job: dict[str, Any] = {"loss": loss, "steps": 8, "optimizer": Optimizer("SGD", lr=0.1)}
    of_job: dict[str, dict[str, Any]] = {
        "weight": {"weight": count},
        "collate": {"collate": collate},
        "data": {"data": Data()},
        "metric": {"metrics": {"m": metric}, "eval_every": 1},
    }
    return job | of_job.get(where, {}), {"on_report": report}


@pytest.mark.parametrize("count", [0, 1, 255, 257, (1 << 24) + 1, 38_597_376])
def test_tensors_of_any_size_are_looked_at(count: int) -> None:
    """Sizes beyond 2**24 are no float32 any more."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(count, dtype=torch.int8), requires_grad=False)
    model.register_buffer("bank", torch.zeros(count, dtype=torch.int8))
    look = Unchanged(job_of(model=model))
    look()
    model.bank += 1
    assert look.changed() == ["the buffer 'bank'"] * (count > 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["weight", "collate", "data", "metric", "report"])
def test_code_of_the_users_that_changes_the_loss_ends_the_run(where: str) -> None:
    job, options = elsewhere(where)
    with pytest.raises(UsageError, match="is not what it was before the first step"):
        meshcee.train(job_of(**job), local=1, **options)
