"""Another machine follows a run and goes on with it when its owner is gone: the same losses, the same weights. On virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.virtual_chaos import MICRO, STEPS, captured_job, expected, job_of, quick_planning, stormy
from dht.directory import Directory
from dht.records import Record, RunRecord
from dht.signing import Identity
from meshcee import plain
from meshcee.errors import MeshceeError, PeerLostError, ProtocolError, UsageError, unwrap
from meshcee.files.home import Home
from peers.device.compute import Pace
from peers.node.mesh import Mesh
from peers.owner.epoch import Report
from peers.owner.result import Result
from peers.owner.turn import Turn
from peers.state.journal import FILES, MOST_BYTES, Mirror
from peers.transport.base import Frame
from peers.wire import messages
from tests.mutation import breaks, changed
from tests.rig.virtual_time import quiet, run

DIES_AT = 8
TAKES_OVER_WITHIN_S = 30.0
LONG_DEAD_S = 15.0  # longer than a record lasts


class Story:
    """An owner and a standby with homes of their own, as on two machines. `blow` strikes at the owner's step DIES_AT."""

    def __init__(self, folder: Path, blow: Any, steps: int = STEPS) -> None:
        self.homes = {name: Home(folder / name) for name in ("chief", "heir")}
        self._folder, self._blow = folder, blow
        self.chief: list[int] = []  # steps that the owner has told of
        self.heir: list[int] = []
        self.chief_ended: BaseException | None = None
        self.took_over_s = 0.0
        self.struck = asyncio.Event()
        self.job = replace(job_of(), steps=steps)
        self.told: list[str] = []
        self.identities = {name: Identity.generate() for name in self.homes}

    async def play(self) -> Any:
        async with stormy(0, self._folder) as storm, asyncio.TaskGroup() as group, asyncio.timeout(900):
            meshes = {}
            for name, home in self.homes.items():
                agent = await storm.here.start(name, lends=False, identity=self.identities[name])
                meshes[name] = Mesh(agent, group, home)
            self.loop, self.storm = asyncio.get_running_loop(), storm
            owning = group.create_task(self.own(meshes["chief"]))
            result = await self._stand_by(meshes["heir"])
            if self._blow is cut_off_with_no_peer_to_spare:
                await owning
            owning.cancel()
            return result

    async def play_without_a_standby_until_it_is_dead(self) -> Any:
        """The heir's machine joins when the owner has been dead for so long that no record tells of its run."""
        async with stormy(0, self._folder) as storm, asyncio.TaskGroup() as group, asyncio.timeout(900):
            self.loop, self.storm = asyncio.get_running_loop(), storm
            agent = await storm.here.start("chief", lends=False, identity=Identity.generate())
            owning = group.create_task(self.own(Mesh(agent, group, self.homes["chief"])))
            await self.struck.wait()
            await asyncio.sleep(LONG_DEAD_S)
            agent = await storm.here.start("heir", lends=False, identity=Identity.generate())
            result = await self._stand_by(Mesh(agent, group, self.homes["heir"]))
            owning.cancel()
            return result

    async def own(self, mesh: Mesh) -> None:
        self.storm.mesh = mesh
        training = mesh.train(replace(self.job, checkpoint_every=5), captured=captured_job(), stages=3)
        try:
            async with contextlib.aclosing(training):
                async for report in self.until_struck(training):
                    self.chief.append(report.step)
        except MeshceeError as error:
            self.chief_ended = error

    async def until_struck(self, training: AsyncIterator[Report]) -> AsyncIterator[Report]:
        async for report in training:
            yield report
            if report.step == DIES_AT and self._blow is not None:
                self.struck_s = self.loop.time()
                self.struck.set()
                if await self._blow(self.storm):
                    await asyncio.Event().wait()  # it is dead

    async def _stand_by(self, mesh: Mesh) -> Any:
        followed = await mesh.stand_by(self.job, captured_job(), tell=self.told.append)
        if followed is None:
            return None
        run_id, owner = followed
        training = mesh.train(self.job, captured=captured_job(), resume=run_id, after=owner)
        async with contextlib.aclosing(training):
            async for report in training:
                self.took_over_s = self.took_over_s or self.loop.time() - self.struck_s
                self.heir.append(report.step)
        return mesh.result


async def killed(storm: Any) -> bool:
    storm.here.crash("chief")
    return True


async def killed_with_a_member(storm: Any) -> bool:
    storm.here.crash("chief")
    storm.here.crash("p1")
    return True


async def killed_with_all_copies(storm: Any) -> bool:
    """Nobody holds a copy any more, and the checkpoints are on the dead owner's disk: from the first step again."""
    for name in ("chief", *list(storm.lending)[:3]):
        if name != "heir" and name in storm.here.agents:
            storm.here.crash(name)
    for k in range(3):
        await storm.start(f"new{k}")
    return True


async def killed_with_all_members(storm: Any) -> bool:
    for name in ("chief", *storm.lending):
        if name != "heir" and name in storm.here.agents:
            storm.here.crash(name)
    return True


async def cut_off_from_the_standby(storm: Any) -> bool:
    """Both live, and each believes that the run is its own."""
    chief, heir = (storm.here.agents[name].peer_id for name in ("chief", "heir"))
    storm.here.network.cut(chief, heir)
    storm.here.network.cut(heir, chief)
    return False


async def cut_off_with_no_peer_to_spare(storm: Any) -> bool:
    for name in set(storm.lending) - {"chief", "heir", *storm.members()}:
        storm.here.crash(name)
    return await cut_off_from_the_standby(storm)


def assert_exact(result: Any) -> None:
    losses, state = expected()
    assert result.losses == losses
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in state.items())


@pytest.mark.cases(1)
@pytest.mark.parametrize("blow", [killed, killed_with_a_member])
def test_a_standby_goes_on_with_a_run_whose_owner_dies(tmp_path: Path, blow: Any) -> None:
    story = Story(tmp_path, blow)
    with quiet(), quick_planning():
        result = run(story.play())
    assert_exact(result)
    assert story.heir[-1] == STEPS - 1
    assert story.heir == list(range(story.heir[0], STEPS))
    assert story.took_over_s < TAKES_OVER_WITHIN_S
    (kept,) = story.homes["heir"].runs()
    assert kept.state == "done"
    assert [line["step"] for line in kept.reports()] == list(range(STEPS))


@pytest.mark.slow
def test_a_standby_that_comes_after_the_owner_has_died_goes_on_from_the_journal_that_peers_keep(tmp_path: Path) -> None:
    story = Story(tmp_path, killed)
    with quiet(), quick_planning():
        result = run(story.play_without_a_standby_until_it_is_dead())
    assert_exact(result)
    assert story.heir == list(range(story.heir[0], STEPS))
    assert story.heir[0] > 0  # all is known but what was told since the last beat
    (kept,) = story.homes["heir"].runs()
    assert [line["step"] for line in kept.reports()] == list(range(STEPS))
    assert any("from the journal that a peer keeps" in text for text in story.told)


class Behind(Story):
    """The standby and the owner lose each other at step CUT_AT, long before the owner dies."""

    CUT_AT, DIES_AT = 3, 30

    async def until_struck(self, training: AsyncIterator[Report]) -> AsyncIterator[Report]:
        async for report in training:
            yield report
            if report.step == self.CUT_AT:
                await cut_off_from_the_standby(self.storm)
            if report.step == self.DIES_AT:
                self.struck_s = self.loop.time()
                self.storm.here.crash("chief")
                await asyncio.Event().wait()


@pytest.mark.slow
def test_a_standby_that_has_fallen_behind_has_the_newest_journal_from_a_peer(tmp_path: Path) -> None:
    steps = 3 * STEPS
    story = Behind(tmp_path, None, steps)
    with quiet(), quick_planning():
        result = run(story.play())
    losses, _, model, _ = plain(story.job, steps, MICRO)
    assert result.losses == losses
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in model.state_dict().items())
    assert story.heir == list(range(story.heir[0], steps))
    assert story.heir[0] > Behind.DIES_AT / 2  # it has itself heard of the first few only
    assert story.took_over_s < TAKES_OVER_WITHIN_S


@pytest.mark.slow
def test_that_the_record_of_its_run_expires_first_is_no_word_of_a_dead_owner(tmp_path: Path) -> None:
    lasts_s = Directory.ttl_s

    def shorter_s(directory: Directory, kind: type[Record]) -> float:
        return lasts_s(directory, kind) - (4.0 if kind is RunRecord else 0.0)

    story = Story(tmp_path, killed)
    with quiet(), quick_planning(), mock.patch.object(Directory, "ttl_s", shorter_s):
        result = run(story.play())
    assert_exact(result)


class WithAHungDevice(Story):
    """A member's device hangs at step HANGS_AT, its owner leaves it out, and dies behind the next steps."""

    HANGS_AT = 3

    async def until_struck(self, training: AsyncIterator[Report]) -> AsyncIterator[Report]:
        async for report in super().until_struck(training):
            yield report
            if report.step == self.HANGS_AT:
                self.hung = self.storm.here.agents[self.storm.members()[1]]
                self.hung.compute.pace = Pace(1e-9)


@pytest.mark.slow
def test_a_standby_leaves_out_at_once_whom_the_dead_owner_left_out(tmp_path: Path) -> None:
    story = WithAHungDevice(tmp_path, killed)
    with quiet(), quick_planning():
        result = run(story.play())
    assert_exact(result)
    assert story.took_over_s < TAKES_OVER_WITHIN_S  # else it would wait for the hung device first
    assert story.hung.peer_id in story.homes["heir"].runs()[0].info["failed"]


@pytest.mark.slow
def test_without_any_copy_a_standby_begins_again_and_tells_of_no_step_twice(tmp_path: Path) -> None:
    story = Story(tmp_path, killed_with_all_copies)
    with quiet(), quick_planning():
        result = run(story.play())
    assert_exact(result)
    assert story.heir == list(range(story.heir[0], STEPS))
    assert story.heir[0] > 0  # what the owner has told of is known


@pytest.mark.slow
def test_a_standby_that_finds_too_few_peers_says_how_to_go_on(tmp_path: Path) -> None:
    story = Story(tmp_path, killed_with_all_members)
    with quiet(), quick_planning(), pytest.raises(BaseExceptionGroup) as caught:
        run(story.play())
    (kept,) = story.homes["heir"].runs()
    error = unwrap(caught.value)
    assert isinstance(error, PeerLostError)
    assert f"start more peers, then go on with `meshcee train JOB.py --resume {kept.id}`" in str(error)


@pytest.mark.slow
def test_a_standby_that_alone_cannot_reach_the_owner_leaves_the_run_to_it(tmp_path: Path) -> None:
    story = Story(tmp_path, cut_off_from_the_standby)
    with quiet(), quick_planning():
        assert run(story.play()) is None
    assert story.chief == list(range(STEPS))


@pytest.mark.slow
def test_of_two_owners_that_both_believe_the_run_theirs_the_members_follow_the_later_one(tmp_path: Path) -> None:
    """The standby hears nothing of an owner that lives, takes over, and the owner cannot go on."""
    steps = 2 * STEPS
    story = Story(tmp_path, cut_off_with_no_peer_to_spare, steps)
    slow = mock.patch("benchmarks.virtual_chaos.PACE", Pace(4e3))  # or the owner is done before the standby has waited
    with quiet(), quick_planning(), slow, mock.patch("peers.owner.standby.lives", return_value=False):
        result = run(story.play())
    losses, _, model, _ = plain(story.job, steps, MICRO)
    assert result.losses == losses
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in model.state_dict().items())
    assert "owns the run now" in str(story.chief_ended)
    assert story.chief == list(range(len(story.chief)))
    assert len(story.chief) < steps


@pytest.mark.slow
def test_a_standby_of_a_run_that_ends_by_itself_has_nothing_to_do(tmp_path: Path) -> None:
    story = Story(tmp_path, None)
    with quiet(), quick_planning():
        assert run(story.play()) is None
    assert story.chief == list(range(STEPS))
    (kept,) = story.homes["heir"].runs()
    assert [line["step"] for line in kept.reports()] == list(range(STEPS))


class EndsUnheard(Story):
    """The owner is done and dies before its last word is out, while it and the standby cannot reach each other."""

    async def own(self, mesh: Mesh) -> None:
        with mock.patch("peers.owner.turn.Turn.end", return_value=None):
            await super().own(mesh)
        self.storm.here.crash("chief")


@pytest.mark.slow
def test_a_standby_hears_from_peers_that_the_run_is_over(tmp_path: Path) -> None:
    story = EndsUnheard(tmp_path, cut_off_from_the_standby)
    with quiet(), quick_planning():
        assert run(story.play()) is None
    assert story.chief == list(range(STEPS))


class WithAThird(Story):
    """Another owner's job waits for its turn while the run goes on."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, killed)
        self.homes = {**self.homes, "third": Home(folder / "third")}
        self.third = replace(self.job, name=name)
        self.waited: list[str] = []
        self.order: list[str] = []

    async def play(self) -> Any:
        async with stormy(0, self._folder) as storm, asyncio.TaskGroup() as group, asyncio.timeout(1800):
            meshes = {}
            for name, home in self.homes.items():
                agent = await storm.here.start(name, lends=False, identity=Identity.generate())
                meshes[name] = Mesh(agent, group, home)
            self.loop, self.storm = asyncio.get_running_loop(), storm
            owning = group.create_task(self.own(meshes["chief"]))
            await meshes["third"].agent.directory.wait_for(lambda: meshes["third"].agent.directory.runs)
            waiting = group.create_task(self.wait(meshes["third"]))
            result = await self._stand_by(meshes["heir"])
            self.order.append("run")
            losses = await waiting
            owning.cancel()
            return result, losses

    async def wait(self, mesh: Mesh) -> list[float]:
        training = mesh.train(self.third, captured=captured_job(), stages=3, on_wait=self.waited.append)
        losses = [report.loss async for report in training]
        self.order.append("third")
        return losses


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["demo", "another"])
def test_a_job_that_waits_leaves_the_run_of_a_dead_owner_to_its_standby(tmp_path: Path, name: str) -> None:
    story = WithAThird(tmp_path, name)
    story.third = replace(story.third, name=story.job.name if name == "demo" else name)
    with quiet(), quick_planning():
        result, losses = run(story.play())
    assert_exact(result)
    assert losses == expected()[0]
    assert story.heir[0] > 0
    assert story.order == ["run", "third"]
    assert any("may go on elsewhere" in text for text in story.waited)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "line", "instead"),
    [
        (Turn, "if now_s - x[1] < TAKEN_UP_S", "if False"),
        (Turn, " and not self._goes_on", ""),
    ],
    ids=["gone", "goes on"],
)
def test_without_its_line_the_job_that_waits_is_first(tmp_path: Path, function: Any, line: str, instead: str) -> None:
    with changed(function, line, instead):
        assert breaks(lambda: test_a_job_that_waits_leaves_the_run_of_a_dead_owner_to_its_standby(tmp_path, "another"))


class WithItsIdentity(Story):
    """Where the owner was, another process starts with its identity as soon as it is dead."""

    async def until_struck(self, training: AsyncIterator[Report]) -> AsyncIterator[Report]:
        async for report in super().until_struck(training):
            yield report
            if report.step == DIES_AT - 1:
                asyncio.get_running_loop().create_task(self.come_back())

    async def come_back(self) -> None:
        await self.struck.wait()
        await asyncio.sleep(1.0)
        await self.storm.here.start("chief again", lends=False, identity=self.identities["chief"])


@pytest.mark.slow
def test_another_process_with_the_owners_identity_does_not_keep_the_standby_from_the_run(tmp_path: Path) -> None:
    story = WithItsIdentity(tmp_path, killed)
    with quiet(), quick_planning():
        result = run(story.play())
    assert_exact(result)
    assert story.took_over_s < TAKES_OVER_WITHIN_S


def test_a_standby_of_another_job_is_told_before_anything_happens(tmp_path: Path) -> None:
    mirror = Mirror(Home(tmp_path), "owner", lambda info: (_ for _ in ()).throw(UsageError("another model")))
    info = json.dumps({"job": {}}).encode()
    with pytest.raises(UsageError, match="another model"):
        mirror.take(Frame(messages.FILE, {"run": "r", "name": "run.json", "at": 0, "size": len(info)}, [info]))


class Clock:
    """What reads a clock cannot be seeded."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._reads = 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> Any:
        self._reads += 1
        return self._reads % 11, self._data[i][1]


def test_a_standby_that_could_not_feed_a_step_again_says_so_before_it_follows(tmp_path: Path) -> None:
    story = Story(tmp_path, None)
    story.job = replace(story.job, data=Clock(story.job.data))
    with pytest.raises(UsageError, match="another sample when it is read again") as refused:
        asyncio.run(Mesh(mock.Mock(), mock.Mock(), story.homes["heir"]).stand_by(story.job, captured_job()))
    assert "leave --standby out" in str(refused.value)


@pytest.mark.parametrize(
    "header",
    [
        {"run": "../r", "name": FILES[0], "at": 0, "size": 1},
        {"run": "", "name": FILES[0], "at": 0, "size": 1},
        {"run": "r" * 101, "name": FILES[0], "at": 0, "size": 1},
        {"run": "r", "name": "../../x", "at": 0, "size": 1},
        {"run": "r", "name": FILES[0], "at": -1, "size": 1},
        {"run": "r", "name": FILES[0], "at": 1, "size": 2},
        {"run": "r", "name": FILES[0], "at": 0, "size": 0},
        {"run": "r", "name": FILES[0], "at": 0, "size": MOST_BYTES + 1},
        {"run": "r", "name": FILES[1], "at": 7, "size": 9},
        {"run": "r", "name": FILES[0], "at": 0, "size": 1},  # no JSON
    ],
)
def test_what_an_owner_must_not_send_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    mirror = Mirror(Home(tmp_path / "home"), "owner", lambda info: None)
    with pytest.raises(ProtocolError):
        mirror.take(Frame(messages.FILE, header, [b"x"]))
    assert list(tmp_path.rglob("x")) == []


class TwoHeirs(Story):
    """Two machines stand by, and lose the owner at the same instant. `late`: one goes on when the other is at work."""

    def __init__(self, folder: Path, blow: Any, *, late: bool) -> None:
        super().__init__(folder, blow)
        self.late = late
        self.homes["second"] = Home(folder / "second")
        self.steps: dict[str, list[int]] = {"heir": [], "second": []}
        self.ready: list[str] = []
        self.outcomes: dict[str, Any] = {}

    async def play(self) -> Any:
        async with stormy(0, self._folder) as storm, asyncio.TaskGroup() as group, asyncio.timeout(900):
            self.loop, self.storm, meshes = asyncio.get_running_loop(), storm, {}
            for name, home in self.homes.items():
                agent = await storm.here.start(name, lends=False, identity=Identity.generate())
                meshes[name] = Mesh(agent, group, home)
            owning = group.create_task(self.own(meshes["chief"]))
            async with asyncio.TaskGroup() as standing:
                for name in self.steps:
                    standing.create_task(self.inherit(name, meshes[name]))
            owning.cancel()

    async def inherit(self, name: str, mesh: Mesh) -> None:
        try:
            followed = await mesh.stand_by(
                self.job, captured_job(), tell=lambda text: self.told.append(f"{name}: {text}")
            )
            assert followed is not None
            run_id, owner = followed
            self.ready.append(name)
            first = self.steps[self.ready[0]]
            while len(self.ready) < 2 or (self.late and name != self.ready[0] and not first):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)  # neither has heard of the other when it takes over
            training = mesh.train(self.job, captured=captured_job(), resume=run_id, after=owner)
            async with contextlib.aclosing(training):
                async for report in training:
                    self.steps[name].append(report.step)
            self.outcomes[name] = mesh.result
        except MeshceeError as error:
            self.outcomes[name] = error


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("late", [False, True])
def test_of_two_standbys_at_once_one_goes_on(tmp_path: Path, late: bool) -> None:
    """The members tell them apart, or the records of runs; one that waited for its turn did the rest again when it came."""
    story = TwoHeirs(tmp_path, killed, late=late)
    with quiet(), quick_planning():
        run(story.play())
    results = [found for found in story.outcomes.values() if isinstance(found, Result)]
    assert len(results) == 1
    assert_exact(results[0])
    (refused,) = [found for found in story.outcomes.values() if not isinstance(found, Result)]
    assert "owns the run now" in str(refused)
    steps = sorted(story.steps.values(), key=len)
    assert steps[1] == list(range(steps[1][0], STEPS))
    assert len(steps[0]) < len(steps[1])
