"""Real namespaces: TCP meets the network that was asked for, there is no way out, and nothing is left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab import Lab, Network, pair_of_hosts, why_not
from benchmarks.lab.__main__ import main, measure
from meshcee.errors import UsageError

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the WAN lab cannot run here: {REASON}")
ROOT = Path(__file__).resolve().parents[2]
PAIR = pair_of_hosts(50e6 / 8, 0.04)
# A command whose child has left its session and outlives it, as a daemon does.
DAEMON = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000'], start_new_session=True); time.sleep(1000)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(what: str, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes that carry the mark of this lab (or of any lab whose mark starts so)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"\0MESHCEE_LAB={mark}".encode() in b"\0" + environment and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


async def test_tcp_is_never_faster_than_the_link_and_never_earlier_than_the_latency() -> None:
    found = await measure(PAIR, seconds=1.0)
    assert 1e6 < found["bits_per_s"] <= 50.5e6  # how near it comes is `python -m benchmarks.lab check`
    assert found["rtt_s"] >= 0.04


async def test_inside_there_is_the_mesh_and_no_way_out() -> None:
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), 5)\n"
        "except OSError as error: print(error.strerror or error)\n"
    )
    async with Lab(PAIR) as lab, Lab(PAIR) as other:  # the same addresses twice: they do not collide
        assert lab.addresses == other.addresses == {"here": "10.77.0.1", "there": "10.77.0.2"}
        for address, answer in (
            (lab.addresses["there"], "Connection refused"),
            ("192.0.2.1", "Network is unreachable"),
        ):
            process = await lab.run("here", [sys.executable, "-c", code, address], stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            assert out.decode().strip() == answer
        lines = (await lab.stats())["lines"]
        assert lines["a>b"]["packets"] == lines["b>a"]["packets"] == 1
        assert (await other.stats())["lines"] == {}
        with pytest.raises(UsageError, match="it has here, there"):
            await lab.run("nowhere", ["true"])


async def test_leaving_ends_what_runs_inside() -> None:
    async with Lab(PAIR) as lab:
        process = await lab.run("here", [sys.executable, "-c", DAEMON])
        until("the daemon runs", lambda: len(marked(f"{os.getpid()}:")) >= 2)
    assert process.returncode == -signal.SIGTERM
    assert marked(f"{os.getpid()}:") == []


@pytest.mark.parametrize("router_too", [False, True])
def test_nothing_is_left_after_kill_9(router_too: bool) -> None:
    """Killed together with its router, a lab leaves processes without a network, which the next lab ends."""
    code = (
        "import asyncio, json, sys\n"
        "from benchmarks.lab import Lab, pair_of_hosts\n"
        "async def main():\n"
        "    async with Lab(pair_of_hosts(1e6, 0.01)) as lab:\n"
        f"        process = await lab.run('here', [sys.executable, '-c', {DAEMON!r}])\n"
        "        print(json.dumps([lab._router.pid, process.pid]), flush=True)\n"
        "        await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    lab = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert lab.stdout is not None
    with lab.stdout:
        router, inside = json.loads(lab.stdout.readline())
    until("the daemon runs", lambda: len(marked(f"{lab.pid}:")) == 2)
    if router_too:
        os.kill(router, signal.SIGSTOP)  # so that it cannot clean up before it is killed
    lab.kill()
    lab.wait(10)
    if router_too:
        os.kill(router, signal.SIGKILL)
        until("the command has ended", lambda: not alive(inside) and not alive(router))
        assert len(marked(f"{lab.pid}:")) == 1

        async def next_lab() -> None:
            async with Lab(PAIR):
                pass

        asyncio.run(next_lab())
    until("all have ended", lambda: not alive(router) and marked(f"{lab.pid}:") == [])


def test_the_command_line_runs_a_command_on_every_host() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.lab",
        "run",
        "--cluster",
        "cee-small",
        "--loss",
        "cloud:edge:0.5",
        "--",
    ]
    command += ["sh", "-c", 'echo "$LAB_HOST $LAB_ADDRESS"']
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n"))[1:3] == ["cloud-a100-40-0 10.77.0.1", "cloud-a100-40-1 10.77.0.2"]
    failing = subprocess.run([*command[:-1], "exit 7"], cwd=ROOT, timeout=60, check=False)
    assert failing.returncode == 7


def test_without_root_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = ["run", "--cluster", "cee-small", "true"]
    monkeypatch.setattr(sys, "argv", ["lab", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 8


def test_a_network_must_make_sense() -> None:
    with pytest.raises(UsageError, match="a name of its own"):
        Network((), ())
