"""A container has less memory and fewer cores than its machine, and a peer in it lends of what the container has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from meshcee.files import limits
from peers.device import Compute, measure_device
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
