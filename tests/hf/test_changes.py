"""What a script changes between Trainer(...) and train() counts as in the library, or is refused by its name."""

from __future__ import annotations

import copy
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcee
from meshcee.errors import UsageError
from meshcee.hf import Trainer
from meshcee.sampling import draw
from tests.hf.tiny import arguments, llama, texts

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

KEYS = ("input_ids", "attention_mask", "labels")
ROWS = [{key: text[key] for key in KEYS} for text in texts(20)]
STEADY = {"lr_scheduler_type": "constant", "save_strategy": "no", "optim": "adamw_torch", "report_to": "none"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))


class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
    """The library's own, with the samples of each step as meshcee draws them."""

    def _get_train_sampler(self, *_: Any) -> Any:
        args, count = self.args, len(self.train_dataset)
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return [i for step in range(args.max_steps) for i in draw(args.seed, count, size, step)]


def losses_of(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def rate(trainer: Any) -> None:
    trainer.args.learning_rate = 0.1


def decay(trainer: Any) -> None:
    trainer.args.weight_decay = 0.9


def data(trainer: Any) -> None:
    trainer.train_dataset = ROWS[::-1]


def collator(trainer: Any) -> None:
    def blind(rows: list[Any]) -> Any:
        found = transformers.default_data_collator(rows)
        return {**found, "labels": found["labels"].where(found["labels"] > 20, -100)}

    trainer.data_collator = blind


def loss_function(trainer: Any) -> None:
    trainer.model.loss_function = lambda logits, labels, **_: logits.float().pow(2).mean()


def frozen(trainer: Any) -> None:
    trainer.model.model.embed_tokens.requires_grad_(False)


def forward(trainer: Any) -> None:
    """As Liger and others patch one object."""
    usual = type(trainer.model).forward

    def twice(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        output = usual(self, input_ids=input_ids, attention_mask=attention_mask, labels=labels, **more)
        output.loss = output.loss * 2
        return output

    trainer.model.forward = types.MethodType(twice, trainer.model)


CHANGES = [rate, decay, data, collator, loss_function, frozen, forward]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_before_train_counts_as_in_the_library(change: Any, tmp_path: Path) -> None:
    """With one micro-batch a step: two of these losses have no part in the number of tokens."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    args = arguments(tmp_path, **STEADY, **sizes)
    theirs = InOrder(llama(), copy.copy(args), train_dataset=ROWS)
    change(theirs)
    theirs.train()
    ours = Trainer(llama(), args, train_dataset=ROWS)
    assert ours.job is not None
    before = meshcee.plain(ours.job)
    change(ours)
    found = meshcee.plain(ours.job)
    torch.testing.assert_close(found.losses, losses_of(theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.state_dict, theirs.model.state_dict(), rtol=1e-4, atol=1e-5)
    assert not all(torch.equal(tensor, before.state_dict[name]) for name, tensor in found.state_dict.items())


@pytest.mark.slow
def test_a_run_has_what_was_changed(tmp_path: Path) -> None:
    """Another model too; and callbacks get that one."""
    found = []

    class Sees(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            found.append(model)

    trainer = Trainer(llama(1), arguments(tmp_path, **STEADY), train_dataset=ROWS, callbacks=[Sees()], local=1)
    trainer.model = model = llama(2)
    rate(trainer)
    forward(trainer)
    assert trainer.job is trainer.job
    assert trainer.job is not None
    expected = meshcee.plain(trainer.job)
    trainer.train()
    assert losses_of(trainer) == expected.losses
    assert found == [model]
    assert all(torch.equal(tensor, expected.state_dict[name]) for name, tensor in model.state_dict().items())


def test_a_job_that_was_set_stays_and_what_changes_after_it_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=ROWS)
    assert trainer.job is not None
    trainer.job = replace(trainer.job, codec="lossless")
    trainer.model.eval()
    assert trainer.job.codec == "lossless"
    rate(trainer)
    data(trainer)
    words = r"args\.learning_rate, train_dataset changed after trainer\.job was set"
    with pytest.raises(UsageError, match=words):
        trainer.train()
    with pytest.raises(UsageError, match="Job"):
        trainer.job = 3  # type: ignore[assignment]


def test_what_becomes_wrong_is_refused_before_train(tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=ROWS)
    trainer.args.label_smoothing_factor = 0.1
    with pytest.raises(UsageError, match=r"label_smoothing_factor=0\.1"):
        trainer.train()
    other = Trainer(llama(), arguments(tmp_path), train_dataset=ROWS)
    other.model = copy.deepcopy(other.model).to("meta")
    with pytest.raises(UsageError, match="the model is on meta"):
        other.train()
    other.model = "gpt2"
    with pytest.raises(UsageError, match="model is an nn"):
        other.train()


# What the library's Trainer heeds and ours does not: (name, value, what to write).
UNHEARD: list[tuple[str, Any, str]] = [
    ("compute_loss", lambda *_, **__: 0, r"called: compute the loss in the model's own forward"),
    ("compute_loss_func", lambda *_: 0, r"called: compute the loss in the model's own forward"),
    ("label_smoother", object(), r"read: compute the loss in the model's own forward"),
    ("optimizer", object(), r"read: write TrainingArguments\(optim="),
    ("lr_scheduler", object(), r"read: write TrainingArguments\(lr_scheduler_type="),
    ("create_optimizer", lambda *_: 0, r"called: write TrainingArguments\(optim="),
    ("create_scheduler", lambda *_: 0, r"called: write TrainingArguments\(lr_scheduler_type="),
    ("log", lambda *_: 0, r"called: write a TrainerCallback with on_log"),
    ("_get_train_sampler", lambda *_: 0, r"called: write data_collator=, and train_dataset="),
    ("get_train_dataloader", lambda *_: 0, r"called: write data_collator=, and train_dataset="),
    ("model_accepts_loss_kwargs", False, "read: set accepts_loss_kwargs of the model"),
    ("loss_is_scaled_for_ga", False, "read: set accepts_loss_kwargs of the model"),
    ("training_step", lambda *_: 0, "called: put the loss into the model's own forward"),
    ("place_model_on_device", True, "read: leave it out"),
]


@pytest.mark.parametrize(("name", "value", "do"), UNHEARD, ids=[name for name, _, _ in UNHEARD])
def test_what_nobody_would_heed_is_refused_wherever_it_is_set(
    name: str, value: Any, do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the trainer, in a subclass, behind its __init__, and on the class that is imported."""
    args = arguments(tmp_path)
    place = rf" at \S+{Path(__file__).name}:\d+" if callable(value) else ""
    trainer = Trainer(llama(), args, train_dataset=ROWS)
    with pytest.raises(UsageError, match=rf"Trainer\.{name}{place} would never be {do}"):
        setattr(trainer, name, value)
    with pytest.raises(UsageError, match=rf"has no {name}: ") if name[0] != "_" else pytest.raises(AttributeError):
        getattr(trainer, name)
    vars(trainer)[name] = value
    with pytest.raises(UsageError, match=rf"Trainer\.{name}{place} would never be {do}"):
        trainer.train()
    with pytest.raises(UsageError, match=rf"Mine\.{name}{place} would never be {do}"):
        type("Mine", (Trainer,), {name: value})(llama(), args)
    other = Trainer(llama(), args, train_dataset=ROWS)
    monkeypatch.setattr(Trainer, name, value, raising=False)
    with pytest.raises(UsageError, match=rf"Trainer\.{name}{place} would never be {do}"):
        other.train()


def test_what_a_script_has_of_its_own_is_left_alone(tmp_path: Path) -> None:
    class Mine(Trainer):
        epochs_seen = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            self.early = 1
            super().__init__(*args, **options)
            self.late = 2

        def __repr__(self) -> str:
            return "mine"

        def predict(self, *args: Any, **options: Any) -> Any:
            return super().predict(*args, **options)

        def report(self) -> int:
            return self.early + self.late

    trainer = Mine(llama(), arguments(tmp_path), train_dataset=ROWS, optimizers=(None, None))
    trainer.note = "kept"
    assert (trainer.job is not None, trainer.report(), repr(trainer)) == (True, 3, "mine")


@pytest.mark.parametrize(("name", "strategy"), [("evaluate", "eval_strategy"), ("save_model", "save_strategy")])
def test_what_the_librarys_train_calls_of_a_subclass_is_refused_where_ours_does_not(
    name: str, strategy: str, tmp_path: Path
) -> None:
    kind = type("Mine", (Trainer,), {name: lambda *_, **__: None})
    quiet = {"eval_strategy": "no", "save_strategy": "no"}
    more = {"train_dataset": ROWS, "eval_dataset": ROWS}
    words = rf"{name} at \S+{Path(__file__).name}:\d+ would never be called by train\(\): give it another name .*{strategy}='no'"
    with pytest.raises(UsageError, match=rf"Mine\.{words}"):
        kind(llama(), arguments(tmp_path, **quiet | {strategy: "epoch"}), **more)
    kind(llama(), arguments(tmp_path, **quiet), **more)
    trainer = Trainer(llama(), arguments(tmp_path, **quiet | {strategy: "epoch"}), **more)
    with pytest.raises(UsageError, match=words):
        setattr(trainer, name, lambda *_, **__: None)
