"""The machine around a peer: a name that only its mesh can compare, one who measures at a time, threads that spin briefly."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshcee.errors import PlanError
from meshcee.figures.kernels import without_settings
from meshcee.figures.profile import DeviceProfile
from peers.cli.session import spin_briefly
from peers.device import fingerprints, this_host
from peers.device.compute import Compute
from peers.device.profile import measure_device
from peers.device.this_host import host_id, quiet
from peers.planning.job_costs import whom_to_ask


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(this_host.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_host_has_one_name_in_a_mesh_and_another_one_in_the_next() -> None:
    assert host_id(b"a" * 32) == host_id(b"a" * 32) != host_id(b"b" * 32)
    assert len(host_id(b"")) == 16


async def test_one_measures_while_the_other_waits(folder: Path) -> None:
    inside: list[str] = []
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with quiet():
            entered.set()
            await leave.wait()
            inside.append("first")

    async def second() -> None:
        await entered.wait()
        async with quiet():
            inside.append("second")

    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        waiting = group.create_task(second())
        await entered.wait()
        await asyncio.sleep(5 * this_host.LOOK_S)
        assert not waiting.done()
        leave.set()
    assert inside == ["first", "second"]


async def test_a_process_that_opens_no_files_any_more_takes_turns_as_others_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_host, "locks", [this_host.lock_file()])
    monkeypatch.setattr(this_host.tempfile, "gettempdir", lambda: str(folder / "nowhere"))
    with (folder / f"meshcee-{os.getuid()}" / "measuring.lock").open("rb") as lock, this_host.locks[0]:
        for _ in range(2):
            async with quiet():
                with pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)


async def test_who_is_stopped_while_it_measures_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_host, "TURN_S", 0.1)
    async with quiet(), quiet():
        pass


async def test_a_folder_that_somebody_else_made_is_not_used(folder: Path) -> None:
    (folder / f"meshcee-{this_host.os.getuid()}").symlink_to(folder)
    async with quiet():
        assert not (folder / "measuring.lock").exists()


def test_threads_spin_briefly_unless_the_user_has_said() -> None:
    found = {"HOME": "/"}
    spin_briefly(found)
    assert found["GOMP_SPINCOUNT"] == "10000"
    for own in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"):
        found = {own: "7"}
        spin_briefly(found)
        assert found == {own: "7"}


def test_the_command_line_says_so_before_torch_is_loaded() -> None:
    code = (
        "import os, sys, peers.cli.main as cli\n"
        "cli.app = lambda arguments, **_: sys.exit(('torch' in sys.modules) or os.environ['GOMP_SPINCOUNT'] != '10000')\n"
        "cli.main([])"
    )
    own = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in this_host.os.environ.items() if name not in own}
    assert subprocess.run([sys.executable, "-c", code], env=kept, timeout=60, check=False).returncode == 0


async def test_a_device_tells_its_class_and_its_host(folder: Path) -> None:
    async with Compute() as compute:
        found = await measure_device(compute, host="h", threads_said=True)
    assert found.host == "h"
    assert found.cores >= 1
    assert found.threads_said
    assert not found.memory_said
    assert found.versions == this_host.versions()
    assert [name for name, _ in found.fingerprints] == ["product", "attention", "softmax"]
    assert found.fingerprints == fingerprints(torch.device("cpu"))
    assert without_settings(found.capability).endswith(torch.backends.cpu.get_cpu_capability())


CLASS = """
import hashlib, torch
from torch.nn import functional as F
from peers.device import capability
torch.set_num_threads({})
torch.manual_seed(1)
image, weight = torch.randn(2, 16, 16, 16), torch.randn(32, 16, 3, 3)
bits = [torch.randn(16, 96) @ torch.randn(96, 16), F.conv2d(image, weight, padding=1)]
print(capability(), [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in bits], sep=";")
"""


def class_in(threads: int, **variables: str) -> tuple[str, str]:
    """The class in such a process, and what a product and a convolution are there."""
    command = [sys.executable, "-c", CLASS.format(threads)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=True)
    own, _, bits = done.stdout.strip().partition(";")
    return own, bits


def test_variables_by_which_libraries_choose_kernels_are_part_of_the_class_and_threads_are_not() -> None:
    own, bits = class_in(1)
    assert class_in(3) == (own, bits)
    for name, value in (("MKL_CBWR", "COMPATIBLE"), ("ONEDNN_MAX_CPU_ISA", "SSE41")):  # if the libraries know them here
        other, changed = class_in(1, **{name: value})
        assert (other != own) == (changed != bits)
        assert without_settings(other) == without_settings(own)


async def test_the_run_says_with_how_many_threads_a_cpu_computes() -> None:
    most = this_host.os.cpu_count() or 1
    before = torch.get_num_threads()
    try:
        async with Compute() as compute:
            await compute.use_threads(most)
            assert await compute.run(torch.get_num_threads) == most
            assert await compute.run_aside(torch.get_num_threads) == most
            assert torch.get_num_threads() == most
            await compute.use_threads(0)
            assert await compute.run(torch.get_num_threads) == most
            with pytest.raises(PlanError, match="1000 threads"):
                await compute.use_threads(1000)
    finally:
        torch.set_num_threads(before)


def test_one_cpu_of_a_host_is_timed_for_all() -> None:
    cpu = DeviceProfile("cpu", "x", 1, 1.0, host="h", cores=2)
    gpu = DeviceProfile("cuda", "x", 1, 1.0, host="h", cores=2)
    alone = DeviceProfile("cpu", "x", 1, 1.0)
    devices = {"a": cpu, "b": cpu, "c": gpu, "d": gpu, "e": alone, "f": alone}
    assert whom_to_ask(devices) == {"a": ["a", "b"], "c": ["c"], "d": ["d"], "e": ["e"], "f": ["f"]}
