"""Statistics of batches that are folded later equal those that a batch norm writes at once, whatever it is given."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshcee.capture import Capture, capture
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.stage import StageRunner

SAMPLES = 4
SHAPES: dict[tuple[int, ...], Any] = {
    (6,): nn.BatchNorm1d,
    (5, 7): nn.BatchNorm1d,
    (4, 5, 5): nn.BatchNorm2d,
    (3, 2, 3, 4): nn.BatchNorm3d,
}


@functools.cache
def captured(shape: tuple[int, ...], momentum: float, kind: str) -> Capture:
    torch.manual_seed(0)
    model = nn.Sequential(SHAPES[shape](shape[0], momentum=momentum), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, *shape))
    dtype = torch.float64 if kind == "fp64" else torch.float32
    data = [(torch.randn(shape, dtype=dtype), 1)] * SAMPLES
    return capture(
        Job(
            model=model.to(dtype),
            loss=nn.functional.cross_entropy,
            data=data,
            optimizer=Optimizer("SGD", lr=0.1),
            batch_size=SAMPLES,
            steps=1,
            precision="bf16" if kind == "bf16" else "fp32",
        )
    )


def stage(of: Capture) -> StageRunner:
    spec = of.train.slice(0, of.train.num_blocks)
    runner = StageRunner(spec, {name: of.state[name] for name in spec.state_names()}, Optimizer("SGD", lr=0.1))
    runner.begin(0)
    return runner


def fed(runner: StageRunner, inputs: list[torch.Tensor]) -> None:
    for micro, x in enumerate(inputs):
        raw = {
            v.name: x.to(v.dtype) if v.dtype.is_floating_point else torch.ones(len(x), dtype=v.dtype)
            for v in runner.spec.raw_inputs
        }
        runner.forward(micro, raw, [])


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 5),
    momentum=st.sampled_from([0.1, 1 / 3]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    last=st.booleans(),
    sizes=st.lists(st.integers(2, SAMPLES), min_size=5, max_size=5),
    data=st.data(),
)
def test_what_is_folded_later_is_what_is_written_at_once(
    kind: str,
    shape: tuple[int, ...],
    seed: int,
    count: int,
    momentum: float,
    scale: float,
    last: bool,
    sizes: list[int],
    data: Any,
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    inputs = [scale * torch.randn((n, *shape), generator=drawn) + 1 for n in sizes[:count]]
    if last and len(shape) == 3:
        inputs = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=2)))
    of = captured(shape, momentum, kind)
    whole = stage(of)
    fed(whole, inputs)
    runs = [inputs[a:b] for a, b in zip([0, *cuts], [*cuts, count])]
    first = stage(of)
    fed(first, runs[0])
    found = dict(first.written)
    for run in runs[1:]:
        other = stage(of)
        other.statistics.keeps = True
        fed(other, run)
        found = other.statistics.folded(found)
    assert found.keys() == whole.written.keys()
    for name, tensor in whole.written.items():
        assert torch.equal(found[name], tensor), name
