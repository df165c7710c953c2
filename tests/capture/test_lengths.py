"""Samples of several lengths: what computes with these in Python is told what to write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.errors import CaptureError
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


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (lambda h: h * math.log(h.shape[1]), r"Python computes with the length of samples, .*torch\.full\(\(\), n\)"),
        (
            lambda h: torch.stack([h[:, t] for t in range(h.shape[1])], 1),
            r"Python computes with the length .*one length",
        ),
        (lambda h: h + torch.linspace(0, 1, h.shape[1])[:, None], r"write torch\.arange\(n\) / \(n - 1\)"),
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
    job = job_of(Biased(), data=data, collate=padded, loss=F.cross_entropy, steps=3, cuts=("hidden.0", "hidden.1", "head"))
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
