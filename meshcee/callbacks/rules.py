"""Callbacks that everybody needs: keep the best state, stop when nothing improves, lower the rate on a plateau.

The idea: each is a function of the evaluations so far. A run that is resumed hears of them again, and so goes on as it would have.
Where an audit takes steps back, their evaluations come anew, and count once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import structlog
import torch

from meshcee.callbacks.callback import Callback
from meshcee.callbacks.control import Control
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.files import number

__all__ = ["EarlyStop", "KeepBest", "ReduceOnPlateau", "rules"]

log = structlog.get_logger()
RULE: Any = torch.optim.lr_scheduler.ReduceLROnPlateau


class _OnMetric(Callback, ABC):
    """`_hear` gets one value an evaluation, in order, NaN for an infinite one; after `_restart` they come from the first on."""

    def __init__(self, metric: str, mode: str) -> None:
        if not isinstance(metric, str):
            raise UsageError(f"{type(self).__name__}({metric!r:.40}): the metric is a text, as 'loss'")
        if mode not in ("min", "max"):
            raise UsageError(f"mode is 'min' or 'max', not {mode!r:.40}")
        self.metric, self.mode = metric, mode
        self._heard: list[tuple[int, float]] = []
        self._restart()

    def on_begin(self, run: Control) -> None:
        if self.metric not in run.metrics:
            known = ", ".join(sorted(run.metrics)) or "none: give the job eval_data, and eval_every"
            raise UsageError(
                f"{type(self).__name__} looks at {self.metric!r:.80} of evaluations, and the metrics of these are {known}"
            )
        if not run.evaluates:
            log.warning(Event.EVALUATED_ONCE, callback=type(self).__name__)

    def _value(self, metrics: Mapping[str, float]) -> float:
        if self.metric not in metrics:
            raise UsageError(
                f"{type(self).__name__} looks at {self.metric!r:.80}, and evaluations have {', '.join(sorted(metrics))}"
            )
        return float(metrics[self.metric])

    def _tell(self, steps: int, value: float) -> bool:
        if self._heard and steps <= self._heard[-1][0]:  # taken back
            counting = [(known, heard) for known, heard in self._heard if known < steps]
            self._heard.clear()
            self._restart()
            for known, heard in counting:
                self._tell(known, heard)
        self._heard.append((steps, value))
        return self._hear(steps, value if math.isfinite(value) else math.nan)  # all that reports keep of it

    @abstractmethod
    def _restart(self) -> None: ...

    @abstractmethod
    def _hear(self, steps: int, value: float) -> bool: ...

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        for line in reports:
            if line.get("metrics"):
                self._tell(int(line["step"]) + 1, number(line["metrics"].get(self.metric)))


class _Best(_OnMetric):
    """Remembers the best value so far and after how many steps it came."""

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0) -> None:
        self._min_delta = min_delta
        super().__init__(metric, mode)

    def _restart(self) -> None:
        self.best: tuple[int, float] | None = None

    def _hear(self, steps: int, value: float) -> bool:
        sign = 1 if self.mode == "min" else -1
        better = not math.isnan(value) and (self.best is None or sign * value < sign * self.best[1] - self._min_delta)
        if better:
            self.best = steps, value
        return better


class KeepBest(_Best):
    """The state with the best evaluation stays on the disk: `best` is (steps, value), `RUN@STEPS` its checkpoint."""

    needs_folder = True

    def __init__(self, metric: str = "loss", *, mode: str = "min") -> None:
        super().__init__(metric, mode)

    def on_begin(self, run: Control) -> None:
        super().on_begin(run)
        if not run.saves:
            raise UsageError("KeepBest saves, and this run has no folder: join a mesh, or say keeps=True")

    def on_evaluate(self, run: Control, report: Any) -> None:
        if self._tell(report.step + 1, self._value(report.metrics)):
            run.checkpoint(keep=True)

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        super().on_resume(run, reports)
        if self.best is not None:
            run.keep(self.best[0])


class EarlyStop(_Best):
    """End the run when so many evaluations in a row were no better than the best by more than `min_delta`.

    A run that it has ended ends at once when it is resumed with it: raise `patience` or leave it out to train on.
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        super().__init__(metric, mode, min_delta)
        if type(patience) is not int or patience < 1:
            raise UsageError(f"patience={patience!r:.40}: a number of evaluations, at least 1")
        self.patience = patience

    def _restart(self) -> None:
        super()._restart()
        self._in_vain = 0

    def _hear(self, steps: int, value: float) -> bool:
        better = super()._hear(steps, value)
        self._in_vain = 0 if better else self._in_vain + 1
        return better

    def on_evaluate(self, run: Control, report: Any) -> None:
        self._tell(report.step + 1, self._value(report.metrics))
        if self._in_vain >= self.patience:
            run.stop()

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        super().on_resume(run, reports)
        if self._in_vain >= self.patience:
            log.warning(Event.ENDED_EARLY, metric=self.metric, evaluations=self._in_vain, best=self.best)
            run.stop()


class ReduceOnPlateau(_OnMetric):
    """Lower the rate when evaluations get no better: torch.optim.lr_scheduler.ReduceLROnPlateau with eps=0, and its options.

    The rates are equal to torch's, bit for bit. A schedule of the job goes on below: its rates are multiplied.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        min_lr: float = 0.0,
        **options: Any,
    ) -> None:
        if not (isinstance(factor, int | float) and 0 < factor < 1):
            raise UsageError(f"factor={factor!r:.40}: a number between 0 and 1")
        if not (isinstance(min_lr, int | float) and 0 <= min_lr < math.inf):
            raise UsageError(f"min_lr={min_lr!r:.40}: one rate, of all groups, and not negative")
        self._factor, self._min_lr = factor, min_lr
        self._options = options
        super().__init__(metric, mode)

    def _restart(self) -> None:
        self._rate = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        try:
            self._rule = RULE(self._rate, mode=self.mode, factor=self._factor, eps=0.0, **self._options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"torch.optim.lr_scheduler.ReduceLROnPlateau: {error}") from error

    def _hear(self, steps: int, value: float) -> bool:
        self._rate.param_groups[0]["lr"] = 1.0
        self._rule.step(value)
        return bool(self._rate.param_groups[0]["lr"] < 1.0)

    def on_evaluate(self, run: Control, report: Any) -> None:
        if self._tell(report.step + 1, self._value(report.metrics)):
            run.scale_lr(self._factor, least=self._min_lr)


def rules(keep_best: str | None, early_stop: int | None, metrics: Collection[str]) -> tuple[Callback, ...]:
    """What train(keep_best="loss", early_stop=3) stands for. UsageError for one of the job's own `metrics` that is no loss."""
    metric = keep_best or "loss"
    if metric in metrics and not metric.endswith("loss"):
        raise UsageError(
            f"keep_best is for a loss, of which less is better; for another metric: callbacks=[meshcee.KeepBest({metric!r:.80}, "
            "mode='max'), meshcee.EarlyStop(...)]"
        )
    kept: tuple[Callback, ...] = () if keep_best is None else (KeepBest(metric),)
    return kept if early_stop is None else (*kept, EarlyStop(metric, patience=early_stop))
