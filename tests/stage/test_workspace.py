"""What a stage's operators take for a moment: found without computing, and counted by whoever plans."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch import nn

import meshcee
from meshcee.capture import Capture, capture
from meshcee.job import Job
from meshcee.nn import quantized
from meshcee.stage.workspace import workspaces
from peers.planning import costs_of
from tests.nn.test_quantized import deep

WIDTH = 256


def deeper(samples: int = 1) -> Job:
    """Linear layers that are trained, with a few activations between."""
    torch.manual_seed(0)
    rows = torch.randn(8, WIDTH)
    return Job(
        model=nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]),
        loss=nn.functional.mse_loss,
        data=[(row, -row) for row in rows],
        optimizer=meshcee.Optimizer("AdamW", lr=1e-2),
        batch_size=8,
        micro_batch_size=samples,
        steps=2,
    )


def found_in(job: Job, sizes: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    captured = capture(job)
    count = captured.train.num_blocks
    return workspaces(captured.train, range(count), [c.activation_bytes for c in captured.costs], sizes, job.optimizer)


def test_a_second_gradient_is_there_before_it_is_added_to_the_first() -> None:
    [(_, few), (_, many)] = found_in(deeper(), (1, 1024))
    matrix = 4 * WIDTH * WIDTH
    assert matrix <= max(few) < 1.1 * matrix
    rows = 4 * 1024 * WIDTH  # what comes in, what goes out, and the gradients of both, are such
    assert 4 * rows <= max(many) <= matrix + 5 * rows


class Experts(nn.Module):
    """Rows are sent to experts, by numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = nn.functional.gumbel_softmax(x, dim=-1) + torch.empty_like(x).exponential_() + torch.rand(x.shape[0], 1)
        ends = torch.arange(1, 5, dtype=torch.int32) * x.shape[0]
        return nn.functional.grouped_mm((x * gates).repeat(4, 1), self.experts, offs=ends).view(4, -1, 16).sum(0)


def test_draws_and_products_with_experts_are_counted() -> None:
    rows = torch.randn(8, 16)
    [(_, found)] = found_in(dataclasses.replace(deeper(), model=Experts(), data=[(row, -row) for row in rows]), (64,))
    assert max(found) >= 2 * 4 * 16 * 16 * 4


@pytest.mark.slow
def test_unfolded_weights_are_a_workspace_and_a_large_one_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = 8 * WIDTH * WIDTH  # what the table gives, and that times the scales
    [(_, found)] = found_in(deep(WIDTH), (2,))
    assert whole <= max(found) < 1.2 * whole
    before = deep(WIDTH).model
    monkeypatch.setattr(quantized, "PIECE", WIDTH * WIDTH // 4)
    job = deep(WIDTH)
    [(_, found)] = found_in(job, (2,))
    assert whole / 4 <= max(found) < 0.4 * whole
    x = torch.randn(3, WIDTH)
    assert isinstance(before, nn.Module)
    assert isinstance(job.model, nn.Module)
    assert torch.allclose(job.model(x), before(x), atol=1e-6)
    assert max(cost.activation_bytes for cost in capture(job).costs) < WIDTH * WIDTH  # a piece is not kept either
    assert meshcee.check(job, steps=2).equal


@pytest.mark.slow
def test_no_cut_parts_the_pieces_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides would hold all of it."""

    def everywhere(inputs: object, nodes: list[object], live: list[float | None], work: object) -> list[int]:
        return [p for p in range(1, len(nodes)) if live[p] is not None]

    def readers(captured: Capture) -> int:
        program = captured.train
        codes = {i for i, entry in enumerate(program.inputs) if entry.name.endswith(".codes")}
        return max(len({n.block for n in program.nodes if number in n.refs}) for number in codes)

    monkeypatch.setattr(quantized, "PIECE", WIDTH * WIDTH // 4)
    monkeypatch.setattr(importlib.import_module("meshcee.capture.programs"), "find_cuts", everywhere)
    assert readers(capture(deep(WIDTH))) > 1  # of small ones nobody minds
    monkeypatch.setattr(importlib.import_module("meshcee.capture.export.cuts"), "SMALL_BUFFER_BYTES", 0)
    assert readers(capture(deep(WIDTH))) == 1


def test_a_plan_counts_the_workspace_of_one_block_at_a_time() -> None:
    job = dataclasses.replace(deeper(), micro_batch_size=None)
    captured = capture(job)
    costs = costs_of(job, captured)
    assert [size for size, _ in costs.workspace] == [1, 8]
    costs.check()
    with pytest.raises(meshcee.errors.ProtocolError, match="a figure for each block"):
        dataclasses.replace(costs, workspace=((1, (1,)),)).check()
