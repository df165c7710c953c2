"""What is called in place of an operator whose kernel trusts the values in its tensors.

The idea: most kernels look at indices before they follow them, and a few do not. Those few look here: at offsets of experts'
rows, at labels of a CTC loss, at integers whose quotient no integer holds. torch's own rule for the shape of a product with
experts also refuses float32, which its kernel takes; so meta tensors get a rule of our own. ASSERT is what asserts on values in
the user's code become (meshcee/capture/asserts.py). ATTENTION looks at a mask as transformers does before torch is called.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["ASSERT", "ATTENTION", "FAILED_ASSERT", "GUARDED", "teach_shapes"]

FAILED_ASSERT = "an assert of the model does not hold"
ASSERT = "aten._functional_assert_async.msg"
ATTENTION = "aten.scaled_dot_product_attention.default"

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
    """Of the rows of each expert times its matrix. And in the backward pass of these rows times others, a matrix for each."""
    back = experts.dim() == 2
    if rows.dim() != 2 or experts.dim() not in (2, 3) or offs is None or offs.dim() != 1 or bias is not None:
        raise ValueError("rows are a matrix, experts a stack of matrices, offsets one number for each")
    if (
        rows.shape[1] != experts.shape[-2]
        or not (back or offs.shape[0] == experts.shape[0])
        or offs.dtype != torch.int32
    ):
        raise ValueError("rows, experts and offsets do not fit together")
    dtype = out_dtype or rows.dtype
    if not dtype.is_floating_point or rows.dtype != experts.dtype:
        raise ValueError("rows and experts are of one floating type")
    each = 16 // dtype.itemsize
    wide = (experts.shape[-1] + each - 1) // each * each  # a row begins at a multiple of 16 bytes
    sizes = [*([offs.shape[0]] if back else []), rows.shape[0], experts.shape[-1]]
    strides = [*([rows.shape[0] * wide] if back else []), wide, 1]
    return torch.empty_strided(sizes, strides, dtype=dtype, device=rows.device)


def _grouped_mm(rows: torch.Tensor, experts: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """As `aten._grouped_mm`, if the offsets ascend and the last is the number of rows; else ValueError."""
    if experts.dim() != 3:
        raise ValueError("rows are a matrix, experts a stack of matrices, offsets one number for each")
    offs = rest[0] if rest else options.get("offs")
    if isinstance(offs, torch.Tensor) and _has_values(offs):
        edges = [0, *offs.tolist()]
        if edges != sorted(edges) or edges[-1] != rows.shape[0]:
            raise ValueError("the rows of experts do not make up all rows")
    out: torch.Tensor = torch.ops.aten._grouped_mm.default(rows, experts, *rest, **options)
    return out


def _ctc(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The kernel reads as many labels as the lengths say, and follows each without a look at it."""

    def ctc_loss(
        scores: torch.Tensor, targets: torch.Tensor, steps: Any, lengths: Any, *rest: Any, **options: Any
    ) -> Any:
        if all(_has_values(t) for t in (targets, steps, lengths) if isinstance(t, torch.Tensor)):
            counts = _listed(lengths)
            if min((*counts, *_listed(steps)), default=0) < 0:
                raise ValueError("a length is negative")
            if targets.dim() == 1:
                rows = [targets[: sum(counts)]]
                if sum(counts) != targets.shape[0]:
                    raise ValueError("the lengths make up another number of labels than there are")
            else:
                rows = [row[:count] for row, count in zip(targets, counts)]
            labels = torch.cat([row.reshape(-1) for row in rows]) if rows else targets.reshape(-1)
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < scores.shape[-1]:
                raise ValueError("a label is none of the classes")
        return call(scores, targets, steps, lengths, *rest, **options)

    return ctc_loss


def _truncated(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The lowest integer by -1 has no quotient: the processor ends the process."""

    def divide(dividend: torch.Tensor, divisor: Any, **options: Any) -> torch.Tensor:
        counts = not dividend.is_floating_point() and not dividend.is_complex() and dividend.dtype != torch.bool
        if counts and options.get("rounding_mode") == "trunc" and _has_values(dividend):
            lowest = dividend == torch.iinfo(dividend.dtype).min
            if bool((lowest & (torch.as_tensor(divisor) == -1)).any()):
                raise ValueError("the lowest integer cannot be divided by -1")
        return call(dividend, divisor, **options)

    return divide


class _Asserted(torch.autograd.Function):
    """The token, with its gradient; ValueError where `holds` is False. torch's own has no gradient, and ends a GPU's process."""

    @staticmethod
    def forward(ctx: Any, holds: torch.Tensor, words: str, token: torch.Tensor) -> Any:
        if not _has_values(holds):
            return _ASSERT(holds, words, token)
        if not bool(holds):
            raise ValueError(FAILED_ASSERT)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *grads)


def _asserted(holds: torch.Tensor, words: str, token: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Asserted.apply(holds, words, token)  # type: ignore[no-untyped-call]
    return made


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """As torch's, which takes no mask beside `is_causal`. Such a call is one of transformers.

    A mask that masks nothing, or no more than what is later, is left out; before any other, grouped keys and values are repeated.
    Both come as they were before autocast rounded them.
    """
    if attn_mask is None or not is_causal:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask.dtype != torch.bool or attn_mask.dim() != 4 or not key.dim() == value.dim() == query.dim() == 4:
        raise ValueError("a mask that may be left out has numbers, or no four dimensions")
    if _has_values(attn_mask):
        all_set = bool(attn_mask.all())
        if all_set or _hides_what_is_later(attn_mask):
            options["enable_gqa"] = query.shape[1] != key.shape[1]
            key, value = key.to(query.dtype), value.to(query.dtype)
            return _ATTENTION(query, key, value, None, dropout_p, not all_set, **options)
    times = query.shape[1] // max(1, key.shape[1])
    key, value = (
        each[:, :, None].expand(-1, -1, times, -1, -1).reshape(each.shape[0], -1, *each.shape[2:]).to(query.dtype)
        for each in (key, value)
    )
    return _ATTENTION(query, key, value, attn_mask, dropout_p, False, scale=options.get("scale"))


def _hides_what_is_later(mask: torch.Tensor) -> bool:
    """Of each word, and nothing else."""
    *_, rows, length = mask.shape
    if rows != length or not bool(mask[..., -1, :].all()):  # the last word sees all, or there is padding
        return False
    return bool((mask == torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()).all())


_ATTENTION: Callable[..., torch.Tensor] = torch.ops.aten.scaled_dot_product_attention.default
_ASSERT: Any = torch.ops.aten._functional_assert_async.msg


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _listed(lengths: torch.Tensor | Sequence[int]) -> list[int]:
    return [int(n) for n in (lengths.reshape(-1).tolist() if isinstance(lengths, torch.Tensor) else lengths)]


def _guards() -> dict[str, Callable[..., Any]]:
    aten = torch.ops.aten
    found: dict[str, Callable[..., Any]] = {
        "aten._grouped_mm.default": _grouped_mm,
        ASSERT: _asserted,
        ATTENTION: _attention,
    }
    for name in ("IntList", "Tensor"):
        found[f"aten.ctc_loss.{name}"] = _ctc(getattr(aten.ctc_loss, name))
    for packet in (aten.div, aten.div_, aten.divide, aten.divide_):
        for name in ("Tensor_mode", "Scalar_mode"):
            found[f"{packet}.{name}"] = _truncated(getattr(packet, name))
    return found


GUARDED = _guards()
