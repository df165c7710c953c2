"""transformers leaves out a mask that masks nothing, and a stage does so, in each micro-batch.

The idea: with grouped keys the two ways add gradients up in another order, so a graph of one of them is wrong for some texts. The
texts here are padded now and then, on either side; so both kinds of micro-batches come, and those of one kind alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture.export import masks
from meshcee.capture.graph import guards
from meshcee.job import Job
from tests.capture.exactness import difference, job_of
from tests.mutation import breaks, changed

LENGTH, WORDS = 6, 20
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 16,
    "vocab_size": WORDS,
}
IDS = {"head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {},
    "GPTNeoX": {"head_dim": 2},
    "Exaone4": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}


class Texts(nn.Module):
    """The logits of a model of transformers, under autocast or not."""

    def __init__(self, kind: str, rounds: bool, **options: Any) -> None:
        super().__init__()
        hf = pytest.importorskip("transformers")
        torch.manual_seed(1)
        config = getattr(hf, f"{kind}Config")(**{**SIZES, **IDS, "num_key_value_heads": 1, **MODELS[kind], **options})
        self.of_texts, self.rounds = getattr(hf, f"{kind}ForCausalLM")(config), rounds

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.rounds):
            out = self.of_texts(input_ids=input_ids, attention_mask=attention_mask)
        return out.logits.float()  # type: ignore[no-any-return]


def next_word(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def job_with(model: nn.Module, padded: Sequence[int] | None, left: bool = False) -> Job:
    """Text i has padded[i % len(padded)] words of padding; no mask at all where `padded` is None."""
    g = torch.Generator().manual_seed(5)
    data: list[Any] = []
    for i in range(24):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=g)
        mask = (torch.arange(LENGTH) < LENGTH - (padded or [0])[i % len(padded or [0])]).long()
        text = {"input_ids": ids, **({} if padded is None else {"attention_mask": mask.flip(0) if left else mask})}
        data.append((text, ids))
    return job_of(model, next_word, data=data)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(24))
def test_masks_that_mask_nothing_now_and_then(seed: int) -> None:
    drawn = random.Random(seed)
    kind, rounds = drawn.choice(sorted(MODELS)), drawn.random() < 0.3
    dropout = {"attention_dropout": drawn.choice([0.0, 0.0, 0.2])}
    padded = drawn.choice([[0], [2], [2, 0, 0, 0], [1, 0], [3, 1, 0, 0, 0], None])
    model = Texts(kind, rounds, **dropout)
    if not rounds and drawn.random() < 0.3:
        model.bfloat16()
    assert difference(job_with(model, padded, left=drawn.random() < 0.5), ["late"], drawn.choice([None, seed])) == ""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("padded", "line", "instead"),
    [
        ([0], "if all_set or _hides_what_is_later(attn_mask):", "if all_set:"),
        ([2], "if all_set or _hides_what_is_later(attn_mask):", "if True:"),
        ([0], "_ATTENTION(query, key, value, None, dropout_p, not all_set, **options)", "key.sum() * value"),
    ],
    ids=["never left out", "always left out", "another sum"],
)
def test_either_way_has_its_own_bits(padded: list[int], line: str, instead: str) -> None:
    job = job_with(Texts("Llama", False), padded)

    def story() -> None:
        assert difference(job, ["late"]) == ""

    story()
    with changed(guards, line, instead):
        assert breaks(story)


def test_grouped_heads_that_the_environment_asks_for_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then transformers gives torch the mask beside them, and nothing is repeated."""
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    job = job_with(Texts("Llama", False), [2])

    def story() -> None:
        assert difference(job, ["late"]) == ""

    story()
    with changed(masks.Asked, "if self._marked else ()", "if self._idle else ()"):
        assert breaks(story)


@pytest.mark.slow
def test_a_mask_that_a_window_needs_anyway_stays() -> None:
    """Exaone4 makes two masks, and its layers here use one: of a sliding window, which stays whatever a text masks."""
    model = Texts("Exaone4", False, layer_types=["sliding_attention"] * 2)
    assert difference(job_with(model, [0]), ["late"]) == ""
