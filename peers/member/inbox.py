"""What has arrived at a stage and waits for its turn: raw inputs, activations, gradients, and word of the commit.

The idea: readers of streams put, the executor takes. Every arrival is checked against what the plan allows (who may
send it, how many may wait, none twice while it waits). So a peer that misbehaves costs a ProtocolError and no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.errors import ProtocolError
from peers.wire import Round, besides_in, need

__all__ = ["End", "Inbox", "TakeCopy", "named_tensors", "norms_of", "tensors_of"]

Key = tuple[int, int]  # (round, micro)


class End:
    """The owner wants to know when everything before it is applied. Nothing comes behind it."""


@dataclass(frozen=True)
class TakeCopy:
    """The owner wants a copy of the stage as it stands before this step.

    Copies before step `since` are needed no more, but for those of the steps `in_use`.
    """

    next_step: int
    since: int = 0
    in_use: tuple[int, ...] = ()

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> TakeCopy:
        return cls(need(header, "next_step", int), need(header, "since", int), besides_in(header))


@dataclass
class Inbox:
    """Arrivals of one stage. `limit` bounds each kind; `changed` wakes the executor.

    rounds    steps, evaluations, copies and the end, in the owner's order
    raw      (round, micro) -> raw inputs by name, from the owner
    forward  (round, micro) -> by peer of the previous stage: the values of an F frame, the generator's state last
    back     (round, micro) -> by peer of the next stage: gradients of what was sent
    shared   (round, micro) -> by (parameter, peer): partial gradients of shared parameters, from later stages
    totals   round -> summed gradients of shared parameters, by name, from earlier stages
    norms    round -> by peer: (parameter index, norm) pairs of all stages that it speaks for
    commits  round -> what gradients are multiplied by, None when the job does not clip
    """

    limit: int
    rounds: asyncio.Queue[Round | End | TakeCopy] = field(default_factory=lambda: asyncio.Queue(maxsize=64))
    raw: dict[Key, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    forward: dict[Key, dict[str, Sequence[Any]]] = field(default_factory=dict)
    back: dict[Key, dict[str, Sequence[torch.Tensor | None]]] = field(default_factory=dict)
    shared: dict[Key, dict[tuple[str, str], torch.Tensor | None]] = field(default_factory=dict)
    totals: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    norms: dict[int, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    commits: dict[int, float | None] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    done: int = -1  # the last round that this stage has finished; nothing for it may arrive any more

    def _store(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        round = key[0] if isinstance(key, tuple) else key
        if round <= self.done or round > self.done + self.limit:
            raise ProtocolError(f"a frame of round {round} arrived while round {self.done + 1} is running")
        if key in table:
            raise ProtocolError(f"a frame of round and micro-batch {key} arrived twice")
        if len(table) >= self.limit:
            raise ProtocolError(f"more than {self.limit} micro-batches are waiting; the sender ignores the window")
        table[key] = value
        self.changed.set()

    def _add(self, table: dict[Any, dict[Any, Any]], key: Any, entries: Mapping[Any, Any]) -> None:
        """Several peers may contribute to one entry, each only once."""
        present = table.pop(key, {})
        if present.keys() & entries.keys():
            raise ProtocolError(f"a frame of round and micro-batch {key} arrived twice")
        self._store(table, key, {**present, **entries})

    def put_raw(self, round: int, micro: int, inputs: Mapping[str, torch.Tensor]) -> None:
        self._store(self.raw, (round, micro), inputs)

    def put_forward(self, round: int, micro: int, peer: str, values: Sequence[Any]) -> None:
        self._add(self.forward, (round, micro), {peer: values})

    def put_back(self, round: int, micro: int, peer: str, gradients: Sequence[torch.Tensor | None]) -> None:
        self._add(self.back, (round, micro), {peer: gradients})

    def put_shared(self, round: int, micro: int, peer: str, partials: Mapping[str, torch.Tensor | None]) -> None:
        self._add(self.shared, (round, micro), {(name, peer): partial for name, partial in partials.items()})

    def put_totals(self, round: int, totals: Mapping[str, torch.Tensor | None]) -> None:
        self._add(self.totals, round, totals)

    def put_norms(self, round: int, peer: str, norms: list[tuple[int, float]]) -> None:
        self._add(self.norms, round, {peer: norms})

    def put_commit(self, round: int, clip: float | None) -> None:
        self._store(self.commits, round, clip)

    def finish(self, round: int) -> None:
        """Forget a round that is over."""
        self.done = round
        for table in (self.raw, self.forward, self.back, self.shared):
            for key in [k for k in table if k[0] <= round]:
                del table[key]
        for once in (self.totals, self.norms, self.commits):
            for ended in [w for w in once if w <= round]:
                del once[ended]


def tensors_of(values: list[Any]) -> list[torch.Tensor | None]:
    """The same; ProtocolError where there is something else."""
    if not all(value is None or isinstance(value, torch.Tensor) for value in values):
        raise ProtocolError("a gradient is a tensor or nothing")
    return values


def norms_of(values: list[Any], parameters: int) -> list[tuple[int, float]]:
    """(parameter's index, norm) pairs, from one tensor of each."""
    indices, norms = values if len(values) == 2 else (None, None)
    if not isinstance(indices, torch.Tensor) or not isinstance(norms, torch.Tensor) or indices.shape != norms.shape:
        raise ProtocolError("a frame of norms holds an index and a norm for each parameter")
    if indices.dtype != torch.int64 or norms.dtype != torch.float64 or indices.dim() != 1:
        raise ProtocolError(f"norms arrived as {indices.dtype} and {norms.dtype}")
    if len(indices) > parameters:
        raise ProtocolError(f"{len(indices)} norms arrived, the job has {parameters} parameters")
    known = indices.tolist()
    if len(set(known)) < len(known) or not all(0 <= i < parameters for i in known):
        raise ProtocolError("a frame of norms holds a parameter twice, or one that the job does not have")
    return list(zip(known, norms.tolist()))


def named_tensors(
    header: Mapping[str, Any], values: list[Any], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """By the names that its header gives; `like` are the parameters that its sender may speak of."""
    names = need(header, "names", list[str])
    if len(names) != len(values):
        raise ProtocolError("a frame of shared gradients needs one tensor for each name")
    for name, tensor in zip(names, tensors_of(values)):
        own = like.get(name)
        if own is None or (tensor is not None and (tensor.shape, tensor.dtype) != (own.shape, own.dtype)):
            raise ProtocolError(
                f"a shared gradient of {name[:80]!r} arrived, which its sender does not share, or not like this"
            )
    return dict(zip(names, values))
