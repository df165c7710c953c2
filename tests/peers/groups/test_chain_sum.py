"""The sum over a chain of pipelines: autograd's own sum, however the micro-batches are divided, and nothing from strangers.

The idea: what autograd accumulates in one process is the definition; a division of the micro-batches among members changes no bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcee.errors import ProtocolError
from meshcee.stage import tensors
from peers.groups import ChainSum, FinishedBuckets
from peers.groups.buckets import buckets_of
from peers.groups.chain_sum import Numbers, folded
from peers.transport import Frame
from peers.wire import messages

SHAPES = {"a": (3,), "b": (2, 4), "c": (2, 2, 3, 3)}


def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    found["c"] = found["c"].to(memory_format=torch.channels_last)
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As a backward pass does."""
    (parameter * gradient).sum().backward()  # type: ignore[no-untyped-call]


@given(
    st.lists(st.lists(st.sets(st.sampled_from(sorted(SHAPES))), max_size=4), min_size=2, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_any_division_of_the_micro_batches_is_the_sum_of_one_process(
    runs: Sequence[Sequence[set[str]]], dtype: torch.dtype, seed: int
) -> None:
    """`runs`: of each member, for each of its micro-batches which parameters have a gradient in it."""
    chance = torch.Generator().manual_seed(seed)
    alone = parameters(dtype)
    buckets = buckets_of(alone, 1, 1 << 20)
    sums: list[Numbers | None] = [None] * len(buckets)
    for k, run in enumerate(runs):
        mine, terms = parameters(dtype), {name: list[torch.Tensor]() for name in SHAPES}
        for present in run:
            for name in SHAPES:
                if k and (grad := mine[name].grad) is not None:
                    terms[name].append(grad)
                    mine[name].grad = None
            for name in sorted(present):
                gradient = torch.randn(SHAPES[name], generator=chance).to(dtype) * 10.0 ** float(seed % 7 - 3)
                gradient[..., 0] = -0.0
                for one in (alone, mine):
                    accumulate(one[name], gradient)
        sums = [folded(mine, terms, bucket, sums[i]) for i, bucket in enumerate(buckets)]
    for bucket, numbers in zip(buckets, sums):
        assert numbers is not None
        expected, _ = folded(alone, {}, bucket, None)
        assert numbers[0] == expected
        start = 0
        for name, is_there in zip(bucket.names, numbers[0]):
            count = alone[name].numel()
            own = numbers[1][start : start + count]
            start += count
            if is_there:
                grad = alone[name].grad
                assert grad is not None
                assert torch.equal(own, grad.reshape(-1))
                assert torch.equal(torch.signbit(own), torch.signbit(grad.reshape(-1)))


class _Aside:
    """A device's thread, at once."""

    staging = None

    def run_aside(self, call: Any, *args: Any) -> asyncio.Future[Any]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(call(*args))
        return done


class _Spans:
    def add(self, *_: Any) -> None:
        """Nobody reads them."""


class _Joined:
    """Links that bring what one member sends to the other's `take`."""

    def __init__(self) -> None:
        self.members: dict[str, ChainSum] = {}

    def of(self, sender: str) -> Any:
        async def send(peer: str, kind: str, values: Sequence[Any], **header: Any) -> None:
            meta, payloads = tensors.pack(values)
            self.members[peer].take(sender, Frame(kind, {"tensors": meta, **header}, payloads))

        return type("Links", (), {"send": staticmethod(send)})()


def chained(names: Sequence[str], own: dict[str, dict[str, torch.Tensor]], **options: Any) -> dict[str, ChainSum]:
    joined = _Joined()
    for name in names:
        of: Any = name, names, own[name], _Aside(), joined.of(name), _Spans()
        joined.members[name] = ChainSum(*of, terms={}, **options)
    return joined.members


async def test_all_members_end_with_the_sum_of_all_in_order() -> None:
    names = ("p0", "p1", "p2")
    own = {name: parameters(torch.float32) for name in names}
    values = {"p0": 1e8, "p1": 1.0, "p2": -1e8}  # another order has another sum
    for name in names:
        for parameter in own[name].values():
            accumulate(parameter, torch.full_like(parameter, values[name]))
    members = chained(names, own, bucket_bytes=40)
    wholes = {name: FinishedBuckets(member.buckets, member.parameters) for name, member in members.items()}
    for whole in wholes.values():
        whole.all()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(members[name].run(0, wholes[name]))
    expected = torch.tensor(1e8) + torch.tensor(1.0) - torch.tensor(1e8)
    for name in names:
        for parameter in own[name].values():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full_like(parameter, float(expected)))
            assert parameter.grad.stride() == parameter.stride()


async def test_a_member_names_only_whom_it_waits_for() -> None:
    """Else two that wait for a third one seemed to wait for each other, and lost their link when the third one was slow."""
    names = ("p0", "p1", "p2")
    own = {name: parameters(torch.float32) for name in names}
    members = chained(names, own)
    wholes = {name: FinishedBuckets(member.buckets, member.parameters) for name, member in members.items()}

    def missing() -> list[list[str]]:
        return [list(members[name].missing) for name in names]

    assert missing() == [[], [], []]
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(members[name].run(0, wholes[name]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        wholes["p1"].all()
        await asyncio.sleep(0.01)
        assert missing() == [["p1"], ["p0"], ["p1"]]  # p0 computes, so it does not wait, whatever it would wait for
        wholes["p0"].all()
        await asyncio.sleep(0.01)
        assert missing() == [["p1"], ["p2"], []]  # p2 has all that it needs
        wholes["p2"].all()
    assert missing() == [[], [], []]


@pytest.mark.parametrize(
    ("sender", "kind", "change"),
    [
        ("p2", messages.PART, {}),  # sums come from there
        ("p0", messages.SUM, {}),
        ("p9", messages.PART, {}),
        ("p0", messages.PART, {"micro": 99}),
        ("p0", messages.PART, {"round": 7}),
        ("p0", messages.PART, {"present": [True]}),
    ],
)
async def test_what_no_neighbour_of_the_chain_would_send_is_refused(
    sender: str, kind: str, change: dict[str, Any]
) -> None:
    names = ("p0", "p1", "p2")
    member = chained(names, {name: parameters(torch.float32) for name in names})["p1"]
    (bucket,) = member.buckets
    meta, payloads = tensors.pack([torch.zeros(bucket.bounds[-1])])
    header = {"tensors": meta, "round": 0, "micro": 0, "present": [True] * 3, **change}
    with pytest.raises(ProtocolError):
        member.take(sender, Frame(kind, header, payloads))
    small, bytes_ = tensors.pack([torch.zeros(2)])
    with pytest.raises(ProtocolError):
        member.take("p0", Frame(messages.PART, {**header, "tensors": small, "round": 0, "micro": 0}, bytes_))
