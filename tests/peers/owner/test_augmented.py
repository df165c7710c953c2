"""Datasets whose samples are not the same whenever they are read: augmented by chance, or by what nobody can seed."""

from __future__ import annotations

import errno
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from structlog.testing import capture_logs
from torch import nn

from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.files import disk
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.sampling import FED, repeats
from meshcee.sampling.fed import FORGOTTEN, LOOK_FOR_ROOM, REFUSED, Fed
from meshcee.sampling.order import draw
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.owner import feed
from peers.owner.epoch import Report
from peers.owner.feed import Feed
from peers.owner.result import Result
from peers.planning import job_costs
from peers.planning.asking import question
from peers.planning.job_costs import SAMPLES
from tests.peers.member.test_training import make_job
from tests.peers.owner import test_recovery as recovery
from tests.rig.disks import RefusingDisk
from tests.rig.mesh_fixture import train

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS, BATCH, MICRO = 20, 24, 6


class Noisy:
    """Vectors under noise from all three generators."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> tuple[Any, int]:
        x = torch.randn(8) + random.gauss(i % 5, 1) + torch.from_numpy(np.random.normal(size=8)).float()
        return x, random.randrange(5)


class Unseeded:
    """Draws from a generator of its own: no two reads are alike. Each sample is drawn in one step only."""

    def __init__(self) -> None:
        self._chance = np.random.default_rng(5)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, i: int) -> tuple[Any, int]:
        with self._lock:
            return torch.from_numpy(self._chance.normal(size=8)).float(), int(self._chance.integers(5))


def weight(y: torch.Tensor) -> float:
    return float((y > 0).sum() + 1)


def job_of(**changes: Any) -> Job:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 5)]
    model = nn.Sequential(*layers)
    settings = {"model": model, "data": Noisy(), "micro_batch_size": MICRO, "steps": STEPS, "weight": weight}
    return make_job(**{**settings, **changes})


def as_fed(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The samples of `Unseeded` as a run was fed them, from what it kept of all steps."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(STEPS):
        raw = safetensors.torch.load_file(folder / f"step-{step:08d}.safetensors")
        x, y = (torch.cat([raw[f"{m}/{name}"] for m in range(BATCH // MICRO)]) for name in ("x", "y"))
        found.update(zip(draw(3, STEPS * BATCH, BATCH, step), zip(x, y)))
    return [found[i] for i in range(STEPS * BATCH)]


def assert_is(result: Result, job: Job) -> None:
    expected = plain(job)
    assert result.losses == expected.losses
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in expected.state_dict.items())


async def test_augmented_samples_train_as_in_the_plain_loop() -> None:
    """The owner reads beside stages of its own process, which draw masks from the same generator."""
    job = job_of(eval_data=Noisy(), eval_every=7)
    state = random.getstate()
    trained = await train(job, 3, MICRO)
    assert random.getstate() == state
    expected = plain(job_of())
    assert trained.losses == expected.losses
    assert all(torch.equal(trained.state[name], tensor) for name, tensor in expected.state_dict.items())
    again = await train(job, 2, MICRO)
    assert [r.metrics for r in again.reports if r.metrics] == [r.metrics for r in trained.reports if r.metrics]


async def struck(job: Job, home: Home) -> Result:
    """Trained by three peers, one of which dies on the way."""
    told: list[Report] = []
    with capture_logs() as logged:
        async with recovery.a_mesh(home, 3) as (here, mesh):
            async for report in mesh.train(job, stages=3):
                told.append(report)
                if report.step == 9:
                    here.crash(recovery.stage_of(here, mesh, 1))
    (course,) = [entry for entry in logged if entry["event"] == Event.RUN_GOES_ON]
    assert course["steps_again"] > 0
    assert [r.step for r in told] == list(range(STEPS))
    warnings = [entry["event"] for entry in logged if "is another sample" in entry["event"]]
    assert len(warnings) == (home.run("last").folder / FED).exists()
    if warnings:
        assert "960 bytes a step" in warnings[0]
    return mesh.result


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
async def test_a_lost_member_does_not_change_what_is_drawn(tmp_path: Path, workers: int) -> None:
    """Nor does it matter who reads, here steps ahead of those that are computed again."""
    job = job_of(checkpoint_every=3, workers=workers)
    assert_is(await struck(job, Home(tmp_path)), job)
    assert not (Home(tmp_path).run("last").folder / FED).exists()  # it can be read again, so nothing is kept


@pytest.mark.slow
async def test_data_that_is_never_the_same_is_fed_again_as_it_was(tmp_path: Path) -> None:
    home = Home(tmp_path)
    result = await struck(job_of(checkpoint_every=STEPS, data=Unseeded()), home)
    assert_is(result, job_of(data=as_fed(home.run("last").folder / FED)))


async def test_samples_are_not_looked_at_again_behind_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the epoch that has ended may be under way, and what is put back behind a look would lose what that read counts."""
    looks, honest = list[int](), feed.probes
    monkeypatch.setattr(feed, "probes", lambda job, count: looks.append(count) or honest(job, count))
    monkeypatch.setattr(job_costs, "probes", lambda job, count: looks.append(count) or honest(job, count))
    await struck(job_of(checkpoint_every=STEPS, data=Unseeded()), Home(tmp_path))
    assert looks == [SAMPLES, 1], "once for all devices, and once for the structure of what is kept"


async def test_a_run_whose_owner_died_goes_on_with_what_it_had_fed(tmp_path: Path) -> None:
    home, job = Home(tmp_path), job_of(checkpoint_every=3, data=Unseeded())

    async def run(until: int | None = None, resume: str | None = None) -> Result:
        async with join(JoinOptions(local=2), home) as mesh:
            async for report in mesh.train(job, resume=resume):
                if report.step == until:
                    break
        return mesh.result

    await run(until=11)
    cut = home.run("last")
    result = await run(resume=cut.id)
    assert [line["step"] for line in cut.reports()] == list(range(STEPS))
    assert [line["loss"] for line in cut.reports()] == result.losses
    kept = sorted(int(path.stem.removeprefix("step-")) for path in (cut.folder / FED).iterdir())
    assert kept[-1] == STEPS - 1
    assert kept[0] > 0  # what no checkpoint is left for was forgotten


async def test_samples_are_looked_at_once_for_all_devices_and_not_on_the_event_loop() -> None:
    reads: queue.SimpleQueue[str] = queue.SimpleQueue()  # from a list looks would take their traces

    class Recorded(Noisy):
        def __getitem__(self, i: int) -> tuple[Any, int]:
            reads.put(threading.current_thread().name)
            return super().__getitem__(i)

    job = job_of(data=Recorded())
    captured = capture(job)
    async with recovery.a_mesh(Home(), 3) as (_, mesh):
        before = reads.qsize()
        request = await question(mesh.agent, job, captured, 2)
    assert len(request.times) == 3
    names = [reads.get() for _ in range(reads.qsize())][before:]
    assert len(names) == SAMPLES
    assert threading.main_thread().name not in names


# -- what is kept, by itself


def test_members_of_a_group_are_fed_rows_of_what_is_kept(tmp_path: Path) -> None:
    job = job_of(data=Unseeded())
    captured = capture(job)
    fed = fed_in(tmp_path)
    feeds = [Feed(job, captured, MICRO, fed=fed) for _ in range(2)]
    spec = next(feeds[0].rounds())
    assert next(feeds[1].rounds()) == spec  # its weights are those of the same samples
    x, y = feeds[0].samples(spec, 1)
    for one in feeds:
        part_x, part_y = one.samples(spec, 1, (2, 5))
        assert torch.equal(part_x, x[2:5])
        assert torch.equal(part_y, y[2:5])
        assert one.row_shares(spec, 1, [(0, 2), (2, 6)]) == [
            weight(part) / (weight(y[:2]) + weight(y[2:])) for part in (y[:2], y[2:])
        ]


def raw(value: float) -> list[Any]:
    return [{"x": torch.full((2, 3), value), "y": torch.tensor([m, 1])} for m in range(2)]


def never() -> list[Any]:
    raise AssertionError("it was read again")


def fed_in(folder: Path, told: Callable[[int], bool] = lambda step: False, floor: int = 0, **limits: int) -> Fed:
    return Fed(folder, told, lambda: floor, **limits)


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in zip(one, other, strict=True)
    )


def test_what_was_fed_is_read_once_and_found_by_another_process(tmp_path: Path) -> None:
    assert same(fed_in(tmp_path).batches(7, lambda: raw(1.5)), raw(1.5))
    assert same(fed_in(tmp_path, told=lambda step: True).batches(7, never), raw(1.5))


@pytest.mark.parametrize(
    "laid",
    [
        torch.rand(3, 4).t(),
        torch.rand(5, 8)[:, ::2],
        torch.rand(3, 1).expand(3, 6),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(4, 1).t(),
        torch.rand(3).unfold(0, 2, 1),
    ],
)
def test_what_was_fed_comes_back_as_it_lay_in_memory(tmp_path: Path, laid: torch.Tensor) -> None:
    """It came back contiguous, and kernels round otherwise there: a step that was computed again had other bits."""
    (first,) = fed_in(tmp_path).batches(7, lambda: [{"x": laid}])
    (again,) = fed_in(tmp_path, told=lambda step: True).batches(7, never)
    assert torch.equal(again["x"], first["x"])
    assert again["x"].stride() == first["x"].stride() == laid.stride()


def test_the_first_of_two_epochs_that_read_a_step_counts(tmp_path: Path) -> None:
    fed = fed_in(tmp_path)

    def slow() -> list[Any]:
        fed.batches(7, lambda: raw(1.5))  # the next epoch, while the one before still reads
        return raw(2.5)

    assert same(fed.batches(7, slow), raw(1.5))


def test_a_step_that_was_told_and_is_not_kept_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    fed = fed_in(tmp_path, told=lambda step: step < 3)
    with pytest.raises(UsageError, match=r"step 3 .* no longer kept"):
        fed.batches(2, never)
    assert same(fed.batches(3, lambda: raw(0.5)), raw(0.5))


def test_a_file_that_is_damaged_is_none(tmp_path: Path) -> None:
    fed_in(tmp_path).batches(7, lambda: raw(1.5))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with capture_logs():
        assert same(fed_in(tmp_path).batches(7, lambda: raw(2.5)), raw(2.5))
        path.write_bytes(b"half")
        with pytest.raises(UsageError):
            fed_in(tmp_path, told=lambda step: True).batches(7, never)


def test_what_is_kept_is_bounded_in_steps_and_bytes_and_says_so_once(tmp_path: Path) -> None:
    with capture_logs() as logged:
        fed = fed_in(tmp_path, most_steps=10)
        for step in range(50):
            fed.batches(step, lambda: raw(1.0))
        assert sorted(int(p.stem[-8:]) for p in tmp_path.iterdir()) == list(range(40, 50))
        size = max(path.stat().st_size for path in tmp_path.iterdir())
        fed = fed_in(tmp_path, most_bytes=4 * size)
        for step in range(50, 60):
            fed.batches(step, lambda: raw(1.0))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * size
    assert [entry["event"] for entry in logged] == [FORGOTTEN] * 2


def test_steps_that_no_checkpoint_is_left_for_are_forgotten_without_a_word(tmp_path: Path) -> None:
    with capture_logs() as logged:
        fed = fed_in(tmp_path, floor=LOOK_FOR_ROOM - 2)
        for step in range(LOOK_FOR_ROOM + 1):
            fed.batches(step, lambda: raw(1.0))
    assert min(int(p.stem[-8:]) for p in tmp_path.iterdir()) == LOOK_FOR_ROOM - 2
    assert logged == []


def test_what_cannot_be_kept_says_so_and_does_not_end_the_run(tmp_path: Path) -> None:
    with capture_logs() as logged:
        small = fed_in(tmp_path / "small", most_bytes=10)
        assert same(small.batches(0, lambda: raw(1.0)), raw(1.0))
        fed = fed_in(tmp_path)
        with disk.using(RefusingDisk(tmp_path, errno.ENOSPC)):
            for step in range(3):
                assert same(fed.batches(step, lambda: raw(1.0)), raw(1.0))
        fed.batches(3, lambda: raw(1.0))
    assert [entry["event"] for entry in logged] == [REFUSED] * 2
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003.safetensors"]


@pytest.mark.parametrize("keeps", [False, True])
def test_data_that_differs_is_found_before_the_start(keeps: bool) -> None:
    class Counts(Noisy):
        count = 0

        def __getitem__(self, i: int) -> tuple[Any, int]:
            Counts.count += 1
            return torch.tensor([float("nan"), Counts.count]), 0

    class Nan(Noisy):
        def __getitem__(self, i: int) -> tuple[Any, int]:
            return torch.full((3, 2), float("nan")).t(), 0

    with capture_logs() as logged:
        assert all(repeats(job_of(data=data), keeps=keeps) for data in (Noisy(), Nan(), [(1, True)] * 96))
        assert logged == []
        assert not repeats(job_of(data=Counts()), keeps=keeps)
        assert not repeats(job_of(data=Unseeded()), keeps=keeps)
    assert all(("is kept on the disk" if keeps else "no folder") in entry["event"] for entry in logged)
    assert Counts.count <= 32
