"""Datasets and collators, a sample at a time; outputs in the order of samples, whoever computed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshcee.errors import UsageError
from meshcee.hf import Trainer
from meshcee.hf.loss import Counting
from meshcee.hf.samples import Outputs, Samples
from meshcee.sampling import read
from tests.hf.tiny import LENGTH, WORDS, arguments, llama, texts

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

COLUMNS = {"input_ids", "attention_mask", "labels"}


def samples(data: Any, collate: Any = None, *, stacked: bool = True, **more: Any) -> Samples:
    collate = collate or transformers.default_data_collator
    return Samples(data, collate, COLUMNS, ["labels"], Counting(llama()), name="train_dataset", stacked=stacked, **more)


def test_a_sample_is_what_the_model_takes_and_its_labels() -> None:
    data = texts(4)
    x, y = samples(data)[2]
    assert {name: tensor.tolist() for name, tensor in x.items()} == {name: data[2][name] for name in COLUMNS}
    assert (y["place"], y["items"]) == (2, sum(label != -100 for label in data[2]["labels"][1:]))
    assert y["labels"]["labels"] is x["labels"]


def test_a_collator_that_pads_to_a_length_it_knows_is_applied(tmp_path: Path) -> None:
    def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids = [row["input_ids"] + [0] * (LENGTH - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}

    data = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3, 4]}]
    assert [tuple(samples(data, pad)[i][0]["input_ids"].shape) for i in (0, 1)] == [(LENGTH,)] * 2
    trainer = Trainer(
        llama(),
        arguments(tmp_path, gradient_accumulation_steps=1),
        data_collator=pad,
        train_dataset=data,
    )
    assert trainer.job is not None
    assert trainer.job.data[0][1]["items"] == LENGTH - 1


@pytest.fixture(name="tokenizer")
def _tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", mask_token="w1")


def test_the_librarys_collators_are_applied_to_one_sample(tokenizer: Any) -> None:
    data = [dict(tokenizer("w5 w6 w7")), dict(tokenizer("w8"))]
    pad = transformers.DataCollatorWithPadding(tokenizer, padding="max_length", max_length=4)
    assert [samples(data, pad)[i][0]["input_ids"].tolist() for i in (0, 1)] == [[5, 6, 7, 0], [8, 0, 0, 0]]
    causal = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    x, y = samples([{"input_ids": [3, 4, 0, 0], "attention_mask": [1, 1, 0, 0]}], causal)[0]
    assert x["labels"].tolist() == [3, 4, -100, -100]
    assert y["items"] == 1


def test_a_collator_that_draws_is_the_same_when_a_step_is_computed_again(tokenizer: Any) -> None:
    masked = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    data = samples([{"input_ids": list(range(2, WORDS))}], masked)
    first, again, other = (read(data, [0], seed=0, step=step)[0][0]["labels"] for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dynamic_padding_is_refused_with_what_to_write() -> None:
    data = samples([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}])
    data[0]
    with pytest.raises(
        UsageError, match=r"train_dataset\[1\] has input_ids of \(2,\).*padding='max_length'.*pad_to_multiple_of"
    ):
        data[1]
    lone = samples([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}], stacked=False)
    assert [len(lone[i][0]["input_ids"]) for i in (0, 1)] == [3, 2]


@pytest.mark.parametrize("data", [iter([1]), {"train": [1]}], ids=["iterable", "several"])
def test_what_is_no_dataset_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="train_dataset is one dataset"):
        samples(data)


def test_a_collator_that_gives_no_tensors_is_named() -> None:
    with pytest.raises(UsageError, match=r"data_collator makes of train_dataset\[0\] no tensor 'text'"):
        samples([{"input_ids": [1]}], lambda rows: {"text": "words"})[0]


def test_labels_that_are_missing_are_another_samples() -> None:
    labels = torch.arange(LENGTH)
    x, _ = samples([{"input_ids": [1] * LENGTH}], labels={"labels": labels})[0]
    assert x["labels"] is labels


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
