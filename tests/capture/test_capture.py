"""Capture: blocks where the model has layers, names that the user knows, errors that name the line."""

from __future__ import annotations

import datetime
import functools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import Capture, capture, stack
from meshcee.errors import CaptureError, PlanError, UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig import zoo


@functools.cache
def captured(model: str) -> Capture:
    return capture(zoo.make(model), evaluate=True)


LAYERS = {"char_gpt": 4, "cnn": 4, "gpt2": 3, "shared_layer": 4, "unet": 9}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("model", LAYERS)
def test_there_are_at_least_as_many_blocks_as_layers(model: str) -> None:
    found = captured(model)
    assert found.train.num_blocks >= LAYERS[model]
    assert found.train.num_blocks == len(found.costs)
    assert all(cost.flops > 0 for cost in found.costs)


MORE_LAYERS = {
    **{"llama": 3, "llama_eager": 3, "mixtral": 3, "bert": 3, "albert": 3, "t5": 4, "vit": 3, "resnet": 4},
    **{"lstm": 3, "gru": 3, "moe": 3, "many": 3, "lora": 3, "fno": 3, "lengths": 4, "sizes": 4},
}


@pytest.mark.slow
def test_models_of_every_kind_have_at_least_as_many_blocks_as_layers() -> None:
    assert LAYERS.keys() | MORE_LAYERS.keys() == set(zoo.ALL)
    found = {model: captured(model).train.num_blocks for model in MORE_LAYERS}
    assert {model: found[model] for model, layers in MORE_LAYERS.items() if found[model] < layers} == {}


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYERS)
def test_costs_cover_every_parameter_once(model: str) -> None:
    found = captured(model)
    total = sum(tensor.nbytes for tensor in found.state.values())
    assert sum(cost.parameter_bytes for cost in found.costs) == total
    assert found.costs[-1].boundary_bytes == 0


def test_a_transformer_is_cut_where_only_the_residual_stream_is_alive() -> None:
    stream = zoo.LENGTH * 16 * 4
    assert {cost.boundary_bytes for cost in captured("char_gpt").costs[:-1]} == {stream}


def test_flops_are_those_of_the_products() -> None:
    width, length = 16, zoo.LENGTH
    linear = 2 * length * width * 12 * width  # qkv 3, out 1, mlp 8
    attention = 2 * 2 * length * length * width
    blocks = [c for c in captured("char_gpt").costs if c.name.startswith("blocks")]
    total = sum(c.flops for c in captured("char_gpt").costs)
    want = 4 * (linear + attention) + 2 * length * width * zoo.VOCABULARY
    assert want <= total < 1.25 * want
    assert len(blocks) >= 4


def test_tied_parameters_appear_once_under_their_first_name() -> None:
    found = captured("char_gpt")
    assert found.aliases == {"head.weight": "tokens.weight"}
    assert "head.weight" not in found.state
    model = zoo.make("char_gpt").model
    assert isinstance(model, nn.Module)
    assert found.param_order == tuple(n for n, _ in model.named_parameters())
    model.load_state_dict(found.state_dict(found.state))


def test_each_stage_gets_its_raw_inputs_from_the_owner() -> None:
    program = captured("char_gpt").train
    n = program.num_blocks
    assert [v.name for v in program.slice(0, 1).raw_inputs] == ["x"]
    assert [v.name for v in program.slice(1, n - 1).raw_inputs] == []
    assert [v.name for v in program.slice(n - 1, n).raw_inputs] == ["y"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", LAYERS)
def test_every_slicing_agrees_at_its_cuts(model: str) -> None:
    for program in (captured(model).train, captured(model).evaluate):
        assert program is not None
        n = program.num_blocks
        for cut in range(1, n):
            assert program.slice(0, cut).sent == program.slice(cut, n).received
            assert program.slice(cut - 1, cut).sent == program.slice(cut, cut + 1).received


@pytest.mark.slow
def test_masks_and_shifted_labels_are_redone_from_raw_inputs() -> None:
    """Every BERT layer reads the padding mask: as the owner's raw input, not through all layers before it."""
    program = captured("bert").train
    for b in range(1, program.num_blocks - 1):
        spec = program.slice(b, b + 1)
        assert all(v.dtype != torch.bool for v in spec.sent)
        if any("attention" in s for s in spec.parameters):
            assert "x.attention_mask" in [v.name for v in spec.raw_inputs]


@pytest.mark.slow
def test_a_size_that_varies_has_a_usual_value_and_a_limit() -> None:
    [sizes] = [v for v in captured("lengths").train.slice(0, 1).raw_inputs if v.name == "x"]
    usual = max(x.shape[0] for x, _ in zoo.make("lengths").data)  # of the samples that are looked at, the largest
    assert sizes.nbytes(3, usual=True) == 3 * usual * 8
    assert sizes.nbytes(3) > 3 * zoo.LENGTH * 8
    assert sizes.admits(torch.zeros(5, zoo.LENGTH, dtype=torch.int64))
    assert not sizes.admits(torch.zeros(5, 100 * zoo.LENGTH, dtype=torch.int64))
    assert not sizes.admits(torch.zeros(5, zoo.LENGTH))


def test_a_slice_outside_the_program_is_refused() -> None:
    program = captured("cnn").train
    for first, end in [(0, 0), (-1, 2), (1, program.num_blocks + 1), (2, 1)]:
        with pytest.raises(PlanError):
            program.slice(first, end)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("model", LAYERS)
def test_any_batch_size_runs_and_equals_eager(model: str, batch: int) -> None:
    job = zoo.make(model)
    assert isinstance(job.model, nn.Module)
    found = captured(model)
    assert found.evaluate is not None
    spec = found.evaluate.slice(0, found.evaluate.num_blocks)
    x, y = stack([job.data[i] for i in range(batch)])
    raw = found.inputs_of((x, y))
    with torch.no_grad():
        results = spec.build()(
            *(raw[v.name] for v in spec.raw_inputs),
            *(found.state[n] for n in spec.parameters),
            *(found.state[n] for n in spec.buffers),
        )
        output = job.model.eval()(x)
    assert torch.equal(results[0], job.loss(output, y))
    got = found.output_of(results[1:])
    if isinstance(output, torch.Tensor):
        assert torch.equal(got, output)
    else:
        assert torch.equal(got.logits, output.logits)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["cnn", "shared_layer", "bert", "moe"])
def test_capture_leaves_the_model_as_it_was(name: str) -> None:
    """The same tensors in the same places too: where a module stands several times, fakes of the watch were left behind."""
    job = zoo.make(name)
    assert isinstance(job.model, nn.Module)
    job.model.eval()
    next(job.model.children()).train()
    before = {n: t.clone() for n, t in job.model.state_dict().items()}
    places = {n: id(p) for n, p in job.model.named_parameters(remove_duplicate=False)}
    modes = {n: m.training for n, m in job.model.named_modules()}
    capture(job, evaluate=True)
    assert modes == {n: m.training for n, m in job.model.named_modules()}
    assert places == {n: id(p) for n, p in job.model.named_parameters(remove_duplicate=False)}
    assert all(torch.equal(t, before[n]) for n, t in job.model.state_dict().items())


@pytest.mark.slow
def test_the_users_own_cuts() -> None:
    found = capture(zoo.make("char_gpt", cuts=("blocks.0", "blocks.2")))
    assert found.train.num_blocks == 3
    with pytest.raises(UsageError, match="no module 'nonsense'"):
        capture(zoo.make("char_gpt", cuts=("nonsense",)))


def job_of(model: nn.Module, loss: Any = F.mse_loss) -> Job:
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    return Job(model=model, loss=loss, optimizer=Optimizer("SGD", lr=0.1), data=data, batch_size=4, steps=1)


def test_a_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(CaptureError, match="one number"):
        capture(job_of(nn.Linear(4, 4), lambda o, y: (o - y).abs()))
    with pytest.raises(CaptureError, match=r"scalar tensor.*not \.item\(\)"):
        capture(job_of(nn.Linear(4, 4), lambda o, y: (o - y).abs().mean().item()))


class Scored(nn.Module):
    """As a model of Hugging Face: a loss where it is given labels, and else None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.linear(x)
        return types.SimpleNamespace(out=out, loss=None if labels is None else (out - labels).abs().mean())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda o, y: o.loss,
            r"None, as the model got no `labels` .*: rename that column of data\[i\] to `labels`, or return",
        ),
        (
            lambda o, y: {"mse": o.out.mean(), "l1": o.out.sum()},
            r"a dict of 'mse', 'l1': return one of its numbers, or their sum",
        ),
        (lambda o, y: (o.out.mean(), o.out.sum()), r"a tuple: return one of its numbers, or their sum"),
    ],
)
def test_a_loss_that_is_no_tensor_says_what_to_return(loss: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=rf"loss\(output, target\) returns {says}"):
        capture(job_of(Scored(), loss))


def test_a_loss_that_forgets_to_return_says_so() -> None:
    def forgets(output: torch.Tensor, target: torch.Tensor) -> None:
        (output - target).abs().mean()

    with pytest.raises(CaptureError, match="returns None: end it with `return`"):
        capture(job_of(nn.Linear(4, 4), forgets))


def test_a_loss_that_is_a_class_says_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"the loss, a class and not MSELoss\(\), failed"):
        capture(job_of(nn.Linear(4, 4), nn.MSELoss))


def test_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="trainable"):
        capture(job_of(nn.Linear(4, 4).requires_grad_(False)))


def test_samples_that_do_not_stack_are_named() -> None:
    with pytest.raises(UsageError, match=r"x\.1: .*; pad them to one shape in data\[i\]"):
        stack([((torch.ones(2), torch.ones(i)), 0) for i in (1, 2)])
    for text in (("a text", 0), {"text": "a text", "label": 0}):
        with pytest.raises(UsageError, match=r"at x.*: a text is no tensor; tokenize it in data\[i\]"):
            stack([text])


def test_samples_that_are_images_or_other_objects_are_told_what_makes_tensors_of_them() -> None:
    kind = type("PngImageFile", (), {"__module__": "PIL.PngImagePlugin"})
    image = type("Mine", (kind,), {})()
    for sample in ((image, 0), {"image": image, "label": 0}, {"images": [image, image], "label": 0}):
        with pytest.raises(
            UsageError,
            match=r"at x.*: an image is no tensor; use torchvision\.transforms\.ToTensor\(\), or dataset.with_",
        ) as told:
            stack([sample, sample])
        assert "pad" not in str(told.value)
    with pytest.raises(UsageError, match=r"at y: a date is no tensor; make a tensor of it in data\[i\]"):
        stack([(0, datetime.date(2026, 1, 1))])
