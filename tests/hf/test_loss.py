"""A step's loss is the library's: the sum over all tokens that count, divided by how many there are in the accumulated batch."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
from meshcee.errors import UsageError
from meshcee.hf import Trainer
from meshcee.hf.loss import Counting, counted, divides
from meshcee.sampling import draw
from tests.hf.tiny import arguments, llama, ragged, texts, tokenizer_of_words

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Plain(nn.Module):
    """Takes any keyword; its loss has a divided and an undivided share, as asked."""

    def __init__(self, divided: float, undivided: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._shares = divided, undivided

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> Any:
        loss = (self.weight * x - labels).square().sum()
        divided, undivided = self._shares
        return {"loss": loss * divided / (1 if num_items_in_batch is None else num_items_in_batch) + loss * undivided}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"x": [float(i), 1.0], "labels": [1.0, float(i % 3)]} for i in range(count)]


def sample(text: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As a micro-batch of one."""
    return {name: torch.tensor([text[name]]) for name in ("input_ids", "attention_mask", "labels")}


def test_a_causal_model_predicts_no_first_token() -> None:
    labels = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])
    assert Counting(llama()).items({"labels": labels}) == 2
    assert Counting(llama()).items_of_each({"labels": labels}).tolist() == [2, 0]
    assert Counting(Plain(1.0, 0.0)).items({"labels": labels}) == 4
    assert Counting(Plain(1.0, 0.0)).items_of_each({"labels": torch.tensor([2, -100])}).tolist() == [1, 0]
    shifted = torch.tensor([[6, -100, 7, -100]])
    assert Counting(llama()).items({"labels": labels, "shift_labels": shifted}) == 2


def test_a_counted_model_has_the_mean_of_its_tokens_and_in_training_no_nan_of_none() -> None:
    """In an evaluation it has, as in the library, which leaves it out there."""
    model = llama()
    other = counted(model, Counting(model))
    assert type(other).__name__ == "LlamaForCausalLM"
    assert isinstance(other, type(model))
    assert other.lm_head.weight is model.lm_head.weight
    some, none = texts(4)[0], texts(4)[3]
    torch.testing.assert_close(other(**sample(some)).loss, model(**sample(some)).loss)
    assert other(**sample(none)).loss == 0
    assert model(**sample(none)).loss.isnan()
    assert other.eval()(**sample(none)).loss.isnan()


def test_what_a_model_does_with_the_number_is_found_out() -> None:
    assert divides(llama(), [sample(texts(4)[3]), sample(texts(4)[0])])
    samples = [{"x": torch.tensor([[3.0]]), "labels": torch.tensor([[1.0]])}]
    assert divides(Plain(1.0, 0.0), samples)
    assert not divides(Plain(0.0, 1.0), samples)
    for nothing_counts in ([], [{"x": torch.tensor([[3.0]]), "labels": torch.tensor([[-100.0]])}]):
        with pytest.raises(UsageError, match="gradient_accumulation_steps=1"):
            divides(Plain(1.0, 0.5), [*nothing_counts, *samples])


class InTraining(Plain):
    """Adds something in train mode alone, draws a mask, and keeps how often it was called."""

    def __init__(self, adds: float) -> None:
        super().__init__(1.0, 0.0)
        self.adds, self.calls, self.drop = adds, 0, nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> Any:
        self.calls += 1
        self.seen += 1
        output = super().forward(self.drop(x.expand(8, -1)), labels, num_items_in_batch)
        if self.training:
            output["loss"] = output["loss"] + self.adds * self.weight.square().sum()
        return output


def test_what_a_model_adds_in_train_mode_alone_is_found_and_the_look_leaves_nothing_behind() -> None:
    samples = [{"x": torch.tensor([[3.0]]), "labels": torch.tensor([[1.0]])}]
    torch.manual_seed(3)
    for model in (InTraining(0.0).eval(), InTraining(0.5).eval()):
        drawn = torch.get_rng_state()
        if model.adds:
            with pytest.raises(UsageError, match="gradient_accumulation_steps=1"):
                divides(model, samples)
        else:
            assert divides(model, samples)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert (model.calls, model.seen.item(), model.training) == (0, 0.0, True)


def patched(how: str) -> Any:
    """As Liger, Unsloth and accelerate put a forward onto one object."""
    model = llama()
    usual = type(model).forward if how == "method" else model.forward

    def forward(*args: Any, input_ids: Any, attention_mask: Any, labels: Any = None, **more: Any) -> Any:
        output = usual(*args, input_ids=input_ids, attention_mask=attention_mask, labels=labels, **more)
        output.loss = output.loss * 3
        return output

    model.forward = types.MethodType(forward, model) if how == "method" else forward
    return model


@pytest.mark.parametrize("how", ["method", "closure"])
def test_a_forward_that_is_put_onto_one_object_is_given_the_number_of_tokens(how: str, tmp_path: Path) -> None:
    """Its job equals the library's Trainer."""
    keys = ("input_ids", "attention_mask", "labels")
    data = [{key: text[key] for key in keys} for text in texts(20)]
    args = arguments(tmp_path, lr_scheduler_type="constant", save_strategy="no", optim="adamw_torch")
    trainer = Trainer(patched(how), args, train_dataset=data)
    assert trainer.job is not None
    found = meshcee.plain(trainer.job)
    losses, state = theirs(patched(how), args, data)
    torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state_dict, state, rtol=1e-4, atol=1e-6)


def stacked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([sample(row)[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels")}


def by_hand(
    model: Any, args: Any, data: list[dict[str, Any]], steps: int, collate: Any = stacked
) -> tuple[list[float], dict[str, Any]]:
    """Accumulation in plain torch: each sum of token losses over the tokens of the whole batch."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    micro, count = args.per_device_train_batch_size, args.gradient_accumulation_steps
    losses = []
    for step in range(steps):
        batch = [data[i] for i in draw(args.seed, len(data), micro * count, step)]
        items = sum(label != -100 for row in batch for label in row["labels"][1:])
        total = 0.0
        for start in range(0, len(batch), micro):
            inputs = dict(collate(batch[start : start + micro]))
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / items
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def test_a_job_equals_token_weighting_by_hand(tmp_path: Path) -> None:
    model, data = llama(), texts(20)
    args = arguments(tmp_path, lr_scheduler_type="constant")
    trainer = Trainer(model, args, train_dataset=data)
    assert trainer.job is not None
    expected = by_hand(copy.deepcopy(model), args, data, 4)
    found = meshcee.plain(trainer.job)
    torch.testing.assert_close(found.losses, expected[0])
    torch.testing.assert_close(found.state_dict, expected[1], rtol=1e-4, atol=1e-6)


def test_texts_padded_to_each_micro_batch_weigh_as_many_tokens_as_they_have(tmp_path: Path) -> None:
    """By hand, and as the library's Trainer has it."""
    model, args = llama(), arguments(tmp_path, lr_scheduler_type="constant", save_strategy="no", optim="adamw_torch")
    keys = ("input_ids", "attention_mask", "labels")
    data = [{key: text[key] for key in keys} for text in ragged(20)]
    pad = transformers.DataCollatorForSeq2Seq(tokenizer_of_words())
    trainer = Trainer(copy.deepcopy(model), args, train_dataset=data, data_collator=pad)
    assert trainer.job is not None
    found = meshcee.plain(trainer.job)
    for losses, state in (
        by_hand(copy.deepcopy(model), args, data, 4, lambda rows: pad([dict(row) for row in rows])),
        theirs(copy.deepcopy(model), args, data, data_collator=pad),
    ):
        torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.state_dict, state, rtol=1e-4, atol=1e-6)


def theirs(model: Any, args: Any, data: list[Any], **more: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The library's own Trainer over the same samples in the same order."""
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    order = [i for step in range(args.max_steps) for i in draw(args.seed, len(data), batch_size, step)]
    args = copy.copy(args)
    args.train_sampling_strategy = "sequential"
    trainer = transformers.Trainer(model, args, train_dataset=[data[i] for i in order], **more)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], model.state_dict()


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 1}, {"max_grad_norm": 0.0}], ids=str)
def test_a_job_equals_the_librarys_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    model, data = llama(), texts(20)
    usual = {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    args = arguments(tmp_path, save_strategy="no", **usual, **options)
    trainer = Trainer(copy.deepcopy(model), args, train_dataset=data)
    assert trainer.job is not None
    found = meshcee.plain(trainer.job)
    losses, state = theirs(model, args, data)
    torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state_dict, state, rtol=1e-4, atol=1e-6)


def test_a_bert_equals_the_librarys_trainer(tmp_path: Path) -> None:
    """Its forward takes any keyword and divides by none of them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=48, num_labels=3, **sizes, **still)
    )
    data = [{"input_ids": text["input_ids"], "label": i % 3} for i, text in enumerate(texts(20))]
    args = arguments(tmp_path, save_strategy="no", optim="adamw_torch", weight_decay=0.1)
    trainer = Trainer(copy.deepcopy(model), args, train_dataset=data)
    assert trainer.job is not None
    found = meshcee.plain(trainer.job)
    losses, state = theirs(model, args, data)
    torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state_dict, state, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_where_no_micro_batches_are_added_up_all_bits_are_the_librarys(bf16: bool, tmp_path: Path) -> None:
    """With its default optimizer, whose kernel is fused, and with its autocast."""
    model, data = llama(), texts(20)
    args = arguments(
        tmp_path, save_strategy="no", gradient_accumulation_steps=1, weight_decay=0.1, bf16=bf16, use_cpu=True
    )
    assert args.optim == "adamw_torch_fused"
    trainer = Trainer(copy.deepcopy(model), args, train_dataset=data)
    assert trainer.job is not None
    found = meshcee.plain(trainer.job)
    losses, state = theirs(model, args, data)
    assert found.losses == losses
    assert all(torch.equal(state[name], tensor) for name, tensor in found.state_dict.items())


@pytest.mark.parametrize("share", ["divided", "undivided"])
def test_whatever_a_model_does_with_the_number_its_job_equals_the_librarys_trainer(share: str, tmp_path: Path) -> None:
    """A loss that is not divided is added up, as the library adds it up."""
    model, data = Plain(float(share == "divided"), float(share == "undivided")), rows(20)
    args = arguments(tmp_path, optim="sgd", learning_rate=1e-4, max_grad_norm=0.0, save_strategy="no")
    trainer = Trainer(copy.deepcopy(model), args, train_dataset=data)
    assert trainer.job is not None
    found = meshcee.plain(trainer.job)
    losses, state = theirs(model, args, data)
    torch.testing.assert_close(found.losses, losses)
    torch.testing.assert_close(found.state_dict, state)
