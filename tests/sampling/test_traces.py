"""Looks before the first step leave the user's data as it was, and refuse what depends on who has read it before."""

from __future__ import annotations

import array
import copy
import functools
import itertools
import multiprocessing
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

import meshcee
from meshcee.capture import capture
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.sampling import leaving_nothing, repeats, unrepeatable
from meshcee.sampling.traces import Traces
from tests.mutation import changed

ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
WORDS = [(i * 7) % 11 for i in range(64)]
VOCABULARY: dict[int, int] = {}
TABLE: torch.Tensor | None = None
COUNT = 0


def begin_anew() -> None:
    global TABLE, COUNT
    TABLE, COUNT = None, 0
    Counting.reads = 0
    VOCABULARY.clear()
    noise.cache_clear()


@pytest.fixture(autouse=True)
def as_at_first() -> None:
    begin_anew()


class Of(Dataset[Any]):
    """A set whose samples are what `row` says of it and an index."""

    def __init__(self, row: Callable[[Any, int], torch.Tensor], **state: Any) -> None:
        self.row = row
        self.__dict__.update(state)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return self.row(self, i), ROWS[i]


def job_of(data: Any, **more: Any) -> Job:
    torch.manual_seed(0)
    optimizer = meshcee.Optimizer("SGD", lr=0.1)
    told = {"batch_size": 8, "micro_batch_size": 2, "steps": 3, "loss": nn.functional.mse_loss, "optimizer": optimizer}
    return Job(model=nn.Linear(4, 4), data=data, **told | more)  # type: ignore[arg-type]


# -- what depends on what was read before ------------------------------------------------------------------------------


def drawn_once(own: Any, i: int) -> Any:
    if i not in own.kept:
        own.kept[i] = torch.randn(4)
    return own.kept[i]


def drawn_once_and_again(own: Any, i: int) -> Any:
    return drawn_once(own, i) + random.random()


def numbered(own: Any, i: int) -> torch.Tensor:
    return torch.full((4,), float(own.kept.setdefault(WORDS[i], len(own.kept))))


def numbered_by_the_file(own: Any, i: int) -> torch.Tensor:
    return torch.full((4,), float(VOCABULARY.setdefault(WORDS[i], len(VOCABULARY))))


def of_a_table(own: Any, i: int) -> torch.Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.randn(64, 4)
    return TABLE[i]


def numbering(samples: list[Any]) -> Any:
    words = [VOCABULARY.setdefault(word, len(VOCABULARY)) for word, _ in samples]
    return torch.tensor(words).float()[:, None].expand(-1, 4), torch.stack([y for _, y in samples])


@functools.lru_cache
def noise(i: int) -> torch.Tensor:
    return torch.randn(4)


REFUSED: dict[str, Callable[[], Job]] = {
    "a draw that is kept": lambda: job_of(Of(drawn_once, kept={})),
    "a draw that is kept, and others": lambda: job_of(Of(drawn_once_and_again, kept={})),
    "the same in a part of a set": lambda: job_of(Subset(Of(drawn_once_and_again, kept={}), range(32))),
    "the same in one of two sets": lambda: job_of(ConcatDataset([Of(drawn_once_and_again, kept={})] * 2)),
    "a vocabulary": lambda: job_of(Of(numbered, kept={})),
    "a vocabulary that counts": lambda: job_of(Of(numbered, kept=Counter())),
    "a vocabulary of the file": lambda: job_of(Of(numbered_by_the_file)),
    "a vocabulary in collate": lambda: job_of([(word, y) for word, y in zip(WORDS, ROWS)], collate=numbering),
    "a table that the first read makes": lambda: job_of(Of(of_a_table)),
    "a cache of Python's": lambda: job_of(Of(lambda own, i: noise(i))),
    "a cache of Python's, and other draws": lambda: job_of(Of(lambda own, i: noise(i) + random.random())),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("what", REFUSED)
def test_data_that_depends_on_what_was_read_before_is_refused_each_time(what: str) -> None:
    """Each time: a refusal leaves nothing behind by which the next one would pass."""
    job = REFUSED[what]()
    capture(job)
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"no run could go on with (what it keeps|the same samples); .*(draw|draws)"
        ):
            unrepeatable(job)


def test_what_is_kept_and_is_the_same_whoever_reads_it_passes() -> None:
    data = Of(lambda own, i: own.kept.setdefault(i, ROWS[i] * 2), kept={})
    assert unrepeatable(job_of(data)) is None
    assert data.kept == {}


# -- what counts its reads ---------------------------------------------------------------------------------------------


def counted(own: Any, i: int) -> torch.Tensor:
    own.reads += 1
    return ROWS[i] * own.reads


def counted_by_the_file(own: Any, i: int) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return ROWS[i] * COUNT


class Counting(Of):
    reads = 0

    def __getitem__(self, i: int) -> Any:
        Counting.reads += 1
        return ROWS[i] * Counting.reads, ROWS[i]


def with_the_last(own: Any, i: int) -> torch.Tensor:
    own.last[:] = [*own.last[-1:], ROWS[i]]
    return sum(own.last, torch.zeros(4))


def counted_in_a_closure() -> Callable[[Any, int], torch.Tensor]:
    reads = 0

    def row(own: Any, i: int) -> torch.Tensor:
        nonlocal reads
        reads += 1
        return ROWS[i] * reads

    return row


def averaged(own: Any, i: int) -> torch.Tensor:
    own.mean.mul_(0.9).add_(ROWS[i], alpha=0.1)
    return ROWS[i] - own.mean


def adding(own: Any, i: int) -> torch.Tensor:
    own.sum += ROWS[i].numpy()
    return torch.from_numpy(own.sum.copy())


def counted_by(next_one: Callable[[], Any]) -> Callable[[Any, int], torch.Tensor]:
    return lambda own, i: ROWS[i] * float(next_one())


def one_more(held: Any, at: Any = 0) -> float:
    if isinstance(held, types.SimpleNamespace):
        held.value += 1
        return float(held.value)
    if isinstance(held, nn.BatchNorm1d):
        held(torch.ones(2, 4))
        return float(held.running_mean.sum())  # type: ignore[union-attr, operator]
    held[at] += 1
    return float(held[at])


def last_of(last: deque[torch.Tensor], i: int) -> torch.Tensor:
    last.append(ROWS[i])
    return sum(last, torch.zeros(4))


COUNTS: dict[str, Callable[[], Dataset[Any]]] = {
    "a number": lambda: Of(counted, reads=0),
    "a number of the file": lambda: Of(counted_by_the_file),
    "a number of the class": lambda: Counting(counted),
    "a number in a closure": lambda: Of(counted_in_a_closure()),
    "a list": lambda: Of(with_the_last, last=[]),
    "a queue": lambda: Of(lambda own, i: own.row_of(i), row_of=functools.partial(last_of, deque(maxlen=2))),
    "a tensor": lambda: Of(averaged, mean=torch.zeros(4)),
    "an array": lambda: Of(adding, sum=np.zeros(4, np.float32)),
    "a namespace": lambda: Of(counted_by(functools.partial(one_more, types.SimpleNamespace(value=0)))),
    "an array of Python's": lambda: Of(counted_by(functools.partial(one_more, array.array("d", [0])))),
    "a module's buffer": lambda: Of(counted_by(functools.partial(one_more, nn.BatchNorm1d(4)))),
    "a number that processes share": lambda: Of(
        counted_by(functools.partial(one_more, multiprocessing.Array("l", [0])))
    ),
    "a method of a generator": lambda: Of(counted_by(random.Random(0).random)),
    "random.Random": lambda: Of(lambda own, i: ROWS[i] * own.own.random(), own=random.Random(0)),
    "numpy's Generator": lambda: Of(lambda own, i: ROWS[i] * float(own.own.normal()), own=np.random.default_rng(0)),
    "numpy's RandomState": lambda: Of(lambda own, i: ROWS[i] * float(own.own.normal()), own=np.random.RandomState(0)),
    "torch's Generator": lambda: Of(
        lambda own, i: ROWS[i] + torch.randn(4, generator=own.own), own=torch.Generator().manual_seed(0)
    ),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("what", COUNTS)
def test_the_first_step_reads_what_a_plain_loop_reads_first(what: str) -> None:
    data = COUNTS[what]()
    first = [data[i][0] for i in (3, 1)]
    job = job_of(COUNTS[what]())
    begin_anew()
    capture(job)
    assert "another sample when it is read again" in str(unrepeatable(job))
    assert all(map(torch.equal, first, (job.data[i][0] for i in (3, 1))))


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", ["a number", "a list", "torch's Generator"])
def test_a_run_with_data_that_counts_its_reads_equals_the_plain_loop(what: str) -> None:
    """As long as no peer is lost."""
    job = job_of(COUNTS[what]())
    trained = meshcee.train(job, local=2)
    plain = meshcee.plain(replace(job, data=COUNTS[what]()))
    assert trained.losses == plain.losses
    assert all(torch.equal(plain.state_dict[name], tensor) for name, tensor in trained.state_dict.items())


ITERATORS: dict[str, tuple[Callable[[], Iterator[Any]], str]] = {
    "count": (lambda: itertools.count(1), "itertools.count"),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), "itertools.cycle"),
    "chain": (lambda: itertools.chain(range(99), range(999)), "itertools.chain"),
    "a generator": (lambda: (i for i in range(1, 10**6)), "generator"),
    "a generator that comes back": (lambda: iter_forever(), "generator"),
    "a list's": (lambda: iter([1] * 1000), "list_iterator"),
    "a range's": (lambda: iter(range(1000)), "range_iterator"),
    "zip": (lambda: map(sum, zip(range(1000), range(1000))), "map"),
}


def iter_forever() -> Iterator[int]:
    n = 0
    while True:
        n += 1
        yield n


@pytest.mark.parametrize("what", ITERATORS)
@pytest.mark.parametrize("place", ["data", "collate"])
def test_an_iterator_that_reads_move_on_is_refused_for_nothing_puts_it_back(what: str, place: str) -> None:
    make, name = ITERATORS[what]
    held = make()

    def collate(rows: list[Any]) -> Any:
        return torch.stack([x for x, _ in rows]) * next(held), torch.stack([y for _, y in rows])

    late = Of(lambda own, i: ROWS[i] * (1 if next(held) <= 10**9 else 2))  # no look sees a difference
    job = job_of(late) if place == "data" else job_of([(row, row) for row in ROWS], collate=collate)
    with pytest.raises(UsageError, match=rf"moves on an iterator that it holds \({name}\).*make their iterators"):
        unrepeatable(job)


def test_an_iterator_that_stays_where_it_is_is_no_obstacle() -> None:
    assert unrepeatable(job_of(Of(lambda own, i: ROWS[i], spare=itertools.count()))) is None


@functools.lru_cache
def looked_up(length: int) -> float:
    return float(length)


def drawing(y: torch.Tensor) -> float:
    return random.random() + 1


WEIGHTS: dict[str, Callable[[torch.Tensor], float]] = {
    "a count": lambda y: next(COUNTED),
    "a count that tells late": lambda y: 1.0 if one_more(HELD) < 10**9 else 2.0,
    "a draw": drawing,
}
COUNTED, HELD = itertools.count(1), types.SimpleNamespace(value=0)


@pytest.mark.parametrize("what", WEIGHTS)
def test_a_weight_that_does_not_follow_from_its_target_is_refused(what: str) -> None:
    with pytest.raises(UsageError, match=r"^Job\.weight keeps something .* let it follow from y alone$"):
        unrepeatable(job_of([(row, row) for row in ROWS], weight=WEIGHTS[what]))


def test_a_weight_may_fill_a_cache() -> None:
    assert unrepeatable(job_of([(row, row) for row in ROWS], weight=lambda y: looked_up(len(y)))) is None


@pytest.mark.parametrize("what", COUNTS)
def test_a_run_that_goes_on_says_that_what_data_keeps_begins_anew(what: str) -> None:
    with capture_logs() as logged:
        repeats(job_of(COUNTS[what]()), keeps=True, begins=5)
    assert [entry["log_level"] for entry in logged] == [
        "warning"
    ] * 2  # and that it is not the same when it is read again


def test_a_cache_that_data_fills_is_nothing_that_begins_anew() -> None:
    with capture_logs() as logged:
        assert repeats(job_of(Of(lambda own, i: own.kept.setdefault(i, ROWS[i] * 2), kept={})), keeps=True, begins=5)
    assert not logged


def test_without_being_put_back_another_number_is_read() -> None:
    job = job_of(COUNTS["a number"]())
    with changed(Traces, "kept.put_back()", "pass"):
        unrepeatable(job)
    assert not torch.equal(job.data[0][0], ROWS[0])


# -- anything ----------------------------------------------------------------------------------------------------------

trees = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


def containers(tree: Any) -> list[Any]:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tree, *(one for item in inner for one in containers(item))] if isinstance(tree, dict | list) else []


@given(trees, st.lists(st.tuples(st.integers(0, 20), trees), min_size=1, max_size=4))
def test_whatever_is_written_into_a_tree_is_put_back(tree: Any, writes: list[tuple[int, Any]]) -> None:
    data = Of(lambda own, i: ROWS[i], tree=tree)
    before = copy.deepcopy(tree)
    with leaving_nothing(job_of(data)):
        for at, value in writes:
            if found := containers(data.tree):
                container = found[at % len(found)]
                if isinstance(container, list):
                    container.insert(at % (len(container) + 1), value)
                else:
                    container[str(at)] = value
            else:
                data.tree = value
    assert data.tree == before


def test_what_nobody_has_written_is_not_touched() -> None:
    data = Of(counted, reads=0, table=np.zeros(4), last=[1], large=torch.zeros(1 << 20))
    traces = Traces(job_of(data))
    assert not traces.has_changed
    data.large += 1  # is passed over: a copy would take as much memory
    assert not traces.has_changed
    data.table[0] = 1
    assert traces.has_changed


def test_what_a_first_read_opens_or_loads_stays_open() -> None:
    """To open it again for each look would take minutes where a table is large."""

    def opened(own: Any, i: int) -> torch.Tensor:
        if own.file is None:
            own.file, own.table, own.words = open(__file__, "rb"), torch.zeros(1 << 20), {}  # noqa: SIM115
            own.made += 1
        own.words[i] = i
        return ROWS[i] + own.table[i]

    data = Of(opened, file=None, table=None, words=None, made=0)
    with leaving_nothing(job_of(data)):
        assert data[1][0].equal(ROWS[1])
    file = data.file
    assert (file.closed, data.table.numel(), data.words, data.made) == (False, 1 << 20, {1: 1}, 0)
    assert unrepeatable(job_of(data)) is None
    assert data.file is file
    file.close()


def test_a_large_table_that_a_first_read_draws_is_refused_as_a_small_one() -> None:
    def drawn(own: Any, i: int) -> Any:
        if own.table is None:
            own.table = torch.randn(1 << 20)
        return ROWS[i] + own.table[i] + random.random()

    with pytest.raises(UsageError, match="no run could go on with the same samples"):
        unrepeatable(job_of(Of(drawn, table=None)))
