"""The law, with real processes: any number of stages gives the eager loop's losses and weights, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

import meshcee
from tests.mesh.harness import Peers, peers
from tests.mesh.harness import meshcee as command
from tests.mesh.jobs import make_job
from tests.rig.reference import Reference, reference

MICRO_BATCHES = 4


@dataclass
class Trained:
    """What one run on the mesh left."""

    stages: int
    losses: list[float]
    state: dict[str, torch.Tensor]


async def train_on(token: str, case: str, stage_counts: list[int]) -> list[Trained]:
    """Train the same job once for each number of stages, as an owner that joined once."""
    found = []
    async with meshcee.join(token) as joined:
        await joined.agent.wait_for_devices(max(stage_counts))
        for stages in stage_counts:
            async for _ in joined.train(make_job(case), stages=stages):
                pass
            assert joined.result.plan is not None
            used = len(joined.result.plan.pipelines[0].stages)
            found.append(Trained(used, joined.result.losses, joined.result.state_dict))
            await joined.agent.wait_for_devices(max(stage_counts))  # until all are idle again
    return found


def step_losses(expected: Reference) -> list[float]:
    return [sum(float(loss) * (1 / MICRO_BATCHES) for loss in step) for step in expected.losses]


@pytest.mark.parametrize(
    "case",
    [
        "gpt-adamw",
        pytest.param("cnn-sgd", marks=pytest.mark.slow),
        pytest.param("gpt-sgd", marks=pytest.mark.slow),
        pytest.param("cnn-adamw", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_stages_equals_the_eager_loop(
    five_peers: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    runs = asyncio.run(train_on(five_peers.token, case, [1, 2, 3, 5]))
    assert [run.stages for run in runs] == [1, 2, 3, 5]
    expected = reference(make_job(case))
    for run in runs:
        assert run.losses == step_losses(expected), run.stages
        assert run.state.keys() == expected.state.keys()
        for name, tensor in run.state.items():
            assert torch.equal(tensor, expected.state[name]), (run.stages, name)


@pytest.mark.slow
def test_one_flipped_bit_of_one_gradient_is_noticed(tmp_path: Path) -> None:
    """The comparison can fail: the same run with one sabotaged peer differs in losses and weights."""
    job_file = tmp_path / "job.py"
    job_file.write_text("from tests.mesh.jobs import make_job\njob = make_job('gpt-sgd')\n")
    out = tmp_path / "out.safetensors"
    with peers(tmp_path / "home", 1) as mesh:
        mesh.start("saboteur", entry=("-m", "tests.mesh.flip_one_bit"))
        arguments = ("train", str(job_file), "--join", mesh.token, "--stages", "2", "--out", str(out), "--json")
        done = command(*arguments, home=mesh.home, cwd=Path(__file__).parents[2])
    assert done.code == 0, done.err
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    expected = reference(make_job("gpt-sgd"))
    wanted = step_losses(expected)
    state = safetensors.torch.load_file(out)
    assert losses[:6] == wanted[:6]  # the flip comes at the end of step 5
    assert losses[6:] != wanted[6:]
    assert any(not torch.equal(tensor, expected.state[name]) for name, tensor in state.items())
