"""Optimizers by name: what is refused, groups, classes of their own, and the wire."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import nn

from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.job import Job
from meshcee.optim import PER_PARAMETER, Optimizer
from meshcee.optim.rates import Schedule


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "NoSuchOptimizer", "AdamWScheduleFree", "RAdamScheduleFree"])
def test_an_optimizer_that_cannot_be_split_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}.*(refused, as|no name known here).*AdamW"):
        Optimizer(name, lr=0.1)


def test_options_that_are_not_data_are_refused() -> None:
    with pytest.raises(UsageError, match=r"lr=.* is no number; write one"):
        Optimizer("SGD", lr=torch.tensor(0.1))
    with pytest.raises(UsageError, match=r"option params=.* choose by name"):
        Optimizer("SGD", params=nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match=r"optimizer SGD: .*no_such_option"):
        Optimizer("SGD", lr=0.1, no_such_option=1).build({"w": nn.Parameter(torch.zeros(1))})


def test_numbers_of_numpy_are_pythons() -> None:
    optimizer = Optimizer(
        "AdamW", lr=np.float32(0.5), betas=(np.float64(0.5), 0.75), groups={"*": {"lr": np.float32(2)}}
    )
    assert json.loads(json.dumps(optimizer.to_json())) == optimizer.to_json() | {
        "options": {"lr": 0.5, "betas": [0.5, 0.75]}
    }
    assert [type(optimizer.options["lr"]), type(optimizer.groups["*"]["lr"])] == [float, float]
    assert optimizer.options["betas"] == (0.5, 0.75)


def test_groups_go_by_the_first_pattern_that_matches() -> None:
    optimizer = Optimizer("AdamW", lr=0.1, groups={"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 0.5}})
    names = ["body.weight", "body.bias", "head.weight", "head.bias"]
    built = optimizer.build({n: nn.Parameter(torch.zeros(1)) for n in names})
    assert [optimizer.group_of(n) for n in names] == [2, 0, 1, 0]
    assert [len(g["params"]) for g in built.param_groups] == [2, 1, 1]
    assert built.param_groups[1]["lr"] == 0.5
    assert Optimizer.from_json(optimizer.to_json()).to_json() == optimizer.to_json()


@pytest.mark.parametrize(
    ("pattern", "do"),
    [
        (
            "encoder",
            r"write 'encoder\.\*', or another pattern of names such as 'encoder\.norm1\.weight', 'encoder\.norm1\.bias'",
        ),
        ("*LayerNorm*", r"write a pattern of names such as 'encoder\.norm1\.weight'"),
        ("norm|head", r"write 'norm\.\*\|head\.\*', or another pattern of names such as 'head\.weight'"),
    ],
)
def test_a_pattern_that_meets_no_parameter_is_told_of_with_names(pattern: str, do: str) -> None:
    names = ["encoder.norm1.weight", "encoder.norm1.bias", "head.weight"]
    said = rf"^no parameter of the model has a name like {re.escape(repr(pattern))}: {do}"
    [why] = Optimizer("AdamW", groups={pattern: {"lr": 1e-5}}).unmet(names, {})
    assert re.match(said, why), why


def test_a_pattern_counts_as_a_whole_and_by_itself() -> None:
    """One of its parts is enough, and so are frozen parameters and those that a group before takes."""
    patterns = ["head.*", "*.weight", "*.bias|head*", "encoder.*"]
    optimizer = Optimizer("AdamW", groups={pattern: {"lr": 1e-5} for pattern in patterns})
    assert list(optimizer.unmet(["head.weight", "encoder.weight"], {})) == []


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (
            "*.bias",
            "no parameter of the model has a name like '*.bias': write a pattern of names such as 'words.weight'",
        ),
        ("head.*", "'head.weight' is tied to 'words.weight': write that name in place of 'head.*'"),
        ("words.*", None),
    ],
)
def test_a_capture_tells_of_patterns_that_change_nothing(pattern: str, says: str | None) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["words"].weight
    model.forward = lambda x: model["head"](model["words"](x))  # type: ignore[method-assign]
    optimizer = Optimizer("SGD", groups={pattern: {"lr": 0.1}})
    data = [(torch.tensor(0), torch.zeros(4))] * 2
    with capture_logs() as logged:
        capture(Job(model=model, loss=F.mse_loss, data=data, optimizer=optimizer, batch_size=2, steps=1))
    told = [entry["why"] for entry in logged if entry["event"] == Event.GROUP_UNMET]
    assert [why[: len(says or "")] for why in told] == ([says] if says else [])


def test_muon_takes_matrices_and_says_what_to_do_with_others() -> None:
    named = {"body.weight": nn.Parameter(torch.ones(3, 2)), "body.bias": nn.Parameter(torch.ones(3))}
    with pytest.raises(UsageError, match='"class": "AdamW"'):
        Optimizer("Muon", lr=0.1).build(named)
    with pytest.raises(UsageError, match="LBFGS"):
        Optimizer("Muon", groups={"*.bias": {"class": "LBFGS"}})


def test_adafactor_over_several_types_wants_its_eps() -> None:
    """Without, the type of the first parameter decides for the others of its group, whichever stage holds them."""
    types = {"a.weight": torch.bfloat16, "b.weight": torch.float32}
    with pytest.raises(UsageError, match=r"one holds bfloat16 and float32; say .*eps="):
        Optimizer("Adafactor").check(types)
    with pytest.raises(UsageError, match=r"eps="):
        Optimizer("AdamW", lr=0.1, groups={"*": {"class": "Adafactor", "lr": 0.1}}).check(types)
    Optimizer("Adafactor", eps=(1e-7, 1e-3)).check(types)
    Optimizer("Adafactor", groups={"a.*": {"lr": 0.1}}).check(types)
    Optimizer("AdamW", lr=0.1).check(types)
    Optimizer("Adafactor").check(dict.fromkeys(types, torch.float32))


def test_adafactor_in_bf16_updates_masters_which_are_of_one_type() -> None:
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    data = [(torch.zeros(4), torch.zeros(4))] * 2
    job = Job(model=model, loss=F.mse_loss, data=data, optimizer=Optimizer("Adafactor"), batch_size=2, steps=1)
    with pytest.raises(UsageError, match="eps="):
        capture(job)
    layout = capture(replace(job, precision="bf16")).layout
    assert {dtype for dtype, _ in layout.values()} == {torch.float32}


def test_two_classes_update_as_two_optimizers_of_torch() -> None:
    """Patterns may be several; each class has its own options, and a schedule drives both."""
    optimizer = Optimizer("Muon", lr=0.1, momentum=0.8, groups={"*.bias|norm.*": {"class": "AdamW", "lr": 0.01}})
    optimizer = Optimizer.from_json(optimizer.to_json())

    def made() -> dict[str, nn.Parameter]:
        torch.manual_seed(0)
        sizes = {"norm.weight": (3,), "body.weight": (3, 2), "body.bias": (3,)}
        return {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}

    ours, theirs = made(), made()
    built = optimizer.build(ours)
    muon = torch.optim.Muon([theirs["body.weight"]], lr=0.1, momentum=0.8)
    adamw = torch.optim.AdamW([theirs["norm.weight"], theirs["body.bias"]], lr=0.01)
    schedule = Schedule("ExponentialLR", gamma=0.5).build(built)
    for _ in range(3):
        for name in ours:
            ours[name].grad = theirs[name].grad = torch.randn_like(ours[name])
        built.step()
        muon.step()
        adamw.step()
        schedule.step()
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] *= 0.5
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert [set(built.state[ours[n]]) for n in ("body.weight", "body.bias")] == [
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]


@pytest.mark.parametrize("data", [{}, {"name": "SGD"}, {"name": "SGD", "options": 3, "groups": []}, {"name": 1}])
def test_what_is_no_optimizer_on_the_wire_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Optimizer.from_json(data)


@pytest.mark.parametrize("groups", [["*.bias"], "*.bias", {"*.bias": 1e-3}])
def test_groups_that_are_no_options_by_pattern_are_refused(groups: Any) -> None:
    with pytest.raises(UsageError, match="options by a pattern of names"):
        Optimizer("AdamW", groups=groups)


OTHERS: dict[str, Any] = {"betas": (0.5, 0.75), "etas": (0.25, 2.0), "step_sizes": (1e-3, 0.0125), "beta2_decay": -0.5}
OTHERS |= {
    "eps": 0.5,
    "t0": 1,
    "d": 1.125,
    "ns_steps": 3,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "adjust_lr_fn": "match_rms_adamw",
}


def options_of_torch() -> Iterator[tuple[str, str, Any]]:
    """Each option of arithmetic that a class takes, and a value that is not its default."""
    for kind in sorted(PER_PARAMETER - {"AdamW8bit"}):
        for name, option in inspect.signature(getattr(torch.optim, kind)).parameters.items():
            if name not in ("params", "foreach", "fused", "capturable", "differentiable"):
                other = not option.default if isinstance(option.default, bool) else OTHERS.get(name, 0.25)
                yield kind, name, (0.5, 0.25) if (kind, name) == ("Adafactor", "eps") else other


def after_steps(optimizer: Optimizer) -> list[torch.Tensor]:
    """A matrix and what is kept of it."""
    torch.manual_seed(1)
    w = nn.Parameter(torch.randn(3, 2))
    built = optimizer.build({"w": w})
    for step in range(8):
        w.grad = torch.randn(3, 2) / (1 + step)
        built.step()
    return [w.detach(), *(kept for kept in built.state[w].values() if isinstance(kept, torch.Tensor))]


@pytest.mark.parametrize(("kind", "option", "value"), [*options_of_torch()])
def test_an_option_of_a_group_does_what_it_does_for_all(kind: str, option: str, value: Any) -> None:
    """Or is refused: torch reads the beginning of Adagrad's sums from what is said of all alone."""
    base: dict[str, Any] = {"momentum": 0.5} if kind == "SGD" else {}
    base |= {"weight_decay": 0.5} if option == "decoupled_weight_decay" else {}
    expected = after_steps(Optimizer(kind, **{**base, option: value}))
    assert not all(map(torch.equal, expected, after_steps(Optimizer(kind, **base))))
    for name, group in ((kind, {}), ("Adadelta" if kind == "SGD" else "SGD", {"class": kind})):
        groups = {"w": {**base, **group, option: value}}
        if option == "initial_accumulator_value":
            with pytest.raises(UsageError, match="of a group: say it of all"):
                Optimizer(name, groups=groups)
        else:
            assert all(map(torch.equal, expected, after_steps(Optimizer(name, groups=groups))))


def test_a_step_that_is_to_be_differentiated_is_refused() -> None:
    for options in ({"differentiable": True}, {"groups": {"*": {"differentiable": True}}}):
        with pytest.raises(UsageError, match=r"differentiable=True .*leave it out"):
            Optimizer("SGD", lr=0.1, **options)  # type: ignore[arg-type]


def test_what_only_graphs_of_a_gpu_need_is_refused_on_a_cpu() -> None:
    data = [(torch.ones(2), torch.ones(2))] * 4
    for options in ({"capturable": True}, {"groups": {"*": {"capturable": True}}}):
        optimizer = Optimizer("AdamW", lr=0.1, **options)  # type: ignore[arg-type]
        optimizer.check_device("cuda")
        with pytest.raises(UsageError, match=r"capturable=True .*leave it out"):
            optimizer.check_device("cpu")
        with pytest.raises(UsageError, match=r"capturable=True .*leave it out"):
            plain(Job(model=nn.Linear(2, 2), loss=F.mse_loss, data=data, optimizer=optimizer, batch_size=2, steps=1))
