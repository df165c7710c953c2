"""Which copies of a job's state there are and who holds them, as its owner knows it.

The idea: the owner never sees a copy, only what it is. There is a digest for each tensor, from the member that made it,
and word from the keeper that it holds the same. A step's copy counts when every stage has one; the last of these, and
the one in the making, are all that is kept. So it is with far copies, which count when every stage has one that
outlives its region. What one plan hands over to the next is a copy that only its makers hold: older ones are kept
beside it.

The owner's disk has the same table (peers/state/journal.py), so a run whose owner has died goes on where its peers are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshcee.stage import AVERAGE
from peers.state.policy import Cadence, FarCadence

__all__ = ["CopySet", "Manifest", "StageCopy"]

TRIES = 2  # epochs that may begin with copies which are not found


@dataclass
class StageCopy:
    """What a stage was before a step, by name, and the members that hold these bits."""

    weights: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)

    @property
    def averages(self) -> dict[str, str]:
        """Of the weights, among what the optimizer keeps."""
        return {name: digest for name, digest in self.optimizer.items() if name.endswith(f"/{AVERAGE}")}

    def clashes(self, weights: Mapping[str, str], optimizer: Mapping[str, str]) -> bool:
        """Whether it is other bits of what these are too."""
        own = ((self.weights, weights), (self.optimizer, optimizer))
        return any(name in mine and mine[name] != digest for mine, theirs in own for name, digest in theirs.items())


@dataclass
class CopySet:
    """The state before a step, of which members hold copies, stage by stage of the plan that made it: of all pipelines."""

    next_step: int
    stages: tuple[StageCopy, ...]
    missed: int = 0  # epochs that did not find all of it: a link may have failed, or it is gone
    far: bool = False  # whether it outlived the loss of any one region when it was made
    handed: bool = False  # from one plan to the next, which has no copies of its own yet: its makers alone hold it
    asked: int = field(default=0, compare=False)  # the question by which the run's journal knows of it; 0: none yet

    @property
    def holders(self) -> set[str]:
        return set().union(*(stage.holders for stage in self.stages))

    @property
    def held_by(self) -> list[list[str]]:
        """Of every tensor those who hold it, in order and each set of them once: stages may share tensors, or have none."""
        found: dict[tuple[int, str], set[str]] = {}
        for stage in self.stages:
            for kind, names in enumerate((stage.weights, stage.optimizer)):
                for name in names:
                    found.setdefault((kind, name), set()).update(stage.holders)
        return [list(peers) for peers in sorted({tuple(sorted(peers)) for peers in found.values()})]

    @property
    def is_whole(self) -> bool:
        """Whether somebody holds everything."""
        return all(self.held_by)

    @property
    def is_usable(self) -> bool:
        """Whether an epoch may begin with it."""
        return self.missed < TRIES and self.is_whole

    def digests(self, names: Collection[str], trainable: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Of these weights, as far as training changes them, and of what the optimizer keeps for these parameters."""
        mine = set(trainable)
        weights = {n: d for stage in self.stages for n, d in stage.weights.items() if n in names}
        kept = {n: d for stage in self.stages for n, d in stage.optimizer.items() if n.rpartition("/")[0] in mine}
        return weights, kept

    def to_json(self) -> dict[str, Any]:
        stages = [[dict(s.weights), dict(s.optimizer), sorted(s.holders)] for s in self.stages]
        return {"next_step": self.next_step, "stages": stages, "far": self.far, "handed": self.handed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CopySet:
        """What `to_json` gave; ValueError, KeyError or TypeError for anything else."""
        stages = [StageCopy(dict(weights), dict(kept), set(holders)) for weights, kept, holders in data["stages"]]
        kind = {name: bool(data.get(name, False)) for name in ("far", "handed")}
        return cls(int(data["next_step"]), tuple(stages), **kind)

    def sources(self, names: Collection[str]) -> tuple[str, ...]:
        """Who holds some of these weights."""
        return tuple(sorted({p for s in self.stages if any(n in names for n in s.weights) for p in s.holders}))


class Manifest:
    """All that there are of one job, over its epochs. `tell` is called with those that count when there are others.

    `is_told`: whether all who would go on in the owner's place know of these, whose steps are reported; else they are told.
    """

    def __init__(
        self,
        tell: Callable[[Sequence[CopySet]], None] = lambda found: None,
        is_told: Callable[[CopySet], bool] = lambda copied: True,
    ) -> None:
        self.cadence, self.far_cadence = Cadence(), FarCadence()
        self._found: list[CopySet] = []  # whole ones, oldest first
        self._tell = tell
        self.is_told = is_told

    def add(self, copied: CopySet) -> None:
        """It is whole. One older one of its kind is kept, which counts until the steps before this one have been reported. So are
        near ones from the newest that others than the owner know of. What is handed over behind what was handed over has none:
        members have no room for that.
        """
        others = [c for c in self._found if c.far != copied.far]
        older = [c for c in self._found if c.far == copied.far and c.next_step < copied.next_step]
        first = max((k for k, c in enumerate(older) if not c.far and self.is_told(c)), default=-1)
        if copied.handed and self.were_handed:
            older = []
        self._found = sorted([*others, *older[first:], copied], key=lambda c: (c.next_step, not c.far))
        self._tell(self._found)

    @property
    def far_steps(self) -> list[int]:
        """Of those that count if a whole region is lost."""
        return [copied.next_step for copied in self._found if copied.far]

    def begin(self, start: int) -> None:
        """An epoch does, at this step. Its members forget copies of later ones with the first that they make."""
        if any(c.next_step > start for c in self._found):
            self.forget_after(start)

    def stay_with(self, members: Collection[str]) -> None:
        """Nearer copies of these members' plan are whole: whoever has no part in it need not keep older far ones any more."""
        for copied in self._found:
            for stage in copied.stages if copied.far else ():
                stage.holders.intersection_update(members)
        self._found = [c for c in self._found if not c.far or c.is_whole]

    def restore(self, found: Sequence[CopySet], alive: Collection[str]) -> None:
        """What an owner that has died knew; of its holders these are there."""
        self._found = list(found)
        self.newest(0, set().union(*(copied.holders for copied in found)).difference(alive))

    @property
    def were_handed(self) -> bool:
        """Whether the newest near ones were handed over to a plan that has none of its own yet."""
        return next((c.handed for c in reversed(self._found) if not c.far), False)

    def since(self, start: int) -> int:
        """From which step on an epoch that begins at this one may need near ones. What was handed over dies with any of its makers:
        then those before it are.
        """
        return 0 if self.were_handed and any(not (c.far or c.handed) for c in self._found) else start

    def newest(
        self, done: int, gone: Collection[str] = (), *, handed: bool = True, told: bool = False
    ) -> CopySet | None:
        """The newest of no step after `done`, of which these who are gone do not hold the last copies.

        Who is gone has lost its copies, even if it comes back. `handed`: what was handed over counts; `told`: only what others
        than the owner know of does.
        """
        for copied in self._found:
            for stage in copied.stages:
                stage.holders.difference_update(gone)
        usable = (c for c in reversed(self._found) if c.is_usable and (handed or not c.handed))
        return next((c for c in usable if c.next_step <= done and (not told or self.is_told(c))), None)

    def tell_others(self, done: int) -> None:
        """Have others than the owner know of the newest: who asks whether they are told has them told."""
        self.newest(done, told=True)

    def needed(self, done: int) -> list[int]:
        """The steps of near ones that somebody may go back to: the owner, or who goes on in its place and knows less."""
        told = self.newest(done, handed=False, told=True)
        least = told.next_step if told is not None else 0
        return sorted({c.next_step for c in self._found if not c.far and c.is_usable and c.next_step >= least})

    def forget_after(self, step: int) -> None:
        """Copies of later steps count no more: they are of a state that was computed wrongly, or members forget them."""
        self._found = [c for c in self._found if c.next_step <= step]
        self._tell(self._found)

    def forget_before(self, step: int) -> None:
        """Members are about to. Far ones count until there is another; what is on the owner's disk dies with it."""
        known = [c.next_step for c in self._found if c.far and c.is_usable and c.next_step <= step and self.is_told(c)]
        least, before = max(known, default=0), self._found[-1:]
        self._found = [c for c in self._found if c.next_step >= (least if c.far else step)]
        if self._found[-1:] != before:
            self._tell(self._found)
