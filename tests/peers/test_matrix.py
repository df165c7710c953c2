"""Parity over a pairwise matrix of models and settings, and over a long run: whatever is combined, the same bits.

The idea: every pair of values of any two settings occurs in some case, so that a fault that needs two of them to meet
is met. The cases are the same in every run; a handful of them is quick, the rest is marked slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshcee._demo_job import GPT, Characters, loss, standard_library
from meshcee.job import Job, Optimizer, Schedule
from tests import zoo
from tests.peers.mesh_fixture import train
from tests.reference import Reference, reference

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

FACTORS: dict[str, Sequence[Any]] = {
    "model": (
        "char_gpt",
        "cnn",
        "gpt2",
        "shared_layer",
        "unet",
        "llama",
        "bert",
        "vit",
        "resnet",
        "lstm",
        "moe",
        "lora",
    ),
    "stages": (1, 2, 3, 4, 5),
    "optimizer": ("adamw", "sgd"),
    "dropout": (True, False),
    "clip_norm": (None, 0.5),
    "precision": ("fp32", "bf16"),
    "recompute": (False, True),
}
MOST_STAGES = {"lstm": 4}  # it has no more blocks
QUICK = 6
STEPS = 3


def pairs_of(case: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases in which every pair of values of two factors occurs; greedy, and without chance."""
    missing = {
        ((a, x), (b, y)): None  # a dict keeps the order, so that every run finds the same cases
        for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2)
        for x in xs
        for y in ys
    }
    cases: list[Case] = []
    while missing:
        case: Case = dict(next(iter(missing)))
        for name, values in factors.items():
            if name not in case:
                gains = {}
                for value in values:
                    trial = {n: value if n == name else case[n] for n in factors if n == name or n in case}
                    gains[value] = sum(pair in missing for pair in pairs_of(trial))
                # Of equally good values the one that comes next in turn, or the first would be in most cases.
                turn = len(cases) % len(values)
                order = [*values[turn:], *values[:turn]]
                case[name] = max(order, key=lambda value: gains[value])
        case = {name: case[name] for name in factors}
        for pair in pairs_of(case):
            missing.pop(pair, None)
        cases.append(case)
    return cases


CASES = pairwise(FACTORS)


def marked() -> list[Any]:
    stride = len(FACTORS["stages"]) * (len(FACTORS["model"]) // QUICK) + 1  # models and stages both move on
    quick = set(range(0, len(CASES), stride))
    return [
        pytest.param(
            case,
            id="-".join(f"{name}={value}" if name != "model" else value for name, value in case.items()),
            marks=() if i in quick else pytest.mark.slow,
        )
        for i, case in enumerate(CASES)
    ]


def job_of(case: Mapping[str, Any]) -> Job:
    settings = {name: case[name] for name in ("clip_norm", "precision", "recompute")}
    job = zoo.make(case["model"], case["optimizer"], steps=STEPS, **settings)
    if not case["dropout"]:
        assert isinstance(job.model, nn.Module)
        for module in job.model.modules():
            if isinstance(module, nn.Dropout | zoo.Block):
                module.p = 0.0
    return job


def assert_equal(trained: Any, job: Job, expected: Reference, weight: float) -> None:
    assert isinstance(job.model, nn.Module)
    assert trained.losses == [sum(float(part) * weight for part in step) for step in expected.losses]
    assert trained.state.keys() == expected.state.keys()
    # The reference halves frozen parameters too; the mesh hands them back as the user gave them.
    frozen = {name: p for name, p in job.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    wanted = expected.state | {name: p.detach() for name, p in frozen.items()}
    different = [name for name, tensor in trained.state.items() if not torch.equal(tensor, wanted[name])]
    assert different == []


def test_every_pair_of_settings_is_in_some_case() -> None:
    covered = set().union(*map(pairs_of, CASES))
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    assert covered == wanted
    assert len(CASES) < 1.3 * len(FACTORS["model"]) * len(FACTORS["stages"])  # and no case is there in vain
    assert pairwise(FACTORS) == CASES


@pytest.mark.parametrize("case", marked())
async def test_any_combination_equals_the_plain_loop(case: Case) -> None:
    job = job_of(case)
    assert job.micro_batch_size is not None
    stages = min(case["stages"], MOST_STAGES.get(case["model"], case["stages"]))
    trained = await train(job, stages, job.micro_batch_size)
    assert_equal(trained, job, reference(job), job.micro_batch_size / job.batch_size)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_thousand_steps_on_four_stages_equal_the_plain_loop() -> None:
    """The demo's model, small: rounding that differs once would have a thousand steps to grow."""
    torch.manual_seed(0)
    job = Job(
        model=GPT(width=16, heads=2, layers=4),
        loss=loss,
        data=Characters(standard_library(100_000)),
        optimizer=Optimizer("AdamW", lr=3e-3, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}),
        schedule=Schedule("LinearLR", start_factor=0.1, total_iters=30),
        clip_norm=1.0,
        batch_size=4,
        micro_batch_size=1,
        steps=1000,
    )
    trained = await train(job, 4, 1)
    expected = reference(job)
    assert_equal(trained, job, expected, 1 / 4)
    assert trained.losses[-1] < 0.8 * trained.losses[0]
