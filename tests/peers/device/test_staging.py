"""What leaves a GPU and comes to it. Without one its streams are played by queues whose work is done when somebody waits for it."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from meshcee.errors import PlanError
from meshcee.stage import tensors
from peers.device.compute import Compute
from peers.device.staging import Locked, Staging
from peers.groups.buckets import FinishedBuckets
from peers.groups.collective import GroupSum
from peers.member.coding import Coding
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.neighbour_link import Links
from peers.wire.spans import Spans

NO_GPU = "torch finds no CUDA device here; on a machine with one these copy beside kernels that run"


@dataclass
class Line:
    """A stream: what is asked of it happens in order, and not before somebody waits for it."""

    device: Any = None
    queue: deque[Callable[[], Any]] = field(default_factory=deque)

    def wait_event(self, mark: Mark) -> None:
        self.queue.append(mark.synchronize)


@dataclass
class Mark:
    """An event."""

    blocking: bool = False
    passed: bool = True

    def record(self, line: Line) -> None:
        self.line, self.passed = line, False
        line.queue.append(self._pass)

    def _pass(self) -> None:
        self.passed = True

    def synchronize(self) -> None:
        while not self.passed:
            self.line.queue.popleft()()


@dataclass
class Played:
    """What stands for the GPU: the stream that computes, and what was done with memory."""

    computing: Line
    current: Line
    copies: int = 0
    recorded: list[Line] = field(default_factory=list)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Played:
    computing = Line()
    played = Played(computing, computing)

    @contextlib.contextmanager
    def on(line: Line) -> Iterator[None]:
        before, played.current = played.current, line
        try:
            yield
        finally:
            played.current = before

    def copied(room: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        played.copies += 1
        played.current.queue.append(lambda: room.copy_(flat))
        return room

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "Stream", Line)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, line: played.recorded.append(line))
    monkeypatch.setattr(Locked, "allocate", lambda locked, tensor: torch.empty_like(tensor))
    monkeypatch.setattr(Staging, "copied", staticmethod(copied))
    return played


def coding_on(compute: Compute, codec: str = "none") -> Coding:
    """With a device that is staged, whatever it is."""
    if compute.staging is None:
        compute.staging = Staging(compute.device)
    both = {messages.F: codec, messages.B: codec}
    return Coding(both, both, compute, seed=0, stage=0, limit_bytes=1 << 24)


async def test_a_frame_leaves_when_its_values_are_made_and_copied_and_waits_for_nothing_else(gpu: Played) -> None:
    value = torch.zeros(40, 3)
    async with Compute() as compute:
        coding = coding_on(compute)
        gpu.computing.queue.append(lambda: value.fill_(7))
        promise = coding.frame(messages.F, {"micro": 0}, [value, None], [True], 0)
        gpu.computing.queue.append(lambda: value.fill_(9))  # another micro-batch
        frame = await promise  # type: ignore[misc]
    assert torch.frombuffer(frame.payloads[0], dtype=torch.float32).tolist() == [7.0] * 120
    assert len(gpu.computing.queue) == 1  # nobody has waited for it
    assert gpu.copies == 1


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
async def test_what_crosses_is_what_crosses_from_a_cpu(gpu: Played, codec: str) -> None:
    generator = torch.get_rng_state()
    values = [torch.randn(30, 64), torch.randn(8, 64).t(), 5, None, torch.arange(6), generator]
    both = {messages.F: codec}
    async with Compute() as compute, Compute() as plain:
        staged = coding_on(compute, codec)
        unstaged = Coding(both, both, plain, seed=0, stage=0, limit_bytes=1 << 24)
        made = [c.frame(messages.F, {"micro": 3}, values, [True] * 2, 0) for c in (staged, unstaged)]
        one, other = [frame if isinstance(frame, Frame) else await frame for frame in made]
        assert one.header == other.header
        assert [bytes(p) for p in one.payloads] == [bytes(p) for p in other.payloads]
        gpu.copies = 0
        received = await staged.values(other)
        if codec == "none":  # what is decoded is made by kernels that this stand-in does not put off
            for got, want in zip(received, values, strict=True):
                assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
            assert received[1].stride() == values[1].stride()  # type: ignore[union-attr]
    assert gpu.copies == 3  # the state of a generator stays on the host
    assert gpu.recorded == [gpu.computing] * 4
    assert not gpu.current.queue


async def test_norms_and_inputs_stay_on_the_host(gpu: Played) -> None:
    meta, payloads = tensors.pack([torch.ones(3)])
    async with Compute() as compute:
        coding = coding_on(compute)
        for kind, copies in ((messages.NORMS, 0), (messages.INPUT, 0), (messages.SHARED, 1), (messages.TOTAL, 2)):
            await coding.values(Frame(kind, {"tensors": meta}, payloads))
            assert gpu.copies == copies


async def test_gradients_are_summed_by_way_of_the_host(gpu: Played) -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(5, 3)) for name in ("a", "b", "c")}
    for name, number in (("a", 2.0), ("c", 3.0)):
        parameters[name].grad = torch.full((5, 3), number)
    async with Compute() as compute:
        compute.staging = Staging(compute.device)
        alone = GroupSum("p0", ("p0",), parameters, compute, Links((1, 1)), Spans(), bucket_bytes=120)
        whole = FinishedBuckets(alone.buckets, alone.parameters)
        whole.all()
        await alone.run(0, whole)
    assert [p.grad is None or set(p.grad.flatten().tolist()) for p in parameters.values()] == [{2.0}, True, {3.0}]
    assert gpu.copies == 4  # two buckets, there and back
    assert gpu.recorded == [gpu.computing] * 2


def not_now() -> None:
    raise AssertionError("somebody has waited for this")


def test_a_sum_begins_when_its_gradients_are_made_and_waits_for_nothing_else(gpu: Played) -> None:
    staging, value, lines = Staging(torch.device("cpu")), torch.zeros(3), list[Line]()
    gpu.computing.queue.append(lambda: value.fill_(2))
    made = staging.mark()
    for line in (gpu.computing, staging.leaving, staging.arriving):
        line.queue.append(not_now)  # type: ignore[attr-defined]

    def add_up() -> str:
        lines.append(gpu.current)
        gpu.current.queue.append(lambda: value.add_(1))
        return "added up"

    assert staging.sum(made, add_up) == "added up"
    assert value.tolist() == [3.0] * 3  # all of it was done when `sum` returned
    assert lines[0] not in (gpu.computing, staging.leaving, staging.arriving)
    assert gpu.current is gpu.computing
    assert not lines[0].queue


def test_what_leaves_and_arrives_passes_by_a_sum_that_waits_for_others(gpu: Played) -> None:
    staging, passed = Staging(torch.device("cpu")), list[Any]()

    def hangs() -> None:
        gpu.current.queue.append(not_now)
        passed.append(staging.leave(staging.mark(), lambda: "left"))
        passed.extend(staging.arrive(lambda: ["arrived"]))
        gpu.current.queue.remove(not_now)  # the others have come

    staging.sum(staging.mark(), hangs)
    assert passed == ["left", "arrived"]


def test_a_sum_that_fails_lets_nothing_go_before_its_stream_is_done(gpu: Played) -> None:
    staging, done = Staging(torch.device("cpu")), list[str]()

    def fails() -> None:
        gpu.current.queue.append(lambda: done.append("read"))
        raise RuntimeError("NCCL error")

    with pytest.raises(RuntimeError, match="NCCL error"):
        staging.sum(staging.mark(), fails)
    assert done == ["read"]


def test_memory_is_not_let_go_before_its_copy_is_done_when_a_call_fails(gpu: Played) -> None:
    locked = Locked(1 << 10)
    staging = Staging(torch.device("cpu"), locked)
    value = torch.ones(64)

    def fails() -> Any:
        room = staging.to_host(value)
        rooms.append(room.data_ptr())
        assert locked.left_bytes == 768
        raise ValueError("spoilt")

    rooms: list[int] = []
    for call in (lambda: staging.leave(staging.mark(), fails), lambda: staging.arrive(fails)):
        with pytest.raises(ValueError, match="spoilt"):
            call()
        gc.collect()
        assert locked.left_bytes == 1 << 10
    assert not staging.leaving.queue  # type: ignore[attr-defined]
    assert not staging.arriving.queue  # type: ignore[attr-defined]


def test_locked_memory_is_bounded_and_comes_back_with_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(
        Locked, "allocate", lambda locked, tensor: taken.append(tensor.nbytes) or torch.empty_like(tensor)
    )
    locked = Locked(100)
    view = locked.like(torch.zeros(60, dtype=torch.uint8)).numpy().data  # a frame's payload: only this is held
    gc.collect()
    assert locked.left_bytes == 40
    assert locked.like(torch.zeros(60, dtype=torch.uint8)).shape == (60,)  # ordinary memory
    assert taken == [60]
    del view
    gc.collect()
    assert locked.left_bytes == 100


def test_locked_memory_that_cannot_be_had_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(locked: Locked, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Locked, "allocate", none_left)
    locked = Locked(100)
    with pytest.raises(RuntimeError, match="out of memory"):
        locked.like(torch.zeros(60, dtype=torch.uint8))
    assert locked.left_bytes == 100


async def test_a_call_is_over_when_its_kernels_are(gpu: Played) -> None:
    value = torch.zeros(1)
    async with Compute() as compute:
        compute.staging = Staging(compute.device)
        await compute.run(lambda: gpu.computing.queue.append(lambda: value.fill_(1)))
    assert value.item() == 1


async def test_a_kernel_that_never_adds_alike_is_refused_in_words(gpu: Played) -> None:
    def fails(text: str) -> None:
        raise RuntimeError(text)

    async with Compute() as compute:
        compute.staging = Staging(compute.device)
        with pytest.raises(PlanError, match=r"^nll_loss2d_cuda adds in another order .*--device cpu"):
            await compute.run(
                fails, "nll_loss2d_cuda does not have a deterministic implementation, but you set 'torch..."
            )
        with pytest.raises(RuntimeError, match="out of memory"):
            await compute.run(fails, "CUDA out of memory")


async def test_a_gpu_computes_repeatably_as_long_as_it_is_lent(gpu: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_exact() -> tuple[bool, bool, str | None]:
        fills: Any = torch.utils.deterministic
        exact = torch.are_deterministic_algorithms_enabled()
        return exact, fills.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = is_exact()
    async with Compute() as _:
        assert is_exact() == before == (False, True, None)
        first, second = Compute("cuda:0"), Compute("cuda:0")
        async with first:
            await second.__aenter__()
            assert is_exact() == (True, False, ":4096:8")
        assert is_exact()[0]  # the other is still at work
        await second.__aexit__(None, None, None)
        assert is_exact()[:2] == before[:2]


# -- where there is a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
async def test_copies_pass_by_kernels_that_run() -> None:
    async with Compute("cuda:0") as compute:
        coding, computing = coding_on(compute), torch.cuda.default_stream("cuda:0")
        for turn in range(2):  # the first takes memory, which waits for the device
            value = torch.randn(1 << 22, device="cuda:0")
            torch.cuda.synchronize()
            promise = coding.frame(messages.F, {"micro": 0}, [value, None], [True], 0)
            torch.cuda._sleep(2_000_000_000)  # about a second
            frame = await promise  # type: ignore[misc]
            (back, _) = await coding.values(frame)
            assert turn == 0 or not computing.query()
            assert torch.equal(back, value)
            del back, frame


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
async def test_memory_that_goes_around_keeps_its_bits(codec: str) -> None:
    """Many frames of other sizes, each let go while kernels that read it still wait."""
    async with Compute("cuda:0") as compute:
        coding = coding_on(compute, codec)
        off = []
        for turn in range(200):
            value = torch.randn(1000 + 64 * turn, device="cuda:0")
            frame = await coding.frame(messages.F, {"micro": turn}, [value, None], [True], 0)  # type: ignore[misc]
            (back, _) = await coding.values(frame)
            torch.cuda._sleep(1_000_000)
            off.append((back - value).norm() / value.norm())
            del back, frame
        worst = float(torch.stack(off).max())
    assert worst <= {"none": 0.0, "bf16": 2.0**-8, "int8": 0.032, "int4": 0.51}[codec]
