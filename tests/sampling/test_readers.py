"""Processes that read ahead give the samples that this one would read; whatever fails there is told in words."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.sampling import draw, inputs_of, source_of
from meshcee.sampling.readers import Readers
from meshcee.user_code import JOB_FILE, import_job_file

MICRO = 4


class Augmented:
    """Draws from all three generators; reading sample `bad` fails, sample `deadly` ends its process."""

    def __init__(self, bad: int = -1, deadly: int = -1) -> None:
        self.bad, self.deadly, self.owner = bad, deadly, os.getpid()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if i == self.bad:
            raise ValueError("this one is broken")
        if i == self.deadly and os.getpid() != self.owner:
            os._exit(3)
        x = torch.randn(6) + i + random.random() + np.random.normal()
        return x, x.sum(0, keepdim=True)


def together(rows: list[Any]) -> Any:
    x = torch.stack([x for x, _ in rows]) + torch.rand(len(rows), 1)
    return {"x": x, "scale": random.random() * torch.ones(len(rows))}, torch.stack([y for _, y in rows])


def backwards(epoch: int, seed: int) -> Any:
    return reversed(range(48))


def job_of(data: Any, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        "loss": nn.functional.mse_loss,
        "optimizer": Optimizer("SGD", lr=0.01),
        "batch_size": 8,
        "micro_batch_size": MICRO,
        "steps": 12,
        "seed": 3,
        "workers": 2,
    }
    return Job(data=data, **{**settings, **changes})


@contextmanager
def readers_of(job: Job) -> Iterator[Readers]:
    readers = Readers(job)
    try:
        yield readers
    finally:
        readers.close()


def read_here(job: Job, step: int) -> list[Any]:
    return [source_of(job).batch(step, i, i + MICRO) for i in range(0, job.batch_size, MICRO)]


def same(found: Any, expected: Any) -> bool:
    pairs = [(inputs_of(one), inputs_of(other)) for one, other in zip(found, expected, strict=True)]
    return all(one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one) for one, other in pairs)


@pytest.mark.slow
def test_samples_are_those_that_this_process_would_read_from_whatever_step_on() -> None:
    job = job_of(Augmented(), collate=together, sampler=backwards)
    before = torch.get_rng_state()
    with readers_of(job) as readers:
        for step in (4, 5, 6):
            assert same(readers.take(step, MICRO), read_here(job, step))
        assert readers.take(5, MICRO) is None, "it is over"
        assert same(readers.take(9, MICRO), read_here(job, 9)), "steps between are left out"
        reading = [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
        assert len(reading) == job.workers
    _, living = psutil.wait_procs(reading, 20)
    assert living == []
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn from this process's generator"


class Slow(Augmented):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.05)
        return super().__getitem__(i)


@pytest.mark.slow
def test_of_two_threads_that_want_a_step_one_has_the_whole_of_it() -> None:
    """An epoch that has ended may still be reading beside the next one."""
    job = job_of(Slow())
    with readers_of(job) as readers:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda step: readers.take(step, MICRO), (0, 0))
        found = one or other
        assert same(found, read_here(job, 0))
        assert None in (one, other), "it is over for the second"
        assert same(readers.take(1, MICRO), read_here(job, 1)), "later steps have their own samples"


@pytest.mark.slow
def test_what_a_read_raises_is_told_with_its_sample_step_and_line() -> None:
    job = job_of(Augmented(bad=17))
    step = next(s for s in range(job.steps) if 17 in draw(job.seed, 48, 8, s))
    with readers_of(job) as readers:
        for earlier in range(step):
            readers.take(earlier, MICRO)
        with pytest.raises(
            UsageError, match=rf"data\[17\] of step {step + 1} failed at .*test_readers.py:\d+: ValueError: this one"
        ):
            readers.take(step, MICRO)


@pytest.mark.slow
def test_a_process_that_dies_is_told_and_not_waited_for() -> None:
    job = job_of(Augmented(deadly=5))
    step = next(s for s in range(job.steps) if 5 in draw(job.seed, 48, 8, s))
    with readers_of(job) as readers, pytest.raises(UsageError, match=r"reads data has ended \(.*workers=0"):
        readers.take(step, MICRO)


def test_data_that_cannot_travel_is_refused_with_what_to_do() -> None:
    class Local(Augmented):
        """Nobody finds this class by its name."""

    with (
        readers_of(job_of(Local())) as readers,
        pytest.raises(
            UsageError, match=r"workers=2: the data cannot be given .* define its class at the top of the file"
        ),
    ):
        readers.take(0, MICRO)
    with pytest.raises(UsageError, match="workers is a number of processes"):
        replace(job_of(Augmented()), workers=-1)


@pytest.fixture
def imports() -> Iterator[None]:
    """What a job's file brings in is forgotten behind the test."""
    names = (JOB_FILE, "beside", "found_when_called")
    for name in names:
        sys.modules.pop(name, None)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("imports")
def test_a_class_of_the_jobs_own_file_is_found_by_every_process(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("OFFSET = 100.0\n")
    file = tmp_path / "my-job.py"  # no name of a module
    file.write_text(
        "import torch\nfrom beside import OFFSET\n"
        "class Rows:\n"
        "    def __len__(self): return 48\n"
        "    def __getitem__(self, i): x = torch.randn(6) + i + OFFSET; return x, x.sum(0, keepdim=True)\n"
    )
    job = job_of(import_job_file(str(file)).Rows())
    with readers_of(job) as readers:
        assert same(readers.take(0, MICRO), read_here(job, 0))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize("repeats", [True, False])
def test_samples_that_each_process_has_made_for_itself_are_refused(repeats: bool, tmp_path: Path) -> None:
    """But not those that no process reads twice: they are told of before, and what is fed of them is kept."""
    file = tmp_path / "job.py"
    file.write_text(
        "import random\nimport torch\n"
        "OFFSET = random.Random()\nFIXED = OFFSET.random()\n"
        "class Rows:\n"
        "    def __len__(self): return 48\n"
        f"    def __getitem__(self, i): x = torch.randn(6) + {'FIXED' if repeats else 'OFFSET.random()'}; return x, x[:1]\n"
    )
    job = job_of(import_job_file(str(file)).Rows(), workers=1)
    with readers_of(job) as readers:
        if repeats:
            with pytest.raises(
                UsageError, match=r"workers=1: a process that reads gives another data\[i\] than this one"
            ):
                readers.take(0, MICRO)
        else:
            assert readers.take(0, MICRO) is not None


@pytest.mark.usefixtures("imports")
def test_a_function_of_the_jobs_own_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    """A model or a sample is made long after the file was imported; what was there before comes first then."""
    (tmp_path / "found_when_called.py").write_text("OFFSET = 100.0\n")
    file = tmp_path / "my-job.py"
    file.write_text("def make():\n    from found_when_called import OFFSET\n    return OFFSET\n")
    before = [*sys.path]
    for _ in range(2):
        module = import_job_file(str(file))
    assert module.make() == 100.0
    assert sys.path == [*before, str(tmp_path.resolve())]


def test_a_class_that_was_typed_in_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: another process has no file to import it from."""

    class Typed(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return torch.ones(6), torch.ones(1)

    monkeypatch.setattr(Typed, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "job.py", raising=False)
    Readers(job_of(Typed())).close()
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(UsageError, match="import Typed of data from its file, and what was typed in has none"):
        Readers(job_of(Typed()))
    monkeypatch.setattr(Typed, "__module__", __name__)
    Readers(job_of(Typed())).close()
