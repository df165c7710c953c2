"""`meshcee doctor` looks at this machine: what it sees of processes, folders, ports, memberships, and what others use."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dht import Identity, MeshKey, certify
from meshcee.files.home import Home
from peers.cli.doctor import machine
from peers.node.admission import Membership


def helper(pid: int, parent: int, module: str, named: int) -> machine.Row:
    return machine.Row(pid, parent, ["python", "-P", "-c", f"from {module} import main", "/root", str(named), "9"])


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        ("", ""),
    ],
)
def test_the_driver_says_its_version_in_two_ways(line: str, version: str) -> None:
    assert machine.driver_of(line) == version


def test_a_helper_under_another_parent_is_an_orphan() -> None:
    launcher = ["python", "-I", "-S", "/x/peers/transport/p2p/launcher.py", "/tmp/meshcee-1"]
    rows = [
        machine.Row(10, 1, ["python", "-m", "meshcee", "peer", "--name", "x"]),
        machine.Row(11, 10, [*launcher, "10", "p2pd"]),
        machine.Row(12, 11, ["/y/hivemind_cli/p2pd", "-id=z"]),
        helper(13, 10, "peers.device.worker.child", 10),
        helper(14, 13, "peers.device.worker.child", 10),  # a copy of 13
        helper(15, 10, "peers.node.device_process.program", 10),
        machine.Row(16, 1, [*launcher, "99", "p2pd"]),
        machine.Row(17, 1, ["/y/hivemind_cli/p2pd"]),
        helper(18, 1, "peers.device.worker.child", 99),
        helper(19, 1, "peers.node.device_process.program", 99),
        machine.Row(20, 1, ["vim", "meshcee.md"]),
        helper(21, 10, "peers.cli.children.source", 10),
        helper(22, 21, "peers.cli.children.source", 10),  # a peer, which is a copy of 21
        helper(23, 22, "peers.cli.children.source", 10),  # and its source of graph checkers
        machine.Row(9, 1, ["python", "/x/bin/meshcee", "peer", "logs", "--follow"]),
    ]
    found = machine.processes_of(rows)
    assert {p.pid for p in found} == {*range(9, 20), 21, 22, 23}
    assert [p.what for p in found if p.pid == 9] == ["meshcee peer logs"]
    assert {p.pid for p in found if p.orphan} == {16, 17, 18, 19}
    assert found[0].what == "meshcee peer"


def test_a_folder_that_refuses_is_seen(tmp_path: Path) -> None:
    home, _ = machine.folders(Home(tmp_path / "not" / "yet"))
    assert home.problem == ""
    assert not (tmp_path / "not").exists()
    refused, _ = machine.folders(Home(Path("/proc/nowhere")))
    assert refused.problem


def test_ports_that_are_taken_are_seen(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        environment = {"MESHCEE_LISTEN": f"127.0.0.1:{port}", "MESHCEE_DIRECT_PORT": str(port)}
        found = machine.network(Home(tmp_path), environment)
        (tmp_path / "mesh.founded.json").write_text(json.dumps({"listening": {"x": f"/ip4/127.0.0.1/tcp/{port}"}}))
        again = machine.network(Home(tmp_path), {})
    assert all(found.ports.values())
    assert [bool(why) for why in again.ports.values()] == [False, True]
    assert found.binds == {"TCP": "", "UDP": ""}


def test_memberships_of_a_home_are_seen(tmp_path: Path) -> None:
    root, now = Identity.generate(), time.time()
    identities = tmp_path / "identities"
    identities.mkdir()
    for number, life_s in enumerate((3600.0, 7200.0)):
        identity = Identity.load_or_create(identities / f"{number}.key")
        certificate = certify(root, b"", root.peer_id, identity.peer_id, "own", "", now, life_s)
        place = Membership.place(identities / f"{number}.key", root.peer_id)
        Membership(root.peer_id, MeshKey(), certificate, file=place).save()
    (identities / "2.key.damaged.member").write_text("{}")
    one, damaged = machine.passes(Home(tmp_path))
    assert (one.mesh, one.role, one.problem) == (root.peer_id, "own", "")
    assert one.until == pytest.approx(now + 7200)
    assert damaged.problem


def test_what_others_use_of_this_machine_is_seen() -> None:
    busy = [sys.executable, "-c", "held = bytearray(200 << 20)\nprint(flush=True)\nwhile True: pass"]
    with subprocess.Popen(busy, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            found = machine.shared()
        finally:
            other.kill()
    assert 0 < found.busy <= found.cores
    assert 200 << 20 <= found.used < found.total
    assert found.busy > 0.05
    assert found.by_cores
    assert len(found.by_bytes) <= machine.MOST_SHOWN
