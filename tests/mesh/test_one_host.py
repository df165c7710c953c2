"""Two peers in terminals of one machine, told nothing: they share it, and the run has the bits of one plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peers.device.this_host import cores
from tests.mesh.harness import Peers, meshcee
from tests.mesh.jobs import STEPS, make_job
from tests.rig.reference import reference

ROOT = Path(__file__).parents[2]
JOB = """
from dataclasses import replace
from tests.mesh.jobs import make_job
job = replace(make_job("gpt-adamw"), checkpoint_every=5)
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Peers:
    return Peers(tmp_path)


@pytest.mark.slow
def test_peers_of_one_host_share_it_and_the_run_keeps_its_number_of_threads(mesh: Peers, tmp_path: Path) -> None:
    job_file, share = tmp_path / "job.py", max(1, cores() // 2)
    job_file.write_text(JOB)
    try:
        mesh.start("one", said=())
        mesh.start("two", said=())
        arguments = ("train", str(job_file), "--join", mesh.token, "--json")
        done = meshcee(*arguments, "--stages", "2", home=mesh.home, cwd=ROOT)
        assert done.code == 0, done.err
        other = ("--resume", "last", "--threads", str(share + 1))
        refused = meshcee(*arguments[:-1], *other, home=mesh.home, cwd=ROOT)
        found = meshcee("status", "--join", mesh.token, "--json", home=mesh.home).lines[0]["peers"]
    finally:
        mesh.close()
    devices = [p["device"] for p in found if p["device"]]
    assert len(devices) == 2
    assert len({d["host"] for d in devices}) == 1
    assert {d["threads_said"] for d in devices} == {False}
    plan = next(line["plan"] for line in done.lines if "plan" in line)
    assert plan["threads"] == share
    assert len(plan["kernels"]) == 1
    told = [line["note"] for line in done.lines if "note" in line]
    assert any(f"equals the plain loop with torch.set_num_threads({share})" in note for note in told), json.dumps(told)
    assert refused.code == 2
    assert f"computes with {share} threads, and {share + 1} were asked for" in refused.err
    before = torch.get_num_threads()
    torch.set_num_threads(share)
    try:
        expected = reference(make_job("gpt-adamw"), STEPS)
    finally:
        torch.set_num_threads(before)
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    assert losses == [sum(float(loss) / 4 for loss in step) for step in expected.losses]
