"""What a job accepts, what it refuses by name, and that its parts survive the wire."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshcee.errors import UsageError
from meshcee.job import Job, seed_of, seeded
from meshcee.optim import Optimizer


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 9}, "fewer than batch_size"),
        ({"data": (torch.zeros(8, 4), torch.zeros(8, 1)), "batch_size": 4}, r"TensorDataset\(x, y\)"),
        (
            {"data": {"train": Data(), "test": Data()}},
            r"^data is a dict of datasets \('train', 'test'\): give data\['train'\]$",
        ),
        ({"data": {"train": [(1, 2)] * 8}, "batch_size": 1}, r"give data\['train'\]$"),
        ({"data": {"train": iter([])}}, r"give data\['train'\]$"),
        (
            {"eval_data": {"validation": Data()}},
            r"^eval_data is a dict of datasets .*: give eval_data\['validation'\]$",
        ),
        ({"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())}, r'Optimizer\("AdamW".* got Adam$'),
        ({"optimizer": torch.optim.Adam}, "got Adam$"),
        ({"optimizer": "AdamW"}, "got str$"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, r'Schedule\("Cosine.*, or None; got StepLR$'),
        ({"schedule": "cosine"}, r'Schedule\("Cosine.*got str$'),
        ({"precision": "bf16-true"}, "'bf16' with fp32 masters.*got 'bf16-true'"),
        (
            {"eval_data": DataLoader(TensorDataset(torch.zeros(8, 1)))},
            "eval_data must be map-style.*give loader.dataset",
        ),
        ({"micro_batch_size": 3}, "multiple of micro_batch_size"),
        ({"reduction": "median"}, "'mean' or 'sum'"),
        ({"reduction": "sum", "weight": len}, "a weight is for means: leave one out"),
        ({"precision": "fp8"}, "must be 'fp32', 'bf16-mixed' for autocast, or 'bf16'"),
        ({"precision": "fp16"}, "use 'bf16-mixed' or 'bf16'"),
        ({"keep_fp32": ("*Norm*",)}, "precision is 'fp32'"),
        ({"precision": "bf16", "keep_fp32": "*Norm*"}, "a tuple of patterns"),
        ({"precision": "bf16", "keep_fp32": iter(["*Norm*"])}, "a tuple of patterns"),
        ({"ema": 1.0}, "between 0 and 1"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"metrics": {"loss": len}}, "would take the place of the loss of an evaluation: give it another name"),
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


def test_numbers_of_numpy_are_pythons() -> None:
    job = make(batch_size=np.int64(4), steps=np.int32(2), micro_batch_size=np.int16(2), clip_norm=np.float32(0.5))
    assert [type(n) for n in (job.batch_size, job.steps, job.micro_batch_size, job.clip_norm)] == [int, int, int, float]
    assert type(make(seed=np.uint8(3)).seed) is int
    with pytest.raises(UsageError, match="batch_size is a whole number"):
        make(batch_size=np.float32(4))


def test_seeds_differ_by_step_and_micro_batch_and_repeat() -> None:
    assert len({seed_of(0, step, micro) for step in range(20) for micro in range(20)}) == 400
    with seeded(1, 2, 3):
        first = torch.rand(3)
    with seeded(1, 2, 3):
        assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ({"epochs": 3}, r"Job has no 'epochs': here it is steps=epochs \* len\(data\) // batch_size"),
        ({"clip_value": 0.1}, r"Job has no 'clip_value': here it is clip_norm="),
        ({"batch_sise": 4}, r"Job has no 'batch_sise': here it is batch_size="),
        ({"zzz": 4}, r"Job has no 'zzz'$"),
    ],
)
def test_a_word_that_a_job_does_not_have_is_told_with_the_one_that_was_meant(word: dict[str, int], meant: str) -> None:
    job = make()
    with pytest.raises(UsageError, match=meant):
        make(**word)
    with pytest.raises(UsageError, match=meant):
        dataclasses.replace(job, **word)
    assert "steps" in inspect.signature(Job).parameters
    with pytest.raises(TypeError, match="missing"):
        Job(steps=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": True}, "give data=loader.dataset, as Job"),
        ({}, r"give data=loader.dataset and sampler=SequentialSampler\(loader.dataset\), as Job"),
        ({"sampler": [3, 1, 2]}, "give data=loader.dataset and sampler=loader.sampler, as Job"),
        (
            {"shuffle": True, "collate_fn": lambda rows: rows},
            "give data=loader.dataset, collate=loader.collate_fn, as Job",
        ),
    ],
    ids=["shuffled", "in order", "sampled", "collated"],
)
def test_what_a_loader_has_is_named(options: dict[str, Any], said: str) -> None:
    loader = DataLoader([(torch.zeros(2), 0)] * 4, batch_size=2, **options)
    with pytest.raises(UsageError, match=said):
        Job(
            model=nn.Linear(2, 2),
            loss=nn.functional.cross_entropy,
            data=loader,
            optimizer=Optimizer("SGD", lr=0.1),
            batch_size=2,
            steps=1,
        )
