"""A container has less memory and fewer cores than its machine, and a peer in it lends of what the container has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from meshcee.figures import DeviceProfile
from meshcee.figures.hosts import threads_of
from meshcee.files import limits
from peers.device import Compute, cores, host_id, measure_device, take_threads
from peers.node.device_process.confine import readable

GIB = 1 << 30
Groups = Callable[[dict[str, str]], None]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Writes files of the control groups around this process, on a machine with 60 of 64 GiB free."""
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "AROUND", tmp_path / "around")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    (tmp_path / "around").write_text("4:memory:/old/one\n3:cpu,cpuacct:/old/one\n0::/new/one\n")

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


OF_MEMORY = {
    "new": {"new/one/memory.max": f"{6 * GIB}\n", "new/one/memory.current": "0\n"},
    "new, of a group around": {
        "new/memory.max": f"{8 * GIB}\n",
        "new/memory.current": f"{3 * GIB}\n",
        "new/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
        "new/one/memory.max": "max\n",
    },
    "old": {"memory/memory.limit_in_bytes": f"{7 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"},
}


@pytest.mark.parametrize("files", OF_MEMORY.values(), ids=OF_MEMORY)
async def test_a_peer_lends_half_of_what_its_container_has_left(files: dict[str, str], groups: Groups) -> None:
    groups(files)
    assert limits.free_bytes() == 6 * GIB
    async with Compute() as compute:
        assert 0 < (await measure_device(compute)).memory_bytes <= 3 * GIB


async def test_a_full_container_lends_something_all_the_same(groups: Groups) -> None:
    groups({"new/memory.max": f"{GIB}\n", "new/memory.current": f"{GIB}\n"})
    async with Compute() as compute:
        assert (await measure_device(compute)).memory_bytes == 1


def test_a_machine_without_limits_has_all_that_is_free(groups: Groups) -> None:
    for files in ({}, {"memory/memory.limit_in_bytes": f"{1 << 62}\n", "memory/memory.usage_in_bytes": "0\n"}):
        groups(files)
        assert limits.free_bytes() == 60 * GIB
        assert limits.narrowest() == (None, None)


def test_a_device_in_a_process_of_its_own_may_read_the_limits(groups: Groups) -> None:
    groups(OF_MEMORY["new"])
    assert [path.partition("groups/")[2] for path in readable() if "groups/" in path] == [*OF_MEMORY["new"]]


OF_CORES = {
    "new": {"new/one/cpu.max": "200000 100000\n"},
    "new, of a group around": {"new/cpu.max": "150000 100000\n", "new/one/cpu.max": "max 100000\n"},
    "old": {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with 64 cores, on which torch takes them all unless it is told less: what it was told."""
    told: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1] if told else 64)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return told


@pytest.mark.parametrize("files", OF_CORES.values(), ids=OF_CORES)
def test_a_quota_of_two_cores_is_two_cores(files: dict[str, str], groups: Groups, large: list[int]) -> None:
    assert cores() == 64
    groups(files)
    assert cores() == 2
    assert not take_threads(None)
    assert large == [2]


def test_a_small_container_on_a_large_host_leaves_no_ordinary_machine_out(groups: Groups, large: list[int]) -> None:
    groups(OF_CORES["new"])
    take_threads(None)
    speed, most = 1e10, torch.get_num_threads()
    container = DeviceProfile("cpu", "x", GIB, most * speed, most, host="h", cores=cores())
    ordinary = {name: DeviceProfile("cpu", "x", GIB, 4 * speed, 4, host=name, cores=4) for name in "abcd"}
    assert threads_of({"container": container, **ordinary}) == 4


def test_a_number_of_threads_that_was_said_is_kept(
    groups: Groups, large: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups(OF_CORES["new"])
    assert take_threads(8)
    assert large == [8]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert take_threads(None)
    assert large == [8]


def test_a_container_with_its_own_cores_and_memory_shares_neither(groups: Groups) -> None:
    host = host_id(b"")
    groups(OF_CORES["new"])
    assert host_id(b"") == host  # the memory is one
    groups(OF_MEMORY["new"])
    assert host_id(b"") != host
