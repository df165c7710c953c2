"""A tensor in 4 or 8 bits: codes, and one scale for each block of 64 numbers.

The idea: plain operators only, so whoever can run a graph can read such a tensor. Two codes of NF4 lie in a byte, and one table
of 256 pairs turns bytes to numbers. Full-precision scales are kept as the integers that have their bits: then nothing that rounds
a model to bf16 rounds them.

NF4 and the scales of scales are those of QLoRA, https://arxiv.org/abs/2305.14314, appendix E and section 3.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional as F

__all__ = ["BLOCK", "NF4", "Codes", "decode", "pairs", "quantized", "read_scales"]

BLOCK = 64  # numbers that share a scale
OUTER = 256  # scales that share a scale of their own
PIECE = 1 << 22  # numbers that are quantized at a time
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
Codes = dict[str, torch.Tensor]  # what a module keeps of a weight, by the names of its buffers


def pairs() -> torch.Tensor:
    """Byte -> the bits of the two numbers that it stands for."""
    levels = torch.tensor(NF4)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).view(torch.int32)


def quantized(weight: torch.Tensor, bits: int, double: bool = False) -> Codes:
    """The weight's numbers in order, in whole blocks; `double` gives scales 8 bits, too."""
    flat = weight.detach().reshape(-1)
    codes, scales = zip(*(_piece(piece, bits) for piece in torch.split(flat, PIECE)))
    found = {"codes": torch.cat(codes)}
    return found | (_doubled(torch.cat(scales)) if double else {"scales": torch.cat(scales).view(torch.int32)})


def _piece(flat: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _in_rows(flat.float(), BLOCK)
    largest = blocks.abs().amax(1)
    unit = torch.where(largest > 0, largest, 1.0)[:, None]
    if bits == 8:
        return (blocks / unit * 127).round().to(torch.int8).reshape(-1), largest / 127
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(NF4)], device=flat.device)
    codes = torch.bucketize(blocks / unit, middles, out_int32=True).to(torch.uint8).reshape(-1, 2)
    return codes[:, 0] * 16 + codes[:, 1], largest


def _doubled(scales: torch.Tensor) -> Codes:
    middle = scales.mean()
    rows = _in_rows(scales - middle, OUTER)
    outer = torch.where((largest := rows.abs().amax(1)) > 0, largest, 1.0) / 127
    small = (rows / outer[:, None]).round().to(torch.int8).reshape(-1)
    return {"scales": small, "outer": outer.view(torch.int32), "middle": middle.reshape(1).view(torch.int32)}


def _in_rows(flat: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(flat, (0, -len(flat) % width)).view(-1, width)


def read_scales(codes: Codes, count: int) -> torch.Tensor:
    """The scales of so many blocks, in full."""
    scales = codes["scales"]
    if "outer" not in codes:
        return scales.view(torch.float32)
    rows = scales.float().view(-1, OUTER) * codes["outer"].view(torch.float32)[:, None]
    return (rows + codes["middle"].view(torch.float32)).view(-1)[:count]


def decode(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """The numbers, a block a row. With a table codes are of NF4, two in a byte."""
    numbers = codes.float() if table is None else F.embedding(codes.int(), table.view(torch.float32))
    return numbers.view(-1, BLOCK) * scales.reshape(-1, 1)
