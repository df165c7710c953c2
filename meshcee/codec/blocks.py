"""int8 and int4: blocks of 64 numbers, each with a scale of its own.

The idea: a number is written as a small integer times its block's scale, so an outlier coarsens only the 63 numbers
beside it. With 4 bits that would still be too much, so int4 rotates each block first (a Hadamard matrix with fixed random
signs). The rotation spreads an outlier evenly over the block. The other end rotates the block back. QuaRot (arXiv
2404.00456) uses the same rotation on weights and activations.

Layout of a payload: the scales of all blocks (bf16), then the integers of all blocks. The last block is filled with zeros.
The work goes in pieces that stay in a core's cache, which also bounds the memory that encoding takes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

__all__ = ["BLOCK", "Int4", "Int8"]

BLOCK = 64
SCALE_BYTES = 2
PIECE = 4096  # blocks: a piece of fp32 takes 1 MiB
LARGEST = 1e30  # of a block's numbers: products with scales stay far from overflow
HALF_MAX = torch.finfo(torch.float16).max


class _Blocks(ABC):
    """What both share: pieces, scales, chance. A subclass turns scaled blocks into bytes and back."""

    name: str
    worst: float
    budget: float
    varies = False
    row_bytes: int  # of the integers of one block

    def wire_bytes(self, dtype: torch.dtype, count: int) -> int:
        return -(-count // BLOCK) * (SCALE_BYTES + self.row_bytes)

    def encode(self, tensor: torch.Tensor, seed: int | None = None) -> torch.Tensor | None:
        flat = tensor.detach().reshape(-1)
        count = flat.numel()
        blocks = -(-count // BLOCK)
        payload = torch.empty(blocks * (SCALE_BYTES + self.row_bytes), dtype=torch.uint8, device=flat.device)
        scales, rows = self._parts(payload)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for start in range(0, blocks, PIECE):
            piece = flat[start * BLOCK : (start + PIECE) * BLOCK].float()
            if piece.numel() % BLOCK:
                piece = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK))
            values = self._rotated(piece.view(-1, BLOCK))
            largest = values.abs().amax(1)  # NaN if one of them is
            if not bool((largest <= LARGEST).all()):
                return None
            end = start + len(values)
            scales[start:end] = self._scale(largest, chance=generator is not None)
            scale = scales[start:end].float()
            inverse = torch.where(scale > 1e-35, scale.reciprocal(), 0.0)
            noise = None if generator is None else _noise(values.shape, generator, flat.device)
            self._write(values * inverse[:, None], noise, rows[start:end])
        return payload

    def decode(self, payload: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        scales, rows = self._parts(payload)
        out = torch.empty(tuple(shape), dtype=dtype, device=payload.device)
        flat = out.view(-1)
        for start in range(0, len(scales), PIECE):
            end = min(start + PIECE, len(scales))
            values = self._read(rows[start:end]) * scales[start:end].float()[:, None]
            values = self._rotated_back(values)
            if dtype == torch.float16:  # what was just within its range must not become infinite
                values = values.clamp(-HALF_MAX, HALF_MAX)
            room = flat[start * BLOCK : end * BLOCK]
            room.copy_(values.reshape(-1)[: room.numel()])
        return out

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales (blocks) and integers (blocks, row_bytes), as views of a payload."""
        at = payload.numel() // (SCALE_BYTES + self.row_bytes) * SCALE_BYTES
        return payload[:at].view(torch.bfloat16), payload[at:].view(-1, self.row_bytes)

    def _rotated(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def _rotated_back(self, values: torch.Tensor) -> torch.Tensor:
        return values

    @abstractmethod
    def _scale(self, largest: torch.Tensor, *, chance: bool) -> torch.Tensor: ...

    @abstractmethod
    def _write(self, scaled: torch.Tensor, noise: torch.Tensor | None, rows: torch.Tensor) -> None: ...

    @abstractmethod
    def _read(self, rows: torch.Tensor) -> torch.Tensor: ...


class Int8(_Blocks):
    """-127 to 127 times largest / 127. A number is off by at most 1/250 of its block's largest."""

    name = "int8"
    row_bytes = BLOCK
    worst = 0.032  # one number of a block is large, all others half a step: 8 * 0.5 / 127 and the scale's own rounding
    budget = 0.03

    def _scale(self, largest: torch.Tensor, *, chance: bool) -> torch.Tensor:
        return largest / 127

    def _write(self, scaled: torch.Tensor, noise: torch.Tensor | None, rows: torch.Tensor) -> None:
        whole = scaled.round_() if noise is None else scaled.add_(noise).floor_()
        rows.view(torch.int8).copy_(whole.clamp_(-127, 127))

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.int8).float()


class Int4(_Blocks):
    """-7.5, -6.5 .. 7.5 times a scale, of the rotated block; two numbers share a byte, element i with element i + 32."""

    name = "int4"
    row_bytes = BLOCK // 2
    worst = 0.51  # a block that the rotation makes spiky, all others half a step: 8 / 16 and the scale's own rounding
    budget = 0.25

    def _rotated(self, values: torch.Tensor) -> torch.Tensor:
        return values @ _rotation(values.device)

    def _rotated_back(self, values: torch.Tensor) -> torch.Tensor:
        return values @ _rotation(values.device).t()

    def _scale(self, largest: torch.Tensor, *, chance: bool) -> torch.Tensor:
        # With chance the largest must be a level itself, or it would always be rounded towards zero.
        return largest / (7.5 if chance else 8)

    def _write(self, scaled: torch.Tensor, noise: torch.Tensor | None, rows: torch.Tensor) -> None:
        whole = (scaled if noise is None else scaled.add_(noise).sub_(0.5)).floor_()
        codes = whole.clamp_(-8, 7).add_(8).to(torch.uint8)
        torch.bitwise_or(codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :] << 4, out=rows)

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows & 15, rows >> 4], 1).float().sub_(7.5)


def _noise(shape: torch.Size, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Uniform in [0, 1) in steps of 1/256, drawn on the CPU: every device rounds alike."""
    words = torch.empty(shape.numel() // 8, dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    return words.view(torch.uint8).to(device).view(shape).float().add_(0.5).mul_(1 / 256)


@functools.cache
def _rotation(device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix, orthonormal, after a flip of fixed random signs: regular patterns give no spikes."""
    matrix: torch.Tensor = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs: torch.Tensor = torch.randint(0, 2, (BLOCK, 1), generator=torch.Generator().manual_seed(64)) * 2.0 - 1.0
    rotation: torch.Tensor = signs * matrix / BLOCK**0.5
    return rotation.to(device)
