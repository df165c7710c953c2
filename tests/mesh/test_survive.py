"""Peers die and come while a job runs, as real processes, and the run's losses are those of a plain loop."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from meshcee.files.home import Home, Run
from tests.mesh.harness import meshcee, peers, training, wait_until
from tests.mesh.jobs import make_job
from tests.rig.reference import reference

ROOT = Path(__file__).parents[2]
JOB = """
from dataclasses import replace
from tests.mesh.jobs import make_job
job = replace(make_job("cnn-adamw"), steps=100_000, checkpoint_every=5)
"""


def assert_like_the_plain_loop(run: Run) -> None:
    """Each step was told of once, with the loss of the eager reference."""
    reports = run.reports()
    assert [r["step"] for r in reports] == list(range(len(reports)))
    expected = reference(make_job("cnn-adamw"), len(reports))
    assert [r["loss"] for r in reports] == [sum(float(loss) / 4 for loss in step) for step in expected.losses]


def goes_on(run: Run) -> None:
    done = len(run.reports())
    wait_until("new steps are done", lambda: len(run.reports()) > done + 7, 60)


def test_a_killed_peer_costs_no_step(tmp_path: Path) -> None:
    job_file, home = tmp_path / "job.py", Home(tmp_path / "home")
    job_file.write_text(JOB)
    with (
        peers(home.folder, 3) as mesh,
        training(mesh, job_file, "--stages", "3", "--out", str(tmp_path / "out.safetensors"), cwd=ROOT) as owner,
    ):
        run = home.run("last")
        goes_on(run)
        took = json.loads((run.folder / "seen.json").read_text())["members"]
        assert [0 < member["memory"] < 1 << 30 for member in took.values()] == [True] * 3
        mesh.kill("peer-1")
        goes_on(run)
        owner.send_signal(signal.SIGINT)
        _, err = owner.communicate(timeout=60)
        assert owner.returncode == 0, err
        assert '"gone": ["peer-1"]' in err
    assert_like_the_plain_loop(run)


@pytest.mark.slow
def test_peers_are_killed_stopped_and_replaced_and_no_step_is_lost(tmp_path: Path) -> None:
    job_file, home = tmp_path / "job.py", Home(tmp_path / "home")
    job_file.write_text(JOB)
    with peers(home.folder, 3) as mesh:
        with training(mesh, job_file, "--stages", "3", "--out", str(tmp_path / "out.safetensors"), cwd=ROOT) as owner:
            run = home.run("last")

            goes_on(run)
            mesh.kill("peer-1")
            mesh.start("peer-3")
            goes_on(run)
            mesh.processes["peer-2"].send_signal(signal.SIGSTOP)
            goes_on(run)
            mesh.processes["peer-2"].send_signal(signal.SIGCONT)
            daemon = psutil.Process(mesh.processes["peer-3"].pid).children()[0].children()[0]
            daemon.kill()  # its p2pd alone: peer-3 comes back by itself
            goes_on(run)
            mesh.kill("peer-0")  # the one that everybody joined at
            goes_on(run)
            owner.send_signal(signal.SIGINT)
            _, err = owner.communicate(timeout=60)
            assert owner.returncode == 0, err

        def idle_again() -> bool:
            seen = json.loads(meshcee("status", "--join", mesh.token, "--json", home=home.folder).out)
            return {p["name"]: p["state"] for p in seen["peers"]} == {"peer-2": "idle", "peer-3": "idle"}

        mesh.token = mesh.tokens["peer-3"]
        wait_until("those who live are idle", idle_again, 30)
    assert_like_the_plain_loop(run)
