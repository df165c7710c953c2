"""Datasets and collators, a micro-batch at a time; outputs in the order of samples, whoever computed them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshcee.errors import UsageError
from meshcee.hf.loss import Counting
from meshcee.hf.samples import Batches, Outputs, Samples, lengths_of
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.sampling import batch_of, leaving_nothing
from tests.hf.tiny import WORDS, llama, texts, tokenizer_of_words

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

COLUMNS = {"input_ids", "attention_mask", "labels"}


def micro_batch(
    data: Any, indices: list[int], collate: Any = None, step: int = 0, *, model: Any = None, **more: Any
) -> tuple[Any, Any]:
    """As a Job reads it."""
    counting = Counting(model or llama())
    batches = Batches(collate or transformers.default_data_collator, ["labels"], counting, **more)
    return batch_of(Samples(data, COLUMNS, name="train_dataset"), indices, seed=0, step=step, collate=batches)


def test_a_micro_batch_is_what_the_model_takes_and_its_labels() -> None:
    data = texts(5)
    x, y = micro_batch(data, [2, 3, 0])
    assert {name: tensor.tolist() for name, tensor in x.items()} == {
        name: [data[i][name] for i in (2, 3, 0)] for name in COLUMNS
    }
    assert y["place"].tolist() == [2, 3, 0]
    assert y["items"].tolist() == [sum(label != -100 for label in data[i]["labels"][1:]) for i in (2, 3, 0)]
    assert torch.equal(y["labels"]["labels"], x["labels"])


@pytest.fixture(name="tokenizer")
def _tokenizer() -> Any:
    return tokenizer_of_words()


def test_the_librarys_collators_pad_to_the_longest_of_a_micro_batch(tokenizer: Any) -> None:
    words = [dict(tokenizer(text)) for text in ("w5 w6 w7", "w8", "w8 w9")]
    pad = transformers.DataCollatorWithPadding(tokenizer)
    assert micro_batch(words, [0, 1], pad)[0]["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert micro_batch(words, [1, 2], pad)[0]["input_ids"].tolist() == [[8, 0], [8, 9]]
    always = transformers.DataCollatorWithPadding(tokenizer, padding="max_length", max_length=4)
    assert micro_batch(words, [1], always)[0]["input_ids"].tolist() == [[8, 0, 0, 0]]

    asked = [row | {"labels": [-100] * (k == 0) + row["input_ids"][k == 0 :]} for k, row in enumerate(words)]
    x, y = micro_batch(asked, [0, 1], transformers.DataCollatorForSeq2Seq(tokenizer))
    assert x["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert y["items"].tolist() == [2, 0]

    causal = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    x, y = micro_batch(words, [0, 2], causal)
    assert x["labels"].tolist() == [[5, 6, 7], [8, 9, -100]]
    assert y["items"].tolist() == [2, 1]


def test_a_collator_that_draws_is_the_same_when_a_step_is_computed_again(tokenizer: Any) -> None:
    masked = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    data = [{"input_ids": list(range(2, WORDS))}] * 2
    first, again, other = (micro_batch(data, [0, 1], masked, step)[0]["labels"] for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_share_no_memory() -> None:
    """Though a collator returns one tensor under two names: a graph's inputs are told apart by what they lie in."""
    ids = torch.ones(2, 3, dtype=torch.int64)
    x, y = micro_batch([{}, {}], [0, 1], lambda rows: {"input_ids": ids, "labels": ids})
    assert len({t.data_ptr() for t in (*x.values(), *y["labels"].values())}) == 3


@pytest.mark.parametrize(
    "data", [iter([1]), {"train": [1]}, torch.utils.data.DataLoader([1])], ids=["iterable", "several", "batches"]
)
def test_what_is_no_dataset_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"train_dataset is one dataset.* of a DataLoader its \.dataset"):
        Samples(data, COLUMNS, name="train_dataset")


@pytest.mark.parametrize(
    "made", [{"text": ["a", "b"]}, {"input_ids": torch.ones(1, 4)}], ids=["words", "samples joined into one row"]
)
def test_a_collator_that_gives_no_row_for_each_sample_is_named(made: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"data_collator makes of 2 samples no tensor '\w+' with a row for each"):
        micro_batch([{}, {}], [0, 1], lambda rows: made)


def test_texts_that_nobody_has_tokenized_are_told_of() -> None:
    """The model takes none of their columns, so the collator has nothing."""
    with pytest.raises(UsageError, match=r"given samples \[1\], of which the model takes no column \(tokenize them"):
        micro_batch([{"text": "a"}] * 2, [1], lambda rows: {"input_ids": torch.tensor([r["input_ids"] for r in rows])})


def test_a_length_that_the_graph_has_for_good_is_held() -> None:
    data = [{"input_ids": [1] * (3 if i == 3 else 5), "labels": [0]} for i in range(4)]
    same = lengths_of([micro_batch(data, [i])[0] for i in (0, 1)])
    assert same == {("input_ids", 1): 5, ("labels", 1): 1}
    assert lengths_of([micro_batch(data, [i])[0] for i in (0, 3)]) == {("labels", 1): 1}
    micro_batch(data, [0, 1], lengths=same)
    with pytest.raises(UsageError, match=r"samples \[3\] have input_ids of \(1, 3\), .* padding='max_length'"):
        micro_batch(data, [3], lengths=same)


def test_labels_that_are_missing_are_made_up() -> None:
    """Of a class as another sample has them; of tokens as many as there are."""
    blind = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}]
    like = {"input_ids": torch.ones(1, 9), "labels": torch.tensor([2])}
    x, _ = micro_batch(blind, [0, 1], model=torch.nn.Linear(1, 1), like=like)
    assert x["labels"].tolist() == [2, 2]
    x, _ = micro_batch(blind, [0, 1], like={"input_ids": torch.ones(1, 9), "labels": torch.ones(1, 9).long()})
    assert x["labels"].tolist() == [[0, 0, 0]] * 2


def test_outputs_are_in_the_order_of_samples_and_each_counts_once() -> None:
    outputs = Outputs(["past_key_values"])
    for first in (2, 0, 4, 0):  # of pipelines side by side, and once more after a loss
        place = torch.arange(first, min(first + 2, 5))
        logits = place[:, None] * torch.tensor([1.0, -1.0])
        output = {"loss": torch.tensor(0.0), "logits": logits, "past_key_values": torch.zeros(1)}
        outputs(output, {"place": place, "items": place, "labels": {"labels": place}})
    predictions, labels = outputs.collect()
    assert predictions[:, 0].tolist() == labels.tolist() == [0, 1, 2, 3, 4]
    assert outputs.collect() == (None, None)


def test_logits_are_prepared_as_they_come() -> None:
    outputs = Outputs([], preprocess=lambda logits, labels: logits.argmax(-1))
    outputs((torch.tensor(0.0), torch.eye(3)), {"place": torch.arange(3), "labels": {"labels": torch.arange(3)}})
    predictions, labels = outputs.collect()
    np.testing.assert_array_equal(predictions, labels)


class CountingCollator:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"input_ids": torch.tensor([[row["n"], self.calls] for row in rows])}


def test_looks_before_the_first_step_leave_no_traces_in_what_the_user_gave() -> None:
    """The set and the collator lie in objects of ours."""
    collator, rows = CountingCollator(), [{"n": i} for i in range(4)]
    data = Samples(rows, None, name="train_dataset")
    job = Job(
        model=torch.nn.Linear(1, 1),
        loss=torch.nn.functional.mse_loss,
        data=data,
        collate=Batches(collator, ["labels"], Counting(llama())),
        optimizer=Optimizer("SGD", lr=0.1),
        batch_size=2,
        steps=1,
    )
    assert job.collate is not None
    with leaving_nothing(job):
        job.collate([data[0]])
        rows[0]["n"] = 9
    assert collator.calls == 0
    assert rows[0] == {"n": 0}
