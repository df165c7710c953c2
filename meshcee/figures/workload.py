"""What a job costs on each kind of device: seconds of F, B and W per block, bytes held and bytes sent.

The idea: one table per device kind, over blocks and profiled micro-batch sizes, with prefix sums, so that the time of
any run of blocks is two look-ups. Between profiled sizes times are linear; beyond the largest nothing is known, and
such sizes are not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshcee.errors import PlanError, UsageError

__all__ = ["CODECS", "HOST_MESSAGE_S", "SUM_BUCKET_BYTES", "Codec", "KindTimes", "StageTimes", "Workload"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Codec:
    """What a codec does to a boundary tensor: bits per element on the wire, and seconds to encode and decode one.

    Encoding and decoding delay a message; they neither hold the link nor the device (they run on a thread beside it).
    """

    bits: float  # inf: what the element has
    element_s: float  # in and out
    packed_bits: float = 0.0  # of these, what an exponent needs less once packed


# Bits are those of meshcee.codec (a test holds them together: a planner needs no torch). Seconds were measured by
# benchmarks/codecs.py (docs/benchmarks.md): one core of an AMD EPYC, fp32 in pieces of 1 MiB; activations are
# rounded to nearest, gradients by chance, so the figures are the means of both.
PACKED_BITS = 5.0  # activations and gradients of transformers: 5.2 to 5.8
CODECS: dict[str, Codec] = {
    "bf16": Codec(16.0, 0.2e-9),
    "int8": Codec(8.25, 1.3e-9),
    "int4": Codec(4.25, 5.2e-9),
    "lossless": Codec(math.inf, 16e-9, PACKED_BITS),
    "bf16-lossless": Codec(16.0, 12e-9, PACKED_BITS),
}
# Of a core, at each end of a message between members of one host: packing, encryption, daemons, the owner's part and copies of the
# state. From benchmarks/one_host.py: four members on two cores of an AMD EPYC took 0.25 core seconds a step, their kernels 0.13.
HOST_MESSAGE_S = 2e-3

SUM_BUCKET_BYTES = 4 << 20  # gradients that a sum sends in one piece
PAYLOAD_S = 1e-4  # of every coded message: to the thread beside the device and back, on either side


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on one device; `optimizer_s` once a step."""

    f_s: float
    b_s: float
    w_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.f_s + self.b_s + self.w_s


class KindTimes:
    """Seconds of every block on one kind of device, at each profiled micro-batch size."""

    def __init__(
        self,
        sizes: Sequence[int],
        f_s: npt.ArrayLike,
        b_s: npt.ArrayLike,
        w_s: npt.ArrayLike,
        optimizer_s: npt.ArrayLike,
        call_s: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        """f_s, b_s and w_s have a row per size and a column per block; optimizer_s has one entry per block.

        call_s  what F, B and W of a stage cost beside its blocks, however many these are
        """
        self.sizes = tuple(sizes)
        self.call_s = call_s
        if any(not 0 <= s < math.inf for s in call_s):
            raise UsageError("seconds of a call must be finite and not negative; profile that device again")
        tables = [np.asarray(t, dtype=np.float64) for t in (f_s, b_s, w_s)]
        self.optimizer = np.concatenate([[0.0], np.cumsum(np.asarray(optimizer_s, dtype=np.float64))])
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise UsageError(f"profiled micro-batch sizes must be ascending and at least 1, got {self.sizes}")
        for table in (*tables, self.optimizer):
            if not np.all(np.isfinite(table)) or np.any(table < 0):
                raise UsageError("block times must be finite and not negative; profile that device again")
        self._tables = tables
        self._cumulated: dict[int, tuple[Floats, Floats, Floats]] = {}

    @property
    def largest(self) -> int:
        """The largest micro-batch of which anything is known."""
        return self.sizes[-1]

    def cumulated(self, samples: int) -> tuple[Floats, Floats, Floats]:
        """Prefix sums over blocks of F, B and W for this many samples."""
        if samples not in self._cumulated:
            if not self.sizes[0] <= samples <= self.sizes[-1]:
                raise UsageError(
                    f"a micro-batch of {samples} samples was not profiled: {self.sizes[0]} to {self.sizes[-1]} were"
                )
            k = max(i for i, size in enumerate(self.sizes) if size <= samples)
            low = self.sizes[k]
            share = 0.0 if low == samples else (samples - low) / (self.sizes[k + 1] - low)
            rows = [t[k] if share == 0 else (1 - share) * t[k] + share * t[k + 1] for t in self._tables]
            f, b, w = (np.concatenate([[0.0], np.cumsum(row)]) for row in rows)
            self._cumulated[samples] = (f, b, w)
        return self._cumulated[samples]

    def stage(self, first: int, end: int, samples: int, recompute: bool = False) -> StageTimes:
        f, b, w = self.cumulated(samples)
        f_s = float(f[end] - f[first])
        again_s = f_s if recompute else 0.0
        optimizer_s = float(self.optimizer[end] - self.optimizer[first])
        f_call, b_call, w_call = self.call_s
        b_s, w_s = float(b[end] - b[first]), float(w[end] - w[first])
        return StageTimes(f_s + f_call, b_s + again_s + b_call, w_s + w_call, optimizer_s)


@dataclass(frozen=True)
class Workload:
    """A job as the planner sees it; the sequences have one entry per block, bytes are per sample unless they are state."""

    names: tuple[str, ...]
    global_batch: int
    times: Mapping[str, KindTimes]  # by device kind
    state_bytes: tuple[int, ...]  # parameters, gradients, optimizer: held all the time
    gradient_bytes: tuple[int, ...]  # what a group reduces
    activation_bytes: tuple[int, ...]  # from F to W
    boundary_bytes: tuple[int, ...]  # to the next block, per sample; the last entry is 0
    boundary_back_bytes: tuple[int, ...]
    element_bytes: int = 2  # of a boundary's elements before any codec
    micro_batch: int | None = None  # when the job fixes it
    default_codec: str = "bf16"  # what boundaries travel as when nothing is gained by another
    message_bytes: tuple[int, int] = (0, 0)  # what a message has beside its samples: to the next stage, and back
    fused_first: bool = False  # the first stage runs B and W as one, as the executor does
    tied: tuple[tuple[int, int, int], ...] = ()  # (first block, last block, bytes) of shared parameters' gradients
    # How a group sums: in a "ring", block by block as their W's end; or as the executor does on emulated devices (real ones
    # begin inside their last W), all blocks in one piece behind it, each member with each over "streams" or through a torch
    # "process group", and the commit waits for it.
    group_sum: str = "ring"
    clips: bool = False  # the commit waits for the norms of all members
    feeds: tuple[tuple[int, tuple[int, ...]], ...] = ()  # raw inputs: bytes of a sample, and the blocks that read it
    data_s: float = 0.0  # that the owner takes to read a sample
    # Of a micro-batch of so many samples, ascending: what the operators of each block take for a moment besides. (): not known.
    workspace: tuple[tuple[int, tuple[int, ...]], ...] = ()
    _sums: dict[str, Floats] = field(default_factory=dict, init=False, compare=False, repr=False)
    _spaces: dict[int, Floats] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        columns = [self.state_bytes, self.gradient_bytes, self.activation_bytes]
        columns += [self.boundary_bytes, self.boundary_back_bytes]
        if not self.names or any(len(c) != len(self.names) for c in columns):
            raise UsageError("a workload needs one figure per block in every column")
        for column in columns:
            if any(not math.isfinite(x) or x < 0 for x in column):
                raise UsageError("bytes of a block must be finite and not negative")
        if any(len(each) != len(self.names) for _, each in self.workspace):
            raise UsageError("a workload needs one figure per block in every column")
        if self.global_batch < 1:
            raise UsageError(f"global_batch must be at least 1, got {self.global_batch}")
        for name in ("state_bytes", "gradient_bytes", "activation_bytes"):
            self._sums[name] = np.concatenate([[0.0], np.cumsum(np.asarray(getattr(self, name), dtype=np.float64))])

    @property
    def num_blocks(self) -> int:
        return len(self.names)

    def check_blocks(self, count: int) -> None:
        """Raises PlanError where a plan is of another number of blocks."""
        if count != self.num_blocks:
            raise PlanError(f"the plan has {count} blocks and the job {self.num_blocks}; plan it again")

    def sums(self, column: str) -> Floats:
        """Prefix sums of state_bytes, gradient_bytes or activation_bytes."""
        return self._sums[column]

    @cached_property
    def cuts(self) -> tuple[Floats, Floats]:
        """Bytes per sample that cross before block k, for every k from 0 to the number of blocks: there and back."""
        there, back = self.boundary_bytes, self.boundary_back_bytes
        return np.array([0.0, *there], dtype=np.float64), np.array([0.0, *back], dtype=np.float64)

    def state_sum_bytes(self, first: int, end: int) -> int:
        return sum(self.state_bytes[first:end])

    def live_bytes(self, first: int, end: int, samples: int, recompute: bool = False) -> int:
        """What one micro-batch of this many samples keeps from its F to its W on these blocks."""
        if recompute:  # only what came in; the raw inputs of block 0 are few
            return samples * (self.boundary_bytes[first - 1] if first else 0)
        return samples * sum(self.activation_bytes[first:end])

    def workspace_bytes(self, samples: int) -> Floats:
        """Of each block. Between two sizes that were looked at it is less: it grows as the largest of several straight lines."""
        if samples not in self._spaces:
            sizes = [size for size, _ in self.workspace] or [1]
            rows = [row for _, row in self.workspace] or [(0,) * len(self.names)]
            self._spaces[samples] = np.array([np.interp(samples, sizes, each) for each in zip(*rows)])
        return self._spaces[samples]

    def stage_bytes(self, first: int, end: int, samples: int, live: int, recompute: bool = False) -> int:
        """The memory model: state, live micro-batches, with recomputation the one that is being recomputed, and the workspace of
        one block at a time."""
        again = self.live_bytes(first, end, samples) if recompute else 0
        again += math.ceil(float(max(self.workspace_bytes(samples)[first:end])))
        return self.state_sum_bytes(first, end) + live * self.live_bytes(first, end, samples, recompute) + again

    def sum_costs(self, members: int) -> tuple[float, int]:
        """Of a group's sum: bytes that each member sends over bytes of gradients, and rounds of one latency each."""
        share, rounds = 2 * (members - 1) / members, 2 * (members - 1)
        if self.group_sum == "streams":
            return share, 2  # parts to those who sum them, sums to all
        if self.group_sum == "process group":
            return share * max(1.0, 4 / self.element_bytes), rounds + 1  # in 32 bits; which gradients exist goes first
        return share, rounds

    def sum_bytes(self, first: int, end: int, members: int) -> int:
        """What a member holds while its group sums: its gradients end to end, and parts and sums that have arrived."""
        if members == 1 or self.group_sum == "ring":
            return 0
        return 2 * sum(self.gradient_bytes[first:end])

    def term_bytes(self, first: int, end: int, num_micro: int) -> int:
        """What a pipeline that is not the first holds of its micro-batches' gradients, each apart but for one, which is state."""
        return 0 if self.group_sum == "ring" else max(0, num_micro - 1) * sum(self.gradient_bytes[first:end])

    def fed_bytes(self, first: int, end: int) -> int:
        """Raw inputs of a sample that the owner sends to a stage."""
        return sum(size for size, blocks in self.feeds if any(first <= block < end for block in blocks))

    def wire_bytes(self, size: float, codec: str) -> float:
        """Bytes on the wire of a boundary tensor of `size` bytes; proportional to it, and never more.

        Raises PlanError for a codec that nobody knows.
        """
        if codec == "none":
            return size
        if codec not in CODECS:
            raise PlanError(f"the plan has the codec {codec[:40]!r}; known are none, {', '.join(CODECS)}")
        bits, found = 8 * self.element_bytes, CODECS[codec]
        return size * (min(bits, found.bits) - found.packed_bits) / bits

    def codec_s(self, size: float, codec: str) -> float:
        """Seconds to encode and decode a boundary tensor of `size` bytes: a part for each message, and one for each byte.

        What saves nothing, as bf16 on 16-bit tensors, travels as it is. Raises PlanError as `wire_bytes` does.
        """
        if self.wire_bytes(1.0, codec) >= 1.0:
            return 0.0
        return PAYLOAD_S + size / self.element_bytes * CODECS[codec].element_s
