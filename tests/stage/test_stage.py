"""Chains of stages against the eager reference: every bit of every loss and parameter."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import Capture, Value, capture, decode_program, encode_program, stack
from meshcee.capture.graph import Input
from meshcee.equality import why_not_shared
from meshcee.errors import CaptureError, ProtocolError
from meshcee.figures import DeviceProfile
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.planner.live import workload_of
from meshcee.stage.runner import clip_coefficient, global_norm
from meshcee.stage.weights import Weights, first_moments, optimizer_layout
from tests.peers.groups.test_live_groups import Lopsided, lopsided
from tests.rig import zoo
from tests.rig.chain import Chain
from tests.rig.reference import Reference, reference


@functools.cache
def captured(model: str, precision: str = "fp32") -> Capture:
    """Captured, and through the wire format and back."""
    found = capture(zoo.make(model, precision=precision), evaluate=True)
    assert found.evaluate is not None
    train, evaluate = (decode_program(encode_program(p)) for p in (found.train, found.evaluate))
    return dataclasses.replace(found, train=train, evaluate=evaluate)


@functools.cache
def finely_cut(model: str) -> Capture:
    return finely(zoo.make(model))


def finely(job: Job) -> Capture:
    """Cut at every position where a cut does not change the meaning."""

    def everywhere(inputs: Any, nodes: Any, live: Any, work: Any) -> list[int]:
        return [p for p in range(1, len(nodes)) if live[p] is not None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("meshcee.capture.programs"), "find_cuts", everywhere)
        return capture(job)


@functools.cache
def expected(model: str, optimizer: str, precision: str = "fp32", steps: int | None = None) -> Reference:
    return reference(zoo.make(model, optimizer, precision=precision), steps)


def assert_equal(chain: Chain, losses: list[list[torch.Tensor]], want: Reference) -> None:
    for step, (got, wanted) in enumerate(zip(losses, want.losses, strict=True)):
        for micro, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(a, b), f"loss of step {step}, micro-batch {micro}: {a} != {b}"
    state = chain.state()
    assert set(state) == set(want.state)
    for name, tensor in want.state.items():
        assert torch.equal(state[name], tensor), f"{name} differs by {(state[name] - tensor).abs().max()}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow), 3, 5])
@pytest.mark.parametrize("model", zoo.PHASE_ONE)
def test_a_chain_of_stages_is_the_eager_loop(model: str, stages: int) -> None:
    optimizer = "adamw" if stages % 2 else "sgd"
    order = {1: "split", 2: "late", 3: "late", 5: "fused"}[stages]
    job = zoo.make(model, optimizer)
    chain = Chain(job, captured(model), stages, order)
    assert_equal(chain, chain.run(job.steps), expected(model, optimizer))


@pytest.mark.cases(2)
@pytest.mark.parametrize("order", ["fused", "split", "late"])
@pytest.mark.parametrize(
    "options", [{"split": False}, {"recompute": True}, {"split": False, "recompute": True}], ids=str
)
@pytest.mark.parametrize("model", ["char_gpt", "cnn", "shared_layer"])
def test_every_way_to_run_a_stage_has_the_same_bits(model: str, options: dict[str, bool], order: str) -> None:
    job = zoo.make(model)
    chain = Chain(job, captured(model), 3, order, **options)
    assert_equal(chain, chain.run(job.steps), expected(model, "adamw"))


KINDS = [m if m in zoo.PHASE_ONE else pytest.param(m, marks=pytest.mark.slow) for m in zoo.ALL]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "split"), [("fused", False), ("fused", True), ("late", True)])
@pytest.mark.parametrize("model", KINDS)
def test_every_place_where_a_model_can_be_cut(model: str, order: str, split: bool) -> None:
    """As many stages as there are places for a cut: about one operator a stage, for models of every kind."""
    job = zoo.make(model, steps=2)
    chain = Chain(job, finely_cut(model), finely_cut(model).train.num_blocks, order, split=split)
    assert len(chain.runners) >= 10
    assert_equal(chain, chain.run(job.steps), expected(model, "adamw", steps=2))


@pytest.mark.parametrize("order", ["fused", "late"])
def test_what_is_expanded_arrives_as_a_sum_with_it_was_laid_out(order: str) -> None:
    """Its dimension of stride 0 has no place of its own in memory; in another one, the next product rounds differently."""
    job = lopsided(model=Lopsided(2).double(), cuts=("first", "heavy.0", "heavy.1"), groups=False)
    chain = Chain(job, capture(job, evaluate=False), 4, order)
    assert len(chain.runners[1].spec.sent) == 2
    assert_equal(chain, chain.run(job.steps), reference(job))


def test_recomputation_keeps_less_between_f_and_b() -> None:
    kept = []
    for recompute in (False, True):
        chain = Chain(zoo.make("char_gpt"), captured("char_gpt"), 2, recompute=recompute)
        chain.forward(0, 0, stack([chain.job.data[0]]))
        [micro] = chain.runners[1]._micros.values()
        kept.append(len(micro.results))
    assert kept == [1, 0]


class Saved:
    """What autograd keeps of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_b_frees_what_only_b_needs() -> None:
    """Between B and W a split stage holds the inputs of its weighted operators and the gradients that arrived there."""
    held = []
    for split in (False, True):
        chain = Chain(zoo.make("unet"), captured("unet"), 2, split=split)
        alive: weakref.WeakSet[Saved] = weakref.WeakSet()

        def pack(tensor: torch.Tensor, alive: weakref.WeakSet[Saved] = alive) -> Saved:
            alive.add(saved := Saved(tensor))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            chain.forward(0, 0, stack([chain.job.data[i] for i in range(2)]))
        chain.runners[0].rollback()
        before = len(alive)
        chain.runners[1].backward_input(0, [], 1.0)
        gc.collect()
        held.append(len(alive) / before)
    assert held[0] == 1.0
    assert held[1] < 0.85


@pytest.mark.parametrize("model", ["char_gpt", "cnn"])
def test_flipping_one_bit_of_one_gradient_shows(model: str) -> None:
    job = zoo.make(model)
    chain = Chain(job, captured(model), 3)
    runner = chain.runners[1]

    def flip(step: int, micro: int) -> None:
        if (step, micro) == (2, 1):
            grad = next(iter(runner.trainable.values())).grad
            assert grad is not None
            bits = grad.view(-1).view(torch.int32)
            bits[grad.abs().argmax()] ^= 1 << 22  # a low bit would be rounded away from a weight near 1

    chain.tamper = flip
    losses = chain.run(job.steps)
    with pytest.raises(AssertionError, match=r"differs by|loss of step"):
        assert_equal(chain, losses, expected(model, "adamw"))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fused", "split", "late"])
@pytest.mark.parametrize("model", ["char_gpt", "cnn", "shared_layer"])
def test_bf16_keeps_full_precision_masters(model: str, order: str) -> None:
    job = zoo.make(model, "adamw", precision="bf16")
    chain = Chain(job, captured(model, "bf16"), 3, order)
    losses = chain.run(job.steps)
    assert losses[0][0].dtype in (torch.bfloat16, torch.float32)
    assert next(iter(chain.runners[0].trainable.values())).dtype == torch.bfloat16
    want = expected(model, "adamw", "bf16")
    assert next(iter(want.state.values())).dtype == torch.float32
    assert_equal(chain, losses, want)


IN_BF16 = [
    name for name in zoo.ALL if name not in ("t5", "fno")
]  # below; torch has no 16-bit Fourier transform on a CPU


@pytest.mark.slow
@pytest.mark.parametrize("model", IN_BF16)
def test_every_model_in_bf16(model: str) -> None:
    chain = Chain(zoo.make(model, "adamw", precision="bf16"), captured(model, "bf16"), 3)
    want = expected(model, "adamw", "bf16")
    frozen = {x.name for x in chain.captured.train.inputs if x.kind == "parameter" and not x.trainable}
    rounded = {
        n: t.bfloat16().to(chain.state()[n].dtype) for n, t in want.state.items() if n in frozen
    }  # by stages alone
    want = dataclasses.replace(want, state={**want.state, **rounded})
    assert_equal(chain, chain.run(chain.job.steps), want)


@pytest.mark.slow
def test_a_bias_of_positions_in_bf16_wants_a_mask_that_is_always_there() -> None:
    """Under a mask it is spread over the samples, and rounded before their gradients are added up."""
    with pytest.raises(CaptureError, match=r"attention_mask masks nothing.*attn_implementation='eager'"):
        captured("t5", "bf16")
    job = zoo.make("t5", precision="bf16", steps=2)
    assert isinstance(job.model, nn.Module)
    job.model.set_attn_implementation("eager")  # type: ignore[operator]
    chain = Chain(job, capture(job), 3)
    assert_equal(chain, chain.run(2), reference(job))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model", "kept"),
    [("cnn", ("*Norm*",)), ("char_gpt", ("blocks.*.mlp.?", "LayerNorm")), ("lora", ("frozen",)), ("llama", ("*norm",))],
)
def test_what_a_job_keeps_in_full_beside_bf16(model: str, kept: tuple[str, ...]) -> None:
    job = zoo.make(model, "adamw", precision="bf16", keep_fp32=kept, steps=2)
    found = capture(job)
    types = {entry.name: entry.value.dtype for entry in found.train.inputs if entry.kind != "raw"}
    assert {torch.bfloat16, torch.float32} <= set(types.values())
    want = reference(job)
    for stages, order in ((1, "fused"), (3, "late")):
        chain = Chain(job, found, stages, order)
        assert_equal(chain, chain.run(job.steps), want)
    rounded = reference(zoo.make(model, "adamw", precision="bf16", steps=2))
    assert not all(torch.equal(tensor, rounded.state[name]) for name, tensor in want.state.items())


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("kept", [(), ("blocks.*.mlp.?",), ("*",)])
def test_a_plan_counts_what_weights_gradients_masters_and_moments_take(
    kept: tuple[str, ...], ema: float | None
) -> None:
    job = zoo.make("char_gpt", "adamw", precision="bf16", keep_fp32=kept, steps=2, ema=ema)
    found = capture(job)
    chain = Chain(job, found, 1)
    weights = chain.runners[0].weights
    held: list[int] = []

    def measure(optimizer: Any, *_: Any) -> None:
        """Just before an optimizer's step, when all gradients are here; in the second one moments are here, too."""
        trained = [*weights.trainable.values(), *weights.masters.values()]
        state = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
        grads = [p.grad for p in weights.trainable.values() if p.grad is not None]
        held.append(sum(t.nbytes for t in {id(t): t for t in (*trained, *grads, *state)}.values()))
        held[-1] += sum(t.nbytes for t in weights.averages.values())

    weights.optimizer.register_step_pre_hook(measure)
    chain.run(job.steps)
    device = DeviceProfile("cpu", "", 1 << 30, 1e9)
    counted = workload_of(
        {"a": device},
        {"a": "k"},
        found.costs,
        8,
        2,
        element_bytes=2,
        moments=[2.0 + (ema is not None)] * len(found.costs),
    ).state_sum_bytes(0, len(found.costs))
    frozen = sum(c.parameter_bytes - c.trainable_bytes for c in found.costs)
    assert counted - frozen == held[-1]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("model", ["lengths", "sizes"])
def test_sizes_that_vary_between_micro_batches(model: str, stages: int) -> None:
    job = zoo.make(model)
    assert len({tuple(x.shape) for x, _ in (job.data[i] for i in range(8))}) > 3
    chain = Chain(job, captured(model), stages)
    assert_equal(chain, chain.run(job.steps), expected(model, "adamw"))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": None},
        {"reduction": "sum"},
        {"weight": lambda y: float((y % 3).sum()) + 1},
        {"schedule": Schedule("CosineAnnealingLR", T_max=5)},
        {"micro_batch_size": 8},
        {"micro_batch_size": 1},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_a_job_may_ask_for(options: dict[str, Any]) -> None:
    job = zoo.make("char_gpt", **options)
    chain = Chain(job, captured("char_gpt"), 3)
    assert_equal(chain, chain.run(job.steps), reference(job))


def test_evaluation_between_steps_equals_eager_and_changes_nothing() -> None:
    job = zoo.make("cnn")
    model = copy.deepcopy(job.model)
    assert isinstance(model, nn.Module)
    chain = Chain(job, captured("cnn"), 3)
    x, y = stack([job.data[i] for i in range(7)])
    for step in range(2):
        chain.run_step(step)
        model.load_state_dict(chain.state())
        with torch.no_grad():
            want = model.eval()(x)
        loss, got = chain.evaluate((x, y))
        assert torch.equal(got, want)
        assert torch.equal(loss, job.loss(want, y))
    assert_equal(chain, [], dataclasses.replace(reference(job, steps=2), losses=[]))


class Shown(nn.Module):
    """Its output has weights in it: one as it is, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.first.weight
        views = weight.t(), weight[0].expand(2, 4)
        out = self.last(self.first(x).relu())
        return out, weight, *views, self.last.bias, self.last.bias.view(2, 2)


def of_first(output: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], y)


def test_weights_in_an_output_are_those_of_its_step_and_stay_so_while_it_waits() -> None:
    g = torch.Generator().manual_seed(3)
    data = [(torch.randn(4, generator=g), torch.randn(4, generator=g)) for _ in range(8)]
    sgd, model = Optimizer("SGD", lr=0.1), Shown()
    job = Job(model, of_first, data, sgd, batch_size=4, steps=3, eval_data=data, eval_every=1, cuts=("first",))
    chain = Chain(job, capture(job), 2)
    x, y = stack(data)
    eager = copy.deepcopy(model)
    for step in range(job.steps):
        eager.load_state_dict(chain.state())
        with torch.no_grad():
            want = [tensor.clone() for tensor in eager.eval()(x)]
        _, got = chain.evaluate((x, y))
        chain.run_step(step)
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * 6


def test_a_rolled_back_step_leaves_no_trace() -> None:
    job = zoo.make("cnn")
    chain = Chain(job, captured("cnn"), 2)
    before = {n: t.clone() for n, t in chain.state().items()}
    batch = stack([job.data[i] for i in range(2)])
    for runner in chain.runners:
        runner.begin(0)
    chain.forward(0, 0, batch)
    chain.backward_input(0, 1.0)
    chain.backward_weight(0, 0)
    chain.forward(0, 1, batch)
    for runner in chain.runners:
        runner.rollback()
        assert runner.live == 0
    assert all(torch.equal(t, before[n]) for n, t in chain.state().items())
    assert_equal(chain, chain.run(job.steps), expected("cnn", "adamw"))


def test_a_stage_moved_with_its_optimizer_state_goes_on_exactly() -> None:
    job = zoo.make("char_gpt")
    first = Chain(job, captured("char_gpt"), 2)
    losses = [first.run_step(s) for s in range(2)]
    moments = {n: s for runner in first.runners for n, s in runner.optimizer_state().items()}
    state = {n: t for runner in first.runners for n, t in runner.state_dict().items()}
    second = Chain(job, dataclasses.replace(captured("char_gpt"), state={**captured("char_gpt").state, **state}), 3)
    for runner in second.runners:
        runner.load_optimizer_state(moments)
    losses += [second.run_step(s) for s in range(2, job.steps)]
    assert_equal(second, losses, expected("char_gpt", "adamw"))


def test_each_kind_runs_in_micro_order() -> None:
    job = zoo.make("cnn")
    chain = Chain(job, captured("cnn"), 1)
    runner = chain.runners[0]
    batch = stack([job.data[i] for i in range(2)])
    raw = chain.captured.inputs_of(batch)
    with pytest.raises(ProtocolError, match=r"F of micro-batch 1 .* 0 is next"):
        runner.forward(1, raw, [])
    runner.forward(0, raw, [], 1)
    runner.forward(1, raw, [], 2)
    with pytest.raises(ProtocolError, match="B of micro-batch 1"):
        runner.backward_input(1, [], 1.0)
    runner.backward_input(0, [], 1.0)
    runner.backward_input(1, [], 1.0)
    with pytest.raises(ProtocolError, match="W of micro-batch 1"):
        runner.backward_weight(1)
    with pytest.raises(ProtocolError, match="unfinished"):
        runner.apply()


def test_what_arrives_is_checked() -> None:
    chain = Chain(zoo.make("unet"), captured("unet"), 2)
    first, second = chain.runners
    batch = stack([chain.job.data[i] for i in range(2)])
    raw = chain.captured.inputs_of(batch)
    sent, rng, _ = first.forward(0, raw, [], 1)
    with pytest.raises(ProtocolError, match="arrived as"):
        second.forward(0, raw, [t.double() if isinstance(t, torch.Tensor) else t for t in sent], rng)
    with pytest.raises(ProtocolError, match="arrived as"):
        first.backward_input(0, [t[:1] if isinstance(t, torch.Tensor) else None for t in sent])
    with pytest.raises(ProtocolError, match="no later stage"):
        Chain(zoo.make("unet"), captured("unet"), 1).fused_with({"nonsense": torch.zeros(1)})


def test_what_the_owner_feeds_is_checked() -> None:
    """A kernel may read behind a tensor that is not what the graph was verified for."""
    chain = Chain(zoo.make("unet"), captured("unet"), 1)
    runner, raw = chain.runners[0], chain.captured.inputs_of(stack([chain.job.data[i] for i in range(2)]))
    name, tensor = next(iter(raw.items()))
    for wrong in (tensor.long(), tensor[..., :1], tensor[None]):
        runner.begin(0)
        with pytest.raises(ProtocolError, match=f"input {name} arrived as"):
            runner.forward(0, {**raw, name: wrong}, [], 1)
        with pytest.raises(ProtocolError, match=f"input {name} arrived as"):
            runner.evaluate({**raw, name: wrong}, [], 1)
    with pytest.raises(ProtocolError, match=f"input {name} did not arrive"):
        runner.evaluate({}, [], 1)


def test_clipping_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 50, 7)]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None], 2.0)
    assert torch.equal(
        global_norm(norms), torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    )
    for limit in (0.1, 100.0):
        coefficient = clip_coefficient(norms, limit)
        want = [p.grad.clone() for p in parameters if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        for p, grad in zip(parameters, want):
            assert torch.equal(p.grad, grad.mul_(coefficient))


def test_clipping_without_any_gradient_is_torchs() -> None:
    want = torch.nn.utils.clip_grad_norm_([nn.Parameter(torch.zeros(3))], 0.5)
    assert torch.equal(global_norm([]), want)
    assert clip_coefficient([], 0.5) == 1.0


class Mixed(nn.Module):
    """Of two types; what the loss never reads is of the one that its first gradient is not of."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(6, 6, bias=False).bfloat16()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6).bfloat16()
        self.more = nn.ModuleList(nn.Linear(6, 6).bfloat16() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(torch.tanh(self.first(x)).bfloat16())
        for layer in self.more:
            h = torch.tanh(layer(h))
        return self.head(h.to(self.head.weight.dtype))  # type: ignore[no-any-return]


class Detached(Mixed):
    """No gradient flows to what the loss reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.pooler(x.bfloat16()).float().detach()[:, :3]


@pytest.mark.cases(2)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("kind", "precision", "seed"), [(Mixed, "fp32", 0), (Mixed, "bf16", 1), (Detached, "fp32", 8)])
def test_norms_of_two_types_are_combined_as_the_gradients_that_there_are(
    kind: type[nn.Module], precision: str, seed: int, stages: int
) -> None:
    torch.manual_seed(seed)
    data = [(torch.randn(6), torch.randn(3)) for _ in range(64)]
    job = Job(
        model=kind(),
        loss=F.mse_loss,
        optimizer=Optimizer("SGD", lr=0.5),
        data=data,
        batch_size=8,
        micro_batch_size=4,
        steps=20,
        clip_norm=0.01,
        precision=precision,
    )
    chain = Chain(job, capture(job), stages)
    assert_equal(chain, chain.run(job.steps), reference(job))


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [
        (Optimizer("AdamW"), "cpu"),
        (Optimizer("AdamW", capturable=True), "meta"),
        (Optimizer("ASGD"), "meta"),
        (Optimizer("AdamW", groups={"weight": {"class": "ASGD"}}), "meta"),
    ],
)
def test_counts_come_back_to_where_the_optimizer_reads_them(optimizer: Optimizer, where: str) -> None:
    """On a GPU every recovery failed with ASGD, and with `capturable` or `fused`, whose kernels read them there."""
    model = nn.Linear(4, 4)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    entries = {
        name: Input("parameter", Value(name, t.dtype, tuple(t.shape)), trainable=True) for name, t in state.items()
    }
    names = tuple(state)
    weights = Weights(names, names, (), state, optimizer, torch.device("meta"), entries)
    layout = optimizer_layout(optimizer, {name: (t.dtype, tuple(t.shape)) for name, t in state.items()})
    kept = {
        key.rpartition("/")[2]: torch.zeros(shape, dtype=dtype)
        for key, (dtype, shape) in layout.items()
        if "weight" in key
    }
    weights.load_optimizer_state({"weight": kept})
    found = weights.optimizer_state()["weight"]
    assert {tensor.device.type for tensor in found.values() if not tensor.dim()} == {where}
    assert {tensor.device.type for tensor in found.values() if tensor.dim()} == {"meta"}


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "Rprop"])
def test_a_count_has_the_type_of_every_peer_whatever_is_the_default_here(name: str) -> None:
    """In a script in float64 a save asked for 8 bytes of a count of 4, and no checkpoint ever came."""
    optimizer, masters = Optimizer(name, lr=0.1), {"w": (torch.float64, (4, 4))}
    state = {"w": torch.zeros(4, 4, dtype=torch.float64)}
    entries = {"w": Input("parameter", Value("w", torch.float64, (4, 4)), trainable=True)}
    torch.set_default_dtype(torch.float64)
    try:
        layout, moments = optimizer_layout(optimizer, masters), first_moments(optimizer, masters)
        weights = Weights(("w",), ("w",), (), state, optimizer, torch.device("cpu"), entries)
        weights.masters["w"].grad = torch.ones(4, 4)
        weights.commit(None, None)
    finally:
        torch.set_default_dtype(torch.float32)
    kept = {f"w/{key}": (v.dtype, tuple(v.shape)) for key, v in weights.optimizer_state()["w"].items()}
    assert layout["w/step"] == (torch.float32, ())
    assert kept.items() <= layout.items()
    assert all(value.dtype == layout[key][0] for key, value in moments.items())


def test_a_group_does_not_share_an_embedding_whose_gradients_depend_on_the_whole_batch() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
    data = [(i % 9, torch.zeros(3)) for i in range(16)]
    job = Job(model=model, loss=F.mse_loss, optimizer=Optimizer("SGD", lr=0.1), data=data, batch_size=4, steps=1)
    assert "how often an index occurs in the batch (scale_grad_by_freq)" in why_not_shared(job, capture(job))


class Transposed(nn.Module):
    """Gradients lie in memory otherwise than the values whose they are; "tied": the head shares the first stage's weights."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x).transpose(1, 2).contiguous().transpose(1, 2)
        h = h + torch.tanh(self.middle(h))
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.cases(1)
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_gradient_leaves_a_stage_as_it_lies_in_memory(tied: bool, split: bool) -> None:
    """Autograd lays what it adds to `.grad` as the value lies; the sums of the stage before would then round otherwise."""
    torch.manual_seed(1)
    data = [(torch.randint(13, (5,)), torch.randint(13, (5,))) for _ in range(16)]
    options: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "steps": 8, "codec": "none"}
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    job = Job(model=Transposed(tied), loss=loss, data=data, optimizer=Optimizer("SGD", lr=0.5), **options)
    found = finely(job)
    for stages in range(2, found.train.num_blocks + 1):
        chain = Chain(job, found, stages, "fused", split=split)
        assert_equal(chain, chain.run(job.steps), reference(job))


class Looped(nn.Module):
    """One layer that is used six times; its bias is added by itself as well, before and behind."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Conv2d(2, 4, 1), layer, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = getattr(self.layer, "bias", self.stem.bias)
        x = self.stem(x) + own[:, None, None]
        for _ in range(6):
            x = x + F.silu(self.layer(x))
        return self.head((x + own[:, None, None]).mean((2, 3)))


SHARED: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "prelu": lambda: nn.PReLU(4),
}


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("order", ["fused", "split", "late"])
@pytest.mark.parametrize("layer", SHARED)
def test_a_layer_that_stages_share_and_use_more_than_once(layer: str, order: str) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(2, 5, 5), torch.randint(3, ()).item()) for _ in range(16)]
    model = Looped(SHARED[layer]())
    job = Job(
        model, F.cross_entropy, data, Optimizer("SGD", lr=0.1, momentum=0.9), batch_size=8, micro_batch_size=4, steps=2
    )
    found, want = finely(job), reference(job)
    blocks, generator = found.train.num_blocks, random.Random(f"{layer} {order}")
    for _ in range(5):
        cuts = sorted(generator.sample(range(1, blocks), 2))
        chain = Chain(job, found, list(zip([0, *cuts], [*cuts, blocks])), order)
        assert_equal(chain, chain.run(job.steps), want)
