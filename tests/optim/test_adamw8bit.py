"""Moments in 8 bits: how near they stay, what they take, and that stages hold the bits of one loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.adamw8bit import BLOCK, SMALLEST, AdamW8bit
from meshcee.stage import optimizer_layout
from peers.planning.job_costs import costs_of
from tests.rig.chain import Chain

WIDTH = 72  # a matrix has 5,184 numbers, a little more than 20 blocks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = h + F.dropout(torch.tanh(layer(h)), 0.1, self.training)
        out: torch.Tensor = self.head(h)
        return out


def job_of(**changes: Any) -> Job:
    torch.manual_seed(5)
    data = [(torch.randint(WIDTH, ()), torch.randint(WIDTH, ())) for _ in range(48)]
    settings: dict[str, Any] = {
        "model": Net(),
        "loss": F.cross_entropy,
        "data": data,
        "optimizer": Optimizer("AdamW8bit", lr=1e-2, groups={"*.bias": {"weight_decay": 0.0}}),
        "batch_size": 12,
        "micro_batch_size": 4,
        "steps": 12,
        "clip_norm": 1.0,
    }
    return Job(**{**settings, **changes})


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, grads: list[torch.Tensor]) -> None:
    for grad in grads:
        parameter.grad = grad
        optimizer.step()


@pytest.mark.cases(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_hold_the_bits_of_one_loop(stages: int, precision: str) -> None:
    job = job_of(precision=precision)
    expected = plain(job)
    chain = Chain(job, capture(job), stages)
    losses = chain.run(job.steps)
    assert [sum(float(loss) * (4 / 12) for loss in step) for step in losses] == expected.losses
    state = chain.state()
    for name, tensor in expected.state_dict.items():
        assert torch.equal(state[name], tensor), name


def moments(**changes: Any) -> tuple[float, ...]:
    job = job_of(**changes)
    return costs_of(job, capture(job), plans=False).moments


def test_a_plan_counts_what_moments_take() -> None:
    """2 codes, and 2 scales for 256 numbers each, where AdamW has 8 bytes a number; small parameters are in full."""
    numbers, scales = WIDTH * WIDTH, -(-WIDTH * WIDTH // BLOCK)
    kinds = {"AdamW8bit": {}, "AdamW": {}, "SGD": {"lr": 0.1}}
    found = {kind: moments(optimizer=Optimizer(kind, **options)) for kind, options in kinds.items()}
    matrix = (2 * numbers + 2 * 4 * scales) / (4 * numbers)  # of the embedding
    layer = (2 * numbers + 2 * 4 * scales + 8 * WIDTH) / (4 * (numbers + WIDTH))
    assert {each for each in found["AdamW8bit"] if each} == {matrix, layer}
    assert layer < 0.55
    assert {each for each in found["AdamW"] if each} == {2.0}
    assert not any(found["SGD"])
    assert max(moments(ema=0.9)) == layer + 1
    assert len({len(each) for each in found.values()}) == 1


def test_a_plan_counts_each_block_by_its_own_class() -> None:
    """A mean over the job would give the embedding's stage too little."""
    mixed = moments(optimizer=Optimizer("SGD", lr=0.1, groups={"words*|head*": {"class": "AdamW"}}))
    assert set(mixed) <= {0.0, 2.0}
    assert mixed[0] == 2.0
    assert 0.0 in mixed[1:]


@pytest.mark.parametrize("shape", [(WIDTH, WIDTH + 1), (3,), (SMALLEST,), (SMALLEST - 1,), (20, 25, 3, 3), ()])
def test_members_expect_just_what_it_keeps(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = Optimizer("AdamW8bit")
    built = optimizer.build({"w": parameter})
    stepped(built, parameter, [torch.ones(shape)])
    real = {f"w/{k}": (t.dtype, tuple(t.shape)) for k, t in built.state[parameter].items()}
    assert optimizer_layout(optimizer, {"w": (torch.float32, shape)}) == real


def test_small_parameters_are_updated_as_by_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 60)) for _ in range(2))
    grads = [torch.randn(60) for _ in range(20)]
    stepped(AdamW8bit([ours], lr=0.01), ours, grads)
    stepped(torch.optim.AdamW([theirs], lr=0.01), theirs, grads)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_means_come_and_go_though_a_step_is_less_than_a_code() -> None:
    """A row whose gradients have ended beside one that goes on: rounded to the nearest, its mean of squares would stay."""
    rows = 2, SMALLEST // 2
    parameter = nn.Parameter(torch.zeros(rows[1], rows[0]))  # a block has numbers of both
    both, one = torch.ones(rows[1], rows[0]), torch.tensor([1.0, 0.0]).expand(rows[1], rows[0]).contiguous()
    optimizer, theirs = AdamW8bit([parameter], lr=0.0), nn.Parameter(torch.zeros(2))
    full = torch.optim.AdamW([theirs], lr=0.0)
    stepped(optimizer, parameter, [both] * 300 + [one] * 300)
    stepped(full, theirs, [torch.ones(2)] * 300 + [torch.tensor([1.0, 0.0])] * 300)
    state, scales = optimizer.state[parameter], optimizer.state[parameter]["exp_avg_sq_scales"]
    squares = (state["exp_avg_sq"].float() / 255) ** 4 * scales.repeat_interleave(BLOCK).view(rows[1], rows[0])
    torch.testing.assert_close(squares.mean(0), full.state[theirs]["exp_avg_sq"], rtol=0.02, atol=0)
    assert state["exp_avg"][:, 1].abs().max() <= 1


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.floats(-6, 6), st.integers(1, 20))
def test_a_step_is_near_adamws_whatever_the_gradients(seed: int, scale: float, steps: int) -> None:
    """Of gradients that lie far apart, too, and of rows that are seldom used; never a step without measure."""
    torch.manual_seed(seed)
    spread = 10 ** (scale + 3 * torch.rand(WIDTH, 1))
    grads = [torch.randn(WIDTH, WIDTH) * spread * (torch.rand(WIDTH, 1) < 0.7) for _ in range(steps)]
    ours, theirs = (nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(2))
    stepped(AdamW8bit([ours], lr=1.0, weight_decay=0.0), ours, grads)
    stepped(torch.optim.AdamW([theirs], lr=1.0, weight_decay=0.0), theirs, grads)
    assert ours.detach().abs().max() <= 4 * steps  # |m| is at most sqrt(v) times a small number
    moved = theirs.detach().norm()
    assert (ours - theirs).detach().norm() <= 0.1 * moved


def test_it_learns_what_adamw_learns() -> None:
    def last(kind: type[torch.optim.Optimizer]) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 64))
        wanted, optimizer, losses = torch.randn(32, 64) / 6, kind(net.parameters(), lr=3e-3), []
        for _ in range(150):
            x = torch.randn(64, 32)
            loss = F.mse_loss(net(x), torch.tanh(x @ wanted))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0]
        return sum(losses[-10:]) / 10

    assert last(AdamW8bit) == pytest.approx(last(torch.optim.AdamW), rel=0.03)


def test_how_a_tensor_lies_in_memory_changes_no_bit() -> None:
    torch.manual_seed(0)
    start = torch.randn(24, 24, 3, 3)
    grads = [torch.randn_like(start) for _ in range(4)]
    rows = nn.Parameter(start.clone())
    pixels = nn.Parameter(start.clone().to(memory_format=torch.channels_last))
    stepped(AdamW8bit([rows]), rows, grads)
    stepped(AdamW8bit([pixels]), pixels, [grad.to(memory_format=torch.channels_last) for grad in grads])
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rows, pixels)


def test_both_numbers_of_a_complex_one_are_updated() -> None:
    torch.manual_seed(0)
    start = torch.randn(SMALLEST, 2)
    pairs, complex_ones = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_complex(start.clone()))
    grads = [torch.randn(SMALLEST, 2) for _ in range(3)]
    stepped(AdamW8bit([pairs]), pairs, grads)
    stepped(AdamW8bit([complex_ones]), complex_ones, [torch.view_as_complex(grad) for grad in grads])
    assert torch.equal(torch.view_as_real(complex_ones), pairs)


def test_a_loop_of_your_own_goes_on_from_a_state_dict() -> None:
    """torch's own loading would turn the codes into numbers of the parameter's type."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(WIDTH, WIDTH))
    grads = [torch.randn(WIDTH, WIDTH) for _ in range(6)]
    first = AdamW8bit([parameter])
    stepped(first, parameter, grads[:3])
    again = nn.Parameter(parameter.detach().clone())
    second = AdamW8bit([again])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    stepped(first, parameter, grads[3:])
    stepped(second, again, grads[3:])
    assert torch.equal(parameter, again)
    assert second.state[again]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"amsgrad": True}])
def test_options_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="optimizer AdamW8bit"):
        Optimizer("AdamW8bit", **options).build({"w": nn.Parameter(torch.zeros(2))})


@pytest.mark.parametrize("group", [{"maximize": True}, {"betas": (0.9, 2.0)}, {"betas": (1.0, 0.9)}, {"lr": None}])
def test_options_of_a_group_without_a_meaning_are_refused(group: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="optimizer AdamW8bit"):
        Optimizer("AdamW8bit", groups={"w": group}).build({"w": nn.Parameter(torch.zeros(2))})


def test_a_gradient_whose_square_is_infinite_harms_no_neighbour() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    grads = [torch.randn(WIDTH, WIDTH) for _ in range(4)]
    grads[0][0, 0] = 1e21
    stepped(AdamW8bit([parameter]), parameter, grads)
    assert parameter.isfinite().all()


def test_the_default_type_of_the_process_does_not_matter() -> None:
    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float32))
        stepped(AdamW8bit([parameter]), parameter, [torch.randn(WIDTH, WIDTH, dtype=torch.float32) for _ in range(3)])
        return parameter.detach()

    usual = trained()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(trained(), usual)
    finally:
        torch.set_default_dtype(torch.float32)


def test_beside_another_class_a_loop_goes_on_from_a_state_dict_too() -> None:
    optimizer = Optimizer("AdamW8bit", lr=0.01, groups={"*.bias": {"class": "AdamW"}})

    def made() -> dict[str, nn.Parameter]:
        torch.manual_seed(0)
        return {"a.weight": nn.Parameter(torch.randn(WIDTH, WIDTH)), "a.bias": nn.Parameter(torch.randn(WIDTH))}

    def step(built: torch.optim.Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        built.step()

    ours, again = made(), made()
    first, second = optimizer.build(ours), optimizer.build(again)
    step(first, ours, 1)
    step(second, again, 1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(first, ours, 2)
    step(second, again, 2)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


def test_a_layout_of_billions_of_numbers_costs_nothing() -> None:
    layout = optimizer_layout(Optimizer("AdamW8bit"), {"w": (torch.float32, (1 << 17, 1 << 16))})
    assert layout["w/exp_avg"] == (torch.int8, (1 << 17, 1 << 16))
    assert layout["w/exp_avg_scales"] == (torch.float32, ((1 << 33) // BLOCK,))
