"""torch's encoder and decoder ask of a mask's values whether it is causal: answered where it is known, else refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.capture.export import masks
from meshcee.errors import CaptureError
from tests.capture.exactness import difference, job_of
from tests.mutation import Changed, breaks, changed

LENGTH, WORDS = 6, 11
DATA = [(torch.randint(0, WORDS, (LENGTH,)), torch.randint(0, WORDS, (LENGTH,))) for _ in range(24)]
MASK = nn.Transformer.generate_square_subsequent_mask(LENGTH)
BAND = MASK.clone().fill_diagonal_(0.0).triu(2) + MASK.T.tril(-3)  # looks one word ahead, and two back
Masked = Callable[[Any, torch.Tensor], torch.Tensor]


class Tutorial(nn.Module):
    """As in torch's tutorial of transformers."""

    def __init__(self, mask: Masked, held: torch.Tensor, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.mask, self.kind = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), mask, kind
        layer: Any = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
        stack: Any = nn.TransformerEncoder if kind == "encoder" else nn.TransformerDecoder
        self.layers = stack(layer(8, 2, 16, 0.1, batch_first=True), 1)
        self.register_buffer("held", held.clone())
        self.plain = held.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, mask = self.words(x), self.mask(self, x)
        return self.head(self.layers(h, mask) if self.kind == "encoder" else self.layers(h, h, tgt_mask=mask))


def generated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1])


def held(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.held


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.plain


def by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), float("-inf")).triu(1)


def opened(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = generated(m, x)
    mask[0, 1] = 0.0
    return mask


def written(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.held.mul_(1.0)
    return m.held


def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def tutorial(mask: Masked, held: torch.Tensor = MASK, kind: str = "encoder") -> Any:
    return job_of(Tutorial(mask, held, kind), loss=loss, data=DATA)


ANSWERED: dict[str, tuple[Any, Changed]] = {
    "made": ((generated,), (masks.Masks, "made is not None and", "False and")),
    "made, decoder": ((generated, MASK, "decoder"), (masks.Masks, "made is not None and", "False and")),
    "buffer": ((held,), (masks.Masks, "self._real.get(name, mask)", "mask")),
    "attribute": ((plain,), (masks.Masks, "type(mask) is torch.Tensor", "False")),
    "buffer, not causal": ((held, BAND), (masks.Masks, "bool((real ==", "True or bool((real ==")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_a_mask_that_is_known_is_answered_for(name: str) -> None:
    given, mend = ANSWERED[name]

    def story() -> None:
        assert difference(tutorial(*given), ("fused",)) == ""

    story()
    with changed(*mend):
        assert breaks(story)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (by_hand, r"at .*test_masks.py.*torch asks whether a mask is causal.*say is_causal=True beside a causal mask"),
        (opened, "say is_causal=True beside a causal mask and is_causal=False beside another"),
        (written, "forward changes the mask 'held'.*say is_causal=False beside it"),
    ],
)
def test_another_mask_is_refused_with_what_to_say(mask: Masked, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(tutorial(mask))
