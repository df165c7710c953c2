"""Stages on groups: members share the samples of every micro-batch, and train what one process would have trained.

The idea: shares reorder sums, so equal means 1e-9 in double precision and 1e-5 for losses in single; but members of one
group must end with the same bits, which the owner checks by hash each time it collects.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.eager import plain
from meshcee.errors import PeerLostError, PlanError, ProtocolError
from meshcee.job import Job
from meshcee.stage.runner import StageRunner
from peers.device.compute import Compute
from peers.groups.buckets import Bucket, FinishedBuckets
from peers.groups.direct_sum import DirectSum, interface_of
from peers.wire.neighbour_link import Links
from peers.wire.offer import host_of
from peers.wire.spans import Spans
from tests.peers.member.test_training import make_job
from tests.rig import zoo
from tests.rig.mesh_fixture import Trained, grouped, train
from tests.rig.reference import reference

MICRO = 6


def double(name: str, **options: Any) -> Job:
    """A model of the zoo in double precision: two micro-batches of six samples a step, with dropout and clipping."""
    settings: dict[str, Any] = {"batch_size": 2 * MICRO, "micro_batch_size": MICRO, "steps": 3}
    job = zoo.make(name, **settings | options)
    assert isinstance(job.model, nn.Module)
    job.model.double()
    return job


async def train_shared(job: Job, shares: Sequence[Sequence[int]], **options: Any) -> Trained:
    micro = sum(shares[0])
    return await train(job, len(shares), micro, adapt=lambda plan: grouped(plan, shares), **options)


def assert_close(trained: Trained, job: Job, tolerance: float) -> None:
    expected = reference(job)
    assert job.micro_batch_size is not None
    part = job.micro_batch_size / job.batch_size
    weights = 1.0 if job.reduction == "sum" else part
    wanted = [sum(float(loss) * weights for loss in step) for step in expected.losses]
    assert trained.losses == pytest.approx(wanted, rel=min(tolerance, 1e-5))
    for name, tensor in trained.state.items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(((4, 2), (6,)), marks=pytest.mark.slow),
        ((6,), (1, 5)),
        ((4, 2), (1, 3, 2)),
        ((3, 1, 2),),
        pytest.param(((1, 5), (5, 1), (2, 2, 2)), marks=pytest.mark.slow),
    ],
    ids=lambda shares: "-".join("+".join(map(str, stage)) for stage in shares),
)
async def test_widths_and_unequal_shares_with_dropout_tied_weights_and_clipping(shares: Any) -> None:
    job = double("char_gpt")
    assert_close(await train_shared(job, shares), job, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shares", "options"),
    [
        ("char_gpt", ((4, 2), (1, 5)), {"recompute": True, "clip_norm": None}),
        pytest.param("unet", ((2, 4), (6,), (3, 3)), {}, marks=pytest.mark.slow),
        ("moe", ((1, 5), (2, 4)), {}),
        pytest.param("many", ((6,), (2, 4)), {}, marks=pytest.mark.slow),
        pytest.param("shared_layer", ((2, 4), (3, 1, 2), (6,)), {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_other_models_on_groups(name: str, shares: Any, options: dict[str, Any]) -> None:
    job = zoo.make(name, batch_size=2 * MICRO, micro_batch_size=MICRO, steps=2, optimizer="sgd", **options)
    assert_close(await train_shared(job, shares), job, 2e-5)


@pytest.mark.slow
async def test_values_that_every_member_has_whole_and_targets_that_do_not_count() -> None:
    """T5 carries its position bias, computed from parameters alone, over every cut; some rows may have no target."""

    def weight(target: torch.Tensor) -> float:
        return float((target != -100).sum())

    job = zoo.make("t5", batch_size=8, micro_batch_size=4, steps=2, weight=weight, optimizer="sgd")
    trained = await train_shared(job, ((1, 3), (2, 1, 1), (4,)))
    expected = reference(job)
    for name, tensor in trained.state.items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=1e-4, atol=1e-5, msg=name)


async def test_a_share_without_any_target_that_counts_adds_nothing() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, ignore_index=0)

    class Half:
        """Every second sample has no target that counts."""

        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            g = torch.Generator().manual_seed(i)
            return torch.randn(5, generator=g, dtype=torch.float64), (i % 2) * (1 + i % 3)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    changes: dict[str, Any] = {"model": model, "loss": loss, "data": Half(), "batch_size": 12, "micro_batch_size": 3}
    job = make_job(**changes, weight=lambda y: float((y != 0).sum()), schedule=None)
    trained = await train_shared(job, ((2, 1), (1, 1, 1)))
    expected = reference(job)
    for name, tensor in trained.state.items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=1e-9, atol=1e-9, msg=name)


async def test_a_step_in_which_no_label_counts_is_one_of_the_optimizer() -> None:
    """Its gradients are zeros and not absent: AdamW decays weights and moments."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum") / (target != -100).sum().clamp(min=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 23)).double()
    data = [(i % 23, -100 if 24 <= i < 48 else (i + 1) % 23) for i in range(96)]
    changes: dict[str, Any] = {"model": model, "loss": loss, "data": data, "sampler": lambda epoch, seed: range(96)}
    job = make_job(**changes, weight=lambda y: float((y != -100).sum()), micro_batch_size=6, schedule=None)
    trained, expected = await train_shared(job, ((4, 2), (3, 3))), plain(job, 5, 6)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in trained.state.items():
        torch.testing.assert_close(tensor, expected.state_dict[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
async def test_bf16_on_groups_stays_near_and_replicas_equal() -> None:
    job = zoo.make("char_gpt", batch_size=2 * MICRO, micro_batch_size=MICRO, steps=2, precision="bf16")
    trained = await train_shared(job, ((4, 2), (3, 3)))
    expected = reference(job)
    wanted = [sum(float(loss) * 0.5 for loss in step) for step in expected.losses]
    assert trained.losses == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
async def test_an_evaluation_on_groups_with_a_small_last_micro_batch() -> None:
    def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
        return float((output.argmax(-1) == target).float().mean())

    job = zoo.make("char_gpt", batch_size=MICRO, micro_batch_size=MICRO, steps=1)
    data = [job.data[i] for i in range(13)]  # two micro-batches, and one sample
    job = zoo.make(
        "char_gpt", batch_size=MICRO, micro_batch_size=MICRO, steps=1, eval_data=data, metrics={"accuracy": accuracy}
    )
    alone = await train(job, 2, MICRO)
    shared = await train_shared(job, ((4, 2), (3, 2, 1)))
    assert shared.reports[-1].metrics == pytest.approx(alone.reports[-1].metrics, rel=1e-4)


# -- what cannot be shared ---------------------------------------------------------------------------------------------


class Mixes(nn.Module):
    """Three layers and, behind the first, something that looks at other samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "mean":
            x = x - x.mean(0, keepdim=True)
        elif self.how == "softmax":
            x = x * x.softmax(0)
        elif self.how == "flip":
            x = x + x.flip(0)
        return self.last(self.second(x))


def mixing_job(how: str, **changes: Any) -> Job:
    torch.manual_seed(0)
    data = [(torch.randn(4), i % 3) for i in range(12)]
    settings: dict[str, Any] = {"model": Mixes(how), "data": data, "batch_size": 6, "steps": 1, "schedule": None}
    return make_job(**settings | changes)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("mean", "computed across the samples"),
        ("softmax", "samples influence one another"),
        ("flip", "samples influence one another"),
    ],
)
async def test_a_model_that_mixes_samples_is_refused_before_training(how: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        await train_shared(mixing_job(how), ((4, 2), (6,)))
    with pytest.raises(PlanError, match="not what its parts' losses add up to"):  # where nothing but the loss leaves it
        await train_shared(mixing_job(how), ((3, 2, 1),))
    assert len((await train_shared(mixing_job(how), ((6,), (4, 2)))).losses) == 1  # its block is on one device here


async def test_batch_statistics_are_never_shared() -> None:
    with pytest.raises(PlanError, match=r"cannot be shared by samples.*give them to one device"):
        await train_shared(make_job(), ((4, 2), (6,)))


async def test_a_loss_that_is_no_mean_over_samples_must_say_what_it_counts() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, ignore_index=0)

    with pytest.raises(PlanError, match="Job\\(weight="):
        await train_shared(mixing_job("", loss=loss), ((6,), (4, 2)))


# -- the sum over the group --------------------------------------------------------------------------------------------


async def test_a_member_that_ends_with_other_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, turns = StageRunner.apply, itertools.count(1)

    def flipped(self: StageRunner, *args: Any) -> None:
        mine = next(turns)  # the other member's call may come while this one applies
        apply(self, *args)
        if mine == 2:
            with torch.no_grad():
                next(iter(self.trainable.values())).flatten()[0] += 1e-3

    monkeypatch.setattr(StageRunner, "apply", flipped)
    with pytest.raises(ProtocolError, match=r"p\d \(stage 0\) ends with other weights than"):
        await train_shared(mixing_job(""), ((4, 2),))


# -- sums through process groups ---------------------------------------------------------------------------------------


async def test_sums_through_a_process_group_train_the_same_and_end_with_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[DirectSum] = []
    init = DirectSum.__init__

    def noted(self: DirectSum, *args: Any, **options: Any) -> None:
        built.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(DirectSum, "__init__", noted)
    job = double("char_gpt", direct_sums=True)
    assert_close(await train_shared(job, ((3, 1, 2), (6,), (1, 5))), job, 1e-9)
    assert len(built) == 5  # one for each member of a group, and torch's default group is still free
    assert all(one.process_group is None for one in built)
    assert not torch.distributed.is_initialized()


async def test_a_member_that_dies_in_a_process_group_ends_the_step_and_nothing_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its streams stay, only its connections to the group are gone: torch's error must become ours, within seconds."""
    applied, over = [], threading.Event()
    apply, reduce = StageRunner.apply, DirectSum.reduce

    def noted(self: StageRunner, *args: Any) -> None:
        applied.append(self.step)
        apply(self, *args)

    def dies(self: DirectSum, bucket: Bucket, present: Sequence[bool]) -> None:
        if self.peer == "p1" and 0 in applied:
            self.process_group = None
            over.wait(10)
        else:
            reduce(self, bucket, present)

    monkeypatch.setattr(StageRunner, "apply", noted)
    monkeypatch.setattr(DirectSum, "reduce", dies)
    async with asyncio.timeout(15):
        with pytest.raises(PeerLostError, match=r"in step 2, before it was applied.*the sum over the group broke off"):
            await train_shared(mixing_job("", steps=3, direct_sums=True), ((4, 2), (6,)))
    over.set()
    assert applied == [0] * 3


async def test_a_group_of_a_cuda_device_is_made_and_ended_by_nccl() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    parameter.grad = torch.full_like(parameter, 2.0)
    async with Compute("cuda:0") as compute:
        alone = DirectSum("p0", ("p0",), {"w": parameter}, compute, Links((1, 1)), Spans(), host="127.0.0.1")
        whole = FinishedBuckets(alone.buckets, alone.parameters)
        whole.all()
        await alone.run(0, whole)
        ending = alone.abort()
        assert ending is not None
        await ending
        alone.close()
    assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))


def test_the_address_where_a_group_meets() -> None:
    assert host_of(["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip6/::1/tcp/1", "/ip4/10.0.0.5/tcp/4/p2p/x"]) == "10.0.0.5"
    assert host_of(["/ip4/127.0.0.1/tcp/1/p2p/x"]) == host_of([]) == "127.0.0.1"
    assert interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(PeerLostError, match="no interface of this machine has the address"):
        interface_of("192.0.2.1")
