"""A peer yields to its machine's owner and comes back: the rule by values, and a job that loses no step by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from meshcee.errors import JoinError, UsageError
from meshcee.files.home import Home
from peers.cli.joining.owner_use import Machine, is_metered, use_by_others
from peers.cli.joining.staying import Stay, Watch
from peers.cli.joining.yielding import Hours, Rule, Seen, Standing
from peers.node.departure import Departure
from peers.owner.epoch import Report
from peers.transport import Frame
from peers.wire import messages
from tests.peers.owner.test_recovery import a_mesh, assert_undisturbed, train

RULE = Rule(leave_after_s=10, return_after_s=60)
NIGHT = Hours.parse("20:00-07:00")


def course(looks: Sequence[tuple[float, float | None]], rule: Rule = RULE) -> list[float]:
    """When a peer goes or comes back, that sees these shares of others at these seconds."""
    standing, found = Standing(), []
    for at_s, cpu in looks:
        before, standing = standing.lends, standing.after(Seen(at_s, 0, cpu), rule)
        if standing.lends is not before:
            found.append(at_s)
    return found


def test_others_must_be_at_work_for_a_while_and_idle_for_longer() -> None:
    busy = [(float(t), 0.9) for t in range(0, 31, 2)]
    free = [(float(t), 0.05) for t in range(32, 131, 2)]
    assert course([*busy, *free]) == [10.0, 92.0]


def test_a_moment_of_work_or_of_rest_changes_nothing() -> None:
    assert course([(t, 0.9 if t % 10 < 8 else 0.3) for t in map(float, range(100))]) == []
    away = [(0.0, 0.9), (10.0, 0.9)]
    assert course([*away, *((t, 0.05 if t % 50 else 0.9) for t in map(float, range(11, 300)))]) == [10.0]


def test_between_the_bounds_all_stays_as_it_is() -> None:
    between = [(float(t), 0.35) for t in range(20, 500, 2)]
    assert course(between) == []
    assert course([(0.0, 0.9), (10.0, 0.9), *between]) == [10.0]


def test_what_nobody_can_see_counts_for_nothing() -> None:
    assert course([(float(t), None) for t in range(100)]) == []


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Seen(0, 12 * 60, 0.1), "this machine is lent at 20:00-07:00 only"),
        (Seen(0, 0, 0.1, on_battery=True), "this machine runs on its battery"),
        (Seen(0, 0, 0.1, metered=True), "this machine's network is metered"),
        (Seen(0, 0, 0.1, 0.75), "others use 75% of the GPU"),
        (Seen(0, 0, 0.6, 0.1), "others use 60% of the processor"),
        (Seen(0, 0, 0.1, 0.1, False), ""),
    ],
)
def test_why_it_yields_is_said(seen: Seen, why: str) -> None:
    rule = replace(RULE, hours=NIGHT)
    first = Standing.at_first(seen, rule)
    assert (first.lends, first.why) == (not why, why)
    later = Standing().after(seen, rule).after(replace(seen, at_s=10), rule)
    assert (later.lends, later.why) == (not why, why)


def test_hours_alone_leave_the_rest_of_the_machine_out_of_it() -> None:
    rule = Rule(owner=False, hours=NIGHT)
    assert Standing.at_first(Seen(0, 0, 1.0, 1.0, True), rule).lends
    assert not Standing.at_first(Seen(0, 7 * 60), rule).lends


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("20:00-07:00", (1200, 0, 419), (420, 1199)),
        ("09:30-17:00", (570, 1019), (569, 1020)),
        ("0:00-24:00", None, None),
    ],
)
def test_hours_of_a_day(text: str, inside: tuple[int, ...] | None, outside: tuple[int, ...]) -> None:
    if inside is None:
        with pytest.raises(UsageError, match="leave it out"):
            Hours.parse(text)
        return
    hours = Hours.parse(text)
    assert all(map(hours.hold, inside))
    assert not any(map(hours.hold, outside))


@pytest.mark.parametrize(
    "text", ["", "20", "20-7", "25:00-07:00", "20:60-07:00", "20:00-24:30", "20:00 07:00", "٢٠:٠٠-٠٧:٠٠"]
)
def test_what_is_no_time_of_day_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UsageError, match="20:00-07:00"):
        Hours.parse(text)


PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1201     G     35      4      -      -      -      -    game
    0       4711     C     60     20      -      -      -      -    python
    0       4712     C      -      -      -      -      -      -    python
"""


def test_the_gpu_is_used_by_others_as_the_driver_says() -> None:
    assert use_by_others(PMON, {4711}) == pytest.approx(0.35)
    assert use_by_others(PMON, {}) == pytest.approx(0.95)
    assert use_by_others("# gpu pid type sm\n    0    -    -    -\n", {}) == 0.0
    for text in ("", "NVIDIA-SMI has failed", "a b c\n" * 5):
        assert use_by_others(text, {}) is None


@pytest.mark.parametrize(("value", "metered"), [(0, None), (1, True), (2, False), (3, True), (4, False), (9, None)])
async def test_the_network_is_metered_as_the_system_says(
    value: int, metered: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "busctl"
    tool.write_text(f'#!/bin/sh\n[ "$8" = Metered ] && echo u {value}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert (await Machine("cpu").look()).metered is metered
    tool.write_text("#!/bin/sh\necho Failed to get property >&2; exit 1\n")
    assert (await Machine("cpu").look()).metered is None
    assert is_metered('s "1"') is None


async def test_this_machine_is_looked_at() -> None:
    machine = Machine("cpu")
    first = await machine.look()
    await asyncio.sleep(0.05)
    second = await machine.look()
    assert first.cpu is None
    assert second.cpu is not None
    assert 0 <= second.cpu <= 1
    assert second.gpu is None
    assert second.at_s > first.at_s


async def test_a_system_that_has_no_place_for_batteries_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(psutil, "sensors_battery", absent, raising=False)
    assert (await Machine("cpu").look()).on_battery is None
    for plugged in (True, False, None):
        shown = SimpleNamespace(power_plugged=plugged)
        monkeypatch.setattr(psutil, "sensors_battery", lambda shown=shown: shown, raising=False)
        assert (await Machine("cpu").look()).on_battery is (None if plugged is None else not plugged)


class Said:
    """Sentences that a stay tells, and an event at each."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.heard = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.heard.set()


class Owner:
    """Somebody who uses a machine, or not; every look is five seconds after the one before."""

    def __init__(self) -> None:
        self.works, self._at_s = False, 0.0

    async def look(self) -> Seen:
        self._at_s += 5
        return Seen(self._at_s, 0, 1.0 if self.works else 0.0)

    def watch(self) -> Watch:
        return Watch(RULE, self.look, lambda _: asyncio.sleep(0.01))


@pytest.mark.slow
async def test_a_peer_that_yields_costs_its_job_no_step_and_comes_back(tmp_path: Path) -> None:
    home, told, said, owner = Home(tmp_path), list[Report](), Said(), Owner()
    async with a_mesh(home, 2) as (here, mesh), asyncio.TaskGroup() as group:
        came = 0

        @asynccontextmanager
        async def lend() -> AsyncIterator[Departure]:
            nonlocal came
            came += 1
            name = f"lent-{came}"
            try:
                yield Departure(await here.start(name))
            finally:
                here.crash(name)  # its process ends

        stay = Stay(owner.watch())
        assert not stay.ask(), "it has not joined yet"
        staying = group.create_task(stay.run(lend, said))
        await mesh.agent.wait_for_devices(3)

        def hear(report: Report) -> None:
            told.append(report)
            owner.works = report.step >= 5

        result = await train(mesh, hear, stages=None)
        assert result.plan is not None
        assert_undisturbed(result, told, home)
        async with asyncio.timeout(10):
            await said.heard.wait()
        assert came == 1
        owner.works = False
        await mesh.agent.wait_for_devices(3)
        assert came == 2
        assert [text.partition(":")[0] for text in said.texts] == ["away", "back"]
        assert "others use 100% of the processor" in said.texts[0]
        assert stay.ask()
        assert await staying, "asked by a signal, it goes for good"


async def test_a_peer_that_is_away_ends_at_the_first_signal() -> None:
    said, owner = Said(), Owner()
    owner.works = True

    @asynccontextmanager
    async def lend() -> AsyncIterator[Departure]:
        raise AssertionError("the machine is in use")
        yield

    stay = Stay(owner.watch())
    async with asyncio.TaskGroup() as group:
        staying = group.create_task(stay.run(lend, said))
        async with asyncio.timeout(5):
            await said.heard.wait()
            assert stay.ask()
            assert await staying
    assert len(said.texts) == 1


@pytest.mark.parametrize("yields", [False, True])
async def test_a_drained_peer_does_not_come_back_not_even_one_that_was_about_to_yield(yields: bool) -> None:
    said, owner = Said(), Owner()
    async with a_mesh(Home(Path("/nowhere")), 1) as (here, _):
        peer, other = here.agents["p0"], await here.start("other", lends=False)

        async def drain() -> None:
            stream = await other.transport.open(peer.peer_id, "leave")
            await stream.send(Frame(messages.LEAVE))
            assert (await stream.recv()).kind == messages.LEAVING

        @asynccontextmanager
        async def once() -> AsyncIterator[Departure]:
            departure = Departure(peer)
            owner.works = yields
            if not yields:
                await drain()
            yield departure
            if yields:
                await drain()

        async with asyncio.timeout(5):
            assert await Stay(owner.watch()).run(once, said)
    assert said.texts == []


async def test_a_peer_that_cannot_come_back_yet_tries_again_and_a_signal_ends_that() -> None:
    said, owner, pauses, fails = Said(), Owner(), list[float](), [False, *[True] * 7, False, True]

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if not fails:
            assert stay.ask(), "between two tries it can be asked"
            await asyncio.Event().wait()

    async with a_mesh(Home(Path("/nowhere")), 1) as (here, _):

        @asynccontextmanager
        async def lend() -> AsyncIterator[Departure]:
            async with asyncio.TaskGroup():  # so that what fails comes in a group, as of a real peer
                if fails.pop(0):
                    owner.works = False
                    raise JoinError("nobody answers")
                owner.works = True
                yield Departure(here.agents["p0"])
                owner.works = False

        stay = Stay(owner.watch(), sleep)
        async with asyncio.timeout(10):
            assert await stay.run(lend, said)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 2]
    assert "not back yet: nobody answers. This peer tries again in 2 s; Ctrl-C ends it" in said.texts

    fails[:] = [True]
    with pytest.raises(ExceptionGroup):
        await Stay(owner.watch(), sleep).run(lend, said)
    assert len(pauses) == 8, "a wrong line is told of at once"
