"""The law, with real processes: any number of stages gives the eager loop's losses and weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.mesh.harness import Peers, meshcee, peers
from tests.mesh.jobs import make_job
from tests.reference import reference


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with peers(tmp_path_factory.mktemp("parity"), 5) as found:
        yield found


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("case", ["gpt-adamw", "gpt-sgd", "cnn-adamw", "cnn-sgd"])
def test_any_number_of_stages_equals_the_eager_loop(mesh: Peers, tmp_path: Path, case: str, stages: int) -> None:
    job_file = tmp_path / "job.py"
    job_file.write_text(f"from tests.mesh.jobs import make_job\njob = make_job({case!r})\n")
    out = tmp_path / "out.safetensors"
    done = meshcee(
        *("train", str(job_file), "--join", mesh.token, "--stages", str(stages), "--out", str(out), "--json"),
        home=mesh.home,
        cwd=Path(__file__).parents[2],
    )
    assert done.code == 0, done.err
    plan = next(line["plan"] for line in done.lines if "plan" in line)
    assert len(plan["pipelines"][0]["stages"]) == stages
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    torch.set_num_threads(1)  # as the peers: the contract is for one thread count
    expected = reference(make_job(case))
    assert losses == [sum(float(loss) * (1 / 4) for loss in step) for step in expected.losses]
    state = safetensors.torch.load_file(out)
    assert state.keys() == expected.state.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected.state[name]), name


def test_one_flipped_bit_of_one_gradient_is_noticed(tmp_path: Path) -> None:
    """The comparison can fail: the same run with one sabotaged peer differs in losses and weights."""
    job_file = tmp_path / "job.py"
    job_file.write_text("from tests.mesh.jobs import make_job\njob = make_job('gpt-sgd')\n")
    out = tmp_path / "out.safetensors"
    with peers(tmp_path / "home", 1) as mesh:
        mesh.start("saboteur", entry=("-m", "tests.mesh.flip_one_bit"))
        arguments = ("train", str(job_file), "--join", mesh.token, "--out", str(out), "--json")
        done = meshcee(*arguments, home=mesh.home, cwd=Path(__file__).parents[2])
    assert done.code == 0, done.err
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    torch.set_num_threads(1)
    expected = reference(make_job("gpt-sgd"))
    wanted = [sum(float(loss) * (1 / 4) for loss in step) for step in expected.losses]
    state = safetensors.torch.load_file(out)
    assert losses[:6] == wanted[:6]  # the flip comes at the end of step 5
    assert losses[6:] != wanted[6:]
    assert any(not torch.equal(tensor, expected.state[name]) for name, tensor in state.items())
