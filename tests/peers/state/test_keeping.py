"""Which copies an owner has its members keep: those that it, or who goes on in its place, may go back to, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from meshcee.config import OWN_COPIES
from peers.state.fetch import Fetch
from peers.state.keeping import Keeping, Supplies
from peers.state.manifest import CopySet, Manifest, StageCopy
from peers.state.policy import Keepers
from peers.state.saving import Saving
from peers.wire import messages
from tests.mutation import breaks, changed
from tests.peers.state.test_keep import Epoch, answered, described, offers
from tests.rig.virtual_time import run


class Traces(Epoch):
    """An epoch that keeps copies and checkpoints, and what a member holds of its own stage by what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.untold: set[int] = set()
        self.copies = Manifest(is_told=lambda copied: copied.next_step not in self.untold)
        nothing: Any = SimpleNamespace(state={}, plain_layout={})
        for link in self.links:
            link.stream.max_payload_bytes = 0
            link.outbox = mock.Mock(put=mock.AsyncMock())
        supplies = Supplies(copies=self.copies, keepers=Keepers({"p0": "p1", "p1": "p0"}, {}))
        self.keeping = Keeping(supplies, self.links, nothing, 0, nothing, lambda event: event.wait())
        self.copying, self.saving = self.keeping.copying, self.keeping.saving
        self.held: list[int] = []

    async def ask(self, next_step: int, *, keep: bool = False, save: bool = False) -> None:
        """Before this step, when the one before it has been reported."""
        self.copying.after(next_step - 1)
        put = cast(mock.AsyncMock, self.links[0].outbox.put)
        await self.keeping.ask(next_step, keep=keep, save=save)
        wanted = put.await_args.args[0].header
        assert len(wanted["besides"]) <= messages.MOST_BESIDES
        self.held = [step for step in self.held if step >= wanted["since"] or step in wanted["besides"]] + [next_step]
        assert len(self.held) <= OWN_COPIES

    def near(self, next_step: int) -> None:
        """What was asked for is whole."""
        for link, offer in zip(self.links, offers()):
            self.copying.hear(link, described(offer, next_step))
        for link, source in zip(self.links, ("p1", "p0")):
            self.copying.hear(link, answered(source, next_step))

    def saved(self, next_step: int) -> None:
        self.saving.latest = SimpleNamespace(next_step=next_step)  # type: ignore[arg-type]
        self.saving.settled.set()


@pytest.fixture(autouse=True)
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is read no more; nothing runs beside the test."""
    reading = Saving.reading.fget

    def until_settled(self: Saving) -> list[int]:
        assert reading is not None
        return [] if self.settled.is_set() else reading(self)

    monkeypatch.setattr(Saving, "reading", property(until_settled))


def test_a_checkpoint_on_the_owners_disk_replaces_no_copies() -> None:
    async def asked() -> None:
        epoch = Traces()
        await epoch.ask(10, keep=True)
        epoch.near(10)
        await epoch.ask(15, save=True)
        epoch.saved(15)
        await epoch.ask(20, keep=True)
        assert epoch.held == [10, 15, 20]
        found = epoch.copies.newest(20)
        assert found is not None
        assert found.next_step == 10
        for step in (25, 30, 35):  # the keepers are slow
            await epoch.ask(step, save=True)
            assert epoch.held == [10, 20, step]
            epoch.saved(step)
        epoch.near(20)
        await epoch.ask(40, keep=True)
        assert epoch.held == [20, 35, 40]

    def story() -> None:
        run(asked())

    story()
    with changed(Keeping, "*copying.needed, ", ""):
        assert breaks(story)
    with changed(Keeping, "< OWN_COPIES", "< 9"):
        assert breaks(story)


def test_copies_of_which_the_owner_alone_knows_replace_none() -> None:
    async def asked() -> None:
        epoch = Traces()
        await epoch.ask(10, keep=True)
        epoch.near(10)
        await epoch.ask(20, keep=True)
        epoch.untold = {20}
        epoch.near(20)
        epoch.copying.after(29)
        assert not epoch.copying.is_due(30)
        await epoch.ask(30, save=True)
        assert epoch.held == [10, 20, 30]
        assert epoch.copying.since == 10
        epoch.untold = set()
        epoch.copies.cadence.every = 10
        assert epoch.copying.is_due(40)
        await epoch.ask(40, keep=True)
        assert epoch.held == [20, 30, 40], "30 is being read"
        assert epoch.copying.since == 20

    def story() -> None:
        run(asked())

    story()
    with changed(Manifest.newest, " and (not told or self.is_told(c))", ""):
        assert breaks(story)


def test_a_checkpoint_that_is_asked_for_behind_a_hand_over_comes_with_the_first_copies_of_the_plan() -> None:
    """No copies are due, and members have no room for two: a best state was put off until they were, and was another by then."""

    async def asked() -> None:
        epoch = Traces()
        await epoch.ask(4, keep=True)
        epoch.near(4)
        epoch.copying.hand_over(9)
        for link, offer in zip(epoch.links, offers()):
            epoch.copying.hear(link, described(offer, 9))
        epoch.copies.cadence.every = 1000
        nothing: Any = SimpleNamespace(state={}, plain_layout={})
        supplies = Supplies(
            copies=epoch.copies, keepers=Keepers({"p0": "p1", "p1": "p0"}, {}), store=cast(Any, mock.Mock())
        )
        following = Keeping(supplies, epoch.links, nothing, 9, nothing, lambda event: event.wait())
        assert following.copying.is_first_to_copy
        assert await following.at(10, asked=True)
        assert following.copying.making == [10] == following.saving.reading
        following.saving.settled.set()
        assert not await following.at(11, asked=True), "two would be more than they have room for"

    def story() -> None:
        run(asked())

    story()
    with changed(Keeping, " or (asked and first and self.copying.can_begin(next_step))", ""):
        assert breaks(story)


class Gentle(Fetch):
    """Rests until it is told to hurry."""

    def __init__(self) -> None:
        super().__init__({}, mock.Mock())
        self.hurried = asyncio.Event()

    def hurry(self) -> None:
        self.hurried.set()

    async def run(self, sources: Iterable[str]) -> None:
        await self.hurried.wait()


@pytest.mark.parametrize("waits_first", [False, True])
def test_a_checkpoint_that_is_asked_for_while_another_is_read_does_not_wait_for_its_rests(waits_first: bool) -> None:
    """A read takes a twentieth of its link's time. Nothing was fed for twenty times as long as it would have taken."""

    async def asked() -> None:
        epoch = Traces()
        await epoch.ask(10, save=True)
        fetch, link = Gentle(), epoch.links[0]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:

            async def read(fetch: Gentle) -> None:
                await asyncio.sleep(waits_first)
                await epoch.saving.read(link, StageCopy(), fetch)
                epoch.saved(10)

            group.create_task(read(fetch))
            await asyncio.sleep(0.5)
            await epoch.ask(20, save=True)
        following = Gentle()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await epoch.saving.read(link, StageCopy(), following)
        assert not following.hurried.is_set(), "training does not wait for this one"

    def story() -> None:
        run(asked())

    story()
    with changed(Keeping, "self.saving.hurry_after(0)", "pass"):
        assert breaks(story)
    with changed(Saving, "next_step, math.inf", "next_step, self._hurry_after"):
        assert breaks(story)


@pytest.mark.parametrize("far", [False, True])
def test_an_epoch_that_begins_earlier_counts_no_copies_of_later_steps(far: bool) -> None:
    """Members forget them with the first copy that they make; once their steps were told of, the next loss went back to them."""
    told: list[list[int]] = []
    copies = Manifest(lambda found: told.append([c.next_step for c in found]))

    def add(*steps: int) -> None:
        for step in steps:
            copies.add(CopySet(step, (StageCopy({"w": "1"}, {}, {"p0"}),), far=far))

    def newest() -> int | None:
        found = copies.newest(99)
        return found and found.next_step

    add(5, 10)
    copies.begin(7)
    assert newest() == 5
    assert told[-1] == [5]
    add(9)
    copies.begin(9)
    assert newest() == 9
    assert len(told) == 4, "nobody is told of what has not changed"


def test_the_list_is_told_when_its_newest_copies_go() -> None:
    told: list[list[int]] = []
    copies = Manifest(lambda found: told.append([c.next_step for c in found]))
    for step in (5, 10):
        copies.add(CopySet(step, (StageCopy({"w": "1"}, {}, {"p0"}),)))
    copies.forget_before(10)
    copies.forget_before(11)
    assert told == [[5], [5, 10], []]
