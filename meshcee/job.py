"""What a user defines: the model, its loss, data and optimizer. Nothing here knows of peers.

The idea: a Job holds ordinary torch objects; only data derived from it (a graph, numbers, names) ever leaves the owner.
So the optimizer and the learning-rate schedule are given by name.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from meshcee.errors import UsageError
from meshcee.figures import MIXES
from meshcee.user_code import calling

__all__ = ["At", "Job", "Optimizer", "Schedule", "seed_of", "seeded"]

CODEC_CHOICES = ("none", "lossless", "bf16", "int8", "int4", "auto")  # what a job may ask for
# torch.optim classes whose update of a parameter reads that parameter and its own state only.
PER_PARAMETER = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
    | {"Adafactor", "Muon"}
)
# Why others are refused, where people ask.
REFUSED = {
    "LBFGS": "its update reads all parameters at once",
    "SparseAdam": "it takes sparse gradients alone",
    "AdamW8bit": "libraries keep 8-bit moments in kernels or tensor classes of their own: Adafactor's are a row and a column",
    "AdamWScheduleFree": "it computes with other weights than it evaluates: Job(ema=0.999) has an average to evaluate",
    "SGDScheduleFree": "it computes with other weights than it evaluates: Job(ema=0.999) has an average to evaluate",
}

_WHOLE, _FLAG, _FUNCTION = (Integral, "a whole number of 64 bits"), (bool, "True or False"), (Callable, "a function")
# What a field is, where another type would fail far from here.
FIELDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("batch_size", "steps", "seed", "micro_batch_size"), _WHOLE),
    **dict.fromkeys(("eval_every", "checkpoint_every", "workers", "threads"), _WHOLE),
    **dict.fromkeys(("clip_norm", "ema", "audit"), (Real, "a number")),
    **dict.fromkeys(("direct_sums", "recompute", "groups", "adapt", "verify", "eval_ema"), _FLAG),
    **dict.fromkeys(("loss", "weight", "collate"), _FUNCTION),
    "model": (Callable, "an nn.Module, or a function that makes one"),
    "metrics": (Mapping, "a dict of names and functions"),
    "weights": ((str, os.PathLike), "a path"),
    "cuts": ((tuple, list), "a tuple of names of modules"),
    "name": (str, "a text"),
}


class Optimizer:
    """A torch.optim class by name, with options and parameter groups by name pattern.

    >>> Optimizer("AdamW", lr=3e-4, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}})

    Patterns are shell patterns over `named_parameters` names; the first that matches wins, the rest form the last group. A group
    may have a class of its own, with options of its own alone:

    >>> Optimizer("Muon", lr=0.02, groups={"*embed*|*.bias": {"class": "AdamW", "lr": 3e-4}})
    """

    def __init__(self, name: str, *, groups: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> None:
        if not isinstance(groups or {}, Mapping) or not all(isinstance(g, Mapping) for g in (groups or {}).values()):
            raise UsageError('groups are options by a pattern of names: groups={"*.bias": {"weight_decay": 0.0}}')
        for kind in (name, *(extra["class"] for extra in (groups or {}).values() if "class" in extra)):
            if kind not in PER_PARAMETER:
                why = f"cannot be split over stages, as {REFUSED[kind]}" if kind in REFUSED else "is no name known here"
                use = ", ".join(sorted(PER_PARAMETER))
                raise UsageError(f"optimizer {kind!r:.80} {why}: write one of torch.optim's {use}")
        for key, value in [*options.items(), *(kv for g in (groups or {}).values() for kv in g.items())]:
            numbers = isinstance(value, tuple | list) and all(x is None or isinstance(x, int | float) for x in value)
            known = key in ("class", "adjust_lr_fn") and isinstance(value, str)
            if not (value is None or isinstance(value, bool | int | float) or numbers or known):
                raise UsageError(f"optimizer option {key:.80}={value!r:.80} is no number; groups= choose by name")
        self.name = name
        self.options = dict(options)
        self.groups = {pattern: dict(extra) for pattern, extra in (groups or {}).items()}
        self.ema: float | None = None  # a stage keeps an average of what it updates: what a Job says
        self.eval_ema = False  # and evaluates it

    def averaging(self, ema: float | None, evaluated: bool = False) -> Optimizer:
        """The same, with this decay of an average of the weights, which evaluations are of or not."""
        found = Optimizer(self.name, groups=self.groups, **self.options)
        found.ema, found.eval_ema = ema, evaluated
        return found

    def group_of(self, parameter: str) -> int:
        """Index of the group that holds this parameter; the group without a pattern is the last."""
        for i, pattern in enumerate(self.groups):
            if any(fnmatch.fnmatchcase(parameter, one) for one in pattern.split("|")):
                return i
        return len(self.groups)

    def check(self, types: Mapping[str, torch.dtype]) -> None:
        """Raise UsageError where a step reads more than one parameter at a time, for parameters of these types.

        Where Adafactor is not told its first eps, it takes that of the first parameter's type for all of a group (torch 2.13).
        """
        for group, extra in enumerate([*self.groups.values(), {}]):
            kind = extra.get("class", self.name)
            eps = {**(self.options if kind == self.name else {}), **extra}.get("eps") or (None,)
            alike = {types[name] for name in types if self.group_of(name) == group}
            if kind == "Adafactor" and eps[0] is None and len(alike) > 1:
                said = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in alike))
                raise UsageError(
                    f"Adafactor takes the first of its eps from the first parameter of a group, and one holds {said}; "
                    "say Optimizer('Adafactor', eps=(1e-7, 1e-3))"
                )

    def build(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over these parameters. Every group exists, also when empty, so that indices agree."""
        groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"params": []}, extra) for extra in [*self.groups.values(), {}]
        ]
        for name, parameter in named.items():
            groups[self.group_of(name)][0]["params"].append(parameter)
        parts: dict[str, list[dict[str, Any]]] = {}  # by class
        for group, extra in groups:
            group |= {key: value for key, value in extra.items() if key != "class"}
            parts.setdefault(extra.get("class", self.name), []).append(group)
        built = [self._built(kind, own) for kind, own in parts.items()]
        return built[0] if len(built) == 1 else _Several(built, [group for group, _ in groups])

    def _built(self, kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Of one class. A group that is named for another class has its own options only."""
        try:
            built: torch.optim.Optimizer = getattr(torch.optim, kind)(
                groups, **(self.options if kind == self.name else {})
            )
        except (TypeError, ValueError) as error:
            more = '; give others a class: groups={"PATTERN": {"class": "AdamW"}}' if kind == "Muon" else ""
            raise UsageError(f"torch.optim.{kind}: {error}{more}") from error
        return built

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.name, "options": self.options, "groups": [[p, g] for p, g in self.groups.items()]}
        if self.ema is None:
            return found
        return found | {"ema": self.ema} | ({"eval_ema": True} if self.eval_ema else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Optimizer:
        try:
            groups = {str(pattern): dict(extra) for pattern, extra in data["groups"]}
            found = cls(str(data["name"]), groups=groups, **dict(data["options"]))
            return found if data.get("ema") is None else found.averaging(float(data["ema"]), bool(data.get("eval_ema")))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not an optimizer: {error!r}") from error


class _Several(torch.optim.Optimizer):
    """Optimizers of several classes as one: the same groups, in the order of their patterns, and the same state."""

    def __init__(self, classes: list[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> None:
        first, *others = classes
        shared = {k: v for k, v in first.defaults.items() if all((k, v) in o.defaults.items() for o in others)}
        super().__init__(groups, shared)  # schedules look at these
        self.classes = classes
        self._link()

    def _link(self) -> None:
        """One state and one list of groups for all: each class has its own groups of them."""
        for one in self.classes:
            one.state = self.state
            own = {id(p) for group in one.param_groups for p in group["params"]}
            one.param_groups = [g for g in self.param_groups if any(id(p) in own for p in g["params"])]

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._link()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"classes": self.classes}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.classes:
            one.step()


class Schedule:
    """A torch.optim.lr_scheduler class by name, stepped once per optimizer step by the owner.

    >>> Schedule("CosineAnnealingLR", T_max=1000)
    >>> Schedule("SequentialLR", schedulers=[Schedule("LinearLR"), Schedule("ExponentialLR", gamma=0.9)], milestones=[5])
    >>> Schedule("CosineWithWarmup", warmup=100, steps=1000)

    "ConstantWithWarmup" (with `warmup` alone), "LinearWithWarmup" and "CosineWithWarmup" are those of transformers, bit for bit.
    """

    def __init__(self, name: str, **options: Any) -> None:
        if name == "ReduceLROnPlateau":
            raise UsageError(
                "'ReduceLROnPlateau' follows evaluations: train(..., callbacks=[meshcee.ReduceOnPlateau(...)])"
            )
        if not (name in WARMUPS or hasattr(torch.optim.lr_scheduler, name)):
            ours = ", ".join(WARMUPS)
            raise UsageError(f"schedule {name!r} is not a step-driven class of torch.optim.lr_scheduler, nor {ours}")
        if name in WARMUPS and set(options) != WARMUPS[name][1]:
            raise UsageError(f"schedule {name!r} takes {' and '.join(sorted(WARMUPS[name][1]))}, each a count of steps")
        chained = options.get("schedulers", ())
        if not isinstance(chained, list | tuple) or not all(isinstance(part, Schedule) for part in chained):
            raise UsageError(f"schedule {name!r}: `schedulers` is a list of meshcee.Schedule(...)")
        if name == "SequentialLR" and any("schedulers" in part.options for part in chained):
            raise UsageError("torch's SequentialLR holds no other chain: list the schedules themselves")
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        """The same in every process, so functions have their names."""
        return f"Schedule({self.name!r}, {self.words})"

    @property
    def words(self) -> str:
        """The options, for who compares two runs."""
        return repr(sorted((key, _named(value)) for key, value in self.options.items()))

    def build(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        options = dict(self.options)
        if self.name in WARMUPS:
            kind = torch.optim.lr_scheduler.LambdaLR
            options = {"lr_lambda": partial(WARMUPS[self.name][0], **options)}
        else:
            kind = getattr(torch.optim.lr_scheduler, self.name)
        if "schedulers" in options:
            options["schedulers"] = [part.build(optimizer) for part in options["schedulers"]]
        with calling(f"torch.optim.lr_scheduler.{self.name}"):
            built: torch.optim.lr_scheduler.LRScheduler = kind(optimizer=optimizer, **options)
        return built


def _constant(step: int, warmup: int) -> float:
    return step / max(1, warmup) if step < warmup else 1.0


def _linear(step: int, warmup: int, steps: int) -> float:
    return step / max(1, warmup) if step < warmup else max(0.0, (steps - step) / max(1, steps - warmup))


def _cosine(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / max(1, steps - warmup)))))


# What the learning rate is multiplied by at each step, and the options that say so.
WARMUPS: dict[str, tuple[Callable[..., float], set[str]]] = {
    "ConstantWithWarmup": (_constant, {"warmup"}),
    "LinearWithWarmup": (_linear, {"warmup", "steps"}),
    "CosineWithWarmup": (_cosine, {"warmup", "steps"}),
}


class _Name:
    """Stands for a function in a text; its address would be another one in every process."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __repr__(self) -> str:
        return f"{self._of.__module__}.{self._of.__qualname__}"


def _named(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_named, value))
    if not callable(value):
        return value
    return _Name(value if hasattr(value, "__qualname__") else type(value))


@dataclass(frozen=True, eq=False)
class At:
    """Data that stays at its place: a peer reads it, and samples go from there to the stages, never through the owner.

    >>> Job(data=At("hospital", "scans", like=(torch.zeros(1, 64, 64), 0), samples=4000), ...)

    where    a peer's name or id, or a region's name: of several peers there that have the set, one reads
    name     what its owner calls it: `meshcee peer --dataset scans=FILE.py:make`
    like     a sample of your own making, with the types and shapes of the real ones: all that is seen here
    samples  how many the set has

    Here every sample is `like`: with it the model is captured, and looked at before the first step.
    """

    where: str
    name: str
    like: Any
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not -self.samples <= index < self.samples:
            raise IndexError(index)
        return self.like

    def check(self, job: Job) -> None:
        """UsageError for what would need the samples at the owner."""
        needs = {
            "collate": "collate is code of yours, and the peer with the data runs its own owner's only: have its `make` do this",
            "workers": "workers are processes of yours, and the peer with the data reads ahead by itself",
            "weight": "weight looks at targets, which never come to you",
            "audit": "an audit computes steps again from their samples, which never come to you",
            "groups": "whether devices can share a stage is tried on several samples that differ, which never come to you",
        }
        if found := next((why for name, why in needs.items() if getattr(job, name)), None):
            raise UsageError(f"{found}: leave this out of a job whose data is At({self.where!r}, {self.name!r})")


@dataclass(frozen=True)
class Job:
    """One training run.

    model      an nn.Module; or a function that returns one, which is called after `torch.manual_seed(seed)` and whose
               weights never exist all at once: every peer makes those of its stage, for models larger than any machine
    weights    a safetensors checkpoint that the model starts from, as `model.load_state_dict` would load it: a file, or a
               folder with model.safetensors or with shards and their index
    loss       (output, target) -> scalar tensor; `reduction` says whether it is the mean or the sum over samples
    data       map-style: `len(data)` and `data[i] -> (x, y)`; x and y are tensors, numbers, or tuples / dicts of them.
               Samples are stacked along a new first dimension. `model(x)`, `model(*x)` or `model(**x)` by x's type.
               Or data[i] is a dict of columns, each one tensor: `model(**row)`, without the label if forward has no parameter
               for it. y is the column "labels", or else "label", or else all columns.
               Or iterable: `iter(data)` gives samples, which are read in order; its end begins the next data epoch.
               Or At(...): a set that a peer reads where it is
    collate    list of samples -> (x, y), each with one row a sample, as a DataLoader's collate_fn; a sample may then be anything
    sampler    which samples, in which order: a torch Sampler, or (data epoch, seed) -> indices; None shuffles all of them
    optimizer  Optimizer(...) by name
    workers    processes of the owner that read samples of training ahead, by spawn: classes of `data` are at the top of a file;
               0 reads in the owner's own process
    batch_size samples per optimizer step; steps: how many
    micro_batch_size  samples per micro-batch; None lets the first plan choose
    clip_norm  global gradient norm, as torch.nn.utils.clip_grad_norm_
    weight     target -> number: the weight of a micro-batch in the step's loss (for ignored tokens); default its size
    precision  "fp32", or "bf16": bf16 weights and compute, fp32 master weights and moments
    keep_fp32  modules that compute in fp32 though precision is "bf16", by shell patterns of their names or classes, as "*Norm*";
               "frozen" names those of which nothing is trained. They get bf16 inputs in fp32, and give fp32 outputs in bf16
    ema        also keep an average of the weights, with this decay: torch's AveragedModel with get_ema_multi_avg_fn(ema)
    eval_ema   evaluations, and so EarlyStop and KeepBest, are of that average and not of the weights
    metrics    name -> (output, target) -> number, averaged over eval_data by samples
    checkpoint_every  steps from one checkpoint to the next; 0 as often as it costs nearly nothing. The last step always
               writes one.
    direct_sums  the devices of a group sum gradients over TCP of their own (gloo; NCCL between GPUs) instead of the mesh's
               streams: faster inside a region, but not encrypted. They must reach one another directly, and each peer must have
               agreed (`meshcee peer --direct-sums`)
    recompute  stages keep only what they received and run F again before B: less memory, about a third more work
    codec      how activations and gradients cross links: "auto" (16 bits between regions, exact inside of one; what a LAN
               joins is one region), "lossless" (exact everywhere, and packed where a link between regions is thin), "none"
               (as they are), "bf16", "int8" or "int4"; docs/benchmarks.md says what each costs in loss
    groups     let the planner give a stage to several devices of one region, which share the samples of every micro-batch.
               That may be faster, and gives sums another order than the plain loop's: losses agree to 1e-5. Never where
               samples influence one another (batch statistics)
    verify     before the first step, compare the captured model with the module on a micro-batch, and refuse it if they differ
    threads    that every CPU computes with; None: what the first plan's peers can spare, then the same for the whole run
    mix        which devices a plan may put together: "devices" (those that run the owner's torch release and meshcee; where they
               are of several kernel classes the plan says that no single machine's loop has its bits), "none" (of one kernel
               class only: exact always), or "versions" (all)
    adapt      go over to another plan when a device or link has changed and that pays before the job ends; it changes no
               number of a run that neither rounds (codec) nor shares samples (groups)
    audit      the share of the members' steps that the owner computes again, chosen in secret: a member whose result differs by
               a bit is named and left out, and the run goes back to before its first step. Links then carry exact numbers
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    data: Any
    optimizer: Optimizer
    batch_size: int
    steps: int
    seed: int = 0
    schedule: Schedule | None = None
    micro_batch_size: int | None = None
    clip_norm: float | None = None
    reduction: str = "mean"
    weight: Callable[[Any], float] | None = None
    precision: str = "fp32"
    keep_fp32: tuple[str, ...] = ()
    eval_data: Any = None
    eval_every: int = 0
    metrics: Mapping[str, Callable[[Any, Any], float]] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    name: str = "job"
    recompute: bool = False
    direct_sums: bool = False
    checkpoint_every: int = 0
    weights: str | os.PathLike[str] | None = None
    codec: str = "auto"
    groups: bool = False
    adapt: bool = True
    verify: bool = True
    threads: int | None = None
    mix: str = "devices"
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Sampler[int] | Callable[[int, int], Iterable[int]] | None = None
    ema: float | None = None
    audit: float = 0.0
    eval_ema: bool = False

    @property
    def streams(self) -> bool:
        """Whether the data is iterable: read in order, without numbers."""
        return isinstance(self.data, IterableDataset) or not _is_map(self.data)

    def __post_init__(self) -> None:
        for name, (kind, said) in FIELDS.items():
            value, spared = getattr(self, name), type(self).__dataclass_fields__[name].default is None
            fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not (value is None and spared) and not (fits and (kind is not Integral or abs(value) < 1 << 64)):
                raise UsageError(f"{name} is {said}{', or None' if spared else ''}; got {value!r:.80}")
        if not isinstance(self.optimizer, Optimizer):
            found = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
            raise UsageError(
                f'optimizer is a meshcee.Optimizer("AdamW", lr=3e-4): stages make torch\'s own of it; got {found}'
            )
        if not isinstance(self.schedule, Schedule | None):
            found = getattr(self.schedule, "__name__", type(self.schedule).__name__)
            raise UsageError(f'schedule is a meshcee.Schedule("CosineAnnealingLR", T_max=1000), or None; got {found}')
        if self.batch_size < 1 or self.steps < 1:
            raise UsageError("batch_size and steps must be at least 1")
        if self.micro_batch_size is not None and not 1 <= self.micro_batch_size <= self.batch_size:
            raise UsageError(f"micro_batch_size must be between 1 and batch_size={self.batch_size}")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise UsageError(
                f"batch_size={self.batch_size} must be a multiple of micro_batch_size={self.micro_batch_size}"
            )
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f"reduction must be 'mean' or 'sum', got {self.reduction!r}")
        if self.precision == "fp16":
            raise UsageError(
                "precision 'fp16' needs a loss scale that follows what overflows, so steps would be left out; use 'bf16', whose "
                "range is that of fp32"
            )
        if self.precision not in ("fp32", "bf16"):
            raise UsageError(f"precision must be 'fp32', or 'bf16' with fp32 masters; got {self.precision!r:.80}")
        kept = self.keep_fp32
        if not isinstance(kept, tuple | list) or not all(isinstance(pattern, str) for pattern in kept):
            raise UsageError('keep_fp32 is a tuple of patterns: keep_fp32=("*Norm*",)')
        if self.keep_fp32 and self.precision != "bf16":
            raise UsageError(
                "keep_fp32 names what stays in fp32 in precision 'bf16', and precision is 'fp32': leave one out"
            )
        if self.codec not in CODEC_CHOICES:
            raise UsageError(f"codec must be one of {', '.join(CODEC_CHOICES)}, got {self.codec!r}")
        if self.threads is not None and self.threads < 1:
            raise UsageError("threads must be at least 1")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema is the decay of an average, between 0 and 1, got {self.ema!r}")
        if self.eval_ema and self.ema is None:
            raise UsageError("eval_ema evaluates the average of the weights: say which, with ema=0.999")
        if (self.ema, self.eval_ema) != (self.optimizer.ema, self.optimizer.eval_ema):
            object.__setattr__(self, "optimizer", self.optimizer.averaging(self.ema, self.eval_ema))
        if not 0 <= self.audit <= 1:
            raise UsageError("audit is a share of the steps, from 0 to 1")
        if self.audit and self.groups:
            raise UsageError(
                "an audit does not reach into groups, whose members sum their gradients: leave groups or audit out"
            )
        if self.audit and self.codec not in ("auto", "lossless", "none"):
            raise UsageError(
                f"an audit needs exact numbers on links, and codec {self.codec!r} rounds: use codec='lossless'"
            )
        if self.audit and self.precision == "bf16":
            raise UsageError(
                "an audit with precision 'bf16' cannot hold a stage's state against its hash, as buffers may not be representable: "
                "use 'fp32', or leave audit out"
            )
        if self.audit and self.codec == "auto":
            object.__setattr__(self, "codec", "lossless")
        if self.workers < 0:
            raise UsageError("workers is a number of processes, or 0")
        if self.mix not in MIXES:
            raise UsageError(f"mix must be one of {', '.join(MIXES)}, got {self.mix!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError("clip_norm must be positive")
        if self.streams:
            self._check_stream()
        elif len(self.data) < self.batch_size and self.sampler is None:
            hint = ": of tensors write TensorDataset(x, y)" if isinstance(self.data, tuple) else ""
            raise UsageError(f"data has {len(self.data)} samples, fewer than batch_size={self.batch_size}{hint}")
        if isinstance(self.data, At):
            self.data.check(self)
        if isinstance(self.eval_data, At):
            raise UsageError(
                "metrics are computed at the owner, so eval_data cannot be At(...): give a set of your own"
            )
        if self.eval_data is not None and not _is_map(self.eval_data):
            raise UsageError("eval_data must be map-style, with a length and [i]: of a DataLoader give loader.dataset")
        if self.sampler is not None:
            _check_sampler(self.sampler)
        if self.checkpoint_every < 0:
            raise UsageError("checkpoint_every is a number of steps, or 0 for the default")
        if self.eval_every and self.eval_data is None:
            raise UsageError("eval_every needs eval_data")

    def _check_stream(self) -> None:
        if not hasattr(self.data, "__iter__") or hasattr(self.data, "__next__"):
            raise UsageError(
                "data must be map-style, with len(data) and data[i] -> (x, y) or a dict, or iterable: an object whose iter() "
                "begins anew, such as a torch IterableDataset, and no iterator, which can be read once"
            )
        if isinstance(self.data, DataLoader) and self.data.batch_size is not None:
            raise UsageError(
                "a DataLoader as data makes no batches: give data=loader.dataset, as Job batches and shuffles by itself; or give "
                "the loader batch_size=None, and Job its collate_fn"
            )
        if self.sampler is not None:
            raise UsageError("a sampler picks samples by their numbers, and this data is iterable: leave sampler out")
        if self.workers:
            raise UsageError(
                "workers=N reads samples by their numbers, and this data is iterable, which one reader reads in order: leave "
                "workers out, or give torchdata's StatefulDataLoader(data, batch_size=None, num_workers=N) as data"
            )


def _is_map(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def _check_sampler(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise UsageError("a DistributedSampler is not needed: the mesh splits every batch by itself; leave sampler out")
    if isinstance(sampler, BatchSampler):
        raise UsageError("a BatchSampler is not needed: batches have batch_size samples; give the sampler inside of it")
    if not isinstance(sampler, Sampler) and not callable(sampler):
        raise UsageError("sampler must be a torch.utils.data.Sampler, or a function (data epoch, seed) -> indices")
    if getattr(sampler, "generator", None) is not None:
        raise UsageError(
            "leave `generator` out of the sampler: its order follows from Job.seed, also in a run that goes on"
        )


def seed_of(seed: int, step: int, micro: int) -> int:
    """The generator seed of one micro-batch: 63 bits of SHA-256 over (seed, step, micro)."""
    digest = hashlib.sha256(f"meshcee:{seed}:{step}:{micro}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def seeded(seed: int, step: int, micro: int) -> Iterator[None]:
    """For a plain loop: seed torch as the mesh does before the forward of this micro-batch.

    >>> with seeded(seed, step, micro): loss = criterion(model(x), y)
    """
    torch.manual_seed(seed_of(seed, step, micro))
    yield
