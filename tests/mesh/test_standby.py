"""A standby with real processes and a home of its own: the owner is killed, and the run goes on, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from meshcee.files.home import Home
from tests.mesh.harness import environment, peers, training, wait_until
from tests.mesh.jobs import make_job
from tests.rig.reference import reference

TAKES_OVER_WITHIN_S = 30.0
ROOT = Path(__file__).parents[2]
STEPS = 120
JOB = f"""
from dataclasses import replace
from tests.mesh.jobs import make_job
job = replace(make_job("cnn-adamw"), steps={STEPS})
"""


@pytest.mark.slow
def test_a_standby_goes_on_when_the_owner_is_killed(tmp_path: Path) -> None:
    job_file, out, home = tmp_path / "job.py", tmp_path / "out.safetensors", Home(tmp_path / "heir")
    job_file.write_text(JOB)
    with peers(tmp_path / "home", 3) as mesh:
        command = [sys.executable, "-m", "meshcee", "train", str(job_file), "--join", mesh.token, "--standby", "--json"]
        standby = subprocess.Popen(
            [*command, "--out", str(out)],
            env=environment(home.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        lines: list[tuple[float, str]] = []
        assert standby.stdout is not None
        reader = threading.Thread(
            target=lambda: lines.extend((time.monotonic(), line) for line in standby.stdout), daemon=True
        )
        reader.start()
        try:
            with training(mesh, job_file, "--stages", "3", cwd=ROOT) as owner:
                wait_until(
                    "the standby knows some steps", lambda: home.runs() and len(home.runs()[0].reports()) > 3, 60
                )
                owner.kill()
                killed_s = time.monotonic()
                owner.wait(10)
            assert standby.wait(180) == 0
        finally:
            standby.kill()
            standby.wait(10)
            reader.join(10)
            standby.stdout.close()
    reports = [(at, json.loads(line)["report"]) for at, line in lines if '"report"' in line]
    assert reports[0][0] - killed_s < TAKES_OVER_WITHIN_S
    assert [report["step"] for _, report in reports] == list(range(reports[0][1]["step"], STEPS))
    expected = reference(make_job("cnn-adamw"), STEPS)
    losses = [sum(float(loss) / 4 for loss in step) for step in expected.losses]
    assert [report["loss"] for _, report in reports] == losses[reports[0][1]["step"] :]
    state = safetensors.torch.load_file(out)
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in state.items())
