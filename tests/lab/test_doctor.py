"""`meshcee doctor` run for real where something is broken: it names each fault, with what mends it.

Twelve faults, and where they are planted. Of the network: wrong clock, other torch, blocked direct port, port closed from outside,
no name server, low MTU, NAT. Of the machine: full disk, no memory, spinning threads. Of its processes: orphans, another mesh.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import disks
from benchmarks.lab import Host, Lab, Link, Network, why_not
from peers.cli.doctor import machine

ROOT = Path(__file__).parents[2]
REASON, NO_DISKS = why_not(), disks.why_not()
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
FAST, SLOW, ONE_WAY_S = 12.5e6, 0.5e6, 0.005  # bytes per second
SMALL_MTU, TENSORS = 1200, 4002
OTHER_TORCH = "2.12.1+cpu" if not torch.__version__.startswith("2.12.1") else "2.13.0+cpu"
LINE_S, DOCTOR_S = 180.0, 500.0  # on a busy machine


def network(bytes_per_s: float = FAST) -> Network:
    """A peer on the open network, whose firewall lets nobody in at its port for tensors, and two behind a router each."""
    hosts = (
        Host("cloud", "net", closed=(TENSORS,)),
        Host("anna", "lan", behind="home"),
        Host("ben", "net", behind="office"),
    )
    links = [Link(a, b, ONE_WAY_S, bytes_per_s) for a in ("net", "lan") for b in ("net", "lan")]
    return Network(hosts, tuple(links))


def command(faults: dict[str, object], *words: str) -> list[str]:
    return [sys.executable, "-m", "tests.lab.planted", json.dumps(faults), *words]


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHCEE_")}
    return {**kept, "MESHCEE_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def findings(out: bytes) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    return [line["finding"] for line in lines if "finding" in line]


def faults(found: list[dict[str, Any]]) -> str:
    return "\n".join(f"{one['level']} {one['what']}: {one['detail']}" for one in found if one["level"] != "ok")


def named(found: list[dict[str, Any]], level: str, what: str, *words: str) -> bool:
    """Whether a fault is told: with a mend, and these words in its line."""
    return any(
        one["level"] == level and one["what"] == what and one["mend"] and all(word in one["detail"] for word in words)
        for one in found
    )


async def until_told(lab: Lab, folder: Path, token: str) -> None:
    """Until the record of anna's peer tells of its link to the cloud."""
    deadline_s = time.monotonic() + LINE_S
    words = ("status", "--join", token, "--json")
    while True:
        pipe = asyncio.subprocess.PIPE
        looking = await lab.run("anna", command({}, *words), env=environment(folder / "anna"), cwd=ROOT, stdout=pipe)
        out, _ = await looking.communicate()
        seen = json.loads(out or b"{}")
        names = {peer["peer"]: peer["name"] for peer in seen.get("peers", ())}
        if any((names.get(one["from"]), names.get(one["to"])) == ("anna", "cloud") for one in seen.get("links", ())):
            return
        assert time.monotonic() < deadline_s, seen


class Mesh:
    """Peers in the lab; `token` admits more."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder, self.token = lab, folder, ""

    async def start(self, host: str, faults: dict[str, object]) -> None:
        (self.folder / host).mkdir()
        words = ["peer", "--json", "--name", host, "--listen", "0.0.0.0:4001", "--threads", "1", "--device", "cpu"]
        words += ["--direct-port", str(TENSORS)]
        words += ["--join", self.token] if self.token else []
        with (self.folder / f"{host}.log").open("wb") as log:
            where: dict[str, Any] = {"env": environment(self.folder / host), "cwd": ROOT, "stderr": log}
            peer = await self.lab.run(host, command(faults, *words), stdout=asyncio.subprocess.PIPE, **where)
        assert peer.stdout is not None
        async with asyncio.timeout(LINE_S):
            line = await peer.stdout.readline()
        assert b'"token"' in line, (self.folder / f"{host}.log").read_text()[-3000:]
        self.token = self.token or json.loads(line)["token"]

    async def doctor(self, faults: dict[str, object]) -> list[dict[str, Any]]:
        words = command(faults, "doctor", "--json", "--join", self.token)
        where: dict[str, Any] = {"env": environment(self.folder / "anna"), "cwd": ROOT}
        looking = await self.lab.run("anna", words, stdout=asyncio.subprocess.PIPE, **where)
        async with asyncio.timeout(DOCTOR_S):
            out, _ = await looking.communicate()
        return findings(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(REASON is not None, reason=f"the WAN lab cannot run here: {REASON}")
@pytest.mark.skipif(len(CORES) < 2, reason="peers of one machine are told apart by their cores, and it has one only")
async def test_faults_of_a_network_are_found_and_named(tmp_path: Path) -> None:
    here: dict[str, object] = {"cores": CORES}
    async with Lab(network(), mtu=SMALL_MTU) as lab:
        mesh = Mesh(lab, tmp_path)
        await mesh.start("cloud", {"cores": CORES[:1], "torch": OTHER_TORCH})
        await mesh.start("ben", {"cores": CORES[1:2], "kernel": "softmax"})
        await mesh.start("anna", {**here, "probes_once": True})
        await until_told(lab, tmp_path, mesh.token)
        for pair in (("lan", "net"), ("net", "lan")):
            await lab.set(Link(*pair, ONE_WAY_S, SLOW))
        found = await mesh.doctor({**here, "host": "nobody-knows-it"})
        late = await mesh.doctor({**here, "clock_s": -600.0})
    assert named(found, "warn", "direct path", "ben", "does not answer"), faults(found)
    assert named(found, "warn", "link to cloud", "it sags"), faults(found)
    assert named(found, "warn", "MTU", str(SMALL_MTU), "cloud"), faults(found)
    assert named(found, "warn", "host name", "nobody-knows-it"), faults(found)
    assert named(found, "warn", "versions", OTHER_TORCH.partition("+")[0], "cloud"), faults(found)
    assert named(found, "bad", "kernels", "softmax", "ben"), faults(found)
    assert any(one["what"] == "NAT" and "behind a router: cloud sees" in one["detail"] for one in found), faults(found)
    assert named(found, "warn", "direct port", "cloud", "libp2p"), faults(found)
    assert named(found, "warn", "ports from outside", "port 4001 of anna", "10.77.255.1", "cloud dialled it in vain")
    assert named(late, "bad", "clock", "behind the mesh"), faults(late)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(NO_DISKS is not None, reason=f"no disks of our own here: {NO_DISKS}")
def test_faults_of_a_machine_are_found_and_named(tmp_path: Path) -> None:
    home = tmp_path / "disk"
    with disks.SmallDisk(home) as small:
        small.refuse("disk full")
        words = command({"memory": 7 << 28}, "doctor", "--json")
        env = environment(home, OMP_WAIT_POLICY="active")
        done = subprocess.run(words, capture_output=True, env=env, cwd=ROOT, check=False, timeout=DOCTOR_S)
    found = findings(done.stdout)
    assert named(found, "bad", "home", "No space left"), (faults(found), done.stderr)
    assert named(found, "bad", "memory", "within a limit of"), faults(found)
    assert named(found, "warn", "waiting threads", "OMP_WAIT_POLICY"), faults(found)
    assert named(found, "warn", "threads", "OMP_NUM_THREADS"), faults(found)
    assert done.returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_among_processes_are_found_and_named(tmp_path: Path) -> None:
    """Two meshes on one machine, a helper whose peer is gone, and a port that somebody has taken."""
    started: list[subprocess.Popen[str]] = []
    try:
        for home in ("a", "b"):
            words = ["peer", "--json", "--no-lan", "--listen", "127.0.0.1:0", "--name", home]
            env = environment(tmp_path / home)
            typed = [sys.executable, "-m", "meshcee", *words]
            started.append(subprocess.Popen(typed, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        tokens = []
        for out in (peer.stdout for peer in started):
            assert out is not None
            tokens.append(json.loads(next(line for line in out if '"token"' in line))["token"])
        hivemind = find_spec("hivemind")  # whose import warns of itself
        assert hivemind is not None
        binary = Path(str(hivemind.origin)).parent / "hivemind_cli" / "p2pd"
        orphan = [str(binary), f"-listen=/unix{tmp_path}/sock", "-hostAddrs=/ip4/127.0.0.1/tcp/0", "-idleTimeout=600s"]
        started.append(subprocess.Popen(orphan, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True))
        with socket.create_server(("0.0.0.0", 0)) as taken:
            port = taken.getsockname()[1]
            env = environment(tmp_path / "a", MESHCEE_LISTEN=f"0.0.0.0:{port}")
            words = command({}, "doctor", "--json", "--join", tokens[0])
            done = subprocess.run(words, capture_output=True, env=env, cwd=ROOT, check=False, timeout=DOCTOR_S)
        found = findings(done.stdout)
        assert named(found, "bad", "port", f"0.0.0.0:{port}", "in use"), (faults(found), done.stderr)
        assert named(found, "warn", "orphans", f"p2pd {started[-1].pid}"), faults(found)
        assert named(found, "warn", "other mesh", "and 1 of this mesh"), faults(found)
        (mend,) = (one["mend"] for one in found if one["what"] == "other mesh")
        assert {str(peer.pid) for peer in started[:2]} <= set(re.findall(r"\d+", mend)) or len(running()) > 8
        assert done.returncode == 3
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=120)


def running() -> list[int]:
    found = machine.processes()
    return [one.pid for one in found if one.what == "meshcee peer"] if isinstance(found, tuple) else []
