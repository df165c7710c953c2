"""TrainingArguments in a Job's words: what is mapped gives the library's own numbers, what is not is refused by name."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import StepLR

from meshcee.errors import UsageError
from meshcee.hf.arguments import check, optimizer_of, patterns, rate_after, schedule_of, steps_of
from meshcee.optim import HyperSchedule
from tests.hf.tiny import arguments, llama

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_what_a_script_usually_says_is_taken(tmp_path: Path) -> None:
    check(transformers.TrainingArguments(output_dir=str(tmp_path)))
    check(
        arguments(
            tmp_path,
            per_device_eval_batch_size=2,
            dataloader_num_workers=4,
            bf16=True,
            activation_checkpointing=True,
            save_total_limit=2,
            data_seed=7,
            seed=7,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            report_to="none",
        )
    )


REFUSED: dict[str, Any] = {
    "per_device_eval_batch_size": 3,
    "save_total_limit": 5,
    "data_seed": 1,
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "torch_compile": True,
    "auto_find_batch_size": True,
    "include_num_input_tokens_seen": "all",
    "eval_delay": 1,
    "eval_on_start": True,
    "eval_do_concat_batches": False,
    "include_for_metrics": ["inputs"],
    "batch_eval_metrics": True,
    "save_only_model": True,
    "push_to_hub": True,
    "ignore_data_skip": True,
    "train_sampling_strategy": "sequential",
    "optim_target_modules": "all-linear",
    "use_liger_kernel": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "deepspeed": "zero.json",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_carried_out_is_named(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, REFUSED[name])  # some check the machine when they are given
    with pytest.raises(UsageError, match=rf"cannot carry out {name}=.* \((write|leave)"):
        check(args)


def test_all_refusals_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"eval_delay=3 .*; label_smoothing_factor=|label_smoothing_factor=0.1 .*; eval_delay="
    ):
        check(arguments(tmp_path, eval_delay=3, label_smoothing_factor=0.1))


def test_arguments_of_the_librarys_subclasses_are_looked_at_too(tmp_path: Path) -> None:
    def sequences(**options: Any) -> Any:
        return transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)

    check(sequences())
    said = r"sortish_sampler=True \(leave it out\); predict_with_generate=True \(write model\.generate after trainer\.train\(\)\)"
    with pytest.raises(UsageError, match=said):
        check(sequences(sortish_sampler=True, predict_with_generate=True))
    with pytest.raises(
        UsageError, match=r"eval_delay=3 .*; generation_num_beams=4 \(write .* options of model\.generate"
    ):
        check(sequences(eval_delay=3, generation_num_beams=4))


def test_fields_of_a_users_own_are_left_alone_and_no_default_of_theirs_hides_the_librarys(tmp_path: Path) -> None:
    @dataclass
    class Mine(transformers.Seq2SeqTrainingArguments):  # type: ignore[misc, name-defined]
        corpus: str = "news"
        neftune_noise_alpha: float | None = 5.0

    check(Mine(output_dir=str(tmp_path), use_cpu=True, corpus="letters", neftune_noise_alpha=None))
    with pytest.raises(UsageError, match=r"cannot carry out neftune_noise_alpha=5\.0"):
        check(Mine(output_dir=str(tmp_path), use_cpu=True))


def test_what_a_config_of_trl_says_of_data_is_taken(tmp_path: Path) -> None:
    """trl has done it; its defaults count as the library's, and another loss is refused."""

    @dataclass
    class SFTConfig(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
        learning_rate: float = 2e-5
        max_length: int | None = 1024
        packing: bool = False
        loss_type: str | None = None

        def __post_init__(self) -> None:
            self.bf16 = True if self.bf16 is None else self.bf16
            self.loss_type = self.loss_type or "chunked_nll"
            super().__post_init__()

    SFTConfig.__module__ = "trl.trainer.sft_config"
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_length": 48, "packing": True}
    check(SFTConfig(**options))
    check(SFTConfig(**options, loss_type="nll"))
    with pytest.raises(
        UsageError, match=r"cannot carry out loss_type='dft' \(write a loss in the model's own forward\)"
    ):
        check(SFTConfig(**options, loss_type="dft"))


def test_something_else_than_arguments_is_refused() -> None:
    with pytest.raises(UsageError, match="TrainingArguments, not a dict"):
        check({"output_dir": "x"})


def test_every_argument_of_the_library_has_its_place() -> None:
    """One that a new version brings is refused at another value than its own, until somebody has looked at it."""
    from dataclasses import fields

    from meshcee.hf.arguments import CARRIED_OUT, NOTHING_TO_ACT_ON

    known = {field.name for field in fields(transformers.TrainingArguments)}
    assert (CARRIED_OUT | NOTHING_TO_ACT_ON) - known == set()
    assert CARRIED_OUT.isdisjoint(NOTHING_TO_ACT_ON)


def test_steps_and_epochs(tmp_path: Path) -> None:
    assert steps_of(arguments(tmp_path, max_steps=7), 22) == (7, 5)
    assert steps_of(arguments(tmp_path, max_steps=-1, num_train_epochs=1.5), 22) == (8, 5)
    with pytest.raises(UsageError, match="3 samples, fewer than"):
        steps_of(arguments(tmp_path), 3)


# -- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({}, "AdamW", {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ({"optim": "adamw_torch_fused", "adam_beta1": 0.8}, "AdamW", {"betas": (0.8, 0.999), "fused": True}),
        ({"optim": "sgd", "optim_args": "momentum=0.5"}, "SGD", {"lr": 0.01, "momentum": 0.5}),
        ({"optim": "adagrad"}, "Adagrad", {"lr": 0.01}),
        ({"optim": "rmsprop"}, "RMSprop", {"lr": 0.01}),
        (
            {"optim": "adamw_8bit", "adam_beta1": 0.8},
            "AdamW8bit",
            {"lr": 0.01, "betas": (0.8, 0.999), "weight_decay": 0.0},
        ),
        ({"optim": "adamw_bnb_8bit"}, "AdamW8bit", {"eps": 1e-8}),
        ({"optim": "adamw_torch_8bit"}, "AdamW8bit", {}),
    ],
)
def test_an_optimizer_has_the_librarys_options(
    options: dict[str, Any], name: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    found = optimizer_of(arguments(tmp_path, **options), llama())
    assert found.name == name
    assert {key: found.options[key] for key in expected} == expected
    assert found.groups == {}


@pytest.mark.parametrize("optim", ["adafactor", "lion_8bit", "galore_adamw"])
def test_another_optimizer_is_refused(optim: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"optim='.*adamw_torch'"):
        optimizer_of(arguments(tmp_path, optim=optim), llama())


def test_what_decays_is_what_the_library_decays(tmp_path: Path) -> None:
    model = llama()
    args = arguments(tmp_path, weight_decay=0.1)
    named = dict(model.named_parameters())
    built = optimizer_of(args, model).build(named)
    decay = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    names = set(transformers.Trainer.get_decay_parameter_names(None, model))
    assert {name: decay[id(p)] for name, p in named.items()} == {n: 0.1 if n in names else 0.0 for n in named}
    assert 0.0 in decay.values()
    assert len(optimizer_of(args, llama(layers=9)).groups) == len(optimizer_of(args, model).groups)


def test_groups_of_the_librarys_making_meet_parameters_of_any_model(tmp_path: Path) -> None:
    for model in (llama(), torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))):
        names = [name for name, _ in model.named_parameters()]
        assert list(optimizer_of(arguments(tmp_path, weight_decay=0.1), model).unmet(names, {})) == []


NAMES = st.lists(st.sampled_from("abc[*]?0123"), min_size=1, max_size=4).map(".".join)


@given(st.sets(NAMES, max_size=8), st.sets(NAMES, max_size=8))
def test_patterns_match_what_is_wanted_and_nothing_else(wanted: set[str], others: set[str]) -> None:
    others = others - wanted
    found = patterns(sorted(wanted), others)
    assert all(any(fnmatch.fnmatchcase(name, pattern) for pattern in found) for name in wanted)
    assert not any(fnmatch.fnmatchcase(name, pattern) for name in others for pattern in found)


# -- schedules -----------------------------------------------------------------------------------------------------


OPTIONS: dict[str, list[dict[str, Any] | None]] = {  # of those that need some, or are tried with some
    "cosine": [None, {"num_cycles": 1.5}],
    "cosine_with_restarts": [None, {"num_cycles": 2}],
    "polynomial": [None, {"power": 2.0, "lr_end": 1e-4}],
    "inverse_sqrt": [None, {"timescale": 3}],
    "cosine_with_min_lr": [{"min_lr": 1e-3}, {"min_lr_rate": 0.1}],
    "cosine_warmup_with_min_lr": [{"min_lr": 1e-3}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}],
    "warmup_stable_decay": [
        {"num_decay_steps": 4},
        {"num_decay_steps": 3, "num_stable_steps": 2, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    ],
    "reduce_lr_on_plateau": [{"patience": 0, "factor": 0.3}, {"patience": 1, "min_lr": 3e-3, "eps": 1e-2}],
    "greedy": [{"patience": 0, "factor": 0.7}, {"patience": 0, "cooldown": 1, "smooth": True, "window_size": 2}],
}
LOSSES = [3.0, 2.0, 2.5, 2.4, 1.0, 0.9, 0.8, 5.0, 6.0, 7.0]  # of evaluations, one after each step


@pytest.mark.parametrize(
    ("kind", "options"), [(k.value, o) for k in transformers.SchedulerType for o in OPTIONS.get(k.value, [None])]
)
def test_every_step_has_the_librarys_rate(kind: str, options: dict[str, Any] | None, tmp_path: Path) -> None:
    args = arguments(
        tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=0.3, eval_strategy="steps"
    )
    ours = HyperSchedule(optimizer_of(args, llama()), schedule_of(args, 10))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    theirs = transformers.get_scheduler(kind, optimizer, args.get_warmup_steps(10), 10, options)
    rates = set()
    for step in range(10):
        rate = rate_after(args, LOSSES[:step])
        assert (ours.at(step)[0]["lr"] if rate is None else rate) == optimizer.param_groups[0]["lr"]
        rates.add(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.step(*([] if rate is None else LOSSES[step : step + 1]))
    assert (len(rates) > 1) == (kind != "constant" and options != OPTIONS["reduce_lr_on_plateau"][1])


def test_runs_are_told_apart_by_their_schedules(tmp_path: Path) -> None:
    """The words of a schedule decide whether a run may go on."""
    words = set()
    for options in ({"power": 2.0}, {"power": 3.0}):
        schedule = schedule_of(arguments(tmp_path, lr_scheduler_type="polynomial", lr_scheduler_kwargs=options), 10)
        assert schedule is not None
        words.add(schedule.words)
    assert len(words) == 2


def test_a_schedule_that_the_library_refuses_is_refused_and_so_is_one_of_a_new_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("cosine", "greedy", "warmup_stable_decay"):
        args = arguments(
            tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs={"wrong": 1}, eval_strategy="steps", eval_steps=1
        )
        with pytest.raises(UsageError, match=rf"lr_scheduler_type='{kind}' with lr_scheduler_kwargs={{'wrong': 1}}: "):
            schedule_of(args, 10)
    made = transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION
    monkeypatch.setitem(made, transformers.SchedulerType.POLYNOMIAL, lambda optimizer, **_: StepLR(optimizer, 1))
    with pytest.raises(UsageError, match="'polynomial' is a StepLR, which is not known here: write 'linear'"):
        schedule_of(arguments(tmp_path, lr_scheduler_type="polynomial"), 10)


# -- the library ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        ("raise ImportError('no such library')", "meshcee.hf needs transformers with accelerate (no such library)"),
        ("__version__ = '4.40.0'", "meshcee.hf needs transformers 5.23 or newer, and 4.40.0 is here"),
    ],
)
def test_a_library_that_is_missing_or_old_is_one_sentence(stand_in: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text(stand_in)
    (folder / "trainer.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom meshcee.hf import Trainer\n"
    code += "try:\n    Trainer()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert shown.startswith(f"UsageError {says}")
    assert shown.strip().endswith("pip install 'meshcee[hf]'")
