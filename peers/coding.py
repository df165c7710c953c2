"""Boundary values on their way out and in: encoded and decoded beside the device's thread, never on the event loop.

The idea: a frame that needs encoding is queued as a promise of a frame, so the stage goes on computing while its outbox
waits for the bytes; frames still leave in the order in which they were queued. Without codecs nothing here costs a hop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import torch

from meshcee.codec import Coder, accepted, noise_seed
from peers import messages, tensors
from peers.compute import Compute
from peers.messages import need
from peers.spans import Spans, micro_of
from peers.transport.base import Frame

__all__ = ["Coding"]


class Coding:
    """What one stage sends by which codec (`out`, of its plan entry), and what it accepts (`arriving`).

    Both map a kind of frame, F or B, to a codec's name; other frames travel as they are. `limit_bytes` is the most that
    one frame may unfold to.
    """

    def __init__(
        self,
        out: Mapping[str, str],
        arriving: Mapping[str, str],
        compute: Compute,
        *,
        seed: int,
        stage: int,
        limit_bytes: int,
        spans: Spans | None = None,
    ) -> None:
        self._spans = spans or Spans()
        self._coders = {kind: Coder(codec) for kind, codec in out.items() if codec != "none"}
        self._accepted = {kind: accepted(codec) for kind, codec in arriving.items() if codec != "none"}
        self._compute = compute
        self._seed, self._stage = seed, stage
        self._limit_bytes = limit_bytes
        self.seconds = {"encode": 0.0, "decode": 0.0}

    def frame(
        self, kind: str, header: Mapping[str, Any], values: Sequence[Any], coded: Sequence[bool], step: int
    ) -> Frame | Awaitable[Frame]:
        """A frame of these values, or the promise of one. `coded[i]` says that value i may be encoded.

        Gradients are rounded by chance, so that their errors cancel over micro-batches and steps instead of adding up;
        `step` and the header's micro-batch seed it.
        """
        coder = self._coders.get(kind)
        if coder is None:

            def plain() -> Frame:
                meta, payloads = tensors.pack(values)
                return Frame(kind, {**header, "tensors": meta}, payloads)

            # A copy from a GPU waits for its kernels.
            waits = any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values)
            return self._compute.beside(plain) if waits else plain()

        def encode(index: int, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
            if index >= len(coded) or not coded[index]:
                return None
            micro = header["micro"]
            seed = noise_seed(self._seed, step, micro, self._stage, index) if kind == messages.B else None
            return coder.encode(tensor, seed)

        def work() -> Frame:
            start_s = time.perf_counter()
            meta, payloads = tensors.pack(values, encode)
            self._tell("encode", kind, header, start_s)
            return Frame(kind, {**header, "tensors": meta}, payloads)

        return self._compute.beside(work)

    async def values(self, frame: Frame) -> list[Any]:
        """The values of a frame from another stage; ProtocolError if it is not what the plan lets it be."""
        meta = need(frame.header, "tensors", list)
        codecs = self._accepted.get(frame.kind)
        if codecs is None:
            return tensors.unpack(meta, frame.payloads)

        def work() -> list[Any]:
            start_s = time.perf_counter()
            device = self._compute.device
            values = tensors.unpack(meta, frame.payloads, codecs=codecs, limit_bytes=self._limit_bytes, device=device)
            self._tell("decode", frame.kind, frame.header, start_s)
            return values

        return await self._compute.beside(work)

    def _tell(self, what: str, kind: str, header: Mapping[str, Any], start_s: float) -> None:
        end_s = time.perf_counter()
        self.seconds[what] += end_s - start_s
        self._spans.add(f"{what} {kind}", micro_of(header), start_s, end_s)

    def take(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Since the last call: seconds of encoding and decoding, and per direction what was measured."""
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        measured = {kind: coder.take() for kind, coder in self._coders.items()}
        used = {kind: of.to_json() for kind, of in measured.items() if of.raw_bytes}
        return seconds if self._coders or self._accepted else {}, used
