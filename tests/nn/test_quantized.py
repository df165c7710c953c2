"""Frozen weights in 4 and 8 bits: what they round, that a mesh trains beside them as one process does, and what they cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats
import torch
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.nn import QuantizedEmbedding, QuantizedLinear, quantize_frozen
from meshcee.nn.blocks import BLOCK, NF4
from meshcee.stage import StageRunner
from peers.state.store import CopyStore
from peers.wire.weights import digest_of
from tests.hf.tiny import LENGTH, WORDS
from tests.rig.mesh_fixture import train


def packed(weight: torch.Tensor, bits: int, **options: Any) -> torch.Tensor:
    """What a Linear with this weight computes with once it is quantized."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    linear.weight.copy_(weight)
    found = quantize_frozen(linear, bits, **options)
    assert isinstance(found, QuantizedLinear)
    return found.weight


def test_the_levels_are_the_quantiles_that_the_paper_defines() -> None:
    """QLoRA, appendix E: eight below zero, zero, seven above, scaled to [-1, 1]; `offset` is that of its authors' code."""
    offset = 0.9677083
    above = scipy.stats.norm.ppf(torch.linspace(offset, 0.5, 9)[:-1].double().numpy())
    below = -scipy.stats.norm.ppf(torch.linspace(offset, 0.5, 8)[:-1].double().numpy())
    levels = torch.tensor(sorted([*above, 0.0, *below]))
    assert torch.allclose(levels / levels.max(), torch.tensor(NF4, dtype=torch.float64), atol=1e-6)


def test_nf4_takes_the_nearest_level_of_each_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 80)
    blocks = weight.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    choices = torch.tensor(NF4) * largest[:, :, None]
    nearest = (choices - blocks[:, :, None]).abs().argmin(2, keepdim=True)
    assert torch.equal(packed(weight, 4), choices.expand(*blocks.shape, 16).gather(2, nearest).view(48, 80))
    assert torch.equal(packed(packed(weight, 4), 4), packed(weight, 4))  # what is on the levels stays there
    assert torch.equal(packed(torch.zeros(4, 64), 4), torch.zeros(4, 64))


def test_errors_are_those_of_4_and_8_bits() -> None:
    """Of normal weights, as a share of their own size. A weight of no whole blocks is filled up."""
    torch.manual_seed(0)
    weight = torch.randn(250, 333)

    def error(bits: int, **options: Any) -> float:
        return float((packed(weight, bits, **options) - weight).norm() / weight.norm())

    assert error(4) == pytest.approx(0.091, abs=0.003)
    assert error(4, double=True) == pytest.approx(error(4), rel=0.02)
    assert error(8) < 0.007
    assert error(8, double=True) < 0.01


def test_what_is_trained_shared_or_asked_for_stays() -> None:
    model = nn.ModuleDict(
        {
            "frozen": nn.Linear(64, 64).requires_grad_(False),
            "trained": nn.Linear(64, 64),
            "lm_head": nn.Linear(64, 64).requires_grad_(False),
            "words": nn.Embedding(10, 64).requires_grad_(False),
            "odd": nn.Embedding(10, 30).requires_grad_(False),
            "tied": nn.Embedding(64, 64).requires_grad_(False),
            "output": nn.Linear(64, 64, bias=False).requires_grad_(False),
        }
    )
    model["output"].weight = model["tied"].weight  # type: ignore[assignment]
    words, ids = model["words"].weight, torch.tensor([[1, 9], [0, 1]])
    found = quantize_frozen(model)
    kinds = {name for name, part in found.named_children() if isinstance(part, QuantizedLinear | QuantizedEmbedding)}
    assert kinds == {"frozen", "words"}
    assert torch.equal(found["words"](ids), packed(words.detach(), 4)[ids])  # type: ignore[arg-type]
    assert sum(t.nbytes for t in found["frozen"].state_dict().values()) == 64 * 64 // 2 + 64 * 64 // 64 * 4 + 64 * 4
    halved = found["frozen"].bfloat16()
    assert halved.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert halved.get_buffer("scales").dtype == torch.int32  # nothing rounds scales
    with pytest.raises(UsageError, match="get_peft_model"):
        quantize_frozen(nn.Linear(64, 64))


def adapted(bits: int, *, lora_dropout: float = 0.1, double: bool = False) -> Any:
    """A Llama in few bits, with LoRA by PEFT."""
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_hidden_layers=2, **sizes)
    base = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=4, lora_dropout=lora_dropout, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(base, lora)
    for name, tensor in model.named_parameters():  # PEFT begins with zeros, which would leave A without a gradient
        if "lora_B" in name:
            tensor.data.normal_(std=0.1)
    return quantize_frozen(model, bits, double=double).train()


def loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def job_of(model: Any, **options: Any) -> Job:
    rows = torch.randint(0, WORDS, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    usual: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "steps": 2, "clip_norm": 0.5}
    return Job(
        model=model,
        loss=loss,
        data=[({"input_ids": row[:-1]}, row[1:]) for row in rows],
        optimizer=meshcee.Optimizer("AdamW", lr=1e-2),
        **{**usual, **options},
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers for it
@pytest.mark.parametrize(
    ("bits", "double", "precision"),
    [
        (4, False, "fp32"),
        pytest.param(4, True, "bf16", marks=pytest.mark.slow),
        pytest.param(8, False, "fp32", marks=pytest.mark.slow),
    ],
)
async def test_an_adapter_on_few_bits_trains_as_in_the_plain_loop(bits: int, double: bool, precision: str) -> None:
    job = job_of(adapted(bits, double=double), precision=precision)
    captured = await asyncio.to_thread(capture, job)
    expected = meshcee.plain(job)
    for stages in (1, 2, 3):
        trained = await train(job, stages, 2, captured=captured)
        assert trained.losses == expected.losses
        assert trained.state.keys() >= {name for name in expected.state_dict if "lora" in name}
        for name, tensor in trained.state.items():
            assert torch.equal(tensor, expected.state_dict[name]), name
    initial = job.model.state_dict()  # type: ignore[union-attr]
    assert not any(torch.equal(initial[name], t) for name, t in expected.state_dict.items() if "lora" in name)


class Deep(nn.Module):
    """Frozen layers with a norm between them that is trained."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def deep(width: int = 256, layers: int = 4, quantize: bool = True) -> Job:
    torch.manual_seed(0)
    model = Deep(width, layers)
    rows = torch.randn(8, width)
    return Job(
        model=quantize_frozen(model) if quantize else model,
        loss=nn.functional.mse_loss,
        data=[(row, -row) for row in rows],
        optimizer=meshcee.Optimizer("AdamW", lr=1e-2),
        batch_size=4,
        micro_batch_size=2,
        steps=2,
    )


def runner_of(job: Job) -> StageRunner:
    found = capture(job)
    spec = found.train.slice(0, found.train.num_blocks)
    return StageRunner(spec, {name: found.state[name] for name in spec.state_names()}, job.optimizer)


@pytest.mark.parametrize("split", [False, True])
def test_an_unfolded_weight_is_not_kept_from_f_to_w(split: bool) -> None:
    width, layers = 256, 4
    job = deep(width, layers)
    runner = runner_of(job)
    runner.split = split
    runner.begin(0)
    x, y = torch.stack([job.data[0][0]] * 2), torch.stack([job.data[0][1]] * 2)
    raw = dict(zip((value.name for value in runner.spec.raw_inputs), (x, y)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        runner.forward(0, raw, [], None)
    held = sum(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < held < width * width * 4  # of one of them
    runner.backward(0, (), 1.0)
    assert max(cost.activation_bytes for cost in capture(job).costs) < width * width  # and so it is planned


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_weight_costs_its_codes_alone(precision: str) -> None:
    """No moments, no gradient, no master, no copy; what the planner counts is what is held."""
    job = replace(deep(), precision=precision)
    runner = runner_of(job)
    assert set(runner.weights.masters) == {"first.weight", "first.bias"}
    assert set(runner.optimizer_state()) == {"first.weight", "first.bias"}
    store = CopyStore()
    store.take(1, runner)
    for name, tensor in runner.state_dict().items():
        copies = [copy.data_ptr() for copy in store.values(name, digest_of(tensor))]
        assert len(copies) == name.startswith("first.")
        assert tensor.data_ptr() not in copies
    costs, plain = capture(job).costs, capture(replace(deep(quantize=False), precision=precision)).costs
    planned, before = (sum(c.parameter_bytes for c in found) for found in (costs, plain))
    layers, each = 4 * (256 * 256), 4 if precision == "fp32" else 2
    assert planned == before - each * layers + layers // 2 + layers // 64 * 4 + 256 * 2 * 4  # and the table of pairs


class Written(nn.Module):
    """Integers that unfold to a weight, of which some are written before they are used: `how` is by what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_buffer("codes", torch.arange(16, dtype=torch.int8))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.codes.float()
        if self.how == "a view":
            w[:8].mul_(3.0)
        elif self.how == "itself":
            w.add_(1.0)
        else:
            w.view(4, 4)[1:].view(-1)[: x.shape[0] // x.shape[0]].zero_()
        return self.c(self.a(x) * (w * 0.5))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["a view", "itself", "a view of a view"])
def test_what_is_written_into_an_unfolded_weight_is_not_forgotten(how: str) -> None:
    """It would be made again without what was written, and the gradient of `a` would be another one."""
    torch.manual_seed(0)
    rows = torch.randn(24, 8)
    job = Job(
        model=Written(how), loss=nn.functional.mse_loss, data=[(row, row.sum(0, keepdim=True)) for row in rows],
        optimizer=meshcee.Optimizer("SGD", lr=0.001), batch_size=8, micro_batch_size=4, steps=3, verify=False,
    )  # fmt: skip
    assert meshcee.check(job, steps=3).equal


def small() -> nn.Module:
    named: dict[str, nn.Module] = {"body": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)}
    return nn.ModuleDict(named).requires_grad_(False)


def prefixed(model: nn.Module) -> nn.Module:
    """By names as PEFT gives them."""
    return nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})


@pytest.mark.parametrize("wrap", [lambda model: model, prefixed], ids=["plain", "adapted"])
@pytest.mark.parametrize(
    ("skip", "packed"),
    [(("*lm_head",), {"body"}), (["lm_head"], {"body"}), (["body"], {"lm_head"}), ([], {"body", "lm_head"})],
)
def test_what_is_named_stays_in_full(wrap: Any, skip: Any, packed: set[str]) -> None:
    model = quantize_frozen(wrap(small()), skip=skip)
    found = {
        name.split(".")[-1] for name, module in model.named_modules() if type(module).__name__ == "QuantizedLinear"
    }
    assert found == packed


@pytest.mark.parametrize(
    ("skip", "says"),
    [
        ("lm_head", "skip is a list of patterns"),
        (None, "skip is a list of patterns"),
        (["head"], "no module .* name like 'head'"),
    ],
)
def test_a_name_that_keeps_nothing_is_refused(skip: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        quantize_frozen(small(), skip=skip)


def test_few_bits_are_made_once() -> None:
    with pytest.raises(UsageError, match="in few bits already"):
        quantize_frozen(quantize_frozen(small()))
