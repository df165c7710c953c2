"""A whole script: trained on peers in this process, equal to the plain loop, evaluated, resumed, saved and loaded again."""

from __future__ import annotations

import copy
import itertools
import json
from asyncio import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

import meshcee
from meshcee.callbacks import Control
from meshcee.eager import plain_steps
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.files.home import Home
from meshcee.hf import Trainer
from meshcee.hf.events import NOTES
from tests.hf.tiny import WORDS, arguments, llama, ragged, texts, tokenizer_of_words

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))


def classifier() -> Any:
    """The same weights every time; with dropout."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=12, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def reviews(count: int) -> list[dict[str, Any]]:
    return [{**{k: v for k, v in text.items() if k != "labels"}, "label": i % 3} for i, text in enumerate(texts(count))]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(model: Any, data: list[dict[str, Any]], micro: int) -> tuple[float, np.ndarray[Any, Any]]:
    """The library's evaluation: each batch's mean, averaged by samples."""
    model.eval()
    total, logits = 0.0, []
    for start in range(0, len(data), micro):
        rows = transformers.default_data_collator(data[start : start + micro])
        rows.pop("note", None)
        with torch.no_grad():
            output = model(**rows)
        total += output.loss.item() * len(rows["labels"])
        logits.append(output.logits.numpy())
    model.train()
    return total / len(data), np.concatenate(logits)


class Asks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """For an evaluation of weights that are not here."""

    trainer: Trainer

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.trainer.evaluate()


class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """After so many steps."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._after


def test_a_causal_model_trains_as_the_plain_loop_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """With tokens that do not count, padded to each micro-batch, in a Llama under LoRA: stopped and resumed by another Trainer."""
    peft = pytest.importorskip("peft", reason="the hf extra is not installed")

    def script(*callbacks: Any) -> Trainer:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = peft.get_peft_model(llama(), config)
        args = arguments(tmp_path, weight_decay=0.1)
        pad = transformers.DataCollatorForSeq2Seq(tokenizer_of_words())
        return Trainer(model, args, pad, train_dataset=ragged(20), callbacks=[*callbacks], local=2)

    first = script(Stops(2))
    assert first.job is not None
    plain = meshcee.plain(first.job)
    first.train()
    assert first.state.global_step == 2
    assert not equal(first.model.state_dict(), plain.state_dict)

    second = script()
    done = second.train(resume_from_checkpoint=True)
    assert done.global_step == 4
    assert equal(second.model.state_dict(), plain.state_dict)
    assert [line["loss"] for line in second.state.log_history if "loss" in line] == plain.losses
    assert [line["step"] for line in second.state.log_history] == [1, 2, 3, 4, 4]
    assert len(Home().runs()) == 1

    second.save_model(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").state_dict()
    assert equal(loaded, second.model.state_dict())


@pytest.mark.slow
def test_what_a_callback_of_the_library_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=4)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer = Trainer(
        classifier(), args, train_dataset=reviews(8), eval_dataset=reviews(4), callbacks=[stopping], local=1
    )
    words = r"(?s)on_train_begin of a TrainerCallback failed at .*requires metric_for_best_model"
    with pytest.raises(UsageError, match=words):
        trainer.train()


@pytest.mark.slow
def test_a_classifier_is_measured_on_the_whole_set_and_its_best_state_comes_back(tmp_path: Path) -> None:
    every: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.1}
    args = arguments(tmp_path, **every, load_best_model_at_end=True, metric_for_best_model="loss")
    data, held_out = reviews(16), reviews(5)
    trainer = Trainer(
        classifier(),
        args,
        train_dataset=data,
        eval_dataset=held_out,
        compute_metrics=accuracy,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=4)],
        local=2,
    )
    assert trainer.job is not None
    start = copy.deepcopy(trainer.model)
    states = {}
    for done in plain_steps(trainer.job):
        states[done.step + 1] = {name: tensor.clone() for name, tensor in done.state_dict.items()}
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        start.load_state_dict(states[line["step"]])
        loss, logits = by_hand(start, held_out, 2)
        assert line["eval_loss"] == pytest.approx(loss, rel=1e-6)
        assert line["eval_accuracy"] == np.mean(logits.argmax(-1) == [row["label"] for row in held_out])
    best = min(lines, key=lambda line: line["eval_loss"])
    assert trainer.state.best_global_step == best["step"]
    assert equal(trainer.model.state_dict(), states[best["step"]])

    # Afterwards, over other data: without training, and without labels.
    loss, logits = by_hand(trainer.model, data, 2)
    metrics = trainer.evaluate(data, metric_key_prefix="all")
    assert metrics["all_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["all_accuracy"] == np.mean(logits.argmax(-1) == [row["label"] for row in data])
    blind = [{name: value for name, value in row.items() if name != "label"} for row in data]
    predicted = trainer.predict(blind)
    np.testing.assert_allclose(predicted.predictions, logits, rtol=1e-5, atol=1e-6)
    assert predicted.label_ids is None
    assert not [name for name in predicted.metrics if name in ("test_loss", "test_accuracy")]
    with pytest.raises(UsageError, match="the dataset is empty"):
        trainer.predict([])

    trainer.save_model()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(args.output_dir)
    assert equal(loaded.state_dict(), trainer.model.state_dict())


@pytest.mark.slow
def test_where_the_best_state_is_not_on_the_disk_the_model_has_the_last_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or members without room for a copy: train() failed after its last step, and the model had no weights."""
    figures = itertools.count(0, -1)
    every: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    trainer = Trainer(
        classifier(),
        arguments(
            tmp_path,
            **every,
            load_best_model_at_end=True,
            metric_for_best_model="falls",
            greater_is_better=True,
            max_steps=10,
        ),
        train_dataset=reviews(
            40
        ),  # of ten steps a slow disk takes some states and not others: two later ones in the end
        eval_dataset=reviews(4),
        compute_metrics=lambda prediction: {"falls": next(figures)},
        local=1,
    )
    assert trainer.job is not None
    expected = meshcee.plain(trainer.job)
    monkeypatch.setattr(Control, "spares", lambda self, on_disk: None)
    with capture_logs() as logged:
        trainer.train()
    assert trainer.state.best_global_step == 1
    assert [line["best"].partition("@")[2] for line in logged if line["event"] == Event.NO_BEST] == ["1"]
    assert equal(trainer.model.state_dict(), expected.state_dict)
    assert trainer.state.best_model_checkpoint is None
    trainer.save_model()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_looks_at_evaluations_trains_as_a_plain_loop_with_its_rates(kind: str, tmp_path: Path) -> None:
    """By a figure of compute_metrics; stopped and resumed by another Trainer. Each evaluation halves the rate, or doubles it."""
    options = {"patience": 0, "factor": 0.5} | ({"threshold": -9.0, "mode": "max"} if kind == "greedy" else {})
    args = arguments(
        tmp_path,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=options,
        learning_rate=2.0**-7,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="always",
    )
    figures = {"compute_metrics": lambda prediction: {"always": 1.0}}

    def script(*callbacks: Any) -> Trainer:
        data, held_out = reviews(16), reviews(4)
        return Trainer(
            classifier(), args, train_dataset=data, eval_dataset=held_out, callbacks=[*callbacks], local=1, **figures
        )

    script(Stops(2)).train()
    second = script()
    assert second.job is not None
    # The last is of a step that nobody computes.
    times = [1.0, 2.0, 4.0, 8.0, 0.0] if kind == "greedy" else [1.0, 1.0, 0.5, 0.25, 0.0]
    rates = meshcee.Schedule("LambdaLR", lr_lambda=times.__getitem__)
    plain = meshcee.plain(replace(second.job, schedule=rates, steps=4))
    second.train(resume_from_checkpoint=True)
    lines = [line for line in second.state.log_history if "loss" in line]
    assert [line["learning_rate"] for line in lines] == [2.0**-7 * factor for factor in times[:4]]
    assert [line["loss"] for line in lines] == plain.losses
    assert equal(second.model.state_dict(), plain.state_dict)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("options", "precision", "recompute"),
    [({"bf16": True}, "bf16-mixed", False), ({"gradient_checkpointing": True}, "fp32", True)],
)
def test_bf16_and_checkpointed_activations_are_those_of_the_plain_loop(
    options: dict[str, Any], precision: str, recompute: bool, tmp_path: Path
) -> None:
    trainer = Trainer(llama(layers=1), arguments(tmp_path, max_steps=2, **options), train_dataset=texts(8), local=2)
    job = trainer.job
    assert job is not None
    assert (job.precision, job.recompute) == (precision, recompute)
    plain, full = meshcee.plain(job), meshcee.plain(replace(job, precision="fp32", recompute=False))
    trainer.train()
    assert [line["loss"] for line in trainer.state.log_history if "loss" in line] == plain.losses
    assert equal(trainer.model.state_dict(), plain.state_dict)
    assert equal(plain.state_dict, full.state_dict) == (precision == "fp32")


def test_the_model_knows_the_special_tokens_of_the_processing_class_before_it_is_captured(tmp_path: Path) -> None:
    words = tokenizer_of_words()
    found = []
    for processing_class in (words, None):
        model = llama()
        Trainer(model, arguments(tmp_path), train_dataset=texts(8), processing_class=processing_class)
        found.append((model.config.pad_token_id, model.generation_config.pad_token_id))
    assert found == [(words.pad_token_id, words.pad_token_id), (None, None)]


@pytest.mark.slow
def test_a_run_of_this_output_dir_that_is_unfinished_is_told_of_where_another_begins(tmp_path: Path) -> None:
    """As get_last_checkpoint finds no folder of the library's."""
    trainer = Trainer(llama(1), arguments(tmp_path, max_steps=1), train_dataset=texts(8))
    run, out = Home().new_run("out"), tmp_path / "out"
    out.mkdir()
    (out / NOTES).write_text(json.dumps({"run": run.id, "log_history": []}))
    last = transformers.trainer_utils.get_last_checkpoint(str(out))
    told = []
    for _ in range(2):  # the second time the notes are of a run that has ended
        with capture_logs() as logged:
            trainer.train(resume_from_checkpoint=last)
        told.append([line["run"] for line in logged if line["event"] == Event.UNFINISHED])
    assert told == [[run.id], []]


def token_classifier() -> Any:
    """Its loss is a mean whatever number it is given, and 0 / 0 of no label."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=WORDS, num_labels=WORDS, **sizes))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("make", [llama, token_classifier])
def test_a_micro_batch_without_labels_counts_in_an_evaluation_as_in_the_library(
    make: Any, filters: bool, tmp_path: Path
) -> None:
    """While a run trains and afterwards: it is left out, or with the filter off there is no number."""
    keys = ("input_ids", "attention_mask", "labels")
    held_out = [{key: text[key] for key in keys} for text in texts(5)]
    assert held_out[3]["labels"] == [-100] * 12
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 2}
    rates = {"learning_rate": 0.0, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    args = arguments(tmp_path, logging_nan_inf_filter=filters, **sizes, **rates)
    model = make()
    data = [row for row in held_out if row["labels"] != [-100] * 12]
    theirs = transformers.Trainer(copy.deepcopy(model), args, eval_dataset=held_out).evaluate()["eval_loss"]
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=held_out, local=1)
    trainer.train()
    found = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    found.append(trainer.evaluate()["eval_loss"])
    assert np.isnan(theirs) != filters
    assert found == pytest.approx([theirs] * 2, rel=1e-6, nan_ok=True)


@pytest.mark.slow
def test_an_evaluation_leaves_out_what_the_library_leaves_out(tmp_path: Path) -> None:
    """With dataloader_drop_last, while a run trains, afterwards, and in predictions; and the best step is theirs."""
    rates = {"learning_rate": 0.0, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 1}
    args = arguments(tmp_path, dataloader_drop_last=True, metric_for_best_model="accuracy", **sizes, **rates)
    held_out, model = reviews(10), classifier()
    bare = [{key: value for key, value in row.items() if key != "note"} for row in held_out]
    theirs = transformers.Trainer(
        copy.deepcopy(model), args, train_dataset=bare[:4], eval_dataset=bare, compute_metrics=accuracy
    )
    theirs.train()
    measured, others = theirs.evaluate(), theirs.predict(bare)
    trainer = Trainer(model, args, train_dataset=held_out[:4], eval_dataset=held_out, compute_metrics=accuracy, local=1)
    trainer.train()
    found = [line for line in trainer.state.log_history if "eval_loss" in line]
    for each in (*found, trainer.evaluate()):
        assert each["eval_loss"] == pytest.approx(measured["eval_loss"], rel=1e-6)
        assert each["eval_accuracy"] == measured["eval_accuracy"]
    assert len(found) == 1
    best = theirs.state.best_metric, theirs.state.best_global_step
    assert (trainer.state.best_metric, trainer.state.best_global_step) == best == (best[0], None)
    ours = trainer.predict(held_out)
    assert len(ours.predictions) == len(others.predictions) == 8
    assert ours.predictions == pytest.approx(others.predictions, rel=1e-5)
    assert (ours.label_ids == others.label_ids).all()
    with pytest.raises(UsageError, match="eval_dataset has 3 samples, and dataloader_drop_last=True leaves out"):
        trainer.evaluate(held_out[:3])


class Level:
    """A data_collator that makes samples harder, and notes how hard."""

    def __init__(self) -> None:
        self.level, self.read = 0, list[int]()

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        self.read.append(self.level)
        found = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels")}
        return found | {"input_ids": (found["input_ids"] + self.level) % WORDS}


def harder(event: str, level: Level) -> Any:
    """A callback that sets it at this event."""

    def hear(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        level.level = state.global_step

    return type("Harder", (transformers.TrainerCallback,), {event: hear})()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("event", ["on_epoch_begin", "on_epoch_end"])
def test_what_a_callback_changes_between_epochs_counts_as_in_the_library(event: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="no", remove_unused_columns=False)
    found = []
    for kind, where in ((transformers.Trainer, {}), (Trainer, {"local": 1})):
        level = Level()
        trainer = kind(llama(1), args, level, train_dataset=texts(8), callbacks=[harder(event, level)], **where)
        trainer.train()
        found.append(level.read[-8:])
    assert found[0] == found[1] == [0, 0, 0, 0, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("event", "workers", "why"),
    [
        ("on_step_begin", 0, "a micro-batch ahead of this event.*on_epoch_begin"),
        ("on_step_end", 0, 'a micro-batch ahead of this event.*waits = "steps"'),
        ("on_log", 0, "a micro-batch ahead of this event"),
        ("on_epoch_end", 1, "dataloader_num_workers"),
    ],
)
def test_what_a_callback_changes_within_an_epoch_ends_the_run(
    event: str, workers: int, why: str, tmp_path: Path
) -> None:
    """The library's loop has read the next micro-batch by then, and its numbers would be others."""
    level = Level()
    args = arguments(tmp_path, dataloader_num_workers=workers, remove_unused_columns=False, max_steps=6)
    callbacks = [harder(event, level)]
    trainer = Trainer(llama(1), args, level, train_dataset=texts(16), callbacks=callbacks, local=1)
    with pytest.raises(UsageError, match=rf"^Harder\.{event} changes attribute 'level' of data_collator, .*{why}"):
        trainer.train()


@pytest.mark.slow
def test_a_model_in_eval_mode_is_trained_with_its_dropout(tmp_path: Path) -> None:
    """As the library's train() calls model.train(); scripts leave the mode that generate() or an evaluation wants."""
    peft = pytest.importorskip("peft", reason="the hf extra is not installed")
    found = []
    for sleeps in (False, True):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
        model = peft.get_peft_model(llama(1), config)
        trainer = Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=texts(8), local=1)
        if sleeps:
            trainer.model.eval()
        trainer.train()
        found.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(found[0]) == 2
    assert found[0] == found[1]


class Rates(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """What the library's optimizer has in each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.found.append(optimizer.param_groups[0]["lr"])


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["linear", "polynomial", "inverse_sqrt"])
def test_a_run_that_has_done_its_steps_goes_on_with_more_as_in_the_library(kind: str, tmp_path: Path) -> None:
    """Twice, and stopped within; the rates are those of the library's own trainer, which resumes its own checkpoints."""
    lives = (3, 6, 8)

    def args_of(steps: int) -> Any:
        return arguments(tmp_path, max_steps=steps, lr_scheduler_type=kind, warmup_steps=1, learning_rate=0.5**7)

    rates = Rates()
    for steps in lives:
        bare = [{name: text[name] for name in ("input_ids", "attention_mask", "labels")} for text in texts(8)]
        theirs = transformers.Trainer(llama(1), args_of(steps), train_dataset=bare, callbacks=[rates])
        theirs.train(resume_from_checkpoint=steps > lives[0])
    assert len(rates.found) == lives[-1]

    def script(steps: int, *callbacks: Any) -> Trainer:
        return Trainer(llama(1), args_of(steps), train_dataset=texts(8), callbacks=[*callbacks], local=1)

    last = script(lives[-1])
    assert last.job is not None
    times = [rate * 2.0**7 for rate in (*rates.found, 0.0)]
    plain = meshcee.plain(replace(last.job, schedule=meshcee.Schedule("LambdaLR", lr_lambda=times.__getitem__)))
    script(3).train()
    script(6, Stops(5)).train(resume_from_checkpoint=True)
    if kind != "inverse_sqrt":
        with pytest.raises(UsageError, match=r"has done 5 of 6 steps, and its rates .* go on with max_steps=6"):
            script(8).train(resume_from_checkpoint=True)
    script(6).train(resume_from_checkpoint=True)
    last.train(resume_from_checkpoint=True)
    lines = [line for line in last.state.log_history if "loss" in line]
    assert [line["learning_rate"] for line in lines] == rates.found
    assert [line["loss"] for line in lines] == plain.losses
    assert equal(last.model.state_dict(), plain.state_dict)


@pytest.mark.slow
def test_a_second_train_says_that_its_optimizer_is_fresh(tmp_path: Path) -> None:
    """A max_grad_norm below 0 clips nothing, as in the library; metrics have the epoch."""
    args = arguments(tmp_path, max_steps=1, max_grad_norm=-1.0)
    trainer = Trainer(llama(1), args, train_dataset=texts(8), local=1)
    assert trainer.job is not None
    assert trainer.job.clip_norm is None
    told = []
    for _ in range(2):
        with capture_logs() as logged:
            metrics = trainer.train().metrics
        told.append(Event.FRESH_OPTIMIZER in [line["event"] for line in logged])
        assert metrics["epoch"] == 0.5
    assert told == [False, True]


@pytest.mark.slow
def test_an_error_in_the_middle_says_how_a_script_goes_on(tmp_path: Path) -> None:
    class Clips(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.max_grad_norm = 0.1 * state.global_step

    trainer = Trainer(llama(1), arguments(tmp_path), train_dataset=texts(16), callbacks=[Clips()], local=1)
    with pytest.raises(
        UsageError, match=r"max_grad_norm.*; once it is mended: `train\(resume_from_checkpoint=True\)`$"
    ):
        trainer.train()


# -- what is refused, before anything runs -------------------------------------------------------------------------


def test_what_a_trainer_does_not_take_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not take model_init .*; optimizers \(write"):
        Trainer(args=arguments(tmp_path), model_init=llama, optimizers=(1, 2))
    with pytest.raises(UsageError, match="model is an nn"):
        Trainer("gpt2", arguments(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="exclude each other"):
        Trainer(llama(), arguments(tmp_path), join="LINE", local=2)
    with pytest.raises(UsageError, match="eval_strategy='epoch' needs eval_dataset"):
        Trainer(llama(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=texts(8))
    with pytest.raises(UsageError, match=r"train\(\) needs train_dataset"):
        Trainer(llama(), arguments(tmp_path)).train()
    with pytest.raises(UsageError, match="no run has been noted in output_dir"):
        Trainer(llama(), arguments(tmp_path), train_dataset=texts(8)).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="write True, or RUN"):
        Trainer(llama(), arguments(tmp_path), train_dataset=texts(8)).train("out/checkpoint-500")


def test_a_subclass_that_computes_steps_itself_is_refused(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, *_: Any) -> Any:
            raise AssertionError

    with pytest.raises(UsageError, match=r"Mine\.compute_loss at \S+test_trainer\.py:\d+ would never be called"):
        Mine(llama(), arguments(tmp_path))


def test_what_the_librarys_trainer_has_besides_says_what_to_write(tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path))
    with pytest.raises(UsageError, match=r"has no push_to_hub: write trainer\.model\.push_to_hub"):
        trainer.push_to_hub()
    absent = [name for name in vars(transformers.Trainer) if name[0] != "_" and not hasattr(trainer, name)]
    assert len(absent) > 20
    for name in absent:
        with pytest.raises(UsageError, match=f"has no {name}: "):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="has no attribute 'push_to_hob'"):
        trainer.push_to_hob()


@pytest.mark.parametrize("data", [{"train": texts(8)}, iter(texts(8)), 3], ids=["sets", "iterator", "number"])
def test_what_is_not_one_dataset_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(UsageError, match="train_dataset is one dataset that has a length"):
        Trainer(llama(), arguments(tmp_path), train_dataset=data)


def test_a_model_without_a_loss_is_refused_with_what_to_write(tmp_path: Path) -> None:
    data = [{name: text[name] for name in ("input_ids", "attention_mask")} for text in texts(8)]
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=data)
    with pytest.raises(UsageError, match="returns no loss"):
        trainer.train()


def test_a_model_elsewhere_is_refused_before_it_is_called(tmp_path: Path) -> None:
    """As on a GPU, where inputs on the CPU would meet its weights."""
    model = llama().to("meta")
    with pytest.raises(UsageError, match=r"the model is on meta; give it on the CPU: leave device_map out"):
        Trainer(model, arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=texts(8))


def test_an_evaluation_of_another_length_is_refused_before_the_start(tmp_path: Path) -> None:
    short = [{name: text[name][:5] for name in ("input_ids", "attention_mask", "labels")} for text in texts(4)]
    args = arguments(tmp_path, eval_strategy="epoch")
    with pytest.raises(UsageError, match=r"eval_dataset\[i\] for i in \[0\]: .*pad each to one length"):
        Trainer(llama(), args, train_dataset=texts(8), eval_dataset=short)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_grouped_queries_under_masks_that_mask_nothing_in_some_micro_batches(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    """transformers leaves such a mask out where a micro-batch has no padding, and adds gradients in another order then."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.LlamaConfig(**{**llama(layers=2).config.to_diff_dict(), **heads})
    pad = transformers.DataCollatorForSeq2Seq(tokenizer_of_words())
    args = arguments(tmp_path, **mixed)
    trainer = Trainer(transformers.LlamaForCausalLM(config), args, pad, train_dataset=ragged(20), local=2)
    assert trainer.job is not None
    plain = meshcee.plain(trainer.job)
    trainer.train()
    assert [line["loss"] for line in trainer.state.log_history if "loss" in line] == plain.losses
    assert equal(trainer.model.state_dict(), plain.state_dict)


@pytest.mark.slow
def test_a_callback_cannot_evaluate_what_is_with_the_peers(tmp_path: Path) -> None:
    asks = Asks()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1)
    asks.trainer = Trainer(classifier(), args, train_dataset=reviews(8), eval_dataset=reviews(4), callbacks=[asks])
    with pytest.raises(UsageError, match=r"may set control\.should_evaluate"):
        asks.trainer.train()


@pytest.mark.slow
def test_what_was_not_trained_to_its_end_is_not_saved_as_trained(tmp_path: Path) -> None:
    """A script catches Ctrl-C and saves: the model has the weights from before."""

    class Stops(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            raise KeyboardInterrupt

    trainer = Trainer(llama(), arguments(tmp_path, max_steps=2), train_dataset=texts(16), callbacks=[Stops()])
    trainer.save_model(tmp_path / "before")
    with pytest.raises((KeyboardInterrupt, CancelledError)):
        trainer.train()
    with pytest.raises(UsageError):
        trainer.train(resume_from_checkpoint="no-such-run")  # it ends before it begins, and changes nothing of that
    for call in (trainer.save_model, lambda: trainer.evaluate(texts(4))):
        with pytest.raises(
            UsageError, match=r"where train\(\) ended early.*resume_from_checkpoint=True.*meshcee checkpoint export"
        ):
            call()
    trainer.remove_callback(Stops)
    trainer.train()
    trainer.save_model(tmp_path / "after")


# -- other things that scripts call --------------------------------------------------------------------------------


def test_metrics_and_state_are_written_as_the_librarys_scripts_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=texts(8))
    trainer.log_metrics("train", {"train_loss": 0.5})
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_state()
    assert "train_loss" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"train_results.json", "all_results.json", "trainer_state.json"}


def test_callbacks_come_and_go(tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=texts(8), callbacks=[Stops(1)])
    trainer.remove_callback(Stops)
    trainer.add_callback(Stops(1))
    assert [type(one).__name__ for one in trainer.callback_handler.callbacks].count("Stops") == 1


def test_the_wing_is_asked_for_by_nobody_else() -> None:
    """And importing it imports no transformers."""
    import subprocess
    import sys

    code = "import sys, meshcee.hf; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
