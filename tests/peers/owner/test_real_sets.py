"""Sets of `datasets` and loaders of torchdata as `data`: trained as in the plain loop, and gone on with where a run was stopped.

The idea: tests/rig/streams.py stands in for these libraries everywhere else. This file says that they are like that. `make newest`
has both.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import get_worker_info

from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.sampling import repeats
from meshcee.sampling.order import generators_put_back, seed_generators
from meshcee.sampling.stream import READ_AGAIN, UNUSED
from tests.peers.owner.test_sources import MICRO, assert_is, job_of, run, struck, texts, words_of
from tests.rig.mesh_fixture import train
from tests.rig.streams import Counted, sample_of

pytestmark = [pytest.mark.usefixtures("quick_planning"), pytest.mark.filterwarnings("ignore")]  # of the libraries

ROWS = 1000  # more than a run reads
FEW = 8  # steps


@pytest.fixture(name="hub")
def _hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    library = pytest.importorskip("datasets", reason="the data extra is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    return library


def rows(count: int) -> list[dict[str, Any]]:
    """The same each time."""
    with generators_put_back():
        seed_generators(0, 0, 0)
        return [sample_of(number) for number in range(count)]


def augmented(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"x": [one + random.random() / 10 + float(torch.randn(())) / 10 for one in row["x"]]}


def lines(hub: Any, folder: Path) -> Any:
    """A file of JSON lines, read as it is needed."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(ROWS)))
    return hub.load_dataset(
        "json", data_files=str(file), split="train", streaming=True, cache_dir=str(folder / "cache")
    )


def streamed(hub: Any, folder: Path) -> Any:
    return lines(hub, folder).map(augmented)


def shuffled(hub: Any, folder: Path) -> Any:
    """In this order: what stands before `shuffle` is read ahead by a thread, whose draws nobody can seed."""
    return lines(hub, folder).shuffle(seed=5, buffer_size=50).map(augmented)


def of_columns(hub: Any, folder: Path) -> Any:
    """A table in memory, whose rows are dicts of columns."""
    return hub.Dataset.from_list(texts())


def transformed(hub: Any, folder: Path) -> Any:
    """One that draws when it is read."""
    table = hub.Dataset.from_list(rows(96))
    return table.with_transform(lambda rows: rows | {"x": [augmented({"x": x})["x"] for x in rows["x"]]})


async def stopped_and_gone_on_with(tmp_path: Path, job: Any) -> list[str]:
    """What was logged by the owner that goes on; `job()` makes the job anew, as another process would."""
    home = Home(tmp_path / "home")
    await run(home, job(), until=11)
    with capture_logs() as logged:
        assert_is(await run(home, job(), resume="last"), job())
    return [entry["event"] for entry in logged]


async def test_a_stream_of_datasets_goes_on_by_its_own_state(hub: Any, tmp_path: Path) -> None:
    def job() -> Job:
        return job_of(data=streamed(hub, tmp_path))

    assert_is(await train(job(), 3, MICRO), job())
    assert not {READ_AGAIN, UNUSED} & {*await stopped_and_gone_on_with(tmp_path, job)}


async def test_a_stream_of_datasets_outlives_a_member(hub: Any, tmp_path: Path) -> None:
    assert_is(
        await struck(job_of(data=streamed(hub, tmp_path)), Home(tmp_path / "home")),
        job_of(data=streamed(hub, tmp_path)),
    )


async def test_a_shuffle_buffer_of_datasets_is_read_again(hub: Any, tmp_path: Path) -> None:
    assert READ_AGAIN in await stopped_and_gone_on_with(tmp_path, lambda: job_of(data=shuffled(hub, tmp_path)))


async def test_what_draws_before_a_shuffle_is_told_of_and_kept(hub: Any, tmp_path: Path) -> None:
    """Its first samples repeat, as a buffer is full before they come; what is drawn meanwhile is a matter of threads."""

    def job() -> Job:
        table = hub.Dataset.from_list(rows(ROWS)).to_iterable_dataset(num_shards=4)
        return job_of(data=table.map(augmented).shuffle(seed=5, buffer_size=50))

    assert not repeats(job(), keeps=False)
    assert repeats(job_of(data=shuffled(hub, tmp_path)), keeps=False)
    result = await struck(job(), Home(tmp_path / "home"))
    assert len(result.losses) == job().steps


@pytest.mark.parametrize("make", [of_columns, transformed])
async def test_a_table_of_datasets_trains_and_goes_on(hub: Any, tmp_path: Path, make: Any) -> None:
    """Columns of dicts by `collate`, padded to each micro-batch; and rows that are drawn when they are read."""

    def job() -> Job:
        data = make(hub, tmp_path)
        return words_of(data=data) if make is of_columns else job_of(data=data)

    assert_is(await train(job(), 3, MICRO), job())
    assert READ_AGAIN not in await stopped_and_gone_on_with(tmp_path, job)


def loader(data: Any, **options: Any) -> Any:
    library = pytest.importorskip("torchdata.stateful_dataloader", reason="the data extra is not installed")
    return library.StatefulDataLoader(data, batch_size=None, **options)


async def test_a_loader_of_torchdata_goes_on_by_its_own_state(tmp_path: Path) -> None:
    def job() -> Job:
        return job_of(data=loader(Counted(ROWS)))

    assert_is(await train(job(), 3, MICRO), job())
    assert not {READ_AGAIN, UNUSED} & {*await stopped_and_gone_on_with(tmp_path, job)}


class Halved(Counted):
    """Each of two processes has every other row, and knows where it is."""

    def begin(self) -> int:
        worker = get_worker_info()
        self.first = 0 if worker is None else worker.id
        return super().begin()

    def __iter__(self) -> Iterator[Any]:
        for k, sample in enumerate(super().__iter__(), start=self.begin()):
            if k % 2 == self.first:
                yield sample


def as_it_is(number: int) -> dict[str, Any]:
    """Without chance: the state of a loader does not hold the generators of its processes."""
    return {"x": [number / 100 + k / 10 for k in range(8)], "text": f"number {number}", "label": number % 5}


@pytest.mark.slow
@pytest.mark.timeout(900)  # the loader starts its processes many times over, and each imports torch
async def test_a_loader_with_processes_of_its_own_trains_and_goes_on(tmp_path: Path) -> None:
    """By its own state, in which each process has a part: nothing is read again."""

    def job() -> Job:
        data = loader(Halved(ROWS, as_it_is), num_workers=2, multiprocessing_context="spawn")
        return job_of(data=data, steps=FEW)

    home = Home(tmp_path / "home")
    await run(home, job(), until=5)
    with capture_logs() as logged:
        assert_is(await run(home, job(), resume="last"), job())
    assert not {READ_AGAIN, UNUSED} & {entry["event"] for entry in logged}


def test_a_loader_that_shuffles_is_told_of() -> None:
    """Its order comes of a generator of its own, so nobody can seed it. Rows are given as they are: a Job shuffles them."""
    assert not repeats(job_of(data=loader(rows(96), shuffle=True)), keeps=False)
