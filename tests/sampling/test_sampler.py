"""Orders of a user's own: torch's samplers and functions, the same from whatever step on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import meshcee
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.sampling import indices_of, leaving_nothing, order_digest, repeats, source_of
from meshcee.sampling import sampler as sampler_module
from meshcee.sampling.order import generators_put_back, seed_generators
from tests.rig.resident import holding

ROWS = [(torch.full((4,), float(i)), float(i)) for i in range(40)]
WEIGHTS = torch.linspace(0.1, 3.0, 40)


def job_of(sampler: Any, **changes: Any) -> Job:
    settings: dict[str, Any] = {"data": ROWS, "batch_size": 8, "steps": 100, "seed": 3}
    made = {"model": nn.Linear(4, 1), "loss": nn.functional.mse_loss, "optimizer": Optimizer("SGD", lr=0.01)}
    return Job(sampler=sampler, **{**made, **settings, **changes})


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(WEIGHTS, 40),
        WeightedRandomSampler(WEIGHTS, 30, replacement=False),
        SubsetRandomSampler(list(range(10, 31))),
        RandomSampler(ROWS),
        SequentialSampler(ROWS),
    ],
)
def test_a_sampler_of_torch_draws_as_it_does_and_each_data_epoch_anew(sampler: Sampler[int]) -> None:
    job = job_of(sampler)
    per_epoch = len(sampler) // 8  # type: ignore[arg-type]
    before = torch.get_rng_state()
    expected = []
    for epoch in range(3):
        with generators_put_back():
            seed_generators(job.seed, epoch, 0, "order")
            expected.append(list(sampler)[: per_epoch * 8])
    found = [[i for s in range(per_epoch) for i in indices_of(job, s + per_epoch * e)] for e in range(3)]
    assert found == expected
    assert (found[0] != found[1]) == (not isinstance(sampler, SequentialSampler))
    assert indices_of(job, 1) == expected[0][8:16], "any step again, and from whatever step on"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(type(i) is int for i in found[0])


def test_a_weighted_sampler_favours_what_weighs_more() -> None:
    weights = torch.ones(40)
    weights[7] = 40.0
    drawn = [i for step in range(100) for i in indices_of(job_of(WeightedRandomSampler(weights, 40)), step)]
    assert 0.4 < drawn.count(7) / len(drawn) < 0.6


def test_a_function_gives_the_order_of_each_data_epoch() -> None:
    asked = []

    def order(epoch: int, seed: int) -> Iterator[int]:
        asked.append((epoch, seed))
        return iter(np.random.default_rng([seed, epoch]).permutation(40)[:16])

    job = job_of(order)
    found = [indices_of(job, step) for step in range(4)]
    assert found[2] + found[3] == np.random.default_rng([3, 1]).permutation(40)[:16].tolist()
    assert asked == [(0, 3), (1, 3)], "once a data epoch"


def test_set_epoch_is_called_where_there_is_one() -> None:
    class Shifted(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(i + self.epoch) % 40 for i in range(8)])

    job = job_of(Shifted())
    assert [indices_of(job, step)[0] for step in (0, 5, 2, 0)] == [0, 5, 2, 0]


class Told:
    """Waits to be told its epoch; or derives it from an index, of which there are as many as all epochs have."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.ones(3) * (i // 8 + self.epoch), 0


def test_data_that_waits_for_its_epoch_is_warned_of_once_with_what_works() -> None:
    job = replace(job_of(lambda epoch, seed: range(epoch * 8, epoch * 8 + 8)), data=Told())
    with capture_logs() as logged:
        assert repeats(job, keeps=False)
    assert [entry["log_level"] for entry in logged] == ["warning"]
    epochs = [{int(x[0]) for x, _ in source_of(job).samples(step, 0, 8)} for step in range(5)]
    assert epochs == [{0}, {1}, {2}, {3}, {4}], "which is what the warning says to do"


class Restless(Sampler[int]):
    """Draws from a generator that goes on."""

    def __init__(self) -> None:
        self.chance = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter([self.chance.randrange(40) for _ in range(16)])


class Counting(Sampler[int]):
    """Another order in each data epoch, by a count of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_a_sampler_that_counts_its_data_epochs_is_refused_whoever_has_asked_it_before() -> None:
    job = job_of(Counting())
    with leaving_nothing(job):
        order_digest(job)
    with pytest.raises(UsageError, match=r"another order when it is asked again.* let set_epoch"):
        repeats(job, keeps=False)


def test_a_run_that_goes_on_tells_of_another_order_of_its_data_epoch_and_of_the_next() -> None:
    up, other = range(40), range(39, -1, -1)
    state = source_of(job_of(lambda epoch, seed: up, steps=20)).state(6)  # five steps are a data epoch
    assert state["data_epoch"] == 1
    for changed_at, said in ((1, 2), (2, 3)):
        job = job_of(lambda epoch, seed, first=changed_at: other if epoch == first else up, steps=20)
        with pytest.raises(UsageError, match=rf"gives another order in data epoch {said} here"):
            source_of(job).go_on(6, state)
    for same in (lambda epoch, seed: other if epoch == 3 else up, lambda epoch, seed: up):
        source_of(job_of(same, steps=20)).go_on(6, state)


def test_of_a_sampler_no_data_epoch_is_asked_that_the_job_does_not_come_to() -> None:
    orders = [range(40), range(40)]
    source = source_of(job_of(lambda epoch, seed: orders[epoch], steps=10))
    states = [source.state(step) for step in (0, 6, 10)]
    assert [bool(state["next"]) for state in states] == [True, False, False]
    source.go_on(10, states[2])


def broken(epoch: int, seed: int) -> list[int]:
    raise ValueError("no order today")


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (
            DistributedSampler(ROWS, num_replicas=2, rank=0),
            "DistributedSampler is not needed: the mesh splits every batch",
        ),
        (BatchSampler(SequentialSampler(ROWS), 8, True), "BatchSampler is not needed"),
        (RandomSampler(ROWS, generator=torch.Generator()), "leave `generator` out"),
        ([1, 2, 3], r"must be a torch.utils.data.Sampler, or a function"),
        (Restless(), "another order when it is asked again"),
        (lambda epoch, seed: range(5), "gives 5 samples in a data epoch, fewer than batch_size=8"),
        (lambda epoch, seed: range(41), "gives index 40, and data has 40 samples"),
        (lambda epoch, seed: [-1] * 8, "gives index -1"),
        (lambda epoch, seed: range(16 + epoch), "gives 17 samples in data epoch 2 and gave 16 in the first"),
        (lambda epoch, seed: [1.5] * 8, "the sampler, in data epoch 1, failed.*TypeError"),
        (broken, r"the sampler, in data epoch 1, failed at .*test_sampler.py:\d+: ValueError: no order today"),
    ],
)
def test_what_no_sampler_may_do_is_refused_with_what_to_do(sampler: Any, says: str) -> None:
    def run() -> None:
        job = job_of(sampler)
        repeats(job, keeps=False)
        indices_of(job, 3)

    with pytest.raises(UsageError, match=says):
        run()


def test_of_later_data_epochs_only_those_that_a_job_comes_to_are_looked_at() -> None:
    shrinks = lambda epoch, seed: range(40 - 8 * epoch)  # noqa: E731
    assert repeats(job_of(shrinks, steps=5), keeps=False)
    with pytest.raises(UsageError, match="gives 32 samples in data epoch 2"):
        repeats(job_of(shrinks, steps=6), keeps=False)


def test_a_sampler_that_has_changed_between_two_jobs_is_asked_again() -> None:
    """As in hard-example mining: a second job over the same sampler has the order of now."""
    now = list(range(40))
    rows = [(row, row[:1]) for row in torch.randn(40, 4)]
    job = job_of(lambda data_epoch, seed: list(now), data=rows, steps=3, micro_batch_size=4)
    before = meshcee.plain(job).losses
    now.reverse()
    after = meshcee.plain(job).losses
    assert after != before
    assert list(meshcee.train(job, local=1).losses) == after


def test_an_order_that_a_run_did_not_have_is_told_by_its_digest() -> None:
    digests = [
        order_digest(job_of(sampler)) for sampler in (None, SequentialSampler(ROWS), SequentialSampler(ROWS[:39]))
    ]
    assert digests[0] is None
    assert len({*digests}) == 3


def test_an_order_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "AT_LEAST", 100)
    job = job_of(lambda epoch, seed: itertools.cycle(range(40)))
    with pytest.raises(UsageError, match="does not end: it gives more than 2560 samples in a data epoch; let it end"):
        indices_of(job, 0)


class Many:
    """Samples of which none is there before it is read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, float]:
        return torch.full((4,), float(i)), float(i)


@pytest.mark.parametrize(
    ("count", "sampler"),
    [
        (1_000_000, None),
        (200_000, SubsetRandomSampler(range(200_000))),
        (200_000, lambda epoch, seed: np.random.default_rng([seed, epoch]).permutation(200_000)),
    ],
    ids=["by the seed", "a sampler of torch", "a function"],
)
def test_an_order_takes_four_bytes_a_sample_in_each_of_two_data_epochs(count: int, sampler: Any) -> None:
    """10 million samples were 0.44 GB of numbers of Python's."""
    source = source_of(job_of(sampler, data=Many(count)))
    with holding() as held_bytes:
        steps = (0, count // 8 - 1, count // 8, count // 8 + 1)
        seen = {float(y) for step in steps for _, y in source.samples(step, 0, 8)}
        assert 7 < held_bytes() / count < 9
    assert len(seen) > 24, "the second data epoch has another order"
