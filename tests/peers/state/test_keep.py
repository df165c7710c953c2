"""Copies with keepers: who is whose, how a copy gets there and back, and what a run gains from it when members die."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgpack
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from benchmarks import virtual_chaos
from benchmarks.going_back import going_back
from benchmarks.virtual_chaos import Storm, job_of, quick_planning, stormy
from benchmarks.virtual_chaos import train as train_under
from meshcee.capture import capture
from meshcee.config import Timeouts
from meshcee.eager import plain
from meshcee.errors import ProtocolError, StaleTermError
from meshcee.events import Event
from meshcee.plan import Plan
from peers.member.service import Member
from peers.owner.epoch import Report
from peers.state.copying import ClashError, Copying
from peers.state.fetch import Fetch, Reader
from peers.state.keep import Keeper
from peers.state.keeping import Supplies
from peers.state.manifest import Manifest
from peers.state.policy import Cadence, Keepers, near_keepers
from peers.state.store import CopyStore
from peers.transport.base import Frame, Stream, StreamClosed
from peers.wire import messages
from peers.wire.member_link import Link
from peers.wire.offer import Offer, Terms
from peers.wire.weights import digest_of, digests_in, digests_of
from tests.mutation import breaks, changed
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import beside, even_plan, grouped, train
from tests.rig.virtual_time import run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

TIMES = Timeouts()

# -- who is whose ------------------------------------------------------------------------------------------------------


def test_a_keeper_is_near_and_has_little_to_keep() -> None:
    plan = even_plan(5, 4, 24, 6)
    assert near_keepers(plan, {}) == {"p0": "p1", "p1": "p2", "p2": "p3", "p3": "p0"}  # nothing is known of any link
    sites = {"p0": "a", "p1": "b", "p2": "a", "p3": "b"}
    seconds = {(s, t): 0.01 if sites[s] == sites[t] else 0.5 for s in sites for t in sites if s != t}
    assert near_keepers(plan, seconds) == {"p0": "p2", "p1": "p3", "p2": "p0", "p3": "p1"}
    alone = {**seconds, ("p3", "p1"): 0.5}  # nobody is near: all are alike
    assert near_keepers(plan, alone)["p3"] == "p1"  # the others have something to keep


def test_a_group_needs_none_and_neither_does_a_single_member() -> None:
    plan = grouped(even_plan(5, 3, 24, 6), ((4, 2), (6,), (6,)))
    assert near_keepers(plan, {}) == {"p2": "p3", "p3": "p0"}
    assert near_keepers(even_plan(5, 1, 24, 6), {}) == {}


# -- what a copy is said to be -----------------------------------------------------------------------------------------


LAYOUTS = {"w": (torch.float32, (2,))}, {"w/exp_avg": (torch.float32, (2,))}


@pytest.mark.parametrize(
    "payloads",
    [
        [],
        [msgpack.packb({}), msgpack.packb({})],
        [msgpack.packb({"w": bytes(32), "v": bytes(32)}), msgpack.packb({})],
        [msgpack.packb({"w": bytes(31)}), msgpack.packb({})],
        [msgpack.packb({"w": "0" * 32}), msgpack.packb({})],
        [msgpack.packb({"w": bytes(32)}), msgpack.packb({"w/step": bytes(32)})],
        [msgpack.packb([bytes(32)]), msgpack.packb({})],
        [b"\xc1", b""],
    ],
)
def test_what_does_not_describe_a_copy_of_the_stage_is_refused(payloads: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="describes a copy of the stage"):
        digests_in(Frame(messages.COPIED, {}, payloads), LAYOUTS)


def test_a_copy_is_said_to_be_what_it_is() -> None:
    said = {"w": "ab" * 32}, {"w/exp_avg": "cd" * 32}
    assert digests_in(Frame(messages.COPIED, {}, digests_of(*said)), LAYOUTS) == said


@functools.cache
def offers() -> list[Offer]:
    job = make_job()
    captured = capture(job)
    plan = even_plan(captured.train.num_blocks, 2, 24, 6)
    return [
        Offer(Terms.of(job, captured, 60.0), plan, (1, 1), (1, "c"), p, captured.train, None, {}) for p in plan.peers
    ]


def described(offer: Offer, next_step: int) -> Frame:
    weights, _ = offer.layouts
    said = digests_of(dict.fromkeys(weights, "ab" * 32), {})
    return Frame(messages.COPIED, {"next_step": next_step, "took_s": 0.0}, said)


def answered(source: str, next_step: int, **more: Any) -> Frame:
    header = {"next_step": next_step, "source": source, "kept": True, "read_s": 0.0, "missing_bytes": 0, "far": False}
    return Frame(messages.KEPT, {**header, **more})


class Epoch:
    """The owner's side, with links that go nowhere."""

    def __init__(self, far: Mapping[str, str] = {}) -> None:
        self.copies = Manifest()
        self.links = [Link(offer, SimpleNamespace(peer_id=offer.peer_id)) for offer in offers()]  # type: ignore[arg-type]
        self.copying = Copying(self.copies, self.links, Keepers({"p0": "p1", "p1": "p0"}, far), 0)

    def asked(self, index: int) -> int:
        """How many copies this member was asked to keep."""
        return self.links[index].outbox._posted

    def round(self, next_step: int, **more: Any) -> None:
        self.copying.begin(next_step)
        for link, offer in zip(self.links, offers()):
            self.copying.hear(link, described(offer, next_step))
        for link, source in zip(self.links, ("p1", "p0")):
            if source in self.copying._keepers:
                self.copying.hear(link, answered(source, next_step, **(more if source == "p0" else {})))
        self.copying.reported = next_step


async def test_a_copy_counts_when_every_stage_has_one_and_while_one_holder_of_each_lives() -> None:
    epoch = Epoch()
    epoch.round(4)
    found = epoch.copies.newest(4)
    assert found is not None
    assert [stage.holders for stage in found.stages] == [{"p0", "p1"}, {"p0", "p1"}]
    assert epoch.copies.newest(3) is None  # steps before it have not been reported
    epoch.copying.begin(7)
    assert not epoch.copying.is_due(9)
    assert (epoch.copying.since, epoch.copies.newest(9)) == (4, found)
    assert epoch.copies.newest(9, ["p0"]) is found
    assert epoch.copies.newest(9) is found
    assert epoch.copies.newest(9, ["p1"]) is None
    assert epoch.copies.newest(9) is None  # who was gone has lost it


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("order", "blamed", "of"),
    [("lab", "p1", "p0"), ("alb", "p0", "p1"), ("abl", "p0", None)],
    ids=["it is first", "it is second", "two say otherwise"],
)
async def test_of_two_pipelines_that_hold_other_states_either_may_be_wrong(
    order: str, blamed: str, of: str | None
) -> None:
    """The first pipeline's state is wrong; which of the two that differ is so shows with a third one."""
    job = make_job()
    captured = capture(job)
    plan = beside(
        even_plan(captured.train.num_blocks, 1, 24, 6), *((n, [(captured.train.num_blocks, (6,))]) for n in (1, 1, 2))
    )
    terms = Terms.of(job, captured, 60.0)
    made = [Offer(terms, plan, (1, 1), (1, "c"), p, captured.train, None, {}) for p in plan.peers]
    links = [Link(offer, SimpleNamespace(peer_id=offer.peer_id)) for offer in made]  # type: ignore[arg-type]
    copying = Copying(Manifest(), links, Keepers(), 0)
    copying.begin(4)

    def tell() -> None:
        for index in map("lab".index, order):
            frame = described(made[index], 4)
            if index == 0:
                weights, _ = made[0].layouts
                frame = replace(frame, payloads=digests_of(dict.fromkeys(weights, "cd" * 32), {}))
            told.append(made[index].peer_id)
            copying.hear(links[index], frame)

    told: list[str] = []
    with pytest.raises(ClashError, match="another state than the other pipelines") as caught:
        tell()
    assert (told[-1], caught.value.of) == (blamed, of)


async def test_of_two_copies_the_older_serves_until_steps_are_reported_or_it_is_forgotten() -> None:
    epoch = Epoch()
    for step in (4, 7):
        epoch.round(step)
    assert [found.next_step for done in (9, 6) if (found := epoch.copies.newest(done))] == [7, 4]
    epoch.copies.forget_before(7)
    assert epoch.copies.newest(6) is None
    newest = epoch.copies.newest(7)
    assert newest is not None
    newest.missed += 1  # a link may have failed
    assert epoch.copies.newest(7) is newest
    newest.missed += 1
    assert epoch.copies.newest(7) is None


async def test_the_run_goes_on_without_a_keeper_that_has_no_memory_and_says_so_once() -> None:
    epoch = Epoch()
    with capture_logs() as logged:
        epoch.round(4, kept=False, missing_bytes=100)
        epoch.round(7)
    assert [e["bytes"] for e in logged if e["event"] == Event.NO_KEEPER] == [100]
    assert [epoch.asked(i) for i in (0, 1)] == [2, 1]
    found = epoch.copies.newest(7)
    assert found is not None
    assert [stage.holders for stage in found.stages] == [{"p0"}, {"p0", "p1"}]


@pytest.mark.parametrize(
    ("index", "frame"),
    [
        (0, lambda: described(offers()[0], 5)),
        (1, lambda: described(offers()[0], 4)),
        (1, lambda: answered("p0", 4)),
        (0, lambda: Frame(messages.COPIED, {**described(offers()[0], 4).header, "took_s": float("nan")}, [])),
        (0, lambda: replace(described(offers()[0], 4), payloads=())),
    ],
    ids=["another step", "another stage", "too soon", "no time", "no description"],
)
async def test_word_of_a_copy_that_nobody_asked_for_is_refused(index: int, frame: Callable[[], Frame]) -> None:
    epoch = Epoch()
    epoch.copying.begin(4)
    with pytest.raises(ProtocolError):
        epoch.copying.hear(epoch.links[index], frame())


async def test_only_the_keeper_says_that_it_has_kept_a_copy_and_once() -> None:
    epoch = Epoch()
    epoch.copying.begin(4)
    for link, offer in zip(epoch.links, offers()):
        epoch.copying.hear(link, described(offer, 4))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="nobody asked for"):
            epoch.copying.hear(epoch.links[0], answered("p0", 4))
        if ("kept", "p0", 4) in epoch.copying._awaited:
            epoch.copying.hear(epoch.links[1], answered("p0", 4))
    with pytest.raises(ProtocolError, match="nobody asked for"):
        epoch.copying.hear(epoch.links[1], answered("p0", 4))


async def test_a_keeper_without_memory_says_how_much_it_lacks_and_reads_nothing() -> None:
    offer = offers()[1]
    keeper = Keeper(offer, CopyStore(), None, TIMES, memory_bytes=offer.state_bytes)  # type: ignore[arg-type]
    ask = Frame(
        messages.KEEP,
        {"next_step": 4, "source": "p0", "since": 0, "far": False, "besides": []},
        described(offers()[0], 4).payloads,
    )
    reply = await keeper._keep(ask)
    assert (reply.kind, reply.header["kept"]) == (messages.KEPT, False)
    assert reply.header["missing_bytes"] > offers()[0].state_bytes
    for source in ("p1", "p7"):
        with pytest.raises(ProtocolError, match="no stage that could be kept"):
            await keeper._keep(Frame(messages.KEEP, {**ask.header, "source": source}, ask.payloads))


def test_a_member_forgets_copies_that_are_needed_no_more() -> None:
    runner = SimpleNamespace(
        spec=SimpleNamespace(trainable=("w",), mutated=()), state_dict=lambda: state, optimizer_state=dict
    )
    state, held = {"w": torch.zeros(1)}, CopyStore()

    def steps() -> list[int]:
        return [copy.next_step for copy in held._copies]

    for step, since, reading, left in [
        (3, 0, (), [3]),
        (6, 3, (3,), [3, 6]),
        (9, 6, (3,), [3, 6, 9]),
        (12, 9, (), [9, 12]),
    ]:
        state = {"w": torch.full((1,), float(step))}
        held.take(step, runner, since, reading)  # type: ignore[arg-type]
        assert steps() == left
    held.take(10, runner, 9)  # type: ignore[arg-type]  # the epoch that went further was lost
    assert steps() == [9, 10]
    assert held.find(digest_of(state["w"])) is None
    digests, _ = held.digest(10, {"w": (torch.float64, (1,))})
    assert digests == {"w": digest_of(torch.tensor([12.0], dtype=torch.float64))}
    assert held.find(digests["w"]) is not None
    with pytest.raises(ProtocolError, match="no copy after 12 steps"):
        held.digest(12, {})
    for step in (3, 6):
        held.make_room("p1", step, 3)
        held.keep("p1", step, {"v": "ab"}, {"ab": torch.zeros(2)})
    for source, step, left in [("p2", 6, 8), ("p1", 9, 8), ("p1", 6, 0)]:  # one keeper may keep two stages of a step
        assert held.find("ab") is not None
        held.make_room(source, step, 6)
        assert held.others_bytes == left
    assert held.find("ab") is None


def test_what_an_epoch_begins_with_is_held_though_a_copy_of_that_very_step_is_made() -> None:
    """Whoever has what another one trained before still reads it; a user had stopped the run behind a change of plans."""
    state = {"w": torch.zeros(1)}
    runner: Any = SimpleNamespace(
        spec=SimpleNamespace(trainable=("w",), mutated=()), state_dict=lambda: state, optimizer_state=dict
    )

    def made(step: int, value: float, since: int) -> str:
        state["w"] = torch.full((1,), value)
        held.take(step, runner, since)
        return held.digest(step, {"w": (torch.float32, (1,))})[0]["w"]

    def story() -> None:
        before = made(3, 1.0, 0)
        held.begin()
        once, again = made(3, 2.0, 3), made(3, 3.0, 3)
        assert [held.find(digest) is not None for digest in (before, once, again)] == [True, False, True]
        later = made(4, 4.0, 3)
        assert all(held.find(digest) is not None for digest in (before, again, later))
        last = made(5, 5.0, 3)
        assert held.find(before) is None, "three copies are all that there is room for"
        assert all(held.find(digest) is not None for digest in (again, later, last))

    held = CopyStore()
    story()
    held = CopyStore()
    with changed(CopyStore.take, "since, besides), *left]", "since, besides)]"):
        assert breaks(story)


def test_copies_of_another_region_are_kept_as_long_as_they_are_needed_whatever_becomes_of_near_ones() -> None:
    held = CopyStore()

    def keep(source: str, step: int, since: int, besides: Sequence[int], *, far: bool = False) -> list[Any]:
        """The copies that are held then: whose, whether far, of which step."""
        held.make_room(source, step, since, besides, far=far)
        held.keep(source, step, {}, {}, far=far)
        return [(*key, copy.next_step) for key, copies in held._others.items() for copy in copies]

    assert keep("p1", 3, 0, ()) == [("p1", False, 3)]
    assert keep("p1", 6, 3, (3,)) == [("p1", False, 3), ("p1", False, 6)]
    assert keep("p2", 3, 3, (3,), far=True) == [("p1", False, 3), ("p1", False, 6), ("p2", True, 3)]
    assert keep("p1", 9, 6, (3,)) == [("p1", False, 6), ("p1", False, 9), ("p2", True, 3)]
    assert keep("p2", 6, 6, (3, 6), far=True)[2:] == [("p2", True, 3), ("p2", True, 6)]
    assert keep("p2", 6, 6, (3, 6), far=True)[2:] == [("p2", True, 3), ("p2", True, 6)]  # the epoch was lost
    assert keep("p1", 12, 9, (6,)) == [("p1", False, 9), ("p1", False, 12), ("p2", True, 6)]
    assert keep("p1", 15, 12, ()) == [("p1", False, 12), ("p1", False, 15)]


# -- in a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("shares", [((6,), (6,), (6,)), ((4, 2), (6,))], ids=["alone", "in a group"])
async def test_every_stage_has_two_holders(monkeypatch: pytest.MonkeyPatch, shares: Any) -> None:
    monkeypatch.setattr(Cadence, "is_due", lambda *args: True)
    copies = Manifest()

    def keep(plan: Plan) -> Supplies:
        return Supplies(copies=copies, keepers=Keepers(near_keepers(plan, {}), {}))

    def adapt(plan: Plan) -> Plan:
        return grouped(plan, shares)

    model = {} if len(shares) == 3 else {"model": nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23))}
    trained = await train(make_job(steps=15, **model), len(shares), 6, adapt=adapt, keep=keep)
    if not model:
        assert trained.losses == plain(make_job(), 15, 6).losses
    found = copies.newest(15)
    assert found is not None
    assert found.next_step > 1
    for stage in found.stages:
        assert len(stage.holders) == 2
        for j, member in enumerate(trained.members):
            own, digests = member.lender.copies, {*stage.weights.values(), *stage.optimizer.values()}
            held = {digest for digest in digests if own.find(digest) is not None}
            assert (held == digests) == (f"p{j}" in stage.holders)
            assert len([copy for copy in own._copies if copy.next_step < 15]) <= 2, (
                "beside what the owner has read at the end"
            )
            assert all(len(others) <= 2 for others in own._others.values())


def began_at(logged: Sequence[Mapping[str, Any]]) -> list[int]:
    """The step that each recovery has gone back to."""
    return [entry["step"] - entry["steps_again"] for entry in logged if entry["event"] == Event.RUN_GOES_ON]


def only_holder(storm: Storm) -> str:
    """A member which, but for its keeper, is the only one with its stage's tensors: a stage may have none, or tied ones."""
    training = storm.mesh.training
    assert training is not None
    copied = training.copies.newest(training._job.steps)
    assert copied is not None
    pairs = [{storm.name_of(peer) for peer in peers} for peers in copied.held_by]
    return next(name for name in reversed(storm.members()) if {name, storm.keeper_of(name)} in pairs)


def told(
    folder: Path, every: int, befall: Callable[[Storm], None], at: int = 8, seed: int = 0
) -> list[Mapping[str, Any]]:
    """The log of a run that something befalls once this step is reported; it ends equal to an undisturbed one."""

    async def story() -> dict[str, str]:
        async with stormy(seed, folder) as storm:

            def hear(report: Report) -> None:
                if report.step == at:
                    befall(storm)

            async with asyncio.timeout(1800):
                assert await train_under(storm, hear, replace(job_of(), checkpoint_every=every)) == "equal"
            return storm.names

    with quick_planning(), capture_logs() as logged:
        names = run(story())
    assert going_back(logged, names).wrong == []
    return logged


def from_peers(logged: list[Any]) -> list[int]:
    """The steps whose copies with peers were newer than what was on the disk."""
    told = [entry for entry in logged if entry["event"] == Event.STATE_FOUND]
    return [entry["next_step"] for entry in told if entry["with_peers"]]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_dead_stage_comes_back_from_its_keeper(tmp_path: Path, stage: int) -> None:
    """There is no checkpoint at all yet: without keepers the run would begin anew."""
    logged = told(tmp_path, 1000, lambda storm: storm.kill(storm.members()[stage]))
    (base,) = began_at(logged)
    assert base >= 5  # copies are a few steps apart
    assert from_peers(logged) == [base]


@pytest.mark.slow
def test_where_no_memory_is_left_for_copies_there_are_none(tmp_path: Path) -> None:
    with mock.patch("meshcee.planner.has_room_for_copies", return_value=False):
        logged = told(tmp_path, 5, lambda storm: storm.kill(storm.members()[1]))
    assert not [entry for entry in logged if entry["event"] == Event.COPIES_MADE]
    assert began_at(logged) == [5]


@pytest.mark.slow
def test_holder_and_keeper_die_at_once_and_the_disk_is_what_is_left(tmp_path: Path) -> None:
    def befall(storm: Storm) -> None:
        victim = only_holder(storm)
        for name in {victim, storm.keeper_of(victim)}:
            storm.kill(name)

    logged = told(tmp_path, 5, befall)
    assert from_peers(logged) == []
    assert began_at(logged) == [5]


@pytest.mark.slow
def test_a_keeper_that_dies_as_it_gives_its_copy_back_costs_the_steps_since_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storms: list[Storm] = []
    keepers: list[str] = []
    read = Fetch._read

    async def dies(fetch: Fetch, peer: str, digests: Sequence[str]) -> None:
        if fetch._urgent.is_set() and storms[-1].name_of(peer) in keepers:  # for the state to go on from
            storms[-1].kill(keepers.pop())
        await read(fetch, peer, digests)

    def befall(storm: Storm) -> None:
        victim = only_holder(storm)
        storms.append(storm)
        keepers[:] = [storm.keeper_of(victim)]
        storm.kill(victim)

    monkeypatch.setattr(Fetch, "_read", dies)
    attempts = (told(tmp_path / str(i), 4, befall, at=6) for i in range(5))  # a copy is complete since the checkpoint
    logged = next(log for log in attempts if not keepers)  # a keeper that takes the stage over itself gives nothing
    assert from_peers(logged) != []
    assert began_at(logged) == [4]


@pytest.mark.slow
def test_a_member_that_does_not_reach_a_keeper_leaves_its_stage_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real storm: two members were cut off from each other as one was to read what the other held."""
    keepers: list[str] = []
    cut: list[str] = []
    storms: list[Storm] = []
    opens = Reader.open

    async def opened(reader: Reader, peer: str) -> Stream:
        if keepers and storms[-1].name_of(peer) in keepers:
            cut.extend([] if cut else [reader.transport.peer_id])
            if reader.transport.peer_id in cut:
                raise StreamClosed("the link is down")
        return await opens(reader, peer)

    def befall(storm: Storm) -> None:
        victim = only_holder(storm)
        storms.append(storm)
        keepers[:] = [storm.keeper_of(victim)]
        storm.kill(victim)

    monkeypatch.setattr(Reader, "open", opened)
    for seed in range(12):  # another one than the keeper is to have the stage, and has to read it from there
        cut.clear()
        keepers.clear()
        logged = told(tmp_path / str(seed), 4, befall, at=6, seed=seed)
        lost = [entry["error"] for entry in logged if entry["event"] == Event.MEMBER_LOST]
        if unread := [error for error in lost if error.startswith("not all of the state")]:
            break
    assert len(unread) == 1
    (base,) = began_at(logged)
    assert base > 4
    assert from_peers(logged) == [base, base]


@pytest.mark.slow
def test_after_a_refused_offer_the_copies_of_the_next_epoch_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: set[Member] = set()
    prepare = Member.prepare

    async def refuses_one(member: Member, *args: Any) -> Any:
        if member.lender.of and member not in refused:
            refused.add(member)
            raise StaleTermError("another coordinator is known")
        return await prepare(member, *args)

    monkeypatch.setattr(Member, "prepare", refuses_one)
    monkeypatch.setattr(virtual_chaos, "TIMES", replace(virtual_chaos.TIMES, regroup_s=3.0))
    logged = told(tmp_path, 1000, lambda storm: storm.kill(storm.members()[1]), at=3)
    assert len(refused) >= 2
    lost = [k for k, entry in enumerate(logged) if entry["event"] == Event.RUN_GOES_ON]
    copied = [{len(stage) for stage in e["holders"]} for e in logged[lost[0] :] if e["event"] == Event.COPIES_MADE]
    assert copied
    assert all(holders == {2} for holders in copied)


@pytest.mark.slow
def test_a_run_whose_plans_are_refused_waits_until_it_knows_the_other_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that have heard of a later term first refuse every plan of the old one, as fast as it is offered."""
    prepare, refusals = Member.prepare, list[float]()

    async def refuses_for_a_while(member: Member, *args: Any) -> Any:
        now_s = asyncio.get_running_loop().time()
        if member.lender.of:
            refusals.append(now_s)
            if now_s < refusals[0] + 5.0:
                raise StaleTermError("another coordinator is known")
        return await prepare(member, *args)

    monkeypatch.setattr(Member, "prepare", refuses_for_a_while)
    logged = told(tmp_path, 1000, lambda storm: storm.kill(storm.members()[1]), at=3)
    assert refusals[-1] > refusals[0] + 5.0
    assert Event.RUN_GOES_ON in [entry["event"] for entry in logged]
