"""Boundary values on their way out and in: encoded and decoded beside the device's thread, never on the event loop.

The idea: a frame that needs encoding is queued as a promise of a frame, so the stage goes on computing while its outbox
waits for the bytes. Frames still leave in the order in which they were queued. On a CPU without codecs nothing here costs a
hop; what a GPU sends and receives is copied here too (`peers/device/staging.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshcee.codec import Coder, accepted, noise_seed
from meshcee.stage import tensors
from peers.device import Compute
from peers.transport import Frame
from peers.wire import Spans, messages, micro_of, need

__all__ = ["Coding"]

_ON_DEVICE = {messages.F, messages.B, messages.SHARED, messages.TOTAL}  # norms are numbers for the host


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
        self._counters = {kind: Coder(codec) for kind, codec in out.items() if codec == "none"}  # of bytes alone
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
        coder, staging = self._coders.get(kind), self._compute.staging
        counter = coder or self._counters.get(kind)
        to_host = torch.Tensor.cpu if staging is None else staging.to_host

        def encode(index: int, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
            if counter is None or index >= len(coded) or not coded[index]:
                return None
            micro = header["micro"]
            seed = noise_seed(self._seed, step, micro, self._stage, index) if kind == messages.B else None
            return counter.encode(tensor, seed)

        def work() -> Frame:
            start_s = time.perf_counter()
            meta, payloads = tensors.pack(values, encode if counter is not None else None, to_host)
            if coder is not None:
                self._tell("encode", kind, header, start_s)
            return Frame(kind, {**header, "tensors": meta}, payloads)

        if staging is not None:
            return self._compute.run_aside(staging.leave, staging.mark(), work)
        waits = coder is not None or self._compute.device.type != "cpu"  # a copy from any device waits for its kernels
        return self._compute.run_aside(work) if waits else work()

    async def values(self, frame: Frame) -> list[Any]:
        """The values of a frame from another stage; ProtocolError if it is not what the plan lets it be."""
        meta = need(frame.header, "tensors", list)
        codecs, staging = self._accepted.get(frame.kind), self._compute.staging
        moves = staging is not None and frame.kind in _ON_DEVICE
        if codecs is None and not moves:  # an expanded tensor is large without a codec too
            return tensors.unpack(meta, frame.payloads, limit_bytes=self._limit_bytes)
        stays = len(meta) - 1 if frame.kind == messages.F else None  # the state of a generator, which the host reads

        def bring(index: int, flat: torch.Tensor) -> torch.Tensor:
            if index == stays:
                return flat
            return flat.to(self._compute.device) if staging is None else staging.to_device(flat)

        def work() -> list[Any]:
            start_s = time.perf_counter()
            limit_bytes = self._limit_bytes
            values = tensors.unpack(meta, frame.payloads, codecs=codecs or (), limit_bytes=limit_bytes, bring=bring)
            if codecs is not None:
                self._tell("decode", frame.kind, frame.header, start_s)
            return values

        return await self._compute.run_aside(work if staging is None else partial(staging.arrive, work))

    def _tell(self, what: str, kind: str, header: Mapping[str, Any], start_s: float) -> None:
        end_s = time.perf_counter()
        self.seconds[what] += end_s - start_s
        self._spans.add(f"{what} {kind}", micro_of(header), start_s, end_s)

    def take(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Since the last call: seconds of encoding and decoding, and per direction what was measured."""
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        measured = {kind: coder.take() for kind, coder in (self._coders | self._counters).items()}
        used = {kind: of.to_json() for kind, of in measured.items() if of.raw_bytes}
        return seconds if self._coders or self._accepted else {}, used
