"""What a member did and when, for as long as the owner asks for it.

The idea: a list of (kind, micro-batch, start, end) on the member's own clock, bounded, which travels with the word that
the step is applied. Nobody pays for it in a step that is not traced.

Kinds: letters of F, B and W as they ran in one visit to the compute thread ("FB" on the last stage), "apply" and
"wait". There is the "sum" of a bucket of gradients, from when it is whole. And there are "encode", "decode", "send" and
"receive" followed by the kind of frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgpack
from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import Finite, read, unpack
from peers.transport import Buffer

__all__ = ["MAX_SPANS", "Span", "Spans", "micro_of", "read_spans"]

MAX_SPANS = 8192  # of a step; what comes after is dropped
MAX_BYTES = 64 * MAX_SPANS
MAX_KIND_CHARS = 32


class Span(NamedTuple):
    """Seconds of the clock of whoever measured it (`time.perf_counter`). micro is -1 where there is none."""

    kind: Annotated[str, Meta(max_length=MAX_KIND_CHARS)]
    micro: int
    start_s: Finite
    end_s: Finite


_Spans = Annotated[list[Span], Meta(max_length=MAX_SPANS)]


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
    found = read(unpack(payloads[0], MAX_BYTES, "spans"), _Spans, "spans")
    if any(span.start_s > span.end_s for span in found):
        raise ProtocolError("a span ends after its start")
    return found
