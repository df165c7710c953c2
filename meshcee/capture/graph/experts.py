"""The product of rows with the experts they were sorted to, which a mixture of experts computes in one call.

The idea: torch's kernel for it takes float32 on a CPU, but says of meta tensors that only bfloat16 will do, and it leaves
rows that its offsets do not cover as memory that nobody wrote. So meta tensors get a rule of our own, and a peer looks at
the offsets before it calls the kernel.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["grouped_mm", "teach_shapes"]

_kept: list[Any] = []  # a registration ends with its library object


@functools.lru_cache(maxsize=1)
def teach_shapes() -> None:
    """Let meta tensors of any floating type pass, for export and for peers that check a graph."""
    importlib.import_module("torch._meta_registrations")  # registers its own rule, which ours takes the place of
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_grouped_mm", _shape, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
    _kept.append(library)
    operator = torch.ops.aten._grouped_mm.default
    operator.py_kernels.pop(torch._C.DispatchKey.Meta, None)  # what export asks before the library
    operator._dispatch_cache.clear()


def _shape(
    rows: torch.Tensor,
    experts: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if rows.dim() != 2 or experts.dim() != 3 or offs is None or offs.dim() != 1 or bias is not None:
        raise ValueError("rows are a matrix, experts a stack of matrices, offsets one number for each")
    if rows.shape[1] != experts.shape[1] or offs.shape[0] != experts.shape[0] or offs.dtype != torch.int32:
        raise ValueError("rows, experts and offsets do not fit together")
    dtype = out_dtype or rows.dtype
    if not dtype.is_floating_point or rows.dtype != experts.dtype:
        raise ValueError("rows and experts are of one floating type")
    each = 16 // dtype.itemsize
    wide = (experts.shape[2] + each - 1) // each * each  # a row begins at a multiple of 16 bytes
    return torch.empty_strided((rows.shape[0], experts.shape[2]), (wide, 1), dtype=dtype, device=rows.device)


def grouped_mm(rows: torch.Tensor, experts: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """As `aten._grouped_mm`, if the offsets ascend and the last is the number of rows; else ValueError."""
    offs = rest[0] if rest else options.get("offs")
    if isinstance(offs, torch.Tensor) and not offs.is_meta and not isinstance(offs, FakeTensor):
        edges = [0, *offs.tolist()]
        if edges != sorted(edges) or edges[-1] != rows.shape[0]:
            raise ValueError("the rows of experts do not make up all rows")
    out: torch.Tensor = torch.ops.aten._grouped_mm.default(rows, experts, *rest, **options)
    return out
