"""Training under blows on virtual time (benchmarks/virtual_chaos.py): a few seeds, and each moment at which a coordinator dies."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.aims import Aim
from benchmarks.blows import REFUSALS
from benchmarks.going_back import going_back
from benchmarks.one_seed import decided_by
from benchmarks.virtual_chaos import (
    STEPS,
    TIMES,
    Activations,
    Storm,
    job_of,
    play,
    quick_planning,
    stormy,
    train,
)
from meshcee.events import Event
from meshcee.files import disk
from peers.owner.epoch import Report
from peers.transport import StreamClosed
from tests.rig.frames import watched_frames
from tests.rig.virtual_time import Still, quiet, run

TOLD = {
    "disk full": "disk full at",
    "read-only disk": "read-only disk at",
    "clock step": "s off for",
    "slow loris": "bytes a second",
    "suspend": "suspended",
    "lose a region": "there again",
    "kill the owner": "the standby goes on",
    "hung device": "hangs for",
    "full device": "is out of memory",
    "leave": "has left",
}
# A blow at each kind of moment: before which of its frames, and what befalls those whom the frame is between.
AIMS = {
    "first offer": Aim("first offer", 4, "kill a member"),
    "re-offer": Aim("re-offer", 6, "kill a member"),
    "hand-over": Aim("hand-over", 12, "kill a member"),
    "checkpoint": Aim("checkpoint", 5, "cut"),
}


def outcomes(seeds: range, *, augmented: bool = False) -> list[tuple[int, list[str], str]]:
    """Of the seeds whose runs were not as an undisturbed one."""
    found = [play(seed, augmented) for seed in seeds]
    return [(r["seed"], r["blows"], r["outcome"]) for r in found if r["outcome"] != "equal"]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", TOLD)
def test_storms_of_one_kind(kind: str) -> None:
    found = play(1, kinds=[kind], aims=[], steps=STEPS)
    assert found["outcome"] == "equal", found
    assert any(TOLD[kind] in blow for blow in found["blows"]), found


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("moment", AIMS)
def test_a_blow_is_aimed_at_a_moment(moment: str) -> None:
    found = play(3, aims=[replace(AIMS[moment])], blows=0)
    assert found["outcome"] == "equal", found
    assert found["aimed"] == 1, found
    assert any(f"in a {moment}, with" in blow for blow in found["blows"]), found
    assert found["hand_overs_begun"] == (moment == "hand-over"), found


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", REFUSALS)
def test_the_owners_disk_refuses_a_checkpoint_that_is_under_way(kind: str) -> None:
    found = play(3, aims=[Aim("checkpoint", 5, kind)], blows=0)
    assert found["outcome"] == "equal", found
    assert any("in a checkpoint, with" in blow and f"{kind} at owner" in blow for blow in found["blows"]), found
    assert found["refused"] > 0, found


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [3, 6])
def test_who_leaves_while_a_plan_hands_over_costs_no_steps(seed: int) -> None:
    found = play(seed, aims=[Aim("hand-over", 6, "leave")], blows=0)
    assert found["outcome"] == "equal", found
    assert any("in a hand-over" in blow and blow.endswith(("leaves", "to leave")) for blow in found["blows"]), found
    assert found["back"], found
    assert not any(back["again"] for back in found["back"]), found


@pytest.mark.slow
def test_a_run_hands_over_and_a_seed_is_the_same_storm_each_time() -> None:
    one, again = ({**play(4), "seconds": 0.0} for _ in range(2))
    assert one == again
    assert one["outcome"] == "equal", one
    assert one["hand_overs"] > 0, one


def test_who_stands_still_runs_nothing_and_then_all_in_order() -> None:
    told: list[str] = []

    async def work(name: str, pause_s: float) -> None:
        for n in range(3):
            await asyncio.sleep(pause_s)
            told.append(f"{name}{n}")

    async def story() -> None:
        still = Still()
        with still.possible():
            tasks = []
            for name in ("a", "b"):
                with still.of(name):
                    tasks.append(asyncio.create_task(work(name, 1.0)))
            await asyncio.sleep(1.5)
            still.begin("a")
            await asyncio.sleep(10)
            assert told == ["a0", "b0", "b1", "b2"]
            still.end("a")
            await asyncio.gather(*tasks)

    run(story())
    assert told[4:] == ["a1", "a2"]


def test_a_loop_without_threads_makes_calls_in_its_turn_and_tells_of_their_errors() -> None:
    made: list[int] = []

    async def story() -> None:
        unwanted = asyncio.get_running_loop().run_in_executor(None, made.append, 0)
        unwanted.cancel()
        await asyncio.gather(*(asyncio.to_thread(made.append, n) for n in range(1, 4)))
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run(story(), inline=True)
    assert made == [1, 2, 3]


def test_a_few_storms() -> None:
    assert outcomes(range(2)) == []


@pytest.mark.slow
def test_a_storm_over_samples_that_are_augmented() -> None:
    assert outcomes(range(2, 3), augmented=True) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_storms() -> None:
    assert outcomes(range(1000, 1060)) == []


@pytest.mark.slow
def test_copies_of_a_peer_whose_device_fails_are_used(tmp_path: Path) -> None:
    """A stage's holder dies, and the only other one that has its state cannot compute: it can still give it."""

    async def story() -> str:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(1800):

            def hear(report: Report) -> None:
                if report.step == 9:
                    victim = storm.members()[0]
                    storm.full.add(storm.here.agents[storm.keeper_of(victim)].peer_id)
                    storm.kill(victim)

            return await train(storm, hear, replace(job_of(), checkpoint_every=100))

    with capture_logs() as logged, quick_planning():
        assert run(story(), inline=True) == "equal"
    went_on = [entry["with_peers"] for entry in logged if entry["event"] == Event.STATE_FOUND]
    assert went_on
    assert all(went_on)  # the death and the failure may be one loss or two


@pytest.mark.slow
def test_an_owner_that_sleeps_while_it_waits_for_the_mesh_trains_when_it_wakes(tmp_path: Path) -> None:
    """Longer than anything may take: what it waited for is there, and has not been read yet."""

    async def story() -> str:
        async with stormy(0, tmp_path) as storm:
            asyncio.get_running_loop().call_later(pause_s, storm.blows.suspend, "owner", 10 * TIMES.join_s)
            async with asyncio.timeout(1800):
                return await train(storm)

    for pause_s in (0.01, 0.4, 1.5, 2.5):
        with quiet(), quick_planning():
            assert run(story(), inline=True) == "equal", pause_s


class Moment:
    """Kills the coordinator just before the n-th frame between it and the owner; `kinds` are the frames until then."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.kinds: list[str] = []
        self.storm: Storm | None = None
        self.victim = ""

    def about_to_send(self, sender: str, receiver: str, kind: str) -> None:
        if self.storm is None:
            return
        if {sender, receiver} != {self.storm.here.agents[name].peer_id for name in ("owner", self.victim)}:
            return
        if len(self.kinds) == self.n:
            self.storm.kill(self.victim)
        self.kinds.append(kind)


async def killed_before(n: int, folder: Path) -> tuple[str, list[str]]:
    """The outcome of a run whose coordinator dies before the n-th frame between it and the owner, and those frames."""
    moment, activations = Moment(n), Activations()
    with watched_frames(moment.about_to_send), activations.watched():
        async with stormy(n, folder) as storm:
            await storm.agreed()
            victim = storm.coordinator()
            assert victim is not None
            moment.storm, moment.victim = storm, victim
            async with asyncio.timeout(1800):
                outcome = await train(storm)
            moment.storm = None
            await storm.agreed()
    assert activations.doubled == []
    return outcome, moment.kinds


def sweep(tmp_path: Path, moments: range) -> set[str]:
    """The kinds of frames before which it has died."""
    died: set[str] = set()
    with quiet(), quick_planning():
        for n in moments:
            outcome, kinds = run(killed_before(n, tmp_path / str(n)))
            assert outcome == "equal", f"killed before {kinds[n]}, the {n}th frame"
            if n < len(kinds):
                died.add(kinds[n])
    return died


@pytest.mark.slow
def test_a_coordinator_dies_at_some_moments(tmp_path: Path) -> None:
    assert sweep(tmp_path, range(12, 60, 24))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_coordinator_dies_between_any_two_messages(tmp_path: Path) -> None:
    assert sweep(tmp_path, range(150)) >= {"plan?", "plan", "offer", "state", "state_end", "ready", "step", "applied"}


@pytest.mark.slow
def test_a_stream_that_breaks_while_a_leavers_state_is_read_costs_no_steps(tmp_path: Path) -> None:
    """Storm 7000228: the owner asked who had made the copy only once, and then went back to older ones."""
    parts: list[str] = []

    async def story() -> tuple[str, dict[str, str]]:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(1800):
            victims: list[str] = []

            def break_off(sender: str, receiver: str, kind: str) -> None:
                training = storm.mesh.training
                hands_over = training is not None and training.owner is not None and training.owner.stopped
                if hands_over and kind == "part" and [sender] == victims and receiver == storm.mesh.agent.peer_id:
                    parts.append(kind)
                    if len(parts) == 1:
                        raise StreamClosed("the network lost it")

            def hear(report: Report) -> None:
                if report.step == 2:
                    name = storm.members()[1]
                    storm.departures[name].ask()
                    victims.append(storm.here.agents[name].peer_id)

            with watched_frames(break_off):
                return await train(storm, hear), storm.names

    with capture_logs() as logged, quick_planning(), decided_by(0):
        outcome, names = run(story(), inline=True)
    assert outcome == "equal"
    assert len(parts) > 1, "the owner asks again"
    past = going_back(logged, names)
    assert [back.again for back in past.backs] == [0]
    assert past.wrong == []


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("error", "step", "backs"), [(errno.ENOSPC, 2, 1), (errno.EROFS, 2, 1), (errno.ENOSPC, 6, 0)])
def test_who_leaves_while_the_owners_disk_refuses_the_state_costs_no_steps(
    tmp_path: Path, error: int, step: int, backs: int
) -> None:
    """Storm 8001009: the state that a leaver's owner reads went to the disk or nowhere. Members hand it over now.

    Storm 8200032: where the job ended before another plan went on, its weights were not waited for.
    """

    async def story() -> tuple[str, dict[str, str]]:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(1800):

            def hear(report: Report) -> None:
                if report.step == step:
                    storm.disk.folder, storm.disk.error = storm.home_of("owner"), error
                    asyncio.get_running_loop().call_later(8.0, setattr, storm.disk, "error", None)
                    storm.departures[storm.members()[0]].ask()

            with disk.using(storm.disk):
                outcome = await train(storm, hear)
            assert storm.disk.refused
            return outcome, storm.names

    with capture_logs() as logged, quick_planning(), decided_by(0):
        outcome, names = run(story(), inline=True)
    assert outcome == "equal"
    past = going_back(logged, names)
    assert [back.again for back in past.backs] == [0] * backs
    assert past.wrong == []
