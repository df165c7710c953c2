"""Schedules by name: torch's and those of transformers, bit for bit, forwards and back."""

from __future__ import annotations

import functools
import math
import random
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshcee.errors import UsageError
from meshcee.optim import Optimizer
from meshcee.optim.hyper import HyperSchedule, scheduled
from meshcee.optim.rates import Schedule
from meshcee.stage import optimizer_layout


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (torch.optim.lr_scheduler.StepLR, {"step_size": 1}, r'a schedule is named: Schedule\("StepLR"'),
        ("CosineAnnealing", {"T_max": 3}, "did you mean 'CosineAnnealingLR'"),
        ("CosineAnnealingLR", {"tmax": 3}, "has no 'tmax': its options are T_max, eta_min, last_epoch"),
        ("StepLR", {}, "needs 'step_size': its options are step_size, gamma"),
        ("StepLR", {"step_size": 1, "optimizer": 2}, "has no 'optimizer'"),
        ("StepLR", {"step_size": None}, "step_size=None is no number: write one, as 3"),
        ("ExponentialLR", {"gamma": "x"}, "gamma='x' is no number: write one"),
        ("OneCycleLR", {"max_lr": [0.1, "x"], "total_steps": 3}, "is no number"),
        ("MultiStepLR", {"milestones": 3}, r"milestones=3 is no list of steps: write one, as \[3, 5\]"),
        ("LambdaLR", {"lr_lambda": 3}, "lr_lambda=3 is no function: give one that returns a number"),
        ("StepLR", {"step_size": 1, "last_epoch": 3}, "leave last_epoch out, as a run that is resumed goes on"),
        ("LRScheduler", {}, "'LRScheduler' is not a step-driven class"),
        ("warnings", {}, "'warnings' is not a step-driven class"),
        ("ConstantWithWarmup", {"warmup": 1, "steps": 3}, "has no 'steps': its options are warmup, counts of steps"),
    ],
)
def test_a_schedule_that_is_told_wrong_is_refused_at_once(name: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Schedule(name, **options)


def test_a_group_with_an_option_that_its_class_does_not_have_is_refused() -> None:
    """Torch keeps it, and nothing reads it."""
    named = {"a.weight": torch.nn.Parameter(torch.zeros(2, 2)), "a.bias": torch.nn.Parameter(torch.zeros(2))}
    for wrong in ({"weight_deacy": 0.0}, {"class": "SGD", "betas": (0.9, 0.9)}):
        with pytest.raises(
            UsageError, match=r"a group has '(weight_deacy|betas)', which is no option of (AdamW|SGD); its options are"
        ):
            Optimizer("AdamW", lr=0.1, groups={"*.bias": wrong}).build(named)
    Optimizer("AdamW", lr=0.1, groups={"*.bias": {"weight_decay": 0.0}}).build(named)


def test_schedules_drive_what_they_drive_in_torch() -> None:
    with pytest.raises(UsageError, match="ReduceLROnPlateau"):
        Schedule("ReduceLROnPlateau")
    optimizer = Optimizer("SGD", lr=0.1, momentum=0.9, groups={"*.bias": {"lr": 0.01}})
    schedule = Schedule("OneCycleLR", max_lr=[0.01, 0.1], total_steps=6)
    ours = HyperSchedule(optimizer, schedule)
    theirs = optimizer.build({"a.bias": nn.Parameter(torch.zeros(1)), "a.weight": nn.Parameter(torch.zeros(1))})
    scheduler = schedule.build(theirs)
    for step in range(6):
        assert [g["lr"] for g in ours.at(step)] == [g["lr"] for g in theirs.param_groups]
        assert [g["momentum"] for g in ours.at(step)] == [g["momentum"] for g in theirs.param_groups]
        theirs.step()
        scheduler.step()
    with pytest.raises(UsageError, match=r"the schedule, after step 7 failed.*: Tried to step 7"):
        ours.at(8)


SCHEDULES = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 50, 51]},
    "ConstantLR": {"factor": 0.5, "total_iters": 40},
    "LinearLR": {"start_factor": 0.1, "total_iters": 30},
    "ExponentialLR": {"gamma": 0.97},
    "PolynomialLR": {"total_iters": 90, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 37},
    "CosineAnnealingWarmRestarts": {"T_0": 5, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 7},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 200},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.99},
    "SequentialLR": {
        "schedulers": [
            Schedule("LinearLR", start_factor=0.1, total_iters=9),
            Schedule("StepLR", step_size=4),
            Schedule("CosineWithWarmup", warmup=3, steps=40),
        ],
        "milestones": [9, 50],
    },
    "ChainedScheduler": {"schedulers": [Schedule("ExponentialLR", gamma=0.97), Schedule("ConstantLR", total_iters=9)]},
    "SequentialLR of a chain": {
        "schedulers": [
            Schedule("ChainedScheduler", schedulers=[Schedule("ExponentialLR", gamma=0.97), Schedule("LinearLR")]),
            Schedule("StepLR", step_size=9),
        ],
        "milestones": [20],
    },
    "ConstantWithWarmup": {"warmup": 7},
    "LinearWithWarmup": {"warmup": 7, "steps": 90},
    "CosineWithWarmup": {"warmup": 7, "steps": 90},
}


@given(st.sampled_from(sorted(SCHEDULES)), st.lists(st.integers(0, 120), min_size=1, max_size=8))
def test_a_schedule_that_goes_back_and_on_gives_the_same_bits(name: str, steps: list[int]) -> None:
    optimizer, schedule = (
        Optimizer("SGD", lr=0.1, momentum=0.9, groups={"*.bias": {"lr": 0.01}}),
        Schedule(name.partition(" ")[0], **SCHEDULES[name]),
    )
    with mock.patch("meshcee.optim.hyper.KEPT_EVERY", 8), mock.patch("meshcee.optim.hyper.MOST_KEPT", 3):
        straight, jumping = HyperSchedule(optimizer, schedule), HyperSchedule(optimizer, schedule)
        expected = [straight.at(step) for step in range(121)]
        assert [jumping.at(step) for step in steps] == [expected[step] for step in steps]


def test_a_schedule_that_ends_before_the_job_is_found_at_once_however_many_steps_there_are() -> None:
    optimizer, short = Optimizer("SGD", lr=0.1), Schedule("OneCycleLR", max_lr=0.1, total_steps=100)
    HyperSchedule(optimizer, None).check(10**9)
    HyperSchedule(optimizer, short).check(100)
    for steps in (102, 10**9):
        with pytest.raises(
            UsageError, match=rf"no rate for step 102 of steps={steps}: the schedule, after step 101 failed: Val"
        ):
            HyperSchedule(optimizer, short).check(steps)
    table = Schedule(
        "SequentialLR", schedulers=[short, Schedule("LambdaLR", lr_lambda=[1.0].__getitem__)], milestones=[50]
    )
    with pytest.raises(UsageError, match=r"after step 51 failed.*IndexError"):
        HyperSchedule(optimizer, table).check(90)
    with mock.patch("meshcee.optim.hyper.LOOK_S", 0.01):
        HyperSchedule(optimizer, Schedule("CosineAnnealingLR", T_max=1000)).check(10**7)


NARROW = {
    "numpy.float32": lambda step: np.float32(1 / (1 + step)),
    "torch.float32": lambda step: torch.tensor(1 / (1 + step)),
    "numpy.float32, late": lambda step: np.float32(0.5) if step == 1500 else 0.5,
}


@pytest.mark.parametrize("kind", NARROW)
def test_a_rate_that_is_no_float_is_refused_before_the_first_step(kind: str) -> None:
    """torch computes with it in float32, and a member would with a float of the same value."""
    schedule = HyperSchedule(Optimizer("SGD", lr=0.1), Schedule("LambdaLR", lr_lambda=NARROW[kind]))
    with pytest.raises(
        UsageError, match=r"the schedule gives a number of .*float32 for lr at step \d+; .* float\(...\)"
    ):
        schedule.check(1502)


def test_rates_of_float64_are_floats() -> None:
    schedule = HyperSchedule(Optimizer("SGD", lr=0.1), Schedule("LambdaLR", lr_lambda=lambda step: np.float64(0.3)))
    schedule.check(3)
    assert schedule.at(1)[0] == {"lr": 0.1 * 0.3, "momentum": 0.0}


class Own:
    """A rate of an object of the user's, which holds what cannot be copied."""

    def __init__(self) -> None:
        self.rate, self.seen, self.lock = 1.0, 0, threading.Lock()

    def falls(self, step: int) -> float:
        return 1 / (1 + step)

    def each_call(self, step: int) -> float:
        self.rate *= 0.9
        return self.rate

    def each_new_step(self, step: int) -> float:
        if step > self.seen:
            self.seen, self.rate = step, self.rate * 0.9
        return self.rate

    def late(self, step: int) -> float:
        return self.each_new_step(step) if step > 1100 else 1.0

    def random(self, step: int) -> float:
        return random.random()


@pytest.mark.parametrize("how", ["each_call", "each_new_step", "late", "random"])
@pytest.mark.parametrize("inside", [False, True])
def test_rates_that_do_not_follow_from_the_step_are_refused(how: str, inside: bool) -> None:
    """Several schedules of one run share the function, and one steps it to the end before the run begins."""
    schedule = Schedule("LambdaLR", lr_lambda=[getattr(Own(), how)])
    if inside:
        schedule = Schedule("ChainedScheduler", schedulers=[schedule])
    with pytest.raises(UsageError, match=r"other rates at step .* when asked again.* from the step alone"):
        HyperSchedule(Optimizer("SGD", lr=0.1), schedule).check(1300)


def test_the_object_of_a_method_is_not_copied() -> None:
    schedule = HyperSchedule(Optimizer("SGD", lr=0.1), Schedule("LambdaLR", lr_lambda=Own().falls))
    schedule.check(1030)
    assert [schedule.at(step)[0]["lr"] for step in (3, 1029, 1)] == [0.1 / 4, 0.1 * (1 / 1030), 0.1 / 2]


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "AdamW"])
def test_what_a_schedule_of_momentum_makes_an_optimizer_keep_is_known(name: str) -> None:
    """Of constructor options alone SGD was taken to keep nothing, and the first copy ended the member's session."""
    optimizer = Optimizer(name, lr=0.1, groups={"*.bias": {"lr": 0.01}}).averaging(0.9)
    schedule = Schedule("OneCycleLR", max_lr=0.1, total_steps=9)
    named = {name: nn.Parameter(torch.zeros(3)) for name in ("a.bias", "a.weight")}
    theirs = optimizer.build(named)
    schedule.build(theirs)
    for parameter in named.values():
        parameter.grad = torch.ones(3)
    theirs.step()
    kept = {f"{n}/{k}" for n, p in named.items() for k, v in theirs.state[p].items() if v is not None}
    layout = optimizer_layout(scheduled(optimizer, schedule), dict.fromkeys(named, (torch.float32, (3,))))
    assert layout.keys() == kept | {f"{n}/ema" for n in named}
    assert scheduled(optimizer, None) is optimizer


def assert_same_rates(ours: HyperSchedule, theirs: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    for step in range(steps):
        assert ours.at(step)[0]["lr"] == theirs.param_groups[0]["lr"]
        theirs.step()
        scheduler.step()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of SequentialLR at a milestone
def test_a_chain_of_schedules_is_torchs() -> None:
    """Against torch's classes put together by hand."""
    parts = [Schedule("LinearLR", start_factor=0.1, total_iters=5), Schedule("ExponentialLR", gamma=0.9)]
    ours = HyperSchedule(Optimizer("SGD", lr=0.1), Schedule("SequentialLR", schedulers=parts, milestones=[5]))
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    lr = torch.optim.lr_scheduler
    chain = lr.SequentialLR(
        theirs, [lr.LinearLR(theirs, 0.1, total_iters=5), lr.ExponentialLR(theirs, 0.9)], milestones=[5]
    )
    assert_same_rates(ours, theirs, chain, 12)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["ChainedScheduler", "SequentialLR"])
def test_a_chain_may_begin_with_a_chain(kind: str) -> None:
    lr, more = torch.optim.lr_scheduler, {} if kind == "ChainedScheduler" else {"milestones": [2]}
    inner = Schedule(kind, schedulers=[Schedule("ExponentialLR", gamma=0.8), Schedule("LinearLR")], **more)
    outer = Schedule("SequentialLR", schedulers=[inner, Schedule("StepLR", step_size=2)], milestones=[4])
    ours = HyperSchedule(Optimizer("SGD", lr=1.0), outer)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    chain: Any = getattr(lr, kind)
    within = [lr.ExponentialLR(theirs, 0.8), lr.LinearLR(theirs)]
    first = chain(theirs, within, [2]) if more else chain(within)
    assert_same_rates(ours, theirs, lr.SequentialLR(theirs, [first, lr.StepLR(theirs, 2)], milestones=[4]), 12)


def test_torch_warns_nobody_of_steps_that_peers_take(recwarn: pytest.WarningsRecorder) -> None:
    inner = Schedule("ChainedScheduler", schedulers=[Schedule("ExponentialLR", gamma=0.8)])
    outer = Schedule("SequentialLR", schedulers=[inner, Schedule("StepLR", step_size=2)], milestones=[2])
    HyperSchedule(Optimizer("SGD", lr=1.0), outer).check(6)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_a_schedule_of_momentum_for_an_optimizer_without_any_is_told_what_to_write(name: str) -> None:
    rest = {"base_lr": 0.1} if name == "CyclicLR" else {"total_steps": 9}
    with pytest.raises(UsageError, match=rf"^schedule '{name}' changes the momentum.*: say cycle_momentum=False, or"):
        HyperSchedule(Optimizer("Adagrad", lr=0.1), Schedule(name, max_lr=1.0, **rest))
    HyperSchedule(Optimizer("Adagrad", lr=0.1), Schedule(name, max_lr=1.0, cycle_momentum=False, **rest)).check(6)


def test_what_torch_alone_refuses_names_no_file_and_what_the_users_function_does_its_line() -> None:
    wrong = Schedule("SequentialLR", schedulers=[Schedule("StepLR", step_size=2)], milestones=[3])
    with pytest.raises(UsageError, match=r"lr_scheduler\.SequentialLR failed: ValueError: Sequential"):
        HyperSchedule(Optimizer("SGD", lr=0.1), wrong)
    own = Schedule("LambdaLR", lr_lambda=lambda step: 1 / (step - 2))
    with pytest.raises(
        UsageError, match=rf"no rate for step 3 of steps=6: .*after step 2 failed at {__file__}:\d+: Zero"
    ):
        HyperSchedule(Optimizer("SGD", lr=0.1), own).check(6)


@pytest.mark.parametrize(
    ("name", "of_theirs", "options"),
    [
        ("ConstantWithWarmup", "constant_with_warmup", {"warmup": 5}),
        ("LinearWithWarmup", "linear", {"warmup": 5, "steps": 17}),
        ("CosineWithWarmup", "cosine", {"warmup": 5, "steps": 17}),
        ("CosineWithWarmup", "cosine", {"warmup": 0, "steps": 20}),
    ],
)
def test_a_warm_up_is_that_of_transformers(name: str, of_theirs: str, options: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    ours = HyperSchedule(Optimizer("SGD", lr=0.3), Schedule(name, **options))
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = transformers.get_scheduler(of_theirs, theirs, options["warmup"], options.get("steps", 20))
    assert_same_rates(ours, theirs, scheduler, 20)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("SequentialLR", {"schedulers": [torch.optim.lr_scheduler.LinearLR], "milestones": []}, "a list of meshcee"),
        (
            "SequentialLR",
            {
                "schedulers": [Schedule("StepLR", step_size=1), Schedule("ChainedScheduler", schedulers=[])],
                "milestones": [1],
            },
            "goes over to no chain.*put the chain first, or list its schedules themselves",
        ),
        ("CosineWithWarmup", {"warmup": 5}, "steps, warmup, counts of steps"),
        ("CosineWithWarmup", {"warmup": 0.03, "steps": 1000}, "warmup=0.03 is no whole number of steps: say warmup=30"),
        ("LinearWithWarmup", {"warmup": 3, "steps": "all"}, "steps='all' is no whole number"),
        ("ConstantWithWarmup", {"warmup": -1}, "warmup=-1 is no whole number"),
        ("SWALR", {"swa_lr": 0.01}, r"LinearLR.*end_factor.*ema=0\.999"),
        ("CosineAnnealing", {}, "not a step-driven class"),
        ("cosine", {"T_max": 9}, "'cosine' is not a step-driven .*CosineWithWarmup"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Schedule(name, **options)


def test_two_processes_describe_a_schedule_alike() -> None:
    """A function has another address in each; a resumed run must not differ by that."""

    def made() -> Schedule:
        inner = Schedule("LambdaLR", lr_lambda=[lambda step: 0.5, functools.partial(pow, 2)])
        return Schedule("SequentialLR", schedulers=[inner], milestones=[])

    assert made().words == made().words
    assert "0x" not in made().words
    assert Schedule("StepLR", step_size=3).words == "[('step_size', 3)]"  # as runs have it on the disk


def test_a_rate_that_is_no_number_is_refused_before_the_first_step() -> None:
    schedule = Schedule("LambdaLR", lr_lambda=lambda step: math.nan if step > 2 else 1.0)
    with pytest.raises(UsageError, match=r"a rate that is no number at step 4: .*nan"):
        HyperSchedule(Optimizer("SGD", lr=0.1), schedule).check(6)
