"""Frozen weights cross a link once: the same owner's next job finds them at the peer by the hash of their bits."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meshcee.eager import plain
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.node.mesh import Mesh
from peers.transport.base import Frame
from peers.transport.memory import MemoryNetwork
from peers.wire.weights import names_of
from tests.peers.owner.test_recovery import FAST, a_mesh
from tests.rig.virtual_time import run

WIDTH, LAYERS, STEPS, MICRO = 160, 4, 3, 4
FROZEN = {f"{i}.weight" for i in range(0, 2 * LAYERS, 2)}  # 100 KiB each


def job(seed: int = 0, **changes: object) -> Job:
    """A fine-tune of biases alone; the weights come from elsewhere, so nobody has a recipe for them."""
    draw = np.random.default_rng(seed)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    for layer in model:
        if isinstance(layer, nn.Linear):
            values = draw.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
            layer.weight = nn.Parameter(torch.from_numpy(values), requires_grad=False)
    x, y = (torch.from_numpy(draw.normal(size=(64, WIDTH)).astype(np.float32)) for _ in range(2))
    settings = {"batch_size": 8, "micro_batch_size": MICRO, "steps": STEPS, "seed": 1, "adapt": False, **changes}
    data = torch.utils.data.TensorDataset(x, y)
    return Job(model, nn.functional.mse_loss, data, Optimizer("SGD", lr=0.1), **settings)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The weights that members have asked for as values, since it was cleared last."""
    found: set[str] = set()

    def spy(frame: Frame, part: int, known: Set[str]) -> list[str]:
        names = names_of(frame, part, known)
        found.update(names)
        return names

    monkeypatch.setattr("peers.owner.offering.names_of", spy)
    return found


async def trained(mesh: Mesh, of: Job) -> None:
    async for _ in mesh.train(of, stages=2):
        pass
    losses, _, model, _ = plain(of, STEPS, MICRO)
    assert mesh.result.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(mesh.result.state_dict[name], tensor), name


@pytest.mark.slow
@pytest.mark.usefixtures("quick_planning")
async def test_another_job_of_the_same_owner_is_sent_only_what_is_new(tmp_path: Path, asked: set[str]) -> None:
    async with a_mesh(Home(tmp_path), 2) as (here, mesh):
        await trained(mesh, job())
        assert asked == FROZEN
        asked.clear()
        await trained(mesh, replace(job(), seed=2))
        assert not asked
        other = job()
        with torch.no_grad():
            other.model[2].weight[0, 0] += 1
        await trained(mesh, other)
        assert asked == {"2.weight"}
        asked.clear()
        stranger = await here.own("another", Home(tmp_path / "another"))
        await trained(stranger, job())
        assert asked == FROZEN, "nobody else learns what is at a peer"
        asked.clear()
        await trained(mesh, job())
        assert asked == FROZEN, "the other owner's job has taken its place"


@pytest.mark.slow
def test_it_is_forgotten_in_time(tmp_path: Path, asked: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.state.restoring.FROZEN_S", kept_s := 40.0)

    async def story() -> None:
        now = asyncio.get_running_loop().time
        async with InProcess(JoinOptions(), MemoryNetwork(), FAST, clock=now, monotonic=now) as here:
            for name in ("p0", "p1"):
                await here.start(name)
            mesh = await here.own("owner", Home(tmp_path))
            for pause_s, lacked in ((0.0, FROZEN), (0.8 * kept_s, set()), (1.2 * kept_s, FROZEN)):
                await asyncio.sleep(pause_s)
                asked.clear()
                await trained(mesh, job())
                assert asked == lacked, pause_s

    run(story())


@pytest.mark.slow
async def test_layers_with_equal_weights_are_all_found(tmp_path: Path, asked: set[str]) -> None:
    def alike() -> Job:
        made = job()
        for layer in made.model[2::2]:
            layer.weight = nn.Parameter(made.model[0].weight.clone(), requires_grad=False)
        return made

    async with a_mesh(Home(tmp_path), 2) as (_, mesh):
        await trained(mesh, alike())
        assert asked == FROZEN
        asked.clear()
        await trained(mesh, alike())
        assert not asked
