"""Random jobs: layers of tests/rig/random_layers.py with a random optimizer, schedule, data and settings, and plans for them.

The idea: a job is a function of its draw, a small value that prints and that `dataclasses.replace` shortens. So it is made as often
as one likes, in the mesh and for the plain loop, and a fault is repeated by a number.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.plan import Member, Pipeline, Plan, Stage
from tests.rig.random_layers import KINDS, Layer
from tests.rig.reference import stacked
from tests.rig.streams import Counted, Plain, Shuffled

__all__ = ["Drawn", "draw", "job_of", "plan_of"]

WORDS = 13
PURE = [name for name, kind in KINDS.items() if not kind.mutates]
MUTATING = [name for name, kind in KINDS.items() if kind.mutates]
OPTIMIZERS = (
    *("SGD", "SGD", "Adam", "AdamW", "AdamW", "RMSprop", "Adagrad"),
    *("AdamW8bit", "Adafactor", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"),
)
STREAMS = {"stream": Plain, "counted stream": Counted, "shuffled stream": Shuffled}
ORDERS = ("function", "weighted", "replaced", "subset", "epochs")
RATES = {"SGD": 0.05, "Adadelta": 0.5, "Adagrad": 0.02, "ASGD": 0.02}


@dataclass(frozen=True)
class Drawn:
    """Everything about a job and its run. `layers`: a kind, or the number of an earlier layer that comes once more."""

    seed: int
    width: int
    length: int
    inputs: str  # "words", "numbers", "tuple" or "dict"
    layers: tuple[str | int, ...]
    tied: bool
    several: bool  # outputs
    loss: str
    smooth: float
    reduction: str
    weighted: bool
    augmented: bool
    collated: bool
    made: bool  # by a function, not a module
    micro: int
    micros: int  # of a step
    steps: int
    samples: int
    optimizer: str
    options: dict[str, Any]
    groups: dict[str, dict[str, Any]]
    schedule: str | None
    clip: float | None
    ema: float | None
    eval_ema: bool
    precision: str
    keep_fp32: tuple[str, ...]
    recompute: bool
    audit: float
    eval_every: int
    eval_samples: int
    job_seed: int
    codec: str
    rates: dict[int, tuple[str, float]]  # after a step: "set" or "scale" the learning rate
    checkpoint_every: int
    breaks_at: int | None  # the step after which its user leaves it, and resumes it
    peers: int  # at most, of the first plan
    pace: float  # flops a second
    order: str  # of the data: "shuffled", a sampler of ORDERS, or a stream of STREAMS
    stored: bool  # its weights are in a file
    columns: bool  # a sample is a dict of columns, its label one of them


def draw(seed: int) -> Drawn:
    r = random.Random(f"job {seed}")
    kinds = PURE if r.random() < 0.5 else [*PURE, *MUTATING, *MUTATING, *MUTATING]
    layers: list[str | int] = []
    for i in range(r.randint(2, 7)):
        again = i and r.random() < 0.2
        layers += [r.randrange(i)] * r.choice([1, 1, 4]) if again else [r.choice(kinds)]
    inputs = r.choice(["words", "words", "numbers", "tuple", "dict"])
    loss, reduction = r.choice(["cross_entropy", "cross_entropy", "mse", "l1"]), "mean" if r.random() < 0.85 else "sum"
    micro, micros, steps = r.choice([1, 2, 2, 3]), r.randint(1, 6), r.randint(5, 12)
    if any(isinstance(layer, str) and KINDS[layer].whole for layer in layers):
        micro = max(2, micro)
    optimizer, options, groups = _optimizer(r)
    ema, share = r.choice([None, None, 0.9]), r.random()
    precision = "bf16" if share < 0.12 else "bf16-mixed" if share > 0.9 else "fp32"
    audit = 0.3 if precision != "bf16" and r.random() < 0.2 else 0.0
    rates = {}
    if r.random() < 0.2:
        rates = {r.randrange(steps): r.choice([("set", 1e-3), ("scale", 0.5), ("set", 0.0)]) for _ in range(2)}
    return Drawn(
        seed=seed,
        width=r.choice([4, 6, 8]),
        length=r.choice([3, 4, 5]),
        inputs=inputs,
        layers=tuple(layers),
        tied=r.random() < 0.4 and inputs in ("words", "dict"),
        several=r.random() < 0.15,
        loss=loss,
        smooth=r.choice([0.0, 0.0, 0.1]),
        reduction=reduction,
        weighted=loss == "cross_entropy" and reduction == "mean" and r.random() < 0.3,
        augmented=r.random() < 0.25,
        collated=r.random() < 0.08,
        made=r.random() < 0.15,
        micro=micro,
        micros=micros,
        steps=steps,
        samples=micro * micros * r.randint(1, 4) + r.randint(0, 3),
        optimizer=optimizer,
        options=options,
        groups=groups,
        schedule=_schedule(r, optimizer),
        clip=r.choice([None, None, 0.5, 0.05, 10.0]),
        ema=ema,
        eval_ema=ema is not None and r.random() < 0.5,
        precision=precision,
        keep_fp32=("*Norm*", "layers.0") if precision == "bf16" and r.random() < 0.5 else (),
        recompute=r.random() < 0.25,
        audit=audit,
        eval_every=r.choice([0, 0, 1, 2]),
        eval_samples=r.randint(1, 9),
        job_seed=r.choice([0, 3, 12345678901, r.randrange(1 << 40)]),
        codec=r.choice(["none", "none", "lossless"]),
        rates=rates,
        checkpoint_every=r.choice([0, 1, 2, 3]),
        breaks_at=r.randint(0, steps - 2) if r.random() < 0.25 else None,
        peers=r.randint(2, 4),
        pace=r.choice([1e4, 1e5, 1e6]),
        order=r.choice([*ORDERS, *STREAMS]) if r.random() < 0.4 else "shuffled",
        stored=r.random() < 0.1,
        columns=inputs == "dict" and r.random() < 0.5,
    )


def _optimizer(r: random.Random) -> tuple[str, dict[str, Any], dict[str, dict[str, Any]]]:
    """A class that reads one parameter at a time, its options and its groups."""
    name = r.choice(OPTIMIZERS)
    maybe: dict[str, Sequence[dict[str, Any]]] = {
        "SGD": ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}, {"weight_decay": 0.01}),
        "Adam": ({"amsgrad": True}, {"weight_decay": 0.1}, {"foreach": True}, {"betas": (0.8, 0.95)}),
        "AdamW": ({"amsgrad": True}, {"weight_decay": 0.1}, {"fused": True}, {"maximize": True, "lr": 1e-4}),
        "RMSprop": ({"momentum": 0.9}, {"centered": True}),
        "Adagrad": ({"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}),
    }
    options = {"lr": RATES.get(name, 3e-3)}
    for more in maybe.get(name, ({"weight_decay": 0.01},) if name not in ("Rprop", "Adafactor") else ()):
        if r.random() < 0.4:
            options |= more
    groups: dict[str, dict[str, Any]] = {}
    if r.random() < 0.45:
        groups["*.bias"] = {"lr": options["lr"] / 2}
    if r.random() < 0.3:
        groups["layers.1*|head*"] = {"lr": options["lr"] / 3}
    if r.random() < 0.15:
        groups["layers.2*"] = {"class": r.choice(["SGD", "AdamW", "AdamW8bit"]), "lr": 1e-3}
    if r.random() < 0.1:
        groups["nobody*"] = {"lr": 1e-9}
    return name, options, groups


def schedules(steps: int, momentum: bool) -> dict[str, Schedule]:
    linear, falling = Schedule("LinearLR", total_iters=2), Schedule("ExponentialLR", gamma=0.7)
    cycle: dict[str, Any] = {"cycle_momentum": momentum}
    found = (
        Schedule("CosineAnnealingLR", T_max=steps),
        Schedule("LinearLR", start_factor=0.1, total_iters=3),
        Schedule("ExponentialLR", gamma=0.8),
        Schedule("StepLR", step_size=2),
        Schedule("CosineWithWarmup", warmup=2, steps=steps),
        Schedule("PolynomialLR", total_iters=steps, power=2.0),
        Schedule("CosineAnnealingWarmRestarts", T_0=2, T_mult=2),
        Schedule("MultiStepLR", milestones=[1, 3]),
        Schedule("SequentialLR", schedulers=[linear, falling], milestones=[2]),
        Schedule("ChainedScheduler", schedulers=[Schedule("ConstantLR", total_iters=2), falling]),
        Schedule("OneCycleLR", max_lr=0.01, total_steps=steps + 2, **cycle),
        Schedule("CyclicLR", base_lr=0.001, max_lr=0.01, step_size_up=2, **cycle),
    )
    return {one.name: one for one in found}


def _schedule(r: random.Random, optimizer: str) -> str | None:
    names = [*schedules(1, momentum=False)]
    cycles = optimizer in ("SGD", "Adam", "AdamW", "NAdam", "RMSprop")
    return None if r.random() < 0.4 else r.choice(names if cycles else names[:-2])


class Net(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        width = drawn.width
        self.words = drawn.inputs in ("words", "dict")
        self.embed = nn.Embedding(WORDS, width) if self.words else nn.Linear(3, width)
        if drawn.inputs in ("tuple", "dict"):
            self.second = nn.Linear(2, width)
        self.layers = nn.ModuleList()
        for layer in drawn.layers:
            self.layers.append(self.layers[layer] if isinstance(layer, int) else Layer(layer, width))
        self.last = Layer("use", width)
        self.head = nn.Linear(width, WORDS, bias=not drawn.tied)
        if drawn.tied:
            self.head.weight = self.embed.weight
        self.several = drawn.several

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        h = self.embed(x)
        if second is not None:
            h = h + self.second(second).unsqueeze(1)
        saved: dict[str, list[Tensor]] = {}
        middle = h
        for i, layer in enumerate(self.layers):
            h = layer(h, saved)
            if i == len(self.layers) // 2:
                middle = h
        out = self.head(self.last(h, saved))
        return {"out": out, "middle": middle.pow(2).mean((1, 2))} if self.several else out


class Samples:
    def __init__(self, drawn: Drawn, count: int, first: int = 0) -> None:
        self.drawn, self.count, self.first = drawn, count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        drawn, chance = self.drawn, torch.Generator().manual_seed(self.first + i)
        words, length = drawn.inputs in ("words", "dict"), drawn.length
        x = torch.randint(0, WORDS, (length,), generator=chance) if words else torch.randn(length, 3, generator=chance)
        y = torch.randint(0, WORDS, (length,), generator=chance)
        if drawn.weighted:
            y[: i % length] = -100
        if drawn.augmented:
            x = (x + int(torch.randint(0, WORDS, ()))) % WORDS if words else x + 0.1 * torch.randn(length, 3)
        second = torch.randn(2, generator=chance)
        if drawn.columns and not drawn.collated:
            return {"x": x, "second": second, "labels": y}
        return {"tuple": (x, second), "dict": {"x": x, "second": second}}.get(drawn.inputs, x), y


def _loss(output: Any, y: Tensor, drawn: Drawn) -> Tensor:
    out = output["out"] if drawn.several else output
    if drawn.loss == "cross_entropy":
        found = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction=drawn.reduction, label_smoothing=drawn.smooth)
    elif drawn.loss == "mse":
        found = F.mse_loss(out, F.one_hot(y, WORDS).float(), reduction=drawn.reduction)
    else:
        found = F.smooth_l1_loss(out.mean(-1), y.float(), reduction=drawn.reduction)
    if drawn.several:
        found = found + 0.01 * (output["middle"].mean() if drawn.reduction == "mean" else output["middle"].sum())
    return found


def _out(output: Any) -> Tensor:
    found: Tensor = output["out"] if isinstance(output, dict) else output
    return found


def accuracy(output: Any, y: Tensor) -> float:
    return float((_out(output).argmax(-1) == y).float().mean())


def mass(output: Any, y: Tensor) -> float:
    return float(_out(output).double().abs().sum())


def told(y: Tensor) -> float:
    return float((y != -100).sum())


def collated(samples: list[Any]) -> tuple[Any, Tensor]:
    return stacked([x for x, _ in samples]), torch.stack([y for _, y in samples])


def data_of(drawn: Drawn) -> Any:
    data = Samples(drawn, drawn.samples)
    return STREAMS[drawn.order](drawn.samples, data.__getitem__) if drawn.order in STREAMS else data


class Epochs(Sampler[int]):
    """Another order in each data epoch, as a DistributedSampler has one."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i * 7 + self.epoch) % self.count for i in range(self.count)])


def sampler_of(drawn: Drawn) -> Any:
    """With at least a batch in each data epoch."""
    count = drawn.samples

    def backwards(data_epoch: int, seed: int) -> list[int]:
        return [(seed + data_epoch - i) % count for i in range(count)]

    found = {
        "function": backwards,
        "weighted": WeightedRandomSampler([1.0 + i for i in range(count)], count + 1),
        "replaced": RandomSampler(range(count), replacement=True, num_samples=2 * count),
        "subset": SubsetRandomSampler([*range(count), 0]),
        "epochs": Epochs(count),
    }
    return found.get(drawn.order)


def weights_of(drawn: Drawn) -> Path:
    """A file with the weights of another start of the model."""
    torch.manual_seed(drawn.seed + 1)
    found = Path(tempfile.gettempdir(), f"meshcee-job-{drawn.seed}.safetensors")
    safetensors.torch.save_model(Net(drawn), str(found))
    return found


def model_of(drawn: Drawn) -> nn.Module:
    torch.manual_seed(drawn.seed)
    return Net(drawn)


def job_of(drawn: Drawn) -> Job:
    """A new one, with a model of its own, at each call."""
    momentum = not any("class" in extra for extra in drawn.groups.values())  # torch cycles it where all classes have it
    evaluates = drawn.eval_every > 0
    return Job(
        model=partial(Net, drawn) if drawn.made else model_of(drawn),
        loss=partial(_loss, drawn=drawn),
        data=data_of(drawn),
        sampler=sampler_of(drawn),
        weights=weights_of(drawn) if drawn.stored else None,
        collate=collated if drawn.collated else None,
        optimizer=Optimizer(drawn.optimizer, groups=drawn.groups, **drawn.options),
        schedule=schedules(drawn.steps, momentum)[drawn.schedule] if drawn.schedule else None,
        batch_size=drawn.micro * drawn.micros,
        micro_batch_size=drawn.micro,
        steps=drawn.steps,
        seed=drawn.job_seed,
        clip_norm=drawn.clip,
        reduction=drawn.reduction,
        weight=told if drawn.weighted else None,
        precision=drawn.precision,
        keep_fp32=drawn.keep_fp32,
        eval_data=Samples(drawn, drawn.eval_samples, 1000) if evaluates else None,
        eval_every=drawn.eval_every,
        metrics={"accuracy": accuracy, "mass": mass} if evaluates else {},
        recompute=drawn.recompute,
        audit=drawn.audit,
        codec=drawn.codec,
        ema=drawn.ema,
        eval_ema=drawn.eval_ema,
        checkpoint_every=drawn.checkpoint_every,
    )


def plan_of(drawn: Drawn, blocks: int, peers: Sequence[str], chance: random.Random, alone: bool) -> Plan:
    """Some of the peers, in up to three pipelines that are cut differently, or in one alone."""
    names = chance.sample([*peers], len(peers))
    most = min(drawn.micros, len(names))
    several = 1 if alone or chance.random() < 0.4 else min(chance.randint(1, 3), most)
    ends = [*sorted(chance.sample(range(1, drawn.micros), several - 1)), drawn.micros]
    pipelines = []
    for k, (begin, end) in enumerate(zip([0, *ends], ends)):
        count = chance.randint(1, min(4, blocks, len(names) - (several - 1 - k)))
        cuts = [*sorted(chance.sample(range(1, blocks), count - 1)), blocks]
        stages = []
        for first, last in zip([0, *cuts], cuts):
            window = chance.randint(1, end - begin + 1)
            stages.append(
                Stage(
                    first,
                    last,
                    (Member(names.pop(), drawn.micro),),
                    window=window,
                    live_cap=window + chance.randint(0, 3),
                    codec_out=drawn.codec,
                    codec_back=drawn.codec,
                    recompute=drawn.recompute,
                    fused=chance.random() < 0.25,
                )
            )
        pipelines.append(Pipeline(end - begin, tuple(stages)))
    return Plan(drawn.micro, tuple(pipelines))
