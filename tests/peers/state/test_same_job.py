"""Whether a run may go on with a job: where a function, the loss or the schedule has changed, its numbers would be others."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshcee.capture import capture
from meshcee.errors import UsageError, unwrap
from meshcee.files.home import Home
from meshcee.job import At, Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.sampling.again import check_samples, sample_digests
from peers.state.checkpoint import check_same, description
from tests.peers.state import test_first_weights

ROOT = Path(__file__).resolve().parents[3]
ROWS = [(row, row.sum(0, keepdim=True)) for row in torch.randn(32, 8, generator=torch.Generator().manual_seed(0))]


def half(step: int) -> float:
    return 0.5**step


def job_of(
    act: nn.Module | None = None, dropout: float = 0.1, factor: float = 0.9, late: float = 0.9, **options: Any
) -> Job:
    """The rates fall by `factor`, and in the run's second half by `late`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), act or nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    return Job(
        **{
            "model": model,
            "loss": F.mse_loss,
            "data": ROWS,
            "optimizer": Optimizer("SGD", lr=0.1),
            "schedule": Schedule("LambdaLR", lr_lambda=lambda step: (factor if step < 12 else late) ** step),
            "batch_size": 8,
            "steps": 20,
            **options,
        }
    )


def checked(job: Job) -> None:
    first = job_of()
    check_same(job, capture(job), description(first, capture(first)), 4)


def test_what_differs_is_told_as_its_user_wrote_it() -> None:
    first = job_of(schedule=Schedule("StepLR", step_size=3))
    described = description(first, capture(first))
    told = [
        (
            Schedule("StepLR", step_size=4),
            first.optimizer,
            r"schedule StepLR\(step_size=3\), the job says StepLR\(step_size=4\):",
        ),
        (None, first.optimizer, r"schedule StepLR\(step_size=3\), the job says None:"),
        (first.schedule, Optimizer("SGD", lr=0.2), r"optimizer SGD\(lr=0.1\), the job says SGD\(lr=0.2\):"),
    ]
    for schedule, optimizer, what in told:
        other = job_of(schedule=schedule, optimizer=optimizer)
        with pytest.raises(UsageError, match=what):
            check_same(other, capture(other), described, 4)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"act": nn.ReLU()}, "another computation"),
        ({"dropout": 0.5}, "another computation"),
        ({"loss": F.l1_loss}, "another computation"),
        ({"factor": 0.5}, "another schedule"),
        ({"schedule": Schedule("LambdaLR", lr_lambda=half)}, "schedule"),
        ({"weight": len}, r"another Job\.weight"),
    ],
)
def test_a_changed_function_is_found(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"the run was made with {what}"):
        checked(job_of(**changed))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "changed", [{}, {"steps": 40}, {"recompute": True}, {"checkpoint_every": 3}, {"eval_data": ROWS}]
)
def test_what_changes_no_number_of_a_step_may_change(changed: dict[str, Any]) -> None:
    checked(job_of(**changed))


def test_a_run_that_ended_early_may_get_more_steps() -> None:
    """It says nothing of rates in steps that it did not have."""
    short = job_of(steps=2)
    check_same(job_of(steps=20), capture(job_of()), description(short, capture(short)), 4)
    with pytest.raises(UsageError, match="another schedule"):
        check_same(job_of(steps=20, factor=0.5), capture(job_of()), description(short, capture(short)), 4)


def test_another_schedule_with_the_rates_that_a_run_had_may_go_on() -> None:
    """Whatever its name says; one with another rate in a step of the run may not."""
    short = job_of(schedule=Schedule("LinearWithWarmup", warmup=1, steps=4), steps=4)
    described = description(short, captured := capture(short))
    rates = [0.0, 1.0, 2 / 3, 1 / 3, *[0.5] * 8]
    longer = job_of(schedule=Schedule("LambdaLR", lr_lambda=rates.__getitem__), steps=8)
    check_same(longer, captured, described, 4)
    rates[3] = 0.25
    for schedule in (
        Schedule("LambdaLR", lr_lambda=rates.copy().__getitem__),
        Schedule("LinearWithWarmup", warmup=1, steps=8),
    ):
        with pytest.raises(UsageError, match="the run was made with schedule LinearWithWarmup"):
            check_same(job_of(schedule=schedule, steps=8), captured, described, 4)


def test_rates_of_the_second_half_are_compared_and_cost_a_long_run_nothing() -> None:
    with pytest.raises(UsageError, match="another schedule"):
        checked(job_of(late=0.5))
    asked: list[int] = []
    long = Schedule("LambdaLR", lr_lambda=lambda step: asked.append(step) or 1.0)  # type: ignore[func-returns-value]
    job = job_of(schedule=long, steps=1_000_000)
    described = description(job, captured := capture(job))
    assert max(asked) > 500_000
    asked.clear()
    assert description(job, captured) == described
    assert len(asked) < 100, "all of them are asked for once"
    asked.clear()
    long = Schedule("MultiplicativeLR", lr_lambda=lambda step: asked.append(step) or 1.0)  # type: ignore[func-returns-value]
    description(job := job_of(schedule=long, steps=1_000_000), captured)
    asked.clear()
    description(job, captured)
    assert max(asked) == len(asked) == 256, "its rates follow from those before"


@pytest.mark.parametrize("name", ["LambdaLR", "MultiplicativeLR"])
def test_every_rate_is_compared_by_runs_of_any_length(name: str) -> None:
    def job(odd: int, steps: int) -> Job:
        return job_of(schedule=Schedule(name, lr_lambda=lambda step: 0.5 if step == odd else 1.0), steps=steps)

    captured = capture(job(0, 4))
    for of_run, of_job, odd in itertools.product((20, 300), (20, 300), (6, 19, 260, 299)):
        described = description(job(400, of_run), captured)
        check_same(job(max(of_run, of_job) - 1, of_job), captured, described, 4) if of_run != of_job else None
        if odd < min(of_run, of_job) * 8 // 9 or odd < of_run <= of_job:
            with pytest.raises(UsageError, match="another schedule"):
                check_same(job(odd, of_job), captured, described, 4)


def test_a_run_of_an_older_version_has_the_first_three_rates() -> None:
    job = job_of()
    older = description(job, capture(job))
    older["rates"] = older["rates"][:3]
    check_same(job, capture(job), older, 4)
    with pytest.raises(UsageError, match="another schedule"):
        check_same(job_of(factor=0.5), capture(job), older, 4)


def test_a_run_of_an_older_version_says_nothing_of_functions() -> None:
    job = job_of()
    older = {k: v for k, v in description(job, capture(job)).items() if k not in ("computation", "rates")}
    other = job_of(nn.ReLU())
    check_same(other, capture(other), older, 4)


@pytest.mark.slow
def test_another_process_finds_the_same_computation() -> None:
    """Whatever order its sets have."""
    code = (
        "from tests.peers.state.test_same_job import *; j = job_of(); print(description(j, capture(j))['computation'])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(found) == 1


def drawn(seed: int, rows: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As a job's file draws them, which seeds nothing: the process has another seed each time."""
    return [
        (row, row.sum(0, keepdim=True)) for row in torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    ]


def changed(at: int, how: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(how(x) if i == at else x, y) for i, (x, y) in enumerate(ROWS)]


class Again:
    """Rows whose first number counts the reads."""

    def __init__(self) -> None:
        self._reads = -1

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ROWS[i]
        self._reads += 1
        return torch.cat([torch.tensor([float(self._reads)]), x[1:]]), y


class Noisy:
    """Rows under noise from torch's generator, which every read seeds."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ROWS[i][0] + self._scale * torch.randn(8), ROWS[i][1]


@pytest.mark.parametrize(
    ("data", "index"),
    [
        (drawn(1), 0),
        (changed(16, lambda x: x + 1e-6), 16),
        (changed(30, lambda x: x.double()), 30),
        (changed(0, lambda x: x.reshape(2, 4)), 0),
        (Noisy(), 0),
    ],
)
def test_other_samples_are_found(data: Any, index: int) -> None:
    own = sample_digests(job_of(data=data))
    with pytest.raises(UsageError, match=rf"other samples: data\[{index}\] is .* seeded .*start a new run"):
        check_samples(own, sample_digests(job_of()))
    check_samples(own, sample_digests(job_of(data=data)))
    check_samples(own, {})  # a run of an older version


def test_data_that_is_read_elsewhere_or_in_order_has_no_samples_to_compare() -> None:
    assert not sample_digests(job_of(data=At("hospital", "scans", like=ROWS[0], samples=32)))

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ROWS

    assert not sample_digests(job_of(data=Stream()))


def test_few_rows_and_what_collate_makes_of_them_are_compared() -> None:
    assert set(sample_digests(job_of(data=drawn(0, 8), batch_size=8))) == {"0", "4", "7"}
    assert set(sample_digests(job_of(data=drawn(0, 1), batch_size=1))) == {"0"}
    halved = job_of(collate=lambda rows: (torch.stack([x / 2 for x, _ in rows]), torch.stack([y for _, y in rows])))
    with pytest.raises(UsageError, match="other samples"):
        check_samples(sample_digests(halved), sample_digests(job_of()))


def flipped(rows: list[Any]) -> Any:
    """What one sample alone does not show."""
    return torch.stack([x for x, _ in reversed(rows)]), torch.stack([y for _, y in rows])


def plain(rows: list[Any]) -> Any:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def positive(y: torch.Tensor) -> torch.Tensor:
    return (y > 0).sum()


def test_what_is_made_of_several_samples_is_compared() -> None:
    with pytest.raises(UsageError, match=r"another Job\.collate, which gives something else for the same samples"):
        check_samples(sample_digests(job_of(collate=flipped)), sample_digests(job_of(collate=plain)))
    with pytest.raises(UsageError, match=r"another Job\.weight, which gives something else"):
        check_samples(sample_digests(job_of(weight=positive)), sample_digests(job_of(weight=len)))
    for options in ({"collate": flipped}, {"weight": positive}, {"collate": plain, "weight": len}):
        run = sample_digests(job_of(**options))
        check_samples(sample_digests(job_of(micro_batch_size=2, **options)), run)  # as a plan may have chosen


async def trained(home: Home, data: Any, until: int | None = None, resume: str | None = None) -> list[float]:
    """Masks depend on how a batch is divided, so the division is given."""
    options: dict[str, Any] = {"steps": 4, "micro_batch_size": 4, "checkpoint_every": 1}
    job = job_of(data=data, schedule=None, adapt=False, verify=False, **options)
    try:
        return await test_first_weights.trained(job, home, until=until, resume=resume)
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


@pytest.mark.slow
async def test_a_run_goes_on_with_its_own_samples_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    await trained(home, drawn(1), until=2)
    with pytest.raises(UsageError, match=r"other samples: data\[0\]"):
        await trained(home, drawn(2), resume="last")
    with pytest.raises(UsageError, match=r"other samples: data\[0\]"):
        await trained(home, Again(), resume="last")  # that it repeats no more is no excuse
    with pytest.raises(UsageError, match="run was made with samples 32, the job says 40"):
        await trained(home, drawn(1, 40), resume="last")
    assert await trained(home, drawn(1), resume="last") == await trained(Home(tmp_path / "whole"), drawn(1))


@pytest.mark.slow
@pytest.mark.parametrize("data", [Again, Noisy])
async def test_a_run_whose_samples_are_drawn_at_each_read_goes_on(tmp_path: Path, data: Callable[[], Any]) -> None:
    """Where they are others at each read, the run keeps what it feeds; else every read draws the same."""
    home = Home(tmp_path)
    await trained(home, data(), until=2)
    assert len(await trained(home, data(), resume="last")) == 4
