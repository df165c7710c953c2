"""Frozen weights of Linear and Embedding in 4 or 8 bits: what QLoRA trains an adapter on.

The idea: the packed weight is a few buffers, and forward makes the weight of them when it is needed. A stage that computes
gradients makes it once more then, instead of keeping it (meshcee/stage/remade.py). Of a large Linear no more than PIECE numbers
are there at a time: it computes its outputs piece by piece. What is trained beside it, an adapter or a norm, is as it was.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from meshcee.errors import UsageError
from meshcee.nn.blocks import BLOCK, Codes, decode, pairs, quantized, read_scales

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "quantize_frozen"]

PIECE = 1 << 24  # numbers that a Linear unfolds at a time, for 8 bytes each: smaller ones would be more operators
M = TypeVar("M", bound=nn.Module)


class _Packed(nn.Module):
    """A weight as codes. `like` is empty: its type is the one that the weight has, so `.bfloat16()` changes it."""

    table: torch.Tensor | None
    like: torch.Tensor

    def _pack(self, weight: torch.Tensor, codes: Codes, table: torch.Tensor | None) -> None:
        self.shape = tuple(weight.shape)
        self.buffer_names = tuple(codes)
        for name, tensor in codes.items():
            self.register_buffer(name, tensor)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("like", torch.empty(0, dtype=weight.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The numbers that the codes stand for, made when they are asked for."""
        return self._unfolded(self._scales())

    def _scales(self) -> torch.Tensor:
        codes = {name: self.get_buffer(name) for name in self.buffer_names}
        return read_scales(codes, -(-math.prod(self.shape) // BLOCK))

    def _unfolded(self, scales: torch.Tensor, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of a matrix; where they are not all, they begin and end with whole blocks."""
        codes, rows, width = self.get_buffer("codes"), self.shape[0], math.prod(self.shape[1:])
        if end is not None:
            rows, each = end - first, BLOCK if self.table is None else BLOCK // 2
            blocks = slice(first * width // BLOCK, -(-end * width // BLOCK))
            codes, scales = codes[blocks.start * each : blocks.stop * each], scales[blocks]
        flat = decode(codes, scales, self.table).view(-1)
        return flat[: rows * width].view(rows, *self.shape[1:]).to(self.like.dtype)

    @property
    def bits(self) -> int:
        return 8 if self.table is None else 4


class QuantizedLinear(_Packed, nn.Linear):  # type: ignore[override]
    """An nn.Linear, so that PEFT puts adapters on it."""

    def __init__(self, linear: nn.Linear, codes: Codes, table: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._pack(linear.weight, codes, table)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = max(1, PIECE // self.in_features // BLOCK) * BLOCK
        if rows >= self.out_features:
            return F.linear(input, self.weight, self.bias)
        scales, parts = self._scales(), []
        for first in range(0, self.out_features, rows):
            parts.append(F.linear(input, self._unfolded(scales, first, min(first + rows, self.out_features))))
        found = torch.cat(parts, -1)
        return found if self.bias is None else found + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}"


class QuantizedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]
    """An nn.Embedding whose rows are whole blocks: only those that are looked up are made."""

    def __init__(self, embedding: nn.Embedding, codes: Codes, table: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        for name in (*nn.Embedding.__constants__, "sparse"):
            setattr(self, name, getattr(embedding, name))
        self._pack(embedding.weight, codes, table)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.num_embeddings
        codes = F.embedding(input, self.get_buffer("codes").view(rows, -1))
        scales = F.embedding(input, self.get_buffer("scales").view(rows, -1)).view(torch.float32)
        numbers = decode(codes, scales, self.table)
        return numbers.view(*input.shape, self.embedding_dim).to(self.like.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}"


USUAL = ("*lm_head",)


def quantize_frozen(model: M, bits: int = 4, *, double: bool = False, skip: Sequence[str] = USUAL) -> M:
    """Replace the frozen weights of the model's Linear and Embedding modules by `bits` bits a number; returns the model.

    bits    4 (NF4) or 8 (integers), by blocks of 64 numbers with a scale each
    double  the scales of Linear modules in 8 bits as well: 4.13 bits a number in place of 4.5
    skip    patterns of names of modules that stay as they are, in place of the usual one, with and without PEFT's prefix

    What is trained stays, and so do a weight that several modules share and an Embedding whose rows are no whole blocks. Adapters
    of PEFT stay too: they are frozen when they are loaded to be used. Call it after `get_peft_model`, or after
    `model.requires_grad_(False)`. Weights that a quantized model computes with are its own: it is another model than the one
    before, and trains as that one does on one machine.
    """
    if bits not in (4, 8):
        raise UsageError(f"bits must be 4 or 8, got {bits!r}")
    if isinstance(skip, str) or not isinstance(skip, Sequence):
        raise UsageError('skip is a list of patterns: skip=["*lm_head"], or [] to keep no module as it is')
    names = {name: (name, name.removeprefix("base_model.model.")) for name, _ in model.named_modules()}
    for pattern in skip if skip is not USUAL else ():
        if not any(fnmatch.filter(both, pattern) for both in names.values()):
            raise UsageError(
                f"skip: no module of the model has a name like {pattern!r}: write a pattern such as '*lm_head'"
            )
    if any(isinstance(module, _Packed) for module in model.modules()):
        raise UsageError("the model's frozen weights are in few bits already: call quantize_frozen once")
    adapters = tuple(
        f"{name}.{own}." for name, module in model.named_modules() for own in getattr(module, "adapter_layer_names", ())
    )
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    table = pairs() if bits == 4 else None
    found = 0
    for name, module in list(model.named_modules()):
        kind = _KINDS.get(type(module))
        if kind is None or name.startswith(adapters) or any(fnmatch.filter(names[name], pattern) for pattern in skip):
            continue
        weight = module.weight
        if weight.requires_grad or uses[id(weight)] > 1 or not weight.is_floating_point() or not _fits(module):
            continue
        codes = quantized(weight, bits, double and kind is QuantizedLinear)
        packed: Any = kind(module, codes, table)
        packed.training = module.training
        if not name:
            return packed  # type: ignore[no-any-return]
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, packed)
        found += 1
    if not found:
        raise UsageError(
            "the model has no frozen weight of a Linear or an Embedding; call quantize_frozen behind get_peft_model, or behind "
            "model.requires_grad_(False)"
        )
    return model


_KINDS: dict[type[nn.Module], type[QuantizedLinear] | type[QuantizedEmbedding]] = {
    nn.Linear: QuantizedLinear,
    nn.Embedding: QuantizedEmbedding,
}


def _fits(module: nn.Module) -> bool:
    return not isinstance(module, nn.Embedding) or (module.embedding_dim % BLOCK == 0 and module.max_norm is None)
