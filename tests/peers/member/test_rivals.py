"""Owners that all believe a run theirs: members work for the later one only, and once all is whole it alone is left."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peers.member.service import Member
from peers.owner.turn import Turn
from tests.mutation import breaks, changed
from tests.rig.rivals import FAULTS, World
from tests.rig.virtual_time import quiet, run

IN_TWO = ("partition", 0b101100)  # p0, p1 and "a" on one side; p2, p3 and "b" on the other
faults = st.lists(st.tuples(st.floats(0, 60), st.sampled_from(FAULTS), st.integers(0, 4095)), max_size=12)


def played(world: World, what: list[tuple[float, str, int]], lasts_s: float = 70.0) -> World:
    with quiet():
        run(world.play(what, lasts_s), inline=True)
    return world


@settings(max_examples=12)
@given(st.integers(0, 1 << 32), st.integers(2, 5), st.integers(2, 4), faults)
@example(0, 4, 2, [(1.0, *IN_TWO), (40.0, "heal", 0)])
@example(0, 2, 3, [(1.0, "owners apart", 0), (40.0, "heal", 0)])
def test_whatever_happens_members_follow_the_later_owner_and_it_alone_is_left(
    seed: int, members: int, hosts: int, what: list[tuple[float, str, int]]
) -> None:
    played(World(seed, members, hosts), what)


def storm(seed: int) -> World:
    chance = random.Random(f"rivals {seed}")
    world = World(seed, chance.randint(2, 5), chance.randint(2, 4))
    count = chance.randint(2, 20)
    what = [(chance.uniform(0, 90), chance.choice(FAULTS), chance.randrange(1 << 12)) for _ in range(count)]
    return played(world, what, 100.0)


@pytest.mark.slow
def test_storms() -> None:
    worlds = [storm(seed) for seed in range(30)]
    assert sum(len(world.orders) > 1 for world in worlds) > 20, "most have a second owner"
    assert sum(len(world.orders) > 2 for world in worlds) > 8, (
        "and some a third: two standbys at once, or one that resumes"
    )


@pytest.mark.slow
def test_thousands_of_storms() -> None:
    for seed in range(30, 3000):
        storm(seed)


def test_a_member_that_forgets_whom_it_followed_does_no_harm() -> None:
    """A process that is started anew knows of no order, and has no state either: it may work for the lower owner until the later
    one comes for it, or is heard of. So members keep the order in memory only."""
    assert storm(69).forgot


@pytest.mark.parametrize(
    ("place", "line", "instead", "seed"),
    [
        (Member, "if newest is not None and epoch <= newest:", "if False:", 1),  # an older offer is taken
        (Member, "epoch, newest = (incarnation, owner,", "epoch, newest = (incarnation, '',", 11),  # two with one count
        (Member, "if self._epochs.get(run, epoch) > epoch:", "if False:", 32),  # an older offer that waited is taken
        (Turn, "if later and", "if False and", 16),  # owners that share no member
    ],
)
def test_without_its_line_a_storm_is_not_weathered(place: type, line: str, instead: str, seed: int) -> None:
    with changed(place, line, instead):
        assert breaks(partial(storm, seed))
