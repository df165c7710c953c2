"""Sizes that vary, said as eager code says them: slices up to a constant, len(), generators that are None."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import meshcee
from meshcee.capture import capture
from meshcee.capture.export import sizes
from meshcee.capture.export.sizes import sizes_that_vary
from meshcee.errors import CaptureError, UsageError
from meshcee.job import Job
from tests.mutation import changed

Compute = Callable[[Any, torch.Tensor], torch.Tensor]
MOST = 8


class Net(nn.Module):
    """Of token ids of any length; `compute` is given this module and x."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places, self.hidden = nn.Embedding(12, 8), nn.Embedding(MOST, 8), nn.Linear(8, 8)
        self.head, self.bias, self.compute = nn.Linear(8, 4), nn.Parameter(torch.randn(1, MOST, 8)), compute

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.hidden(self.embed(x).mean(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


def attends(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = x[..., :MOST]
    samples, length = x.shape
    h = net.embed(x) + net.bias[:, :length]
    mask = torch.tril(torch.ones(length, length))
    h = torch.tanh(net.hidden((h @ h.transpose(1, 2)).masked_fill(mask == 0, -1e9).softmax(-1) @ h))
    return net.head(h.view(samples, length, 8)[:, -1])


def ends(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = x[:, -MOST:]
    h = net.embed(x) + net.places(torch.arange(x.shape[1]))
    return net.head(torch.tanh(net.hidden(h))[:, -1])


def writes(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.embed(x)
    mask = torch.zeros(h.shape[:2])
    mask[:, :MOST] = 1.0
    return net.head(torch.tanh(net.hidden(h * mask[..., None])).mean(1))


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, y)


def padded(rows: Any) -> Any:
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


def job_of(compute: Compute, loss: Any = cross_entropy) -> Job:
    """Micro-batches of lengths 3 to 11."""
    drawn = torch.Generator().manual_seed(0)
    data = [(torch.randint(1, 12, (3 + i % 9,), generator=drawn), i % 4) for i in range(48)]
    optimizer = meshcee.Optimizer("SGD", lr=0.1)
    return Job(Net(compute), loss, data, optimizer, batch_size=8, micro_batch_size=2, steps=4, collate=padded)


CASES: dict[str, tuple[Compute, Any]] = {
    "a slice to a constant": (lambda net, x: net.head(net.hidden(net.embed(x[:, :MOST])).mean(1)), cross_entropy),
    "the last so many": (ends, cross_entropy),
    "attention over a slice": (attends, cross_entropy),
    "a slice that is written": (writes, cross_entropy),
    "view by len": (lambda net, x: net.head((h := net.mean(x)).view(len(h), -1)), cross_entropy),
    "zeros by len": (lambda net, x: net.head(net.mean(x) + torch.zeros(len(x), 8)), cross_entropy),
    "divided by len": (
        lambda net, x: net.head(net.mean(x)),
        lambda output, y: F.cross_entropy(output, y, reduction="sum") / len(y),
    ),
    "picked by len": (
        lambda net, x: net.head(net.mean(x)),
        lambda output, y: -output.log_softmax(-1)[torch.arange(len(y)), y].mean(),
    ),
    "a generator that is None": (
        lambda net, x: net.head(net.mean(x) + torch.randn((x.shape[0], 8), generator=None)),
        cross_entropy,
    ),
    "a distribution told by position": (
        lambda net, x: net.head(net.mean(x)),
        lambda output, y: -D.VonMises(output, torch.ones_like(output)).log_prob(F.one_hot(y, 4)).mean(),
    ),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", CASES)
def test_what_eager_code_says_of_sizes_trains_as_in_the_plain_loop(name: str) -> None:
    found = meshcee.check(job_of(*CASES[name]), stages=(2,), steps=4)
    assert found.equal, found.differs


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("a slice to a constant", "_LEAST(stop, size) if", "stop if"),
        ("the last so many", "_MOST(size + start, 0) if", "start if"),
        ("divided by len", "return of.shape[0]", "return _LEN(of)"),
    ],
)
def test_and_as_torch_traces_it_is_not_one_graph(name: str, line: str, instead: str) -> None:
    with changed(sizes, line, instead), pytest.raises((CaptureError, UsageError)):
        meshcee.check(replace(job_of(*CASES[name]), micro_batch_size=None), stages=(2,), steps=4)


PARTS = st.sampled_from(
    [None, slice(None), 0, -1, slice(0, 3), slice(1, 4), slice(-3, None), slice(None, -1), slice(-4, -1)]
)
PARTS |= st.builds(slice, st.none() | st.integers(-2, 2), st.none() | st.integers(3, 7), st.none() | st.just(2))


@pytest.mark.slow
@settings(max_examples=30)
@given(before=st.lists(PARTS, max_size=2), after=st.lists(PARTS, max_size=2), gap=st.booleans())
def test_one_graph_slices_tensors_of_every_length(before: list[Any], after: list[Any], gap: bool) -> None:
    index = (*before, *([Ellipsis] if gap else []), *after)
    while sum(part is not None and part is not Ellipsis for part in index) > 3:
        index = index[1:]

    def take(x: torch.Tensor) -> torch.Tensor:
        with sizes_that_vary():
            return x[index].clone()

    graph = make_fx(take, tracing_mode="symbolic")(torch.randn(5, 6, 5))
    for size in (2, 3, 4, 8, 11):
        x = torch.randn(5, size, 9) if size % 2 else torch.randn(5, 9, size)
        assert torch.equal(graph(x), x[index])
        assert torch.equal(graph(x.transpose(0, 1).contiguous()), x.transpose(0, 1)[index])


def test_a_slice_that_holds_all_samples_stays_one() -> None:
    """It takes a part of larger micro-batches only, which the job has not."""
    for compute in (lambda net, x: net.head(net.mean(x)[:64]), lambda net, x: torch.cat([h := net.mean(x), h])[:64]):
        assert meshcee.check(job_of(compute, total), stages=(2,), steps=2).equal


def test_len_is_pythons_again_afterwards() -> None:
    before = builtins.len
    with sizes_that_vary():
        assert len(torch.zeros(3)) == 3
        assert len("ab") == 2
        with pytest.raises(TypeError, match="0-d"):
            len(torch.tensor(1))
    assert builtins.len is before


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a diagonal filled": (
        lambda h: (h @ h.t()).fill_diagonal_(0.0),
        r"fill_diagonal_ makes a constant .*torch\.eye\(n",
    ),
    "one of twice the samples": (
        lambda h: (torch.cat([h, h]) @ torch.cat([h, h]).t()).fill_diagonal_(0.0),
        r"fill_diagonal_ makes a constant .*torch\.eye\(n",
    ),
    "taken along": (lambda h: torch.take_along_dim(h, h.argsort(-1), dim=-1), r"write x\.gather\(dim, indices\)"),
    "steps between": (lambda h: h + torch.linspace(0, 1, h.shape[0])[:, None], r"write torch\.arange\(n\) / \(n - 1\)"),
    "a triangle's indices": (
        lambda h: (h @ h.t())[tuple(torch.triu_indices(h.shape[0], h.shape[0], 1))],
        r"weigh all numbers of the matrix by torch\.ones_like\(s\)\.triu\(1\)",
    ),
    "a diagonal beside": (
        lambda h: torch.diag(torch.cat([h, h]) @ torch.cat([h, h]).t(), h.shape[0]),
        r"as s\[:n, n:\]\.diagonal\(\)",
    ),
    "a range over samples": (lambda h: h[range(len(h)), 0], r"fixes a size .*as range\(\) does, and not torch\.arange"),
    "distances of pairs": (lambda h: F.pdist(h), r"torch\.cdist\(o, o\) and weigh each pair once"),
    "classes that nobody counted": (lambda h: h + F.one_hot(h.argmax(-1)).sum(), r"say how many: one_hot\(x, N\)"),
    "counted values": (lambda h: h * torch.bincount(h.argmax(-1), minlength=4), r"one_hot\(y, N\)\.sum\(0\)"),
    "a conjugate": (
        lambda h: torch.view_as_real(torch.complex(h, h).conj() * 2.0),
        r"write torch\.complex\(z\.real, -z\.imag\)",
    ),
    "a generator put back": (lambda h: h + forked(h), r"fork_rng is used in forward .*draw in data\[i\]"),
    "one put back beside another": (lambda h: h + forked(h) + torch.rand_like(h), r"fork_rng is used in forward"),
    "a fake quantization": (
        lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
        r"write h \+ \(quantized - h\)\.detach\(\)",
    ),
    "a norm that is limited": (lambda h: torch.renorm(h, 2, 0, 1.0), r"scale x by x\.norm"),
}


def forked(h: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.randn_like(h)


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", BETWEEN)
def test_what_fixes_a_size_or_has_no_operator_is_told_what_to_write(name: str) -> None:
    compute, told = BETWEEN[name]
    job = job_of(lambda net, x: compute(net.head(net.mean(x))).sum() + net.mean(x), total)
    with pytest.raises(CaptureError, match=told) as raised:
        capture(replace(job, micro_batch_size=None))
    assert f"{Path(__file__).name}:" in str(raised.value)


def total(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return output.sum()
