"""Groups between real processes: a plan from a file, with peers by name, trains what one process would have trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from meshcee.capture import capture
from meshcee.job import Job
from tests.mesh.harness import Peers, meshcee, peers, training
from tests.mesh.jobs import make_job
from tests.rig.reference import reference

ROOT = Path(__file__).parents[2]
CASE = "gpt-sgd"  # dropout and tied weights
MICRO = 4


def make(**changes: Any) -> Job:
    return replace(make_job(CASE), **{"micro_batch_size": MICRO, "steps": 6} | changes)


def write_plan(path: Path, shares: list[dict[str, int]]) -> Path:
    """A plan of the job for members by name, as a user would write it."""
    job = make()
    blocks = capture(job).train.num_blocks
    bounds = [round(blocks * j / len(shares)) for j in range(len(shares) + 1)]
    stages = [
        {
            "blocks": bounds[j : j + 2],
            "members": [{"peer": peer, "samples": count} for peer, count in stage.items()],
            "window": len(shares) - j + 1,
            "live_cap": len(shares) - j + 3,
        }
        for j, stage in enumerate(shares)
    ]
    pipeline = {"num_micro": job.batch_size // MICRO, "stages": stages}
    path.write_text(json.dumps({"micro_batch": MICRO, "pipelines": [pipeline]}))
    return path


def write_job(folder: Path, **changes: Any) -> Path:
    path = folder / "job.py"
    path.write_text(f"from tests.mesh.test_groups import make\njob = make(**{changes!r})\n")
    return path


@pytest.mark.slow
def test_groups_of_two_and_three_processes_train_what_one_would(five_peers: Peers, tmp_path: Path) -> None:
    first = {"peer-0": 1, "peer-1": MICRO - 1}
    second = {"peer-2": 1, "peer-3": MICRO - 2, "peer-4": 1}
    plan = write_plan(tmp_path / "plan.json", [first, second])
    out = tmp_path / "out.safetensors"
    arguments = ("train", str(write_job(tmp_path)), "--join", five_peers.token, "--plan", str(plan), "--out", str(out))
    done = meshcee(*arguments, "--json", home=tmp_path, cwd=ROOT)
    assert done.code == 0, done.err
    job = make()
    expected = reference(job)
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    assert losses == pytest.approx(
        [sum(map(float, step)) * MICRO / job.batch_size for step in expected.losses], rel=1e-5
    )
    for name, tensor in safetensors.torch.load_file(out).items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_the_run_goes_on_without_a_member_of_a_group_that_is_killed(tmp_path: Path) -> None:
    """The step that it died in is dropped everywhere, and done again by whoever is left, from the last checkpoint."""
    with peers(tmp_path / "home", 2) as mesh:
        plan = write_plan(tmp_path / "plan.json", [{"peer-0": 1, "peer-1": MICRO - 1}])
        with training(mesh, write_job(tmp_path, steps=100_000), "--plan", str(plan), cwd=ROOT) as process:
            mesh.kill("peer-1")
            assert process.stdout is not None
            plans = (json.loads(line)["plan"] for line in process.stdout if line.startswith('{"plan"'))
            members = [member["peer"] for stage in next(plans)["pipelines"][0]["stages"] for member in stage["members"]]
            assert members == [mesh.ids["peer-0"]]
            assert any(line.startswith('{"report"') for line in process.stdout)


@pytest.mark.slow
def test_two_pipelines_of_processes_train_what_one_process_would(five_peers: Peers, tmp_path: Path) -> None:
    """One of two stages, and one that is cut elsewhere and has a group."""
    job = make(steps=4)
    blocks = capture(job).train.num_blocks
    rows = [
        [(0, 1, {"peer-0": MICRO}), (1, blocks, {"peer-1": MICRO})],
        [(0, blocks - 1, {"peer-2": 1, "peer-3": MICRO - 1}), (blocks - 1, blocks, {"peer-4": MICRO})],
    ]
    counts = [job.batch_size // MICRO - 1, 1]
    pipelines = [
        {
            "num_micro": count,
            "stages": [
                {
                    "blocks": [first, end],
                    "members": [{"peer": peer, "samples": samples} for peer, samples in members.items()],
                    "window": 3,
                    "live_cap": 5,
                }
                for first, end, members in row
            ],
        }
        for count, row in zip(counts, rows)
    ]
    path, out = tmp_path / "plan.json", tmp_path / "out.safetensors"
    path.write_text(json.dumps({"micro_batch": MICRO, "pipelines": pipelines}))
    arguments = ("train", str(write_job(tmp_path, steps=4)), "--join", five_peers.token, "--plan", str(path))
    done = meshcee(*arguments, "--out", str(out), "--json", home=tmp_path, cwd=ROOT)
    assert done.code == 0, done.err
    expected = reference(job)
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    wanted = [sum(map(float, step)) * MICRO / job.batch_size for step in expected.losses]
    assert losses == pytest.approx(wanted, rel=1e-5)
    for name, tensor in safetensors.torch.load_file(out).items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=1e-4, atol=1e-5, msg=name)
