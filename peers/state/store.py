"""The copies that a member holds: of its own stage between two steps, and of others whose keeper it is.

The idea: a member copies its stage at the boundary and trains on. A copy is tensors by name, and by the hash of their bits once
these are known. Under that hash others read it (peers/state/fetch.py), chunk by chunk, so that the pipeline does not feel it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshcee.config import OWN_COPIES
from meshcee.errors import ProtocolError
from meshcee.files.tensor_files import Layout
from meshcee.stage import StageRunner
from peers.wire import digest_of

__all__ = ["CORES", "CopyStore", "by_parameter", "stage_tensors"]

CORES = os.cpu_count() or 1  # of which hashing takes one from the device, where that is the processor


def by_parameter(flat: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state as `load_optimizer_state` takes it."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for entry, value in flat.items():
        name, _, key = entry.rpartition("/")
        found.setdefault(name, {})[key] = value
    return found


@dataclass
class _Copy:
    """Of a stage before a step, ours or one that we keep for its holder."""

    next_step: int
    tensors: Mapping[str, torch.Tensor]  # weights, and the optimizer's state
    by_digest: Mapping[str, torch.Tensor] = field(default_factory=dict)  # once the digests are known
    took_s: float = 0.0
    is_left: bool = False  # by an epoch before this one

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class CopyStore:
    """The copies that a member holds: of its own stage, and of others whose keeper it is; as many as may be needed again.

    They outlive the epoch: when the next one goes on from such a copy, what this member needs of it is here already.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []  # of our own stage, oldest first
        self._others: dict[tuple[str, bool], list[_Copy]] = {}  # (holder, whether we keep it far) -> oldest first
        self.offered: dict[str, torch.Tensor] = {}  # of an offer that led nowhere
        self.goes_on = False  # another epoch may begin with all this: the owner has not said that it needs none of it
        self.evidence: dict[str, torch.Tensor] = {}  # by digest: what an audit asks for
        self.frozen: dict[str, list[torch.Tensor]] = {}  # by digest: as an epoch or job before has left it

    def begin(self) -> None:
        """Another epoch does. Its members may still read what it begins with when it makes copies of that very step."""
        for copy in self._all():
            copy.is_left = True

    def take(self, next_step: int, runner: StageRunner, since: int = 0, besides: Collection[int] = ()) -> None:
        """Copy the stage as it stands before `next_step`. Runs on the compute thread.

        Copies before step `since` are forgotten, but for those of the steps `besides`: somebody is reading them, or they go
        with copies in other regions.
        """
        began_s = time.perf_counter()
        copy = _Copy(next_step, stage_tensors(runner))
        left = [c for c in self._copies if c.is_left and c.next_step == next_step]
        kept = [*_needed(self._copies, next_step, since, besides), *left]
        if len(kept) >= OWN_COPIES:
            again = {c.next_step for c in (*kept, copy) if not c.is_left}
            kept = [c for c in kept if not (c.is_left and c.next_step in again)]
        self._copies = [*kept, copy]
        copy.took_s = time.perf_counter() - began_s

    def digest(self, next_step: int, layout: Layout) -> tuple[dict[str, str], float]:
        """The digests of our own copy, and the device's seconds that it took. Raises ProtocolError when it is not held.

        `layout` has the types in which others expect it. From now on `find` gives its tensors. Takes a second for a
        gigabyte, so it runs in a thread.
        """
        copy = next((c for c in reversed(self._copies) if c.next_step == next_step), None)
        if copy is None:
            raise ProtocolError(f"no copy after {next_step} steps is held here")
        began_s = time.perf_counter()
        tensors = {name: tensor.to(layout[name][0]) for name, tensor in copy.tensors.items()}
        digests = {name: digest_of(tensor) for name, tensor in tensors.items()}
        copy.tensors, copy.by_digest = tensors, {digest: tensors[name] for name, digest in digests.items()}
        return digests, copy.took_s + (time.perf_counter() - began_s) / CORES

    def make_room(
        self, source: str, next_step: int, since: int, besides: Collection[int] = (), *, far: bool = False
    ) -> None:
        """Forget copies of others that are needed no more, before one of this step from `source`: near ones before `since`,
        far ones that are not of the steps `besides`. Far ones come late, and say nothing of near ones.
        """
        for (other, is_far), copies in list(self._others.items()):
            again = other == source and is_far == far
            if is_far:
                copies = [c for c in copies if c.next_step in besides and not (again and c.next_step == next_step)]
            elif not far:
                copies = _needed(copies, next_step + (not again), since)
            self._others[other, is_far] = copies
            if not copies:
                del self._others[other, is_far]

    @property
    def others_bytes(self) -> int:
        return sum(copy.nbytes for copies in self._others.values() for copy in copies)

    def keep(
        self,
        source: str,
        next_step: int,
        digests: Mapping[str, str],
        found: Mapping[str, torch.Tensor],
        *,
        far: bool = False,
    ) -> None:
        """A copy of another member's stage: digests by name, tensors by digest."""
        tensors = {name: found[digest] for name, digest in digests.items()}
        self._others.setdefault((source, far), []).append(_Copy(next_step, tensors, by_digest=found))

    def _all(self) -> Iterator[_Copy]:
        """Newest first, our own before others'."""
        yield from reversed(self._copies)
        for copies in list(self._others.values()):
            yield from reversed(copies)

    def find(self, digest: str) -> torch.Tensor | None:
        found = self.evidence.get(digest)
        if found is not None:
            return found
        return next((copy.by_digest[digest] for copy in self._all() if digest in copy.by_digest), None)

    def values(self, name: str, digest: str) -> Iterator[torch.Tensor]:
        """What is here under a name of the model, or "<parameter>/<key>" of the optimizer, newest first.

        Last comes what was left frozen with this digest; each such tensor is given once.
        """
        for tensors in (*(copy.tensors for copy in self._all()), self.offered):
            if name in tensors:
                yield tensors[name]
        if left := self.frozen.get(digest):
            yield left.pop()


def stage_tensors(runner: StageRunner) -> dict[str, torch.Tensor]:
    """What training changes of a stage, copied: weights, written buffers, and what the optimizer keeps."""
    state = runner.state_dict()
    model = {name: _copy(state[name]) for name in (*runner.spec.trainable, *runner.spec.mutated)}
    return model | {
        f"{name}/{key}": _copy(value)
        for name, kept in runner.optimizer_state().items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor)
    }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _needed(copies: Sequence[_Copy], next_step: int, since: int, besides: Collection[int] = ()) -> list[_Copy]:
    """Of the copies before this step; a lost epoch may have gone further."""
    return [c for c in copies if c.next_step < next_step and (c.next_step >= since or c.next_step in besides)]
