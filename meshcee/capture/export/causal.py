"""Whether a mask is causal, as torch's encoder and decoder ask of its values.

The idea: nobody knows the values of a mask while a model is traced. But for two kinds of masks one knows the answer all the
same. One kind is a mask that torch's own function has just made. The other kind is a tensor that stands there before the first
step and stays unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes

from meshcee.capture.export.refusals import replaced
from meshcee.errors import CaptureError

__all__ = ["Masks", "causal_masks"]

_DETECT: Any = transformer._detect_is_causal_mask
_GENERATE: Any = transformer._generate_square_subsequent_mask


@contextlib.contextmanager
def causal_masks(model: nn.Module, real: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Around forward: torch's question is answered where that can be. `real` are the model's buffers as they are before."""
    masks = Masks(model, real)
    with (
        replaced(transformer, "_generate_square_subsequent_mask", masks.generate),
        replaced(transformer, "_detect_is_causal_mask", masks.is_causal),
    ):
        yield
    masks.refuse_changed()


class Masks:
    def __init__(self, model: nn.Module, real: Mapping[str, torch.Tensor]) -> None:
        self._model, self._real = model, real
        self._versions = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._asked: set[str] = set()

    def generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = _GENERATE(*args, **kwargs)
        self._made[id(made)] = made, made._version
        return made

    def is_causal(self, mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        """As torch's function."""
        if mask is None or is_causal is not None:
            return bool(_DETECT(mask, is_causal, size))
        size = mask.shape[-2] if size is None else size
        if mask.dim() != 2 or mask.shape[0] != size or mask.shape[1] != size:
            return False
        made = self._made.get(id(mask))
        if made is not None and made[0]._version == made[1]:
            return True
        real = self._real_of(mask)
        if real is None:
            return bool(_DETECT(mask, is_causal, size))
        with unset_fake_temporarily(), _disable_current_modes():
            return bool((real == _GENERATE(len(real), real.device, real.dtype)).all())

    def _real_of(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The tensor whose numbers a mask has; None where nobody knows them yet."""
        for name, buffer in self._model.named_buffers():
            if buffer is mask:
                self._asked.add(name)
                mask = self._real.get(name, mask)
        return mask if type(mask) is torch.Tensor and not isinstance(mask, FakeTensor) else None

    def refuse_changed(self) -> None:
        """Raise CaptureError where forward writes into a mask: another step would have another answer."""
        now = {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}
        for name in self._asked:
            if now[name][0] is not self._versions[name][0] or now[name][1] != self._versions[name][1]:
                raise CaptureError(
                    f"forward changes the mask {name!r}, and torch asks whether it is causal; say is_causal=False beside it"
                )
