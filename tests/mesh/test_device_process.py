"""Real peers whose devices compute in processes of their own: one of these dies, the run goes on, and its peer lends it again."""

from __future__ import annotations

import json
import os
import select
import signal
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from tests.mesh.harness import Peers, meshcee, peers, training, wait_until
from tests.mesh.jobs import make_job
from tests.rig.reference import reference

ROOT = Path(__file__).parents[2]
STEPS = 400
JOB = f"""
from dataclasses import replace
from tests.mesh.jobs import make_job
job = replace(make_job("cnn-adamw"), steps={STEPS})
"""
HEARD_WITHIN_S = 10.0  # 2 on a machine with nothing else to do
READY_WITHIN_S = 60.0  # 10 there


def device_of(mesh: Peers, name: str) -> int | None:
    """The process id of the process of a peer's device."""
    for child in psutil.Process(mesh.processes[name].pid).children():
        if any("device_process" in word for word in child.cmdline()):
            return child.pid
    return None


def states(mesh: Peers) -> dict[str, str]:
    [found] = meshcee("status", "--join", mesh.token, "--json", home=mesh.home).lines
    return {str(peer["name"]): str(peer["state"]) for peer in found["peers"]}


@pytest.mark.slow
def test_a_device_that_dies_costs_its_job_an_epoch_and_its_peer_nothing(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    with peers(tmp_path / "home", 3, "--device-process") as mesh:
        with training(mesh, job, "--stages", "2", cwd=ROOT) as owner:
            assert owner.stdout is not None
            victim = next(name for name, state in states(mesh).items() if state == "busy")
            pid = device_of(mesh, victim)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed = datetime.now(UTC)
            lines = [json.loads(line) for line in owner.stdout]
            assert owner.stderr is not None
            logged = [json.loads(line) for line in owner.stderr if line.startswith("{")]
            assert owner.wait(120) == 0
        heard = next(line for line in logged if "its device was ended by SIGKILL" in line.get("error", ""))
        took_s = (datetime.fromisoformat(heard["timestamp"]) - killed).total_seconds()
        print(f"the owner knew why after {took_s:.2f} s: {heard['error']}")
        assert took_s < HEARD_WITHIN_S
        reports = [line["report"] for line in lines if "report" in line]
        expected = reference(make_job("cnn-adamw"), STEPS)
        losses = [sum(float(loss) / 4 for loss in step) for step in expected.losses]
        assert [report["loss"] for report in reports] == losses[reports[0]["step"] :]
        assert reports[-1]["step"] == STEPS - 1
        wait_until("its device is lent again", lambda: states(mesh).get(victim) == "idle", READY_WITHIN_S)
        news = [json.loads(line) for line in mesh.log(victim).splitlines() if "this peer's device is" in line]
        assert [line.get("how") for line in news] == ["was ended by SIGKILL", None]
        away, back = (datetime.fromisoformat(line["timestamp"]) for line in news)
        print(f"its device was away for {(back - away).total_seconds():.1f} s")
        again = device_of(mesh, victim)
        assert again not in (None, pid)
        device = os.pidfd_open(again or 0)
        mesh.kill(victim)
        try:
            assert select.select([device], [], [], 20.0)[0], "its device's process outlives the peer"
        finally:
            os.close(device)
