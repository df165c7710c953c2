"""The sender of one boundary and direction: encodes, watches its own error, steps back for good when it is too large.

The idea: now and then the sender decodes what it is about to send, which tells the error that the receiver will get.
Past the codec's budget it goes one rung up, with this tensor already; each payload names its codec, so nobody has to agree
on when. A tensor that its rung cannot express (NaN, infinity) climbs alone. All of this follows from the tensors alone, so a
run repeats bit for bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from meshcee.codec.base import Codec, is_coded
from meshcee.codec.ladder import accepted, codec_of
from meshcee.errors import UsageError

__all__ = ["SAMPLE_EVERY", "Coder", "Measured", "noise_seed"]

SAMPLE_EVERY = 16  # tensors; measuring costs about as much as decoding


@dataclass(frozen=True)
class Measured:
    """Since it was last taken: the codec now in use, the largest relative error that was measured, and bytes saved."""

    codec: str
    error: float
    raw_bytes: int
    wire_bytes: int

    def __add__(self, other: Measured) -> Measured:
        """Of two members of a group: the codec of the one with the larger error."""
        codec = max(self, other, key=lambda m: m.error).codec
        error = max(self.error, other.error)
        return Measured(codec, error, self.raw_bytes + other.raw_bytes, self.wire_bytes + other.wire_bytes)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> Measured:
        """Raises UsageError on anything else."""
        try:
            sizes = int(data["raw_bytes"]), int(data["wire_bytes"])
            if min(sizes) < 0:
                raise ValueError("sizes are not negative")
            return cls(codec_of(str(data["codec"])).name, float(data["error"]), *sizes)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"this is not what a coder measured: {error!r:.200}") from error


def noise_seed(seed: int, step: int, micro: int, stage: int, index: int) -> int:
    """Of the rounding of one gradient: 63 bits of SHA-256; `index` is its place among the stage's received values."""
    digest = hashlib.sha256(f"meshcee:codec:{seed}:{step}:{micro}:{stage}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def relative_error(tensor: torch.Tensor, back: torch.Tensor) -> float:
    """Norm of the difference over norm of the tensor, over its finite numbers; 0 for zeros that stayed so."""
    exact = tensor.detach().double()
    finite = exact.isfinite()
    off = float(torch.linalg.vector_norm(torch.where(finite, exact - back.double(), 0.0)))
    return off / max(float(torch.linalg.vector_norm(torch.where(finite, exact, 0.0))), 1e-300) if off else 0.0


class Coder:
    """Not for two threads at once."""

    def __init__(self, codec: str, every: int = SAMPLE_EVERY) -> None:
        self._rungs = list(accepted(codec))  # the first is in use
        self._every = every
        self._count = 0
        self._error = 0.0
        self._raw_bytes = self._wire_bytes = 0

    @property
    def codec(self) -> str:
        return self._rungs[0].name

    def encode(self, tensor: torch.Tensor, seed: int | None = None) -> tuple[str, torch.Tensor] | None:
        """The codec used and the payload; None: send it as it is, as everything that is no float and gains nothing."""
        if not is_coded(tensor.dtype):
            return None
        sampled = self._count % self._every == 0
        self._count += 1
        self._raw_bytes += tensor.nbytes
        for codec in tuple(self._rungs):
            if codec.wire_bytes(tensor.dtype, tensor.numel()) >= tensor.nbytes:
                continue  # `none` is among these, and whatever is too small for blocks
            payload = codec.encode(tensor, seed)
            if payload is None or (sampled and not self._is_close(codec, tensor, payload)):
                continue
            self._wire_bytes += payload.numel()
            return codec.name, payload
        self._wire_bytes += tensor.nbytes
        return None

    def _is_close(self, codec: Codec, tensor: torch.Tensor, payload: torch.Tensor) -> bool:
        """Measures; past the budget this rung is left for good."""
        error = relative_error(tensor, codec.decode(payload, tensor.dtype, tensor.shape))
        if error <= codec.budget:
            self._error = max(self._error, error)
            return True
        while self._rungs[0].name != codec.name:  # a lower one that this tensor alone could not use is left too
            self._rungs.pop(0)
        self._rungs.pop(0)
        return False

    def take(self) -> Measured:
        """What was measured since the last call."""
        measured = Measured(self.codec, self._error, self._raw_bytes, self._wire_bytes)
        self._error, self._raw_bytes, self._wire_bytes = 0.0, 0, 0
        return measured
