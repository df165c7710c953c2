"""What a member did and when, for as long as the owner asks for it.

The idea: a list of (kind, micro-batch, start, end) on the member's own clock, bounded, which travels with the word that
the step is applied. Nobody pays for it in a step that is not traced.

Kinds: letters of F, B and W as they ran in one visit to the compute thread ("FB" on the last stage), "apply" and
"wait". There is the "sum" of a bucket of gradients, from when it is whole. And there are "encode", "decode", "send" and
"receive" followed by the kind of frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from meshcee.errors import ProtocolError
from peers.transport import Buffer

__all__ = ["MAX_SPANS", "Span", "Spans", "micro_of", "read_spans"]

MAX_SPANS = 8192  # of a step; what comes after is dropped
MAX_BYTES = 64 * MAX_SPANS
MAX_KIND_CHARS = 32


class Span(NamedTuple):
    """Seconds of the clock of whoever measured it (`time.perf_counter`). micro is -1 where there is none."""

    kind: str
    micro: int
    start_s: float
    end_s: float


def micro_of(header: Mapping[str, Any]) -> int:
    """The micro-batch that a frame belongs to, -1 for none; what else a header may hold is checked elsewhere."""
    micro = header.get("micro")
    return micro if type(micro) is int else -1


class Spans:
    """Filled from any thread, one call at a time being atomic."""

    def __init__(self) -> None:
        self._found: list[Span] | None = None

    def start(self, wanted: bool) -> None:
        """A step begins."""
        self._found = [] if wanted else None

    def add(self, kind: str, micro: int, start_s: float, end_s: float) -> None:
        found = self._found
        if found is not None and len(found) < MAX_SPANS:
            found.append(Span(kind[:MAX_KIND_CHARS], micro, start_s, end_s))

    def take(self) -> list[Buffer]:
        """Everything since `start`, as payloads of a frame: none when nobody asked."""
        found, self._found = self._found, None
        return [] if found is None else [msgpack.packb(found)]


def read_spans(payloads: Sequence[Buffer]) -> list[Span]:
    """Inverse of `take`, from a member that is not trusted; ProtocolError on anything else."""
    if len(payloads) != 1 or memoryview(payloads[0]).nbytes > MAX_BYTES:
        raise ProtocolError(f"spans of a step come as one payload of at most {MAX_BYTES} bytes")
    try:
        found = msgpack.unpackb(payloads[0], raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"spans are not msgpack: {error}") from error
    if not isinstance(found, list) or len(found) > MAX_SPANS or not all(map(_is_span, found)):
        raise ProtocolError("a span is a kind, a micro-batch, a start and an end")
    return [Span(kind, micro, float(start_s), float(end_s)) for kind, micro, start_s, end_s in found]


def _is_span(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    kind, micro, *times = value
    if not isinstance(kind, str) or len(kind) > MAX_KIND_CHARS or type(micro) is not int:
        return False
    return all(type(s) is float and math.isfinite(s) for s in times) and times[0] <= times[1]
