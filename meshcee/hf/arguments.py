"""TrainingArguments in the words of a Job: the optimizer, its groups, the schedule, how many steps, and what is refused.

The idea: each argument is carried out, has nothing to act on here, or must be left at its default. What the library computes
itself, such as which weights decay, it is asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from meshcee.errors import UsageError
from meshcee.hf.library import transformers
from meshcee.optim import PER_PARAMETER, Optimizer
from meshcee.optim.rates import Schedule

__all__ = [
    "check",
    "longer",
    "optimizer_of",
    "patterns",
    "rate_after",
    "schedule_of",
    "steps_of",
    "totals_of",
    "words_of",
]

CARRIED_OUT = frozenset(
    re.findall(
        r"\w+",
        """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps seed
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm bf16 activation_checkpointing gradient_checkpointing use_cache
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter report_to run_name project disable_tqdm
    eval_strategy eval_steps prediction_loss_only save_strategy save_steps
    load_best_model_at_end metric_for_best_model greater_is_better
    remove_unused_columns label_names dataloader_drop_last
    dataloader_num_workers trackio_space_id trackio_bucket_id trackio_static_space_id
        """,
    )
)
# They say how one process reads data, uses its device or talks: no number depends on them.
NOTHING_TO_ACT_ON = frozenset(
    re.findall(
        r"\w+",
        """
        activation_checkpointing_kwargs gradient_checkpointing_kwargs average_tokens_across_devices torch_empty_cache_steps
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank use_cpu
        eval_accumulation_steps eval_use_gather_object log_level log_level_replica log_on_each_node
        save_on_each_node skip_memory_metrics full_determinism debug length_column_name
        do_train do_eval do_predict resume_from_checkpoint restore_callback_states_from_checkpoint
        hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision liger_kernel_config
        """,
    )
)
# Of trl's configs: trl has prepared the data, the collator and the model by them, and here they have nothing to act on.
PREPARES = frozenset(
    re.findall(
        r"\w+",
        """
        model_init_kwargs chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token max_length
        truncation_mode shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of eval_packing
        completion_only_loss assistant_only_loss activation_offloading
        """,
    )
)
# Of what is carried out: read while a run goes on, or only by loggers.
READ_LATER = frozenset(
    re.findall(
        r"\w+",
        """
        logging_strategy logging_steps logging_first_step report_to run_name project disable_tqdm
        trackio_space_id trackio_bucket_id trackio_static_space_id
        """,
    )
)
INSTEAD = {
    "fp16": "bf16=True",
    "bf16_full_eval": "bf16=True, which evaluates in bf16 too",
    "fp16_full_eval": "bf16=True",
    "per_device_eval_batch_size": "the same as per_device_train_batch_size: evaluations run in the micro-batches of training",
    "auto_find_batch_size": "a smaller per_device_train_batch_size and more gradient_accumulation_steps",
    "push_to_hub": "trainer.model.push_to_hub(...) after trainer.train()",
    "save_total_limit": "2, or leave it out: the two newest checkpoints stay, and the best one",
    "data_seed": "seed, which orders the samples too",
    "train_sampling_strategy": "'random'",
    "neftune_noise_alpha": "noise in the model's own forward",
    "label_smoothing_factor": "a loss in the model's own forward",
    "fsdp": "join=, which shares the model between machines",
    "deepspeed": "join=, which shares the model between machines",
    "eval_on_start": "trainer.evaluate() before trainer.train()",
    "eval_delay": "a callback that sets control.should_evaluate",
    "torch_compile": "nothing: peers compute the captured graph",
    "save_only_model": "nothing: a checkpoint holds what going on needs",
    "predict_with_generate": "model.generate after trainer.train()",
    **dict.fromkeys(
        ("generation_max_length", "generation_num_beams", "generation_config"),
        "them as options of model.generate after trainer.train()",
    ),
    "loss_type": "a loss in the model's own forward",
}


def check(args: Any) -> None:
    """Raise one UsageError that names every argument which cannot be carried out, and what to write instead.

    Looked at is the class of transformers or trl that `args` has; fields of a user's own are for the user's own code.
    """
    library = transformers()
    if not isinstance(args, library.TrainingArguments):
        raise UsageError(f"args is a transformers.TrainingArguments, not a {type(args).__name__}")
    kind = next(one for one in type(args).__mro__ if one.__module__.split(".")[0] in ("transformers", "trl"))
    usual = kind(output_dir=args.output_dir, bf16=args.bf16, use_cpu=args.use_cpu)
    known = CARRIED_OUT | NOTHING_TO_ACT_ON | (PREPARES if kind.__module__.startswith("trl.") else set())
    wrong = []
    for field in dataclasses.fields(kind):
        name, value = field.name, getattr(args, field.name)
        if name in known or value == getattr(usual, name) or _is_as_good(args, name, value):
            continue
        if name.startswith("torch_compile_") and args.torch_compile:  # which sets these
            continue
        instead = INSTEAD.get(name, "nothing")
        do = f"leave it out{instead.removeprefix('nothing')}" if instead.startswith("nothing") else f"write {instead}"
        wrong.append(f"{name}={value!r:.60} ({do})")
    if wrong:
        raise UsageError(f"meshcee.hf.Trainer cannot carry out {'; '.join(wrong)}")


def _is_as_good(args: Any, name: str, value: Any) -> bool:
    """Whether another value than the usual one asks for what happens anyway."""
    known = {
        "per_device_eval_batch_size": value == args.per_device_train_batch_size,
        "save_total_limit": value in (1, 2),  # a run keeps two
        "data_seed": value == args.seed,
        "loss_type": value in ("nll", "chunked_nll"),  # of trl: the same numbers as the model's own
    }
    return bool(known.get(name, False))


def words_of(args: Any, names: Collection[str] = CARRIED_OUT) -> dict[str, str]:
    """What stands in these, in words: an option that is a dict can change and stay the same object."""
    return {name: repr(getattr(args, name, None)) for name in sorted(names)}


def steps_of(args: Any, samples: int) -> tuple[int, int]:
    """How many steps there are, and how many of them an epoch has."""
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if samples < batch_size:
        raise UsageError(
            f"train_dataset has {samples} samples, fewer than per_device_train_batch_size x "
            f"gradient_accumulation_steps = {batch_size}: take smaller ones"
        )
    per_epoch = samples // batch_size
    return (args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)), per_epoch


def optimizer_of(args: Any, model: nn.Module) -> Optimizer:
    """The library's choice, where a Job has it; biases and norms do not decay.

    AdamW with moments in 8 bits is a class of our own, which every peer has: near the bits of bitsandbytes, and not the same.
    """
    trainer = transformers().Trainer
    in_8_bits = args.optim in _IN_8_BITS
    if in_8_bits and args.optim_args:
        raise UsageError(
            f"optim_args={args.optim_args!r} is for another library's optimizer: leave it out beside 8 bits"
        )
    try:
        usual = _with_optim(args, "adamw_torch") if in_8_bits else args
        kind, options = trainer.get_optimizer_cls_and_kwargs(usual, model)
    except (ImportError, ValueError, TypeError) as error:
        raise UsageError(f"optim={str(args.optim)!r}: {error}; {_OTHER_OPTIMIZER}") from error
    name = getattr(kind, "__name__", "")
    if name not in PER_PARAMETER or kind is not getattr(torch.optim, name):
        raise UsageError(f"optim={str(args.optim)!r} cannot be shared between machines; {_OTHER_OPTIMIZER}")
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    decays = set(trainer.get_decay_parameter_names(None, model))
    spared = patterns([n for n in trained if n not in decays], [n for n in trained if n in decays])
    groups = {pattern: {"weight_decay": 0.0} for pattern in spared} if args.weight_decay else {}
    return Optimizer(
        "AdamW8bit" if in_8_bits else name, groups=groups, **{**options, "weight_decay": args.weight_decay}
    )


def _with_optim(args: Any, optim: str) -> Any:
    found = copy.copy(args)
    found.optim = optim
    return found


_IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")

_OTHER_OPTIMIZER = (
    "write optim='adamw_torch', 'adamw_8bit', 'sgd', 'adagrad' or 'rmsprop', or use meshcee.Job, which has more"
)


def patterns(wanted: Iterable[str], others: Collection[str]) -> list[str]:
    """Few shell patterns that match every wanted name and none of the others; layers that count are one pattern."""
    found: dict[str, None] = {}
    for name in wanted:
        exact = re.sub(r"([\[*?])", r"[\1]", name)
        wide = ".".join("*" if piece.isdigit() else piece for piece in exact.split("."))
        found[exact if any(fnmatch.fnmatchcase(other, wide) for other in others) else wide] = None
    return list(found)


def schedule_of(args: Any, steps: int) -> Schedule | None:
    """The library's schedule over so many steps. Those that a Job has by name have that name.

    One that looks at evaluations is none: see `rate_after`.
    """
    name, warmup, options = str(args.lr_scheduler_type.value), args.get_warmup_steps(steps), args.lr_scheduler_kwargs
    if not options and name == "constant":
        return None
    if not options and name == "constant_with_warmup":
        return Schedule("ConstantWithWarmup", warmup=warmup)
    if not options and name in ("linear", "cosine"):
        return Schedule(f"{name.capitalize()}WithWarmup", warmup=warmup, steps=steps)
    built, _ = _library_schedule(args, warmup, steps)
    if isinstance(built, torch.optim.lr_scheduler.LambdaLR):
        return Schedule("LambdaLR", lr_lambda=_Factor(args, steps, built.lr_lambdas[0]))
    if name in LOOK_AT_EVALUATIONS:
        return None
    raise UsageError(
        f"lr_scheduler_type={name!r} is a {type(built).__name__}, which is not known here: write 'linear' or 'cosine', or use "
        "meshcee.Job"
    )


def totals_of(described: Any) -> list[int]:
    """Over how many steps the schedules go that stand in a run's description, as `schedule_of` and `longer` have made them."""
    return [int(steps) for steps in re.findall(r"\bsteps\W+(\d+)", str(described))]


def longer(args: Any, totals: Sequence[int]) -> Schedule:
    """As the library's trainer goes on with more steps, again and again: the first of them has the rate of the schedule before."""
    parts = []
    for steps in totals:
        built, _ = _library_schedule(args, args.get_warmup_steps(steps), steps)
        parts.append((steps, _Factor(args, steps, built.lr_lambdas[0])))
    return Schedule("LambdaLR", lr_lambda=_Longer(parts))


LOOK_AT_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


def rate_after(args: Any, values: Iterable[float]) -> float | None:
    """The library's learning rate after these evaluations, in order; None where its schedule looks at none."""
    if args.lr_scheduler_type.value not in LOOK_AT_EVALUATIONS:
        return None
    rule, optimizer = _library_schedule(args, 0, 0)
    for value in values:
        rule.step(value)
    return float(optimizer.param_groups[0]["lr"])


def _library_schedule(args: Any, warmup: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Its own object, and an optimizer that has the rates and nothing to train."""
    name, options = args.lr_scheduler_type.value, args.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    try:
        return transformers().get_scheduler(name, optimizer, warmup, steps, options), optimizer
    except (TypeError, ValueError) as error:
        raise UsageError(f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={options!r:.80}: {error}") from error


class _Factor:
    """What a schedule of the library multiplies the rate by, under a name that says all of it: runs are compared by that."""

    def __init__(self, args: Any, steps: int, factor: Any) -> None:
        name, warmup = args.lr_scheduler_type.value, args.get_warmup_steps(steps)
        over = "" if name == "inverse_sqrt" else f"steps={steps}, "  # which has no end
        self.__qualname__ = f"{name}(warmup={warmup}, {over}{args.lr_scheduler_kwargs})"
        self._factor = factor

    def __call__(self, step: int) -> float:
        return float(self._factor(step))


class _Longer:
    """Several, each to its last step and the one behind it."""

    def __init__(self, parts: Sequence[tuple[int, _Factor]]) -> None:
        self.__qualname__ = " then ".join(factor.__qualname__ for _, factor in parts)
        self._parts = parts

    def __call__(self, step: int) -> float:
        return next((factor for steps, factor in self._parts if step <= steps), self._parts[-1][1])(step)
