"""What those who run a plan can run.

The idea: the planner can think of more than an executor does today. One value says what may be proposed, and everything
that proposes asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshcee.planner.chain import Codecs, Layout

__all__ = ["Runs"]


@dataclass(frozen=True)
class Runs:
    """None: no bound."""

    group: int | None = None  # members of a stage
    alike: Mapping[str, str] | None = None  # peer -> what the members of a stage must have in common
    stages: int | None = None  # of a pipeline, exactly so many
    pipelines: int | None = None  # side by side
    recompute_last: bool = True  # whether the last stage may recompute
    recompute: bool = False  # whether all others must
    codec: Callable[[Sequence[str], Sequence[str]], str] | None = None  # of the boundary between two groups

    def may_share(self, peers: Sequence[str]) -> bool:
        """Whether these may hold a stage together."""
        if self.group is not None and len(peers) > self.group:
            return False
        return self.alike is None or len({self.alike.get(p, "") for p in peers}) == 1

    def permits(self, layout: Layout) -> bool:
        """Whether a plan of this form may be proposed."""
        return (self.pipelines is None or len(layout) <= self.pipelines) and all(
            (self.stages is None or len(chain.stages) == self.stages)
            and all(self.may_share(s.peers) for s in chain.stages)
            for chain in layout
        )

    def coded(self, layout: Layout) -> Layout:
        """The layout with the codecs that it would run with."""
        if (codec := self.codec) is None:
            return layout

        def of(a: Sequence[str], b: Sequence[str]) -> Codecs:
            return Codecs(codec(a, b), codec(b, a))

        return tuple(
            replace(chain, codecs=tuple(of(a.peers, b.peers) for a, b in pairwise(chain.stages))) for chain in layout
        )
