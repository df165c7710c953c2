"""Workers: they read what a peer would, they can do nothing else, and whatever happens to one is a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgpack
import psutil
import pytest
from structlog.testing import capture_logs

from meshcee.capture import capture, encode_program
from meshcee.config import Limits, Timeouts
from meshcee.errors import GraphError, PlanError, ProtocolError
from peers.device.worker import Workers
from peers.device.worker.packets import (
    ALIGNED,
    MOST_BYTES,
    Task,
    Verdict,
    length_of,
    message,
    opened,
    sealed,
    understood,
)
from tests.rig import hostile_work, zoo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")

LIMITS = replace(Limits(), check_s=0.5, check_bytes=256 << 20)
CHECKING = "peers.device.worker.checking"
HOSTILE = "tests.rig.hostile_work"
ROOT = Path(__file__).parents[3]


@contextlib.asynccontextmanager
async def workers(work: str = HOSTILE, limits: Limits = LIMITS) -> AsyncIterator[Workers]:
    """None of their processes is there afterwards."""
    before = set(psutil.Process().children(recursive=True))
    async with Workers(limits, Timeouts(), work) as found:
        await found.get_ready()
        yield found
    assert set(psutil.Process().children(recursive=True)) <= before


async def ready(found: Workers) -> int:
    """The process id of the one that waits for a task."""
    await found.get_ready()
    [source] = (child for child in psutil.Process().children() if child.cmdline()[-1] in (HOSTILE, CHECKING))
    [worker] = source.children()
    return worker.pid


async def refusal(found: Workers, *graphs: bytes) -> str:
    with pytest.raises(GraphError) as caught:
        await found.read(graphs)
    return str(caught.value)


def graph(model: str = "char_gpt") -> bytes:
    return encode_program(capture(zoo.make(model)).train)


def lying(data: bytes) -> bytes:
    """The last node declares another shape than it computes."""
    tree = msgpack.unpackb(data)
    tree[3][-1][3] = [2, "float32", [7, 7], [], False]
    packed: bytes = msgpack.packb(tree)
    return packed


@pytest.mark.slow
async def test_a_worker_reads_what_the_peer_itself_would_and_what_has_passed_asks_for_none_again() -> None:
    """What torch imports late was imported before the worker gave up files, or honest graphs were refused."""
    given = [graph(model) for model in zoo.PHASE_ONE]
    async with workers(CHECKING, Limits()) as found:
        read = await found.read(given)
        assert [encode_program(program) for program in read] == given
        spare = await ready(found)
        assert len(await found.read([given[0], given[0]])) == 2
        assert await ready(found) == spare
        assert await refusal(found, given[0], lying(given[0])) == lying_is_told_as(given[0])


def lying_is_told_as(data: bytes) -> str:
    from meshcee.capture import decode_program

    with pytest.raises(GraphError) as caught:
        decode_program(lying(data))
    return str(caught.value)


FATAL = [
    (b"crash", r"a graph of 5 bytes ended the process that checked it \(SIGSEGV\)"),
    (b"for ever", r"a graph of 8 bytes was not checked within \d s( of CPU time)?"),
    (b"without end", "a graph needs more memory to be checked than is allowed"),
]
RARER = [
    (b"abort", r"a graph of 5 bytes ended the process that checked it \(SIGABRT\)"),
    (b"end", r"a graph of 3 bytes ended the process that checked it \(status 3\)"),
    (b"asleep", "a graph of 6 bytes was not checked within 3 s"),
]


@pytest.mark.slow
@pytest.mark.parametrize("deeds", [FATAL, RARER], ids=["common", "rarer"])
async def test_whatever_ends_a_worker_is_a_refusal_and_the_next_graph_passes(deeds: list[tuple[bytes, str]]) -> None:
    data = graph()
    async with workers() as found:
        for deed, how in deeds:
            said = await refusal(found, deed)
            assert re.fullmatch(how, said), said
        assert encode_program((await found.read([data]))[0]) == data


async def test_a_worker_that_is_ready_can_open_connect_start_and_signal_nothing() -> None:
    """The worker tries each itself. Where nothing was given up, each comes about, or the test would show nothing."""
    outside = {name for name, attempt in hostile_work.ATTEMPTS.items() if hostile_work.succeeds(attempt)}
    assert outside == set(hostile_work.ATTEMPTS)
    async with workers() as found:
        await ready(found)
        assert found.confinement is not None
        if "seccomp" not in found.confinement.got:
            pytest.skip(f"this kernel does not filter system calls: {found.confinement.missing}")
        assert found.confinement.possible == ()
        assert await refusal(found, b"tell") == "possible: "


@pytest.mark.slow
async def test_what_the_kernel_refuses_is_said_and_not_fatal() -> None:
    data = graph()
    with capture_logs() as logs:
        async with workers("tests.rig.open_work") as found:
            assert encode_program((await found.read([data]))[0]) == data
    confinement = found.confinement
    assert confinement is not None
    assert {"landlock: Function not implemented", "seccomp: Function not implemented"} <= set(confinement.missing)
    assert "open files" in confinement.possible
    assert [log["log_level"] for log in logs] == ["warning"]
    assert "landlock" in logs[0]["without"]
    assert "open files" in logs[0]["which_can_still"]


@pytest.mark.slow
async def test_a_spare_that_has_died_is_replaced_and_blames_no_graph() -> None:
    data = graph()
    async with workers() as found:
        pid = await ready(found)
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([handle], [], [])
        os.close(handle)
        assert encode_program((await found.read([data]))[0]) == data


@pytest.mark.slow
async def test_a_check_that_is_given_up_while_its_worker_ends_leaves_the_next_one_alone() -> None:
    """The word of how that one ended was taken for the next one's process id."""
    data = graph()
    async with workers() as found:
        for turns in range(1, 4):
            asked = asyncio.create_task(found.read([b"asleep"]))
            await asyncio.sleep(0.3)
            for _ in range(turns):  # again and again: while it waits for its worker's end, too
                asked.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert encode_program((await found.read([data]))[0]) == data


@pytest.mark.slow
async def test_a_peer_with_many_open_files_checks_graphs_all_the_same() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1200:
        pytest.skip(f"no more than {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        async with workers() as found:
            for model in ("char_gpt", "cnn"):
                assert len(await found.read([graph(model)])) == 1
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_a_worker_that_cannot_start_is_an_error_of_this_peer_and_says_why() -> None:
    async with workers("peers.device.worker.no_such_work") as found:
        with pytest.raises(PlanError, match=r"did not start: ModuleNotFoundError: No module named .*no_such_work"):
            await found.read([b""])


FIRST = """
import asyncio, sys
import torch
from meshcee.config import Limits
from peers.device import Compute, Graphs

async def get_ready():
    async with Compute() as compute:
        await compute.get_ready()
        await Graphs(Limits()).get_ready()

asyncio.run(get_ready())
before = set(sys.modules)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
weight.grad = torch.ones(2)
optimizer.step()
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_a_peer_that_is_ready_imports_nothing_for_its_first_step() -> None:
    """torch._dynamo, which torch's optimizers import, took a newcomer 0.7 s while a run waited for its stage."""
    found = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, cwd=ROOT, check=True)
    late = [name for name in found.stdout.split() if not name.startswith("torch.profiler.")]  # those are a few lines
    assert late == []


ELSEWHERE = """
import asyncio, sys
from meshcee.config import Limits, Timeouts
from peers.device.worker import Workers
from peers.node.agent import Agent

async def main():
    async with Workers(Limits(), Timeouts()) as found:
        await found.get_ready()
        print("imported", *{"torch._dynamo", "sympy"}.intersection(sys.modules))

asyncio.run(main())
"""


@pytest.mark.slow
def test_where_other_processes_check_and_compute_a_peer_imports_neither_compiler_nor_algebra() -> None:
    """70 MB and two seconds of a processor for a peer that only forwards."""
    found = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.splitlines()[-1] == "imported"


ORPHAN = """
import asyncio
import psutil
from meshcee.config import Limits, Timeouts
from peers.device.worker import Workers

async def main():
    async with Workers(Limits(), Timeouts(), "tests.rig.hostile_work") as found:
        await found.get_ready()
        print(psutil.Process().children(recursive=True)[-1].pid, flush=True)
        await found.read([b"for ever"])

asyncio.run(main())
"""


def test_no_worker_outlives_a_peer_that_is_killed() -> None:
    """Busy as it is, it reads no socket: the kernel ends it."""
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as peer:
        assert peer.stdout is not None
        worker = os.pidfd_open(next(int(line) for line in peer.stdout if line.strip().isdigit()))
        peer.kill()
    try:
        assert select.select([worker], [], [], 20.0)[0]
    finally:
        os.close(worker)


# -- what they say to each other -----------------------------------------------------------------------------------------


def test_a_memory_comes_as_it_was_sealed_and_each_part_is_aligned() -> None:
    parts = [b"a", b"", b"b" * 65, b"c" * 64]
    handle = sealed(parts)
    try:
        views = opened(handle, [len(part) for part in parts])
        assert [bytes(view) for view in views] == parts
        assert os.fstat(handle).st_size == 4 * ALIGNED
        with pytest.raises(PermissionError):
            os.pwrite(handle, b"x", 0)
        with pytest.raises(ProtocolError, match="of 64 bytes was announced, one of 256 came"):
            opened(handle, [64])
    finally:
        os.close(handle)


def test_a_memory_that_its_sender_can_still_change_is_refused() -> None:
    handle = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(handle, ALIGNED)
        for seals in (0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
            with pytest.raises(ProtocolError, match="can still change"):
                opened(handle, [1])
    finally:
        os.close(handle)
    with open(__file__) as file, pytest.raises(ProtocolError, match="no memory to be shared"):
        opened(file.fileno(), [1])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb({"wrong": 3}),
        msgpack.packb({"wrong": "x" * 2001}),
        msgpack.packb({}),
        msgpack.packb(["no"]),
        message(Task((1,), 1, 1))[4:],
        b"\x91" * MOST_BYTES,
    ],
)
def test_what_a_worker_says_is_a_verdict_or_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        understood(body, Verdict)


def test_a_message_is_no_longer_than_it_may_be() -> None:
    assert understood(message(Verdict("it is wrong"))[4:], Verdict) == Verdict("it is wrong")
    with pytest.raises(ProtocolError, match="more than"):
        length_of((MOST_BYTES + 1).to_bytes(4, "big"))
