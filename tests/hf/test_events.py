"""What TrainerCallbacks hear of a run, in which order, and what comes of what they want."""

from __future__ import annotations

import errno
import json
import math
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from meshcee.callbacks import Control, Listeners
from meshcee.errors import UsageError
from meshcee.files import disk, dumps
from meshcee.hf.events import NOTES, Bridge, StepBridge, handler_of, read_notes, steers_steps
from peers.owner.epoch import Report
from tests.hf.tiny import arguments
from tests.rig.disks import RefusingDisk

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

EVENTS = ("train_begin", "epoch_begin", "step_begin", "step_end", "log", "evaluate", "save", "epoch_end", "train_end")


class Hears(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes down what comes, and sets what it is asked to at a step."""

    def __init__(self, at: int = 0, event: str = "step_end", **wants: bool) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._at, self._event, self._wants = at, event, wants

    def hear(self, name: str, state: Any, control: Any, more: Any) -> None:
        values = {key: more[key] for key in ("logs", "metrics") if key in more}
        figures = next(iter(values.values()), {})
        self.heard.append((name, state.global_step, *sorted(key for key in figures if key != "epoch")))
        self.model = more["model"]
        if (self._event, self._at) == (name, state.global_step):
            for flag, value in self._wants.items():
                setattr(control, flag, value)


def _event(name: str) -> Any:
    return lambda self, args, state, control, **more: self.hear(name, state, control, more)


for _name in EVENTS:
    setattr(Hears, f"on_{_name}", _event(_name))


def report(step: int, loss: float | None = None, steps: int = 4) -> Report:
    metrics = {} if loss is None else {"loss": loss}
    return Report(step, steps, 4.0 - step, 0.1, 80.0, 1.0, "", norm=1.0, lr=0.5, metrics=metrics)


class Story:
    """A run of so many steps, told to callbacks as an owner tells it."""

    def __init__(self, args: Any, *callbacks: Any, steps: int = 4, per_epoch: int = 2, **more: Any) -> None:
        self.state = transformers.TrainerState(max_steps=steps)
        self.state.compute_steps(args, steps)
        handler = handler_of(args, callbacks, "the model", None)
        kind = StepBridge if steers_steps(callbacks) else Bridge
        self.bridge = kind(args, handler, self.state, per_epoch, **more)
        self.control = Control(metrics=("loss",), saves=True)
        self.run: str | None = None  # which has a folder before the first step
        self.listeners = Listeners([self.bridge], self.control)

    def call(self, call: Any) -> None:
        assert call is not None
        call()

    def step(self, step: int, loss: float | None = None) -> None:
        self.control.id = self.run
        self.control.begin(step)
        self.call(self.listeners.step(report(step, loss, self.state.max_steps)))

    def go(self, losses: dict[int, float], steps: int = 4) -> None:
        self.call(self.listeners.plan(None))
        for step in range(steps):
            self.step(step, losses.get(step))
        self.bridge.end()


def quiet(folder: Path, **options: Any) -> Any:
    return arguments(folder, **options)


def test_a_run_is_heard_in_the_librarys_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hears = Hears()
    story = Story(quiet(tmp_path, logging_steps=2, eval_strategy="steps", eval_steps=2), hears)
    story.go({1: 0.5, 3: 0.25})
    log = ("grad_norm", "learning_rate", "loss")
    evaluated = [("log", 2, "eval_loss"), ("evaluate", 2, "eval_loss")]
    second = [("log", 4, "eval_loss"), ("evaluate", 4, "eval_loss")]
    assert hears.heard == [
        ("train_begin", 0),
        ("epoch_begin", 0),
        ("step_begin", 0),
        ("step_end", 1),
        ("step_begin", 1),
        ("step_end", 2),
        ("log", 2, *log),
        *evaluated,
        ("epoch_end", 2),
        ("epoch_begin", 2),
        ("step_begin", 2),
        ("step_end", 3),
        ("step_begin", 3),
        ("step_end", 4),
        ("log", 4, *log),
        *second,
        ("epoch_end", 4),
        ("train_end", 4),
    ]
    first = story.state.log_history[0]
    assert first == {"loss": 3.5, "grad_norm": 1.0, "learning_rate": 0.5, "epoch": 1.0, "step": 2}
    assert not story.control.is_stopping
    assert "'loss': '3.5'" in capsys.readouterr().out


def test_the_model_is_given_while_its_weights_are_here(tmp_path: Path) -> None:
    hears = Hears()
    story = Story(quiet(tmp_path), hears)
    story.call(story.listeners.plan(None))
    story.step(0)
    assert hears.model is None
    story.bridge.handler.model = "the model"  # as who has called the run does
    story.bridge.end()
    assert hears.model == "the model"


def test_callbacks_are_called_in_one_thread_whoever_tells(tmp_path: Path) -> None:
    """A reporter remembers its run by thread, and a run tells of its events from several."""
    threads: list[int] = []

    class Notes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            threads.append(threading.get_ident())

        on_step_end = on_epoch_end = on_train_end = on_train_begin

    story = Story(quiet(tmp_path), Notes())
    for call in (story.listeners.plan(None), *(story.listeners.step(report(step)) for step in range(4))):
        assert call is not None
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    story.bridge.end()
    assert len(threads) == 1 + 4 + 2 + 1
    assert len(set(threads)) == 1


def test_epochs_evaluate_at_their_end(tmp_path: Path) -> None:
    hears = Hears()
    Story(quiet(tmp_path, eval_strategy="epoch", logging_strategy="epoch"), hears).go({1: 0.5, 3: 0.25})
    names = [one[0] for one in hears.heard]
    assert names.count("evaluate") == 2
    assert names[names.index("epoch_end") :][:4] == ["epoch_end", "log", "log", "evaluate"]


def test_stopping_ends_the_run(tmp_path: Path) -> None:
    story = Story(quiet(tmp_path), Hears(2, should_training_stop=True))
    story.call(story.listeners.plan(None))
    story.step(0)
    assert not story.control.is_stopping
    story.step(1)
    assert story.control.is_stopping


def test_an_epoch_that_is_left_is_over(tmp_path: Path) -> None:
    """Whoever stops the run. As in the library, logs of epochs are written; what is no whole epoch is not evaluated."""
    hears = Hears(2, should_training_stop=True)
    args = quiet(tmp_path, logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch")
    story = Story(args, hears, steps=9, per_epoch=3)
    story.call(story.listeners.plan(None))
    story.step(0)
    story.step(1)
    assert story.control.is_stopping
    story.call(story.listeners.end(None, None))
    story.bridge.end()
    log = ("log", 2, "grad_norm", "learning_rate", "loss")
    assert hears.heard[-3:] == [("epoch_end", 2), log, ("train_end", 2)]
    assert story.state.log_history[-1]["loss"] == 3.5
    assert not story.control.evaluates_after(2)
    assert not story.control.saves_before(2)


@pytest.mark.parametrize("error", [None, "lost"])
def test_an_epoch_ends_once_and_none_ends_with_an_error(error: str | None, tmp_path: Path) -> None:
    hears = Hears()
    story = Story(quiet(tmp_path), hears, per_epoch=3)
    story.call(story.listeners.plan(None))
    for step in range(4 if error is None else 2):
        story.step(step)
    story.call(story.listeners.end(None, error))
    assert [one[0] for one in hears.heard].count("epoch_end") == (2 if error is None else 0)


def test_what_is_wanted_beyond_the_schedule_is_asked_for(tmp_path: Path) -> None:
    story = Story(quiet(tmp_path), Hears(2, should_evaluate=True, should_save=True))
    story.call(story.listeners.plan(None))
    story.step(0)
    story.step(1)
    assert story.control.evaluates_after(2)
    assert story.control.saves_before(2)
    story.step(2, 0.5)
    assert next(line for line in story.state.log_history if "eval_loss" in line)["step"] == 3


def test_what_the_schedule_does_is_not_asked_for_again(tmp_path: Path) -> None:
    story = Story(quiet(tmp_path, save_steps=2, eval_strategy="steps", eval_steps=2), Hears())
    story.call(story.listeners.plan(None))
    story.step(0)
    story.step(1, 0.5)
    assert not story.control.saves_before(2)
    assert not story.control.evaluates_after(2)


def test_an_epoch_cannot_be_left(tmp_path: Path) -> None:
    story = Story(quiet(tmp_path), Hears(1, should_epoch_stop=True))
    with pytest.raises(UsageError, match="should_training_stop"):
        story.step(0)


def test_without_eval_data_an_evaluation_is_refused(tmp_path: Path) -> None:
    story = Story(quiet(tmp_path), Hears(1, should_evaluate=True))
    story.control = Control(saves=True)
    story.listeners = Listeners([story.bridge], story.control)
    with pytest.raises(UsageError, match="eval_strategy"):
        story.step(0)


# -- who waits -----------------------------------------------------------------------------------------------------


def test_steps_wait_for_callbacks_that_may_steer_them() -> None:
    stopping = transformers.EarlyStoppingCallback(2)
    assert steers_steps([Hears()])
    assert steers_steps([Hears])
    assert not steers_steps([stopping, transformers.PrinterCallback, transformers.TrainerCallback()])
    assert (Bridge.waits, StepBridge.waits) == ("evaluations", "steps")


@pytest.mark.parametrize("event", ["on_optimizer_step", "on_substep_end", "on_prediction_step"])
def test_a_callback_for_what_never_comes_is_refused(event: str, tmp_path: Path) -> None:
    kind = type("Mine", (transformers.TrainerCallback,), {event: lambda *_, **__: None})
    for one in (kind, kind()):
        with pytest.raises(UsageError, match=rf"Mine\.{event} would never be called"):
            handler_of(quiet(tmp_path), [one], None, None)
    with pytest.raises(UsageError, match="a callback is a TrainerCallback"):
        handler_of(quiet(tmp_path), [object()], None, None)


def test_a_reporter_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"report_to=\['nobody'\]"):
        handler_of(quiet(tmp_path, report_to="nobody"), [], None, None)


# -- what callbacks change, and what they have not -------------------------------------------------------------------


class Acts(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Does this at one event."""

    def __init__(self, event: str, act: Any) -> None:
        setattr(self, event, lambda args, state, control, **more: act(args, more))


def clips(args: Any, more: Any) -> None:
    args.max_grad_norm = 0.01


def alters(args: Any, more: Any) -> None:
    args.lr_scheduler_kwargs["power"] = 2.0


def freezes(args: Any, more: Any) -> None:
    more["model"].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("event", "act", "what"),
    [
        ("on_train_begin", freezes, "requires_grad of 'weight'"),
        *(
            (event, clips, "args.max_grad_norm")
            for event in ("on_train_begin", "on_step_begin", "on_step_end", "on_log")
        ),
        ("on_epoch_end", alters, "args.lr_scheduler_kwargs"),
    ],
)
def test_what_a_callback_changes_and_peers_do_not_is_refused(event: str, act: Any, what: str, tmp_path: Path) -> None:
    """The library's loop reads it in each step."""
    args = quiet(tmp_path, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 1.0})
    story = Story(args, Acts(event, act))
    story.bridge.handler.model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=rf"Acts\.{event} at \S+:\d+ changes {what}, and peers go on"):
        story.go({})


def test_what_a_callback_changes_outside_of_a_run_or_for_logs_alone_is_its_own(tmp_path: Path) -> None:
    def names(args: Any, more: Any) -> None:
        args.run_name = f"{args.run_name}-again"

    args = quiet(tmp_path)
    story = Story(args, Acts("on_step_end", names), Acts("on_train_end", clips))
    story.call(story.listeners.plan(None))
    story.step(0)
    story.bridge.handler.model = "the model"  # as who has called the run does
    story.bridge.end()
    assert (args.run_name, args.max_grad_norm) == (f"{quiet(tmp_path).run_name}-again", 0.01)


@pytest.mark.parametrize(
    "act",
    [
        lambda args, more: more["optimizer"].param_groups,
        lambda args, more: len(more["train_dataloader"]),
        lambda args, more: more["model"].config,
    ],
)
def test_a_callback_that_asks_for_what_is_elsewhere_is_told_of_it(act: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"on_step_end .* failed at .*NoneType.*; optimizer, .* are None here.*run\.set_lr"
    ):
        Story(quiet(tmp_path), Acts("on_step_end", act)).go({})
    with pytest.raises(UsageError, match=r"KeyError: 'nothing'$"):
        Story(quiet(tmp_path), Acts("on_step_end", lambda args, more: more["nothing"])).go({})


# -- the best evaluation -------------------------------------------------------------------------------------------


def best(folder: Path, **options: Any) -> Any:
    every: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    return quiet(folder, load_best_model_at_end=True, **every, **options)


def test_the_best_state_is_kept_and_no_better_one_ends_the_run(tmp_path: Path) -> None:
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    story = Story(best(tmp_path), stopping, steps=6, per_epoch=6)
    story.call(story.listeners.plan(None))
    for step, loss in enumerate([0.5, 0.25, 0.5]):
        story.step(step, loss)
    assert (story.state.best_metric, story.state.best_global_step) == (0.25, 2)
    assert story.control.spares([1, 2, 3]) == 2
    assert not story.control.is_stopping
    story.step(3, 0.25)
    assert story.control.is_stopping


def test_figures_of_compute_metrics_decide(tmp_path: Path) -> None:
    figures = iter([0.5, 0.75, 0.7])
    outputs = types.SimpleNamespace(collect=lambda: (None, None))
    args = best(tmp_path, metric_for_best_model="accuracy")
    story = Story(args, outputs=outputs, measure=lambda *_: {"eval_accuracy": next(figures)})
    story.call(story.listeners.plan(None))
    for step in range(3):
        story.step(step, 0.1)
    assert (story.state.best_metric, story.state.best_global_step) == (0.75, 2)
    assert story.state.log_history[-1]["eval_accuracy"] == 0.7


def test_what_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    story = Story(best(tmp_path))
    story.call(story.listeners.plan(None))
    story.step(0, math.nan)
    assert story.state.best_global_step is None
    story.step(1, 0.5)
    again = Story(best(tmp_path))
    lines = [json.loads(dumps(report(step, loss).to_json())) for step, loss in enumerate([math.nan, 0.5])]
    again.call(again.listeners.event("on_resume", lines))
    assert again.state.best_global_step == story.state.best_global_step == 2


def test_a_metric_that_evaluations_do_not_have_is_named(tmp_path: Path) -> None:
    story = Story(best(tmp_path, metric_for_best_model="f1"))
    for wanted in ("loss", None):
        begun = Story(best(tmp_path, metric_for_best_model=wanted))
        begun.call(begun.listeners.event("on_begin"))
    with pytest.raises(UsageError, match="metric_for_best_model='f1': evaluations have eval_loss"):
        story.call(story.listeners.event("on_begin"))
    with pytest.raises(UsageError, match="metric_for_best_model='f1': evaluations have"):
        story.step(0, 0.1)


def test_without_checkpoints_no_step_is_the_best_one(tmp_path: Path) -> None:
    """As in the library, which has the metric alone then."""
    story = Story(arguments(tmp_path, **{**LOOKS, "save_strategy": "no"}))
    story.call(story.listeners.plan(None))
    story.step(0, 0.5)
    assert (story.state.best_metric, story.state.best_global_step) == (0.5, None)


# -- a schedule that looks at evaluations --------------------------------------------------------------------------

LOOKS: dict[str, Any] = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.3},
    "learning_rate": 0.5,
    "eval_strategy": "steps",
    "eval_steps": 1,
}


def rate(story: Story, step: int) -> float:
    """Of a step, where no schedule stands in the job."""
    found: float = story.control.options(step, [{"lr": 0.5}])[0]["lr"]
    return found


def test_a_plateau_gives_the_next_step_the_librarys_rate(tmp_path: Path) -> None:
    story = Story(arguments(tmp_path, **LOOKS), steps=6)
    story.call(story.listeners.plan(None))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = transformers.get_scheduler(
        "reduce_lr_on_plateau", optimizer, scheduler_specific_kwargs={"patience": 0, "factor": 0.3}
    )
    for step, loss in enumerate([0.5, 0.6, 0.4, math.nan, 0.7]):
        story.step(step, loss)
        theirs.step(loss)
        assert rate(story, step + 1) == optimizer.param_groups[0]["lr"]
    assert len({rate(story, step) for step in range(6)}) == 4


def test_evaluations_that_are_taken_back_count_once(tmp_path: Path) -> None:
    story = Story(arguments(tmp_path, **LOOKS), steps=6)
    story.call(story.listeners.plan(None))
    for step, loss in [(0, 0.5), (1, 0.4), (2, 0.3), (1, 0.4)]:
        story.step(step, loss)
    assert rate(story, 2) == 0.5
    story.step(2, 0.45)
    assert rate(story, 3) == 0.5 * 0.3
    assert (story.state.best_metric, story.state.best_global_step) == (0.4, 2)


@pytest.mark.parametrize("resumed", [0, 1])
def test_after_an_audit_all_is_as_if_the_liar_had_never_been_there(resumed: int, tmp_path: Path) -> None:
    """The best state, the log, the patience, the notes; also where an evaluation was asked for that does not come again."""
    args = best(tmp_path, logging_steps=2)

    def told(*steps: tuple[int, float | None]) -> tuple[Story, Any]:
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
        story = Story(args, stopping, steps=9, per_epoch=3)
        story.run = story.control.id = "a-run"
        if resumed:
            story.call(story.listeners.event("on_resume", [report(*steps[0]).to_json()]))
        story.call(story.listeners.plan(None))
        last = 0
        for step, loss in steps[resumed:]:
            if step <= last:
                story.control.take_back(step)
            story.step(last := step, loss)
        return story, stopping

    truth = [(0, 0.5), (1, 0.6), (2, None), (3, 0.55)]
    liar = [(0, 0.5), (1, 0.1), (2, 0.2), (3, 0.3), (1, 0.6), (2, None), (3, 0.55)]
    (expected, patience), (found, others) = told(*truth), told(*liar)
    for name in ("log_history", "best_metric", "best_global_step", "best_model_checkpoint", "global_step"):
        assert getattr(found.state, name) == getattr(expected.state, name), name
    assert (found.state.best_metric, found.state.best_global_step) == (0.5, 1)
    assert others.early_stopping_patience_counter == patience.early_stopping_patience_counter == 2
    assert found.control.is_stopping
    assert read_notes(Path(args.output_dir))["log_history"] == found.state.log_history


def test_a_liars_evaluations_stop_no_run(tmp_path: Path) -> None:
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    story = Story(best(tmp_path), stopping, steps=9, per_epoch=3)
    story.call(story.listeners.plan(None))
    for step, loss in enumerate([0.5, 0.6, 0.7]):
        story.step(step, loss)
    assert story.control.is_stopping
    story.control.take_back(1)
    story.step(1, 0.4)
    assert not story.control.is_stopping
    assert (story.state.best_metric, story.state.best_global_step) == (0.4, 2)


def test_a_run_that_goes_on_looks_at_the_evaluations_before(tmp_path: Path) -> None:
    args = arguments(tmp_path, **LOOKS)
    lines = [report(step, loss).to_json() for step, loss in enumerate([0.5, 0.4])]
    story = Story(args, steps=6)
    story.call(story.listeners.event("on_resume", lines))
    story.call(story.listeners.plan(None))
    assert rate(story, 2) == 0.5
    story.step(2, 0.45)
    assert rate(story, 3) == 0.5 * 0.3


# -- a run that goes on --------------------------------------------------------------------------------------------


def told(args: Any, upto: int, **more: Any) -> tuple[Story, Any]:
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=3)
    story = Story(args, stopping, steps=6, per_epoch=3, **more)
    story.run = "a-run"
    story.call(story.listeners.plan(None))
    for step, loss in enumerate([0.5, 0.25, 0.5, 0.6, 0.2][:upto]):
        story.step(step, loss)
        folder = Path(args.output_dir) / "runs" / "a-run" / "checkpoints" / f"step-{step + 1}"
        folder.mkdir(parents=True)
        story.call(story.listeners.saved([(step + 1, folder)]))
    return story, stopping


def test_a_run_that_goes_on_has_the_log_and_the_states_of_one_that_never_ended(tmp_path: Path) -> None:
    args = best(tmp_path, logging_steps=2)
    first, stopping = told(args, 5)
    lines = [report(step, loss).to_json() for step, loss in enumerate([0.5, 0.25, 0.5, 0.6, 0.2])]
    written = read_notes(Path(args.output_dir))
    assert written["run"] == "a-run"
    second = Story(
        args, transformers.EarlyStoppingCallback(early_stopping_patience=3), steps=6, per_epoch=3, notes=written
    )
    second.run = second.control.id = "a-run"
    second.call(second.listeners.event("on_resume", lines))
    for name in ("log_history", "best_metric", "best_global_step", "global_step", "epoch"):
        assert getattr(second.state, name) == getattr(first.state, name), name
    patience = [
        one.early_stopping_patience_counter
        for story in (first, second)
        for one in story.bridge.handler.callbacks
        if isinstance(one, transformers.EarlyStoppingCallback)
    ]
    assert patience[0] == patience[1] == stopping.early_stopping_patience_counter
    assert second.control.spares([2, 5]) == 5
    second.call(second.listeners.plan(None))
    second.step(5, 0.3)
    first.step(5, 0.3)
    assert second.state.log_history == first.state.log_history


def test_output_dir_names_the_run_that_began_last_though_it_never_saves(tmp_path: Path) -> None:
    """Its owner dies before the first checkpoint: train(resume_from_checkpoint=True) went on with the run before it."""
    args = best(tmp_path)
    folder = Path(args.output_dir)
    told(args, 1)
    assert read_notes(folder)["run"] == "a-run"
    story = Story(best(tmp_path))
    story.run = "another"
    story.call(story.listeners.plan(None))
    assert read_notes(folder) == {}, "it has no folder yet"
    story.step(0)
    assert read_notes(folder)["run"] == "another"


def test_a_run_that_goes_on_by_its_name_is_the_last_of_output_dir(tmp_path: Path) -> None:
    args = best(tmp_path)
    told(args, 1)
    story = Story(args)
    story.control.id = "by-name"
    story.call(story.listeners.event("on_resume", [report(0, 0.5).to_json()]))
    story.call(story.listeners.plan(None))
    assert read_notes(Path(args.output_dir))["run"] == "by-name"


def test_a_full_disk_at_output_dir_ends_no_run(tmp_path: Path) -> None:
    args = best(tmp_path, logging_steps=2)
    refusing = RefusingDisk(tmp_path, errno.ENOSPC)
    with disk.using(refusing), capture_logs() as lines:
        story, _ = told(args, 3)
        assert refusing.refused
        assert read_notes(Path(args.output_dir)) == {}
        refusing.error = None
        story.step(3, 0.6)
        story.step(4, 0.2)
        story.bridge.end()
    warned = [line["event"] for line in lines if NOTES in line["event"]]
    assert [what.split(NOTES)[1] for what in warned] == [
        " cannot be written, and will be tried again",
        " can be written again",
    ]
    assert read_notes(Path(args.output_dir))["log_history"] == story.state.log_history


def test_a_run_cannot_go_on_without_the_figures_that_decide(tmp_path: Path) -> None:
    story = Story(best(tmp_path, metric_for_best_model="accuracy"))
    resumed = story.listeners.event("on_resume", [report(0, 0.5).to_json()])
    with pytest.raises(UsageError, match=r"output_dir has no .* with eval_accuracy"):
        story.call(resumed)


def test_notes_of_nobody_or_of_something_else_are_none(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == {}
    (tmp_path / NOTES).write_text("torn")
    assert read_notes(tmp_path) == {}
    (tmp_path / NOTES).write_text(json.dumps({"run": "a"}))
    assert read_notes(tmp_path) == {}
