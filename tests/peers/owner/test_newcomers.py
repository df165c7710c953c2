"""Devices that come while a job runs, or turn out to be otherwise than when they were profiled."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from benchmarks.rehearsal import POOR, SPEEDS, FakeMesh, Played, fresh, profiles, rehearse, step_s
from meshcee.adapt.senses import Joined, Profiled
from meshcee.events import Event
from peers.owner import adaptation
from peers.owner.adaptation import Newcomers
from tests.peers.owner.test_adaptation import within


async def test_a_device_that_joins_is_profiled_and_taken_in_where_it_pays() -> None:
    alone = sorted(SPEEDS.keys() - {"far"})
    with capture_logs() as logged:
        played = await rehearse([1.0] * 60, comes=("far", 10))
    assert played.plans[9].peers == fresh(1.0, alone).peers
    assert step_s(fresh(1.0, alone), 1.0) > 1.5 * step_s(fresh(1.0), 1.0), "there is something to gain"
    assert within(played.plans, 1.0) >= 0.95
    assert (len(played.changes), played.profiled) == (1, 1)
    (change,) = [entry for entry in logged if entry["event"] == Event.PLAN_CHANGES]
    assert change["cause"] == ("far has joined",)
    assert change["alternatives_s"][0] < change["step_s"]
    (since,) = [entry for entry in logged if entry["event"] == Event.PLAN_CHANGED]
    assert since["gain"] > 1.5


async def test_a_device_that_is_started_anew_before_it_was_missed_is_taken_in() -> None:
    """It is as new as one that nobody knew, though its record never went."""
    played = await rehearse([1.0] * 40, comes=("far", 10), off=dict.fromkeys(SPEEDS, 1.0), lingers=True)
    assert (len(played.changes), played.profiled) == (1, 1)
    assert "far" in played.plans[-1].peers


async def test_a_member_that_was_lost_joins_again_as_the_same_process() -> None:
    here, asked = FakeMesh(Played([1.0]), True, 1.0), profiles(dict.fromkeys(SPEEDS, 1.0))
    newcomers = Newcomers(cast(Any, here), here.profiles, asked)
    assert newcomers.look([*SPEEDS], {}) == []
    newcomers.lost(["far"])
    members = ["near-0", "near-1"]
    assert newcomers.look(members, {}) == [], "it is asked first"
    await asyncio.sleep(0.01)
    assert newcomers.look(members, {}) == [Joined("far")]
    assert newcomers.look(members, {}) == []


@pytest.mark.parametrize("stays", [False, True], ids=["as another process", "profiled again"])
async def test_a_device_that_was_slow_counts_for_what_it_is_when_it_is_well_again(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work ran on it for a while: somebody starts it anew, or nobody does."""
    monkeypatch.setattr(adaptation, "FRESH_S", 20.0)
    slow = ("far", range(15, 60))
    played = await rehearse([1.0] * 120, off=dict.fromkeys(SPEEDS, 1.0), slow=slow, stays=stays)
    assert "far" not in played.plans[slow[1].stop].peers, "it holds the others up"
    assert "far" in played.plans[-1].peers
    assert within(played.plans, 1.0) >= 0.95


async def test_idle_devices_are_profiled_again_now_and_then_and_only_what_has_shifted_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adaptation, "FRESH_S", 10.0)
    played = Played([1.0])
    here, factor = FakeMesh(played, True, 1.0), 2.0

    async def ask(without: Collection[str]) -> dict[str, Any]:
        played.profiled += 1
        return profiles({"far": factor})

    newcomers, members = Newcomers(cast(Any, here), ask, profiles({"far": 2.0})), ["near-0", "near-1"]

    async def told(slow: float = 1.0) -> list[Any]:
        """In the next twenty seconds."""
        found: list[Any] = []
        for _ in range(20):
            here.now_s += 1.0
            found += newcomers.look(members, {"far": slow})
            await asyncio.sleep(0)
        return found

    assert (await told(), played.profiled) == ([], 1), "it is as it was"
    assert (await told(), played.profiled) == ([], 2), "asked for less often"
    factor = 1.0
    assert (await told(), await told()) == ([], [Profiled("far")])
    assert played.profiled == 3
    assert Profiled("far") in await told(slow=4.0), "steps had shown it slower than its profile says"


async def test_a_device_that_is_no_help_is_told_of_and_left_out() -> None:
    with capture_logs() as logged:
        played = await rehearse([POOR] * 40, comes=("far", 10))
    assert (played.changes, played.searches, played.profiled) == ([], 1, 1)
    (stays,) = [entry for entry in logged if entry["event"] == Event.PLAN_STAYS]
    assert stays["cause"] == ("far has joined",)
