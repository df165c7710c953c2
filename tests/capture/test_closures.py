"""Losses, hooks and methods that refer to the model: capture, the check and the plain loop all see the model that is trained.

The idea: a copy of a model is none to a closure, which goes on to see the original. So each case is held against a loop that is
written out here, which trains the module that the closures know; and the module must be as it was after each of the three.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshcee
from meshcee.equality import blocks, net
from meshcee.errors import CaptureError, UsageError
from meshcee.sampling import draw
from tests.rig.mesh_fixture import even_plan

STEPS, BATCH, MICRO = 4, 8, 4
torch.manual_seed(0)
DATA = [(torch.randn(6), i % 5) for i in range(64)]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.log_t = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("center", torch.zeros(5))
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda h: h * self.log_t.exp()
        self.seen: dict[str, torch.Tensor] = {}
        self.told: list[int] = []
        self.weights = [(list(self.a.parameters()), 0.1), (list(self.b.parameters()), 0.2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.b(torch.relu(self.a(x))))
        self.kept = hidden  # with its graph, which no copy can have
        out: torch.Tensor = self.head(self.scale(hidden))
        assert isinstance(self.center, torch.Tensor)
        self.center = (0.9 * self.center + 0.1 * out.detach().mean(0)).to(out.dtype)
        return out

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out * self.log_t.exp(), y)


def penalty(model: Net) -> Loss:
    return lambda out, y: F.cross_entropy(out, y) + 1e-2 * sum(p.abs().sum() for p in model.parameters())


def centred(model: Net) -> Loss:
    return lambda out, y: F.cross_entropy(out - model.center.detach(), y)  # type: ignore[operator, union-attr]


def decayed(model: Net, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y) + model.b.weight.detach().pow(2).mean() * out.mean()


def itself(model: Net) -> Loss:
    weight = model.head.weight  # the tensor, and not by way of the module
    return lambda out, y: F.cross_entropy(out, y) + 0.1 * weight.norm()


def decaying(model: Net) -> Loss:
    decay = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    return lambda out, y: F.cross_entropy(out, y) + 1e-2 * torch.cat([p.flatten() for p in decay.values()]).norm()


def listed(model: Net, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y) + sum(k * p.square().sum() for own, k in model.weights for p in own)


class Regularised(nn.Module):
    """A loss that holds the model: its parameters are the model's own."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return penalty(self.model)(out, y)


def hooked(model: Net) -> Loss:
    model.b.register_forward_hook(lambda module, args, out: model.seen.__setitem__("b", out))
    return lambda out, y: F.cross_entropy(out, y) + 0.1 * model.seen["b"].pow(2).mean()


LOSSES: dict[str, Callable[[Net], Loss]] = {
    "a penalty on the parameters": penalty,
    "a buffer that forward assigns": centred,
    "a method of the model": lambda model: model.loss,
    "a partial function": lambda model: partial(decayed, model),
    "a hook that keeps features": hooked,
    "a module that holds the model": Regularised,
    "a parameter itself": itself,
    "parameters by name": decaying,
    "parameters in a list of the model": lambda model: partial(listed, model),
}


def job_of(case: str, precision: str) -> meshcee.Job:
    torch.manual_seed(1)
    model = Net()
    loss = LOSSES[case](model)
    model(torch.randn(2, 6))  # a batch was looked at before
    optimizer = meshcee.Optimizer("AdamW", lr=1e-2)
    how: dict[str, Any] = {"batch_size": BATCH, "micro_batch_size": MICRO, "steps": STEPS, "precision": precision}
    return meshcee.Job(model=model, loss=loss, data=DATA, optimizer=optimizer, **how)


def own_loop(job: meshcee.Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the user would write; the model is changed."""
    model = job.model
    assert isinstance(model, nn.Module)
    named = dict(model.named_parameters())
    masters = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    half = job.precision == "bf16"
    if half:
        model.bfloat16()
    optimizer, losses = torch.optim.AdamW(masters.values(), lr=1e-2), []
    for step in range(STEPS):
        total, drawn = 0.0, draw(job.seed, len(DATA), BATCH, step)
        for micro in range(BATCH // MICRO):
            at = drawn[micro * MICRO : (micro + 1) * MICRO]
            x, y = torch.stack([DATA[i][0] for i in at]), torch.tensor([DATA[i][1] for i in at])
            with meshcee.seeded(job.seed, step, micro):
                loss = job.loss(model(x.bfloat16() if half else x), y)
            (loss * (MICRO / BATCH)).backward()
            total += loss.item() * (MICRO / BATCH)
        for name, p in named.items():
            masters[name].grad = None if p.grad is None else p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
        losses.append(total)
    return losses, {name: p.detach() for name, p in masters.items()}


def state_of(job: meshcee.Job) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = job.model
    assert isinstance(model, Net)
    plain = {k: v for k, v in vars(model).items() if k in ("training", "seen", "told", "kept", "scale")}
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    return {n: t.clone() for n, t in model.state_dict().items()}, {**plain, "seen": dict(model.seen), "hooks": hooks}


def same(before: tuple[dict[str, torch.Tensor], dict[str, Any]], job: meshcee.Job) -> bool:
    """Whether the user's module is as it was, without a gradient."""
    (tensors, values), (then, others) = before, state_of(job)
    assert isinstance(job.model, nn.Module)
    return (
        all(tensors[n].dtype == t.dtype and torch.equal(tensors[n], t) for n, t in then.items())
        and all(
            values[k] is others[k] or (not isinstance(values[k], torch.Tensor) and values[k] == others[k])
            for k in values
        )
        and all(p.grad is None and p.requires_grad for p in job.model.parameters())
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", LOSSES)
def test_what_refers_to_the_model_is_equal_to_the_users_own_loop(case: str, precision: str) -> None:
    job = job_of(case, precision)
    before = state_of(job)
    plain = meshcee.plain(job)
    assert same(before, job)
    checked = meshcee.check(job, stages=(1, 2, 3))
    assert checked.differs == ""
    assert same(before, job)
    count = meshcee.capture(job).train.num_blocks  # one alone, where the loss uses all parameters
    found = meshcee.train(
        job, local=2, plan=even_plan(count, min(2, count), BATCH, MICRO, peers=("local-0", "local-1"))
    )
    assert same(before, job)
    losses, weights = own_loop(job)
    assert losses == plain.losses == found.losses
    for name, tensor in weights.items():
        assert torch.equal(tensor, plain.state_dict[name]), name
        assert torch.equal(tensor, found.state_dict[name]), name


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", LOSSES)
def test_a_model_that_does_not_fit_is_the_one_that_closures_know(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look before the first step runs it block by block, with stand-ins for its tensors."""
    monkeypatch.setattr(net, "COPIES", 1 << 40)
    monkeypatch.setattr(blocks, "SMALL_BYTES", 0)
    job, said = job_of(case, "bf16"), list[str]()
    before, found = state_of(job), meshcee.capture(job)
    net.examine(job, found, [MICRO], [((0, found.train.num_blocks),)], budget_s=float("inf"), say=said.append)
    assert said == [
        f"the model does not fit here some times over: only the forward pass of {MICRO} samples was compared with the module, "
        "block by block"
    ]
    assert same(before, job)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_of_another_copy_is_refused(precision: str) -> None:
    job = job_of("a method of the model", precision)
    assert isinstance(job.model, Net)
    job.model.kept = None  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"test_closures.py:\d+ .* reach it by its module"):
        meshcee.capture(replace(job, loss=itself(copy.deepcopy(job.model))))


class Reached(nn.Module):
    """What it computes with lies in lists, too. `how`: what is done with that."""

    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.teacher = nn.Linear(6, width), nn.Linear(width, 5), nn.Linear(6, width)
        self.c = nn.Linear(width, 5)
        self.c.weight = self.b.weight
        self.teacher.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))
        self.own = {"weights": (self.a.weight, self.b.weight), "state": [self.mean, self.steps]}
        self.pairs = list(zip(self.teacher.parameters(), self.a.parameters(), strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.own["weights"]
        h = self.b(self.a(x).relu()) + self.c(self.a(x))
        if self.how == "computed with":
            h = h + F.linear(F.linear(x, first), last) + first.detach().norm() + first.data[0].mean() / last.numel()
        if self.how == "checkpointed":
            h = h + checkpoint(lambda x: F.linear(F.linear(x, first), last), x, use_reentrant=False)
        if self.how == "followed":
            with torch.no_grad():
                for slow, fast in self.pairs:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
            h = h + self.b(self.teacher(x))
        if self.how == "counted":
            self.own["state"][1].add_(1)
            h = h / self.steps
        if self.how == "assigned":
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            h = h + self.own["state"][0].sum()
        if self.how == "cleared":
            last.grad = None
        if self.how == "clipped":
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        if self.how == "zeroed":
            self.zero_grad()
        return h


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("how", ["computed with", "checkpointed", "followed", "counted"])
@pytest.mark.parametrize("built", [False, True])
def test_what_lies_in_a_list_is_the_models_own(how: str, precision: str, built: bool) -> None:
    """Of a function that builds the model, large tensors are stand-ins."""
    job = replace(job_of("a method of the model", precision), loss=F.cross_entropy)
    model = partial(Reached, how, 4096) if built else Reached(how)
    assert meshcee.check(replace(job, model=model), stages=(1, 3)).differs == ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("assigned", "shares memory with 'mean', which training changes"),  # the list holds the first one for ever
        ("cleared", "a .grad is set at .*test_closures.py:.* `last.grad = None`"),
        ("clipped", "a .grad is read at .*test_closures.py:.*clip_grad_norm_"),
        ("zeroed", "a .grad is read at .*test_closures.py:.*zero_grad"),
    ],
)
def test_what_a_graph_cannot_do_with_it_is_refused(how: str, said: str) -> None:
    job = replace(job_of("a method of the model", "fp32"), loss=F.cross_entropy, model=Reached(how))
    with pytest.raises(CaptureError, match=said):
        meshcee.capture(job)


def test_the_trained_copy_is_the_users_no_more() -> None:
    job = job_of("a penalty on the parameters", "fp32")
    done = meshcee.plain(job)
    assert isinstance(job.model, Net)
    trained = dict(done.module.named_parameters())
    assert all(torch.equal(p, done.state_dict[n]) for n, p in trained.items())
    with torch.no_grad():
        trained["b.weight"].zero_()
    assert job.model.b.weight.abs().sum() > 0


def test_tensors_that_share_memory_share_it_while_they_are_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    whole = torch.arange(12.0)
    model.register_buffer("first", whole[:6])
    model.register_buffer("all", whole)

    def grow(module: nn.Module, args: Any) -> None:
        model.first.add_(1.0)  # type: ignore[operator, union-attr]

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + model.all.sum() * out.mean()  # type: ignore[operator, union-attr]

    model.register_forward_pre_hook(grow)
    job = replace(job_of("a method of the model", "fp32"), model=model, loss=loss)
    before = whole.clone()
    plain = meshcee.plain(job)
    assert torch.equal(whole, before)
    losses, _ = own_loop(job)
    assert losses == plain.losses


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, 'meshcee.Optimizer."AdamW", lr=3e-4.*got SGD'),
        ({"schedule": "cosine"}, 'meshcee.Schedule."CosineAnnealingLR", T_max=1000.*got str'),
    ],
)
def test_objects_of_torch_in_a_job_are_refused_with_what_to_write(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(job_of("a method of the model", "fp32"), **change)


def test_a_schedule_that_follows_evaluations_is_named() -> None:
    with pytest.raises(UsageError, match=r"callbacks=\[meshcee.ReduceOnPlateau"):
        meshcee.Schedule("ReduceLROnPlateau")


def test_options_that_torch_does_not_know_are_the_users_and_not_the_captures() -> None:
    job = replace(job_of("a method of the model", "fp32"), optimizer=meshcee.Optimizer("AdamW", learning_rate=0.1))
    with pytest.raises(UsageError, match="learning_rate"):
        meshcee.check(job)


@pytest.mark.slow
def test_torchs_encoder_with_a_padding_mask_is_evaluated() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.encoder(x, src_key_padding_mask=pad)[:, 0])
            return out

    rows = [((torch.randn(7, 6), torch.arange(7) > 3 + i % 3), i % 5) for i in range(16)]
    model = Encoder()
    job = replace(job_of("a method of the model", "fp32"), model=model, loss=F.cross_entropy, data=rows, eval_data=rows)
    assert meshcee.capture(job).evaluate is not None
    assert torch.backends.mha.get_fastpath_enabled()
