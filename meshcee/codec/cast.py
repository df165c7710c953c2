"""bf16: the upper half of each fp32 number.

The idea: the range of fp32 with 8 bits of precision, so NaN and infinity stay what they are and nothing overflows that
fp32 could hold. 16-bit tensors have nothing to gain and travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshcee.files.tensor_files import flat_bytes

__all__ = ["Bf16"]


class Bf16:
    """Each number as bfloat16, rounded to nearest: off by at most 2^-8 of itself. Chance would gain nothing here."""

    name = "bf16"
    worst = 2.0**-8
    budget = 2.0**-8
    varies = False

    def wire_bytes(self, dtype: torch.dtype, count: int) -> int:
        return 2 * count

    def encode(self, tensor: torch.Tensor, seed: int | None = None) -> torch.Tensor | None:
        coded = tensor.detach().to(torch.bfloat16)
        # Only fp64 has finite numbers that overflow here: as infinity they would end the run for no fault of its own.
        if tensor.dtype == torch.float64 and bool((coded.isinf() & tensor.isfinite()).any()):
            return None
        return flat_bytes(coded)

    def decode(self, payload: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return payload.view(torch.bfloat16).to(dtype, copy=True).view(tuple(shape))
