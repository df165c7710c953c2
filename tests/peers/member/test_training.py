"""Owner and members train in one loop over the in-process network: equal to the plain loop, whatever the plan."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from structlog.testing import capture_logs
from torch import nn

from meshcee import check
from meshcee.config import Limits
from meshcee.eager import plain
from meshcee.errors import MeshceeError, NonFiniteLossError, PeerLostError, PlanError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.files.tensor_files import save
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.plan import Plan
from meshcee.sampling.order import draw
from meshcee.stage.runner import StageRunner
from peers.member.inbox import norms_of
from peers.transport.base import Frame
from peers.transport.memory import MemoryNetwork
from peers.wire.offer import Offer
from peers.wire.weights import StateReceiver
from tests.rig.mesh_fixture import members, train
from tests.rig.reference import reference


class Net(nn.Module):
    """Small, with dropout, a norm layer with batch statistics, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)
        )
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


class Pairs:
    """A task that can be learned: the next number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i % 23, (i + 1) % 23


def make_job(**changes: object) -> Job:
    torch.manual_seed(0)
    settings = {
        "model": Net(),
        "loss": nn.functional.cross_entropy,
        "data": Pairs(96),
        "optimizer": Optimizer("AdamW", lr=1e-2, groups={"*.bias": {"weight_decay": 0.0}}),
        "batch_size": 24,
        "steps": 5,
        "seed": 3,
        "clip_norm": 1.0,
        "schedule": Schedule("CosineAnnealingLR", T_max=10),
        "codec": "none",
    }
    return Job(**{**settings, **changes})


@pytest.mark.cases(2)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
async def test_any_number_of_stages_equals_the_plain_loop(stages: int) -> None:
    trained = await train(make_job(), stages, 6)
    losses, _, model, _ = plain(make_job(), 5, 6)
    assert trained.losses == losses
    reference = model.state_dict()
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of SequentialLR at a milestone
async def test_a_chain_of_schedules_trains_what_the_plain_loop_does() -> None:
    warm, down = Schedule("LinearWithWarmup", warmup=2, steps=9), Schedule("ExponentialLR", gamma=0.5)
    job = make_job(schedule=Schedule("SequentialLR", schedulers=[warm, down], milestones=[3]))
    trained, expected = await train(job, 3, 6), plain(job, 5, 6)
    assert trained.losses == expected.losses
    assert all(torch.equal(tensor, expected.state_dict[name]) for name, tensor in trained.state.items())
    assert trained.losses != plain(replace(job, schedule=warm), 5, 6).losses


@pytest.mark.slow
async def test_evaluation_between_steps_reports_metrics_and_disturbs_nothing() -> None:
    def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
        return float((output.argmax(-1) == target).float().mean())

    job = make_job(eval_data=Pairs(23), eval_every=2, metrics={"accuracy": accuracy}, steps=20, schedule=None)
    trained = await train(job, 3, 6)
    at = [report.step for report in trained.reports if report.metrics]
    assert at == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    plain = await train(make_job(steps=20, schedule=None), 3, 6)
    assert trained.losses == plain.losses
    model = Net()
    model.load_state_dict(trained.state)
    model.eval()
    with torch.no_grad():
        x = torch.arange(23)
        y = (x + 1) % 23
        expected = {"loss": float(nn.functional.cross_entropy(model(x), y)), "accuracy": accuracy(model(x), y)}
    last = trained.reports[-1].metrics
    assert last["accuracy"] == pytest.approx(expected["accuracy"])
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert last["accuracy"] > trained.reports[1].metrics["accuracy"]


async def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_and_micro_batch() -> None:
    job = make_job(optimizer=Optimizer("SGD", lr=1e30), clip_norm=None, schedule=None)
    with pytest.raises(NonFiniteLossError, match=r"step \d, micro-batch 1 .* was not applied"):
        await train(job, 3, 6)


async def test_a_micro_batch_that_weighs_nothing_is_told_what_the_loss_must_divide_by() -> None:
    pairs = [Pairs(96)[i] for i in range(96)]
    data = [(x, -100 if i < 6 else y) for i, (x, y) in enumerate(pairs)]
    job = make_job(data=data, weight=lambda y: float((y != -100).sum()), sampler=lambda epoch, seed: range(len(data)))
    says = r"step 1, micro-batch 1 is nan.* weighs 0, .*divide by count\.clamp\(min=1\)"
    with pytest.raises(NonFiniteLossError, match=says):
        await train(job, 3, 6)
    with pytest.warns(UserWarning, match=says):
        plain(job, 1, 6)


async def test_an_unforeseen_error_of_a_member_is_told_with_its_name_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: StageRunner, *args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StageRunner, "apply", broken)
    with pytest.raises(MeshceeError, match=r"p\d \(stage \d\) failed in step 1: RuntimeError: out of memory"):
        await train(make_job(), 2, 6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("victim", ["p0", "p1", "p2"])
async def test_a_killed_member_is_named_with_the_step(victim: str) -> None:
    network = MemoryNetwork()
    with pytest.raises(PeerLostError, match=rf"{victim}.*step \d+"):
        await train(make_job(steps=10_000), 3, 6, network=network, after_step=(3, lambda: network.kill(victim)))


async def test_a_refusal_while_weights_are_on_their_way_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless(*args: object, **kwargs: object) -> Iterator[Frame]:
        while True:
            yield Frame("state", {}, [bytes(1 << 16)])

    def refuse(*args: object) -> Offer:
        raise PlanError("too large for this peer")

    monkeypatch.setattr("peers.owner.offering.StateSender.frames", endless)
    monkeypatch.setattr(Offer, "from_frame", refuse)
    with pytest.raises(PlanError, match="too large for this peer"):
        await train(make_job(), 2, 6)


async def test_windows_and_live_caps_hold() -> None:
    trained = await train(make_job(steps=3), 3, 2, live_cap=4)
    for member, stage in zip(trained.members, trained.plan.pipelines[0].stages):
        assert 1 <= member.max_live <= stage.live_cap
        assert member.max_in_flight <= stage.window


@pytest.mark.slow
async def test_a_stage_with_room_for_one_micro_batch_trains_between_wide_ones() -> None:
    """Counted by the members; the losses are those of wide windows, as no order of work changes a sum."""

    def narrow(plan: Plan) -> Plan:
        (pipeline,) = plan.pipelines
        first, middle, last = pipeline.stages
        wide = (replace(stage, window=6, live_cap=6) for stage in (first, last))
        stages = (next(wide), replace(middle, window=1, live_cap=1), next(wide))
        return replace(plan, pipelines=(replace(pipeline, stages=stages),))

    trained = await train(make_job(steps=3), 3, 2, adapt=narrow)
    assert trained.members[0].max_live > 1
    assert trained.members[1].max_live == trained.members[1].max_in_flight == 1
    assert trained.losses == (await train(make_job(steps=3), 3, 2)).losses


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stages", "kept"), [(1, ()), (3, ()), (3, ("*Norm?d", "layers.2"))])
async def test_bf16_equals_the_eager_loop_with_fp32_masters(
    stages: int, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, spend = [], StateReceiver.spend

    def spy(self: StateReceiver) -> Mapping[str, torch.Tensor]:
        arrived.append(self)
        return spend(self)

    monkeypatch.setattr(StateReceiver, "spend", spy)
    job = make_job(precision="bf16", keep_fp32=kept, micro_batch_size=6)
    trained = await train(job, stages, 6)
    assert [receiver.state for receiver in arrived] == [{}] * stages  # what was sent is not held beside the stage
    expected = reference(job)
    assert trained.losses == [sum(float(loss) * (6 / 24) for loss in step) for step in expected.losses]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["module", "function", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_a_model_whose_checkpoint_is_in_16_bits_has_fp32_masters(
    dtype: torch.dtype, form: str, tmp_path: Path
) -> None:
    """As from_pretrained loads most language models today."""

    def build() -> nn.Module:
        return Net().to(dtype)

    torch.manual_seed(0)
    changes: dict[str, object] = {"model": build if form == "function" else build()}
    if form == "checkpoint":  # in full: nothing of it is rounded on the way
        torch.manual_seed(1)
        save(tmp_path / "model.safetensors", {n: t for n, t in Net().state_dict().items() if n != "head.weight"})
        changes["weights"] = tmp_path / "model.safetensors"
    job = make_job(precision="bf16", keep_fp32=("*Norm?d",), micro_batch_size=6, **changes)
    trained = await train(job, 2, 6)
    expected = reference(job)
    assert trained.losses == [sum(float(loss) * (6 / 24) for loss in step) for step in expected.losses]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name
    assert trained.losses == plain(job, 5, 6).losses


async def test_micro_batches_are_weighed_by_the_jobs_own_weights() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, ignore_index=3)

    job = make_job(loss=loss, weight=lambda y: float((y != 3).sum()), micro_batch_size=6)
    trained = await train(job, 2, 6)
    expected = reference(job)
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name
    assert trained.losses == plain(make_job(loss=loss, weight=job.weight), 5, 6).losses


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [1, 2])
async def test_a_step_in_which_no_label_counts_is_the_plain_loops(stages: int) -> None:
    """Its gradients are zeros, and AdamW steps with them all the same."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum") / (target != -100).sum().clamp(min=1)

    data = [(x, -100 if 24 <= i < 48 else y) for i, (x, y) in enumerate(Pairs(96)[i] for i in range(96))]
    weight = lambda y: float((y != -100).sum())  # noqa: E731
    more = {"sampler": lambda epoch, seed: range(96), "micro_batch_size": 6}
    job = make_job(data=data, loss=loss, weight=weight, **more)
    with capture_logs() as logged:
        trained, expected = await train(job, stages, 6), plain(job, 5, 6)
    assert [entry["step"] for entry in logged if entry["event"] == Event.NOTHING_COUNTS] == [2]
    assert trained.losses == expected.losses
    assert [found == 0.0 for found in trained.losses] == [False, True, False, False, False]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state_dict[name]), name
    assert (await asyncio.to_thread(check, job, stages=(stages,), steps=2)).equal
    with pytest.raises(UsageError, match=r"weights of step 1 add up to -4\.0; Job.weight gives no number below 0"):
        await train(replace(job, weight=lambda y: -1.0), 1, 6)


async def test_clipping_in_double_precision_equals_the_plain_loop() -> None:
    def job() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        data = [(torch.randn(4, dtype=torch.float64), torch.randn(2, dtype=torch.float64)) for _ in range(24)]
        return make_job(model=model, loss=nn.functional.mse_loss, data=data, clip_norm=0.01, schedule=None)

    trained = await train(job(), 3, 6)
    losses, _, model, _ = plain(job(), 5, 6)
    assert trained.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(trained.state[name], tensor), name


class Unread(nn.Sequential):
    """Of single precision, with a weight in double that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:12]:
            x = layer(x)
        return x * self.scale.detach().float()


async def test_a_weight_that_no_gradient_reaches_has_no_say_in_how_norms_are_combined() -> None:
    def job() -> Job:
        torch.manual_seed(0)
        data = [(torch.randn(4), torch.randn(4)) for _ in range(24)]
        return make_job(model=Unread(), loss=nn.functional.mse_loss, data=data, clip_norm=0.01, schedule=None)

    trained = await train(job(), 2, 6)
    losses, _, model, _ = plain(job(), 5, 6)
    assert trained.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(trained.state[name], tensor), name


class Scattered(nn.Module):
    """Two products with matrices whose elements are parameters of their own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(count)]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ torch.stack(list(self.first)).view(4, -1))
        return h @ torch.stack(list(self.second)).view(-1, 4)


@pytest.mark.slow
async def test_norms_of_many_parameters_need_no_large_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> Job:
        torch.manual_seed(0)
        data = [(torch.randn(4), torch.randn(4)) for _ in range(24)]
        settings = {"loss": nn.functional.mse_loss, "clip_norm": 0.01, "schedule": None, "steps": 2}
        return make_job(model=Scattered(400), data=data, optimizer=Optimizer("AdamW", lr=1e-2), **settings)

    monkeypatch.setattr("peers.transport.endpoint.Limits", lambda: Limits(header_bytes=4096))
    trained = await train(job(), 2, 6)
    losses, _, model, _ = plain(job(), 2, 6)
    assert trained.losses == losses
    assert all(torch.equal(trained.state[name], tensor) for name, tensor in model.state_dict().items())
    assert trained.reports[0].norm is not None


@pytest.mark.parametrize(
    "values",
    [
        [torch.tensor([0, 1])],
        [torch.tensor([0, 0]), torch.ones(2, dtype=torch.float64)],
        [torch.tensor([0, 5]), torch.ones(2, dtype=torch.float64)],
        [torch.tensor([0, 1]), torch.ones(3, dtype=torch.float64)],
        [torch.tensor([0, 1]), torch.ones(2)],
        [torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.float64)],
        [None, 1.0],
    ],
    ids=lambda values: f"{values}",
)
def test_norms_that_make_no_sense_are_refused(values: list[object]) -> None:
    with pytest.raises(ProtocolError, match="norms"):
        norms_of(values, 5)


def test_more_norms_than_parameters_are_refused_before_they_are_looked_at() -> None:
    """An expanded tensor of 2**20 numbers arrives in eight bytes."""
    with pytest.raises(ProtocolError, match="1048576 norms"):
        norms_of([torch.tensor([0]).expand(1 << 20), torch.ones(1, dtype=torch.float64).expand(1 << 20)], 5)


async def test_an_evaluation_may_have_large_outputs() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x)).expand(-1, 1 << 20).contiguous()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output[:, 0], target)

    data = [(torch.randn(2), torch.randn(())) for _ in range(6)]
    changes = {"model": Wide(), "loss": loss, "data": data, "eval_data": data, "batch_size": 6, "steps": 1}
    trained = await train(make_job(**changes, schedule=None), 2, 6)  # 24 MiB of outputs, more than weights ever take
    assert trained.reports[-1].metrics["loss"] > 0


@pytest.mark.slow
async def test_an_error_in_the_users_data_or_metric_is_told_as_such() -> None:
    class Broken(Pairs):
        def __getitem__(self, i: int) -> tuple[int, int]:
            if self.armed:
                raise KeyError("no such file")
            return super().__getitem__(i)

        armed = False

    data = Broken(96)
    job = make_job(data=data, steps=1000)
    with pytest.raises(UsageError, match=r"data\[\d+\] of step \d+ failed at .*test_training.py:\d+: KeyError"):
        await train(job, 2, 6, after_step=(1, lambda: setattr(data, "armed", True)))

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        raise ValueError("shapes")

    with pytest.raises(UsageError, match=r"metric 'bad' failed at .*test_training.py:\d+: ValueError: shapes"):
        await train(make_job(eval_data=Pairs(6), metrics={"bad": metric}, steps=1), 2, 6)


class Slow(Pairs):
    """Samples that come only once the event loop has turned: read on the loop, the first would wait for ever."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.turned = threading.Event()
        self.waits = False
        self.threads: set[str] = set()
        self.read: list[int] = []

    def __getitem__(self, i: int) -> tuple[int, int]:
        if self.waits:
            assert self.turned.wait(60)
            self.threads.add(threading.current_thread().name)
            self.read.append(i)
        return super().__getitem__(i)


async def test_data_is_read_in_order_by_one_thread_that_is_not_the_event_loops() -> None:
    data = Slow(96)
    job = make_job(data=data, steps=3, eval_data=data, metrics={"one": lambda output, target: 1.0})

    def turn() -> None:
        data.turned.set()

    def adapt(plan: Plan) -> Plan:  # capturing is over: from here on the owner reads
        data.waits = True
        asyncio.get_running_loop().call_later(0.1, turn)
        return plan

    trained = await train(job, 2, 6, adapt=adapt)
    assert trained.losses == plain(make_job(steps=3), 3, 6).losses
    assert len(data.threads) == 1
    assert threading.main_thread().name not in data.threads
    assert data.read[: 3 * 24] == [i for step in range(3) for i in draw(3, 96, 24, step)]


def test_tied_weights_are_saved_under_all_their_names(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    save(tmp_path / "w.safetensors", {"embed": tied, "head": tied, "turned": tied.t()})
    loaded = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert torch.equal(loaded["embed"], tied)
    assert torch.equal(loaded["head"], tied)
    assert torch.equal(loaded["turned"], tied.t())


async def test_silence_on_a_job_stream_keeps_no_peer_busy() -> None:
    network = MemoryNetwork()
    async with members(network, 1, Limits()) as (member,), network.transport("silent") as stranger:
        stream = await stranger.open("p0", "job")
        assert not member.is_busy
        await stream.send(Frame("offer", {}, [b"nonsense"]))
        reply = await stream.recv()
        assert reply.kind == "refused"
        async with asyncio.timeout(5):
            while member.is_busy:
                await member.busy_changed.wait()
                member.busy_changed.clear()
