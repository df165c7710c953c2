"""One plan hands over to the next: blocks that change hands go from member to member, and no number differs."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from meshcee.callbacks import Callback, Control
from meshcee.eager import plain
from meshcee.errors import ProtocolError
from meshcee.events import Event
from meshcee.files import disk
from meshcee.files.home import Home
from meshcee.plan import Plan
from peers.node.mesh import Mesh
from peers.owner.adaptation import Adaptation
from peers.owner.epoch import Report
from peers.owner.numbers import Numbers
from peers.state.checkpoint import CheckpointStore
from peers.state.copying import Copying
from peers.state.keeping import Keeping, Supplies
from peers.state.manifest import CopySet, Manifest
from peers.state.policy import Keepers
from tests.peers.owner.test_recovery import STEPS, a_mesh, assert_undisturbed, captured_job, job_of, stage_of, train
from tests.peers.state.test_keep import Epoch, answered, described, offers
from tests.rig.disks import RefusingDisk
from tests.rig.virtual_time import virtual_time

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

LAST = 10  # the step at whose end another plan is chosen; the one after it is fed already


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were computed more than once."""
    found: list[int] = []
    compare = Numbers.compare

    def note(self: Numbers, step: int, loss: float) -> None:
        found.append(step)
        compare(self, step, loss)

    monkeypatch.setattr(Numbers, "compare", note)
    return found


def shifted(plan: Plan) -> Plan:
    """The longest stage gives a block to one beside it."""
    (pipeline,) = plan.pipelines
    stages = list(pipeline.stages)
    gives = max(range(len(stages)), key=lambda i: stages[i].end - stages[i].first)
    stage = stages[gives]
    if gives:
        stages[gives] = replace(stage, first=stage.first + 1)
        stages[gives - 1] = replace(stages[gives - 1], end=stage.first + 1)
    else:
        stages[0], stages[1] = replace(stage, end=stage.end - 1), replace(stages[1], first=stage.end - 1)
    return replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Another plan is chosen at the end of LAST: the running one and that."""
    plans: list[Plan] = []

    async def choose(self: Adaptation, report: Report, can_move: bool) -> Plan | None:
        if report.step != LAST:
            return None
        plans.extend((self._plan, shifted(self._plan)))
        return plans[-1]

    monkeypatch.setattr(Adaptation, "hear", choose)
    return plans


def only(logged: list[Any], event: str) -> list[Any]:
    return [entry for entry in logged if entry["event"] == event]


async def run(home: Home, hear: Callable[[Any, Mesh, Report], None] = lambda *what: None) -> tuple[Any, list[Report]]:
    told: list[Report] = []
    async with a_mesh(home, 3) as (here, mesh):

        def note(report: Report) -> None:
            told.append(report)
            hear(here, mesh, report)

        return await train(mesh, note), told


async def test_moved_blocks_come_from_the_member_that_had_them_and_no_number_changes(
    tmp_path: Path, moving: list[Plan], again: list[int]
) -> None:
    home = Home(tmp_path)
    with capture_logs() as logged:
        result, told = await run(home)
    assert_undisturbed(result, told, home)
    assert again == []
    old, new = moving
    assert result.plan == new
    (back,) = only(logged, Event.STATE_FOUND)
    assert back["with_peers"]
    assert back["next_step"] == back["done"] > LAST
    graph = captured_job().train
    moved = set[str]()
    for before, after in zip(old.pipelines[0].stages, new.pipelines[0].stages):
        had, has = (set(graph.slice(s.first, s.end).trainable) for s in (before, after))
        moved |= has - had
    come = only(logged, "state from copies")
    assert {entry["missing"] for entry in come} == {0}
    tensors = sum(entry["tensors"] for entry in come)
    assert len(moved) < tensors <= 4 * len(moved), (
        "weights, two moments, a count: of what has moved, and of nothing else"
    )


@pytest.mark.slow
async def test_who_dies_with_what_it_hands_over_costs_the_steps_since_the_last_copies(
    tmp_path: Path, moving: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, add, died = Home(tmp_path), Manifest.add, asyncio.Event()

    def and_tell(self: Manifest, copied: CopySet) -> None:
        add(self, copied)
        if copied.handed and not died.is_set():
            died.set()
            crash()

    crash: Callable[[], None] = died.set
    monkeypatch.setattr(Manifest, "add", and_tell)

    def hear(here: Any, mesh: Mesh, report: Report) -> None:
        nonlocal crash
        name = stage_of(here, mesh, 0)
        crash = lambda: here.crash(name)  # noqa: E731

    with capture_logs() as logged:
        result, told = await run(home, hear)
    assert died.is_set()
    assert only(logged, Event.MEMBER_LOST)
    assert result.plan is not None
    assert len(result.plan.peers) == 2
    assert_undisturbed(result, told, home)


@pytest.mark.slow
async def test_a_plan_whose_beginning_nobody_could_keep_waits(
    tmp_path: Path, again: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses, and members hold no second state beside what was just handed over. Else the run would go back to that."""
    home, broken, moved, waited = Home(tmp_path), RefusingDisk(tmp_path / "runs"), list[int](), list[int]()

    async def choose(self: Adaptation, report: Report, can_move: bool) -> Plan | None:
        if report.step != LAST and (not moved or len(moved) == 2 or report.step < moved[0] + 3):
            return None
        (moved if can_move else waited).append(report.step)
        return shifted(running[-1]) if can_move else None

    def hear(here: Any, mesh: Mesh, report: Report) -> None:
        assert mesh.result.plan is not None
        running.append(mesh.result.plan)
        if report.step == LAST - 2:
            broken.error = errno.EROFS
        elif report.step == STEPS - 1:
            broken.error = None

    running: list[Plan] = []
    monkeypatch.setattr(Adaptation, "hear", choose)
    with disk.using(broken):
        result, told = await run(home, hear)
    assert_undisturbed(result, told, home)
    assert broken.refused
    assert moved[0] == LAST
    assert waited
    assert again == []


@pytest.mark.slow
async def test_a_disk_that_fills_up_while_a_plan_just_handed_over_to_ends_costs_no_step(
    tmp_path: Path, again: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was to take the state, as members hold what was handed over; it refuses once the plan is to change.

    A real storm had this: the run went back to what was handed over first, 33 steps before, and nobody was lost.
    """
    home, broken, moved, is_due = Home(tmp_path), RefusingDisk(tmp_path / "runs"), list[int](), Copying.is_due

    async def choose(self: Adaptation, report: Report, can_move: bool) -> Plan | None:
        if report.step != LAST and (len(moved) != 1 or report.step < moved[0] + 3):
            return None
        assert can_move
        if moved:
            broken.error = errno.ENOSPC
        moved.append(report.step)
        return shifted(running[-1])

    def hear(here: Any, mesh: Mesh, report: Report) -> None:
        assert mesh.result.plan is not None
        running.append(mesh.result.plan)
        if report.step == STEPS - 1:
            broken.error = None

    running: list[Plan] = []
    monkeypatch.setattr(Adaptation, "hear", choose)
    monkeypatch.setattr(Copying, "is_due", lambda self, step: not self.is_first_to_copy and is_due(self, step))
    with disk.using(broken), capture_logs() as logged:
        result, told = await run(home, hear)
    assert_undisturbed(result, told, home)
    assert broken.refused
    assert len(moved) == 2
    assert again == []
    assert [entry["next_step"] - entry["done"] for entry in only(logged, Event.STATE_FOUND)] == [0, 0]


@pytest.mark.slow
async def test_a_user_who_stops_while_plans_change_has_the_weights(
    tmp_path: Path, moving: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, end, meshes, handed = Home(tmp_path), Keeping.end, list[Mesh](), list[bool]()

    async def and_stop(self: Keeping, next_step: int, **more: bool) -> bool:
        handed.append(await end(self, next_step, **more))
        meshes[0].stop()
        return handed[-1]

    monkeypatch.setattr(Keeping, "end", and_stop)
    result, told = await run(home, lambda here, mesh, report: meshes.append(mesh))
    assert result.stopped
    assert handed == [True, False]
    losses, _, model, _ = plain(job_of(), len(told), 6)
    assert result.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(result.state_dict[name], tensor), name


@pytest.mark.slow
async def test_a_user_who_stops_where_nobody_had_room_for_the_weights_has_them(
    tmp_path: Path, moving: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans change, members have no room for copies, and the disk refuses: the run had ended with no weights at all."""
    home, broken, meshes = Home(tmp_path), RefusingDisk(tmp_path / "runs"), list[Mesh]()
    stopped: list[Keeping] = []

    def hear(here: Any, mesh: Mesh, report: Report) -> None:
        meshes.append(mesh)
        if report.step == LAST and not stopped:
            broken.error = errno.ENOSPC

    async def nowhere(self: Keeping) -> bool:
        assert not self.is_saved
        meshes[0].stop()
        stopped.append(self)
        broken.error = None
        return False

    monkeypatch.setattr(Copying, "can_hand_over", False)
    monkeypatch.setattr(Keeping, "hand_over_instead", nowhere)
    with disk.using(broken):
        result, told = await run(home, hear)
    assert len(stopped) == 1
    assert result.stopped
    losses, _, model, _ = plain(job_of(), len(told), 6)
    assert result.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(result.state_dict[name], tensor), name


@pytest.mark.slow
async def test_a_state_that_is_to_be_kept_as_plans_change_is_that_state(
    tmp_path: Path, moving: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one, say: the new plan has no copies, and none are due."""

    class Asks(Callback):
        waits = "steps"

        def on_step(self, run: Control, report: Report) -> None:
            if report.step == LAST:
                asked.append(run.next_step)
                run.checkpoint(keep=True)

    home, asked, is_due = Home(tmp_path), list[int](), Copying.is_due
    monkeypatch.setattr(Copying, "is_due", lambda self, step: not self.is_first_to_copy and is_due(self, step))
    told: list[Report] = []
    async with a_mesh(home, 3) as (_, mesh):
        result = await train(mesh, told.append, callbacks=[Asks()])
    assert_undisturbed(result, told, home)
    assert result.plan == moving[1]
    assert asked == [LAST + 1]
    assert asked[0] in [found.next_step for found in CheckpointStore(home.run("last").checkpoints).complete()]


async def test_what_was_still_awaited_of_other_copies_is_let_pass_once() -> None:
    epoch = Epoch()
    epoch.round(4)
    epoch.copying.begin(7)
    epoch.copying.hear(epoch.links[0], described(offers()[0], 7))
    epoch.copying.hand_over(9)
    late = (0, described(offers()[0], 7)), (1, described(offers()[1], 7)), (1, answered("p0", 7))
    for index, frame in late[1:]:
        epoch.copying.hear(epoch.links[index], frame)
    for index, frame in late:
        with pytest.raises(ProtocolError, match="nobody asked for"):
            epoch.copying.hear(epoch.links[index], frame)
    for link, offer in zip(epoch.links, offers()):
        assert not epoch.copying.handed_over.is_set()
        epoch.copying.hear(link, described(offer, 9))
    assert epoch.copying.handed_over.is_set()
    with pytest.raises(ProtocolError, match="nobody asked for"):
        epoch.copying.hear(epoch.links[0], described(offers()[0], 9))
    assert [epoch.asked(i) for i in (0, 1)] == [1, 2], "no keeper keeps it"


async def test_older_copies_are_kept_beside_what_was_handed_over_until_the_next_plan_has_its_own() -> None:
    epoch = Epoch()
    epoch.round(4)
    assert epoch.copying.can_hand_over
    epoch.copying.hand_over(9)
    for link, offer in zip(epoch.links, offers()):
        epoch.copying.hear(link, described(offer, 9))
    found = epoch.copies.newest(9)
    assert found is not None
    assert (found.next_step, found.handed, CopySet.from_json(found.to_json())) == (9, True, found)
    following = Copying(epoch.copies, epoch.links, Keepers({"p0": "p1", "p1": "p0"}), 9)
    assert (following.since, following.can_hand_over, following.is_first_to_copy) == (4, False, True)
    for link in epoch.links:
        link.stream.max_payload_bytes = 0
    nothing: Any = SimpleNamespace(state={}, plain_layout={})
    assert Keeping(Supplies(copies=epoch.copies), epoch.links, nothing, 9, nothing, nothing)._besides(12) == [4, 9]
    found = epoch.copies.newest(9, ["p0"])
    assert found is not None
    assert found.next_step == 4, "its keeper has it"
    epoch.copying = following
    epoch.round(12)
    assert (following.since, following.can_hand_over, following.is_first_to_copy) == (12, True, False)


@pytest.mark.parametrize("cut", [False, True])
@virtual_time
async def test_copies_that_a_hand_over_cuts_short_are_made_up_for_at_the_next_plans_first_step(cut: bool) -> None:
    """The set before them is whole and old: every further step would be computed again after a loss."""
    epoch = Epoch()
    epoch.round(4, read_s=0.5)  # one in ten seconds
    await asyncio.sleep(9)
    assert not epoch.copying.is_due(7)
    await asyncio.sleep(1)
    assert epoch.copying.is_due(7)
    if cut:
        epoch.copying.begin(7)
    else:
        epoch.round(7, read_s=0.5)
    await asyncio.sleep(3)
    epoch.copying.hand_over(9)
    for link, offer in zip(epoch.links, offers()):
        epoch.copying.hear(link, described(offer, 9))
    following = Copying(epoch.copies, epoch.links, Keepers({"p0": "p1", "p1": "p0"}), 9)
    await asyncio.sleep(2)
    assert following.is_due(10) == cut
    await asyncio.sleep(5)
    assert following.is_due(14), "ten seconds after the last that count were asked for"
