"""A read of the job's data that never returns: people are told where, and Ctrl-C ends the run all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshcee.sampling.order import read
from meshcee.user_code import under_way
from peers.owner import feed as stalls
from peers.owner.feed import Stalls

JOB = """
import threading
import torch
from meshcee import Job, Optimizer

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if threading.current_thread().name.startswith("data") and i == {stuck}:
            print("stuck", flush=True)
            threading.Event().wait()  # for ever
        return torch.full((4,), i / 64), i % 3

job = Job(
    model=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)),
    loss=torch.nn.functional.cross_entropy,
    data=Data(),
    optimizer=Optimizer("SGD", lr=0.1),
    batch_size=8,
    steps=8,
)
"""


class Stuck:
    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        if i == 5:
            self.may_go_on.wait()
        return i


def test_a_read_that_does_not_return_is_told_now_and_then_with_sample_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "EVERY_S", 0.2)
    data, told = Stuck(), []

    async def wait() -> list[int]:
        watch = Stalls(hear).watch
        in_thread = asyncio.get_running_loop().run_in_executor
        reading = in_thread(None, read, data, [4, 5, 6], 0, 2)
        beside = watch(in_thread(None, data.may_go_on.wait))  # who also waits does not tell the same again
        found, _ = await asyncio.gather(watch(reading), beside)
        return found

    def hear(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            data.may_go_on.set()

    assert asyncio.run(wait()) == [4, 5, 6]
    assert len(told) == 3
    assert "training waits for data[5] of step 3" in told[-1]
    assert f"{__file__}:" in told[-1]
    assert "self.may_go_on.wait()" in told[-1]
    assert under_way() == ""


def test_who_stops_waiting_is_not_kept() -> None:
    async def stop() -> None:
        never = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(Stalls(lambda text: None).watch(never))
        await asyncio.sleep(0)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert never.cancelled()

    asyncio.run(stop())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_twice_ends_a_run_whose_data_never_returns(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB.format(stuck=63))
    command = (
        "import sys; from peers.cli import session; session.ENDS_WITHIN_S = 2.0; "
        f"sys.argv = ['meshcee', 'train', {str(job)!r}, '--local', '2', '--stages', '2']; from meshcee.__main__ import main; main()"
    )
    env = {**os.environ, "MESHCEE_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [sys.executable, "-c", command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert any("stuck" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)  # two signals may arrive as one
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert "ended without waiting for data[63] of step" in errors
    assert f"{job}:13 `threading.Event().wait()" in errors
