"""What befell other systems' transfers and plans, told again on virtual time: each says which line keeps it from happening.

The stories are from bug reports (petals #326, prime-diloco #156, nousnet PR #61) and from chaos of our own. The last test takes the
lines away, one by one, and each story ends badly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.virtual_chaos import (
    TIMES,
    Storm,
    captured_job,
    job_of,
    now,
    quick_planning,
    stormy,
    train,
)
from meshcee.epochs.course import Course
from meshcee.errors import PlanError
from meshcee.plan import LeftOut, Plan
from peers.member.service import Session
from peers.owner.epoch import Owner
from peers.planning.coordinator import Planned, PlanRequest, PlanService, request_plan
from peers.planning.job_costs import costs_of
from peers.transport.memory import Impairment
from tests.mutation import breaks, changed
from tests.rig.frames import watched_frames
from tests.rig.mesh_fixture import even_plan
from tests.rig.virtual_time import quiet, run

WITHIN_S = 300.0


def told(befall: Callable[[Storm, str, str, str], None], folder: Path) -> Storm:
    """A run in which `befall` sees sender, receiver and kind before every frame; it ends equal to an undisturbed one."""

    async def story() -> Storm:
        storms: list[Storm] = []

        def seen(sender: str, receiver: str, kind: str) -> None:
            for storm in storms:
                befall(storm, sender, receiver, kind)

        with watched_frames(seen):
            async with stormy(0, folder) as storm:
                storms.append(storm)
                async with asyncio.timeout(WITHIN_S):
                    assert await train(storm) == "equal"
                storms.clear()
        return storm

    with quiet(), quick_planning():
        return run(story())


def kills_once(kind: str, *, sender: bool, after: int) -> Callable[[Storm, str, str, str], None]:
    """A peer that lends a device dies as it is about to send, or to be sent, its `after`th frame of this kind."""
    frames: list[str] = []

    def befall(storm: Storm, source: str, target: str, found: str) -> None:
        victim = storm.name_of(source if sender else target)
        if found == kind and victim is not None and storm.mesh.result.plan is not None:
            frames.append(victim)
            if len(frames) == after:
                storm.kill(victim)
                storm.done.append(f"{victim} killed")

    return befall


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["offer", "state_end"])
def test_a_join_is_broken_by_one_who_leaves(tmp_path: Path, kind: str) -> None:
    """nousnet PR #61, prime-diloco #156: a member dies while it is given its weights, and the others wait for ever.

    Traces from happening by `except (JoinError, StreamClosed, TimeoutError)` in Owner._offer: the epoch ends, the next has a plan
    for who is left.
    """
    assert told(kills_once(kind, sender=False, after=2), tmp_path).done


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("after", [1, 2])
def test_a_source_dies_in_the_middle_of_its_transfer(tmp_path: Path, after: int) -> None:
    """prime-diloco #156: a live checkpoint of which one part never comes.

    Traces from happening by `return not fetch.missing` in Saving.read (tests/peers/state/test_checkpoint.py takes it away).
    """
    assert told(kills_once("part", sender=True, after=after), tmp_path).done


@pytest.mark.slow
def test_a_member_that_only_the_owner_cannot_reach(tmp_path: Path) -> None:
    """From chaos of our own: planned with, since others see it, and the run ended with "cannot be reached".

    Traces from happening by JoinError in the same line of Owner._offer.
    """

    async def story() -> None:
        async with stormy(1, tmp_path) as storm:

            def planned(plan: Plan, names: object) -> None:
                if not storm.done:
                    victim = storm.name_of(plan.peers[-1])
                    assert victim is not None
                    storm.here.network.cut(storm.here.agents[victim].peer_id, storm.mesh.agent.peer_id)
                    storm.done.append(f"{victim} cut off from the owner")

            async with asyncio.timeout(WITHIN_S):
                assert await train(storm, on_plan=planned) == "equal"
            assert storm.done

    with quiet(), quick_planning():
        run(story())


@pytest.mark.slow
def test_a_link_between_two_members_delivers_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    """From reading our own: both answer the owner, so it waited for ever.

    Traces from happening by `live(outbox, ...)` in Session._use: each gives the other up, long before the owner would ask what its
    step waits for. That the next plan did not use the same
    pair again, and fail once more, is Course._count_losses' `CutOff(parted), `.
    """
    seen: list[str] = []
    offered_s: list[float] = []  # after that
    struck_s: list[float] = []

    def befall(storm: Storm, source: str, target: str, kind: str) -> None:
        if storm.done and kind == "offer":
            offered_s.append(now())
        if kind == "f":
            seen.append(source)
            if len(seen) == 20:
                struck_s.append(now())
                for a, b in ((source, target), (target, source)):
                    storm.here.network.impair(a, b, Impairment(latency_s=1e6))
                storm.done.append("a link delivers nothing")

    storm = told(befall, tmp_path)
    assert storm.done
    assert storm.mesh.result.plan is not None
    assert len(storm.mesh.result.plan.peers) == 3  # with the fourth peer
    assert offered_s[0] - struck_s[0] < 2 * TIMES.silent_s
    assert len(offered_s) == 3, "one more plan"


def test_a_plan_names_a_thousand_peers_that_are_left_out(tmp_path: Path) -> None:
    """From benchmarks/scale.py: a plan that took more than a header may hold never reached the owner of a large mesh.

    Traces from happening by PlanService.serve, which sends it as a payload.
    """
    left_out = tuple(LeftOut(f"12D3KooW{i:044}", "it would not make the step shorter") for i in range(1000))
    plan = replace(even_plan(5, 1, 8, 4), left_out=left_out)

    async def answered(*args: object) -> tuple[Plan, tuple[str, ...]]:
        return plan, ("a note",)

    async def story() -> Planned:
        async with stormy(2, tmp_path) as storm:
            await storm.agreed()
            here = mock.patch("peers.planning.coordinator.plan_here", side_effect=PlanError("the owner sees no device"))
            with mock.patch("peers.planning.coordinator.answer", answered), here:
                return await request_plan(storm.mesh.agent, PlanRequest(costs_of(job_of(), captured_job())))

    with quiet():
        planned = run(story())
    assert planned.plan == plan
    assert planned.notes == ("a note",)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("story", "arguments", "function", "line", "instead"),
    [
        (
            test_a_join_is_broken_by_one_who_leaves,
            ("state_end",),
            Owner,
            "except (JoinError, StreamClosed, TimeoutError) as error",
            "except JoinError as error",
        ),
        (
            test_a_member_that_only_the_owner_cannot_reach,
            (),
            Owner,
            "except (JoinError, StreamClosed, TimeoutError) as error",
            "except (StreamClosed, TimeoutError) as error",
        ),
        (
            test_a_link_between_two_members_delivers_nothing_and_breaks_nothing,
            (),
            Session,
            "partial(live, outbox, self._timeouts), ",
            "",
        ),
        (
            test_a_link_between_two_members_delivers_nothing_and_breaks_nothing,
            (),
            Course,
            "CutOff(parted), ",
            "",
        ),
        (
            test_a_plan_names_a_thousand_peers_that_are_left_out,
            (),
            PlanService,
            '{"term": list(lease.term)}, [body]',
            '{"term": list(lease.term), "body": body}, []',
        ),
    ],
    ids=lambda value: value.__name__.removeprefix("test_") if hasattr(value, "__name__") else "",
)
def test_without_its_line_a_story_ends_badly(
    tmp_path: Path,
    story: Callable[..., None],
    arguments: tuple[object, ...],
    function: Callable[..., object],
    line: str,
    instead: str,
) -> None:
    with changed(function, line, instead):
        assert breaks(partial(story, tmp_path, *arguments))
