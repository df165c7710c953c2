"""The net: models that do something else than what is captured are refused before the first step, with the line.

The idea: each case is a file of its own, as a user would write it, with one line marked; the refusal must name that line. What
surrounds the model (weights, gradients, attributes, generators) must be as it was, whether it was refused or not.
"""

from __future__ import annotations

import importlib
import random
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshcee
from meshcee.capture import capture
from meshcee.equality import net
from meshcee.equality.net import examine
from meshcee.errors import CaptureError, UnequalError
from meshcee.files.tensor_files import OnDemand
from meshcee.job import Job
from meshcee.stage.chain import split_blocks
from peers.cli.session import load_job
from tests.rig.resident import growth

PROGRAMS = importlib.import_module("meshcee.capture.programs")  # the module, not the function of that name

MODEL = """
import random, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
import meshcee

CALLS = []

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.count, self.last, self.rng = 0, None, np.random.default_rng(0)
        self.plain = torch.zeros(8)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("table", torch.ones(8))
{init}
    def forward(self, x):
        x = self.drop(torch.tanh(self.a(x)))
{body}
        return self.b(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Inner(), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(F.gelu(self.inner(x)))

steps = [0]
def loss(out, y):
{loss}
    return F.mse_loss(out.squeeze(-1), y)

g = torch.Generator().manual_seed(1)
job = meshcee.Job(
    Net(), loss, [(torch.randn(8, generator=g), torch.randn([], generator=g)) for _ in range(32)],
    meshcee.Optimizer("AdamW", lr=1e-2), batch_size=8, steps=3, micro_batch_size={size},
)
"""

# name -> (lines of forward, of __init__, of the loss, samples a micro-batch, whether the line must be named)
CASES: dict[str, tuple[str, str, str, int]] = {
    "counter": ("self.count += 1; x = x * 0.9**self.count  # HERE", "", "", 2),
    "counter that matters later": ("self.count += 1  # HERE\nx = x * (2 if self.count > 100 else 1)", "", "", 2),
    "plain tensor": (
        "x = x + self.plain  # HERE\nself.plain = 0.5 * self.plain + x.detach().mean(0)",
        "",
        "",
        2,
    ),
    "one sample": ("if x.shape[0] == 1:\n    x = x * 2  # HERE", "", "", 1),
    "clock": ("x = x * (1 + time.time() % 1)  # HERE", "", "", 2),
    "own generator": ("x = x * float(np.random.default_rng().random())  # HERE", "", "", 2),
    "kept generator": ("x = x * float(self.rng.random())  # HERE", "", "", 2),
    "seed": ("torch.manual_seed(0)  # HERE\nx = F.dropout(x)", "", "", 2),
    "closure": ("", "", "steps[0] += 1  # HERE\nout = out * 0.5**steps[0]", 2),
    "global": ("CALLS.append(1)  # HERE\nx = x * (1 + len(CALLS))", "", "", 2),
    "one value a channel": ("x = F.batch_norm(x, None, None, training=True)  # HERE", "", "", 1),
    "list": ("self.seen.append(len(self.seen))  # HERE\nx = x / len(self.seen)", "self.seen = []", "", 2),
}
EQUAL: dict[str, tuple[str, str, str, int]] = {
    "plain": ("", "", "", 2),
    "one": ("", "", "", 1),
    "note": ("self.last = x.detach()", "", "", 2),
    "buffer in place": (
        "with torch.no_grad():\n    self.ema.mul_(0.5).add_(x.detach().mean(0))\nx = x + self.ema",
        "",
        "",
        2,
    ),
    "batch norm": ("x = self.norm(x)", "self.norm = nn.BatchNorm1d(8)", "", 4),
    "cache": ("if self.last is None:\n    self.last = torch.ones(8)\nx = x + self.last", "", "", 2),
}


def job_of(folder: Path, body: str, init: str, loss: str, size: int) -> tuple[Job, int]:
    """The job of a file with these lines, and the number of the marked one."""
    parts = {"body": textwrap.indent(body, " " * 8), "init": textwrap.indent(init, " " * 8), "size": size}
    path = folder / "job.py"
    path.write_text(MODEL.format(loss=textwrap.indent(loss, " " * 4), **parts))
    line = next((i for i, text in enumerate(path.read_text().splitlines(), 1) if "# HERE" in text), 0)
    return load_job(path), line


def surroundings(job: Job) -> list[Any]:
    model = job.model
    assert isinstance(model, torch.nn.Module)
    tensors = [t.clone() for t in model.state_dict().values()]
    flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    simple = [(n, k, repr(v)) for n, m in model.named_modules() for k, v in vars(m).items() if k[0] != "_"]
    closure = dict(job.loss.__globals__)  # type: ignore[attr-defined]
    generators = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    return [tensors, flags, simple, repr((closure["steps"], closure["CALLS"])), generators]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def captured_and_examined(job: Job, size: int) -> None:
    """Capture itself may know better, and refuses then. What the net leaves behind is looked at."""
    found = capture(job)
    before = surroundings(job)
    try:
        examine(job, found, [size], [cut(found)], say=pytest.fail)
    finally:
        assert alike(surroundings(job), before)


def unwatched(*args: Any) -> Any:
    """In place of capture's own look at forward: the net alone must find it."""
    return lambda program: None


def cut(found: Any, stages: int = 3) -> tuple[tuple[int, int], ...]:
    return tuple(split_blocks(found.train.num_blocks, min(stages, found.train.num_blocks)))


@pytest.mark.parametrize("name", CASES)
def test_what_the_graph_does_not_hold_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    job, line = job_of(tmp_path, *CASES[name])
    size = CASES[name][3]
    with pytest.raises(CaptureError) as refused:
        captured_and_examined(replace(job, batch_size=size, micro_batch_size=None), size)
    assert re.search(rf"job\.py:{line}\b", str(refused.value))


def test_a_checkpoint_that_writes_twice_is_told_with_what_recomputes_without(tmp_path: Path) -> None:
    twice = "x = torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False)  # HERE"
    job, line = job_of(tmp_path, twice, "self.norm = nn.BatchNorm1d(8)", "", 4)
    with pytest.raises(UnequalError, match=rf"job\.py:{line} .*once more in the backward pass.*Job\(recompute=True\)"):
        captured_and_examined(job, 4)


def test_a_run_is_refused_before_its_first_step_unless_it_is_told_not_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, line = job_of(tmp_path, *CASES["one sample"])
    told: list[Any] = []
    monkeypatch.setattr(PROGRAMS, "watched", unwatched)
    with pytest.raises(UnequalError, match=f"job.py:{line} .*verify=False"):
        meshcee.train(job, local=2, on_report=told.append)
    assert told == []
    assert len(meshcee.train(replace(job, verify=False), local=2).losses) == job.steps


def test_a_part_in_eval_mode_stays_so(tmp_path: Path) -> None:
    """As PEFT's models come from `from_pretrained`: in train mode outside, their dropout in eval mode."""
    job, _ = job_of(tmp_path, "", "", "", 2)
    model: Any = job.model
    model.inner.eval()
    captured_and_examined(job, 2)
    assert model.training
    assert not model.inner.training


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_passes_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    job, _ = job_of(tmp_path, *EQUAL[name])
    captured_and_examined(job, EQUAL[name][3])


# -- models that do not fit ------------------------------------------------------------------------------------------------

LARGE = """
import torch
from torch import nn
from torch.nn import functional as F
import meshcee

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.drop, self.calls = nn.Dropout(0.1), 0
    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))  # HERE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 512)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(6)), nn.BatchNorm1d(512)
    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h.transpose(1, 2)).transpose(1, 2), self.embedding.weight)

def loss(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

g = torch.Generator().manual_seed(1)
data = [(torch.randint(300, (4,), generator=g), torch.randint(300, (4,), generator=g)) for _ in range(16)]
job = meshcee.Job(Net, loss, data, meshcee.Optimizer("SGD", lr=1e-2), batch_size=8, steps=3, micro_batch_size=4)
"""
LAYER_BYTES = 4 * (2 * 512 * 2048 + 2048 + 3 * 512)


def large(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Job, Any, int]:
    """The job of that file, captured, on a machine that seems to have room for most of its state; and its marked line."""
    path = folder / "large.py"
    path.write_text(LARGE)
    job = replace(load_job(path), **options)
    found = capture(job)
    monkeypatch.setattr(net.limits, "free_bytes", lambda: int(0.8 * found.state_bytes))
    return job, found, next(i for i, text in enumerate(LARGE.splitlines(), 1) if "# HERE" in text)


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_model_that_does_not_fit_is_compared_block_by_block(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, found, line = large(tmp_path, monkeypatch, **options)
    said: list[str] = []
    made: list[str] = []
    state = found.state
    watched = replace(found, state=OnDemand(found.layout, lambda name: (made.append(name), state[name])[1]))
    generator, grown = torch.get_rng_state(), growth()
    examine(job, watched, [4, 2], [cut(found)], say=said.append, budget_s=float("inf"))
    assert grown() < 4 * LAYER_BYTES < found.state_bytes
    assert torch.equal(torch.get_rng_state(), generator)
    assert said == [
        "the model does not fit here some times over: only the forward pass of 2 samples was compared with the module, "
        "block by block"
    ]
    large_ones = [name for name in made if name.endswith(("up.weight", "down.weight"))]
    assert len(large_ones) == len(set(large_ones)) == 12  # for both sides at once

    nodes = list(found.train.nodes)
    place = next(i for i, n in enumerate(nodes) if n.block == 2 and n.operator.name == "aten.gelu.default")
    nodes[place] = replace(nodes[place], kwargs={"approximate": "tanh"})
    tampered = replace(found, train=replace(found.train, nodes=tuple(nodes)))
    with pytest.raises(UnequalError, match=rf"block 3 of {found.train.num_blocks} .* gelu at .*large\.py:{line} "):
        examine(job, tampered, [4, 2], [cut(found)], say=said.append, budget_s=float("inf"))


@pytest.mark.slow
def test_a_given_model_that_does_not_fit_is_compared_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _, _ = large(tmp_path, monkeypatch)
    assert not isinstance(job.model, torch.nn.Module)
    model = job.model()
    job = replace(job, model=model)
    found = capture(job)
    before = [t.clone() for t in model.state_dict().values()]
    examine(job, found, [4], [cut(found)], say=lambda text: None, budget_s=float("inf"))
    assert alike([*model.state_dict().values()], before)
    model.layers[3].register_forward_hook(lambda layer, given, out: out * 1.0000001)  # what the graph does not have
    with pytest.raises(UnequalError, match=r"block \d of .* the first operation that differs is mul at .*test_net\.py"):
        examine(job, found, [4], [cut(found)], say=lambda text: None, budget_s=float("inf"))
    assert alike([*model.state_dict().values()], before)


def test_sizes_that_are_not_compared_are_watched_on_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, line = job_of(tmp_path, *CASES["one sample"])
    job = replace(job, micro_batch_size=None)  # of 8: the planner chooses another
    found = capture(job)
    monkeypatch.setattr(net.limits, "free_bytes", lambda: 0)
    said: list[str] = []
    examine(job, found, [2], [cut(found)], say=said.append)
    assert "was not checked" in said[0]
    with pytest.raises(CaptureError, match=rf"with micro-batches of 1 samples, .*job\.py:{line}\b"):
        examine(job, found, [1], [cut(found)], say=said.append)
