"""Where tensors begin in memory, and how wide gaps between rows are: products of matrices round by both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

import meshcee
from meshcee import eager
from meshcee.capture import capture
from meshcee.capture.export import cuts, flatten
from meshcee.capture.graph import canonical, strides
from meshcee.files.layout import GRAIN_BYTES, offset_of, placed
from meshcee.job import Job
from meshcee.sampling import source_of
from meshcee.stage import tensors
from meshcee.stage.tensors import pack, unpack
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import Changed, breaks, changed
from tests.rig.chain import Chain

MAPPED = 8  # bytes behind a multiple of 16: where Transformers' weights may begin that were read from a file


class Assembles(nn.Module):
    """It writes what it has computed into a tensor that it has made before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c(x)
        out = torch.zeros_like(x)
        out[:, :4] = self.a(x)[:, :4]
        out[:, 4:] = self.b(x)[:, 4:]
        return out


def test_no_cut_lies_between_the_making_and_the_writing_of_a_tensor() -> None:
    def story() -> None:
        assert difference(job_of(Assembles())) == ""

    story()
    with changed(cuts.positions, "min([*made, *uses]) + 1, max(uses), 1", "min(uses) + 1, max(uses), 1"):
        assert breaks(story)


class Sliced(nn.Module):
    """Its last layer reads some features of each row."""

    def __init__(self, features: int, first: int) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, features)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.read = slice(first, first + WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.tanh(self.a(x))))[:, self.read])


def slices(features: int, first: int) -> str:
    """What of several jobs is not the plain loop's: not all numbers round in another way."""
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        found.append(difference(job_of(Sliced(features, first), steps=4), orders=("late",)))
    return "".join(found)


ALIKE = "this processor's products round alike wherever their factors lie, so no mutation shows here"


def rounds_by_place(features: int, first: int) -> bool:
    """Whether a product here has other last bits for the same numbers that lie otherwise."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(4, features, generator=generator)[:, first : first + WIDTH]
        weight = torch.randn(WIDTH, WIDTH, generator=generator)
        own = rows.contiguous()
        if not (torch.equal(rows @ weight, own @ weight) and torch.equal(weight @ rows.t(), weight @ own.t())):
            return True
    return False


NARROW: Changed = (strides.canonical, "(strides[dim] - expected - 1) % _LINE + 1", "min(expected, _LINE)")
UNTOLD: Changed = (tensors, "[offset] * (offset > 0)", "[]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "first", "mend"), [(9, 0, NARROW), (13, 0, NARROW), (16, 1, UNTOLD), (12, 3, UNTOLD), (9, 1, UNTOLD)]
)
def test_features_of_wider_rows_are_rounded_as_in_the_plain_loop(features: int, first: int, mend: Changed) -> None:
    assert slices(features, first) == ""
    if not rounds_by_place(features, first):
        pytest.skip(ALIKE)
    with changed(*mend):
        assert slices(features, first) != ""


def mapped() -> nn.Module:
    """A head over one row, as of a sentence; its weights were read from a file that is mapped."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)
    )
    model[3].eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.itemsize == 4:
            tensor.data = placed(tensor.data, tensor.stride(), MAPPED, copy=True)
    return model


def job_with(model: nn.Module) -> Job:
    return job_of(model, steps=6, batch_size=3, micro_batch_size=1)


def by_hand(job: Job) -> dict[str, torch.Tensor]:
    """Trains the job's own model, where it lies."""
    assert isinstance(job.model, nn.Module)
    job.model.train()
    job.model[3].eval()
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-2)
    source = source_of(job)
    for step in range(job.steps):
        for micro in range(3):
            x, y = source.batch(step, micro, micro + 1)
            (F.mse_loss(job.model(x), y) * (1 / 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.model.state_dict()


def test_weights_that_begin_anywhere_are_rounded_as_in_the_plain_loop() -> None:
    want = by_hand(job_with(mapped()))
    aligned = copy.deepcopy(mapped())
    matters = not same(want, by_hand(job_with(aligned)))

    def trained() -> dict[str, torch.Tensor]:
        job = job_with(mapped())
        found = capture(job)
        chain = Chain(job, found, found.train.num_blocks)
        chain.run(job.steps)
        return dict(chain.state())

    assert same(want, trained())
    assert same(want, meshcee.plain(job_with(mapped())).state_dict)
    if not matters:
        pytest.skip(ALIKE)
    with changed(flatten, "offset_of(exported.state_dict.get(name, held))", "0"):
        assert not same(want, trained())
    with changed(eager, "not own.data_ptr() % GRAIN_BYTES", "True"):
        assert not same(want, meshcee.plain(job_with(mapped())).state_dict)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@st.composite
def views(draw: Callable[..., Any]) -> torch.Tensor:
    """Of a larger tensor: some of its rows and columns, perhaps transposed, from anywhere on."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    wide, begins = columns + draw(st.integers(0, 40)), draw(st.integers(0, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    memory = torch.randn(begins + rows * wide, generator=generator).to(dtype)[begins:]
    view = memory.as_strided((rows, columns), (wide, 1))
    return view.t() if draw(st.booleans()) else view


@settings(deadline=None)
@given(view=views(), out=st.integers(1, 9))
def test_what_arrives_is_rounded_as_what_was_sent(view: torch.Tensor, out: int) -> None:
    (arrived,) = unpack(*pack([view]))
    assert isinstance(arrived, torch.Tensor)
    assert torch.equal(arrived, view)
    assert offset_of(arrived) == offset_of(view)
    assert arrived.stride() == canonical(view.shape, view.stride()) == canonical(view.shape, arrived.stride())
    weight = torch.randn(out, view.shape[1], generator=torch.Generator().manual_seed(1)).to(view.dtype)
    assert torch.equal(F.linear(arrived, weight), F.linear(view, weight))
    assert torch.equal(arrived.t() @ arrived, view.t() @ view)


@settings(deadline=None)
@given(view=views(), offset=st.integers(0, GRAIN_BYTES // 8 - 1))
def test_a_tensor_is_placed_where_it_is_to_begin(view: torch.Tensor, offset: int) -> None:
    found = placed(view, view.stride(), offset * 8)
    assert (offset_of(found), found.stride(), torch.equal(found, view)) == (offset * 8, view.stride(), True)
    assert placed(found, view.stride(), offset * 8) is found
