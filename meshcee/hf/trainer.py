"""`Trainer` with the signature of transformers' own; what it trains is a Job, on a mesh or on peers inside this process.

The idea: everything is mapped when the Trainer is made, so that what cannot be is refused before anything runs, and again where
it has changed since. What the library's Trainer would heed and this one does not is refused when it is set. `trainer.job` is an
ordinary Job: `meshcee.plain(trainer.job)` is the loop that the run equals, and `dataclasses.replace` changes it.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from torch import nn

from meshcee.callbacks import Callback
from meshcee.errors import CheckpointError, MeshceeError, UsageError
from meshcee.events import Event
from meshcee.files.home import Home
from meshcee.hf import arguments
from meshcee.hf.events import Bridge, StepBridge, handler_of, read_notes, refuse_unheard, steers_steps
from meshcee.hf.library import transformers
from meshcee.hf.loss import Counting, base_of, counted, divides, eval_loss, full_loss_of, loss_of, losses_of, weight_of
from meshcee.hf.samples import LOOKED_AT, Batches, Outputs, Samples, lengths_of
from meshcee.job import Job, check_is_job
from meshcee.reach.code import line_of
from meshcee.run import join as joined
from meshcee.run import run_blocking
from meshcee.run import train as trained
from meshcee.sampling import NO_STEP, Reading, batch_of
from meshcee.user_code import calling, library_of

__all__ = ["Trainer"]

log = structlog.get_logger()


class Trainer:
    """transformers.Trainer on a mesh: `join=LINE`, or `local=N` peers in this process.

    args       a TrainingArguments; what cannot be carried out is one UsageError that names it
    callbacks  TrainerCallbacks, and whatever else `meshcee.train(callbacks=...)` takes
    join, local  as in `meshcee.train`
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        join: str | None = None,
        local: int | None = None,
        **others: Any,
    ) -> None:
        library = transformers()
        others = {
            name: x for name, x in others.items() if x is not None and x != (None, None)
        }  # the library's defaults
        if refused := [f"{name} ({INSTEAD.get(name, 'leave it out')})" for name in others]:
            raise UsageError(f"meshcee.hf.Trainer does not take {'; '.join(sorted(refused))}")
        if join is not None and local is not None:
            raise UsageError("join= and local= exclude each other: leave one out")
        self.args = library.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.model: Any = model
        self.processing_class = processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator = data_collator or _usual_collator(processing_class)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self._where = join, None if join else local or 1
        if join is None and local is None:
            log.warning(Event.ALONE)
        self._made = _Made(None, {})
        self._has_trained = False
        self._prepare()
        assert model is not None
        model.train()
        own = [one for one in callbacks or () if not _is_meshcees(one)]
        self._callbacks = [one for one in callbacks or () if _is_meshcees(one)]
        self.callback_handler = handler_of(self.args, own, model, processing_class)
        self._current_job()
        self.state = library.TrainerState()
        self.control = self.callback_handler.on_init_end(self.args, self.state, library.TrainerControl())

    # -- what stands here ----------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_unheard(self, {name: value})
        super().__setattr__(name, value)
        if name == "model" and "callback_handler" in vars(self):
            self.callback_handler.model = value

    @property
    def job(self) -> Job | None:
        """What train() trains: built from what stands in this Trainer now, or what a user has set. None without a train_dataset."""
        return self._current_job()

    @job.setter
    def job(self, job: Job) -> None:
        check_is_job(job)
        self._made = _Made(job, self._standing(), is_users=True)

    def _current_job(self) -> Job | None:
        self._prepare()
        now, before, is_users = self._standing(), self._made.standing, self._made.is_users
        changed = sorted(name for name in now.keys() | before.keys() if _differs(now, before, name))
        if is_users and changed:
            raise UsageError(
                f"{', '.join(changed)} changed after trainer.job was set, and that job would be trained without it: change it "
                "first, then set trainer.job"
            )
        if changed:
            self._made = _Made(None if self.train_dataset is None else self._built(), now)
        return self._made.job

    def _standing(self) -> dict[str, Any]:
        """All that a job is built from, by the names that a script has for it. Of the model what only a look at it tells."""
        found = {name: vars(self)[name] for name in BUILT_FROM}
        found |= {f"args.{name}": value for name, value in arguments.words_of(self.args).items()}
        for where, module in (("model", self.model), ("the base model", base_of(self.model))):
            found |= {f"{name} of {where}": value for name, value in vars(module).items() if name != "training"}
            found[f"the class of {where}"] = type(module), type(module).forward
        found["requires_grad"] = tuple(name for name, p in self.model.named_parameters() if p.requires_grad)
        with suppress(TypeError):  # what is no dataset is refused later
            found["len(train_dataset)"] = len(self.train_dataset)
        return found

    def _prepare(self) -> None:
        """Refuse what cannot be carried out, and make of the model what the library makes of it before it trains."""
        _refuse_unheard(self, _patched(type(self)) | vars(self))
        _refuse_elsewhere(self.model)
        arguments.check(self.args)
        _take_trls_head_off(self.model)
        _align_special_tokens(self.model, self.processing_class)
        config: Any = getattr(self.model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache

    @property
    def _counting(self) -> Counting:
        return Counting(self.model)

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | None = None, **others: Any) -> Any:
        """Train to the end; the model has the trained weights then, the best ones with load_best_model_at_end.

        `resume_from_checkpoint` is True for the last run of this output_dir, or RUN or RUN@STEPS as `meshcee run list` shows them.
        Returns the library's TrainOutput.
        """
        library, job = transformers(), self._current_job()
        if job is None:
            raise UsageError("train() needs train_dataset=...")
        if any(x is not None for x in others.values()):
            raise UsageError(f"train() does not take {', '.join(sorted(others))}: leave it out")
        for one in (self.model, job.model):
            if isinstance(one, nn.Module):
                one.train()  # as the library does
        notes = read_notes(Path(self.args.output_dir))
        resume = _run_of(resume_from_checkpoint, notes, self.args.output_dir)
        if resume is None:
            _warn_of_unfinished(notes)
        if resume is None or notes.get("run") != resume.partition("@")[0]:
            notes = {}
        _, per_epoch = arguments.steps_of(self.args, len(self.train_dataset))
        self.state = library.TrainerState(
            max_steps=job.steps, num_train_epochs=-(-job.steps // per_epoch), train_batch_size=job.micro_batch_size
        )
        self.state.compute_steps(self.args, job.steps)
        job = self._going_on(job, resume)
        outputs = job.metrics.get(OUTPUTS)
        assert outputs is None or isinstance(outputs, Outputs)
        kind = StepBridge if steers_steps(self.callback_handler.callbacks) else Bridge
        measured = partial(self._measured, "eval")
        named = {name: vars(self)[name] for name in ("data_collator", "train_dataset", "eval_dataset")}
        bridge = kind(
            self.args, self.callback_handler, self.state, per_epoch, outputs, measured, notes, Reading(job, named)
        )
        began_s = time.time()
        join, local = self._where
        heard = [bridge, *self._callbacks]
        if self._has_trained and resume is None:
            log.warning(Event.FRESH_OPTIMIZER)
        try:
            result = trained(job, join=join, local=local, keeps=True, resume=resume, callbacks=heard)
        except MeshceeError as error:
            how = "`train(resume_from_checkpoint=True)`"
            error.args = (re.sub(r"`meshcee train JOB\.py --resume [^`]*`", how, str(error)), *error.args[1:])
            raise
        self._has_trained = True
        self.model.load_state_dict(self._best(result) or result.state_dict)
        self.callback_handler.model = self.model
        losses = result.losses[bridge.begins :]
        loss = sum(losses) / max(len(losses), 1)
        figures = self._speed("train", began_s, len(losses) * job.batch_size, len(losses)) | {"train_loss": loss}
        bridge.log(figures)  # which adds the epoch to them
        bridge.end()
        self.control = bridge.control
        return library.trainer_utils.TrainOutput(self.state.global_step, loss, figures)

    def _going_on(self, job: Job, resume: str | None) -> Job:
        """With the rates that the run had, where it has done all its steps and these are more."""
        if resume is None or self._made.is_users or job.schedule is None:
            return job
        run = Home().run(resume.partition("@")[0])
        totals = arguments.totals_of((run.about.job or {}).get("schedule"))
        if not totals or [job.steps] == totals:
            return job
        done = len(run.reports())
        if job.steps != totals[-1] and done < totals[-1]:
            raise UsageError(
                f"run {run.id} has done {done} of {totals[-1]} steps, and its rates (lr_scheduler_type="
                f"{self.args.lr_scheduler_type.value!r}) follow from that number: go on with max_steps={totals[-1]}, and raise it "
                "behind the last step"
            )
        totals += [job.steps] if job.steps > totals[-1] else []
        return replace(job, schedule=arguments.longer(self.args, totals))

    def _built(self) -> Job:
        """This script, in the words of a Job."""
        args, state = self.args, transformers().TrainerState()
        data = self._samples(self.train_dataset, "train_dataset")
        steps, per_epoch = arguments.steps_of(args, len(data))
        state.compute_steps(args, steps)
        micro, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if (left := len(data) % (micro * accumulated)) and not args.dataloader_drop_last:
            log.warning("each epoch leaves samples out, as with dataloader_drop_last=True", samples=left, of=len(data))
        looked_at = self._looked_at(data, self._batches())
        model, weighing = self._weighing(looked_at, accumulated)
        when = args.eval_strategy.value
        if when != "no" and self.eval_dataset is None:
            raise UsageError(f"eval_strategy={when!r} needs eval_dataset=...")
        batches = self._batches(lengths=lengths_of(looked_at))
        held_out = None if when == "no" else self._evaluated(self.eval_dataset, "eval_dataset")
        if held_out is not None:
            self._looked_at(held_out, batches)
        metrics: dict[str, Any] = {} if when == "no" else losses_of(args.logging_nan_inf_filter)
        if metrics and self.compute_metrics is not None and not args.prediction_loss_only:
            metrics[OUTPUTS] = Outputs(self._ignored(), self.preprocess_logits_for_metrics, widens=args.bf16)
        return Job(
            name=args.run_name or Path(args.output_dir).name or "job",
            model=model,
            data=data,
            collate=batches,
            optimizer=arguments.optimizer_of(args, self.model),
            schedule=arguments.schedule_of(args, steps),
            batch_size=micro * accumulated,
            micro_batch_size=micro,
            steps=steps,
            seed=args.seed,
            workers=args.dataloader_num_workers,
            clip_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
            recompute=bool(args.activation_checkpointing),
            eval_data=held_out,
            eval_every={"steps": int(state.eval_steps), "epoch": per_epoch}.get(when, 0),
            checkpoint_every={"steps": int(state.save_steps), "epoch": per_epoch}.get(args.save_strategy.value, 0),
            metrics=metrics,
            **weighing,
            **self._computed(),
        )

    def _computed(self) -> dict[str, Any]:
        """In which precision, and so with which loss."""
        mixed = self.args.bf16
        return {"precision": "bf16-mixed" if mixed else "fp32", "loss": full_loss_of if mixed else loss_of}

    def _weighing(
        self, samples: Sequence[Mapping[str, torch.Tensor]], accumulated: int
    ) -> tuple[nn.Module, dict[str, Any]]:
        """The model, and how a Job adds its micro-batches' losses up, so that the sum is that of the library."""
        if not self._counting.accepts or "labels" not in samples[0]:
            return self.model, {}  # each loss is divided by how many micro-batches there are
        if accumulated > 1 and not divides(self.model, samples):
            return self.model, {"reduction": "sum"}
        return counted(self.model, self._counting), {"weight": weight_of}

    def _best(self, result: Any) -> Mapping[str, torch.Tensor] | None:
        """The weights of the best evaluation, where they are wanted, are not the last ones, and came to the disk."""
        step = self.state.best_global_step
        if not self.args.load_best_model_at_end or not step or step == len(result.losses):
            return None
        from peers.state.checkpoint import CheckpointStore

        run = Home().run(result.run)
        try:
            checkpoint = CheckpointStore.found(run).find(str(step), run.id)
            checkpoint.verify()
            found = dict(checkpoint.weights(checkpoint.manifest["persistent"]))
        except (UsageError, CheckpointError) as error:
            log.warning(Event.NO_BEST, best=f"{run.id}@{step}", error=str(error))
            self.state.best_model_checkpoint = None
            return None
        return found | {other: found[n] for other, n in checkpoint.manifest["aliases"].items() if n in found}

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss and compute_metrics of the model as it is now, over eval_dataset."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise UsageError("evaluate() needs eval_dataset=...")
        samples = self._evaluated(data, "eval_dataset")
        wants = self.compute_metrics is not None and not self.args.prediction_loss_only
        began_s = time.time()
        loss, predictions, labels = self._round(samples, ignore_keys, collects=wants)
        metrics = {f"{metric_key_prefix}_loss": loss, **self._measured(metric_key_prefix, predictions, labels)}
        metrics |= self._speed(metric_key_prefix, began_s, len(samples)) | {"epoch": self.state.epoch}
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> Any:
        """The model's outputs for each sample, in their order: the library's PredictionOutput. Samples need no labels."""
        samples, known = self._evaluated(test_dataset, "test_dataset"), {}
        if self.train_dataset is not None and len(samples):
            known = self._inputs(self._samples(self.train_dataset, "train_dataset"), 0, self._batches())
        here = self._inputs(samples, 0, self._batches()) if len(samples) else {}
        blind = any(name in known and name not in here for name in self._label_names())
        began_s = time.time()
        loss, predictions, labels = self._round(samples, ignore_keys, collects=True, like=known if blind else None)
        metrics: dict[str, float] = {}
        if not blind:
            metrics = {f"{metric_key_prefix}_loss": loss, **self._measured(metric_key_prefix, predictions, labels)}
        metrics |= self._speed(metric_key_prefix, began_s, len(samples))
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return transformers().trainer_utils.PredictionOutput(predictions, None if blind else labels, metrics)

    def _round(
        self,
        data: Samples,
        ignore_keys: Sequence[str] | None,
        *,
        collects: bool,
        like: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[float, Any, Any]:
        """The loss, predictions and labels of one evaluation, in the micro-batches that training has."""
        self._check_weights()
        self._prepare()
        micro = min(self.args.per_device_train_batch_size, len(data))
        if not micro:
            raise UsageError("the dataset is empty: give it samples")
        outputs = Outputs(
            self._ignored() if ignore_keys is None else ignore_keys,
            self.preprocess_logits_for_metrics,
            widens=self.args.bf16,
        )
        job = Job(
            model=counted(self.model, self._counting) if self._counting.accepts else self.model,
            data=data,
            eval_data=data,
            collate=self._batches(like=like, lengths=lengths_of(self._looked_at(data, self._batches()))),
            optimizer=arguments.optimizer_of(self.args, self.model),
            batch_size=micro,
            micro_batch_size=micro,
            steps=1,
            seed=self.args.seed,
            **self._computed(),
            metrics=losses_of(self.args.logging_nan_inf_filter) | ({OUTPUTS: outputs} if collects else {}),
        )
        if (own := self._made.job) is not None:  # what a user has replaced there
            job = replace(job, codec=own.codec, threads=own.threads, mix=own.mix)

        async def main() -> dict[str, float]:
            async with joined(self._where[0], local=self._where[1]) as mesh:
                return await mesh.evaluate(job)

        return (eval_loss(run_blocking(main)), *outputs.collect())

    def _check_weights(self) -> None:
        """UsageError where the model has not the weights that a script means: they are with the peers, or in a run's folder."""
        if self.callback_handler.model is None:
            raise UsageError(
                "the trained weights are not in this model: while train() is under way a callback may set control.should_evaluate "
                "and control.should_save; where train() ended early, go on with train(resume_from_checkpoint=True), or "
                "`meshcee run list` and `meshcee checkpoint export RUN --out FILE`"
            )

    def _measured(self, prefix: str, predictions: Any, labels: Any) -> dict[str, float]:
        """compute_metrics, with names that begin as evaluations' do."""
        library = transformers()
        if self.compute_metrics is None or predictions is None or labels is None:
            return {}
        with calling("compute_metrics"):
            found = self.compute_metrics(library.EvalPrediction(predictions=predictions, label_ids=labels))
        found = library.trainer_utils.denumpify_detensorize(dict(found))
        return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": x for name, x in found.items()}

    # -- the model, and what is written --------------------------------------------------------------------------------

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """For from_pretrained: the model or its adapter, and the processing_class."""
        self._check_weights()
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder)
        else:
            from meshcee.files.tensor_files import save

            save(folder / "model.safetensors", self.model.state_dict())
        words = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if words is not None:
            words.save_pretrained(folder)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print them as the library's scripts do."""
        transformers().trainer_pt_utils.log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write SPLIT_results.json, and all_results.json, in output_dir."""
        os.makedirs(self.args.output_dir, exist_ok=True)
        transformers().trainer_pt_utils.save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json in output_dir."""
        os.makedirs(self.args.output_dir, exist_ok=True)
        transformers().trainer_pt_utils.save_state(self)

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """As the library prints them."""
        return dict(transformers().trainer_pt_utils.metrics_format(metrics))

    def is_world_process_zero(self) -> bool:
        """There is one process that owns the run: this one."""
        return True

    def add_callback(self, callback: Any) -> None:
        """One more TrainerCallback, or a class of them, before `train()`."""
        refuse_unheard([callback])
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Without this one, or the first of this class."""
        self.callback_handler.remove_callback(callback)

    def __getattr__(self, name: str) -> Any:
        """Of the library's methods, those that have no meaning here say what to write."""
        if name.startswith("_") or name not in _known():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        do = INSTEAD.get(name, "peers compute the captured model, and none of the library's loop runs")
        raise AbsentError(f"meshcee.hf.Trainer has no {name}: {do}")

    # -- what the library knows of the model ---------------------------------------------------------------------------

    def _samples(self, data: Any, name: str) -> Samples:
        columns = None
        if self.args.remove_unused_columns:
            columns = {
                *inspect.signature(base_of(self.model).forward).parameters,
                *self._label_names(),
                "label",
                "label_ids",
            }
        return Samples(data, columns, name=name)

    def _evaluated(self, data: Any, name: str) -> Samples:
        """Without those that fill no micro-batch, where the library leaves them out."""
        found = self._samples(data, name)
        found.drop_last(self.args.per_device_train_batch_size if self.args.dataloader_drop_last else 1)
        return found

    def _batches(self, **more: Any) -> Batches:
        return Batches(self.data_collator, self._label_names(), self._counting, **more)

    def _label_names(self) -> list[str]:
        from transformers.utils.generic import find_labels

        found = self.args.label_names
        return list(find_labels(type(base_of(self.model))) if found is None else found)

    def _ignored(self) -> list[str]:
        config = getattr(self.model, "config", None)
        return list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))

    def _looked_at(self, samples: Samples, batches: Batches) -> list[dict[str, torch.Tensor]]:
        """What the model is called with for each of those that a capture looks at, all over the data."""
        count = min(len(samples), LOOKED_AT)
        return [self._inputs(samples, k * len(samples) // count, batches) for k in range(count)]

    def _inputs(self, samples: Samples, i: int, batches: Batches) -> dict[str, torch.Tensor]:
        """What the model is called with for this one alone."""
        found: dict[str, torch.Tensor] = batch_of(
            samples, [i], self.args.seed, NO_STEP, name=samples.name, collate=batches
        )[0]
        return found

    def _speed(self, split: str, began_s: float, samples: int, steps: int | None = None) -> dict[str, float]:
        """Of so many steps, or micro-batches, in the library's words."""
        steps = -(-samples // self.args.per_device_train_batch_size) if steps is None else steps
        found: dict[str, float] = transformers().trainer_utils.speed_metrics(split, began_s, samples, steps)
        return found


class _Made(NamedTuple):
    """A job, and what stood in the Trainer when it was built, or when a user set it."""

    job: Job | None
    standing: Mapping[str, Any]
    is_users: bool = False


OUTPUTS = "outputs"  # the metric of a Job that collects what the model returns
BUILT_FROM = (
    *("model", "train_dataset", "eval_dataset", "data_collator", "processing_class"),
    *("compute_metrics", "preprocess_logits_for_metrics"),
)
READ = frozenset(
    {*BUILT_FROM, "args", "callback_handler", "state", "control"}
)  # of what the library's Trainer knows of itself
OURS = dict(vars(Trainer))  # as it is written here
# The library's train() calls these of a subclass where the strategy is not "no", and ours does not.
CALLED_IN_TRAINING = {"evaluate": "eval_strategy", "save_model": "save_strategy"}
_LOSS = "compute the loss in the model's own forward, or use meshcee.Job(loss=...)"
_OPTIMIZER = "write TrainingArguments(optim=...), or use meshcee.Job"
_SCHEDULE = "write TrainingArguments(lr_scheduler_type=...), or use meshcee.Job"
_BOTH = "write TrainingArguments(optim=..., lr_scheduler_type=...), or use meshcee.Job"
_DATA = "write data_collator=, and train_dataset= with the samples as they are to be; or use meshcee.Job(sampler=...)"
_COUNTS = "set accepts_loss_kwargs of the model, which says whether its forward takes num_items_in_batch"
_FIGURES = "compute figures in compute_metrics, of what preprocess_logits_for_metrics leaves"
INSTEAD = {
    "tokenizer": "write processing_class=",
    "model_init": "make the model and give model=",
    "model_wrapped": "set trainer.model",
    "label_names": "write TrainingArguments(label_names=...)",
    "push_to_hub": "write trainer.model.push_to_hub(...), which has the trained weights",
    "hyperparameter_search": "make a Trainer with other TrainingArguments for each trial",
    "log": "write a TrainerCallback with on_log",
    "evaluate": "give it another name and call that after train(), or write eval_strategy='no'; for figures compute_metrics",
    "save_model": "give it another name and call that after train(), or write save_strategy='no'; for each checkpoint a "
    "TrainerCallback with on_save",
    "optimizers": _BOTH,
    "create_optimizer_and_scheduler": _BOTH,
    **dict.fromkeys(("optimizer", "optimizer_cls_and_kwargs", "create_optimizer"), _OPTIMIZER),
    "get_decay_parameter_names": "use meshcee.Job(optimizer=Optimizer(groups=...))",
    **dict.fromkeys(("lr_scheduler", "create_scheduler"), _SCHEDULE),
    **dict.fromkeys(("compute_loss_func", "compute_loss", "label_smoother"), _LOSS),
    **dict.fromkeys(("model_accepts_loss_kwargs", "loss_is_scaled_for_ga"), _COUNTS),
    **dict.fromkeys(("prediction_step", "evaluation_loop"), _FIGURES),
    **dict.fromkeys(("get_train_dataloader", "_get_train_sampler", "get_eval_dataloader", "_get_eval_sampler"), _DATA),
}


class AbsentError(UsageError, AttributeError):
    """Of a method of the library's Trainer that ours has not; `hasattr` says False."""


@cache
def _known() -> frozenset[str]:
    """All names that the library's Trainer has, or reads or writes of itself."""
    library = transformers().Trainer
    found = {*vars(library), *re.findall(r"\bself\.(\w+)", inspect.getsource(library))}
    return frozenset(name for name in found if not name.startswith("__"))


def _patched(kind: type) -> dict[str, Any]:
    """What a subclass has of its own, and what a script has put onto Trainer itself."""
    classes = kind.__mro__[: kind.__mro__.index(Trainer) + 1]
    return {n: x for one in classes for n, x in vars(one).items() if OURS.get(n) is not x}


def _refuse_unheard(trainer: Trainer, told: Mapping[str, Any]) -> None:
    """UsageError for what the library's Trainer would heed and nobody would ask for: peers compute the captured graph."""
    args = vars(trainer).get("args")
    for name, value in sorted(told.items(), key=lambda one: one[0]):
        if name in READ or name not in _known():
            continue
        strategy = getattr(args, CALLED_IN_TRAINING.get(name, ""), None)
        if name in OURS and getattr(strategy, "value", "no") == "no":
            continue
        is_called = callable(value) or isinstance(value, property | staticmethod | classmethod)
        usual = (
            "put the loss into the model's own forward, and the data into the dataset; or use meshcee.Job"
            if is_called
            else "leave it out, or give another name to what is your own"
        )
        raise UsageError(
            f"{type(trainer).__name__}.{name}{line_of(getattr(value, '__code__', None), '')} would never be "
            f"{'called' if is_called else 'read'}{' by train()' if name in OURS else ''}: {INSTEAD.get(name, usual)}"
        )


def _differs(told: Mapping[str, Any], before: Mapping[str, Any], name: str) -> bool:
    """Whether two looks found something else there. Texts, numbers and tuples are compared, all else is the same object or not."""
    if name not in told or name not in before:
        return True
    now, then = told[name], before[name]
    return now is not then and not (
        isinstance(now, str | int | float | tuple) and type(now) is type(then) and now == then
    )


def _refuse_elsewhere(model: Any) -> None:
    """Before anything calls the model: inputs are on the CPU."""
    if not isinstance(model, nn.Module):
        raise UsageError("model is an nn.Module: write Trainer(model=AutoModelFor....from_pretrained(...), ...)")
    found = sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu"})
    if found:
        mapped = "meta" in found or hasattr(model, "hf_device_map")
        do = "leave device_map out of from_pretrained" if mapped else "write model.cpu()"
        raise UsageError(f"the model is on {found[0]}; give it on the CPU: {do}")


def _take_trls_head_off(model: nn.Module) -> None:
    """SFTTrainer puts a forward on the model for a loss of its own. It leads back to this very object, whichever copy is called."""
    base = base_of(model)
    code = getattr(getattr(vars(base).get("forward"), "__func__", None), "__code__", None)
    if code is not None and library_of(code.co_filename) == "trl":
        del base.forward


def _align_special_tokens(model: nn.Module, processing_class: Any) -> None:
    """As train() of the library does, where it does: the model's configs get the ids of the tokenizer's special tokens."""
    library = transformers()
    align = getattr(library.trainer_utils, "align_special_tokens", None)
    words = isinstance(processing_class, library.PreTrainedTokenizerBase | library.ProcessorMixin)
    if align is not None and words and hasattr(model, "config"):
        align(model, processing_class)


def _is_meshcees(callback: Any) -> bool:
    """A Callback of meshcee, a function, or the name of a logger; all others are the library's."""
    if isinstance(callback, Callback | str):
        return True
    return callable(callback) and not isinstance(callback, type) and not hasattr(callback, "on_step_end")


def _usual_collator(processing_class: Any) -> Callable[[list[Any]], Mapping[str, Any]]:
    library = transformers()
    if isinstance(processing_class, library.PreTrainedTokenizerBase):
        found: Callable[[list[Any]], Mapping[str, Any]] = library.DataCollatorWithPadding(processing_class)
        return found
    usual: Callable[[list[Any]], Mapping[str, Any]] = library.default_data_collator
    return usual


def _run_of(wanted: bool | str | None, notes: Mapping[str, Any], output_dir: str) -> str | None:
    """The run to go on with, as `meshcee.train(resume=...)` takes it."""
    if not wanted:
        return None
    if wanted is not True:
        if "/" in str(wanted) or str(wanted).startswith("checkpoint-"):
            raise UsageError(
                f"resume_from_checkpoint={str(wanted)!r:.120}: write True, or RUN or RUN@STEPS as `meshcee run list` shows them"
            )
        return str(wanted)
    if "run" not in notes:
        raise UsageError(
            f"no run has been noted in output_dir={output_dir!r}: write resume_from_checkpoint='RUN', as `meshcee run list` "
            "shows them"
        )
    return str(notes["run"])


def _warn_of_unfinished(notes: Mapping[str, Any]) -> None:
    """Of the run that output_dir has noted: transformers' get_last_checkpoint finds none, and this one begins anew."""
    run = next((run for run in Home().runs() if run.id == notes.get("run")), None)
    if run is not None and not run.is_over and not run.is_owned:
        log.warning(Event.UNFINISHED, run=run.id)
