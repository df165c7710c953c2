"""Errors of the user's own model, loss and data: one error, of exit code 2, that names the samples and the user's line.

The idea: each job trains for real on peers of this process; one sample, or one line of the user's, is wrong.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

import meshcee
from meshcee.equality import blamed
from meshcee.equality.failing import blame, odd_ones
from meshcee.errors import CaptureError, MeshceeError, NonFiniteLossError, UsageError
from meshcee.events import Event
from meshcee.job import Job

ODD = 37  # in step 7 of these jobs
STEP = 7
HERE = Path(__file__).name


class Net(nn.Module):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.last = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(self.table(x).mean(1)))
        y: torch.Tensor = self.last(h)
        if self.in_place:
            h += 1
        return y


def line_of(text: str) -> int:
    """Of this file, where the code begins like that."""
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


def tokens(at: int = ODD, x: Sequence[int] = (1, 2, 3, 4), y: int = 0, **more: Any) -> Job:
    data = [(torch.tensor([i % 10, 1, 2, 3]), torch.tensor(i % 3)) for i in range(64)]
    data[at] = torch.tensor(x), torch.tensor(y)
    about: dict[str, Any] = {
        "model": Net(),
        "batch_size": 8,
        "steps": 10,
        "optimizer": meshcee.Optimizer("SGD", lr=0.1),
    }
    return Job(loss=nn.functional.cross_entropy, data=data, **(about | more))


def refused(job: Job, kind: type[meshcee.MeshceeError] = UsageError, **more: Any) -> str:
    with pytest.raises(kind) as told:
        meshcee.train(job, local=2, **more)
    return str(told.value)


def test_a_sample_whose_index_is_out_of_range_is_named_with_its_step_and_the_users_line() -> None:
    reports: list[Any] = []
    said = refused(tokens(x=(1, 2, 3, 10)), on_report=reports.append)
    assert said.startswith(f"step {STEP}: the model fails at ")
    assert f"{HERE}:{line_of('h = torch.tanh(')} " in said
    assert f"on data[{ODD}]: IndexError" in said
    assert len(reports) < STEP
    assert UsageError.exit_code == 2


def test_a_single_peer_is_not_lost_for_it() -> None:
    with pytest.raises(UsageError, match=rf"data\[{ODD}\]: IndexError"):
        meshcee.train(tokens(x=(1, 2, 3, 10)), local=1)


def test_where_no_line_is_the_users_the_module_is_named() -> None:
    layers = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 3))
    said = refused(tokens(x=(1, 2, 3, 10), model=layers, micro_batch_size=2))
    assert f"the model fails in module '0', on data[{ODD}]: IndexError" in said


def test_a_target_out_of_range_is_the_loss_and_its_sample() -> None:
    assert f"the loss fails, on data[{ODD}]: IndexError: Target 7 is out of bounds" in refused(tokens(y=7))


@pytest.mark.cases(2)
@pytest.mark.parametrize("at", [0, 32, 63])
def test_a_sample_among_those_that_are_looked_at_is_named(at: int) -> None:
    assert f"on data[{at}]: IndexError" in refused(tokens(at, x=(1, 2, 3, 12)))
    assert f"the loss fails, on data[{at}]: IndexError" in refused(tokens(at, y=7))


def test_what_is_left_of_the_users_model_is_as_it_was() -> None:
    job = tokens(x=(1, 2, 3, 10))
    model: Any = job.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refused(job)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_tensor_that_is_changed_in_place_too_early_names_the_line_that_needs_it(
    recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(tokens(model=Net(in_place=True)))
    assert f"the backward pass fails at {__file__}:{line_of('y: torch.Tensor = self.last')} " in said
    assert "modified by an inplace operation" in said
    assert not recwarn.list
    assert capsys.readouterr().err == ""


def rows(x: float, y: float) -> Job:
    data = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
    data[ODD] = torch.tensor([1.0, x, 2.0, 3.0]), torch.tensor([y])
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return Job(
        model,
        nn.functional.mse_loss,
        data,
        meshcee.Optimizer("SGD", lr=0.1),
        batch_size=8,
        micro_batch_size=8,
        steps=10,
    )


def test_a_loss_that_is_no_number_names_the_sample_that_has_none() -> None:
    said = refused(rows(math.nan, 0.0), NonFiniteLossError)
    assert f"step {STEP}, micro-batch 1" in said
    assert f"data[{ODD}] has NaN or infinity in x" in said


def test_a_loss_that_is_no_number_names_all_samples_where_their_numbers_are_finite() -> None:
    said = refused(rows(0.0, 3e38), NonFiniteLossError)
    assert f"data[{ODD}]" in said
    assert said.count("data[") > 1


def test_an_evaluation_names_its_samples_too() -> None:
    job = tokens(x=(1, 2, 3, 4))
    odd = replace(job, eval_data=[*job.data[:8], (torch.tensor([1, 2, 3, 10]), torch.tensor(0))], eval_every=1)
    assert "on eval_data[8]: IndexError" in refused(odd)


@pytest.mark.parametrize("at", [0, 32, 60])
@pytest.mark.parametrize("length", [3, 5])
def test_a_sample_of_another_length_is_named_and_not_the_model_alone(at: int, length: int) -> None:
    job = rows(0.0, 0.0)
    data = list(job.data)
    data[at] = torch.randn(length), torch.zeros(1)
    said = refused(replace(job, data=data), meshcee.MeshceeError)
    assert f"data[{at}]" in said
    assert f"x float32 [{length}]" in said


def test_a_sample_of_another_structure_is_named() -> None:
    job = rows(0.0, 0.0)
    data = list(job.data)
    data[32] = torch.randn(4, 2), torch.zeros(1)
    assert "data[32] is unlike all other samples" in refused(replace(job, data=data))


def by_row(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs()


def test_a_metric_that_is_no_number_says_what_to_return() -> None:
    job = rows(0.0, 0.0)
    metrics: Any = {"by_row": by_row}
    said = refused(replace(job, eval_data=job.data[:16], metrics=metrics))
    assert "metric 'by_row' returns a Tensor of shape (" in said
    assert "one number" in said


def test_what_torch_warns_of_is_told_once() -> None:
    job = rows(0.0, 0.0)
    spread = replace(job, data=[(x, y[0]) for x, y in job.data], steps=2)
    with structlog.testing.capture_logs() as logged:
        meshcee.train(spread, local=1)
    told = [entry["warning"] for entry in logged if entry["event"] == Event.CODE_WARNS]
    assert len(told) == 1
    assert "target size" in told[0]


def test_what_the_user_has_silenced_is_not_told() -> None:
    job = rows(0.0, 0.0)
    spread = replace(job, data=[(x, y[0]) for x, y in job.data], steps=2)
    with structlog.testing.capture_logs() as logged, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a target size")
        meshcee.train(spread, local=1)
    assert not [entry for entry in logged if entry["event"] == Event.CODE_WARNS]


CALLS = 0


def counting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return nn.functional.mse_loss(output, target) * CALLS


def test_what_the_loss_changes_is_not_told_of_forward() -> None:
    said = refused(replace(rows(0.0, 0.0), loss=counting), CaptureError)
    assert said.startswith("the loss counting changes the global 'CALLS' at ")
    assert f"{HERE}:{line_of('CALLS += 1')}" in said


@pytest.mark.parametrize(
    ("fails", "found"),
    [
        (lambda rows: 5 in rows, [5]),
        (lambda rows: 5 in rows or 2 in rows, [2, 5]),
        (lambda rows: len(rows) > 5, list(range(8))),  # together alone
        (lambda rows: True, [0, 1, 2, 3]),  # as many as are looked for
    ],
)
def test_the_samples_that_fail_by_themselves_are_found(
    fails: Callable[[Sequence[int]], bool], found: list[int]
) -> None:
    assert odd_ones(fails, range(8)) == found


@pytest.mark.parametrize(
    ("raised", "verify", "blames"),
    [
        ("IndexError: index out of range in self", True, True),
        ("IndexError: index out of range in self", False, False),
        ("RuntimeError: CUDA error: unspecified launch failure", True, False),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True, False),
    ],
)
def test_only_an_error_that_the_looked_at_module_has_too_is_held_against_it(
    raised: str, verify: bool, blames: bool
) -> None:
    """A peer's own failure is its own, though the samples are wrong as well."""
    job = tokens(x=(1, 2, 3, 10), verify=verify)
    peers = MeshceeError(f"peer ann (stage 0) failed in step 8: {raised}")
    x, y = zip(*(job.data[i] for i in range(32, 40)))
    found = blamed(job, meshcee.capture(job), peers, (torch.stack(x), torch.stack(y)), STEP, (0, 8), evaluate=False)
    assert isinstance(found, UsageError) is blames
    assert blames or found is peers


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_what_no_sample_fails_with_alone_is_told_with_the_size_that_may_be_to_blame() -> None:
    error = blame("the loss", RuntimeError("too many"), Few(), ["data[1]", "data[2]"], 2, None, together=True)
    assert (
        "on data[1] and data[2]: RuntimeError: too many; fewer samples do not fail: give another micro_batch_size"
        in str(error)
    )
    assert "mend data[1], or the loss" in str(
        blame("the loss", RuntimeError("no"), Few(), ["data[1]"], 2, None, together=False)
    )
