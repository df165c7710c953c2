"""Attention masks that mask nothing, which Hugging Face's models leave out, but only where they may look at the values.

The idea: in eager code they ask whether all of a mask is set, and then call the kernel without one; while a graph is made they
do not ask. The kernel computes the same bits either way. But with a mask, keys and values of grouped queries are repeated before
it, and a learned bias of positions in 16 bits is spread over the samples. Their gradients then add up in another order. So where
that was done, the graph is not what the plain loop computes of a micro-batch without padding. Nobody knows whether one will
come, so the job is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from meshcee.errors import CaptureError

__all__ = ["Asked", "asked_for_masks", "refuse_idle"]

_QUESTIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


class Asked:
    """Whether a model of transformers would have looked at a mask and could not, and did under it what adds up otherwise."""

    def __init__(self) -> None:
        self.unanswered = False
        self.adds_otherwise = False
        self._needed: list[torch.Tensor] = []  # masks that stay whatever their values, as those of a sliding window
        self._in_doubt = True  # the mask that attention is called with now

    def question(self, asked: Callable[..., bool]) -> Callable[..., bool]:
        def ask(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
            answer = asked(padding_mask, *args, **kwargs)
            if padding_mask is not None and not answer and asked(None, *args, **kwargs):
                self.unanswered = self._in_doubt = True
            return answer

        return ask

    def make(self, make: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            self._in_doubt = False
            mask = make(*args, **kwargs)
            if mask is not None and not self._in_doubt:
                self._needed.append(mask)
            self._in_doubt = True
            return mask

        return made

    def use(self, use: Callable[..., bool]) -> Callable[..., bool]:
        def used(mask: Any, *args: Any, **kwargs: Any) -> bool:
            self._in_doubt = all(mask is not needed for needed in self._needed)
            return use(mask, *args, **kwargs)

        return used

    def bias(self, spread: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def spread_out(bias: torch.Tensor, mask: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            in_doubt = mask is not None and all(mask is not needed for needed in self._needed)
            self.adds_otherwise |= in_doubt and bias.requires_grad and bias.itemsize < 4
            return spread(bias, mask, *args, **kwargs)

        return spread_out

    def repeat(self, repeat: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def repeated(states: torch.Tensor, times: int) -> torch.Tensor:
            self.adds_otherwise |= times > 1 and self._in_doubt
            return repeat(states, times)

        return repeated


@contextlib.contextmanager
def asked_for_masks() -> Iterator[Asked]:
    noted = Asked()
    masks = sys.modules.get("transformers.masking_utils")
    attention = sys.modules.get("transformers.integrations.sdpa_attention")
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        *((masks, name, noted.question) for name in _QUESTIONS),
        (attention, "use_gqa_in_sdpa", noted.use),
        (attention, "repeat_kv", noted.repeat),
        (attention, "create_position_bias_mask", noted.bias),
    ]
    with contextlib.ExitStack() as put_back:
        for module, name, noting in places:
            if (own := getattr(module, name, None)) is not None:
                setattr(module, name, noting(own))
                put_back.callback(setattr, module, name, own)
        makers = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", {})
        if "sdpa" in makers:
            put_back.callback(makers.__setitem__, "sdpa", makers["sdpa"])
            makers["sdpa"] = noted.make(makers["sdpa"])
        yield noted


def refuse_idle(noted: Asked, inputs: Iterable[str]) -> None:
    """Raise CaptureError if that makes a difference: a micro-batch may come whose mask masks nothing."""
    name = next((name for name in inputs if name.rpartition(".")[2].endswith("attention_mask")), None)
    if name is not None and noted.unanswered and noted.adds_otherwise:
        raise CaptureError(
            f"where {name} masks nothing, transformers leaves it out and rounds otherwise, which a graph cannot decide; load the "
            "model with attn_implementation='eager', or leave the mask out of data[i] if no sample is padded"
        )
