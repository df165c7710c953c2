"""Tens of real peers on one machine: how they join, what they weigh, what they say while idle, how they miss one, and a job.

`python -m benchmarks.crowd [--peers 16 48] [--settle 600]`, or `python -m benchmarks.scale --real 16 48`, prints JSON. Each
peer is `meshcee peer` in a process of its own with its own p2pd and DHT node, on loopback. Peers are copies of one process that
has imported torch (tests/mesh/warm.py), or one machine would time its own imports; `cold` is the memory of one that was started
as users start peers. What each peer knows is what its `--metrics` page says. All peers of a figure share the machine's cores,
so seconds are those of a machine that does the work of so many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import crowd_job
from benchmarks.measure import machine
from meshcee.eager import plain
from tests.mesh.harness import environment, meshcee
from tests.mesh.warm import started

__all__ = ["main", "measure"]

STAGES = 12
START_S, AGREE_S, END_S = 120.0, 180.0, 30.0
POLL_S = 0.25
SETTLE_S, IDLE_S = 600.0, 60.0
JOB_S = 300.0


class Crowd:
    """Peers by name. Lifetime is `with`; leaving ends them all."""

    def __init__(self, home: Path, count: int) -> None:
        self.home = home
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.token = ""
        self._ports = dict(zip((f"peer-{i}" for i in range(count)), _free_ports(count)))
        self._pool = ThreadPoolExecutor(16)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:  # asked twice, it does not wait for its job to go on without it
                process.send_signal(signal.SIGINT)
                process.terminate()
        end_s = time.monotonic() + END_S
        for process in self.processes.values():
            try:
                process.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)
        self._pool.shutdown()

    def start(self, name: str, *, warm: bool = True) -> None:
        command = ["peer", "--json", "--name", name, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1"]
        command += ["--metrics", f"127.0.0.1:{self._ports[name]}"]
        env = environment(self.home, MESHCEE_CONFIG=os.devnull)
        if self.token:
            env["MESHCEE_JOIN"] = self.token
        with self._output(name).open("w") as out, (self.home / f"{name}.log").open("w") as log:
            where: Any = {"env": env, "stdout": out, "stderr": log, "start_new_session": True}
            self.processes[name] = started(command, warm=warm, **where)

    def found(self, name: str) -> str | None:
        """The token that this peer has printed, once it runs."""
        for line in self._output(name).read_text().splitlines():
            if '"token"' in line:
                return str(json.loads(line)["token"])
        if self.processes[name].poll() is not None:
            raise RuntimeError(f"{name} has ended: {(self.home / f'{name}.log').read_text()[-1000:]}")
        return None

    def _output(self, name: str) -> Path:
        return self.home / f"{name}.out"

    def wait_for(self, names: Collection[str]) -> dict[str, float]:
        """Seconds from now until each of these runs; TimeoutError if one does not start in time."""
        began_s, took_s = time.monotonic(), dict[str, float]()
        while len(took_s) < len(names):
            if time.monotonic() - began_s > START_S:
                raise TimeoutError(f"{sorted(set(names) - took_s.keys())} have not started within {START_S:.0f} s")
            time.sleep(0.05)
            now_s = time.monotonic() - began_s
            took_s |= {name: now_s for name in names if name not in took_s and self.found(name) is not None}
        return took_s

    @property
    def living(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.poll() is None]

    def pages(self) -> dict[str, dict[str, float]]:
        """What the page of each living peer says, by the names of the figures; {} where it does not answer."""
        names = self.living
        return dict(zip(names, self._pool.map(lambda name: _page(self._ports[name]), names)))

    def until(
        self, holds: Callable[[Mapping[str, Mapping[str, float]]], bool], limit_s: float = AGREE_S
    ) -> float | None:
        """Seconds until it holds of all pages; None if it does not within the limit."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s:
            if holds(self.pages()):
                return round(time.monotonic() - began_s, 2)
            time.sleep(POLL_S)
        return None

    def family(self, name: str) -> list[psutil.Process]:
        """The process of a peer, then those that it has started."""
        process = psutil.Process(self.processes[name].pid)
        return [process, *process.children(recursive=True)]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _page(port: int) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    return {name: float(value) for name, value in (li.rsplit(" ", 1) for li in lines if li and not li.startswith("#"))}


def peers_seen(page: Mapping[str, float]) -> int:
    return int(sum(value for name, value in page.items() if name.startswith("meshcee_peers{")))


def all_know(count: int) -> Callable[[Mapping[str, Mapping[str, float]]], bool]:
    """That so many peers lend a device."""
    return lambda pages: all(peers_seen(page) == count for page in pages.values())


def agreed(pages: Mapping[str, Mapping[str, float]]) -> bool:
    """All see the one coordinator there is."""
    terms = {page.get("meshcee_coordinator_term", 0.0) for page in pages.values()}
    leading = sum(page.get("meshcee_coordinating", 0.0) for page in pages.values())
    return len(terms) == 1 and terms != {0.0} and leading == 1.0


def join(crowd: Crowd, count: int) -> dict[str, Any]:
    """One starts, then all others at once."""
    first, *others = [f"peer-{i}" for i in range(count)]
    crowd.start(first)
    first_s = crowd.wait_for([first])[first]
    crowd.token = crowd.found(first) or ""
    began_s = time.monotonic()
    for name in others:
        crowd.start(name)
    started_s = time.monotonic() - began_s
    took_s = crowd.wait_for(others)
    last_s = time.monotonic() - began_s
    known_s, agreed_s = crowd.until(all_know(count)), crowd.until(agreed)
    return {
        "first_s": round(first_s, 2),
        "joined_s": {"median": round(started_s + statistics.median(took_s.values()), 2), "last": round(last_s, 2)},
        "all_known_s": None if known_s is None else round(last_s + known_s, 2),
        "agreed_s": None if agreed_s is None or known_s is None else round(last_s + known_s + agreed_s, 2),
    }


def weigh(crowd: Crowd) -> dict[str, Any]:
    """Medians over peers: what is resident, and a share of what copies have in common; MiB."""
    parts: dict[str, list[float]] = {}
    for name in crowd.living:
        for process in crowd.family(name):
            kind = (
                "p2pd" if process.name() == "p2pd" else "peer" if process.pid == crowd.processes[name].pid else "others"
            )
            memory = process.memory_full_info()
            parts.setdefault(f"{kind}_resident", []).append(memory.rss / (1 << 20))
            parts.setdefault(f"{kind}_share", []).append(memory.pss / (1 << 20))
    return {kind: round(statistics.median(sizes), 1) for kind, sizes in sorted(parts.items())}


def idle(crowd: Crowd, settle_s: float) -> dict[str, Any]:
    """Of a mesh in which nothing has happened for so long: bytes and seconds of a core, for each peer and second."""
    time.sleep(settle_s)
    count = len(crowd.living)
    bytes_before, cpu_before, began_s = _loopback_bytes(), _cpu_s(crowd), time.monotonic()
    time.sleep(IDLE_S)
    took_s = time.monotonic() - began_s
    cpu = {kind: seconds - cpu_before.get(kind, 0.0) for kind, seconds in _cpu_s(crowd).items()}
    return {
        "bytes_a_second": round((_loopback_bytes() - bytes_before) / took_s / count),
        "core_share": {kind: round(seconds / took_s / count, 4) for kind, seconds in cpu.items()},
    }


def _loopback_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def _cpu_s(crowd: Crowd) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in crowd.living:
        for process in crowd.family(name):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                kind = "p2pd" if process.name() == "p2pd" else "peer"
                found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


def lose(crowd: Crowd) -> dict[str, Any]:
    """A peer dies by kill -9, and then the coordinator: seconds until all others know, and agree on another one."""
    leads = _coordinator(crowd)
    victim = next(name for name in reversed(crowd.living) if name != leads)
    found: dict[str, Any] = {}
    for what, name in (("peer", victim), ("coordinator", leads)):
        term = max(page.get("meshcee_coordinator_term", 0.0) for page in crowd.pages().values())
        crowd.processes[name].kill()
        crowd.processes[name].wait(END_S)
        if what == "coordinator":
            found["agreed_s"] = crowd.until(
                lambda pages, old=term: (
                    agreed(pages) and all(page["meshcee_coordinator_term"] > old for page in pages.values())
                )
            )
        found[f"{what}_missed_s"] = crowd.until(all_know(len(crowd.living)))
    return found


def _coordinator(crowd: Crowd) -> str:
    return next(name for name, page in crowd.pages().items() if page.get("meshcee_coordinating") == 1.0)


def train(crowd: Crowd) -> dict[str, Any]:
    """A job over some of them; its losses are held against the plain loop's."""
    began_s = time.monotonic()
    job = str(Path(crowd_job.__file__))
    flags = ("--join", crowd.token, "--stages", str(min(STAGES, len(crowd.living))), "--json")
    done = meshcee("train", job, *flags, home=crowd.home / "owner", timeout_s=JOB_S)
    if done.code:
        return {"exit": done.code, "said": done.err[-500:]}
    reports = [line["report"] for line in done.lines if "report" in line]
    plans = [line["plan"] for line in done.lines if "plan" in line]
    expected = plain(crowd_job.job, micro_batch=crowd_job.job.micro_batch_size).losses
    return {
        "whole_s": round(time.monotonic() - began_s, 1),
        "step_s": round(statistics.median(report["step_s"] for report in reports[1:]), 3),
        "plans": len(plans),
        "losses": "equal" if [report["loss"] for report in reports] == expected else "UNEQUAL",
    }


def one(count: int, settle_s: float) -> dict[str, Any]:
    """All figures of a mesh of so many peers."""
    with tempfile.TemporaryDirectory(prefix="meshcee-crowd-") as folder, Crowd(Path(folder), count) as crowd:
        found: dict[str, Any] = {"peers": count, "join": join(crowd, count)}
        for what, look in (
            ("weight_mib", weigh),
            ("idle", partial(idle, settle_s=settle_s)),
            ("job", train),
            ("death", lose),
        ):
            found[what] = look(crowd)
        print(json.dumps(found), file=sys.stderr)
    return found


def cold() -> dict[str, Any]:
    """What one weighs that shares nothing."""
    with tempfile.TemporaryDirectory(prefix="meshcee-crowd-") as folder, Crowd(Path(folder), 1) as crowd:
        crowd.start("peer-0", warm=False)
        took_s = crowd.wait_for(["peer-0"])["peer-0"]
        time.sleep(5.0)  # it looks at its devices
        return {"start_s": round(took_s, 2), "weight_mib": weigh(crowd)}


def measure(counts: Sequence[int], settle_s: float = SETTLE_S) -> dict[str, Any]:
    """The figures of a mesh of each size, one after the other."""
    return {"machine": machine(), "cold": cold(), "meshes": [one(count, settle_s) for count in counts]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds until a mesh counts as idle")
    args = parser.parse_args()
    print(json.dumps(measure(args.peers, args.settle), indent=1))


if __name__ == "__main__":
    main()
