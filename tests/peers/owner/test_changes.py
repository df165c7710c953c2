"""Callbacks that change what the model consists of, or read weights that peers train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import structlog
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import meshcee
from meshcee.capture.export import Unchanged
from meshcee.eager import plain_steps
from meshcee.errors import CaptureError, MeshceeError, UsageError
from meshcee.events import Event
from tests import mutation


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[[torch.Tensor], torch.Tensor] = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Other(Activation):
    pass


def job_of(**settings: Any) -> meshcee.Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Activation(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    data = [(row, row.sum(0, keepdim=True)) for row in torch.randn(32, 4)]
    optimizer = meshcee.Optimizer("SGD", lr=0.01)
    sizes = {"batch_size": 8, "micro_batch_size": 4, "steps": 5}  # masks are of a micro-batch's size
    return meshcee.Job(model=model, loss=F.mse_loss, data=data, optimizer=optimizer, **sizes, **settings)


def other_forward(model: Any) -> None:
    model[1].forward = MethodType(lambda self, x: x, model[1])


def other_class(model: Any) -> None:
    model[1].__class__ = Other


def other_module(model: Any) -> None:
    model[1] = nn.Tanh()


def other_function(model: Any) -> None:
    model[1].function = F.gelu


def fewer_modules(model: Any) -> None:
    del model[1]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another module": (other_module, "the list of modules in the model"),
    "fewer modules": (fewer_modules, "attribute 'in_features' of module '1'"),
    "another function": (other_function, "the function 'function' of module '1'"),
    "another forward": (other_forward, "the function 'forward' of module '1'"),
    "another class": (other_class, "the class of module '1'"),
    "a hook": (lambda m: m[2].register_forward_hook(lambda *_: None), "the list of hooks of module '2'"),
    "a hook before": (lambda m: m[2].register_forward_pre_hook(lambda *_: None), "the list of hooks of module '2'"),
    "a hook on a gradient": (lambda m: m[2].weight.register_hook(lambda g: 0 * g), "the list of hooks of module '2'"),
    "a hook behind a gradient": (
        lambda m: m[2].weight.register_post_accumulate_grad_hook(lambda p: None),
        "the list of hooks of module '2'",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_model_than_before_the_first_step_is_seen(what: str) -> None:
    job = job_of()
    look, (change, place) = Unchanged(job), CHANGES[what]
    look()
    change(job.model)
    with pytest.raises(UsageError, match=rf"^({place}).* is not what it was before the first step"):
        look()


class Teaching(nn.Module):
    """A loss that holds weights of classes and a teacher."""

    sharpness = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.teacher = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).requires_grad_(False)

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (type(self).sharpness * self.scale * (self.teacher(out) - y)).square().mean()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda loss: loss.scale.add_(1), "'scale' of module 'Teaching'"),
        (lambda loss: loss.teacher[1].weight.data.mul_(0.5), "'weight' of module 'Teaching teacher.1'"),
        (lambda loss: setattr(Teaching, "sharpness", 2.0), "attribute 'sharpness' of class Teaching"),
    ],
    ids=["buffer", "teacher", "class"],
)
def test_another_loss_than_before_the_first_step_is_seen(
    change: Callable[[Any], object], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Teaching, "sharpness", 1.0)
    job = dataclasses.replace(job_of(), loss=Teaching())
    look = Unchanged(job)
    look()
    change(job.loss)
    with pytest.raises(UsageError, match=rf"^{place} is not what it was before the first step"):
        look()


def test_what_is_set_for_all_optimizers_and_modules_of_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str) -> None:
        with pytest.raises(MeshceeError, match=said):
            meshcee.capture(job_of())

    hook = register_optimizer_step_post_hook(lambda *_: None)
    refused("a hook of all optimizers is set in this process.* do in forward what it does")
    hook.remove()
    hook = register_module_full_backward_hook(lambda *_: None)
    refused("a backward hook of all modules is set, and peers run no hooks on gradients")
    hook.remove()
    with torch.inference_mode():
        made = job_of()
    with pytest.raises(CaptureError, match=r"'0\.weight' was made under torch\.inference_mode\(\).*outside of it"):
        meshcee.capture(made)
    meshcee.capture(job_of())
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    refused(r"SGD\.step is not torch's own in this process")


def test_what_computes_nothing_may_come() -> None:
    job = job_of()
    look = Unchanged(job)
    job.model.note = lambda: 1  # type: ignore[union-attr]
    look()
    assert look.changed() == []


def test_a_run_ends_at_a_callback_that_swaps_a_module() -> None:
    job = job_of()

    class Swaps(meshcee.Callback):
        waits = "steps"

        def on_step(self, run: Any, report: Any) -> None:
            other_module(job.model)

    with pytest.raises(UsageError, match="the list of modules in the model is not what it was"):
        meshcee.train(job, local=1, callbacks=[Swaps()])


def told(job: meshcee.Job, callback: Any) -> list[str]:
    with structlog.testing.capture_logs() as lines:
        losses = meshcee.train(job, local=1, callbacks=[callback]).losses
    assert list(losses) == meshcee.plain(job_of()).losses
    return [line["event"] for line in lines]


READS: dict[str, Callable[[Any], object]] = {
    "an evaluation": lambda model: model(torch.ones(1, 4)),
    "a copy": lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()},
    "an average": lambda model: torch.zeros(8, 4).lerp_(model[0].weight.detach(), 0.1),
    "a norm": lambda model: model[0].weight.norm(),
    "a copy into another": lambda model: torch.zeros(8, 4).copy_(model[0].weight.detach()),
    "as numpy": lambda model: model[0].weight.detach().numpy().sum(),
}


@pytest.mark.parametrize("what", READS)
def test_a_callback_that_reads_weights_is_told_of_once(what: str) -> None:
    """They are those before the first step: an average of them is worthless."""
    job = job_of()
    assert told(job, lambda run, report: READS[what](job.model)).count(Event.WEIGHTS_READ) == 1


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "itself": lambda parameter: parameter.clamp_(-0.1, 0.1),
    "data": lambda parameter: parameter.data.clamp_(-0.1, 0.1),
    "some of it": lambda parameter: parameter[:1].fill_(0.5),
    "several": lambda parameter: torch._foreach_mul_([parameter], 0.5),
    "other data": lambda parameter: setattr(parameter, "data", torch.full_like(parameter, 0.1)),
}


@pytest.mark.parametrize("through", WRITES)
@pytest.mark.parametrize("waits", ["steps", "never"])
def test_weights_that_a_callback_writes_are_told_of_once(through: str, waits: str) -> None:
    """As Lookahead or a clamp would in a plain loop: here the owner's model is not what peers train. Nobody calls that a read."""
    job = job_of()

    class Clamp(meshcee.Callback):
        def on_step(self, run: Any, report: Any) -> None:
            with torch.no_grad():
                for parameter in job.model.parameters():  # type: ignore[union-attr]
                    WRITES[through](parameter)

    Clamp.waits = waits
    with structlog.testing.capture_logs() as lines:
        losses = meshcee.train(job, local=1, callbacks=[Clamp()]).losses
    told = [line for line in lines if line["event"] in (Event.WEIGHTS_WRITTEN, Event.WEIGHTS_READ)]
    assert [line["event"] for line in told] == [Event.WEIGHTS_WRITTEN]
    assert through == "other data" or told[0]["writer"].startswith(f"Clamp.on_step at {__file__}:")
    assert list(losses) == meshcee.plain(job_of()).losses
    with structlog.testing.capture_logs() as lines:
        meshcee.train(job_of(), local=1, callbacks=[lambda run, report: None])
    assert not [line for line in lines if line["event"] == Event.WEIGHTS_WRITTEN]


def test_a_callback_may_read_what_it_has_loaded() -> None:
    job = job_of()
    held = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}  # type: ignore[union-attr]

    def load(run: Any, report: Any) -> None:
        job.model.load_state_dict(held)  # type: ignore[union-attr]
        job.model(torch.ones(1, 4))  # type: ignore[operator]

    assert Event.WEIGHTS_READ not in told(job, load)


def test_a_callback_may_count_weights() -> None:
    job = job_of()

    def count(run: Any, report: Any) -> None:
        assert sum(p.numel() for p in job.model.parameters()) > 0  # type: ignore[union-attr]

    assert Event.WEIGHTS_READ not in told(job, count)


def test_a_model_that_a_callback_leaves_in_eval_mode_is_told_of_once() -> None:
    job = job_of()
    assert told(job, lambda run, report: job.model.eval()).count(Event.LEFT_IN_EVAL) == 1  # type: ignore[union-attr]
    assert Event.LEFT_IN_EVAL not in told(job_of(), lambda run, report: None)


def test_the_look_at_parts_is_what_finds_them() -> None:
    job = job_of()
    with mutation.changed(Unchanged, "return places + moved", "return places"):
        look = Unchanged(job)
        other_module(job.model)
        look()


class Late:
    """From some reading on, as a curriculum from its second data epoch on, the samples depend on the weights."""

    def __init__(self, rows: torch.Tensor, model: Any, first: int) -> None:
        self.rows, self.model, self.first, self.reads = rows, model, first, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        row, target = self.rows[place], self.rows[place].sum(0, keepdim=True)
        return row, target if self.reads < self.first else self.model(row).detach()


@pytest.mark.parametrize("collate", [False, True])
def test_data_that_reads_weights_late_ends_the_run(collate: bool) -> None:
    """Looks before the first step do not come so far."""
    job = dataclasses.replace(job_of(), steps=40)
    late = Late(torch.randn(32, 4), job.model, 120)
    job = dataclasses.replace(job, data=late, collate=torch.utils.data.default_collate if collate else None)
    told: list[Any] = []
    with pytest.raises(UsageError, match=r"reads '0\.weight', which is trained"):
        meshcee.train(job, local=1, on_report=told.append)
    assert told


# -- callbacks that change what samples are read with ----------------------------------------------------------------


class Levels:
    """A curriculum: samples are harder at each level."""

    level, notes = 0, 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.notes > 1000:
            raise AssertionError
        return torch.full((4,), place / 32) + self.level, torch.ones(1)


class Harder:
    """The collate function of one."""

    level = 0

    def __call__(self, samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x + self.level, y


def levels(**settings: Any) -> tuple[meshcee.Job, Any]:
    data = Levels()
    return dataclasses.replace(job_of(), data=data, **settings), data


class Moves(meshcee.Callback):
    def __init__(self, held: Any) -> None:
        self.held = held

    def on_step(self, run: Any, report: Any) -> None:
        self.held.level = report.step + 1


class Waits(Moves):
    waits = "steps"


class MovesOnEvaluate(meshcee.Callback):
    def __init__(self, held: Any) -> None:
        self.held = held

    def on_evaluate(self, run: Any, report: Any) -> None:
        self.held.level = report.step + 1


class MovesOnCheckpoint(Waits):
    def on_step(self, run: Any, report: Any) -> None:
        if not report.step:
            run.checkpoint()

    def on_checkpoint(self, run: Any, steps: int, folder: Any) -> None:
        self.held.level = steps


def moves(held: Any) -> Callable[..., None]:
    def on_each(run: Any, report: Any) -> None:
        held.level = report.step + 1

    return on_each


LATE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a function": (moves, "the callback on_each"),
    "a callback": (Moves, r"Moves\.on_step"),
    "with a checkpoint": (MovesOnCheckpoint, r"MovesOnCheckpoint\.on_checkpoint"),
}


@pytest.mark.parametrize("what", LATE)
def test_a_callback_that_changes_what_has_been_read_ends_the_run(
    what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    job, data = levels(steps=40)
    make, who = LATE[what]
    with pytest.raises(UsageError, match=rf"^{who} changes attribute 'level' of data, .* waits = \"steps\""):
        meshcee.train(job, local=1, callbacks=[make(data)], keeps=True)


def test_it_may_be_in_collate_and_come_later() -> None:
    collate = Harder()
    job = dataclasses.replace(job_of(), steps=40, collate=collate)
    late = moves(collate)
    with pytest.raises(UsageError, match=r"changes attribute 'level' of collate.*steps to come have been read"):
        meshcee.train(job, local=1, callbacks=[lambda run, report: late(run, report) if report.step == 20 else None])


class Ordered(torch.utils.data.Sampler[int]):
    level = 0

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter([(place + self.level) % 32 for place in range(32)])


def test_an_order_that_a_callback_changes_is_told_of_whoever_waits() -> None:
    """Two data epochs' orders are drawn before the first step."""
    sampler = Ordered()
    with structlog.testing.capture_logs() as logged:
        meshcee.train(dataclasses.replace(job_of(), sampler=sampler), local=1, callbacks=[Waits(sampler)])
    told = [entry["changed"] for entry in logged if entry["event"] == Event.READING_CHANGED]
    assert told == ["attribute 'level' of sampler"]


def test_processes_that_read_see_no_change_whoever_waits() -> None:
    job, data = levels(workers=1)
    with pytest.raises(UsageError, match=r"Waits\.on_step changes attribute 'level' .* processes .* leave workers"):
        meshcee.train(job, local=1, callbacks=[Waits(data)])


@pytest.mark.parametrize("kind", [Waits, MovesOnEvaluate])
def test_what_a_callback_changes_that_was_waited_for_counts_from_the_next_step_on(kind: Any) -> None:
    evaluated = {"eval_data": job_of().data, "eval_every": 1 if kind is MovesOnEvaluate else 0}
    job, data = levels(**evaluated)
    losses = []
    for step, done in enumerate(plain_steps(job)):
        losses.append(done.loss)
        data.level = step + 1
    assert len({*losses}) == 5
    job, data = levels(**evaluated)
    assert list(meshcee.train(job, local=1, callbacks=[kind(data)]).losses) == losses


def test_what_shows_in_no_sample_is_told_of_once_and_what_no_code_names_never() -> None:
    job, data = levels()

    def notes(run: Any, report: Any) -> None:
        data.notes += 1

    def names(run: Any, report: Any) -> None:
        data.of_nobody = report.step

    expected = list(meshcee.plain(levels()[0]).losses)
    for callback, times in ((notes, 1), (names, 0)):
        with structlog.testing.capture_logs() as lines:
            losses = list(meshcee.train(job, local=1, callbacks=[callback]).losses)
        told = [line for line in lines if line["event"] == Event.READING_CHANGED]
        assert len(told) == times
        assert losses == expected
    assert data.notes == 5
