"""How a process group meets over streams, and how one that hangs is ended: by fakes, as there may be no GPU."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshcee.errors import ProtocolError
from peers.groups import direct_sum
from peers.groups.direct_sum import NCCL, DirectSum
from peers.groups.meeting import MOST_VALUE_BYTES, Meeting
from peers.member.service import Member
from peers.transport.base import Frame
from peers.wire import messages
from tests.peers.groups.test_groups import train_shared
from tests.rig.faults import job_of

SHARES = ((1, 3), (4,))


def test_what_one_member_sets_another_gets_and_who_waits_in_vain_is_told() -> None:
    told: list[tuple[str, bytes]] = []
    one, other = Meeting(lambda key, value: told.append((key, value)), 5.0), Meeting(lambda key, value: None, 0.05)
    one.set("id", "abc")
    assert told == [("id", b"abc")]
    other.hear(*told[0])
    assert other.get("id") == one.get("id") == b"abc"
    with pytest.raises(RuntimeError, match="nobody has told 'more'"):
        other.get("more")
    threading.Timer(0.05, one.close).start()
    with pytest.raises(RuntimeError, match="nobody has told 'more'"):
        one.wait(["more"])


@pytest.mark.parametrize(("key", "value"), [("k" * 1000, b""), ("k", bytes(MOST_VALUE_BYTES + 1)), ("k", 7)])
def test_what_others_set_is_checked(key: str, value: Any) -> None:
    with pytest.raises(ProtocolError):
        Meeting(lambda key, value: None, 1.0).hear(key, value)


@pytest.mark.parametrize("ends", ["while it meets", "after it"])
async def test_a_group_that_comes_too_late_is_ended_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Nobody waits for it any more, so nobody else would end it: it would listen for as long as it is held by chance."""
    ended: list[int] = []

    def the_epoch_ends() -> None:
        assert found.abort() is None
        gone.set()

    class Group:
        def __init__(self, *args: Any) -> None:
            if ends == "while it meets":
                loop.call_soon_threadsafe(the_epoch_ends)
                assert gone.wait(10)

        def abort(self) -> None:
            ended.append(threading.get_ident())

    Group._Options = torch.distributed.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    Group.create_device = torch.distributed.ProcessGroupGloo.create_device  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", Group)
    loop, gone, found = asyncio.get_running_loop(), threading.Event(), made(Cpu())
    if ends == "while it meets":
        with pytest.raises(RuntimeError, match="the epoch ended while its group met"):
            await asyncio.to_thread(found.connect)
    else:
        await asyncio.to_thread(found.connect)
        assert found.process_group is not None
        aborting = found.abort()
        assert aborting is not None
        await aborting
    assert found.process_group is None
    assert len(ended) == 1
    assert ended != [threading.get_ident()]


async def test_a_group_that_hangs_is_aborted_in_a_thread_before_the_owner_hears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum fails; torch's abort takes until the owner has heard, and holds up neither the event loop nor the report."""
    happened: list[str] = []
    heard, loops = threading.Event(), threading.get_ident()
    report, reduce, abort = Member.report, DirectSum.reduce, DirectSum.abort

    class Hanging:
        def allreduce(self, tensors: Any) -> Any:
            raise RuntimeError("NCCL error")

        def abort(self) -> None:
            assert threading.get_ident() != loops
            assert heard.wait(10)
            happened.append("aborted")

    def fails(self: DirectSum, *args: Any) -> None:
        if self.peer == "p1":
            self.process_group = Hanging()
        reduce(self, *args)

    def aborted(self: DirectSum) -> Any:
        if isinstance(self.process_group, Hanging):
            happened.append("abort")
        return abort(self)

    async def reported(self: Member, stream: Any, error: BaseException, at: Any) -> None:
        happened.append(f"report {self.peer_id}")
        await report(self, stream, error, at)
        if self.peer_id == "p1":  # another member may report first
            heard.set()

    monkeypatch.setattr(DirectSum, "reduce", fails)
    monkeypatch.setattr(Member, "report", reported)
    monkeypatch.setattr(DirectSum, "abort", aborted)
    with pytest.raises(Exception, match="the sum over the group broke off"):
        await train_shared(job_of(0.5, True), SHARES)
    first = [what for what in happened if what in ("abort", "report p1", "aborted")]
    assert first == ["abort", "report p1", "aborted"]


class Cpu:
    device = torch.device("cpu")


class Device:
    """A compute of a GPU, as far as sums go: `calls` are in order."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.calls: list[str] = []
        self.staging = self

    def mark(self) -> str:
        return "computed until now"

    def sum(self, made: str, call: Any, held: Any) -> None:
        self.calls.append(f"in the stream of sums, after what was {made}")
        call()
        self.calls.append("waited for that stream alone")


def made(device: Any) -> DirectSum:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    links: Any = SimpleNamespace()
    return DirectSum("a", ("a", "b"), {"w": parameter}, device, links, links, host="127.0.0.1")


def test_on_a_gpu_sums_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    one = made(device)
    monkeypatch.setattr(DirectSum, "reduce", lambda self, *args: device.calls.append("sum"))
    one.reduce_apart(one.buckets[0], [True])
    one.close()
    assert device.calls == [
        "in the stream of sums, after what was computed until now",
        "sum",
        "waited for that stream alone",
    ]


def met(monkeypatch: pytest.MonkeyPatch, *cards: str) -> DirectSum:
    """A member of two, who has heard on which GPU each computes."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=cards[0]))
    monkeypatch.setattr(Meeting, "set", lambda self, key, value: None)  # the others hear it
    one = made(Device())
    for rank, card in enumerate(cards):
        one.take("b", Frame(messages.MEET, {"key": f"gpu/{rank}", "value": card.encode()}))
    return one


def test_members_on_one_gpu_sum_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses a GPU that comes twice."""

    class Made:
        _Options = SimpleNamespace
        create_device = staticmethod(lambda hostname: None)

        def __init__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(direct_sum, "distributed", SimpleNamespace(ProcessGroupGloo=Made))
    one = met(monkeypatch, "GPU-1", "GPU-1")
    one.connect()
    assert isinstance(one.process_group, Made)
    one.close()


def test_nccl_may_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are read when a group is made."""
    seen: dict[str, str | None] = {}

    class Made:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.update({name: direct_sum.os.environ.get(name) for name in (*NCCL, "NCCL_SOCKET_IFNAME")})
            seen["rank"] = f"{rank} of {size}"

    for name in (*NCCL, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "to be restored")
    monkeypatch.setattr(direct_sum, "distributed", SimpleNamespace(ProcessGroupNCCL=Made))
    one = met(monkeypatch, "GPU-1", "GPU-2")
    one.connect()
    one.close()
    assert seen.pop("rank") == "0 of 2"
    assert (seen.pop("NCCL_SOCKET_IFNAME") or "").startswith("=lo")
    assert seen == NCCL
    assert NCCL["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
