"""Iterable sets: a step has the next samples of the stream, whoever asks, and however often."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.sampling import probes, repeats, source_of, unrepeatable
from meshcee.sampling.order import generators_put_back, seed_generators
from meshcee.sampling.stream import LOOKED_AT, MOST_STATES, OTHERS, READ_AGAIN, RECENT, UNUSED
from meshcee.sampling.threads import watched
from tests.rig.streams import Ahead, Counted, Plain, Shuffled, sample_of
from tests.rig.strides import ODD

BATCH, STEPS = 8, 40


def collate(rows: list[Any]) -> Any:
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["label"] for row in rows])


def job_of(data: Any, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": nn.Linear(8, 5),
        "loss": nn.functional.cross_entropy,
        "optimizer": Optimizer("SGD", lr=0.01),
        "collate": collate,
        "batch_size": BATCH,
        "steps": STEPS,
        "seed": 3,
    }
    return Job(data=data, **{**settings, **changes})


def expected(job: Job, steps: int) -> list[list[Any]]:
    """By the definition: samples in order under generators of their own, the incomplete last batch of a data epoch dropped."""
    found: list[list[Any]] = []
    with generators_put_back():
        for epoch in itertools.count():
            order = list(range(job.data.count))
            random.Random(epoch).shuffle(order)
            whole = len(order) // BATCH * BATCH
            for position in range(0, whole, BATCH):
                if len(found) == steps:
                    return found
                found.append([])
                for k in range(position, position + BATCH):
                    seed_generators(job.seed, epoch, k)
                    found[-1].append(sample_of(order[k]))
    raise AssertionError


def read_all(job: Job, steps: range) -> list[list[Any]]:
    source = source_of(job)
    return [source.samples(step, 0, BATCH) for step in steps]


@pytest.mark.parametrize("kind", [Plain, Counted])
def test_steps_have_the_samples_in_order_and_the_end_begins_the_next_data_epoch(kind: type[Plain]) -> None:
    job = job_of(kind())
    before = random.getstate(), torch.get_rng_state()
    assert read_all(job, range(STEPS)) == expected(job, STEPS)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert job.data.epoch == 0, "the user's own object was left alone"


@pytest.mark.parametrize("kind", [Plain, Counted, Shuffled])
def test_a_step_that_is_over_is_read_again_from_where_it_began(kind: type[Plain]) -> None:
    job, source = job_of(kind()), None
    with capture_logs():
        source = source_of(job)
        first = [source.samples(step, 0, BATCH) for step in range(30)]
        for step in (29, 3, 4, 17, 0, 29):
            assert source.samples(step, 0, BATCH) == first[step], step
        assert source.samples(17, 2, 5) == first[17][2:5]
        assert source_of(job).samples(20, 0, BATCH) == first[20], "steps between are left out"


@pytest.mark.parametrize("kind", [Plain, Counted, Shuffled])
def test_another_process_goes_on_by_the_state_of_a_checkpoint(kind: type[Plain]) -> None:
    with capture_logs() as logged:
        job = job_of(kind())
        source = source_of(job)
        first = [source.samples(step, 0, BATCH) for step in range(15)]
        state = json.loads(json.dumps(source.state(9)))
        later = job_of(kind())
        other = source_of(later)
        other.go_on(9, state)
        assert [other.samples(step, 0, BATCH) for step in range(9, 15)] == first[9:]
        assert other.samples(4, 0, BATCH) == first[4], "also what was before"
    told = {entry["event"] for entry in logged}
    assert told == {Plain: {READ_AGAIN}, Counted: set(), Shuffled: {READ_AGAIN, UNUSED}}[kind]


def test_what_iter_draws_itself_follows_from_the_seed_and_the_data_epoch() -> None:
    class Based(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            base = (
                random.randrange(1 << 40),
                int(torch.randint(1 << 40, ())),
            )  # as a DataLoader draws seeds of its processes
            return iter([(*base, i) for i in range(20)])

    found = [read_all(job_of(Based(), seed=seed), range(4)) for seed in (3, 3, 4)]
    assert found[0] == found[1]
    assert len({step[0][:2] for read in found for step in read}) == 4, "two data epochs of each of two seeds"


def test_a_set_with_a_state_goes_there_at_once_and_its_samples_are_not_read_again() -> None:
    reads = []
    for kind in (Plain, Counted):
        job = job_of(kind(1000), steps=1000)
        source = source_of(job)
        for step in range(RECENT + 100):
            source.samples(step, 0, BATCH)
        state = source.state(100)
        later = job_of(kind(1000))
        other = source_of(later)
        other.go_on(100, state)
        other.samples(100, 0, BATCH)
        reads.append(len(later.data.reads))
    assert reads[0] == 100 * BATCH + BATCH
    assert reads[1] <= 3 * LOOKED_AT + BATCH


@pytest.mark.parametrize("kind", [Plain, Counted])
def test_a_run_that_is_over_goes_on_behind_its_last_sample_when_it_gets_more_steps(kind: type[Plain]) -> None:
    source = source_of(job_of(kind(1000), steps=100))
    for step in range(100):
        source.samples(step, 0, BATCH)
    state = json.loads(json.dumps(source.state(100)))
    later = job_of(kind(1000), steps=110)
    other = source_of(later)
    other.go_on(100, state)
    with capture_logs() as logged:
        found = other.samples(100, 0, BATCH)
    assert found == source_of(job_of(kind(1000), steps=110)).samples(100, 0, BATCH)
    assert {entry["event"] for entry in logged} == ({READ_AGAIN} if kind is Plain else set())
    assert kind is Plain or len(later.data.reads) <= 3 * LOOKED_AT + BATCH


def test_a_state_that_is_no_plain_data_is_not_kept() -> None:
    class Odd(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "tensor": torch.zeros(1)}

    job = job_of(Odd())
    with capture_logs() as logged:
        source = source_of(job)
        source.samples(2, 0, BATCH)
    assert source.state(2)["state"] == ""
    assert source.state(2)["position"] == 2 * BATCH
    assert [entry["event"] for entry in logged] == [UNUSED]


def test_a_state_that_brings_back_other_samples_later_on_is_found_out_by_their_hash() -> None:
    """The first samples, on which a state is tried, come of a buffer that was filled once."""

    class Late(Counted):
        def __iter__(self) -> Iterator[Any]:
            read = self.begin()
            order = list(range(self.count))
            buffers = [order[:60], order[60:]] if read < 60 else [order[read:]]
            for number in [i for buffer in buffers for i in random.Random(7).sample(buffer, len(buffer))][read % 60 :]:
                self.advance()
                yield number

    with capture_logs() as logged:
        source = source_of(job_of(Late(200)))
        first = [source.samples(step, 0, BATCH) for step in range(15)]
        other = source_of(job_of(Late(200)))
        other.go_on(10, source.state(10))
        assert [other.samples(step, 0, BATCH) for step in range(10, 15)] == first[10:]
        assert [entry["event"] for entry in logged] == [OTHERS, READ_AGAIN]
        stopped = source.state(15)
        assert stopped["check"], "what comes next was read, so that its state can be held against it"


def test_a_set_that_is_another_one_when_a_run_goes_on_is_refused() -> None:
    source = source_of(job_of(Plain(50)))
    source.samples(4, 0, BATCH)
    for count, says in (
        (47, "does not give the samples of step 5 again"),
        (20, "ended after 20 samples, and 32 of them"),
    ):
        other = source_of(job_of(Plain(count)))
        other.go_on(4, source.state(4))
        with capture_logs(), pytest.raises(UsageError, match=says):
            other.samples(4, 0, BATCH)


def test_whoever_reads_beside_finds_the_same_samples() -> None:
    job = job_of(Plain())
    source = source_of(job)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda step: source.samples(step, 0, BATCH), [k // 4 for k in range(4 * 20)]))
    first = expected(job, 20)
    assert all(samples == first[k // 4] for k, samples in enumerate(found))


def test_what_a_read_raises_is_told_with_its_sample_and_line() -> None:
    class Broken(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield from itertools.islice(super().__iter__(), 30)
            raise ValueError("this one is broken")

    source = source_of(job_of(Broken()))
    with pytest.raises(
        UsageError, match=r"data, sample 31 of data epoch 1, failed at .*test_stream.py:\d+: ValueError: this one"
    ):
        source.samples(3, 0, BATCH)


def test_sets_that_are_too_short_or_empty_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ended after 5 samples in data epoch 1, fewer than batch_size=8"):
        source_of(job_of(Plain(5))).samples(0, 0, BATCH)
    with pytest.raises(UsageError, match="gives no samples"):
        repeats(job_of(Plain(0)), keeps=False)


def test_a_stream_that_is_never_the_same_is_found_before_the_start() -> None:
    class Unseeded(IterableDataset[Any]):
        chance = random.Random(5)

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield {"x": [self.chance.random()] * 8, "label": 0}

    with capture_logs() as logged:
        assert repeats(job_of(Plain()), keeps=True)
        assert logged == []
        assert not repeats(job_of(Unseeded()), keeps=True)
    assert len(logged) == 1


class CountsAtFirst(IterableDataset[Any]):
    """Another order in each data epoch, by a count of its own, as no plain loop needs set_epoch."""

    def __init__(self, count: int = 50) -> None:
        self.count, self.epoch = count, 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield from self.of_epoch(self.epoch)

    def of_epoch(self, epoch: int) -> Iterator[Any]:
        order = list(range(self.count))
        random.Random(epoch).shuffle(order)
        yield from map(sample_of, order)


class CountsAtLast(CountsAtFirst):
    def __iter__(self) -> Iterator[Any]:
        yield from self.of_epoch(self.epoch)
        self.epoch += 1


class CountsWithState(CountsAtLast):
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class CountsInAPart(CountsAtFirst):
    """What a part counts, copies share: it is the plain loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def __iter__(self) -> Iterator[Any]:
        self.seen[0] += 1
        yield from self.of_epoch(self.seen[0])


class Told(CountsAtFirst):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from self.of_epoch(self.epoch)


@pytest.mark.parametrize("data", [CountsAtFirst(), CountsAtFirst(10**9), CountsAtLast(), CountsWithState()])
def test_a_set_that_counts_its_data_epochs_is_refused(data: Any) -> None:
    if data.count > 1000:
        data.of_epoch = lambda epoch: (sample_of(number * epoch) for number in itertools.count(1))
    with pytest.raises(UsageError, match=r"iter\(data\) is called once more.*set_epoch\(epoch\) say"):
        unrepeatable(job_of(data))
    assert data.epoch == 0, "the user's own object was left alone"


def test_a_set_that_is_told_its_data_epoch_passes() -> None:
    assert unrepeatable(job_of(Told())) is None


def test_a_set_whose_part_counts_is_read_as_the_plain_loop_reads_it() -> None:
    unrepeatable(job := job_of(CountsInAPart()))
    rows = [row for step in read_all(job, range(12)) for row in step]
    own, plain = CountsInAPart(), []
    for _ in range(2):
        plain += list(own)[: 50 // BATCH * BATCH]
    assert [row["text"] for row in rows] == [row["text"] for row in plain]


def test_threads_that_draw_for_later_samples_are_found_before_the_start() -> None:
    """What a buffer has when it is full repeats, so its first samples are no sign."""
    assert "threads of its own" in (unrepeatable(job_of(Ahead(200))) or "")
    assert unrepeatable(job_of(Ahead(200, make=lambda number: {"x": [1.0] * 8, "label": 0}))) is None


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: random.shuffle([1, 2, 3]),
        lambda: random.uniform(0, 1),
        lambda: torch.randperm(3),
        lambda: torch.rand(2),
        lambda: torch.empty(2).normal_(),
        lambda: nn.functional.dropout(torch.ones(2)),
    ],
)
def test_whatever_a_thread_draws_by_is_found(draw: Callable[[], Any]) -> None:
    with watched() as drawers:
        reader = threading.Thread(target=lambda: [random.Random(3).random(), torch.ones(2).sum()])
        reader.start()
        reader.join()
        draw()  # not in a thread of the set
        assert not drawers.found
        drawer = threading.Thread(target=draw)
        drawer.start()
        drawer.join()
        assert drawers.found


def test_a_set_that_shuffles_its_order_and_reads_in_threads_repeats() -> None:
    class Pooled(Plain):
        def __iter__(self) -> Iterator[Any]:
            order = list(range(self.count))
            random.shuffle(order)
            with ThreadPoolExecutor(2) as pool:
                yield from pool.map(lambda number: {"x": [float(number)] * 8, "label": 0}, order)

    assert unrepeatable(job_of(Pooled(60))) is None


def test_threads_that_outlive_a_reading_are_found() -> None:
    class Lasting(Plain):
        pool = ThreadPoolExecutor(1)

        def __iter__(self) -> Iterator[Any]:
            yield from self.pool.map(self.make, range(self.count))

    job = job_of(Lasting(60))
    assert probes(job, 3)
    assert "threads of its own" in (unrepeatable(job) or "")
    Lasting.pool.shutdown()


def test_threads_that_only_read_are_no_sign() -> None:
    class Behind(Ahead):
        """Draws in the caller's thread what its samples are augmented by."""

        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                yield sample | {"x": [x + random.random() for x in sample["x"]]}

    assert unrepeatable(job_of(Behind(200, make=lambda number: {"x": [float(number)] * 8, "label": 0}))) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": iter([])}, "no iterator, which can be read once"),
        ({"data": (x for x in ())}, "no iterator, which can be read once"),
        ({"data": 3}, "map-style"),
        ({"sampler": torch.utils.data.SequentialSampler([1])}, "leave sampler out"),
        ({"workers": 2}, "StatefulDataLoader"),
        ({"data": DataLoader(Plain(), batch_size=4)}, "batch_size=None"),
        (
            {"data": DataLoader([(1, 2)] * 8, batch_size=4, shuffle=True)},
            "give data=loader.dataset, as Job batches by itself, and shuffles where it has no sampler",
        ),
        ({"eval_data": Plain()}, "eval_data must be map-style"),
    ],
)
def test_what_a_stream_cannot_have_is_refused_with_what_to_do(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        job_of(**{"data": Plain(), **changes})


def test_a_dataloader_without_batches_is_a_stream() -> None:
    job = job_of(DataLoader(Plain(), batch_size=None, collate_fn=dict))
    assert len(source_of(job).samples(1, 0, BATCH)) == BATCH


class Parted(IterableDataset[Any]):
    """Its place is in a part that shallow copies share."""

    def __init__(self, count: int = 50) -> None:
        self.count, self.part = count, {"read": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.part)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part.update(state)

    def __iter__(self) -> Iterator[Any]:
        while self.part["read"] < self.count:
            self.part["read"] += 1
            yield sample_of(self.part["read"] - 1)
        self.part["read"] = 0


@pytest.mark.parametrize("kind", [Plain, Counted, Shuffled, Parted])
def test_another_reader_of_the_set_does_not_move_a_stream(kind: type[Any]) -> None:
    with capture_logs():
        alone = read_all(job_of(kind()), range(12))
        other = job_of(kind(), seed=4)
        alone_4, first_4 = read_all(other, range(12)), [read for read, _ in probes(other, LOOKED_AT)]
        job = job_of(kind())
        same = replace(other, data=job.data)
        source, shared = source_of(job), source_of(same)
        for step in range(12):
            assert source.samples(step, 0, BATCH) == alone[step], step
            if step == 5:
                assert [read for read, _ in probes(same, LOOKED_AT)] == first_4
            if step > 8:
                assert shared.samples(step, 0, BATCH) == alone_4[step]


def test_a_stopped_run_goes_on_though_its_stream_is_never_the_same() -> None:
    class Unseeded(Plain):
        chance = random.Random(5)

        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": self.chance.random()} for _ in range(200)])

    source = source_of(job_of(Unseeded()))
    read_before = [source.samples(step, 0, BATCH) for step in range(5)]
    state = source.state(5)
    assert not state["check"]
    assert state["position"] == len(read_before) * BATCH
    other = source_of(job_of(Unseeded()))
    other.go_on(5, state)
    with capture_logs():
        assert len(other.samples(5, 0, BATCH)) == BATCH


def test_few_states_are_kept_and_some_are_near_however_far_back_a_step_is() -> None:
    job = job_of(Counted(4000), steps=400)
    source = source_of(job)
    first = [source.samples(step, 0, BATCH) for step in range(400)]
    assert sum(bool(source.state(step).get("state")) for step in range(400)) <= MOST_STATES + 1
    before = len(job.data.reads)
    assert source.samples(150, 0, BATCH) == first[150]
    assert len(job.data.reads) - before < 100 * BATCH


def test_a_step_is_a_batch_again_though_collate_changes_its_samples() -> None:
    def pops(rows: list[Any]) -> Any:
        ys = torch.tensor([row.pop("label") for row in rows])
        for row in rows:
            row["x"].insert(0, 0.0)
        return torch.tensor([row["x"] for row in rows]), ys

    job = job_of(Plain(), collate=pops)
    source = source_of(job)
    first, again = (source.batch(3, 0, BATCH) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert repeats(job, keeps=False)
    assert repeats(job, keeps=False), "what is looked at is kept, too"


class Strided(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((tensor, tensor) for tensor in itertools.islice(itertools.cycle(ODD.values()), 64))


def test_samples_of_one_element_or_none_are_told_apart_whatever_their_strides() -> None:
    source = source_of(job_of(Strided(), collate=None))
    first = source.samples(2, 0, BATCH)
    again = source.samples(2, 0, BATCH)
    assert all(a[0].shape == b[0].shape and torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))


def test_samples_in_memory_of_any_strides_are_the_same_when_they_are_read_again() -> None:
    odd = [tensor for tensor in ODD.values() if tensor.shape == (1,)]

    def strided(rows: list[Any]) -> Any:
        return odd[int(rows[0])], odd[int(rows[0])]

    assert repeats(job_of([i % len(odd) for i in range(64)], collate=strided), keeps=False)
