"""A stage's state between two steps, as safetensors that others read range by range.

The idea: a member copies its stage at the boundary and trains on; the copy is then read like a file, chunk by chunk, at
the reader's pace, so that neither the pipeline nor anybody's memory feels it. What travels is the file that the owner
keeps: parameters and buffers under the model's own names, the optimizer's state under "<parameter>/<key>".
"""

from __future__ import annotations

import bisect
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.errors import ProtocolError
from meshcee.tensor_files import DTYPES, Layout, byte_view, head_of
from peers import messages
from peers.cadence import CHUNK_BYTES
from peers.messages import need
from peers.stage import StageRunner
from peers.state_frames import digest_of
from peers.transport.base import Frame

__all__ = ["CORES", "FILES", "Held", "Image", "by_parameter", "parse_header"]

FILES = ("model", "optimizer")
CORES = os.cpu_count() or 1  # of which hashing takes one from the device, where that is the processor


class Image:
    """A safetensors file in memory: a header, and tensors that are not copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self.header, starts, self.data_bytes = head_of(layout)
        filled = [(start, byte_view(tensors[name])) for name, start in starts.items() if tensors[name].numel()]
        self._starts = [start for start, _ in filled]
        self._pieces = [view for _, view in filled]

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes of the data behind the header, from `start`."""
        if not 0 <= start <= start + count <= self.data_bytes:
            raise ProtocolError(f"bytes {start} to {start + count} of a snapshot of {self.data_bytes} were asked for")
        found = []
        i = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while count > 0:
            offset = start - self._starts[i]
            part = self._pieces[i][offset : offset + count]
            found.append(part)
            start, count, i = start + len(part), count - len(part), i + 1
        return b"".join(found)


def parse_header(data: bytes | memoryview, expected: Layout, *, partial: bool) -> int:
    """Check a header against what it must describe; how many bytes follow it. `partial`: entries may be missing."""
    raw = bytes(data)
    try:
        entries = json.loads(raw[8:])
        if int.from_bytes(raw[:8], "little") != len(raw) - 8 or not isinstance(entries, dict):
            raise ValueError("its length is wrong")
        spans = []
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            if name not in expected:
                raise ValueError(f"{name!r} was not expected")
            dtype, shape = expected[name]
            if DTYPES.get(entry["dtype"]) != dtype or tuple(entry["shape"]) != shape:
                raise ValueError(f"{name!r} is {entry['dtype']} {entry['shape']}, not {dtype} {list(shape)}")
            first, end = entry["data_offsets"]
            if type(first) is not int or end != first + dtype.itemsize * math.prod(shape):
                raise ValueError(f"{name!r} has another size")
            spans.append((first, end))
        at = 0
        for first, end in sorted(spans):
            if first != at:
                raise ValueError("its tensors do not follow one another")
            at = end
        if not partial and entries.keys() != expected.keys():
            raise ValueError(f"{min(expected.keys() - entries.keys())!r} is missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"this is not the header of the snapshot that was asked for: {error}") from error
    return at


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
    images: tuple[Image, ...] = ()  # as FILES; of our own
    by_digest: Mapping[str, torch.Tensor] = field(default_factory=dict)  # once the digests are known
    took_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Held:
    """The copies that a member holds: of its own stage, and of others whose buddy it is; as many as may be needed again.

    They outlive the epoch: when the next one goes on from such a copy, what this member needs of it is here already.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []  # of our own stage, oldest first
        self._others: dict[
            tuple[str, bool], list[_Copy]
        ] = {}  # (its holder, whether we are its far buddy) -> oldest first
        self.offered: dict[str, torch.Tensor] = {}  # of an offer that led nowhere
        self._frozen: dict[str, torch.Tensor] = {}  # what training does not change, not copied

    def take(self, next_step: int, runner: StageRunner, since: int = 0, besides: Collection[int] = ()) -> Frame:
        """Copy the stage as it stands before `next_step`; what to tell the owner. Runs on the compute thread.

        Copies before step `since` are forgotten, but for those of the steps `besides`: somebody is reading them, or they go
        with copies in other regions.
        """
        began_s = time.perf_counter()
        state = runner.state_dict()
        model = {name: _copy(state[name]) for name in (*runner.spec.trainable, *runner.spec.mutated)}
        optimizer = {
            f"{name}/{key}": _copy(value)
            for name, kept in runner.optimizer_state().items()
            for key, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        copy = _Copy(next_step, model | optimizer, (Image(model), Image(optimizer)))
        self._copies = [*_needed(self._copies, next_step, since, besides), copy]
        self._frozen = {n: t.detach() for n, t in state.items() if n not in model and t.device.type == "cpu"}
        copy.took_s = time.perf_counter() - began_s
        return Frame(messages.SNAPSHOT, {"next_step": next_step}, [image.header for image in copy.images])

    def digest(self, next_step: int, layout: Layout) -> tuple[dict[str, str], float]:
        """The digests of our own copy, and the device's seconds that it took. Raises ProtocolError when it is not held.

        `layout` has the types in which others expect it. From now on `find` gives its tensors. Takes a second for a
        gigabyte, so it runs in a thread.
        """
        copy = next((c for c in self._copies if c.next_step == next_step), None)
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
        return next((copy.by_digest[digest] for copy in self._all() if digest in copy.by_digest), None)

    def values(self, name: str) -> Iterator[torch.Tensor]:
        """What is here under a name of the model, or "<parameter>/<key>" of the optimizer; newest first."""
        for tensors in (*(copy.tensors for copy in self._all()), self._frozen, self.offered):
            if name in tensors:
                yield tensors[name]

    def read(self, header: Mapping[str, Any]) -> Frame:
        """The answer to a PULL. Raises ProtocolError for what is not held."""
        next_step, file, start, count = (need(header, name, int) for name in ("next_step", "file", "start", "count"))
        copy = next((c for c in self._copies if c.next_step == next_step), None)
        if copy is None or not 0 <= file < len(FILES):
            raise ProtocolError(f"no snapshot after {next_step} steps is held here")
        if not 0 < count <= CHUNK_BYTES:
            raise ProtocolError(f"{count} bytes of a snapshot were asked for at once")
        data = copy.images[file].read(start, count)
        return Frame(messages.PART, {"next_step": next_step, "file": file, "start": start}, [data])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _needed(copies: Sequence[_Copy], next_step: int, since: int, besides: Collection[int] = ()) -> list[_Copy]:
    """Of the copies before this step; a lost epoch may have gone further."""
    return [c for c in copies if c.next_step < next_step and (c.next_step >= since or c.next_step in besides)]
