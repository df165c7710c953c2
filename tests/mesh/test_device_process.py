"""Real peers whose devices compute in processes of their own: one of these dies, the run goes on, and its peer lends it again."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import torch

from meshcee.events import Event
from tests.mesh.harness import Peers, meshcee, peers, training, wait_until
from tests.mesh.jobs import make_job
from tests.mesh.test_parity import step_losses, train_on
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


def logged(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def states(mesh: Peers) -> dict[str, str]:
    [found] = meshcee("status", "--join", mesh.token, "--json", home=mesh.home).lines
    return {str(peer["name"]): str(peer["state"]) for peer in found["peers"]}


@pytest.mark.slow
def test_any_number_of_stages_equals_the_eager_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    with peers(tmp_path / "home", 3, "--device-process") as mesh:
        for case in ("gpt-adamw", "cnn-sgd"):
            expected = reference(make_job(case))
            runs = asyncio.run(train_on(mesh.token, case, [1, 2, 3]))
            assert [run.stages for run in runs] == [1, 2, 3]
            for run in runs:
                assert run.losses == step_losses(expected), (case, run.stages)
                assert run.state.keys() == expected.state.keys()
                assert all(torch.equal(tensor, expected.state[name]) for name, tensor in run.state.items())
        for name in mesh.processes:
            assert [event["level"] for event in logged(mesh.log(name)) if event["event"] == Event.DEVICE_CONFINED] == [
                "info"
            ]
            assert device_of(mesh, name) is not None


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
            said = logged(owner.stderr.read())
            assert owner.wait(120) == 0
        heard = next(line for line in said if "its device was ended by SIGKILL" in line.get("error", ""))
        took_s = (datetime.fromisoformat(heard["timestamp"]) - killed).total_seconds()
        print(f"the owner knew why after {took_s:.2f} s: {heard['error']}")
        assert took_s < HEARD_WITHIN_S
        reports = [line["report"] for line in lines if "report" in line]
        expected = reference(make_job("cnn-adamw"), STEPS)
        assert [report["loss"] for report in reports] == step_losses(expected)[reports[0]["step"] :]
        assert reports[-1]["step"] == STEPS - 1
        wait_until("its device is lent again", lambda: states(mesh).get(victim) == "idle", READY_WITHIN_S)
        news = {line["event"]: line for line in logged(mesh.log(victim))}
        assert news[Event.DEVICE_AWAY]["how"] == "was ended by SIGKILL"
        away, back = (
            datetime.fromisoformat(news[event]["timestamp"]) for event in (Event.DEVICE_AWAY, Event.DEVICE_BACK)
        )
        print(f"its device was away for {(back - away).total_seconds():.1f} s")
        again = device_of(mesh, victim)
        assert again not in (None, pid)
        device = os.pidfd_open(again or 0)
        mesh.kill(victim)
        try:
            assert select.select([device], [], [], 20.0)[0], "its device's process outlives the peer"
        finally:
            os.close(device)
