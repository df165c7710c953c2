"""Copies in another region: whose they are, when they count, and what a run gains from them when a whole region is lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from benchmarks import virtual_chaos
from benchmarks.going_back import going_back
from benchmarks.virtual_chaos import LINK, Activations, Storm, job_of, quick_planning, stormy, train
from meshcee.config import FAR_COPIES, OWN_COPIES
from meshcee.errors import JoinError, ProtocolError
from meshcee.events import Event
from meshcee.figures.measured import Measured
from meshcee.figures.profile import DeviceProfile, LinkProfile
from peers.device.compute import Pace
from peers.member.service import Session
from peers.node.agent import Agent
from peers.owner.epoch import Report
from peers.state.fetch import Fetch
from peers.state.keep import Keeper, digests_of
from peers.state.manifest import CopySet, StageCopy
from peers.state.policy import (
    CHUNK_BYTES,
    Cadence,
    FarCadence,
    Keepers,
    Stride,
    far_keepers,
    keepers_with_room,
    near_keepers,
)
from peers.state.store import CopyStore
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.weights import digest_of
from tests.peers.state.test_keep import TIMES, Epoch, answered, offers
from tests.planner.test_live import JOB
from tests.rig.mesh_fixture import beside, even_plan, grouped
from tests.rig.virtual_time import run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

# -- who is whose ------------------------------------------------------------------------------------------------------


def seconds_of(regions: Mapping[str, str]) -> dict[tuple[str, str], float]:
    return {(s, t): 0.01 if regions[s] == regions[t] else 0.5 for s in regions for t in regions if s != t}


@pytest.mark.parametrize(
    ("where", "shares", "far"),
    [
        ("aabb", (), {"p0": "p2", "p1": "p3", "p2": "p0", "p3": "p1"}),
        ("aaab", (), {"p0": "p3", "p1": "p3", "p2": "p3", "p3": "p0"}),  # the last one's keeper is far as it is
        ("aaaa", (), {}),
        ("abcd", (), {}),
        ("aabb", ((4, 2), (4, 2)), {"p0": "p2", "p2": "p0"}),
        ("abab", ((4, 2), (4, 2)), {}),
    ],
    ids=["two of two", "three and one", "one region", "nobody is near", "groups", "groups in two regions"],
)
def test_far_keepers_are_in_other_regions_where_a_stage_would_be_lost_with_its_own(
    where: str, shares: Sequence[Sequence[int]], far: Mapping[str, str]
) -> None:
    plan = even_plan(5, 2 if shares else 4, 24, 6)
    plan = grouped(plan, shares) if shares else plan
    regions = dict(zip(plan.peers, where, strict=True))
    seconds = seconds_of(regions)
    assert far_keepers(plan, seconds, regions, near_keepers(plan, seconds)) == far


@pytest.mark.parametrize(
    ("where", "ends", "far"),
    [
        ("abab", (2, 2), {"p0": "p1", "p1": "p2"}),  # one copy of each block is enough
        ("abab", (3, 1), {"p0": "p1", "p1": "p2"}),  # blocks 1 and 2 are in both regions
        ("aabb", (2, 2), {}),
        ("abba", (2, 2), {}),
        ("aaab", (1, 2), {"p0": "p3", "p1": "p3"}),
        ("aaaa", (2, 2), {}),
    ],
)
def test_a_stage_of_pipelines_has_a_far_keeper_where_all_holders_of_a_block_are_in_one_region(
    where: str, ends: tuple[int, int], far: Mapping[str, str]
) -> None:
    plan = beside(even_plan(4, 1, 24, 6), *((2, [(end, (6,)), (4, (6,))]) for end in ends))
    regions = dict(zip(plan.peers, where, strict=True))
    assert far_keepers(plan, seconds_of(regions), regions, {}) == far


# -- in a run ----------------------------------------------------------------------------------------------------------

REGIONS = {"p0": "east", "p1": "east", "p2": "west", "p3": "west", "owner": "east"}
FAR = replace(LINK, latency_s=0.3)
MEASURED_S = 60.0  # after which everybody knows all links
APART_S = 20.0


@pytest.fixture
def two_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of two, the owner beside the first; every peer has a stage. The run is short: all copies are copied on."""
    start = Storm.start

    async def far_from_others(storm: Storm, name: str, **more: Any) -> Agent:
        agent = await start(storm, name, **more)
        for other in storm.here.agents:
            if other in REGIONS and REGIONS[other] != REGIONS[name]:
                storm.between(name, other, FAR)
        return agent

    monkeypatch.setattr(Storm, "start", far_from_others)
    monkeypatch.setattr(virtual_chaos, "PACE", Pace(1e4))
    monkeypatch.setattr(FarCadence, "LEAST_S", 0.0)
    for cadence in (Cadence, FarCadence):
        monkeypatch.setattr(cadence, "SHARE", 1.0)


def told(
    folder: Path, every: int, befall: Callable[[Storm], None], at: int = 9
) -> tuple[list[Mapping[str, Any]], dict[str, str], Activations]:
    """The log of a run that something befalls once this step is reported, the peers' names, and what they ran; it ends equal to
    an undisturbed one.
    """
    activations = Activations()

    async def story() -> dict[str, str]:
        async with stormy(0, folder) as storm:
            await asyncio.sleep(MEASURED_S)

            def hear(report: Report) -> None:
                if report.step == at:
                    befall(storm)

            async with asyncio.timeout(1800):
                assert await train(storm, hear, replace(job_of(), checkpoint_every=every), stages=4) == "equal"
            return storm.names

    with quick_planning(), capture_logs() as logged, activations.watched():
        names = run(story())
    assert going_back(logged, names).wrong == []
    assert activations.doubled == []
    return logged, names, activations


def far_apart(copies: Mapping[str, Any], names: Mapping[str, str]) -> set[int]:
    """In how many regions the holders of each stage are."""
    return {len({REGIONS[names[peer]] for peer in peers}) for peers in copies["holders"]}


def of(logged: Sequence[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


@pytest.mark.cases(1)
@pytest.mark.parametrize("region", ["east", "west"])
def test_a_whole_region_is_lost_and_the_run_goes_on_from_copies_in_the_other(
    tmp_path: Path, two_regions: None, region: str
) -> None:
    """There is no checkpoint at all: without far copies the run would begin anew."""

    def befall(storm: Storm) -> None:
        for name in storm.lending:
            if REGIONS[name] == region:
                storm.kill(name)

    logged, names, _ = told(tmp_path, 1000, befall)
    (back,) = of(logged, Event.STATE_FOUND)
    far = [entry["next_step"] for entry in of(logged, Event.FAR_COPIES_MADE) if entry["next_step"] <= back["done"]]
    assert (back["with_peers"], back["next_step"]) == (True, far[-1])
    assert back["next_step"] > 0
    assert far_apart(of(logged, Event.COPIES_MADE)[0], names) == {1}
    assert far_apart(of(logged, Event.FAR_COPIES_MADE)[0], names) == {2}


@pytest.mark.slow
def test_a_far_keeper_dies_with_its_region_while_it_reads_and_the_set_before_counts(
    tmp_path: Path, two_regions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storms: list[Storm] = []
    steps: list[int] = []
    keep = Keeper._keep

    async def dies(keeper: Keeper, frame: Frame) -> Frame:
        step = frame.header["next_step"]
        if frame.header["far"] and step not in steps:
            steps.append(step)
            if len(steps) == 2:
                region = REGIONS[storms[0].names[keeper._offer.peer_id]]
                for name in storms[0].lending:
                    if REGIONS[name] == region:
                        storms[0].kill(name)
        return await keep(keeper, frame)

    monkeypatch.setattr(Keeper, "_keep", dies)
    logged, _, _ = told(tmp_path, 1000, storms.append, at=0)
    back = of(logged, Event.STATE_FOUND)[0]
    assert (back["with_peers"], back["next_step"]) == (True, steps[0])
    assert [entry["next_step"] for entry in of(logged, Event.FAR_COPIES_MADE)] == steps[:1]


@pytest.mark.slow
def test_a_far_keeper_dies_alone_with_half_a_copy_and_another_keeps_the_next_set(
    tmp_path: Path, two_regions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storms: list[Storm] = []
    half: list[tuple[str, int]] = []  # who died, and which set was in the making
    monkeypatch.setattr("peers.state.policy.LEAST_BYTES", 1024)
    monkeypatch.setattr(virtual_chaos, "PACE", Pace(2e3))  # there is time for another set
    take = Fetch._take

    async def dies(fetch: Fetch, *part: Any) -> None:
        await take(fetch, *part)
        training = storms[0].mesh.training
        assert training is not None
        if fetch._far and fetch.missing and not half:
            far = training.owner._keeping.copying._far  # type: ignore[union-attr]
            keeper = far.chosen[far._left[0]]
            half.append((keeper, far._making.next_step))
            storms[0].kill(storms[0].names[keeper])

    monkeypatch.setattr(Fetch, "_take", dies)
    logged, names, _ = told(tmp_path, 1000, storms.append, at=0)
    ((dead, step),) = half
    (back,) = of(logged, Event.STATE_FOUND)
    before, after = (of(entries, Event.FAR_COPIES_MADE) for entries in cut(logged, back))
    assert (back["with_peers"], before) == (True, [])
    assert after
    assert after[0]["next_step"] > step
    assert all(dead not in peers for entry in after for peers in entry["holders"])
    assert far_apart(after[-1], names) == {2}


def cut(logged: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], ...]:
    """What was logged before it, and after."""
    at = logged.index(entry)
    return logged[:at], logged[at + 1 :]


@pytest.mark.slow
def test_of_two_regions_that_both_hold_everything_only_that_of_the_owner_goes_on(
    tmp_path: Path, two_regions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted: list[float] = []
    began: list[tuple[str, float]] = []
    link = Session._link

    async def linked(session: Session) -> None:
        began.append((session.offer.peer_id, virtual_chaos.now()))
        await link(session)

    def befall(storm: Storm) -> None:
        storm.part([name for name in storm.lending if REGIONS[name] == "west"])
        parted.append(virtual_chaos.now())
        asyncio.get_running_loop().call_later(APART_S, storm.heal)

    monkeypatch.setattr(Session, "_link", linked)
    logged, names, activations = told(tmp_path, 1000, befall)
    (back,) = of(logged, Event.STATE_FOUND)
    assert (back["with_peers"], back["next_step"]) == (True, of(logged, Event.FAR_COPIES_MADE)[0]["next_step"])
    apart = {REGIONS[names[peer]] for peer, at_s in began if parted[0] < at_s < parted[0] + APART_S}
    assert apart == {"east"}
    assert len(activations.plans) == 2


def test_far_copies_are_left_out_where_there_is_no_room_for_them() -> None:
    """A stage of two blocks has a state of 8 MB; with copies it takes 38, with far ones too 62."""
    plan = even_plan(8, 4, 16, 4)
    regions = dict(zip(plan.peers, "aabb", strict=True))
    links = {pair: LinkProfile(seconds / 10, 1e9) for pair, seconds in seconds_of(regions).items()}

    def chosen(memory_bytes: int) -> Keepers | None:
        devices = {peer: DeviceProfile("cpu", "test", memory_bytes, 1e9) for peer in plan.peers}
        return keepers_with_room(plan, Measured(devices, links, {}, {}), devices, JOB)

    assert chosen(30 * 10**6) is None
    near = {"p0": "p1", "p1": "p0", "p2": "p3", "p3": "p2"}
    assert chosen(50 * 10**6) == Keepers(near, {})
    assert chosen(70 * 10**6) == Keepers(near, {"p0": "p2", "p1": "p3", "p2": "p0", "p3": "p1"})


# -- the owner's side --------------------------------------------------------------------------------------------------


class FarEpoch(Epoch):
    """Both members are in regions of their own, as far as it goes, and their near copies are copied on whenever they can be."""

    def __init__(self) -> None:
        super().__init__(far={"p0": "p1", "p1": "p0"})
        self.copies.far_cadence.LEAST_S = 0.0  # type: ignore[misc]

    def kept(self, source: str, next_step: int, **more: Any) -> None:
        link = self.links[source == "p0"]
        self.copying.hear(link, answered(source, next_step, far=True, **more))


async def test_far_copies_count_when_every_stage_has_one_and_until_there_are_others() -> None:
    epoch = FarEpoch()
    with capture_logs() as logged:
        epoch.round(4)
        assert [epoch.asked(i) for i in (0, 1)] == [1, 2], "one at a time"
        epoch.kept("p0", 4)
        epoch.round(6)
        assert epoch.copies.far_steps == []
        epoch.kept("p1", 4)
    assert [entry["next_step"] for entry in of(logged, Event.COPIES_MADE)] == [4, 6]
    assert [(e["next_step"], e["holders"]) for e in of(logged, Event.FAR_COPIES_MADE)] == [
        (4, [["p0", "p1"], ["p0", "p1"]])
    ]
    epoch.copying.forget_before(6)
    assert (epoch.copies.far_steps, epoch.copying.far_steps, epoch.copying.making) == ([4], [4], [])
    epoch.round(8)
    for source in ("p0", "p1"):
        epoch.kept(source, 8)
    assert epoch.copies.far_steps == [4, 8]
    epoch.copying.forget_before(6)
    assert epoch.copies.far_steps == [4, 8], "the steps before 8 may not have been reported"
    epoch.copies.is_told = lambda copied: copied.next_step < 8
    epoch.copying.forget_before(8)
    assert epoch.copies.far_steps == [4, 8], "nobody but the owner knows of 8"
    epoch.copies.is_told = lambda copied: True
    epoch.copying.forget_before(8)
    assert epoch.copies.far_steps == [8]
    epoch.copying.forget_before(9)
    assert epoch.copies.far_steps == [8], "whatever is on the owner's disk"


async def test_far_copies_are_gone_back_to_when_no_others_are_left_and_not_beyond_what_was_reported() -> None:
    epoch = FarEpoch()
    for step in (4, 8):
        epoch.round(step)
        for source in ("p0", "p1"):
            epoch.kept(source, step)
    epoch.copying.forget_before(8)
    epoch.round(11)
    near = epoch.copies.newest(11)
    assert near is not None
    assert (near.next_step, near.far) == (11, False)
    near.stages[0].holders.clear()
    found = epoch.copies.newest(11)
    assert found is not None
    assert (found.next_step, found.far) == (8, False)
    found.stages[0].holders.clear()
    found = epoch.copies.newest(11)
    assert found is not None
    assert (found.next_step, found.far) == (8, True)
    assert CopySet.from_json(found.to_json()) == found
    epoch.copies.begin(7)  # as the next epoch found on the disk
    assert epoch.copies.newest(11) is None


async def test_older_far_copies_count_on_members_alone_once_nearer_ones_are_whole() -> None:
    epoch = FarEpoch()
    epoch.copies.add(CopySet(3, (StageCopy({"w": "1"}, {}, {"p0", "p7"}), StageCopy({"v": "2"}, {}, {"p1"})), far=True))
    epoch.round(4)
    assert [copied.holders for copied in epoch.copies._found if copied.far] == [{"p0", "p1"}]
    epoch.copying._far.chosen.clear()
    epoch.copying._far._making = None
    epoch.round(7)
    assert epoch.copies.far_steps == []


async def test_a_far_copy_that_fails_costs_this_set_and_one_without_memory_all_further_ones() -> None:
    epoch, told = FarEpoch(), []
    with capture_logs() as logged:
        for step, more in [(4, {}), (6, {"kept": False}), (8, {"kept": False, "missing_bytes": 100}), (10, {})]:
            epoch.round(step)
            told.append(epoch.copies.far_steps)
            for source in {4: ("p0", "p1"), 10: ()}.get(step, ("p0",)):
                epoch.kept(source, step, **more)
    assert told == [[], [4], [4], []]
    assert [e["bytes"] for e in logged if e["event"] == Event.NO_FAR_COPIES] == [100]
    assert len(of(logged, "a copy did not reach its far keeper")) == 1
    with pytest.raises(ProtocolError, match="nobody asked for"):
        epoch.kept("p0", 10)


@pytest.mark.parametrize(("index", "source", "step"), [(0, "p0", 4), (1, "p0", 5), (0, "p1", 4), (1, "p9", 4)])
async def test_word_of_a_far_copy_that_nobody_asked_for_is_refused(index: int, source: str, step: int) -> None:
    epoch = FarEpoch()
    with pytest.raises(ProtocolError, match="nobody asked for"):
        epoch.kept("p0", 4)
    epoch.round(4)
    with pytest.raises(ProtocolError, match="nobody asked for"):
        epoch.copying.hear(epoch.links[index], answered(source, step, far=True))


# -- the member's side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.05, 1e9), (0.2, 1e8), (0.05, 1e6), (0.005, 1e5)])
def test_a_link_to_another_region_rests_even_if_it_is_fast(latency_s: float, bytes_per_s: float) -> None:
    stride, used_s, now_s = Stride(far=True), 0.0, 0.0
    for _ in range(300):
        used_s, now_s = used_s + stride.bytes / bytes_per_s, now_s + latency_s + stride.bytes / bytes_per_s
        stride.took(latency_s + stride.bytes / bytes_per_s, stride.bytes)
        now_s += stride.rest_s
    assert 0.2 * FarCadence.SHARE < used_s / now_s < 1.2 * FarCadence.SHARE


def test_the_way_there_and_back_is_no_use_of_a_link() -> None:
    stride = Stride()
    for _ in range(30):
        stride.took(0.05 + stride.bytes / 1e9, stride.bytes)
    assert stride.used_s == pytest.approx(CHUNK_BYTES / 1e9, rel=0.05)


async def test_what_a_far_keeper_has_already_is_not_read_again() -> None:
    held = CopyStore()
    weights = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in offers()[0].layouts[0].items()}
    digests = {name: digest_of(tensor) for name, tensor in weights.items()}
    held.keep("p0", 4, digests, {digests[name]: tensor for name, tensor in weights.items()})
    keeper = Keeper(offers()[1], held, None, TIMES, memory_bytes=1 << 30)  # type: ignore[arg-type]
    header = {"next_step": 4, "source": "p0", "since": 0, "far": True, "besides": [4]}
    reply = await keeper._keep(Frame(messages.KEEP, header, digests_of(digests, {})))
    assert (reply.header["kept"], reply.header["far"], reply.header["read_s"]) == (True, True, 0.0)
    held.make_room("p0", 9, 9, [4])
    assert all(held.find(digest) is not None for digest in digests.values())


async def test_far_copies_need_room_for_those_of_their_own_stage_too() -> None:
    offer, ask = offers()[1], {"next_step": 4, "source": "p0", "since": 0, "besides": []}
    layouts = [weights | optimizer for weights, optimizer in (offer.layouts for offer in offers())]
    theirs, own = (sum(dtype.itemsize * math.prod(shape) for dtype, shape in x.values()) for x in layouts)
    memory = offer.state_bytes + (1 + OWN_COPIES) * own + theirs
    missing = []
    for far in (False, True):
        keeper = Keeper(offer, CopyStore(), Unreachable(), TIMES, memory)  # type: ignore[arg-type]
        said = digests_of(dict.fromkeys(offers()[0].layouts[0], "ab" * 32), {})
        missing.append((await keeper._keep(Frame(messages.KEEP, {**ask, "far": far}, said))).header["missing_bytes"])
    assert missing == [0, FAR_COPIES * own]


class Unreachable:
    async def open(self, *args: Any) -> Any:
        raise JoinError("nobody is there")
