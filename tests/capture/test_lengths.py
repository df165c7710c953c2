"""Samples of several lengths: what computes with these in Python is told what to write."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.errors import CaptureError, UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer


def job_of(model: nn.Module, **given: Any) -> Job:
    options = {
        "loss": F.mse_loss,
        "optimizer": Optimizer("SGD", lr=0.1),
        "batch_size": 4,
        "micro_batch_size": 2,
        "steps": 1,
    }
    return Job(model=model, **options | given)


CACHE: dict[int, torch.Tensor] = {}
HERE = r"test_lengths\.py:\d+"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_module_over_lengths_is_told_to_have_one(kind: type[nn.Module]) -> None:
    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)[0].sum(1)
            return found

    def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        xs, ys = zip(*rows, strict=True)
        return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.stack(ys)

    data = [(torch.randn(3 + i % 4, 4), torch.randn(4)) for i in range(8)]
    job = job_of(Tags(), data=data, collate=padded)
    with pytest.raises(
        CaptureError, match=rf"{HERE} .*an LSTM, GRU or RNN .* one length.*pad all samples to one length"
    ):
        capture(job)


def cached(h: torch.Tensor) -> torch.Tensor:
    if h.shape[1] not in CACHE:
        CACHE[h.shape[1]] = torch.arange(h.shape[1]).float()
    return h * CACHE[h.shape[1]][:, None]


@functools.lru_cache
def places(length: int) -> torch.Tensor:
    return torch.arange(length).float()


def by_lru(h: torch.Tensor) -> torch.Tensor:
    return h * places(h.shape[1])[:, None]


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (lambda h: h * math.log(h.shape[1]), r"Python computes with the length of samples, .*torch\.full\(\(\), n\)"),
        (
            lambda h: torch.stack([h[:, t] for t in range(h.shape[1])], 1),
            r"Python computes with the length .*one length",
        ),
        (lambda h: h + torch.linspace(0, 1, h.shape[1])[:, None], r"write torch\.arange\(n\) / \(n - 1\)"),
        (cached, rf"{HERE} .*a size is a key, as of a dict or of functools\.lru_cache; .*take \[:n\] of it"),
        (by_lru, rf"{HERE} .*a size is a key, as of a dict or of functools\.lru_cache; .*take \[:n\] of it"),
        (
            lambda h: h * 2 if h.shape[1] == 3 else h,
            rf"x is \(1, 3, 4\), .*takes another way at .*{HERE} .*write it alike",
        ),
        (lambda h: h * 2 if h.shape[1] % 4 else h, rf"takes another way at .*{HERE} .*write it alike"),
        (lambda h: h[:, : math.ceil(h.shape[1] / 2)], r"Python computes ceil\(\) of a size at .*as -\(-n // 2\)"),
    ],
)
def test_python_that_computes_with_lengths_is_told_what_to_write(compute: Any, told: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(self.a(x))

    def padded(rows: Any) -> Any:
        most = max(len(x) for x, _ in rows)
        return tuple(torch.stack([F.pad(row[k], (0, 0, 0, most - len(row[k]))) for row in rows]) for k in (0, 1))

    data = [(torch.randn(3 + i % 3, 4), torch.randn(3 + i % 3, 4)) for i in range(24)]
    job = job_of(Net(), data=data, collate=padded, loss=lambda out, y: (out.sum() - y.sum()) ** 2)
    with pytest.raises(CaptureError, match=told):
        capture(job)


class Tags(nn.Module):
    """A tag for each word; `compute` is given what the words become."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head, self.compute = (
            nn.Embedding(12, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
            compute,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.compute(self.hidden(self.embed(x))))
        return found


def tags_of(compute: Callable[[torch.Tensor], torch.Tensor], lengths: Sequence[int]) -> Job:
    """In a micro-batch of two the longer of two neighbours counts."""

    def padded(rows: Any) -> Any:
        return tuple(nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True))

    drawn = torch.Generator().manual_seed(0)
    data = [tuple(torch.randint(0, most, (n,), generator=drawn) for most in (12, 4)) for n in lengths]

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    return job_of(Tags(compute), data=data, collate=padded, loss=loss, steps=12)


def windows(h: torch.Tensor) -> torch.Tensor:
    length = h.shape[1]
    if (pad := -length % 4) > 0:
        h = F.pad(h, (0, 0, 0, pad))
    h = h.unflatten(1, (-1, 4))
    return (h - h.mean(2, keepdim=True)).flatten(1, 2)[:, :length]


def test_padding_by_none_is_no_other_way() -> None:
    found = meshcee.check(tags_of(windows, [3 + i % 7 for i in range(48)]), stages=(2,), steps=6)
    assert found.equal, found.differs


def cut_where_padded(h: torch.Tensor) -> torch.Tensor:
    """As in Mamba2."""
    length = h.shape[1]
    pad = -length % 4
    h = F.pad(h, (0, 0, 0, pad)).unflatten(1, (-1, 4))
    h = (h - h.mean(2, keepdim=True)).flatten(1, 2)
    return h[:, :length] if pad > 0 else h


def test_what_stands_behind_a_padding_by_none_is_not_in_the_graph() -> None:
    found = meshcee.check(tags_of(cut_where_padded, [3 + i % 7 for i in range(48)]), stages=(2,), steps=6)
    assert found.equal, found.differs
    with pytest.raises(CaptureError, match=rf"x is .*takes another way at .*{HERE} .*pad > 0.* one length"):
        capture(tags_of(cut_where_padded, [5 + i % 4 for i in range(48)]))  # the longest, 8, is padded by none


@pytest.mark.parametrize(
    "parts", [lambda h: h.split(4, 1), lambda h: torch.split(h, 4, dim=1), lambda h: h.chunk(6, 1)]
)
def test_pieces_as_many_as_the_length_says_are_refused_there(parts: Any) -> None:
    job = tags_of(
        lambda h: torch.cat([c - c.mean(1, keepdim=True) for c in parts(h)], 1), [6 + i % 9 for i in range(40)]
    )
    with pytest.raises(CaptureError, match=rf"x is .* another number of pieces at .*{HERE} .*unflatten.* one length"):
        capture(job)


def test_the_same_number_of_pieces_for_all_lengths_trains() -> None:
    job = tags_of(lambda h: torch.cat([c - c.mean(1, keepdim=True) for c in h.split(4, 1)], 1), [5, 6, 7, 8] * 12)
    found = meshcee.check(job, stages=(2,), steps=6)
    assert found.equal, found.differs


def test_a_micro_batch_that_takes_another_way_than_all_that_were_seen_is_refused() -> None:
    """The graph would go on with the one way: the plain loop has other numbers."""
    job = tags_of(lambda h: h * 2 if h.shape[1] == 6 else h, [9, *([5] * 30), *([6] * 2), *([5] * 15)])
    with pytest.raises(UsageError, match=rf"step \d+, micro-batch \d: .*takes another way at .*{HERE} .*== 6.*alike"):
        meshcee.check(job, stages=(1,), steps=12)


def test_a_branch_on_the_number_of_samples_names_its_line() -> None:
    job = job_of(Tags(lambda h: h * 2 if len(h) == 4 else h), data=[(torch.zeros(5).long(), torch.zeros(5, 4))] * 8)
    with pytest.raises(CaptureError, match=rf"at .*{HERE} .*a branch asks for the number of samples; write it alike"):
        capture(dataclasses.replace(job, batch_size=4, micro_batch_size=None))


class Biased(nn.Module):
    """Attention with a bias for each head that later layers take as it lies in memory: heads innermost, and fewer than the
    shortest length that the branch allows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.head = nn.Embedding(12, 8), nn.Embedding(9, 2), nn.Linear(8, 4)
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        apart = torch.arange(length)[None] - torch.arange(length)[:, None]
        bias = self.bias(apart.clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        h = self.embed(x)
        for layer in self.hidden:
            q = layer(h).view(x.shape[0], length, 2, 4).transpose(1, 2)
            scores = q @ q.transpose(2, 3)
            scores = scores + bias if length > 2 else scores
            h = h + (scores.softmax(-1) @ q).transpose(1, 2).reshape(x.shape[0], length, 8)
        found: torch.Tensor = self.head(h.mean(1))
        return found


def test_a_value_whose_sizes_change_places_crosses_every_cut() -> None:
    def padded(rows: Any) -> Any:
        return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])

    torch.manual_seed(0)
    data = [(torch.randint(1, 12, (3 + i % 5,)), i % 4) for i in range(24)]
    job = job_of(
        Biased(), data=data, collate=padded, loss=F.cross_entropy, steps=3, cuts=("hidden.0", "hidden.1", "head")
    )
    found = meshcee.check(job, stages=(2, 3, 4), steps=3)
    assert found.equal, found.differs


@pytest.mark.slow
def test_a_t5_over_lengths_of_its_own_for_inputs_and_labels() -> None:
    transformers = pytest.importorskip("transformers", reason="the examples' extra is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, attn_implementation="eager", decoder_start_token_id=0)
    lengths = [(5 + i * 7 % 10, 3 + i * 5 % 7) for i in range(24)]
    data = [(torch.randint(3, 48, (n,)), torch.randint(3, 48, (m,))) for n, m in lengths]

    def padded(rows: Any) -> Any:
        ids = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
        y = nn.utils.rnn.pad_sequence([y for _, y in rows], batch_first=True, padding_value=-100)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": y}, y

    model = transformers.T5ForConditionalGeneration(config).train()
    job = job_of(model, data=data, collate=padded, loss=lambda out, y: out.loss, steps=3)
    found = meshcee.check(job, stages=(3,), steps=3)
    assert found.equal, found.differs


class Words(nn.Module):
    """A model of words, with `before` learned places in front of each text, as prompt tuning has."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.before = nn.Parameter(torch.randn(before, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        prompt = self.before.expand(len(ids), -1, -1)
        found: torch.Tensor = self.head(torch.cat([prompt, self.tokens(ids)], 1))
        return found


def of_the_next(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = logits[:, -ids.shape[1] :]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("before", [0, 3])
def test_a_length_and_one_more_or_less_may_be_flattened_with_the_samples(before: int) -> None:
    """n * (length - 1) rows are a multiple of n samples, however they are written."""

    def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return ids, ids.clone()

    data = [torch.randint(16, (5 + i % 7,)) for i in range(16)]
    job = job_of(Words(before), loss=of_the_next, data=data, collate=padded, batch_size=8, micro_batch_size=4, steps=2)
    found = meshcee.check(job, stages=(1, 2))
    assert found.equal, found.differs
