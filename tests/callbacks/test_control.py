"""What callbacks ask for counts from the first step that has not begun, whatever is asked, and in whatever order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from meshcee.callbacks import Callback, Control, Listeners, called
from meshcee.callbacks.rules import EarlyStop, KeepBest, ReduceOnPlateau
from meshcee.errors import UsageError
from meshcee.events import Event

GROUPS = ({"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 1.0})


def rates(control: Control, step: int) -> list[float]:
    return [group["lr"] for group in control.options(step, GROUPS)]


def test_without_a_wish_nothing_changes() -> None:
    assert Control().options(3, GROUPS) == GROUPS


def test_changes_add_up_in_the_order_of_their_steps() -> None:
    control = Control()
    control.scale_lr(0.5, step=6)
    control.set_lr(0.02, step=4)
    control.scale_lr(0.1, least=0.05, step=2)
    assert [rates(control, step) for step in (1, 2, 4, 6)] == [[0.1, 1.0], [0.05, 0.1], [0.02, 0.02], [0.01, 0.01]]
    assert control.options(2, GROUPS)[0]["betas"] == [0.9, 0.99]
    assert GROUPS[0]["lr"] == 0.1
    told = control.news(1)["lr_changes"]
    assert [change.step for change in told] == [6, 4, 2]  # in the order in which they were asked for, and once
    assert control.news(2) == {}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0.1, 3.0)), max_size=12), st.integers(0, 8))
def test_a_control_that_is_restored_gives_every_step_the_same_rates(
    wishes: list[tuple[bool, int, float]], begun: int
) -> None:
    first, second = Control(), Control()
    for sets, later, value in wishes:
        (first.set_lr if sets else first.scale_lr)(value, step=later)
    second.restore([json.loads(json.dumps({"step": 0, **first.news(0)}))], begun)
    assert [rates(second, step) for step in range(20)] == [rates(first, step) for step in range(20)]
    assert second.next_step == begun


def test_what_has_begun_stays_as_it_was() -> None:
    control = Control(metrics=["loss"], saves=True)
    control.begin(4)
    control.begin(2)  # of an epoch that goes back
    assert control.scale_lr(0.1) == 5
    with pytest.raises(UsageError, match="step 5 was to change, but step 5 has begun"):
        control.set_lr(0.1, step=4)
    control.evaluate()
    control.checkpoint()
    assert (
        [s for s in range(10) if control.evaluates_after(s)] == [5] == [s for s in range(10) if control.saves_before(s)]
    )
    assert not control.put_off(5)
    assert control.saves_before(6)
    assert not control.saves_before(5)


def test_a_control_that_is_restored_evaluates_and_saves_when_that_was_asked_for() -> None:
    first, second = (Control(metrics=["loss"], saves=True) for _ in range(2))
    lines: list[dict[str, object]] = [{"step": 0}]  # as it was written before wishes were
    for step in (1, 2, 5):
        first.begin(step)
        first.evaluate()
        first.evaluate()
        first.checkpoint(keep=step < 5)
        lines.append(json.loads(json.dumps({"step": step, **first.news(step)})))
    assert first.put_off(3)
    lines.append({"step": 6, **first.news(6)})
    second.restore(lines, 7)
    for control in (first, second):
        assert [s for s in range(10) if control.evaluates_after(s)] == [2, 3, 6]
        assert {s for s in range(10) if control.saves_before(s)} - {3} == {2, 4, 6}
        assert control.spares([1, 2, 4, 6]) == 2, (
            "that before step 3 was to be kept, and was not saved; 4 is another state"
        )
    assert second.news(7) == {}, "it is written down"
    assert second.next_step == 7


def test_a_stop_that_was_asked_for_counts_until_the_run_is_over() -> None:
    first, cut, over, later = (Control() for _ in range(4))
    first.stop()
    lines = [{"step": 0}, {"step": 1, **first.news(1)}, {"step": 2}]
    cut.restore(lines, 3)
    assert cut.is_stopping
    over.restore(lines, 3, is_over=True)
    assert not over.is_stopping
    later.restore([*lines, {"step": 3, **over.news(3)}], 4)
    assert not later.is_stopping


def test_one_checkpoint_is_spared_and_the_one_before_until_it_is_there() -> None:
    control = Control(saves=True)
    assert control.spares([1, 2, 3]) is None
    control.keep(1)
    control.keep(7)
    assert control.spares([1, 4, 5]) == 1
    assert control.spares([1, 4, 7]) == 7


HEARD = Control(metrics=["loss"])


def test_a_rule_that_hears_of_no_evaluation_until_the_end_is_told_of() -> None:
    with capture_logs() as logged:
        for often in (True, False):
            EarlyStop().on_begin(Control(metrics=["loss"], evaluates=often))
    assert [line["callback"] for line in logged if line["event"] == Event.EVALUATED_ONCE] == ["EarlyStop"]


class Told(Control):
    """What a rule asks for, and after how many steps."""

    def __init__(self) -> None:
        super().__init__(metrics=["loss"])
        self.told: list[tuple[str, int]] = []
        self.steps = 0

    def stop(self) -> None:
        self.told.append(("stop", self.steps))

    def scale_lr(self, times: float, *, least: float = 0.0, step: int | None = None) -> int:
        self.told.append(("lower", self.steps))
        return self.steps


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_behind_a_value_that_is_not_finite_a_resumed_run_goes_on_as_it_would_have(mode: Any, odd: float) -> None:
    """Its reports say null."""
    values = [odd, 2.0, odd, 2.0, 2.0, 2.0, 2.0]
    found = []
    for begun in range(4):
        rules, run = (EarlyStop(mode=mode, patience=4), ReduceOnPlateau(mode=mode, patience=2)), Told()
        for rule in rules:
            reports = [{"step": k, "metrics": {"loss": None if v is odd else v}} for k, v in enumerate(values[:begun])]
            rule.on_resume(run, reports)
            for run.steps in range(begun, len(values)):
                rule.on_evaluate(run, SimpleNamespace(step=run.steps, metrics={"loss": values[run.steps]}))
        found.append((run.told, rules[0].best))
    assert found == found[:1] * 4
    assert found[0][1] == (2, 2.0)


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=4), st.floats(0.0, 1.0), st.floats(0.01, 0.99))
def test_a_plateau_raises_no_rate_and_lowers_each_as_torch_does(
    groups: list[float], least: float, factor: float
) -> None:
    """A group may begin below min_lr."""
    ours, control = ReduceOnPlateau(factor=factor, min_lr=least, patience=0), Control(metrics=["loss"])
    theirs = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in groups])
    rule = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=factor, min_lr=least, patience=0, eps=0.0)
    for step in range(5):
        control.begin(step)
        ours.on_evaluate(control, SimpleNamespace(step=step, metrics={"loss": 1.0}))
        rule.step(1.0)
        expected = [group["lr"] for group in theirs.param_groups]
        assert [group["lr"] for group in control.options(step + 1, [{"lr": lr} for lr in groups])] == expected


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (lambda control: control.scale_lr(0.0), "a positive factor"),
        (lambda control: control.scale_lr(math.nan), "a positive factor"),
        (lambda control: control.set_lr(math.inf), "not negative"),
        (lambda control: control.evaluate(), "give the job eval_data"),
        (lambda control: control.checkpoint(), "no folder"),
        (lambda control: Control(saves=True).keep(-1), "a number of steps"),
        (lambda control: called([EarlyStop]), "a function of"),
        (lambda control: called(EarlyStop()), "a list"),
        (lambda control: EarlyStop(patience=0), "at least 1"),
        (lambda control: KeepBest(mode="best"), "'min' or 'max'"),
        (lambda control: ReduceOnPlateau(factor=1.0), "a number between 0 and 1"),
        (lambda control: ReduceOnPlateau(factor=0.0), "a number between 0 and 1"),
        (lambda control: ReduceOnPlateau(min_lr=[0.1, 0.2]), r"min_lr=\[0.1, 0.2\]: one rate, of all groups"),  # type: ignore
        (lambda control: ReduceOnPlateau(min_lr=math.nan), "min_lr=nan"),
        (lambda control: EarlyStop("accuracy").on_begin(HEARD), "looks at 'accuracy' of evaluations, .* are loss"),
        (lambda control: ReduceOnPlateau("f1").on_begin(HEARD), "looks at 'f1' of evaluations"),
        (lambda control: KeepBest().on_begin(HEARD), "no folder"),
        (lambda control: EarlyStop().on_begin(control), "metrics of these are none: give the job eval_data"),
        (lambda control: ReduceOnPlateau(cooling=3), "ReduceLROnPlateau.*cooling"),
        (lambda control: ReduceOnPlateau(eps=1e-3), "ReduceLROnPlateau.*eps"),
    ],
)
def test_what_has_no_meaning_is_refused(wish: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wish(Control())  # type: ignore[operator]


def test_who_waits_longest_is_waited_for() -> None:
    def of(waits: str) -> Callback:
        return type("Waits", (Callback,), {"waits": waits})()

    assert Listeners([], Control()).waits == "never"
    assert Listeners([of("never"), of("evaluations")], Control()).waits == "evaluations"
    assert Listeners([of("steps"), of("evaluations")], Control()).waits == "steps"
    with pytest.raises(UsageError, match="'sometimes'"):
        called([of("sometimes")])


def test_each_checkpoint_is_told_of_once_and_in_order_if_it_is_still_there(tmp_path: Path) -> None:
    """A slow disk may finish one only when the next is there as well: nobody has looked in between."""

    class Hears(Callback):
        def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
            heard.append((steps, folder))

    heard = list[tuple[int, Path]]()
    listeners = Listeners([Hears()], Control())
    made = [(steps, tmp_path / str(steps)) for steps in (3, 6, 10)]
    assert listeners.saved(made) is None
    for _, folder in made[1:]:
        folder.mkdir()
    tell = listeners.saved(made)
    assert tell is not None
    tell()
    assert heard == made[1:]
    assert listeners.saved(made) is None


def test_a_checkpoint_whose_step_was_taken_back_is_told_of_again(tmp_path: Path) -> None:
    """A user's copy of it would be of the steps that a member has lied in."""
    heard = list[int]()

    class Hears(Callback):
        def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
            heard.append(steps)

    listeners = Listeners([Hears()], Control())
    for back in (30, 40):  # the second time the state after 40 steps stays as it was
        tell = listeners.saved([(20, tmp_path), (40, tmp_path)])
        assert tell is not None
        tell()
        listeners.take_back(back)
    assert heard == [20, 40, 40]
    assert listeners.saved([(20, tmp_path), (40, tmp_path)]) is None


def test_a_checkpoint_that_two_epochs_have_made_is_told_of_once(tmp_path: Path) -> None:
    """One epoch was over while its thread completed it, and the next one began before it."""
    heard = list[int]()

    class Hears(Callback):
        def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
            heard.append(steps)

    tell = Listeners([Hears()], Control()).saved([(6, tmp_path), (3, tmp_path), (6, tmp_path)])
    assert tell is not None
    tell()
    assert heard == [3, 6]


def test_a_checkpoint_that_was_asked_for_is_missed_once_a_newer_one_is_there_without_it() -> None:
    control = Control(saves=True)
    for step in (1, 3, 7):
        control.begin(step)
        control.checkpoint()  # before step 2, 4 and 8
    assert control.passed_over([]) == control.passed_over([2]) == []
    assert control.passed_over([2, 6]) == [4]
    assert control.passed_over([2, 6, 8]) == control.passed_over([8, 10]) == control.passed_over([12]) == []


def test_nobody_misses_a_checkpoint_that_another_process_may_have_made() -> None:
    control = Control(saves=True)
    control.restore([{"step": 2, "checkpoints": [3, 5]}], 3)
    control.checkpoint()
    assert control.passed_over([9]) == []
    control.begin(5)
    control.checkpoint()
    assert control.passed_over([9]) == [6]


def test_a_resumed_rule_goes_on_as_it_would_have() -> None:
    lines = [{"step": step, "metrics": {"loss": loss}} for step, loss in enumerate([3.0, 2.0, None, 2.5])]
    best, stop = KeepBest(), EarlyStop(patience=3)
    control = Control(saves=True)
    for one in (best, stop):
        one.on_resume(control, [{"step": 9, "metrics": {}}, *lines])
    assert best.best == (2, 2.0)
    assert control.spares([1, 2, 3]) == 2
    assert not control.is_stopping
    stop.on_evaluate(control, type("Report", (), {"step": 4, "metrics": {"loss": 2.0}}))
    assert control.is_stopping


def test_a_resumed_rule_stops_where_it_would_have() -> None:
    lines = [{"step": step, "metrics": {"loss": loss}} for step, loss in enumerate([3.0, 2.0, None, 2.5])]
    again, longer = Control(), Control()
    EarlyStop(patience=2).on_resume(again, lines)
    assert again.is_stopping
    EarlyStop(patience=3).on_resume(longer, lines)
    assert not longer.is_stopping


@given(st.lists(st.sampled_from(["rate", "evaluate", "checkpoint", "keep", "stop", ""]), max_size=12), st.data())
def test_what_was_asked_for_since_a_step_that_is_taken_back_is_withdrawn(
    wishes: list[str], data: st.DataObject
) -> None:
    """Then the control is as one that never heard of that step: what it gives, and what it tells of the step later."""

    def ask(control: Control, step: int, wish: str) -> None:
        control.begin(step)
        acts = {
            "rate": lambda: control.scale_lr(0.5),
            "evaluate": control.evaluate,
            "checkpoint": control.checkpoint,
            "keep": lambda: control.checkpoint(keep=True),
            "stop": control.stop,
        }
        if wish:
            acts[wish]()

    back = data.draw(st.integers(0, len(wishes)))
    one, other = (Control(metrics=["loss"], saves=True) for _ in range(2))
    for step, wish in enumerate(wishes):
        ask(one, step, wish)
        if step < len(wishes) - 1:  # of the last step no report was written
            one.news(step)
        if step < back:
            ask(other, step, wish)
            other.news(step)
    if back < len(wishes):
        one.take_back(back)
    seen = [
        (rates(c, s), c.evaluates_after(s), c.saves_before(s), c.spares([s]), c.is_stopping)
        for s in range(15)
        for c in (one, other)
    ]
    assert seen[::2] == seen[1::2]
    assert back == len(wishes) or one.news(back) == {}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6).map(float)), min_size=1, max_size=25))
@settings(max_examples=100, deadline=None)
def test_an_evaluation_that_comes_anew_counts_once(told: list[tuple[int, float]]) -> None:
    """An audit takes steps back: what was heard since the step that comes next is as if it had not been."""
    counting: list[tuple[int, float]] = []
    for step, loss in told:
        counting = [*(one for one in counting if one[0] < step), (step, loss)]

    def outcome(evaluations: list[tuple[int, float]]) -> Any:
        best, stop, plateau = KeepBest(), EarlyStop(patience=3), ReduceOnPlateau(factor=0.5, patience=1)
        control = Control(metrics=["loss"], saves=True)
        last = 0
        for step, loss in evaluations:
            if step <= last:
                control.take_back(step)
            control.begin(last := step)
            for one in (best, stop, plateau):
                one.on_evaluate(control, SimpleNamespace(step=step, metrics={"loss": loss}))
            control.news(step)
        return best.best, stop.best, control.is_stopping, rates(control, 99), [control.spares([s]) for s in range(11)]

    assert outcome(told) == outcome(counting)
