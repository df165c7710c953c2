"""Real peers for tests: `meshcee` commands as processes of their own, on loopback, each with a private home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.mesh.warm import started

START_S = 60.0


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MESHCEE_") or k == "MESHCEE_WHEEL_TEST"}
    if "MESHCEE_WHEEL_TEST" not in os.environ:
        kept["MESHCEE_DEVICE_PROCESS"] = "0"  # three seconds of a core for each peer; tests of it say --device-process
    return {**kept, "MESHCEE_HOME": str(home), "OMP_NUM_THREADS": "1", **more}


def meshcee(*arguments: str, home: Path, timeout_s: float = 120, cwd: Path | None = None) -> Done:
    """Run a command to its end."""
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(list(arguments), env=environment(home), cwd=cwd, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return Done(process.returncode, out, err)


@dataclass
class Peers:
    """Running peers by name. `token` admits more."""

    home: Path
    token: str = ""
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def start(
        self, name: str, *flags: str, entry: Sequence[str] = (), said: Sequence[str] = ("--threads", "1")
    ) -> dict[str, Any]:
        """Start one peer, joining those that run; returns what it printed. `entry` may name a script that sabotages it.

        said  of its threads; (): nothing, as in a user's terminal
        """
        command = ["peer", "--json", "--name", name, "--listen", "127.0.0.1:0", *said, "--device", "cpu", *flags]
        if self.token and "--join" not in flags:
            command += ["--join", self.token]
        env = {k: v for k, v in environment(self.home).items() if said or k != "OMP_NUM_THREADS"}
        with (self.home / f"{name}.log").open("w") as log:
            where: Any = {"env": env, "stdout": subprocess.PIPE, "stderr": log, "start_new_session": True}
            if entry:
                process = subprocess.Popen([sys.executable, *entry, *command], text=True, **where)
            else:
                process = started(command, **where)
        self.processes[name] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        if '"token"' not in line:
            raise AssertionError(f"{name} did not start:\n{self.log(name)[-3000:]}")
        event: dict[str, Any] = json.loads(line)
        self.ids[name], self.tokens[name] = event["peer"], event["token"]
        self.token = self.token or event["token"]
        return event

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(10)

    def ended(self, name: str) -> int:
        """The exit code of a peer that ends by itself."""
        return self.processes[name].wait(30)

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def peers(home: Path, count: int, *flags: str) -> Iterator[Peers]:
    """`count` peers named peer-0 ...; ended when the block is left."""
    home.mkdir(parents=True, exist_ok=True)
    found = Peers(home)
    try:
        for i in range(count):
            found.start(f"peer-{i}", *flags)
        yield found
    finally:
        found.close()


@contextmanager
def training(mesh: Peers, job: Path, *flags: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """`meshcee train JOB` on the mesh, once its first step is reported; killed if the block leaves it running."""
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ["train", str(job), "--join", mesh.token, "--json", *flags]
    process = started(command, env=environment(mesh.home), cwd=cwd, **pipes)
    try:
        assert process.stdout is not None
        if not any('"report"' in line for line in process.stdout):
            raise AssertionError(f"it trained no step: {process.communicate()[1]}")
        yield process
    finally:
        process.kill()
        process.communicate()


def p2pds_of(home: Path) -> list[psutil.Process]:
    """p2pd processes that serve peers of this home, found by their environment."""
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == "p2pd" and process.environ().get("MESHCEE_HOME") == str(home):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(what: str, condition: Any, timeout_s: float) -> None:
    """Poll until the condition holds; AssertionError naming what did not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)
