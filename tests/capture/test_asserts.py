"""Asserts on values train, and fail where the plain loop's do; where another answer need not raise, a branch is refused."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
from meshcee.capture import Capture, asserts, capture
from meshcee.capture.graph import resolve
from meshcee.errors import CaptureError, UsageError
from tests.capture import asserting
from tests.capture.asserting import Asserts, Then
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import breaks, changed


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "then",
    [
        *(asserting.is_finite, asserting.in_range, asserting.of_several, asserting.of_sums, asserting.reraises),
        asserting.is_named,
    ],
)
def test_a_model_that_asserts_trains_as_in_the_plain_loop(then: Then) -> None:
    assert difference(job_of(Asserts(then))) == ""


@pytest.mark.parametrize(
    "then",
    [
        asserting.swallows,
        asserting.two_are_needed,
        asserting.suppresses,
        asserting.swallows_at_last,
        asserting.returns_from_its_handler,
        asserting.asks_again,
        asserting.has_a_default,
        asserting.in_backward,
        asserting.any_of_several,
        asserting.one_of_several,
        asserting.one_is_enough,
        asserting.goes_on,
        asserting.rounds,
        asserting.is_used_besides,
        asserting.is_named_twice,
    ],
)
def test_a_branch_whose_other_side_may_go_on_is_refused(then: Then) -> None:
    with pytest.raises(
        CaptureError,
        match=r"cannot be captured.*(from the values of a tensor|__round__)|number that is read from a tensor|aten\.item\.default",
    ):
        capture(job_of(Asserts(then)))


def test_a_sample_at_which_an_assert_fails_is_named_with_its_line() -> None:
    data = [(torch.full((WIDTH,), 0.1 * k), torch.zeros(WIDTH)) for k in range(24)]
    data[19] = torch.full((WIDTH,), float("nan")), data[19][1]
    job = job_of(Asserts(asserting.is_finite), steps=4, data=data, sampler=lambda epoch, seed: range(24))
    with pytest.raises(
        UsageError, match=r"step 4: the model fails at .*assert not torch\.isnan.*data\[19\].*AssertionError"
    ):
        meshcee.train(job, local=1)


def test_an_assert_on_weights_that_move_names_its_line() -> None:
    """Here the weights are the first ones, with which it holds."""

    def stays_small(m: Any, h: torch.Tensor) -> torch.Tensor:
        return asserting.in_range(m, h) * asserting.weights_stay_small(m)

    job = job_of(Asserts(stays_small), steps=40)
    told = r"step \d+: an assert on values does not hold at .*asserting\.py.*with the weights.*data\["
    with pytest.raises(UsageError, match=told):
        meshcee.train(job, local=1)


# -- generated conditions

CONDITIONS = 3
SOURCE = """
import torch
from torch import nn

class Generated(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.on, self.off = nn.Linear(8, 8), True, False

    def forward(self, x):
        a, b, c = (x[:, k] for k in range(3))
        {statement}
        return self.last(x)
"""


def condition(rng: random.Random, depth: int = 2) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        name = rng.choice("abc")
        of_values = (
            f"({name} > 0).all()",
            f"bool(({name} > 0).all())",
            f"{name}.min().item() > 0",
            f"-2 < {name}.min() < 0",
        )
        return rng.choice([*of_values, "self.on", "self.off"])
    if kind < 0.5:
        return f"not ({condition(rng, depth - 1)})"
    parts = [condition(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    return f"({rng.choice([' and ', ' or ']).join(parts)})"


def module(folder: Path, seed: int) -> nn.Module:
    rng = random.Random(seed)
    asked = condition(rng)
    statement = rng.choice(
        [f"assert {asked}", f"if {asked}: raise ValueError", f"if {asked}:\n            raise ValueError"]
    )
    file = folder / f"generated{seed}.py"
    file.write_text(SOURCE.replace("{statement}", statement))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found: nn.Module = made.Generated()
    return found


def sample(signs: Sequence[bool]) -> torch.Tensor:
    return torch.tensor([1.0 if sign else -1.0 for sign in signs] + [0.5] * (WIDTH - CONDITIONS))


def fails(run: Callable[[], Any]) -> bool:
    try:
        run()
    except (AssertionError, ValueError):
        return True
    return False


def loss_of(found: Capture, x: torch.Tensor) -> None:
    """As a peer computes it."""
    given = {"x": x, "y": torch.zeros(2, WIDTH)}
    values: list[Any] = [
        given[i.name] if i.kind == "raw" else found.state.get(i.name, i.data) for i in found.train.inputs
    ]
    for node in found.train.nodes:
        args, kwargs = (resolve(value, values) for value in (list(node.args), dict(node.kwargs)))
        values.append(node.call(*args, **kwargs))


def check(folder: Path, seed: int) -> str:
    """Whether a generated condition is asked at no time, refused, or raises in the graph where it does in eager code."""
    model = module(folder, seed)
    every = [*itertools.product((False, True), repeat=CONDITIONS)]
    raises = {signs: fails(lambda s=signs: model(sample(s).repeat(2, 1))) for signs in every}  # type: ignore[misc]
    good = [signs for signs in every if not raises[signs]]
    if not good or len(good) == len(every):
        return "constant"
    try:
        found = capture(job_of(model, data=[(sample(good[0]), torch.zeros(WIDTH))] * 24))
    except CaptureError as error:
        if "from the values of a tensor" not in str(error):
            raise
        return "refused"
    for signs in every:
        assert fails(lambda s=signs: loss_of(found, sample(s).repeat(2, 1))) == raises[signs], signs  # type: ignore[misc]
    return "captured"


@pytest.mark.cases(12)
@pytest.mark.parametrize("seed", range(60))
def test_a_generated_condition_raises_where_it_does_in_eager_code_or_is_refused(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


def test_enough_of_the_generated_ones_are_captured(tmp_path: Path) -> None:
    found = [check(tmp_path, seed) for seed in range(14)]
    assert found.count("captured") >= 3
    assert "refused" in found


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("decides = want == isinstance(op, ast.And) or asked is values[-1]", "decides = True"),
        ("return side(operand, place, not want)", "return side(operand, place, want)"),
        ("return want if want or not chain else None", "return want"),
    ],
)
def test_without_its_line_a_generated_condition_breaks(tmp_path: Path, line: str, instead: str) -> None:
    with changed(asserts.side, line, instead):
        assert breaks(lambda: [check(tmp_path, seed) for seed in range(60)])
