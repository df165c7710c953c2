"""What a user defines: the model, its loss, data and optimizer. Nothing here knows of peers.

The idea: a Job holds ordinary torch objects; only data derived from it (a graph, numbers, names) ever leaves the owner.
So the optimizer and the learning-rate schedule are given by name.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from numbers import Integral, Real
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from meshcee.errors import UsageError
from meshcee.figures import MIXES
from meshcee.optim import Optimizer, plain_number

if TYPE_CHECKING:
    from meshcee.optim.rates import Schedule

__all__ = ["WEIGHS_NOTHING", "At", "Job", "check_is_job", "parts_of", "seed_of", "seeded", "shares_of"]

T = TypeVar("T")

WEIGHS_NOTHING = (
    "This micro-batch weighs 0, as all of its targets are ignored, and a mean over none is no number: have the loss divide by "
    "count.clamp(min=1)"
)
CODEC_CHOICES = ("none", "lossless", "bf16", "int8", "int4", "auto")  # what a job may ask for
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

    def __post_init__(self) -> None:
        if not (isinstance(self.where, str) and isinstance(self.name, str)):
            raise UsageError(f"At({self.where!r:.40}, {self.name!r:.40}): where the data is and its name are texts")
        if type(self.samples) is not int or self.samples < 1:
            raise UsageError(f"At(samples={self.samples!r:.40}): how many samples the set has, as samples=4000")

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


PRECISIONS = ("fp32", "bf16-mixed", "bf16")
# What other libraries call something, and what it is here.
ELSEWHERE = {
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "max_epochs"), "steps=epochs * len(data) // batch_size"
    ),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "steps="),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), 'optimizer=meshcee.Optimizer("AdamW", lr=3e-4)'),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip_val", "clip_value", "grad_clip"), "clip_norm=1.0, of the global norm"
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "batch_size=64, micro_batch_size=8"),
    **dict.fromkeys(("bf16", "fp16", "amp", "autocast", "mixed_precision"), 'precision="bf16-mixed"'),
    **dict.fromkeys(("callbacks", "local", "stages", "plan", "join"), "an option of meshcee.train(job, ...)"),
    **dict.fromkeys(("device", "devices", "gpus"), "the peers': `meshcee peer --device`"),
    **dict.fromkeys(("shuffle", "drop_last"), "sampler=, of indices in their order"),
    "collate_fn": "collate=",
    "num_workers": "workers=",
    "scheduler": "schedule=",
    "loss_fn": "loss=",
    "dataset": "data=",
}


def _tells_unknown(kind: type[T]) -> type[T]:
    """A word that the class does not have is a UsageError with the one that was meant."""
    init: Any = kind.__init__

    @functools.wraps(init)
    def told(self: Any, *given: Any, **options: Any) -> None:
        for name in options.keys() - kind.__dataclass_fields__.keys():  # type: ignore[attr-defined]
            near = difflib.get_close_matches(name, kind.__dataclass_fields__, 1)  # type: ignore[attr-defined]
            meant = ELSEWHERE.get(name) or "".join(f"{one}=" for one in near)
            raise UsageError(f"{kind.__name__} has no {name!r:.40}{meant and f': here it is {meant}'}")
        init(self, *given, **options)

    kind.__init__ = told  # type: ignore[method-assign]
    return kind


@_tells_unknown
@dataclass(frozen=True)
class Job:
    """One training run.

    model      an nn.Module; or a function that returns one, which is called after `torch.manual_seed(seed)` and whose
               weights never exist all at once: every peer makes those of its stage, for models larger than any machine
    weights    a safetensors checkpoint that the model starts from, as `model.load_state_dict` would load it: a file, or a
               folder with model.safetensors or with shards and their index
    loss       (output, target) -> scalar tensor; `reduction` says whether it is the mean or the sum over samples. An
               evaluation gives the mean per sample of either. Or {"loss": scalar, "kl": scalar, ...}: "loss" is trained,
               and each step tells of the others, weighted and added over micro-batches as the loss is (`report.terms`)
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
    micro_batch_size  samples per micro-batch; None lets the first plan choose, for models that hold for any number of samples; of a
               loss that is no mean over samples, as in-batch negatives, the whole batch
    clip_norm  global gradient norm, as torch.nn.utils.clip_grad_norm_
    weight     target -> number: the weight of a micro-batch in the step's loss (for ignored tokens); default its size.
               Not beside reduction="sum", where each counts as it is
    precision  "fp32"; or "bf16-mixed": fp32 weights, and model and loss under torch.autocast("cpu", torch.bfloat16), by whose
               lists all devices compute; or "bf16": bf16 weights and compute, fp32 master weights and moments
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
               class only, the same for the whole run: exact always), or "versions" (all)
    adapt      go over to another plan when a device or link has changed and that pays before the job ends; it changes no
               number of a run that neither rounds (codec) nor shares samples (groups)
    audit      the share of the members' steps that the owner computes again, chosen in secret: a member whose result differs by
               a bit is named and left out, and the run goes back to before its first step. Links then carry exact numbers
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor | Mapping[str, torch.Tensor]]
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

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the model and the loss: torch.autocast if the precision is mixed."""
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()

    @property
    def stage_precision(self) -> str:
        """What a stage has to know of it: "bf16" has masters in full. Autocast is in the graph."""
        return "bf16" if self.precision == "bf16" else "fp32"

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
            object.__setattr__(self, name, plain_number(value))
        if not isinstance(self.optimizer, Optimizer):
            found = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
            raise UsageError(
                f'optimizer is a meshcee.Optimizer("AdamW", lr=3e-4): stages make torch\'s own of it; got {found}'
            )
        if self.schedule is not None:
            from meshcee.optim.rates import check_is_schedule

            check_is_schedule(self.schedule)
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
        if self.reduction == "sum" and self.weight is not None:
            raise UsageError("reduction='sum' adds losses up as they are, and a weight is for means: leave one out")
        if self.precision == "fp16":
            raise UsageError(
                "precision 'fp16' needs a loss scale that follows what overflows, so steps would be left out; use 'bf16-mixed' or "
                "'bf16', whose range is that of fp32"
            )
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision must be 'fp32', 'bf16-mixed' for autocast, or 'bf16' with fp32 masters; got {self.precision!r:.80}"
            )
        kept = self.keep_fp32
        if not isinstance(kept, tuple | list) or not all(isinstance(pattern, str) for pattern in kept):
            raise UsageError('keep_fp32 is a tuple of patterns: keep_fp32=("*Norm*",)')
        if self.keep_fp32 and self.precision != "bf16":
            raise UsageError(
                f"keep_fp32 names what stays in fp32 in precision 'bf16', and precision is {self.precision!r}: leave one out"
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
        if "loss" in self.metrics:
            raise UsageError(
                "a metric named 'loss' would take the place of the loss of an evaluation: give it another name"
            )
        if self.workers < 0:
            raise UsageError("workers is a number of processes, or 0")
        if self.mix not in MIXES:
            raise UsageError(f"mix must be one of {', '.join(MIXES)}, got {self.mix!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError("clip_norm must be positive")
        _refuse_datasets(data=self.data, eval_data=self.eval_data)
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
            own = "" if self.data.collate_fn is default_collate else ", collate=loader.collate_fn"
            if type(self.data.sampler) is SequentialSampler:
                own += " and sampler=SequentialSampler(loader.dataset)"
            elif not isinstance(self.data.dataset, IterableDataset) and type(self.data.sampler) is not RandomSampler:
                own += " and sampler=loader.sampler"
            raise UsageError(
                f"a DataLoader as data makes no batches: give data=loader.dataset{own}, as Job batches by itself, and shuffles "
                "where it has no sampler; or give the loader batch_size=None, and Job its collate_fn"
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


def _refuse_datasets(**given: Any) -> None:
    """A dict whose values are datasets, as `datasets.load_dataset` returns one, has no sample 0; nor has a table."""
    for name, data in given.items():
        if isinstance(data, Mapping) and data and 0 not in data and all(map(_is_dataset, data.values())):
            names = ", ".join(repr(key) for key in data)
            raise UsageError(f"{name} is a dict of datasets ({names:.200}): give {name}[{next(iter(data))!r}]")
        if type(data).__module__.split(".")[0] in ("pandas", "polars"):
            raise UsageError(
                f"{name} is a {type(data).__name__}, whose [i] are columns: give rows, as .to_dict('records')"
            )


def _is_dataset(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping | list | tuple)
    holds = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return holds and not (isinstance(value, str | bytes | Mapping) or hasattr(value, "dtype"))


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


def shares_of(weights: Sequence[float]) -> list[float]:
    """What each of these counts for in their whole, which is added in order. Where all are 0 there is no whole, and none counts."""
    whole = reduce(add, weights, 0.0)
    return [weight / whole if whole or weight else 0.0 for weight in weights]


def parts_of(told: Any) -> tuple[Any, dict[str, Any]]:
    """The loss, and the terms that a step tells of beside it. Job.loss returns a tensor, or {"loss": loss, "kl": kl}."""
    loss, terms = told, {}
    if isinstance(told, Mapping) and "loss" in told:
        loss, terms = told["loss"], {name: term for name, term in told.items() if name != "loss"}
    if isinstance(loss, torch.Tensor) and loss.dim() and all(type(size) is int and size == 1 for size in loss.shape):
        loss = loss.reshape(())  # one number in a tensor of another shape, which backward() takes too
    return loss, terms


def check_is_job(job: Any) -> None:
    """UsageError for anything else, as a model or the name of a file."""
    if not isinstance(job, Job):
        raise UsageError(f"a run is told of by meshcee.Job(model=..., loss=..., data=...); got {type(job).__name__}")


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
