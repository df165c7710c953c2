"""The settings that parity is tested over, the cases in which every pair of them occurs, and each case as a Job.

The idea: a fault that needs two settings to meet is met, because every pair of values of any two settings occurs in some
case. The cases are the same in every run and in every process, so a case travels as data and is a Job on either side.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from tests.rig import zoo

__all__ = ["CASES", "FACTORS", "MICROS", "Case", "job_of", "pairs_of", "pairwise", "stages_of"]

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

FACTORS: dict[str, Sequence[Any]] = {
    "model": (
        *("char_gpt", "cnn", "gpt2", "shared_layer", "unet", "llama"),
        *("bert", "vit", "resnet", "lstm", "moe", "lora", "lengths", "sizes"),
    ),
    "stages": (1, 2, 3, 4, 5),
    "pipelines": (1, 2, 3),  # that the stages are dealt to: unequal runs of micro-batches, and cut differently
    "schedule": ("sequential", "1f1b", "wide", "fused", "unlike"),  # tests/mesh/test_matrix.py says what each is
    "optimizer": ("adamw", "sgd"),
    "dropout": (True, False),
    "clip_norm": (None, 0.5),
    "precision": ("fp32", "bf16", "bf16-mixed"),
    "recompute": (False, True),
}
UNMIXED = ("lstm",)  # torch composes it of operators that autocast converts for, in a graph that is fixed in length
MOST_STAGES = {"lstm": 4}  # it has no more blocks
MICROS = {2: (4, 2), 3: (3, 1, 2)}  # of every pipeline, by how many there are
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


def stages_of(case: Mapping[str, Any]) -> int:
    return int(min(case["stages"], MOST_STAGES.get(case["model"], case["stages"])))


def job_of(case: Mapping[str, Any]) -> Job:
    """The case as a job of 6 micro-batches; {"model": "long"} is a small GPT for a thousand steps."""
    if case["model"] == "long":
        return _long()
    settings = {name: case[name] for name in ("clip_norm", "precision", "recompute")}
    if case["model"] in UNMIXED and case["precision"] == "bf16-mixed":
        settings["precision"] = "bf16"
    job = zoo.make(case["model"], case["optimizer"], steps=STEPS, batch_size=12, **settings)
    if not case["dropout"]:
        assert isinstance(job.model, nn.Module)
        for module in job.model.modules():
            if isinstance(module, nn.Dropout | zoo.Block):
                module.p = 0.0
    return job


def _long() -> Job:
    import torch

    from meshcee._demo_job import GPT, Characters, loss, standard_library

    torch.manual_seed(0)
    return Job(
        model=GPT(width=16, heads=2, layers=4),
        loss=loss,
        data=Characters(standard_library(100_000)),
        optimizer=Optimizer("AdamW", lr=3e-3, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}),
        schedule=Schedule("LinearLR", start_factor=0.1, total_iters=30),
        clip_norm=1.0,
        batch_size=4,
        micro_batch_size=1,
        steps=1000,
        codec="none",
        name="long",
    )
