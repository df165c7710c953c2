"""How fast a member sends to another: by what is known of the link, and by what its receiver tells after each step."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshcee.adapt.senses import FAST
from meshcee.figures.profile import LinkProfile
from peers.measure.link_report import LinkReport
from peers.transport.base import Frame
from peers.transport.memory import MemoryNetwork
from peers.transport.stream import FramedStream
from peers.wire.neighbour_link import Links
from peers.wire.throttle import HASTE, RECENT, Throttle
from tests.peers.groups.test_live_groups import MICRO, Lopsided, lopsided, train
from tests.peers.transport.harness import KEY, pair
from tests.rig.virtual_time import virtual_time

WELL = 1e6  # bytes per second
HEADERS = 0.985  # what the lab shows of a link that is full


class Line:
    """A link with this bandwidth, and a stream over it that is told how fast it may send."""

    def __init__(self, bandwidth: float, known: float) -> None:
        self.bandwidth, self.known = bandwidth, known
        self.limits: list[float] = []
        self.throttled = Throttle(cast(Any, SimpleNamespace(throttle=self.limits.append)), lambda: self.known)

    def steps(self, count: int, share: float = 1.0) -> float:
        """The limit after so many; of what comes, `share` is seen in a step."""
        for _ in range(count):
            self.throttled.hear(share * HEADERS * min(self.limits[-1], self.bandwidth))
        return self.limits[-1]


@pytest.mark.parametrize("known", [WELL, 0.8 * WELL])
def test_a_link_is_given_hardly_more_than_it_carries(known: float) -> None:
    line = Line(WELL, known)
    assert line.limits == [HASTE * known]
    line.steps(50)
    assert min(line.limits) == HASTE * known
    assert max(line.limits[2:]) <= HASTE * WELL, "one step may look whether there is more"


def test_a_link_that_a_probe_took_for_a_thin_one_is_used_whole_after_few_steps() -> None:
    line = Line(WELL, WELL / 5)
    assert line.steps(3) > WELL
    assert line.steps(1) == pytest.approx(HASTE * HEADERS * WELL), "and not given more than it carries for long"
    assert line.steps(20) == line.limits[4]


def test_a_link_that_has_recovered_is_used_whole_after_few_steps() -> None:
    line = Line(WELL / 4, WELL / 4)
    line.steps(20)
    line.bandwidth = WELL
    assert line.steps(3) > WELL


def test_a_link_that_sags_is_given_less_once_that_is_known() -> None:
    line = Line(WELL, WELL)
    line.steps(10)
    line.bandwidth = WELL / 4
    assert line.steps(RECENT) == HASTE * WELL, "its record says otherwise"
    line.known = WELL / 4
    assert line.steps(1) == HASTE * WELL / 4


def test_what_begins_slowly_is_not_slowed_down() -> None:
    """An idle connection shows a tenth of its link; were that its limit, the next step would show a tenth of a tenth."""
    line = Line(WELL, WELL)
    assert line.steps(100, share=0.1) == HASTE * WELL


def test_one_step_beside_other_traffic_does_not_count() -> None:
    line = Line(WELL, WELL / 2)
    line.steps(10)
    before = line.limits[-1]
    assert line.steps(RECENT - 1, share=0.5) == before
    assert line.steps(1, share=0.5) < before


def test_what_nobody_has_measured_is_not_limited() -> None:
    line = Line(WELL, math.inf)
    line.throttled.hear(WELL)
    assert line.limits == [math.inf, math.inf]


async def test_a_link_is_known_by_its_record_unless_it_is_as_fast_as_a_machine() -> None:
    async def publish(record: Any) -> None: ...

    nowhere = SimpleNamespace(peers={}, publish=publish)
    links = LinkReport("me", cast(Any, nowhere), clock=lambda: 0.0, monotonic=lambda: 0.0)
    for peer, bandwidth in (("slow", WELL), ("lan", FAST)):
        await links.probed(peer, LinkProfile(0.01, bandwidth))
    assert [links.bandwidth(peer) for peer in ("slow", "lan", "stranger")] == [WELL, math.inf, math.inf]


def test_each_link_of_a_member_has_its_own() -> None:
    limits: dict[str, list[float]] = {"a": [], "b": []}
    links = Links((1, 1), bandwidth={"a": WELL, "b": 2 * WELL}.__getitem__)
    for peer, told in limits.items():
        links.add(peer, cast(Any, SimpleNamespace(stream=SimpleNamespace(throttle=told.append))))
    links.hear("a", {"rate": 3 * WELL})
    assert limits == {"a": pytest.approx([HASTE * WELL, HASTE * 6 * WELL]), "b": pytest.approx([HASTE * 2 * WELL])}


@pytest.mark.slow
@virtual_time
async def test_members_of_a_mesh_are_throttled_by_what_they_have_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(FramedStream, "throttle", lambda stream, bytes_per_s: limits.append(bytes_per_s))
    job = lopsided(model=Lopsided(2).double(), cuts=("first", "heavy.0", "heavy.1"), batch_size=8 * MICRO, steps=4)
    home = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
    await train(job, dict.fromkeys(home, 1e7), home)
    assert limits
    assert any(bytes_per_s < FAST for bytes_per_s in limits), "the regions' link is slow, and known"


@virtual_time
async def test_a_stream_without_a_socket_of_its_own_sends_as_before() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:
        near, far = await pair(a, b)
        near.throttle(1.0)
        begun_s = asyncio.get_running_loop().time()
        await asyncio.gather(near.send(Frame("x", {}, [bytes(1 << 20)])), far.recv())
        assert asyncio.get_running_loop().time() - begun_s < 1.0
