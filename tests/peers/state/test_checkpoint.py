"""Checkpoints do not depend on the plan: a run that was cut off goes on with other stages as if nothing had happened."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshcee.capture import Capture, capture
from meshcee.config import Timeouts
from meshcee.eager import plain
from meshcee.errors import CheckpointError, MeshceeError, UsageError, unwrap
from meshcee.files import Trouble, dumps
from meshcee.files.home import Home, Run
from meshcee.job import Job
from meshcee.optim import PER_PARAMETER, Optimizer
from meshcee.optim.rates import Schedule
from meshcee.stage.weights import optimizer_layout
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.owner.job_run import Result
from peers.state.checkpoint import MANIFEST, Checkpoint, CheckpointStore
from peers.state.fetch import Reader, serve
from peers.state.keeping import Keeping
from peers.state.manifest import CopySet, StageCopy
from peers.state.policy import RETRY_S, Cadence, Stride
from peers.state.saving import Saving, StageFiles
from peers.transport.memory import MemoryNetwork
from peers.wire.member_link import Link
from peers.wire.offer import Offer, Terms
from peers.wire.weights import digest_of
from tests.mutation import breaks, changed
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import even_plan
from tests.rig.reference import reference
from tests.rig.virtual_time import virtual_time

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS = 9


def job_of(**changes: object) -> Job:
    return make_job(**{"steps": STEPS, "micro_batch_size": 6, "checkpoint_every": 3, **changes})


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is complete before the next step is fed: these steps are too short to wait for none."""
    ask = Keeping.ask

    async def ask_and_wait(self: Keeping, next_step: int, **which: bool) -> None:
        await ask(self, next_step, **which)
        assert self.saving is not None
        await self.saving.settled.wait()

    monkeypatch.setattr(Keeping, "ask", ask_and_wait)


@functools.cache
def captured_job() -> Capture:
    return capture(job_of())


async def run(
    job: Job,
    home: Home,
    stages: int,
    *,
    captured: Capture | None = None,
    until: int | None = None,
    resume: str | None = None,
    hear: Callable[[Any], None] = lambda report: None,
) -> Result:
    """Train in this process; `until` abandons the run, as a crash would, once that step is reported and a checkpoint is there."""
    try:
        async with join(JoinOptions(local=stages), home) as mesh:
            async for report in mesh.train(job, resume=resume, captured=captured or capture(job)):
                hear(report)
                if report.step == until:
                    async with asyncio.timeout(60):
                        while not CheckpointStore(home.run("last").checkpoints).complete():  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                    break
            return mesh.result
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


async def crashed(job: Job, home: Home, *, captured: Capture | None = None, until: int = 4) -> Run:
    """A run on three stages that was cut off, with the checkpoint of step 3 and half of another."""
    await run(job, home, 3, captured=captured, until=until)
    cut = home.run("last")
    assert CheckpointStore(cut.checkpoints).complete()[-1].next_step == 3
    half = cut.checkpoints / ".step-00000007.4711.0"
    half.mkdir()
    (half / "model-0.safetensors").write_bytes(b"half")
    return cut


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [1, 2, 5])
async def test_a_run_that_was_cut_off_goes_on_with_other_stages_bit_for_bit(tmp_path: Path, stages: int) -> None:
    home = Home(tmp_path)
    cut = await crashed(job_of(), home, captured=captured_job())
    result = await run(job_of(), home, stages, captured=captured_job(), resume=f"{cut.id}@3")
    losses, _, model, _ = plain(job_of(), STEPS, 6)
    assert result.losses == losses
    assert_equal(result.state_dict, model.state_dict())
    told = [line["step"] for line in cut.reports()]
    assert told == list(range(STEPS))  # each once, although steps 3 and 4 were computed twice
    assert [line["loss"] for line in cut.reports()] == losses
    assert [c.next_step for c in CheckpointStore(cut.checkpoints).complete()] == [9, 6]
    assert len(list(cut.checkpoints.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("first", [0, 3])
async def test_a_run_goes_on_before_the_steps_that_were_taken_back_though_their_state_is_there(
    tmp_path: Path, first: int
) -> None:
    """Its owner was killed before the disk let go of a liar's state, and that was the newest."""
    home = Home(tmp_path)
    cut = await crashed(job_of(), home, captured=captured_job(), until=6)
    steps = [c.next_step for c in CheckpointStore(cut.checkpoints).complete()]
    assert steps == [6, 3]
    back = [line["step"] for line in cut.reports() if line["step"] >= first]
    lines = [dumps({"step": step, "loss": None}) for step in back]
    cut.report_file.write_text(cut.report_file.read_text() + "\n".join(lines) + "\n")
    assert [c.next_step for c in CheckpointStore.found(cut).complete()] == [3][:first]
    with pytest.raises(UsageError, match="no checkpoint after 6 steps"):
        await run(job_of(), home, 2, captured=captured_job(), resume=f"{cut.id}@6")
    held = os.open(cut.checkpoints / "step-00000006", os.O_RDONLY)  # or its number would be given to another folder
    liars = os.stat(held).st_ino
    left = list[int]()

    def hear(report: Any) -> None:
        left.append(sum(folder.stat().st_ino == liars for folder in cut.checkpoints.glob("step-*6")))

    result = await run(job_of(), home, 2, captured=captured_job(), resume=cut.id, hear=hear)
    os.close(held)
    assert not any(left), "a loss would go back to it"
    assert result.losses == [line["loss"] for line in cut.reports()] == plain(job_of(), STEPS, 6)[0]
    assert [line["step"] for line in cut.reports()] == [*range(STEPS)]
    lines = cut.report_file.read_text().splitlines()
    assert len(lines) == STEPS + 2 * len(back), "which are told again"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        (Optimizer("SGD", lr=0.05, momentum=0.9, groups={"*.bias": {"momentum": 0.0}}), {}),
        (Optimizer("Adagrad", lr=1e-2), {}),
        (Optimizer("AdamW", lr=1e-2, amsgrad=True), {"precision": "bf16"}),
        (Optimizer("RMSprop", lr=1e-2), {"schedule": Schedule("OneCycleLR", max_lr=0.01, total_steps=STEPS + 1)}),
    ],
)
async def test_every_kind_of_optimizer_state_is_kept(
    tmp_path: Path, optimizer: Optimizer, changes: dict[str, Any]
) -> None:
    job = job_of(**{"optimizer": optimizer, "schedule": None, **changes})
    home, captured = Home(tmp_path), capture(job)
    cut = await crashed(job, home, captured=captured)
    result = await run(job, home, 2, captured=captured, resume=f"{cut.id}@3")
    expected = reference(job)
    assert result.losses == [sum(float(loss) * (6 / 24) for loss in step) for step in expected.losses]
    assert_equal(result.state_dict, expected.state)


@pytest.mark.parametrize("name", sorted(PER_PARAMETER))
def test_the_layout_of_an_optimizer_is_what_torch_keeps(name: str) -> None:
    optimizer = Optimizer(name, lr=0.1)
    parameter = nn.Parameter(torch.ones(4, 5))
    built = optimizer.build({"layer.weight": parameter})
    for _ in range(2):
        parameter.grad = torch.ones(4, 5)
        built.step()
    kept = {f"layer.weight/{k}": (v.dtype, tuple(v.shape)) for k, v in built.state[parameter].items() if v is not None}
    assert optimizer_layout(optimizer, {"layer.weight": (torch.float32, (4, 5))}) == kept


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD", "Rprop"])
def test_an_optimizer_for_gpus_alone_keeps_what_it_keeps_on_a_cpu(name: str) -> None:
    """torch refuses a step of it on a CPU, where the layout is found."""
    masters = {"layer.weight": (torch.float32, (4, 5))}
    layouts = [optimizer_layout(Optimizer(name, **options), masters) for options in ({}, {"capturable": True})]
    assert layouts[0] == layouts[1]


def job_with_frozen_weights(seed: int) -> Job:
    made = job_of()
    torch.manual_seed(seed)
    nn.init.normal_(made.model.embed.weight)
    made.model.embed.weight.requires_grad_(False)
    return made


@pytest.mark.slow
async def test_what_is_not_trained_is_in_the_checkpoint_too(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cut = await crashed(job_with_frozen_weights(1), home)
    result = await run(job_with_frozen_weights(2), home, 2, resume=cut.id)  # a job file that draws others each time
    losses, _, model, _ = plain(job_with_frozen_weights(1), STEPS, 6)
    assert result.losses == losses
    assert_equal(result.state_dict, model.state_dict())


@pytest.mark.slow
async def test_frozen_weights_are_there_for_who_joins_after_the_checkpoint_they_come_from_was_removed(
    tmp_path: Path,
) -> None:
    cut = await crashed(job_with_frozen_weights(1), Home(tmp_path))
    base = CheckpointStore(cut.checkpoints).complete()[-1]
    weights = base.weights(base.names)
    shutil.rmtree(base.folder)
    assert torch.equal(weights["embed.weight"], job_with_frozen_weights(1).model.embed.weight)
    with pytest.raises(CheckpointError):
        weights["layers.0.0.weight"]  # training has changed it: nobody asks for this one


@pytest.mark.slow
async def test_an_evaluation_at_the_boundary_is_told_once(tmp_path: Path) -> None:
    job = job_of(eval_data=job_of().data, eval_every=3, metrics={"none": lambda _output, _target: math.nan})
    home, captured = Home(tmp_path), capture(job)
    cut = await crashed(job, home, captured=captured, until=5)
    result = await run(job, home, 2, captured=captured, resume=f"{cut.id}@3")
    assert [step for step, _ in result.metrics] == [2, 5, 8]
    assert all(math.isnan(metrics["none"]) for _, metrics in result.metrics)  # those of the file as well
    assert [line["step"] for line in cut.reports() if line["metrics"]] == [2, 5, 8]


@pytest.mark.slow
async def test_a_loss_that_differs_when_computed_again_ends_the_run(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cut = await crashed(job_of(), home, captured=captured_job())
    lines = cut.reports()
    lines[4]["loss"] += 1e-6
    (cut.folder / "reports.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(MeshceeError, match=r"step 5 had loss .* computed again"):
        await run(job_of(), home, 2, captured=captured_job(), resume=f"{cut.id}@3")


@pytest.mark.slow
async def test_a_wrong_run_another_job_or_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cut = await crashed(job_of(), home, captured=captured_job(), until=7)

    async def fails(error: type[Exception], match: str, resume: str | None = None, **changes: object) -> None:
        captured = captured_job() if "model" not in changes else None
        with pytest.raises(error, match=match):
            await run(job_of(**changes), home, 2, captured=captured, resume=resume or cut.id)

    await fails(UsageError, "no run matches", resume="nope")
    await fails(UsageError, "no checkpoint after 4 steps", resume=f"{cut.id}@4")
    await fails(UsageError, "seed 3, the job says 4", seed=4)
    await fails(UsageError, "another model", model=nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23)))
    await fails(UsageError, "micro-batches of 6", micro_batch_size=12)
    await fails(UsageError, "has done 6 steps and the job has 5: raise `steps`", steps=5)
    newest = max(CheckpointStore(cut.checkpoints).complete()[0].folder.glob("model-*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    await fails(CheckpointError, rf"{newest.name} is not what was written; .* `--resume {cut.id}@3`")
    result = await run(job_of(), home, 2, captured=captured_job(), resume=f"{cut.id}@3")
    assert result.losses == plain(job_of(), STEPS, 6).losses
    await fails(UsageError, "raise `steps`")


@pytest.mark.slow
async def test_a_damaged_manifest_hides_neither_its_step_nor_the_other_checkpoints(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cut = await crashed(job_of(), home, captured=captured_job(), until=7)
    newest, before = CheckpointStore(cut.checkpoints).complete()
    (newest.folder / MANIFEST).write_text((newest.folder / MANIFEST).read_text()[:99])
    with pytest.raises(CheckpointError, match=rf"its manifest cannot be read .*{cut.id}@{before.next_step}"):
        await run(job_of(), home, 2, captured=captured_job(), resume=cut.id)
    found = CheckpointStore(cut.checkpoints).complete()
    assert [(one.next_step, one.is_readable) for one in found] == [(newest.next_step, False), (before.next_step, True)]
    result = await run(job_of(), home, 2, captured=captured_job(), resume=f"{cut.id}@{before.next_step}")
    assert result.losses == plain(job_of(), STEPS, 6).losses


@pytest.mark.slow
async def test_a_manifest_of_another_step_than_its_folder_says_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cut = await crashed(job_of(), home, captured=captured_job(), until=7)
    newest, before = CheckpointStore(cut.checkpoints).complete()
    (newest.folder / MANIFEST).write_bytes((before.folder / MANIFEST).read_bytes())
    with pytest.raises(CheckpointError, match=f"it is of the state after {before.next_step} steps"):
        await run(job_of(), home, 2, captured=captured_job(), resume=cut.id)


@pytest.mark.slow
async def test_the_end_of_a_run_keeps_the_weights_whatever_the_cadence(tmp_path: Path) -> None:
    result = await run(job_of(checkpoint_every=0), Home(tmp_path), 2, captured=captured_job())
    newest = CheckpointStore(Home(tmp_path).run("last").checkpoints).complete()[0]
    newest.verify()
    assert newest.next_step == STEPS
    kept = newest.weights(newest.manifest["persistent"])
    assert_equal(kept, {name: result.state_dict[name] for name in kept})
    plain = safetensors.torch.load_file(newest.folder / "model-0.safetensors")  # any reader of the format will do
    assert torch.equal(plain["embed.weight"], result.state_dict["embed.weight"])


def test_snapshots_are_due_by_steps_or_by_their_cost() -> None:
    by_steps, by_cost = Cadence(4), Cadence()
    by_steps.start(6, 0.0)
    assert next(s for s in range(7, 17) if by_steps.is_due(s, 0.0)) == 8
    by_steps.begun(9, 0.0)  # late, because the one before was still under way
    assert not by_steps.is_due(11, 0.0)
    assert by_steps.is_due(12, 0.0)
    by_cost.begun(1, 10.0)
    by_cost.ended(read_s=1.0, made_s=5.0)
    assert not by_cost.is_due(2, 29.0)  # one second in twenty
    assert by_cost.is_due(2, 30.1)
    by_cost.begun(2, 40.0)
    by_cost.ended(read_s=0.1, made_s=5.0)  # a slow disk: half of the time
    assert not by_cost.is_due(3, 49.0)
    assert by_cost.is_due(3, 50.1)


def test_losses_that_come_faster_than_snapshots_are_due_do_not_put_them_off_for_ever() -> None:
    cadence = Cadence()
    cadence.start(0, 0.0)
    cadence.begun(3, 1.0)
    cadence.ended(read_s=1.0, made_s=0.0)  # one in twenty seconds
    for at_s in (10.0, 18.0):
        cadence.start(3, at_s)
    assert not cadence.is_due(4, 20.9)
    assert cadence.is_due(4, 21.1)


@given(st.data())
def test_what_a_loss_costs_is_bounded_however_often_epochs_end(data: st.DataObject) -> None:
    """By the time that copies must rest, by those on their way, and by two steps; an epoch too short for a copy adds its own."""
    draw = data.draw
    times = st.floats(0.1, 30.0)
    cadence, now_s, step, read_s = Cadence(), 0.0, 0, draw(st.floats(0.01, 0.5))
    rest_s = max(Cadence.LEAST_S, read_s / Cadence.SHARE)
    whole_s = 0.0  # when the last that counts was begun
    for _ in range(draw(st.integers(1, 8))):
        cadence.start(step, now_s)
        began_s, ends_s, takes_s, step_s = now_s, now_s + draw(times), draw(times), draw(st.floats(0.1, 3.0))
        on_its_way_s: float | None = None
        while (now_s := now_s + step_s) < ends_s:
            step += 1
            if on_its_way_s is not None and now_s >= on_its_way_s + takes_s:
                cadence.ended(read_s=read_s, made_s=0.0)
                whole_s, on_its_way_s = on_its_way_s, None
            if on_its_way_s is None and cadence.is_due(step, now_s):
                assert now_s - whole_s >= Cadence.LEAST_S, "they take no more than their share"
                cadence.begun(step, now_s)
                on_its_way_s = now_s
            asked_s = max(whole_s + max(rest_s, takes_s + step_s), began_s) + step_s
            assert now_s <= (asked_s if on_its_way_s is None else asked_s + takes_s + step_s) + 1e-6


def test_checkpoints_by_steps_are_caught_up_with_where_an_epoch_ended_before_one_was_complete() -> None:
    cadence = Cadence(25)
    cadence.start(0, 0.0)
    cadence.begun(25, 1.0)
    cadence.ended(read_s=0.1, made_s=0.1)
    cadence.begun(50, 2.0)
    cadence.start(54, 3.0)
    assert cadence.is_due(55, 3.0)
    cadence.begun(55, 3.0)
    cadence.ended(read_s=0.1, made_s=0.1)
    assert next(s for s in range(56, 100) if cadence.is_due(s, 9.0)) == 75


@given(st.data())
def test_a_stages_files_are_what_safetensors_reads_whatever_the_order_in_which_tensors_come(
    data: st.DataObject,
) -> None:
    """Tensors that are equal come once. What comes in order waits for nothing."""
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    shapes = st.lists(st.integers(0, 3), max_size=3)
    files: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for i, (dtype, shape, file) in enumerate(
        data.draw(st.lists(st.tuples(dtypes, shapes, st.sampled_from(sorted(files))), max_size=8))
    ):
        files[file][f"p{i}"] = torch.ones(shape).to(dtype)
    expected = [{n: (t.dtype, tuple(t.shape)) for n, t in files[file].items()} for file in ("model", "optimizer")]
    full = {
        n: (torch.float32 if dtype == torch.bfloat16 else dtype, shape) for n, (dtype, shape) in expected[0].items()
    }
    offer: Any = SimpleNamespace(
        index=2, changed_state=expected[0], expected_optimizer=expected[1], layouts=(full, expected[1])
    )  # buffers may be narrower in a file than they are sent
    tensors = {n: t.to(full[n][0]) for n, t in files["model"].items()}, files["optimizer"]
    stage = StageCopy(*({n: digest_of(t) for n, t in part.items()} for part in tensors))
    found = {digest_of(t): t for part in tensors for t in part.values()}
    with tempfile.TemporaryDirectory() as folder:
        draft = CheckpointStore(Path(folder)).draft(3)
        written = StageFiles(draft, offer, stage)
        assert written.wanted == {digest: (t.dtype, tuple(t.shape)) for digest, t in found.items()}
        order = data.draw(st.permutations(list(written.wanted)))
        for digest in order:
            written.give(digest, found[digest])
        assert written.is_whole
        for file, part in files.items():
            read = safetensors.torch.load_file(draft.folder / f"{file}-2.safetensors")
            assert read.keys() == part.keys()
            assert all(torch.equal(read[n], part[n]) and read[n].dtype == part[n].dtype for n in part)
        draft.discard()
        assert list(Path(folder).iterdir()) == []


async def saves(folder: Path, *hold: str, lack: str = "") -> tuple[Saving, list[Checkpoint]]:
    """One stage is saved, of which these peers have everything but one tensor, and `lack` that one too not."""
    captured = captured_job()
    plan = even_plan(captured.train.num_blocks, 1, 24, 6)
    offer = Offer(Terms.of(job_of(), captured, 60.0), plan, (1, 1), (1, "c"), "p0", captured.train, None, {})
    weights = {name: captured.state[name].detach() for name in offer.changed_state}
    stage = StageCopy({name: digest_of(tensor) for name, tensor in weights.items()}, {}, set(hold))
    tensors, last = {digest_of(tensor): tensor for tensor in weights.values()}, list(stage.weights.values())[-1]
    store = CheckpointStore.of(folder, job_of(), captured, 6)
    network, times = MemoryNetwork(), Timeouts()
    async with AsyncExitStack() as stack:
        for peer in hold:
            has = {digest: t for digest, t in tensors.items() if peer != lack or digest != last}
            transport = await stack.enter_async_context(network.transport(peer))
            transport.serve("copies", lambda stream, has=has: serve(stream, lambda header, d: has.get(d), times))
        reader = Reader(await stack.enter_async_context(network.transport("owner")), "run", {}, times)
        link = Link(offer, SimpleNamespace(peer_id="p0"))  # type: ignore[arg-type]
        trouble = Trouble(asyncio.get_running_loop().time)
        saving = Saving(store, Cadence(1), trouble, [link], captured, 0, reader)
        running = asyncio.create_task(saving.run())
        saving.begin(1)
        saving.take_up(CopySet(1, (stage,)))
        saving.reported(0)
        await saving.settled.wait()
        running.cancel()
    for found in store.complete():
        found.verify()
        assert_equal(dict(found.weights(weights)), weights)
    return saving, store.complete()


@virtual_time
async def test_a_checkpoint_is_read_from_whoever_holds_the_copies() -> None:
    for hold, lack in ((("p0",), ""), (("p0", "p1"), "p0"), (("p0", "p1"), "p1")):
        with tempfile.TemporaryDirectory() as folder:
            saving, complete = await saves(Path(folder), *hold, lack=lack)
            assert ([found.next_step for found in complete], saving.done) == ([1], 1)


@virtual_time
async def test_a_checkpoint_that_nobody_has_all_copies_of_leaves_nothing_and_is_tried_again_before_long() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saving, complete = await saves(Path(folder), "p0", lack="p0")
        assert (complete, saving.done, saving.reading, list(Path(folder).iterdir())) == ([], -1, [], [])
        assert not saving.is_due(2)
        await asyncio.sleep(RETRY_S)
        assert saving.is_due(2)


def test_without_its_line_a_checkpoint_with_a_hole_counts() -> None:
    with changed(Saving.read, "return not fetch.missing", "return True"):
        assert breaks(test_a_checkpoint_that_nobody_has_all_copies_of_leaves_nothing_and_is_tried_again_before_long)


def test_a_thread_that_outlives_its_epoch_writes_nothing_more(tmp_path: Path) -> None:
    draft = CheckpointStore(tmp_path).draft(3)
    writer = draft.create("model-0.safetensors", b"header")
    draft.discard()
    assert list(tmp_path.iterdir()) == []
    handle = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)  # has the number that the file had
    try:
        writer.write(b"late")
        writer.close()
    finally:
        os.close(handle)
    assert (tmp_path / "other").read_bytes() == b""
    with pytest.raises(OSError, match="model-1"):
        draft.create("model-1.safetensors", b"header")


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "fast"),
    [(0.0, 1e9, True), (0.2, 1e8, True), (0.05, 1e6, False), (0.005, 1e5, False), (0.3, 2e6, False)],
)
def test_a_fast_link_carries_whole_chunks_and_a_slow_one_a_twentieth_of_its_time(
    latency_s: float, bytes_per_s: float, fast: bool
) -> None:
    stride, carried, used_s, now_s = Stride(), 0, 0.0, 0.0
    while carried < 64 << 20 and now_s < 2000:
        part_s = latency_s + stride.bytes / bytes_per_s
        carried, used_s = carried + stride.bytes, used_s + stride.bytes / bytes_per_s
        stride.took(part_s, stride.bytes)
        now_s += part_s + stride.rest_s
        assert stride.bytes / bytes_per_s < 0.35
    assert stride.is_fast == fast
    if not fast:
        assert 0.02 < used_s / now_s < 0.08
