"""What a device measured of a job: seconds of F, B and W of every distinct block, at several micro-batch sizes.

The idea: identical blocks are measured once. What a call costs whatever is in it (thread hop, framing) is a figure of
its own. So a stage of many blocks is not charged for it many times. The figures come from another machine: they are
checked here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import Finite, read

if TYPE_CHECKING:
    from meshcee.figures.workload import KindTimes

__all__ = ["KINDS", "MAX_DISTINCT", "MAX_SIZES", "BlockTimes"]

KINDS = ("f", "b", "w")
MAX_SIZES = 8
MAX_DISTINCT = 4096
LONGEST_S = 3600.0
SHORTEST_S = 1e-12

Triple = tuple[Finite, Finite, Finite]  # p10, p50, p90
_Whole = Annotated[int, Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class BlockTimes:
    """`seconds[kind][size][block]` is (p10, p50, p90) of one call, less `call_s[kind]`, in the order of KINDS.

    `blocks` names the distinct blocks by their first places in the model; `apply_s` is the optimizer's part of each.
    """

    blocks: Annotated[tuple[_Whole, ...], Meta(max_length=MAX_DISTINCT)]
    sizes: Annotated[tuple[_Whole, ...], Meta(max_length=MAX_SIZES)]
    seconds: tuple[tuple[tuple[Triple, ...], ...], ...]
    apply_s: tuple[Finite, ...]
    call_s: Triple = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if not 1 <= len(self.blocks) <= MAX_DISTINCT or not 1 <= len(self.sizes) <= MAX_SIZES:
            raise ProtocolError(f"a profile has 1 to {MAX_DISTINCT} blocks and 1 to {MAX_SIZES} sizes")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ProtocolError(f"profiled micro-batch sizes must be ascending and at least 1, got {self.sizes}")
        if len(self.seconds) != len(KINDS) or any(len(rows) != len(self.sizes) for rows in self.seconds):
            raise ProtocolError("a profile needs a row for each kind of work and size")
        if any(len(row) != len(self.blocks) for rows in self.seconds for row in rows):
            raise ProtocolError("a profile needs a column for each block")
        for triple in (t for rows in self.seconds for row in rows for t in row):
            if not 0 <= triple[0] <= triple[1] <= triple[2] <= LONGEST_S:  # NaN compares as false
                raise ProtocolError(f"seconds of a block must be 0 <= p10 <= p50 <= p90 <= {LONGEST_S:g}, got {triple}")
        if any(not t[1] > 0 for row in self.seconds[0] for t in row):
            raise ProtocolError("no forward pass takes no time at all")
        if len(self.apply_s) != len(self.blocks) or len(self.call_s) != len(KINDS):
            raise ProtocolError("a profile needs the optimizer's seconds of each block and a call's of each kind")
        if any(not 0 <= s <= LONGEST_S for s in (*self.apply_s, *self.call_s)):
            raise ProtocolError("seconds of a profile must be finite and not negative")

    def kind_times(self, places: Sequence[int]) -> KindTimes:
        """For a model whose block k is the same work as its block `places[k]`."""
        from meshcee.figures.workload import KindTimes

        column = {block: k for k, block in enumerate(self.blocks)}
        if missing := sorted(set(places) - column.keys()):
            raise ProtocolError(f"block {missing[0]} is not in the profile")
        order = [column[p] for p in places]
        f_s, b_s, w_s = ([[row[k][1] for k in order] for row in rows] for rows in self.seconds)
        return KindTimes(self.sizes, f_s, b_s, w_s, [self.apply_s[k] for k in order], self.call_s)

    def speed_flops_per_s(self, places: Sequence[int], flops: Sequence[float]) -> float:
        """What the device computed of the whole model, per second, at the largest size: forward counted thrice."""
        times = self.kind_times(places).stage(0, len(places), self.sizes[-1])
        return 3 * self.sizes[-1] * max(sum(flops), 1.0) / max(times.total_s, 1e-9)

    @property
    def spread(self) -> float:
        """How far apart p10 and p90 are, as a share of p50: the median over everything measured."""
        shares = sorted((t[2] - t[0]) / t[1] for rows in self.seconds for row in rows for t in row if t[1] > 0)
        return shares[len(shares) // 2] if shares else 0.0

    @property
    def total_s(self) -> float:
        """Of everything measured, once."""
        return sum(triple[1] for rows in self.seconds for row in rows for triple in row)

    def scaled(self, factor: float) -> BlockTimes:
        """The same device, if everything took so many times as long: SHORTEST_S to LONGEST_S, or no time as before."""

        def longer(s: float) -> float:
            return min(max(factor * s, SHORTEST_S), LONGEST_S) if s > 0 else s

        def all_longer(triple: Triple) -> Triple:
            return longer(triple[0]), longer(triple[1]), longer(triple[2])

        seconds = tuple(tuple(tuple(map(all_longer, row)) for row in rows) for rows in self.seconds)
        return replace(self, seconds=seconds, apply_s=tuple(map(longer, self.apply_s)), call_s=all_longer(self.call_s))

    @classmethod
    def from_json(cls, data: Any) -> BlockTimes:
        """Inverse of `plain`; ProtocolError on anything that is not a profile."""
        return read(data, cls, "a profile of blocks")
