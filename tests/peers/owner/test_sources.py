"""Rows by collate, orders by a sampler and streams train as in the plain loop, through losses of peers and of the owner."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import IterableDataset, WeightedRandomSampler

from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.equality import check
from meshcee.errors import UsageError, unwrap
from meshcee.events import Event
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.sampling import FED
from meshcee.sampling.stream import READ_AGAIN
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.owner.epoch import Report
from peers.owner.result import Result
from peers.state.checkpoint import CheckpointStore
from tests.peers.member.test_training import make_job
from tests.peers.owner import test_recovery as recovery
from tests.rig.mesh_fixture import train
from tests.rig.reference import reference
from tests.rig.streams import Counted, Plain, sample_of

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS, BATCH, MICRO = 20, 24, 6


class Words(nn.Module):
    """A text of any length, averaged over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(40, 16), nn.Dropout(0.2)
        self.hidden, self.out = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(self.drop(self.embed(ids)))) * mask.unsqueeze(-1)
        return self.out(h.sum(1) / mask.sum(1, keepdim=True))


def texts(count: int = 96) -> list[dict[str, Any]]:
    chance = random.Random(1)
    return [
        {"ids": [chance.randrange(1, 40) for _ in range(chance.choice((3, 5, 9, 14)))], "label": chance.randrange(5)}
        for _ in range(count)
    ]


def padded(rows: list[dict[str, Any]]) -> Any:
    """Columns, padded to the longest of these rows; one word of each is replaced by chance."""
    longest = max(len(row["ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for k, row in enumerate(rows):
        ids[k, : len(row["ids"])] = torch.tensor(row["ids"])
        ids[k, random.randrange(len(row["ids"]))] = int(torch.randint(1, 40, ()))
    return {"ids": ids, "mask": (ids > 0).float()}, torch.tensor([row["label"] for row in rows])


def columns(rows: list[dict[str, Any]]) -> Any:
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["label"] for row in rows])


def weight(y: torch.Tensor) -> float:
    return float((y > 0).sum() + 1)


def job_of(**changes: Any) -> Job:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 5)]
    settings = {"collate": columns, "micro_batch_size": MICRO, "steps": STEPS, "weight": weight, "checkpoint_every": 3}
    return make_job(**{"model": nn.Sequential(*layers), **settings, **changes})


def words_of(**changes: Any) -> Job:
    torch.manual_seed(0)
    return job_of(**{"model": Words(), "data": texts(), "collate": padded, **changes})


def assert_is(result: Any, job: Job) -> None:
    expected = plain(job)
    assert result.losses == expected.losses
    state = result.state_dict if isinstance(result, Result) else result.state
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict.items())


async def test_dicts_of_columns_padded_to_each_micro_batch_train_as_in_the_plain_loop() -> None:
    job = words_of(eval_data=texts(20), eval_every=7)
    state = random.getstate()
    trained = await train(job, 3, MICRO)
    assert random.getstate() == state
    assert_is(trained, words_of())
    assert [r.step for r in trained.reports if r.metrics] == [6, 13, STEPS - 1]


class Scaled(nn.Module):
    """Computes its own loss where it is given labels, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 5)

    def scores(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        h = torch.tanh(self.hidden(x if scale is None else x * scale.unsqueeze(1)))
        found: torch.Tensor = self.out(self.drop(h))
        return found


class Scores(Scaled):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.scores(x, scale)


class OwnLoss(Scaled):
    def forward(self, x: torch.Tensor, *, labels: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        scores = self.scores(x, scale)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


class Wrapped(OwnLoss):
    def forward(self, *args: Any, **columns: Any) -> Any:
        return super().forward(*args, **columns)


def row_of(number: int, label: str = "label", *without: str) -> dict[str, Any]:
    row = sample_of(number)
    found = {"x": row["x"], "scale": 1.0 + number % 3, label: row["label"]}
    return {key: value for key, value in found.items() if key not in without}


class Rows:
    """Read anew each time, as each is augmented."""

    def __init__(self, count: int, *how: str) -> None:
        self.count, self.how = count, how

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return row_of(i, *self.how)


def distance(output: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output.sum(1), row["x"].sum(1) * row["scale"])


def own_loss(output: Any, labels: torch.Tensor) -> Any:
    return output["loss"]


KINDS: dict[str, tuple[type[nn.Module], Any, Rows, Any]] = {
    "a label": (Scores, nn.functional.cross_entropy, Rows(96), weight),
    "labels that forward does not take": (Scores, nn.functional.cross_entropy, Rows(96, "labels"), weight),
    "labels that forward takes": (OwnLoss, own_loss, Rows(96, "labels"), weight),
    "labels that forward takes among others": (Wrapped, own_loss, Rows(96, "labels", "scale"), None),
    "no label": (Scores, distance, Rows(96, "label", "label"), None),
}


def rows_of(kind: str, **changes: Any) -> Job:
    model, loss, data, weighs = KINDS[kind]
    torch.manual_seed(0)
    settings = {"model": model(), "loss": loss, "data": data, "weight": weighs, "collate": None, "steps": 5}
    return job_of(**{**settings, "eval_data": Rows(20, *data.how), "eval_every": 2, **changes})


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_rows_that_are_dicts_train_as_in_the_plain_loop(kind: str) -> None:
    trained = await train(rows_of(kind), 2, MICRO)
    expected = reference(rows_of(kind))
    assert trained.losses == expected.totals
    assert all(torch.equal(trained.state[name], tensor) for name, tensor in expected.state.items())
    assert [(r.step, r.metrics) for r in trained.reports if r.metrics] == expected.metrics
    assert plain(rows_of(kind)).losses == expected.totals


@pytest.mark.slow
async def test_rows_that_are_dicts_are_read_by_other_processes_and_from_streams_alike(tmp_path: Path) -> None:
    job = rows_of("a label", workers=2)
    assert_is(await train(job, 2, MICRO), rows_of("a label"))
    stream = {"data": Counted(1000, row_of), "steps": STEPS}
    await run(Home(tmp_path), rows_of("a label", **stream), until=11)
    assert_is(await run(Home(tmp_path), rows_of("a label", **stream), resume="last"), rows_of("a label", **stream))


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
    return mesh.result


class Unseeded(IterableDataset[Any]):
    """Never the same again. `given` is what all of its readers together have had."""

    def __init__(self) -> None:
        self.chance = random.Random(2)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield sample_of(self.chance.randrange(1000))


@pytest.mark.slow
async def test_a_stream_goes_on_with_the_same_samples_when_a_member_is_lost(tmp_path: Path) -> None:
    result = await struck(job_of(data=Counted(100)), Home(tmp_path))
    assert_is(result, job_of(data=Counted(100)))
    assert not (Home(tmp_path).run("last").folder / FED).exists()


@pytest.mark.slow
async def test_a_stream_that_is_never_the_same_is_fed_again_as_it_was(tmp_path: Path) -> None:
    """What a step is told of twice is compared, so a sample that differed would end the run."""
    result = await struck(job_of(data=Unseeded(), checkpoint_every=STEPS), Home(tmp_path))
    assert len(result.losses) == STEPS
    assert len(list((Home(tmp_path).run("last").folder / FED).iterdir())) == STEPS


async def run(home: Home, job: Job, until: int | None = None, resume: str | None = None) -> Result:
    try:
        async with join(JoinOptions(local=2), home) as mesh:
            async for report in mesh.train(job, resume=resume):
                if report.step == until:
                    store = CheckpointStore(home.run("last").checkpoints)
                    while not any(found.next_step >= until // 2 for found in store.complete()):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    break
        return mesh.result
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [Plain, Counted])
async def test_a_run_over_a_stream_goes_on_where_its_owner_died(tmp_path: Path, kind: type[Plain]) -> None:
    home = Home(tmp_path)
    await run(home, job_of(data=kind(1000)), until=11)
    data = kind(1000)
    with capture_logs() as logged:
        assert_is(await run(home, job_of(data=data), resume="last"), job_of(data=kind(1000)))
    told = [entry["event"] for entry in logged].count(READ_AGAIN)
    assert told == (kind is Plain), "a state saves this, and where there is none it is said"
    assert (len(data.reads) < STEPS * BATCH) == (kind is Counted)


@pytest.mark.slow
async def test_a_weighted_order_goes_on_where_its_owner_died_and_no_other_does(tmp_path: Path) -> None:
    home = Home(tmp_path)

    def job(most: float) -> Job:
        return words_of(sampler=WeightedRandomSampler(torch.linspace(0.1, most, 96).tolist(), 96))

    await run(home, job(3.0), until=11)
    with pytest.raises(UsageError, match=r"the run was made with sampler '\w+', the job says '\w+'"):
        await run(home, job(4.0), resume="last")
    assert_is(await run(home, job(3.0), resume="last"), job(3.0))


@pytest.mark.parametrize("job", [words_of(), job_of(data=Counted(100))], ids=["padded", "stream"])
def test_the_check_looks_at_whole_steps_of_them(job: Job) -> None:
    checked = check(job, (2,), 2)
    assert checked.equal, checked.differs


class Slow(Plain):
    """Takes far longer than steps do."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            time.sleep(0.04)
            yield sample


def slowly(rows: list[Any]) -> Any:
    time.sleep(0.25)
    return columns(rows)


ROWS = [sample_of(i) for i in range(96)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("data", "collate", "weighs"), [(Slow(1000), columns, None), (ROWS, slowly, weight)])
async def test_the_limit_is_the_data_where_reading_takes_longest(data: Any, collate: Any, weighs: Any) -> None:
    """Where weights need the targets, all is read before the step begins; dropout would wait for who reads in this process."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    trained = await train(job_of(model=model, data=data, collate=collate, weight=weighs, steps=3), 2, MICRO)
    limits = [report.limit for report in trained.reports]
    assert all(limit.startswith("data: 24 samples take ") for limit in limits[1:]), limits


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"data": [1.0] * 96, "collate": None},
            r"must be a pair .* or a dict of columns, and is a float; Job\(collate=F",
        ),
        (
            {"data": [{"ids": [1], "text": "one"}] * 96, "collate": None},
            r"x.text: .* or take this column out of the rows",
        ),
        (
            {"data": [{"ids": [1], "kind": 3, "label": 4}] * 96, "collate": None},
            "forward of Words has no parameter kind:",
        ),
        ({"collate": lambda rows: padded(rows)[0]}, r"Job.collate of samples 1 to \d of data returned a dict; it must"),
        ({"collate": lambda rows: (torch.zeros(1), torch.zeros(1))}, r"makes of \d samples x of shape \(1,\)"),
        ({"collate": lambda rows: ("text", 1)}, "gives x as a str, which is no tensor"),
        (
            {"collate": lambda rows: rows[0]["nothing"]},
            r"samples 1 to \d of data failed at .*test_sources.py:\d+: KeyErr",
        ),
    ],
)
async def test_what_no_collate_may_do_is_told_with_its_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        await train(words_of(**changes), 2, MICRO)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("evaluates", [False, True])
async def test_a_length_that_the_first_samples_do_not_show_is_told_with_its_place(evaluates: bool) -> None:
    """Members would fail at it, one after the other, or compute with sizes that are not those of the samples."""
    alike = [row for row in texts(400) if len(row["ids"]) == 9]
    longer = [row | {"ids": [1] * 12} if k % 3 == 2 else row for k, row in enumerate(alike[:96])]
    job = words_of(data=longer, steps=9) if not evaluates else words_of(data=alike, steps=1, eval_data=longer)
    place = "step 1, evaluation, micro-batch 1" if evaluates else r"step \d, micro-batch \d"
    with pytest.raises(UsageError, match=place + r": x.ids is int64 \(6, 12\), .* int64 \(samples, 9\): begin data"):
        await train(job, 2, MICRO)
    (ids,) = (
        entry.value for entry in capture(words_of(data=[longer[2], *longer[1:]])).train.inputs if entry.name == "x.ids"
    )
    assert all(ids.admits(torch.zeros(6, length, dtype=torch.int64)) for length in (9, 12))  # as the advice has it
    if not evaluates:  # where the first step has one, the start finds it
        checked = check(job, (1,), 1)
        assert checked.blame == "data"
        assert re.search(r"step 1, .* x.ids is int64 \(6, 12\), .*: begin data", checked.differs)
    longest = [row | {"ids": [1] * 999} if k % 6 == 5 else row for k, row in enumerate(texts())]
    with pytest.raises(UsageError, match=r"x.ids is int64 \(6, 999\), .* int64 \(samples, up to \d+\): begin"):
        await train(words_of(data=longest, steps=9), 2, MICRO)
