"""A device in a process of its own trains what it trains in the peer's; whatever ends the process, the peer lends it again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
import structlog
import torch
from torch import nn

from meshcee.config import Limits, Timeouts
from meshcee.eager import plain
from meshcee.errors import MeshceeError, PlanError, ProtocolError, StaleTermError
from meshcee.events import Event
from meshcee.figures.profile import DeviceProfile
from peers.device.graphs import Graphs
from peers.device.worker.packets import Confinement, sealed
from peers.measure import block_profiler
from peers.node.agent import Agent
from peers.node.device_process import DeviceProcess, confine, process
from peers.node.device_process.child import Child
from peers.node.device_process.messages import (
    FROM_DEVICE,
    MOST_FIGURES,
    TO_DEVICE,
    Accept,
    Answer,
    Bandwidth,
    Begin,
    Begun,
    Check,
    Crossed,
    Drop,
    Leave,
    Ping,
    Pong,
    Ready,
    Said,
    Speaks,
    State,
    first,
)
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.state import fetch
from peers.transport import StreamClosed
from peers.transport.bridge import GIVES, TAKES, Channel, Passing, pair
from peers.transport.bridge.channel import Failed, Open, Opened
from peers.transport.memory import MemoryNetwork
from peers.wire.weights import DIGEST_BYTES
from tests.peers.member.test_training import make_job
from tests.peers.owner.test_recovery import FAST
from tests.peers.transport.harness import nowhere
from tests.rig.mesh_fixture import grouped, train

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0  # for what takes seconds on a machine with nothing else to do
PROFILE = DeviceProfile("cpu", "known", 1 << 30, 1e9)
USUAL = Timeouts()
BARE = Confinement((), (), ())


@asynccontextmanager
async def processes(
    network: MemoryNetwork, count: int, timeouts: Timeouts = USUAL, **more: Any
) -> AsyncIterator[list[DeviceProcess]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(DeviceProcess("cpu", Graphs(Limits()))) for _ in range(count)]
        for j, one in enumerate(found):
            transport = await stack.enter_async_context(network.transport(f"p{j}"))
            await begin(one, transport, timeouts, **more)
        yield found


def begun_on(device: str, threads: int = 1) -> Begin:
    return Begin("p0", device, threads, None, "", False, PROFILE, False, b"", Limits(), USUAL)


async def begin(device: DeviceProcess, transport: Any, timeouts: Timeouts = USUAL, **more: Any) -> DeviceProfile:
    asked: dict[str, Any] = {"accept": lambda owner, term: None, "addresses": nowhere, **more}
    return await device.begin(transport, timeouts=timeouts, memory_bytes=1 << 30, **asked)


async def test_a_job_is_trained_as_in_one_process() -> None:
    inside = await train(make_job(), 2, 4)
    outside = await train(make_job(), 2, 4, here=processes)
    assert outside.losses == inside.losses
    assert outside.state.keys() == inside.state.keys()
    assert all(torch.equal(tensor, inside.state[name]) for name, tensor in outside.state.items())


@pytest.mark.slow
async def test_a_group_of_processes_sums_over_connections_of_its_own_where_they_consent() -> None:
    """They keep the network and nothing else: what a process can still do is told, and that is no surprise here."""
    job = make_job(model=nn.Sequential(nn.Embedding(23, 16), nn.Tanh(), nn.Linear(16, 23)), direct_sums=True)
    plan = {"adapt": lambda plan: grouped(plan, ((2, 4), (6,)))}
    with structlog.testing.capture_logs() as lines:
        found = await train(job, 2, 6, here=partial(processes, direct_sums=True), **plan)  # type: ignore[arg-type]
    inside = await train(job, 2, 6, **plan)  # type: ignore[arg-type]
    assert found.losses == inside.losses
    assert all(torch.equal(tensor, inside.state[name]) for name, tensor in found.state.items())
    confined = [line for line in lines if line["event"] == Event.DEVICE_CONFINED]
    assert len(confined) == 3
    if not any("without" in line for line in confined):
        assert {line["confined_by"] for line in confined} == {", ".join([*confine.GUARDS, "memory", "seccomp"])}
    assert not any("which_can_still" in line for line in confined)


async def test_nobody_reaches_a_process_that_has_ended() -> None:
    near, far = pair()
    channel = Channel(near, (*FROM_DEVICE, *TAKES))
    async with MemoryNetwork().transport("p0") as transport:
        how = {"serves": {}, "opens": {}, "addresses": nowhere, "limits": Limits(), "timeouts": USUAL}
        passing = Passing(transport, channel, **how)  # type: ignore[arg-type]
        far.close()
        channel.close()
        with pytest.raises(StreamClosed):
            await passing.dial("inputs")


@asynccontextmanager
async def passed(opens: Mapping[str, int] = process.OPENS) -> AsyncIterator[tuple[asyncio.Task[None], Channel]]:
    """The peer's side as it runs, and the end of the channel that a process has."""
    near, far = pair()
    network = MemoryNetwork()
    here, there = Channel(near, TAKES), Channel(far, GIVES)
    async with network.transport("p0") as transport, network.transport("p1") as other:
        other.serve("stage", lambda stream: asyncio.sleep(WAIT_S))
        passing = Passing(transport, here, serves={}, opens=opens, addresses=nowhere, limits=Limits(), timeouts=USUAL)
        running = asyncio.create_task(passing.run())
        yield running, there
        running.cancel()
        await asyncio.wait([running])
    here.close()
    there.close()


async def test_a_stream_that_is_to_be_opened_twice_at_once_is_against_the_protocol() -> None:
    async with passed() as (running, there):
        for _ in range(2):
            there.post(Open(-1, "p1", "stage"))
        with pytest.raises(ExceptionGroup) as failed:
            await running
    assert failed.group_contains(ProtocolError, match="one twice")


async def test_a_stream_for_which_there_are_no_sockets_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with passed() as (running, there):
        with monkeypatch.context() as full:
            full.setattr("socket.socketpair", none)
            there.post(Open(-1, "p1", "stage"))
            told, _ = await there.receive()
        assert isinstance(told, Failed)
        assert "Too many open files" in told.text
        there.post(Open(-1, "p1", "stage"))
        told, handle = await there.receive()
        assert isinstance(told, Opened)
        os.close(handle)
        assert not running.done()


@pytest.mark.slow
async def test_a_process_signs_the_steps_of_an_audit_with_a_key_that_speaks_for_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner computes all of them again, and doubts nobody. The peer's own key is not there."""
    judged, judge = list[Any](), Agent.judge

    async def note(self: Agent, *case: Any) -> Any:
        judged.append(case)
        return await judge(self, *case)

    monkeypatch.setattr(Agent, "judge", note)
    monkeypatch.setattr("peers.node.in_process.Compute", lambda device, pace: DeviceProcess(device, Graphs(Limits())))
    job = make_job(audit=1.0)
    async with InProcess(JoinOptions(), timeouts=FAST) as here:
        for name in ("p0", "p1"):
            await here.start(name)
        mesh = await here.own("owner", None)
        losses = [report.loss async for report in mesh.train(job, stages=2)]
        assert mesh.result.liars == []
        assert mesh.result.plan is not None
    assert losses == plain(job, job.steps, mesh.result.plan.micro_batch)[0]
    assert len(judged) == 2 * job.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "silent_s", "how"),
    [
        (signal.SIGKILL, 10.0, "was ended by SIGKILL"),
        (signal.SIGSEGV, 10.0, "was ended by SIGSEGV"),
        (signal.SIGSTOP, 60.0, r"did not answer for [12]\.\d s, and was ended by SIGKILL"),
    ],
)
async def test_the_owner_hears_how_a_process_has_ended_and_the_next_one_trains(
    number: signal.Signals, silent_s: float, how: str
) -> None:
    network = MemoryNetwork()
    async with processes(network, 1, replace(Timeouts(), silent_s=silent_s)) as found:

        @asynccontextmanager
        async def here(_: MemoryNetwork, count: int) -> AsyncIterator[list[Any]]:
            yield found

        [device] = found
        pid = device.child.pid
        assert not device.is_busy
        with pytest.raises(MeshceeError, match=rf"failed in step \d+: the process of its device {how}"):
            await train(
                make_job(steps=500), 1, 6, network=network, here=here, after_step=(2, lambda: os.kill(pid, number))
            )
        assert device.is_busy
        await asyncio.wait_for(device.wait_until_unneeded(), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while device.is_busy:
                device.busy_changed.clear()
                await device.busy_changed.wait()
        assert device.child.pid != pid
        again = await train(make_job(name="again"), 1, 6, network=network, here=here)
    assert again.losses == (await train(make_job(), 1, 6)).losses


async def test_a_process_has_no_network_no_rights_and_no_files_before_its_first_job() -> None:
    for attempt in confine.POSSIBLE.values():
        attempt()  # here it can be done, or the process would say nothing by failing
    async with MemoryNetwork().transport("p0") as transport, DeviceProcess("cpu", Graphs(Limits())) as device:
        with structlog.testing.capture_logs() as lines:
            await begin(device, transport, host="this one")
        place = Path(f"/proc/{device.child.pid}")
        network = os.readlink(place / "ns/net")
        threads = [dict(rows(thread / "status")) for thread in (place / "task").iterdir()]
    [line] = lines
    if "without" in line:
        pytest.skip(f"this kernel refuses guards: {line['without']}")
    assert line["confined_by"].split(", ") == [*confine.GUARDS, "memory", "seccomp"]
    assert "which_can_still" not in line
    assert network != os.readlink("/proc/self/ns/net")
    assert len(threads) > 1
    confined = {(thread["CapEff"], thread["NoNewPrivs"], thread["Seccomp"]) for thread in threads}
    assert confined == {("0000000000000000", "1", "2")}


async def test_while_it_trains_a_process_opens_and_reaches_nothing(tmp_path: Path) -> None:
    """Of what it asks the kernel for, `strace` tells: no file is opened, no socket made, no process started."""
    if (strace := shutil.which("strace")) is None:
        pytest.skip("strace is not installed here; that each of these fails is tried by the process itself")
    network, written = MemoryNetwork(), tmp_path / "calls"
    asked = "trace=open,openat,openat2,socket,connect,bind,execve,fork,vfork,clone,io_uring_setup"
    async with processes(network, 1) as found:

        @asynccontextmanager
        async def here(_: MemoryNetwork, count: int) -> AsyncIterator[list[Any]]:
            yield found

        watcher = await asyncio.create_subprocess_exec(
            *(strace, "-f", "-qq", "-o", str(written), "-e", asked, "-p", str(found[0].child.pid)),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            status = Path(f"/proc/{found[0].child.pid}/status")
            async with asyncio.timeout(WAIT_S):
                while watcher.returncode is None and dict(rows(status))["TracerPid"] == "0":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            if watcher.returncode is not None:
                assert watcher.stderr is not None
                pytest.skip(f"strace may not watch here: {(await watcher.stderr.read()).decode().strip()}")
            trained = await train(make_job(), 1, 4, network=network, here=here)
        finally:
            with contextlib.suppress(ProcessLookupError):
                watcher.terminate()
            await watcher.wait()
    assert len(trained.losses) == make_job().steps
    calls = [line.split(maxsplit=1)[1] for line in written.read_text().splitlines()]
    done = [call for call in calls if " = -1 " not in call and "CLONE_THREAD" not in call]
    assert not [call for call in done if not call.startswith(("+++", "---"))]


async def test_memory_beyond_what_is_lent_is_refused_to_the_process_and_not_taken_from_the_machine() -> None:
    """In a process of our own, as this limit does not come back."""
    script = """
import torch
from peers.node.device_process.confine import SLACK, SLACK_BYTES, limit_to
lent = 1 << 30
limit_to(lent)
fits = torch.ones(lent // 4)
try:
    torch.ones(int(SLACK * lent + SLACK_BYTES) // 4)
except RuntimeError as error:
    print("refused", "memory" in str(error))
"""
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    said, _ = await asyncio.wait_for(ran.communicate(), WAIT_S)
    assert said.decode().split() == ["refused", "True"]


def test_it_may_read_packages_and_nothing_that_lies_beside_them() -> None:
    found = confine.readable()
    assert {str(ROOT / "meshcee"), str(ROOT / "peers"), sys.prefix} <= set(found)
    of_the_machine = {sys.prefix, sys.base_prefix, *confine.FOLDERS}
    assert not any(ROOT.is_relative_to(path) for path in set(found) - of_the_machine)


def rows(path: Path) -> list[tuple[str, str]]:
    return [(name, value.strip()) for name, _, value in (row.partition(":") for row in path.read_text().splitlines())]


@pytest.mark.slow
async def test_the_process_of_a_gpu_gives_up_what_its_driver_can_spare() -> None:
    script = """
from peers.node.device_process import confine
from peers.node.device_process.messages import Begin
from meshcee.config import Limits, Timeouts
begin = Begin("p0", "cuda:0", 1, None, "", False, None, False, b"", Limits(), Timeouts())
before = confine.confine(begin)
after = confine.confine_fully(begin, before, 1 << 30)
print(*before.got, sep=", ")
print(after.missing[-1])
print("reach the network" in after.possible)
"""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), stdout=asyncio.subprocess.PIPE, env={**os.environ, **variables}
    )
    said, _ = await asyncio.wait_for(ran.communicate(), WAIT_S)
    got, missing, reaches = said.decode().splitlines()
    assert got.split(", ") == [name for name in confine.GUARDS if name != "landlock"]
    assert (missing, reaches) == (*confine.OF_A_GPU, "False")


async def test_what_a_process_cannot_give_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert confine.confine(begun_on("mps")).missing == ("everything: only on a CPU or a CUDA device, and this is mps",)
    found = Confinement(("one thread",), ("namespaces: no",), ("reach the network",))
    with structlog.testing.capture_logs() as lines:
        async with faked(monkeypatch, confinement=found):
            pass
    assert (lines[0]["log_level"], lines[0]["without"]) == ("warning", "namespaces: no")
    assert (lines[0]["confined_by"], lines[0]["which_can_still"]) == ("one thread", "reach the network")


async def test_a_process_that_does_not_start_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.device.this_host.START", "raise SystemExit('no room\\x1b here')  # not {}")
    async with MemoryNetwork().transport("p0") as transport, DeviceProcess("cpu", Graphs(Limits())) as device:
        with pytest.raises(PlanError, match=r"device ended with status 1: no room\? here"):
            await begin(device, transport)


ORPHAN = """
import asyncio, time
from meshcee.config import Limits
from peers.device.graphs import Graphs
from peers.measure import block_profiler
from peers.state import fetch
from peers.wire.weights import DIGEST_BYTES
from peers.node.device_process import DeviceProcess

async def main():
    async with DeviceProcess("cpu", Graphs(Limits())) as device:
        print(device.child.pid, flush=True)
        time.sleep(60)

asyncio.run(main())
"""


def environment_of(pid: int) -> set[str]:
    """The names in it. A program that has just taken a process's place has none for a moment."""
    began_s = time.monotonic()
    while not (found := Path(f"/proc/{pid}/environ").read_bytes()):
        assert time.monotonic() - began_s < WAIT_S
        time.sleep(0.01)
    return {entry.split(b"=")[0].decode() for entry in found.split(b"\0")}


def test_no_process_outlives_a_peer_that_is_killed_and_none_knows_its_token() -> None:
    command, env = [sys.executable, "-c", ORPHAN], {**os.environ, "MESHCEE_JOIN": "a token"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=env) as peer:
        assert peer.stdout is not None
        pid = next(int(line) for line in peer.stdout if line.strip().isdigit())
        device = os.pidfd_open(pid)
        names = environment_of(pid)
        peer.kill()
    try:
        assert select.select([device], [], [], WAIT_S)[0]
    finally:
        os.close(device)
    assert "PATH" in names
    assert not {name for name in names if name.startswith("MESHCEE_") and name != "MESHCEE_LOG"}


# -- the peer's side, with a process that says what a test wants ---------------------------------------------------------


@dataclass
class FakeChild:
    """As `Child`; `there` is the other end of its channel, `number` that one's descriptor."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    silent_for: int = 0
    written: str = ""
    why: str = ""
    number: int = -1
    computes: ClassVar[bool] = False
    made: ClassVar[asyncio.Queue[FakeChild]]

    def __post_init__(self) -> None:
        self.made.put_nowait(self)
        near, far = pair()
        self.number = far.fileno()
        self.channel, self.there = Channel(near, (*FROM_DEVICE, *TAKES)), Channel(far, (*TO_DEVICE, *GIVES))

    def had_s(self) -> float:
        """It computes all the time, or does nothing."""
        return time.monotonic() if self.computes else 0.0

    def kill(self, why: str = "") -> None:
        self.why = self.why or why
        self.there.close()

    async def end(self) -> str:
        self.there.close()
        self.channel.close()
        return self.why

    async def said(self, kind: type[Any]) -> Any:
        """The next message of this kind."""
        async with asyncio.timeout(WAIT_S):
            while type(message := (await self.there.receive())[0]) is not kind:
                pass
        return message


@asynccontextmanager
async def faked(
    monkeypatch: pytest.MonkeyPatch, confinement: Confinement = BARE, **more: Any
) -> AsyncIterator[tuple[DeviceProcess, FakeChild]]:
    monkeypatch.setattr(process, "Child", FakeChild)
    monkeypatch.setattr(process, "ASK_S", 0.01)
    FakeChild.made = asyncio.Queue()
    async with MemoryNetwork().transport("p0") as transport, DeviceProcess("cpu", Graphs(Limits())) as device:
        child = await FakeChild.made.get()
        beginning = asyncio.create_task(begin(device, transport, **more))
        asked = await child.said(Begin)
        assert (asked.peer, asked.device, asked.threads, asked.known) == ("p0", "cpu", torch.get_num_threads(), None)
        child.there.post(Ready(PROFILE, confinement))
        assert await beginning == PROFILE
        yield device, child


async def test_a_process_knows_what_the_mesh_does_of_links_and_is_told_when_that_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {f"p{i}": 1e6 for i in range(MOST_FIGURES + 5)}
    told: list[Any] = []
    more = {"bandwidths": lambda: known, "begun": lambda: lambda *figures: told.append(figures)}
    async with faked(monkeypatch, **more) as (_, child):
        assert (await child.said(Bandwidth)).bytes_per_s == first(known)
        known["p1"] = 5e5
        assert (await child.said(Bandwidth)).bytes_per_s["p1"] == 5e5
        child.there.post(Begun())
        child.there.post(Crossed({"p1": 2.0}, {"p1": 1.0}))
        for _ in range(3):
            child.there.post(Pong())
            await child.said(Ping)
    assert told == [({"p1": 2.0}, {"p1": 1.0})]


@pytest.mark.parametrize(
    ("says", "computes", "silent_s", "why"),
    [
        (Said("info", "x" * 2001, {}), False, 60.0, "broke the protocol"),
        (None, True, 0.1, "did not answer"),  # in all this time, whatever it does
        (None, False, 60.0, "did not answer"),  # and does nothing else either
    ],
)
async def test_who_talks_nonsense_or_is_silent_is_ended_and_the_next_one_promises_the_same(
    monkeypatch: pytest.MonkeyPatch, says: Any, computes: bool, silent_s: float, why: str
) -> None:
    monkeypatch.setattr(process, "STILL_S", 0.05)
    monkeypatch.setattr(FakeChild, "computes", computes)
    timeouts = replace(Timeouts(), silent_s=silent_s)
    async with faked(monkeypatch, timeouts=timeouts) as (device, child):
        if says is not None:
            child.there.post(says)
        device.leave()
        after = await asyncio.wait_for(FakeChild.made.get(), WAIT_S)
        assert why in child.why
        assert (await after.said(Begin)).known == PROFILE
        assert await after.said(Leave)
        assert device.is_busy
        after.there.post(Ready(PROFILE, BARE))
        await after.said(Ping)
        assert not device.is_busy


FLOOD = """
import socket, sys, time
end, began_s = socket.socket(fileno=int(sys.argv[1])), time.monotonic()
end.setblocking(True)
while time.monotonic() - began_s < 3:
    end.send(bytes.fromhex(sys.argv[2]))
"""


@pytest.mark.parametrize("says", [Pong(), Crossed({f"{i:0128}": 1.0 for i in range(90)}, {})], ids=["short", "long"])
async def test_a_process_that_never_stops_talking_leaves_its_peer_the_loop_and_is_ended(
    monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    monkeypatch.setattr("peers.transport.bridge.channel.MOST_A_SECOND", 512)
    said = msgpack.packb([type(says).__name__, asdict(says)]).hex()
    async with faked(monkeypatch) as (_, child):
        command = [sys.executable, "-S", "-c", FLOOD, str(child.number), said]
        how = {"pass_fds": [child.number], "stderr": subprocess.DEVNULL}
        flood = await asyncio.create_subprocess_exec(*command, **how)  # type: ignore[arg-type]
        while FakeChild.made.empty():
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            assert time.monotonic() - began_s < 2
        assert "more than 512 messages a second" in child.why
    await asyncio.wait_for(flood.wait(), WAIT_S)


async def test_each_process_has_a_key_of_its_own_and_another_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, before = [b"1"], list[bytes]()

    def speaks(key: bytes) -> bytes:
        before.append(key)
        return keys[-1]

    async with faked(monkeypatch, speaks=speaks) as (_, child):
        keys.append(b"2")
        assert (await child.said(Speaks)).key == b"2"
        child.there.post(Said("info", "x" * 2001, {}))
        after = await asyncio.wait_for(FakeChild.made.get(), WAIT_S)
        assert (await after.said(Begin)).speaks == b"2"
    assert [key for key in before if not key] == [b"", b""]
    assert b"1" in before


async def test_what_the_peer_itself_fails_on_ends_the_process_and_not_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faked(monkeypatch, begun=lambda: {}["no such figures"]) as (_, child):
        child.there.post(Begun())
        after = await asyncio.wait_for(FakeChild.made.get(), WAIT_S)
        assert "KeyError('no such figures')" in child.why
        assert (await after.said(Begin)).known == PROFILE


async def test_graphs_are_checked_by_the_peer_and_no_more_than_an_offer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faked(monkeypatch) as (_, child):
        child.there.post(Check(7, (3,)), sealed([b"bad"]))
        answer = await child.said(Answer)
        assert (answer.number, answer.kind) == (7, "GraphError")
        assert "graph" in answer.wrong
        child.there.post(Check(8, (3,)))
        with pytest.raises(ConnectionError):
            await child.said(Answer)
    assert "none came" in child.why
    async with faked(monkeypatch) as (_, child):
        child.there.post(Check(7, (3 * Limits().graph_bytes + 1,)), sealed([b"bad"]))
        with pytest.raises(ConnectionError):
            await child.said(Answer)
    assert "more graphs" in child.why


async def test_an_owners_term_is_the_peers_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(owner: str, term: Any) -> None:
        if term.counter < 5:
            raise StaleTermError(f"{owner} is late")

    async with faked(monkeypatch, accept=accept) as (_, child):
        for counter, wrong in ((4, ("p7 is late", "StaleTermError")), (5, ())):
            child.there.post(Accept(counter, "p7", (counter, "p7")))
            assert await child.said(Answer) == Answer(counter, *wrong)


async def test_it_is_busy_with_a_job_and_idle_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faked(monkeypatch) as (device, child):
        child.there.post(State(busy=True))
        device.busy_changed.clear()
        await device.busy_changed.wait()
        assert device.is_busy
        dropping = asyncio.create_task(device.drop())
        await child.said(Drop)
        assert not dropping.done()
        child.there.post(State(busy=False))
        await dropping
        assert not device.is_busy


async def test_it_leaves_once_nobody_reads_what_its_process_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faked(monkeypatch) as (device, child):
        device.leave()
        leaving = asyncio.create_task(device.wait_until_unneeded())
        await child.said(Leave)
        assert not leaving.done()
        child.there.post(State(busy=False))
        await leaving


async def test_it_ends_while_graphs_are_being_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checking = asyncio.Event()

    async def read(self: Graphs, graphs: Any) -> Any:
        checking.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Graphs, "read", read)
    async with asyncio.timeout(WAIT_S):
        async with faked(monkeypatch) as (_, child):
            child.there.post(Check(7, (3,)), sealed([b"bad"]))
            await checking.wait()


async def test_a_process_pins_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp does that with a call that it may not make, and ends the process in its first job."""
    passed: dict[str, str] = {}

    def launch(program: str, far: Any, env: dict[str, str]) -> None:
        far.close()
        passed.update(env)
        raise OSError("not now")

    monkeypatch.setattr("peers.node.device_process.child.launch", launch)
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "true")
    with pytest.raises(OSError, match="not now"):
        Child()
    assert not {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY"} & passed.keys()
    assert passed["OMP_WAIT_POLICY"] == "true"


def test_the_first_limits_are_those_that_the_device_sets_itself() -> None:
    """They stand in the peer's process as numbers: what they follow from imports torch."""
    assert process.SERVES["copies"] == fetch.MOST * DIGEST_BYTES
    assert process.SERVES["profile"] == block_profiler.REQUEST_BYTES
