"""torch's encoder and decoder ask of a mask's values whether it is causal: answered where it is known, else refused in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
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


def logarithm(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.log(torch.tril(torch.ones(x.shape[1], x.shape[1])))


def first_tutorial(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = (torch.triu(torch.ones(x.size(1), x.size(1))) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


def positions(m: Any, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return torch.where(at[None] <= at[:, None], torch.tensor(0.0), torch.tensor(float("-inf")))


def window(m: Any, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[1])
    far = (at[None] > at[:, None]) | (at[None] < at[:, None] - 2)
    return torch.zeros(far.shape).masked_fill(far, float("-inf"))


def drawn(m: Any, x: torch.Tensor) -> torch.Tensor:
    return by_hand(m, x) + torch.rand(LENGTH, LENGTH)


def crossed(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = by_hand(m, x)
    mask[0, 0] = m.words.weight[0, 0].detach()
    return mask


def of_words(m: Any, x: torch.Tensor) -> torch.Tensor:
    return by_hand(m, x) * (x[0, 0] >= 0)


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


NOT_COMPUTED: Changed = (masks, "if slot.proxy.node not in nodes or", "if True or")
ANSWERED: dict[str, tuple[Any, Changed | None]] = {
    "made": ((generated,), NOT_COMPUTED),
    "made, decoder": ((generated, MASK, "decoder"), NOT_COMPUTED),
    "buffer": ((held,), (masks.Masks, "self._real.get(name, mask)", "mask")),
    "attribute": ((plain,), None),  # known in more than one way
    "buffer, not causal": ((held, BAND), (masks, "bool(_DETECT(real, None, len(real)))", "True")),
    "by hand": ((by_hand,), NOT_COMPUTED),
    "logarithm": ((logarithm,), NOT_COMPUTED),
    "the first tutorial": ((first_tutorial,), NOT_COMPUTED),
    "positions": ((positions,), (masks, "type(fixed) is torch.Tensor", "False")),
    "window": ((window,), (masks, "bool(_DETECT(real, None, len(real)))", "True")),
    "opened": ((opened,), (masks, "needed |= {node} if written else set()", "pass")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_a_mask_that_is_known_is_answered_for(name: str) -> None:
    given, mend = ANSWERED[name]

    def story() -> None:
        job = dataclasses.replace(tutorial(*given), micro_batch_size=None)  # a graph for any number of samples
        assert difference(job, ("fused",)) == ""

    story()
    if mend is not None:
        with changed(*mend):
            assert breaks(story)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (of_words, r"at .*test_masks.py.*torch asks whether a mask is causal.*say is_causal=True beside a causal mask"),
        (drawn, "say is_causal=True beside a causal mask and is_causal=False beside another"),
        (crossed, "say is_causal=True beside a causal mask and is_causal=False beside another"),
        (written, "forward changes the mask 'held'.*say is_causal=False beside it"),
    ],
)
def test_another_mask_is_refused_with_what_to_say(mask: Masked, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(tutorial(mask))


@pytest.mark.parametrize(
    ("mask", "said"), [(first_tutorial, None), (window, "say is_causal=True beside a causal mask")]
)
def test_a_mask_of_several_lengths_is_answered_for_if_all_have_one_answer(mask: Masked, said: str | None) -> None:
    def padded(rows: Any) -> Any:
        return tuple(nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True))

    data = [tuple(torch.randint(0, WORDS, (3 + i * 5 % 7,)) for _ in range(2)) for i in range(24)]
    job = job_of(Tutorial(mask, MASK, "encoder"), loss=loss, data=data, collate=padded, steps=8)
    if said is None:
        found = meshcee.check(job, stages=(2,), steps=8)
        assert found.equal, found.differs
    else:
        with pytest.raises(CaptureError, match=said):
            capture(job)
