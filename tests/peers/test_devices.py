"""Devices of more than one kind: what is refused before anything is sent."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.errors import PlanError
from meshcee.profile import DeviceProfile
from peers.agent import Agent
from peers.offer import check_generators
from tests import zoo
from tests.peers.mesh_fixture import even_plan


def test_random_numbers_on_unlike_devices_are_refused() -> None:
    program = capture(zoo.make("char_gpt")).train
    plan = even_plan(program.num_blocks, 3, 8, 2)
    check_generators(program, plan, {"p0": "cuda", "p1": "cuda", "p2": "cuda"})
    with pytest.raises(PlanError, match=r"random numbers .* on cpu and cuda devices, .*--stages"):
        check_generators(program, plan, {"p0": "cuda", "p1": "cpu", "p2": "cuda"})


def test_a_stage_that_draws_nothing_may_lie_anywhere() -> None:
    program = capture(zoo.make("cnn")).train  # one dropout, in the end
    plan = even_plan(program.num_blocks, 3, 8, 2)
    check_generators(program, plan, {"p0": "cuda", "p1": "cpu", "p2": "cpu"})


async def test_a_mixed_mesh_says_so_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Agent.device_of

    def pretend(self: Agent, peer_id: str) -> DeviceProfile:
        device = real(self, peer_id)
        return dataclasses.replace(device, kind="cuda") if self.names()[peer_id] == "local-1" else device

    monkeypatch.setattr(Agent, "device_of", pretend)
    job = zoo.make("char_gpt", steps=1)
    async with meshcee.join(local=2) as mesh:
        with pytest.raises(PlanError, match="lend devices of one kind"):
            [report async for report in mesh.train(job)]
        model = job.model
        assert isinstance(model, nn.Module)
        for module in model.modules():
            if isinstance(module, nn.Dropout | zoo.Block):
                module.p = 0.0
        assert len([report async for report in mesh.train(job)]) == 1
