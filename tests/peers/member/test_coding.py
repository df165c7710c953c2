"""Training with codecs: the mesh equals one process that encodes and decodes at the same places, and repeats bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.codec import codec_of, noise_seed
from meshcee.errors import NonFiniteLossError, ProtocolError, UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan, Predicted
from meshcee.sampling import draw
from peers.device.compute import Compute
from peers.member.coding import Coding
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.offer import Offer, Terms
from tests.rig.mesh_fixture import Trained, even_plan, train
from tests.rig.reference import reference

WIDTH, MICRO, MICROS, STAGES = 48, 6, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.line(x)))


class Net(nn.Module):
    """`between` is what the reference does where the mesh is cut; the mesh captures the model without it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))
        self.head = nn.Linear(WIDTH, 23)
        self.between: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            h = block(h)
            if self.between is not None and i < STAGES - 1:
                h = self.between(i, h)
        return self.head(h)


class Pairs:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i % 23, (i + 1) % 23


def make_job(**changes: Any) -> Job:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": Net(),
        "loss": nn.functional.cross_entropy,
        "data": Pairs(),
        "optimizer": Optimizer("AdamW", lr=1e-2),
        "batch_size": MICRO * MICROS,
        "micro_batch_size": MICRO,
        "steps": 3,
        "seed": 3,
        "clip_norm": 1.0,
        "cuts": tuple(f"blocks.{i}" for i in range(STAGES - 1)),
    }
    return Job(**{**settings, **changes})


def coded(out: str, back: str) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        (pipeline,) = plan.pipelines
        stages = tuple(replace(stage, codec_out=out, codec_back=back) for stage in pipeline.stages)
        return replace(plan, pipelines=(replace(pipeline, stages=stages),))

    return change


async def run(job: Job, out: str, back: str) -> Trained:
    return await train(job, STAGES, MICRO, adapt=coded(out, back))


class Crossing(torch.autograd.Function):
    """There by one codec, back by another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def crossings(out: str, back: str, seed: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What the reference does at each boundary; calls come once a micro-batch and boundary, in order."""
    calls = [0] * (STAGES - 1)

    def through(codec: str, tensor: torch.Tensor, noise: int | None) -> torch.Tensor:
        payload = codec_of(codec).encode(tensor, noise)
        assert payload is not None
        return codec_of(codec).decode(payload, tensor.dtype, tensor.shape)

    def between(i: int, x: torch.Tensor) -> torch.Tensor:
        step, micro = divmod(calls[i], MICROS)
        calls[i] += 1
        noise = noise_seed(seed, step, micro, i + 1, 0)
        return Crossing.apply(x, lambda t: through(out, t, None), lambda t: through(back, t, noise))

    return between


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("out", "back", "recompute"),
    [
        ("bf16", "bf16", False),
        ("bf16-lossless", "bf16-lossless", False),
        ("int8", "int8", False),
        ("int4", "int4", True),
        ("lossless", "int4", False),
    ],
)
async def test_the_mesh_equals_one_process_that_codes_at_the_same_boundaries(
    out: str, back: str, recompute: bool
) -> None:
    trained = await run(make_job(recompute=recompute), out, back)
    job = make_job()
    job.model.between = crossings(out, back, job.seed)  # type: ignore[union-attr]
    expected = reference(job)
    assert trained.losses == [sum(float(loss) / MICROS for loss in step) for step in expected.losses]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name
    plain = reference(make_job())
    assert any(not torch.equal(trained.state[n], t) for n, t in plain.state.items())


@pytest.mark.parametrize("recompute", [False, True])
async def test_lossless_boundaries_change_no_bit(recompute: bool) -> None:
    trained = await run(make_job(recompute=recompute), "lossless", "lossless")
    expected = reference(make_job())
    assert trained.losses == [sum(float(loss) / MICROS for loss in step) for step in expected.losses]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name
    for measured in trained.reports[0].codecs.values():
        assert (measured.codec, measured.error) == ("lossless", 0.0)
        assert measured.wire_bytes < 0.95 * measured.raw_bytes


async def test_two_runs_give_the_same_numbers() -> None:
    first, again = await run(make_job(), "int4", "int4"), await run(make_job(), "int4", "int4")
    assert first.losses == again.losses
    for name, tensor in first.state.items():
        assert torch.equal(tensor, again.state[name]), name


async def test_an_evaluation_codes_the_way_forward_too() -> None:
    class Same(Pairs):
        def __len__(self) -> int:
            return MICRO

    trained = await run(make_job(eval_data=Same(), eval_every=3), "int8", "none")
    model = Net().eval()
    model.load_state_dict(trained.state)
    x = torch.arange(MICRO)
    with torch.no_grad():
        exact = float(nn.functional.cross_entropy(model(x), x + 1))
        model.between = crossings("int8", "none", 3)
        through = float(nn.functional.cross_entropy(model(x), x + 1))
    assert trained.reports[-1].metrics["loss"] == through != exact


async def test_fewer_bytes_cross_the_links() -> None:
    sizes = {}
    for codec in ("none", "bf16", "int8", "int4"):
        trained = await run(make_job(steps=1), codec, codec)
        measured = trained.reports[0].codecs
        sizes[codec] = sum(m.wire_bytes for boundary, m in measured.items() if boundary[0] == "1")
        assert set(measured) == {"0->1", "1->2", "1->0", "2->1"}
        assert all((m.error > 0) == (codec != "none") and m.error <= codec_of(codec).budget for m in measured.values())
        assert trained.reports[0].crossed_bytes == 2 * sizes[codec], "two boundaries of the same size"
    blocks = 2 * MICROS * -(-MICRO * WIDTH // 64)  # activations and gradients of the middle stage
    numbers = 2 * MICROS * MICRO * WIDTH
    assert sizes == {"none": numbers * 4, "bf16": numbers * 2, "int8": blocks * 66, "int4": blocks * 34}


async def test_a_report_tells_tokens_and_the_share_of_the_bound() -> None:
    job = make_job(weight=lambda y: float((y % 3 > 0).sum()), steps=2)
    predicted = Predicted(step_s=1.0, samples_per_s=1.0, lower_bound_s=0.001)
    trained = await train(job, 2, MICRO, adapt=lambda plan: replace(plan, predicted=predicted))
    for step, report in enumerate(trained.reports):
        tokens = sum(
            (int(y) % 3 > 0) for _, y in (job.data[i] for i in draw(job.seed, len(job.data), job.batch_size, step))
        )
        assert report.tokens_per_s == tokens / report.step_s > 0
        assert report.bound_share == 0.001 / report.step_s
        assert report.to_json()["bound_share"] == report.bound_share
    (report,) = (await train(make_job(steps=1), 1, MICRO)).reports
    assert (report.tokens_per_s, report.bound_share, report.crossed_bytes) == (None, None, 0)


async def test_the_guard_steps_back_and_the_neighbours_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("int4", "int8"):
        monkeypatch.setattr(codec_of(name), "budget", 0.0)
    with structlog.testing.capture_logs() as told:
        trained = await run(make_job(), "int4", "int4")
    expected = await run(make_job(), "bf16", "bf16")
    assert trained.losses == expected.losses
    assert {m.codec for m in trained.reports[0].codecs.values()} == {"bf16"}
    warned = sorted((e["stage"], e["target"], e["left"], e["now"]) for e in told if e["log_level"] == "warning")
    assert warned == [(stage, target, "int4", "bf16") for stage, target in ("01", "10", "12", "21")]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
async def test_a_loss_that_is_not_finite_still_ends_the_run(codec: str) -> None:
    with pytest.raises(NonFiniteLossError, match=r"step \d, micro-batch 1"):
        await run(make_job(optimizer=Optimizer("SGD", lr=1e30), clip_norm=None), codec, codec)


async def test_an_unknown_codec_is_refused_with_the_offer() -> None:
    with pytest.raises(UsageError, match="codec 'mp3' is unknown"):
        await run(make_job(), "mp3", "none")


def meta_of(tensor: torch.Tensor, codec: str) -> tuple[list[Any], list[bytearray]]:
    payload = codec_of(codec).encode(tensor)
    assert payload is not None
    return ["float32", list(tensor.shape), codec], [bytearray(payload.numpy().tobytes())]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda meta, payloads: (meta, [payloads[0][:-1]]), "payloads of"),
        (lambda meta, payloads: (meta, [payloads[0] + b"x"]), "payloads of"),
        (lambda meta, payloads: (["float32", [1 << 40], "int8"], payloads), "payloads of"),
        (lambda meta, payloads: (["float32", [1 << 20], "int8"], [bytearray((1 << 14) * 66)]), "at most 4096"),
        (lambda meta, payloads: (["float32", [64], "int4"], [bytearray(34)]), "does not allow"),
        (lambda meta, payloads: (["int64", [64], "int8"], [bytearray(66)]), "does not allow"),
        (lambda meta, payloads: (["float32", [64], "zip"], [bytearray(66)]), "does not allow"),
        (lambda meta, payloads: (["float32", [64], 5], [bytearray(66)]), "strides"),
        (lambda meta, payloads: (["float32", [-64], "int8"], [bytearray(66)]), "sensible"),
        (lambda meta, payloads: (["float32", [64], "lossless"], [bytearray(200)]), "does not allow"),
    ],
)
async def test_hostile_payloads_are_refused(spoil: Callable[..., Any], why: str) -> None:
    async with Compute() as compute:
        coding = Coding({}, {messages.F: "int8"}, compute, seed=0, stage=1, limit_bytes=4096)
        meta, payloads = meta_of(torch.randn(640), "int8")
        (back,) = await coding.values(Frame(messages.F, {"tensors": [meta]}, payloads))
        assert back.shape == (640,)
        meta, payloads = spoil(meta, payloads)
        with pytest.raises(ProtocolError, match=why):
            await coding.values(Frame(messages.F, {"tensors": [meta]}, payloads))
        with pytest.raises(ProtocolError, match="does not allow"):  # other kinds are never coded
            await coding.values(Frame(messages.SHARED, {"tensors": [["float32", [64], "int8"]]}, [bytearray(66)]))


@pytest.mark.parametrize(
    ("size", "shape", "why"),
    [(0, [64], "payloads of"), (256, [64], "payloads of"), (200, [64], "packed numbers"), (9, [2048], "at most 4096")],
)
async def test_hostile_packed_payloads_are_refused(size: int, shape: list[int], why: str) -> None:
    async with Compute() as compute:
        coding = Coding({}, {messages.F: "lossless"}, compute, seed=0, stage=1, limit_bytes=4096)
        with pytest.raises(ProtocolError, match=why):
            await coding.values(Frame(messages.F, {"tensors": [["float32", shape, "lossless"]]}, [bytearray(size)]))


@pytest.mark.parametrize("kind", [messages.B, messages.NORMS, messages.SHARED])
async def test_an_expanded_tensor_may_not_be_larger_than_a_frame(kind: str) -> None:
    async with Compute() as compute:
        coding = Coding({}, {}, compute, seed=0, stage=1, limit_bytes=4096)
        with pytest.raises(ProtocolError, match="at most 4096"):
            await coding.values(Frame(kind, {"tensors": [["float32", [1 << 40], [0]]]}, [bytearray(4)]))


async def test_any_bytes_of_the_right_size_decode_to_something() -> None:
    async with Compute() as compute:
        coding = Coding({}, {messages.F: "int4"}, compute, seed=0, stage=1, limit_bytes=1 << 20)
        for name in ("int4", "int8", "bf16"):
            size = codec_of(name).wire_bytes(torch.float32, 640)
            noise = bytearray(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes())
            (back,) = await coding.values(Frame(messages.F, {"tensors": [["float32", [10, 64], name]]}, [noise]))
            assert back.shape == (10, 64)


async def test_only_what_carries_a_gradient_is_coded() -> None:
    async with Compute() as compute:
        coding = Coding({messages.F: "int4"}, {}, compute, seed=0, stage=0, limit_bytes=1 << 20)
        values = [torch.randn(640), torch.randn(640), torch.arange(640), 5, torch.get_rng_state()]
        frame = await coding.frame(messages.F, {"micro": 0}, values, [True, False, True, False], 0)  # type: ignore[misc]
        names = [entry[2:] if isinstance(entry, list) else None for entry in frame.header["tensors"]]
        assert names == [["int4"], [], [], None, []]


def test_payload_limits_hold_whatever_the_guard_does() -> None:
    """`none` is on every ladder, so what may arrive is what would arrive without codecs."""
    job = make_job()
    captured = capture(job)
    plan = even_plan(captured.train.num_blocks, STAGES, job.batch_size, MICRO)
    terms = Terms("job", job.optimizer, 0, None, "fp32", (), ())

    def limit(plan: Plan) -> int:
        return Offer(terms, plan, (1, 1), (1, "p0"), "p1", captured.train, None, {}).max_payload_bytes

    assert limit(coded("int4", "int4")(plan)) == limit(plan) >= 4 * MICRO * WIDTH
