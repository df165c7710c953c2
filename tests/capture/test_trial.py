"""What a model says without any capture, and what can be seen of it before, is told in its words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError, UsageError
from meshcee.job import Job
from tests.capture.test_refusals import HERE as THERE
from tests.capture.test_refusals import Calls, job_of

HERE = THERE.replace("test_refusals", "test_trial")


class OwnState(nn.Linear):
    def state_dict(self) -> Any:  # type: ignore[override]
        return {"weight": self.weight}


def test_a_state_dict_that_takes_no_arguments_is_told_so() -> None:
    with pytest.raises(CaptureError, match=r"state_dict\(keep_vars=True\) failed with TypeError: .*take the arguments"):
        capture(job_of(OwnState(4, 4)))


class FourAtOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.last


def test_a_model_that_takes_one_number_of_samples_is_told_that_others_are_tried() -> None:
    job = dataclasses.replace(job_of(FourAtOnce()), batch_size=4)
    with pytest.raises(
        CaptureError, match=rf"{HERE}.*: so it is with 3 samples, .*and with 4 it works; .*x\.shape\[0\]"
    ):
        capture(job)


def test_a_distribution_that_was_made_before_looks_at_no_values() -> None:
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=True)
    job = job_of(Calls(lambda _, h: h - prior.log_prob(h).mean(1, keepdim=True)))
    assert capture(job).train.num_blocks


def test_samples_in_a_type_that_graphs_do_not_have_are_told_with_another() -> None:
    job = job_of(Calls(lambda linear, h: h))
    wide = [(np.ones(4, np.uint16), y) for _, y in job.data]
    with pytest.raises(UsageError, match=r"data gives x in uint16, .*give int32, .*\.astype\('int32'\)"):
        capture(dataclasses.replace(job, data=wide))


def test_a_model_without_numbers_is_told_to_be_made_by_a_function() -> None:
    with pytest.raises(
        UsageError, match=r"on the meta device, .*give a function that makes it, with Job\(weights=\.\.\.\)"
    ):
        capture(job_of(nn.Linear(4, 4, device="meta")))


def test_numbers_of_another_type_than_the_weights_are_told_at_once_if_the_model_takes_none() -> None:
    def of(model: nn.Module, x: torch.dtype, y: torch.dtype = torch.float32) -> Job:
        return dataclasses.replace(job_of(model), data=[(torch.randn(4, dtype=x), torch.randn(4, dtype=y))] * 8)

    with pytest.raises(
        UsageError, match=r"data gives x in float64, and the model's weights are float32: give float32, by \.to"
    ):
        capture(of(nn.Linear(4, 4), torch.float64))
    casting = Calls(lambda _, h: h)
    casting.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    capture(of(casting, torch.float64))
    capture(of(nn.Linear(4, 4), torch.float32, torch.float64))
    with pytest.raises(UsageError, match=r"^the model failed at .*: RuntimeError"):  # the type is not all
        capture(of(Calls(lambda _, h: h / (1 // 0)), torch.float64))


def test_what_changes_no_number_is_captured() -> None:
    def checkpointed(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
        print("here")
        return torch.utils.checkpoint.checkpoint(linear, h, use_reentrant=False)

    program = capture(job_of(Calls(checkpointed))).train
    assert [node.operator.name for node in program.nodes].count("aten.linear.default") == 2


def test_a_forward_that_wants_more_than_the_samples_give_says_how_it_is_called() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            return self.linear(x) * scale

    with pytest.raises(
        UsageError, match=r"missing .*argument: 'scale'; .*model\(\*x\) for a tuple.*what forward takes"
    ):
        capture(job_of(Two()))


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.edges = nn.Linear(4, 4), torch.eye(4).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.spmm(self.edges, self.inner.weight)


def test_a_sparse_tensor_that_is_no_buffer_is_refused_where_it_is_used() -> None:
    with pytest.raises(CaptureError, match=rf"a sparse tensor is used at .*{HERE}.*give its to_dense"):
        capture(job_of(Edges()))
