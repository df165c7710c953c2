"""What a job accepts, what it refuses by name, and that its parts survive the wire."""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshcee.errors import UsageError
from meshcee.job import Job, Optimizer, Schedule, seed_of, seeded
from meshcee.sampling.hyper import HyperSchedule


class Data:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2), torch.zeros(1)


def make(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "loss": nn.functional.mse_loss,
        "data": Data(),
        "optimizer": Optimizer("SGD", lr=0.1),
        "batch_size": 4,
        "steps": 1,
    }
    return Job(**{**settings, **changes})


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "NoSuchOptimizer", "AdamW8bit", "AdamWScheduleFree"])
def test_an_optimizer_that_cannot_be_split_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}.*(split over stages, as|no name known here).*AdamW"):
        Optimizer(name, lr=0.1)


def test_options_that_are_not_data_are_refused() -> None:
    with pytest.raises(UsageError, match="lr="):
        Optimizer("SGD", lr=torch.tensor(0.1))
    with pytest.raises(UsageError, match=r"option params=.* choose by name"):
        Optimizer("SGD", params=nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match=r"torch\.optim\.SGD"):
        Optimizer("SGD", lr=0.1, no_such_option=1).build({"w": nn.Parameter(torch.zeros(1))})


def test_groups_go_by_the_first_pattern_that_matches() -> None:
    optimizer = Optimizer("AdamW", lr=0.1, groups={"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 0.5}})
    names = ["body.weight", "body.bias", "head.weight", "head.bias"]
    built = optimizer.build({n: nn.Parameter(torch.zeros(1)) for n in names})
    assert [optimizer.group_of(n) for n in names] == [2, 0, 1, 0]
    assert [len(g["params"]) for g in built.param_groups] == [2, 1, 1]
    assert built.param_groups[1]["lr"] == 0.5
    assert Optimizer.from_json(optimizer.to_json()).to_json() == optimizer.to_json()


def test_muon_takes_matrices_and_says_what_to_do_with_others() -> None:
    named = {"body.weight": nn.Parameter(torch.ones(3, 2)), "body.bias": nn.Parameter(torch.ones(3))}
    with pytest.raises(UsageError, match='"class": "AdamW"'):
        Optimizer("Muon", lr=0.1).build(named)
    with pytest.raises(UsageError, match="LBFGS"):
        Optimizer("Muon", groups={"*.bias": {"class": "LBFGS"}})


def test_adafactor_over_several_types_wants_its_eps() -> None:
    """Without, the type of the first parameter decides for the others of its group, whichever stage holds them."""
    types = {"a.weight": torch.bfloat16, "b.weight": torch.float32}
    with pytest.raises(UsageError, match=r"one holds bfloat16 and float32; say .*eps="):
        Optimizer("Adafactor").check(types)
    with pytest.raises(UsageError, match=r"eps="):
        Optimizer("AdamW", lr=0.1, groups={"*": {"class": "Adafactor", "lr": 0.1}}).check(types)
    Optimizer("Adafactor", eps=(1e-7, 1e-3)).check(types)
    Optimizer("Adafactor", groups={"a.*": {"lr": 0.1}}).check(types)
    Optimizer("AdamW", lr=0.1).check(types)
    Optimizer("Adafactor").check(dict.fromkeys(types, torch.float32))


def test_two_classes_update_as_two_optimizers_of_torch() -> None:
    """Patterns may be several; each class has its own options, and a schedule drives both."""
    optimizer = Optimizer("Muon", lr=0.1, momentum=0.8, groups={"*.bias|norm.*": {"class": "AdamW", "lr": 0.01}})
    optimizer = Optimizer.from_json(optimizer.to_json())

    def made() -> dict[str, nn.Parameter]:
        torch.manual_seed(0)
        sizes = {"norm.weight": (3,), "body.weight": (3, 2), "body.bias": (3,)}
        return {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}

    ours, theirs = made(), made()
    built = optimizer.build(ours)
    muon = torch.optim.Muon([theirs["body.weight"]], lr=0.1, momentum=0.8)
    adamw = torch.optim.AdamW([theirs["norm.weight"], theirs["body.bias"]], lr=0.01)
    schedule = Schedule("ExponentialLR", gamma=0.5).build(built)
    for _ in range(3):
        for name in ours:
            ours[name].grad = theirs[name].grad = torch.randn_like(ours[name])
        built.step()
        muon.step()
        adamw.step()
        schedule.step()
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] *= 0.5
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert [set(built.state[ours[n]]) for n in ("body.weight", "body.bias")] == [
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]


@pytest.mark.parametrize("data", [{}, {"name": "SGD"}, {"name": "SGD", "options": 3, "groups": []}, {"name": 1}])
def test_what_is_no_optimizer_on_the_wire_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Optimizer.from_json(data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 9}, "fewer than batch_size"),
        ({"data": (torch.zeros(8, 4), torch.zeros(8, 1)), "batch_size": 4}, r"TensorDataset\(x, y\)"),
        ({"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())}, r'Optimizer\("AdamW".* got Adam$'),
        ({"optimizer": torch.optim.Adam}, "got Adam$"),
        ({"optimizer": "AdamW"}, "got str$"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, r'Schedule\("Cosine.*, or None; got StepLR$'),
        ({"schedule": "cosine"}, r'Schedule\("Cosine.*got str$'),
        ({"precision": "bf16-mixed"}, "'bf16' with fp32 masters.*got 'bf16-mixed'"),
        (
            {"eval_data": DataLoader(TensorDataset(torch.zeros(8, 1)))},
            "eval_data must be map-style.*give loader.dataset",
        ),
        ({"micro_batch_size": 3}, "multiple of micro_batch_size"),
        ({"reduction": "median"}, "'mean' or 'sum'"),
        ({"precision": "fp8"}, "must be 'fp32', or 'bf16'"),
        ({"precision": "fp16"}, "use 'bf16'"),
        ({"keep_fp32": ("*Norm*",)}, "precision is 'fp32'"),
        ({"precision": "bf16", "keep_fp32": "*Norm*"}, "a tuple of patterns"),
        ({"precision": "bf16", "keep_fp32": iter(["*Norm*"])}, "a tuple of patterns"),
        ({"ema": 1.0}, "between 0 and 1"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"data": iter([])}, "map-style"),
        ({"eval_every": 2}, "eval_data"),
        ({"steps": "10"}, "steps is a whole number of 64 bits; got '10'"),
        ({"batch_size": 4.0}, "batch_size is a whole number of 64 bits; got 4.0"),
        ({"seed": None}, "seed is a whole number of 64 bits; got None"),
        ({"clip_norm": "1"}, "clip_norm is a number, or None; got '1'"),
        ({"audit": True}, "audit is a number; got True"),
        ({"metrics": max}, "metrics is a dict of names and functions; got <built-in"),
    ],
)
def test_a_job_that_has_no_meaning_says_what_to_change(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(**changes)


JUNK = [
    None,
    True,
    0,
    -1,
    3,
    1 << 80,
    0.5,
    math.nan,
    math.inf,
    "10",
    "",
    b"x",
    [],
    ["x"],
    (),
    {},
    {"x": 1},
    {1},
    object(),
    max,
]


@pytest.mark.parametrize("name", [field.name for field in fields(Job)])
def test_whatever_stands_in_a_field_is_taken_or_refused_in_a_sentence(name: str) -> None:
    refusals = []
    for value in JUNK:
        try:
            make(**{name: value})
        except UsageError as error:
            refusals.append(str(error))
    assert refusals
    assert not [told for told in refusals if "\n" in told or len(told) > 400]


@pytest.mark.parametrize("groups", [["*.bias"], "*.bias", {"*.bias": 1e-3}])
def test_groups_that_are_no_options_by_pattern_are_refused(groups: Any) -> None:
    with pytest.raises(UsageError, match="options by a pattern of names"):
        Optimizer("AdamW", groups=groups)


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
    "ConstantWithWarmup": {"warmup": 7},
    "LinearWithWarmup": {"warmup": 7, "steps": 90},
    "CosineWithWarmup": {"warmup": 7, "steps": 90},
}


@given(st.sampled_from(sorted(SCHEDULES)), st.lists(st.integers(0, 120), min_size=1, max_size=8))
def test_a_schedule_that_goes_back_and_on_gives_the_same_bits(name: str, steps: list[int]) -> None:
    optimizer, schedule = (
        Optimizer("SGD", lr=0.1, momentum=0.9, groups={"*.bias": {"lr": 0.01}}),
        Schedule(name, **SCHEDULES[name]),
    )
    with mock.patch("meshcee.sampling.hyper.KEPT_EVERY", 8), mock.patch("meshcee.sampling.hyper.MOST_KEPT", 3):
        straight, jumping = HyperSchedule(optimizer, schedule), HyperSchedule(optimizer, schedule)
        expected = [straight.at(step) for step in range(121)]
        assert [jumping.at(step) for step in steps] == [expected[step] for step in steps]


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
    for step in range(12):
        assert ours.at(step)[0]["lr"] == theirs.param_groups[0]["lr"]
        theirs.step()
        chain.step()


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
    for step in range(20):
        assert ours.at(step)[0]["lr"] == theirs.param_groups[0]["lr"]
        theirs.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("SequentialLR", {"schedulers": [torch.optim.lr_scheduler.LinearLR], "milestones": []}, "a list of meshcee"),
        (
            "SequentialLR",
            {"schedulers": [Schedule("ChainedScheduler", schedulers=[])], "milestones": []},
            "no other chain",
        ),
        ("CosineWithWarmup", {"warmup": 5}, "steps and warmup"),
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


def test_seeds_differ_by_step_and_micro_batch_and_repeat() -> None:
    assert len({seed_of(0, step, micro) for step in range(20) for micro in range(20)}) == 400
    with seeded(1, 2, 3):
        first = torch.rand(3)
    with seeded(1, 2, 3):
        assert torch.equal(torch.rand(3), first)
