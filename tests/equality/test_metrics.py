"""A metric that cannot work is told of before the first step; one that may work on a trained model trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import meshcee
from meshcee.equality import metrics
from meshcee.errors import UsageError
from tests.mutation import breaks, changed

HERE = r"test_metrics\.py:\d+"
SAMPLES = [(torch.full((4,), float(i)), i % 3) for i in range(16)]


class Scores(NamedTuple):
    logits: torch.Tensor
    temperature: float


class Own:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Net(nn.Module):
    def __init__(self, returns: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.returns = nn.Linear(4, 4), nn.Linear(4, 3), returns

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(self.b(self.a(x).tanh()))


def accuracy(output: Any, target: torch.Tensor) -> float:
    return float(((output.logits / 2.0).argmax(-1) == target).float().mean())


def job_of(metric: Callable[[Any, Any], float], returns: Callable[[torch.Tensor], Any]) -> meshcee.Job:
    return meshcee.Job(
        model=Net(returns),
        loss=lambda output, y: nn.functional.cross_entropy(output.logits, y),
        data=SAMPLES,
        optimizer=meshcee.Optimizer("SGD", lr=0.1),
        batch_size=4,
        micro_batch_size=4,
        steps=2,
        eval_data=SAMPLES[:6],
        metrics={"mine": metric},
        adapt=False,
    )


def scores(logits: torch.Tensor) -> Scores:
    return Scores(logits, 2.0)


def test_a_metric_gets_a_named_tuple_with_its_constants() -> None:
    result = meshcee.train(job_of(lambda out, y: accuracy(out, y) + out.temperature, scores), local=2)
    assert 2.0 <= result.metrics[-1][1]["mine"] <= 3.0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("metric", "returns", "says"),
    [
        (
            accuracy,
            Own,
            rf"metric 'mine' failed at .*{HERE}: AttributeError: forward returns a Own, and what comes back",
        ),
        (lambda out, y: out["logits"], scores, rf"metric 'mine' failed at .*{HERE}: TypeError: tuple indices"),
        (
            lambda out, y: out.logits,
            scores,
            r"metric 'mine' returns a Tensor of shape \(4, 3\), and shall return one number",
        ),
    ],
)
def test_a_metric_that_cannot_read_the_output_is_told_of_before_the_first_step(
    metric: Callable[[Any, Any], float], returns: Callable[[torch.Tensor], Any], says: str
) -> None:
    told: list[Any] = []
    with pytest.raises(UsageError, match=says):
        meshcee.train(job_of(metric, returns), local=2, on_report=told.append)
    assert told == []
    with pytest.raises(UsageError, match=says):
        meshcee.check(job_of(metric, returns), stages=(1,), steps=1)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ((torch.zeros(4, dtype=torch.float64), 0), "micro-batch 3: x is float64 .*: give eval_data the types of data"),
        (
            (torch.zeros(5), 0),
            r"micro-batch 3: x is float32 \(.*5\).*: begin data with such a sample, or pad eval_data",
        ),
    ],
)
def test_held_out_samples_that_the_graph_does_not_hold_for_are_told_of_before_the_first_step(
    odd: Any, says: str
) -> None:
    """Also without metrics: a run ended at its first evaluation."""
    told: list[Any] = []
    job = replace(job_of(lambda out, y: 0.0, scores), metrics={}, eval_data=[*SAMPLES[:8], odd], eval_every=1)
    with pytest.raises(UsageError, match=f"^eval_data, {says}"):
        meshcee.train(job, local=1, on_report=told.append)
    assert told == []


class Counts:
    """A metric that keeps what it is given, and divides by what an untrained model may not have."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Any, target: Any) -> float:
        self.calls += 1
        return 1.0 if self.calls > 1 else 1 / 0


def test_an_error_of_values_is_told_and_the_metric_is_as_it_was() -> None:
    metric = Counts()
    checked = meshcee.check(job_of(metric, scores), stages=(1,), steps=1)
    assert checked.equal
    assert metric.calls == 0
    assert any(
        "before training, metric 'mine' failed" in note and "ZeroDivisionError" in note for note in checked.notes
    )


def test_the_generators_are_as_they_were() -> None:
    def noisy(output: Any, target: Any) -> float:
        return float(torch.rand(()))

    torch.manual_seed(3)
    before = torch.get_rng_state()
    meshcee.check(job_of(noisy, scores), stages=(1,), steps=1)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    meshcee.check(job_of(lambda out, y: 0.0, scores), stages=(1,), steps=1)
    assert torch.equal(state, torch.get_rng_state())
    assert before.numel() == state.numel()


def test_without_the_look_the_error_comes_after_steps() -> None:
    def story() -> None:
        test_a_metric_that_cannot_read_the_output_is_told_of_before_the_first_step(accuracy, Own, "mine")

    with changed(metrics, "in job.metrics.items()", "in ()"):
        assert breaks(story)
