"""The names of `meshcee` that users call: what they are, in either order of import, and that their options agree.

The idea: `meshcee.capture` is a package and a function, so each order of import is tried in a process of its own.
"""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
from meshcee.errors import UsageError
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.reach.modules import halve, outermost
from meshcee.sampling.order import draw
from peers.node.mesh import Mesh
from tests.rig.reference import reference

TINY = """
import torch, meshcee
job = meshcee.Job(
    model=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, optimizer=meshcee.Optimizer("SGD", lr=0.1),
    data=[(torch.ones(2) * i, torch.ones(1)) for i in range(4)], batch_size=2, steps=1,
)
"""


def test_dir_lists_the_public_names_and_each_is_there() -> None:
    assert dir(meshcee) == sorted(meshcee.__all__)
    for name in meshcee.__all__:
        assert getattr(meshcee, name) is not None
    # A module of the same name would take the place of the function once it is imported; capture can be called itself.
    modules = {found.name for found in pkgutil.iter_modules(meshcee.__path__)}
    assert modules & set(meshcee.__all__) == {"capture"}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "first",
    [
        "",
        "import meshcee.capture.graph.program",
        "from meshcee.capture import Capture",
        "from meshcee import capture",
    ],
)
def test_capture_can_be_called_in_any_order_of_import(first: str) -> None:
    after = "found = meshcee.capture(job); print(len(found.costs), len(found.train.nodes) > 0)\n"
    after += "import meshcee.capture.graph.program; meshcee.capture(job); print(meshcee.capture.graph.program.Program.__name__)"
    command = [sys.executable, "-c", f"{first}\n{TINY}\n{after}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert shown[1:] == ["True", "Program"]


def test_train_takes_what_mesh_train_and_join_take() -> None:
    train = inspect.signature(meshcee.train).parameters
    inside, door = inspect.signature(Mesh.train).parameters, inspect.signature(meshcee.join).parameters
    options = {name: p.default for name, p in inside.items() if name not in ("self", "job", "on_wait")}
    options |= {name: p.default for name, p in door.items() if name not in ("address", "measures")}
    # `train` knows by itself whether anybody will ask for figures
    assert {name: train[name].default for name in options} == options
    assert set(train) == {*options, "job", "on_wait", "join", "on_report"}


@pytest.mark.slow
def test_a_run_of_local_peers_has_a_folder_if_it_is_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    space: dict[str, Job] = {}
    exec(TINY, space)
    assert meshcee.train(space["job"], local=1).run is None
    run = meshcee.train(space["job"], local=1, keeps=True).run
    assert [found.id for found in Home().runs()] == [run]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.last = nn.Linear(8, 4, bias=False)
        self.last.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return out


def job_of(precision: str, kept: tuple[str, ...] = ()) -> Job:
    torch.manual_seed(1)
    data = [(torch.randn(4), torch.randn(4)) for _ in range(20)]
    return Job(
        Net(),
        lambda out, y: nn.functional.mse_loss(out.float(), y),
        data,
        Optimizer("AdamW", lr=1e-2, groups={"*.bias": {"weight_decay": 0.0}}),
        batch_size=6,
        steps=4,
        micro_batch_size=3,
        clip_norm=0.1,
        schedule=Schedule("LinearLR", start_factor=0.5, total_iters=3),
        weight=lambda y: float(1 + (y > 0).sum()),
        precision=precision,
        keep_fp32=kept,
    )


def test_a_pattern_of_what_stays_in_fp32_is_met_or_refused() -> None:
    """Also one whose modules all lie inside of others that are named, which are kept with what is in them."""
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model = nn.ModuleDict({"block": block, "scales": nn.ParameterList([nn.Parameter(torch.ones(4))])})
    assert outermost(model, ("block", "LayerNorm")) == [block]
    for pattern in ("LayerNrom", "scales"):
        with pytest.raises(UsageError, match=f"keep_fp32: no module .* like '{pattern}'"):
            outermost(model, ("block", pattern))
    with pytest.raises(UsageError, match="keep_fp32: all modules of the model are trained, so leave 'frozen' out"):
        outermost(model, ("block", "frozen"))


class Moving(nn.Linear):
    """Written when `_apply` had one argument."""

    def _apply(self, fn: Any) -> Any:  # type: ignore[override]
        self.weight.data = fn(self.weight.data)
        return self


def test_the_plain_loop_rounds_a_module_that_moves_by_itself() -> None:
    halve(model := nn.Sequential(Moving(4, 4, bias=False)))
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "kept"), [("fp32", ()), ("bf16", ()), ("bf16", ("BatchNorm?d", "frozen"))])
def test_the_plain_loop_is_the_reference_of_the_tests(precision: str, kept: tuple[str, ...]) -> None:
    """Written twice: the one that users call, and the one that every test of equality is held against."""
    job = job_of(precision, kept)
    assert isinstance(job.model, nn.Module)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    found, expected = meshcee.plain(job), reference(job)
    shares = []
    for step in range(job.steps):
        drawn = [job.data[i][1] for i in draw(job.seed, 20, 6, step)]
        own = [job.weight(torch.stack(drawn[k : k + 3])) for k in (0, 3)]  # type: ignore[misc]
        shares.append([w / sum(own) for w in own])
    assert found.losses == [
        sum(float(x) * w for x, w in zip(step, share)) for step, share in zip(expected.losses, shares)
    ]
    frozen = {"last.weight": before["last.weight"]}  # given back as they came, also in bf16
    wanted = {**expected.state, **frozen}
    assert found.state_dict.keys() == wanted.keys()
    assert [name for name, tensor in found.state_dict.items() if not torch.equal(tensor, wanted[name])] == []
    assert all(norm > 0.1 for norm in found.norms)
    assert found.module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())


def test_the_plain_loop_refuses_what_no_mesh_would_train() -> None:
    with pytest.raises(UsageError, match="divides batch_size=6"):
        meshcee.plain(job_of("fp32"), micro_batch=4)
    whole = meshcee.plain(replace(job_of("fp32"), clip_norm=None, micro_batch_size=None), steps=1)
    assert len(whole.losses) == len(whole.norms) == 1
