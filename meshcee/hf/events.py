"""A run's events as TrainerCallbacks hear them, and what they want as a Control is asked for it.

The idea: the library's own CallbackHandler calls everybody, and its DefaultFlowCallback says when to log. When to evaluate and to
save stands in the Job; what a callback of the user's wants beyond that counts from the next step that begins.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import nn

from meshcee.callbacks import Callback, Control
from meshcee.errors import UsageError
from meshcee.files import Trouble, disk, dumps, loads, number
from meshcee.hf import arguments
from meshcee.hf.arguments import rate_after
from meshcee.hf.library import transformers
from meshcee.hf.loss import eval_loss
from meshcee.hf.samples import Outputs
from meshcee.reach.code import line_of
from meshcee.sampling import Reading
from meshcee.user_code import calling

__all__ = ["NOTES", "Bridge", "StepBridge", "handler_of", "read_notes", "refuse_unheard", "steers_steps"]

NOTES = "meshcee_run.json"  # in output_dir: the run, and its log so far
STEERING = ("on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end", "on_log")
UNHEARD = {  # by the event: why it never comes
    "on_substep_end": "micro-batches are computed by peers",
    "on_pre_optimizer_step": "gradients stay with the peers",
    "on_optimizer_step": "gradients stay with the peers",
    "on_prediction_step": "micro-batches are computed by peers",
    "on_push_begin": "nothing is pushed",
}

ABSENT = (
    "optimizer, lr_scheduler and the dataloaders of a TrainerCallback are None here, and while train() is under way so is model: "
    "a learning rate follows lr_scheduler_type, or run.set_lr in a meshcee.Callback; for all else ask what the script has made"
)
READ_AHEAD = (
    "the library's loop reads a micro-batch ahead of this event, which none does here: change it in on_epoch_begin; or for each "
    'step in on_step of a meshcee.Callback whose class has waits = "steps", then it counts from the next step on'
)
FIXED = arguments.CARRIED_OUT - arguments.READ_LATER  # what a callback cannot change any more


def handler_of(args: Any, callbacks: Sequence[Any], model: Any, processing_class: Any) -> Any:
    """The library's CallbackHandler, with its own callbacks for flow, reports and progress.

    Whoever tells of an event, callbacks hear of it in one thread: reporters remember their run by thread.
    """
    refuse_unheard(callbacks)
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="callbacks")
    own = thread.submit(threading.get_ident).result()

    class InOneThread(CallbackHandler):  # type: ignore[misc]
        reading: Any = nullcontext  # around what callbacks of the user's do

        def call_event(self, event: str, *what: Any, **more: Any) -> Any:
            if threading.get_ident() == own:  # a callback has caused it
                return self._call(event, *what, **more)
            return thread.submit(self._call, event, *what, **more).result()

        def _call(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
            trains = self.model is None or event == "on_train_begin"
            for one in [*self.callbacks]:
                alone = copy.copy(self)
                alone.callbacks = [one]
                heeded = trains and _is_own(type(one))
                reading = self.reading(f"{type(one).__name__}.{event}") if heeded else nullcontext()
                with reading, _heeding(one, event, args, self.model) if heeded else nullcontext():
                    control = CallbackHandler.call_event(alone, event, args, state, control, **more)
            return control

    try:
        reporting = get_reporting_integration_callbacks(args.report_to)
        handler = InOneThread([DefaultFlowCallback, *reporting, *callbacks], model, processing_class, None, None)
    except (ImportError, RuntimeError, ValueError) as error:
        raise UsageError(f"report_to={args.report_to}: {error}") from error
    handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
    return handler


@contextmanager
def _heeding(one: Any, event: str, args: Any, model: Any) -> Iterator[None]:
    """UsageError where a callback changes what peers were told before the first step; the library's loop would heed it."""

    def standing() -> dict[str, Any]:
        found: dict[str, Any] = {f"args.{name}": value for name, value in arguments.words_of(args, FIXED).items()}
        named = model.named_parameters() if isinstance(model, nn.Module) else ()
        return found | {f"requires_grad of {name!r}": parameter.requires_grad for name, parameter in named}

    before = standing()
    yield
    if changed := next((name for name, value in standing().items() if before.get(name) != value), None):
        code = getattr(getattr(one, event), "__code__", None)
        words = (changed.removeprefix("args."), "requires_grad_", "requires_grad")
        line = next(filter(None, (line_of(code, word, stored_only=word != words[1]) for word in words)), "")
        raise UsageError(
            f"{type(one).__name__}.{event}{line} changes {changed}, and peers go on with what stood there before train(): set it "
            "before that; a learning rate follows lr_scheduler_type, or run.set_lr in a meshcee.Callback"
        )


def refuse_unheard(callbacks: Sequence[Any]) -> None:
    """Raise UsageError for a callback that waits for an event which never comes."""
    for one in callbacks:
        kind = one if isinstance(one, type) else type(one)
        if not issubclass(kind, transformers().TrainerCallback):
            raise UsageError(
                f"a callback is a TrainerCallback, or what meshcee.train(callbacks=...) takes, not {one!r:.80}"
            )
        for event, why in UNHEARD.items() if _is_own(kind) else ():
            if _overrides(kind, event):
                raise UsageError(f"{kind.__name__}.{event} would never be called ({why}): use on_step_end")


def steers_steps(callbacks: Sequence[Any]) -> bool:
    """Whether one of them may want something after any step, so that no step may begin before it was asked."""
    kinds = [one if isinstance(one, type) else type(one) for one in callbacks]
    return any(_overrides(kind, event) for kind in kinds if _is_own(kind) for event in STEERING)


def _is_own(kind: type) -> bool:
    """Whether it is of the user's own, and not one of the library's."""
    return not kind.__module__.startswith("transformers.")


def _overrides(kind: type, event: str) -> bool:
    return getattr(kind, event) is not getattr(transformers().TrainerCallback, event)


def read_notes(folder: Path) -> dict[str, Any]:
    """What the last run with this output_dir has noted: `run` and `log_history`; nothing where there is none."""
    try:
        found = loads((folder / NOTES).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("log_history"), list) else {}


class _Standing(NamedTuple):
    """How things stood after so many steps."""

    step: int
    decisive: float | None  # the metric of an evaluation by which states are compared
    best: tuple[Any, Any]  # of these metrics, and its step
    attributes: list[Any]  # of each callback that has a state


class Bridge(Callback):
    """Of one `train()`. `state` and `control` are the library's own, which callbacks read and write."""

    waits: ClassVar[str] = "evaluations"

    def __init__(
        self,
        args: Any,
        handler: Any,
        state: Any,
        per_epoch: int,
        outputs: Outputs | None = None,
        measure: Callable[[Any, Any], Mapping[str, float]] | None = None,
        notes: Mapping[str, Any] | None = None,
        reading: Reading | None = None,
    ) -> None:
        self.args, self.handler, self.state, self.per_epoch = args, handler, state, per_epoch
        self.control = transformers().TrainerControl()
        self._outputs, self._measure, self._notes = outputs, measure, notes or {}
        self._reading = reading
        self.run_id: str | None = None
        self.begins = 0  # how many steps were done before
        self._losses: list[float] = []  # of all steps
        self._stood: list[_Standing] = []  # at the start, and after each evaluation
        self._last: Any = None  # the last report
        self._trouble = Trouble()

    # -- what a run tells

    def on_begin(self, run: Control) -> None:
        if run.metrics and self._outputs is None:  # it evaluates, and without compute_metrics
            self._is_best({"eval_loss": math.nan})

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        """The log goes on, and callbacks that have a state hear of the evaluations again."""
        self._stand()
        known = [line for line in self._notes.get("log_history", []) if line.get("step", math.inf) <= len(reports)]
        self.state.log_history = [line for line in known if "loss" in line]
        for report in reports:
            if not report.get("metrics"):
                continue
            self._count(report["step"] + 1)
            noted = (line for line in known if line["step"] == report["step"] + 1)
            loss = eval_loss(report["metrics"])
            metrics = next((line for line in noted if line.get("eval_loss") == loss), {"eval_loss": loss})
            if self._decisive not in (None, *metrics):
                raise UsageError(
                    f"output_dir has no {NOTES} with {self._decisive} of this run, which metric_for_best_model needs: go on with "
                    "the output_dir that the run began with"
                )
            figures = {name: number(x) for name, x in metrics.items()}
            self.state.log_history.append({**figures, "epoch": self.state.epoch, "step": self.state.global_step})
            for one in self._with_state():
                one.on_evaluate(self.args, self.state, self.control, metrics=figures)
            self._is_best(figures)
            self._stand(figures)
        self.state.log_history.sort(key=lambda line: line["step"])
        self._count(len(reports))
        self.begins = len(reports)
        self._losses = [report["loss"] for report in reports]
        if self.state.best_global_step:
            run.keep(self.state.best_global_step)

    def on_plan(self, run: Control, plan: Any) -> None:
        self.run_id = run.id
        self._write()
        self._hear("on_train_begin")
        self.handler.model = None  # until the end its weights are with the peers
        self._stand()
        self._hear("on_epoch_begin")
        self._hear("on_step_begin")

    def on_step(self, run: Control, report: Any) -> None:
        if report.step < self.state.global_step:
            self._take_back(report.step)
        self._count(report.step + 1)
        self._losses.append(report.loss)
        self._last = report
        if self.run_id != run.id:  # it has a folder now
            self.run_id = run.id
            self._write()
        last = self.state.global_step >= self.state.max_steps
        self._hear("on_step_end")
        evaluated = self._flow(run, report, evaluated=False)
        if self._ends_epoch:
            self._hear("on_epoch_end")
            evaluated = self._flow(run, report, evaluated=evaluated)
        if report.metrics and not evaluated:
            self._evaluate(run, report)
        if self.control.should_epoch_stop:
            raise UsageError("a callback sets control.should_epoch_stop: set control.should_training_stop")
        if last:
            return
        if self.control.should_training_stop:
            run.stop()
            return
        if self._ends_epoch:
            self._hear("on_epoch_begin")
        self._hear("on_step_begin")

    def on_end(self, run: Control, result: Any, error: str | None) -> None:
        """A run that was stopped within an epoch has left it: as in the library it is over then. It is not evaluated."""
        if error is None and self._last is not None and not self._ends_epoch:
            self._hear("on_epoch_end")
            self._log_losses(self._last)
            self.control.should_evaluate = self.control.should_save = False

    def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
        self.run_id = run.id
        self._name_best()
        self._write()
        then = dataclasses.replace(self.state, global_step=steps, epoch=steps / self.per_epoch)
        self._hear("on_save", state=then)

    # -- what callbacks are told

    def log(self, logs: dict[str, float]) -> None:
        """A line of `log_history`, which everybody hears of."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._hear("on_log", logs)

    def end(self) -> None:
        """It is over, and the model has its trained weights."""
        self._hear("on_train_end")
        self._write()

    def _hear(self, event: str, *more: Any, state: Any = None) -> None:
        if self._reading is not None:
            self.handler.reading = partial(self._reading.by, is_late=self._is_late(event), why=READ_AHEAD)
        try:
            with calling(f"{event} of a TrainerCallback"):
                self.control = getattr(self.handler, event)(self.args, state or self.state, self.control, *more)
        except UsageError as error:
            if "NoneType" not in str(error.__cause__):
                raise
            raise UsageError(f"{error}; {ABSENT}") from error.__cause__

    def _is_late(self, event: str) -> bool:
        """Whether samples of steps to come have been read when this event comes, here or in the library's loop."""
        assert self._reading is not None
        if event == "on_train_begin" or self.state.global_step >= self.state.max_steps:
            return False
        is_between = event == "on_epoch_begin" or (self._ends_epoch and event not in ("on_step_begin", "on_save"))
        return self._reading.is_elsewhere or not is_between

    @property
    def _ends_epoch(self) -> bool:
        step = self.state.global_step
        return bool(step >= self.state.max_steps or step % self.per_epoch == 0)

    def _count(self, steps: int) -> None:
        self.state.global_step, self.state.epoch = steps, steps / self.per_epoch

    def _flow(self, run: Control, report: Any, *, evaluated: bool) -> bool:
        """Do what `control` says after a step or an epoch; whether this step's evaluation has been heard of."""
        self._log_losses(report)
        if report.metrics and self.control.should_evaluate and not evaluated:
            self._evaluate(run, report)
            evaluated = True
        elif self.control.should_evaluate and not evaluated:
            if not run.metrics:
                raise UsageError(
                    "a callback sets control.should_evaluate: give Trainer an eval_dataset, and TrainingArguments an eval_strategy"
                )
            run.evaluate()
        if self.control.should_save and not self._saves_anyway():
            run.checkpoint()
        self.control.should_evaluate = self.control.should_save = False
        return evaluated

    def _log_losses(self, report: Any) -> None:
        """Where `control` says so, the mean since the last log."""
        logged = next((line["step"] for line in reversed(self.state.log_history) if "loss" in line), 0)
        losses = self._losses[logged:]
        if not (self.control.should_log and losses):
            return
        logs = {"loss": sum(losses) / len(losses)}
        logs |= {"grad_norm": report.norm} if report.norm is not None else {}
        logs |= {"learning_rate": report.lr} if report.lr is not None else {}
        self.log(logs)

    def _saves_anyway(self) -> bool:
        step, how = self.state.global_step, self.args.save_strategy.value
        every = {"steps": self.state.save_steps, "epoch": self.per_epoch}.get(how, 0)
        return bool(step >= self.state.max_steps or (every > 0 and step % every == 0))

    def _evaluate(self, run: Control, report: Any) -> None:
        metrics = {"eval_loss": eval_loss(report.metrics)}
        if self._outputs is not None and self._measure is not None:
            metrics |= self._measure(*self._outputs.collect())
        self.log(metrics)
        self._hear("on_evaluate", metrics)
        if self._is_best(metrics) and self.args.save_strategy.value != "no":
            run.checkpoint(keep=True)
        if (rate := self._decide(metrics)) is not None:
            run.set_lr(rate)
        self._stand(metrics)
        self._write()

    # -- what an audit takes back

    def _take_back(self, step: int) -> None:
        """This step and later ones come anew: all is as it was before them."""
        del self._losses[step:]
        self.state.log_history = [line for line in self.state.log_history if line["step"] <= step]
        self._stood = [stood for stood in self._stood if stood.step <= step]
        if self._stood:
            stood = self._stood[-1]
            self.state.best_metric, self.state.best_global_step = stood.best
            for one, attributes in zip(self._with_state(), stood.attributes):
                for name, value in attributes.items():
                    setattr(one, name, copy.deepcopy(value))
        if self.state.best_model_checkpoint is not None:
            self.state.best_model_checkpoint = None
            self._name_best()
        self.control.should_training_stop = False
        self._write()

    def _stand(self, metrics: Mapping[str, float] | None = None) -> None:
        best = self.state.best_metric, self.state.best_global_step
        with calling("state of a TrainerCallback"):
            attributes = [copy.deepcopy(one.state().get("attributes", {})) for one in self._with_state()]
        decisive = metrics[self._decisive] if metrics and self._decisive else None
        self._stood.append(_Standing(self.state.global_step, decisive, best, attributes))

    def _with_state(self) -> list[Any]:
        """Callbacks that have a state which the library saves."""
        from transformers.trainer_callback import ExportableState

        return [one for one in self.handler.callbacks if isinstance(one, ExportableState)]

    def _name_best(self) -> None:
        if self.run_id is not None and self.state.best_global_step:
            self.state.best_model_checkpoint = f"{self.run_id}@{self.state.best_global_step}"

    # -- the best evaluation

    @property
    def _decisive(self) -> str | None:
        """The metric by which states are compared, if any."""
        wanted = self.args.metric_for_best_model
        return wanted if wanted is None or wanted.startswith("eval_") else f"eval_{wanted}"

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """By metric_for_best_model, in the words and with the comparison of the library."""
        if (name := self._decisive) is None:
            return False
        if name not in metrics:
            raise UsageError(
                f"metric_for_best_model={self.args.metric_for_best_model!r}: evaluations have {', '.join(sorted(metrics))}; name "
                "one of them"
            )
        state, better = self.state, np.greater if self.args.greater_is_better else np.less
        known = state.best_metric is not None
        if math.isnan(metrics[name]) or (known and not better(metrics[name], state.best_metric)):
            return False
        state.best_metric = metrics[name]
        if self.args.save_strategy.value != "no":
            state.best_global_step = state.global_step
        return True

    def _decide(self, metrics: Mapping[str, float]) -> float | None:
        """The rate from now on, where the library's schedule looks at evaluations and changes it after this one."""
        if (name := self._decisive) is None:
            return None
        before = [stood.decisive for stood in self._stood if stood.decisive is not None]
        rate = rate_after(self.args, [*before, metrics[name]])
        return None if rate == rate_after(self.args, before) else rate

    def _write(self) -> None:
        """What a resumed run reads: beside what a run keeps itself, the figures of compute_metrics. A full disk ends no run.

        Before a new run has an id, those of another run are removed: it is no longer the last of this output_dir.
        """
        file = Path(self.args.output_dir) / NOTES
        try:
            if self.run_id is not None:
                notes = {"run": self.run_id, "log_history": self.state.log_history}
                disk.write_whole(file, dumps(notes, indent=1).encode())
            elif file.exists():
                disk.remove(file)
        except OSError as error:
            self._trouble.tell(str(file), error)
        else:
            self._trouble.over(str(file))


class StepBridge(Bridge):
    """For callbacks that may steer after any step: none begins before they have been heard."""

    waits: ClassVar[str] = "steps"
