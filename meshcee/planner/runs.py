"""What those who run a plan can run.

The idea: the planner can think of more than an executor does today. One value says what may be proposed, and everything
that proposes asks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshcee.planner.chain import Layout

__all__ = ["Runs"]


@dataclass(frozen=True)
class Runs:
    """None: no bound."""

    group: int | None = None  # members of a stage
    stages: int | None = None  # of a pipeline, exactly so many
    pipelines: int | None = None  # side by side
    recompute_last: bool = True  # whether the last stage may recompute
    recompute: bool = False  # whether all others must

    def permits(self, layout: Layout) -> bool:
        """Whether a plan of this form may be proposed."""
        return (self.pipelines is None or len(layout) <= self.pipelines) and all(
            (self.stages is None or len(chain.stages) == self.stages)
            and (self.group is None or all(len(s.peers) <= self.group for s in chain.stages))
            for chain in layout
        )
