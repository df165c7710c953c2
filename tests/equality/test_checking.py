"""`meshcee check`: equal, or what differs first and whose doing it is.

The idea: each source of a difference is put in by itself, and the verdict must blame that one. The example GPT is changed by one
line to each kind of thing that a graph does not hold; every one must be equal or be refused with that line.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
from meshcee.equality import checking
from meshcee.equality.checking import check
from meshcee.errors import CaptureError, UsageError
from meshcee.job import Job
from meshcee.stage.chain import Chain
from peers.cli.main import main
from peers.cli.session import load_job
from tests.equality.test_net import CASES, EQUAL, PROGRAMS, job_of, unwatched

ROOT = Path(__file__).parents[2]


def plain_job(folder: Path, **changes: Any) -> Job:
    return replace(job_of(folder, *EQUAL["plain"])[0], **changes)


def test_an_ordinary_job_is_equal_and_its_losses_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    job = plain_job(tmp_path, clip_norm=0.5, codec="lossless")
    generator = torch.get_rng_state()
    found = meshcee.check(job, stages=(2, 3), steps=2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert found.equal
    assert found.losses == meshcee.plain(job, steps=2).losses
    assert found.stages == (1, 2, 3)
    assert check(plain_job(tmp_path, precision="bf16"), (2,), 2).equal


def test_gradients_of_a_pass_before_the_job_count_for_nothing_and_stay(tmp_path: Path) -> None:
    """A trial pass leaves them. The plain loop added its first step's to them, in the user's own tensors."""
    clean, tried = plain_job(tmp_path), plain_job(tmp_path)
    assert isinstance(tried.model, nn.Module)
    for parameter in tried.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.grad for p in tried.model.parameters()]
    assert meshcee.plain(tried, steps=3).losses == meshcee.plain(clean, steps=3).losses
    found = check(tried, (1, 2), 2)
    assert found.equal, found.differs
    for parameter, grad in zip(tried.model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, torch.ones_like(parameter))


def test_nor_do_those_of_a_function_that_tries_the_model_which_it_makes() -> None:
    def make(*, tries: bool = True) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        if tries:
            model(torch.ones(2, 4)).sum().backward()
        return model

    data = [(torch.arange(4.0) + i, torch.ones(2)) for i in range(16)]
    job = Job(make, nn.functional.mse_loss, data, meshcee.Optimizer("SGD", lr=0.1), batch_size=4, steps=3)
    assert meshcee.plain(job).losses == meshcee.plain(replace(job, model=lambda: make(tries=False))).losses
    assert (found := check(job, (1, 2), 2)).equal, found.differs


class Ticking:
    """Samples that no seed can repeat."""

    def __init__(self, data: Any) -> None:
        self.data, self.reads = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        self.reads += 1
        return x + 1e-3 * self.reads, y


class Augmented(Ticking):
    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + random.random() * torch.rand(8), y


def test_samples_that_change_are_the_datas_doing_and_augmented_ones_do_not(tmp_path: Path) -> None:
    job = plain_job(tmp_path)
    found = check(replace(job, data=Ticking(job.data)), (1, 2), 1)
    assert (found.blame, found.losses) == ("data", [])
    assert "read again" in found.differs
    assert check(replace(job, data=Augmented(job.data)), (2,), 2).equal


def test_what_a_codec_rounds_is_the_codecs_doing(tmp_path: Path) -> None:
    found = check(plain_job(tmp_path, codec="bf16"), (1, 2), 2)
    assert found.blame == "codec"
    assert found.differs.startswith("step 1, 2 stages, codec bf16, which rounds: the loss of micro-batch 1")


def off_by_a_bit(
    self: Chain, kind: str, stage: int, values: Sequence[Any], items: Sequence[Any], micro: int
) -> list[Any]:
    """A gradient that arrives with its last bit changed."""
    if kind == "B" and stage == 1:
        return [torch.nextafter(t, t + 1) if isinstance(t, torch.Tensor) else t for t in items]
    return list(items)


@pytest.mark.parametrize("net", [True, False], ids=["before the first step", "in the first step"])
def test_what_goes_wrong_between_stages_is_the_cuts_doing(
    net: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chain, "arrived", off_by_a_bit)
    if not net:
        monkeypatch.setattr(checking, "examine", lambda *_, **__: None)
    found = check(plain_job(tmp_path), (1, 2), 2)
    assert found.blame == "cut"
    assert "gradient of" in found.differs
    assert "job.py:" in found.differs  # where the parameter is used
    assert found.differs.startswith("the model cut into 2 stages" if net else "step 1, 2 stages: ")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    return int(ended.value.code or 0)


def test_the_command_says_equal_or_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_of(tmp_path, *EQUAL["plain"])
    assert run(str(tmp_path / "job.py"), "--stages", "2", "--steps", "1") == 0
    assert "equal, bit for bit: 1 steps on 1, 2 stages" in capsys.readouterr().out
    _, line = job_of(tmp_path, *CASES["clock"])
    assert run(str(tmp_path / "job.py"), "--json") == 4  # capture knows
    assert f"job.py:{line} " in capsys.readouterr().err
    monkeypatch.setattr(PROGRAMS, "watched", unwatched)
    assert run(str(tmp_path / "job.py"), "--json") == 10  # the net would have
    assert f"job.py:{line} " in capsys.readouterr().err
    assert run(str(tmp_path / "job.py"), "--stages", "two") == 2


FORWARD = "        n, t, c = x.shape\n"
INIT = "        self.heads = heads\n"
LOSS = "    return F.cross_entropy(logits.flatten(0, 1), target.flatten())\n"
# kind -> (line of the example, what takes its place; the line marked HERE is to be named, unless all is equal), ...
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "filled through a view": (
        (FORWARD, FORWARD + "        o = torch.zeros_like(x); o[:, :, :4] = x[:, :, :4]; x = x + o  # HERE\n"),
    ),
    "counter": (
        (INIT, INIT + "        self.temp = 1.0\n"),
        (FORWARD, FORWARD + "        self.temp *= .9; x = x * self.temp  # HERE\n"),
    ),
    "buffer assigned": (
        (INIT, INIT + "        self.register_buffer('ema', torch.zeros(width))\n"),
        (
            FORWARD,
            FORWARD + "        self.ema = 0.5 * self.ema + 0.5 * x.detach().mean((0, 1)); x = x + self.ema  # HERE\n",
        ),
    ),
    "branch for one sample": (
        (FORWARD, FORWARD + "        if x.shape[0] == 1:\n            x = x * 2  # HERE\n"),
        ("micro_batch_size=4", "micro_batch_size=1"),
    ),
    "transposed parameter": (
        (INIT, INIT + "        self.mixer = nn.Parameter(torch.randn(width, width).t())\n"),
        (FORWARD, FORWARD + "        x = x + torch.tanh(x @ self.mixer)  # HERE\n"),
    ),
    "closure of the loss": (
        (LOSS, "    CALLS.append(1)  # HERE\n" + LOSS),
        ("CONTEXT = 64", "CONTEXT = 64\nCALLS = []"),
    ),
    "one value per channel": (
        (FORWARD, FORWARD + "        F.batch_norm(x[:, 0], None, None, training=True)  # HERE\n"),
        ("micro_batch_size=4", "micro_batch_size=1"),
    ),
    "clock": ((FORWARD, FORWARD + "        x = x * (1 + __import__('time').time() % 1)  # HERE\n"),),
    "own generator": (
        (FORWARD, FORWARD + "        x = x * float(__import__('numpy').random.default_rng().random())  # HERE\n"),
    ),
    "seed": ((FORWARD, FORWARD + "        torch.manual_seed(1)  # HERE\n"),),
    "kernels": (
        (
            "        seen = F.scaled",
            "        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): seen = F.scaled",
        ),
        ("is_causal=True)", "is_causal=True)  # HERE"),
    ),
    "requires_grad": ((FORWARD, FORWARD + "        self.mix.weight.requires_grad_(False)  # HERE\n"),),
    "saved tensors": (
        (
            FORWARD,
            FORWARD
            + "        with torch.autograd.graph.saved_tensors_hooks(lambda s: s * 2, lambda s: s): x = x * x.tanh()  # HERE\n",
        ),
    ),
    "inference mode": (
        (FORWARD, FORWARD + "        with torch.inference_mode(): m = x.mean()  # HERE\n        x = x * m.clone()\n"),
    ),
}


@pytest.mark.slow  # a capture each
@pytest.mark.parametrize("kind", KINDS)
def test_the_example_with_one_line_changed_is_equal_or_names_the_line(kind: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "gpt.py").read_text()
    small = (
        ("layers: int = 4", "layers: int = 1"),
        ("width: int = 128", "width: int = 32"),
        ("= 1_000_000", "= 20_000"),
    )
    for line, other in (*small, *KINDS[kind]):
        assert text.count(line) == 1, line
        text = text.replace(line, other)
    path = tmp_path / "gpt.py"
    path.write_text(text)
    number = next(i for i, line in enumerate(text.splitlines(), 1) if "# HERE" in line)
    try:
        differs = check(load_job(path), (1, 2), 2).differs
    except CaptureError as error:
        differs = str(error)
    print(kind, "->", differs or "equal")
    assert not differs or f"gpt.py:{number}" in differs


LATE = """
import sys, torch, meshcee
torch.manual_seed(1)
data = [(torch.randn(8), torch.zeros(8)) for _ in range(24)]
data[15] = (torch.full((8,), 40.0), torch.zeros(8))
def loss(output, target):
    large = (output.abs() > 5).sum().item()
    if large > 0:
        {fails}  # HERE
    return output.pow(2).mean()
job = meshcee.Job(model=torch.nn.Linear(8, 8), loss=loss, data=data, sampler=lambda epoch, seed: range(24),
    optimizer=meshcee.Optimizer("SGD", lr=1e-3), batch_size=4, micro_batch_size=4, steps=6)
"""


@pytest.mark.parametrize("fails", ["raise ValueError(large)", "sys.exit(0)"])
def test_what_fails_in_a_later_step_is_the_users_own(tmp_path: Path, fails: str) -> None:
    (tmp_path / "late.py").write_text(LATE.format(fails=fails))
    job = load_job(tmp_path / "late.py")
    with pytest.raises(UsageError, match=r"in the plain loop, failed at .*late\.py:9"):
        check(job, (2,), 6)
    with pytest.raises(UsageError, match=r"step 4: the loss fails at .*late\.py:\d+ .*on data\[15\]"):
        meshcee.train(job, local=1)
