"""Data at its place with real processes: `meshcee peer --dataset` reads it in a process of its own, and a run is the plain loop."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import meshcee
from tests.mesh.harness import meshcee as command
from tests.mesh.harness import peers

SET = """
import os
from pathlib import Path

import torch

class Scans:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noisy = self.x[i] + 0.1 * torch.randn(6)
        return noisy, self.x[i].sum().reshape(1)

def make():
    with Path(__file__).with_suffix(".pids").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return Scans()
"""
JOB = """
import torch
import meshcee
from torch import nn

torch.manual_seed(0)
job = meshcee.Job(
    model=nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)),
    loss=nn.functional.mse_loss, data=meshcee.At("hospital", "scans", like=(torch.zeros(6), torch.zeros(1)), samples=48),
    optimizer=meshcee.Optimizer("AdamW", lr=0.01), batch_size=8, micro_batch_size=4, steps=5, codec="none",
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [pytest.param((), marks=pytest.mark.slow), ("--device-process",)],
    ids=["in the peer", "in a process"],
)
def test_a_set_of_a_peer_is_read_beside_it_and_the_run_equals_the_plain_loop(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Its device computes a stage too, in either form."""
    file, job_file = tmp_path / "scans.py", tmp_path / "job.py"
    file.write_text(SET)
    job_file.write_text(JOB)
    with peers(tmp_path / "home", 1) as mesh:
        mesh.start("hospital", "--dataset", f"scans={file}:make", *flags)
        (reader,) = (psutil.Process(int(pid)) for pid in file.with_suffix(".pids").read_text().split())
        hospital = mesh.processes["hospital"].pid
        done = command("train", str(job_file), "--stages", "2", "--join", mesh.token, "--json", home=mesh.home)
        assert done.code == 0, done.err[-3000:]
        assert reader.is_running(), "one process reads for as long as the peer runs"
        assert reader.pid != hospital
        assert hospital in [parent.pid for parent in reader.parents()]
        assert file.with_suffix(".pids").read_text().split() == [str(reader.pid)], "nobody else has made the set"
    (plan,) = [line["plan"] for line in done.lines if "plan" in line]
    assert len(plan["pipelines"][0]["stages"]) == 2
    losses = [line["report"]["loss"] for line in done.lines if "report" in line]
    job = replace(runpy.run_path(str(job_file))["job"], data=runpy.run_path(str(file))["Scans"]())
    assert losses == meshcee.plain(job).losses
    assert not reader.is_running()
