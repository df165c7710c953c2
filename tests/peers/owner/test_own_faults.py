"""A peer that answers and fails is one peer lost: the run goes on without it, unless the work itself is at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import virtual_chaos
from meshcee.errors import MeshceeError, NonFiniteLossError, ProtocolError, unwrap
from meshcee.stage.runner import StageRunner
from meshcee.stage.tensors import pack, unpack
from peers.device.compute import Pace
from peers.member.executor import Executor
from peers.member.service import Member
from peers.mesh_view import LONGEST_SHUNNED_S, SHUNNED_S
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.owner.epoch import Report
from peers.owner.job_run import Training
from peers.owner.recovery import Recovery
from peers.planning import asking
from peers.transport import Frame, StreamClosed
from peers.wire import messages
from peers.wire.offer import Offer
from peers.wire.suspects import Fault, Suspects, is_own
from tests.rig.virtual_time import quiet, run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STRUCK = 4  # the step in which members fail

Story = Callable[[virtual_chaos.Storm], Callable[[Report], None]]


def played(folder: Path, begin: Story, **more: Any) -> tuple[str, list[set[str]]]:
    """The outcome of a run on virtual time, and the names of the members of each of its plans."""
    plans: list[set[str]] = []

    async def story() -> str:
        async with virtual_chaos.stormy(0, folder) as storm:
            hear = begin(storm)

            def on_plan(plan: Any, names: Any) -> None:
                plans.append({names[peer] for peer in plan.peers})

            async with asyncio.timeout(virtual_chaos.ENDS_WITHIN_S):
                return await virtual_chaos.train(storm, hear, on_plan=on_plan, **more)

    with quiet(), virtual_chaos.quick_planning():
        try:
            return run(story()), plans
        except BaseExceptionGroup as group:
            raise unwrap(group) from group


def offered_again(noted: list[str]) -> Story:
    """A member dies in the step that is struck; `noted` is told of another, which is offered a stage of the next plan."""

    def begin(storm: virtual_chaos.Storm) -> Callable[[Report], None]:
        def hear(report: Report) -> None:
            if report.step == STRUCK:
                members = storm.members()
                noted.append(storm.here.agents[members[0]].peer_id)
                storm.kill(members[1])

        return hear

    return begin


class Failing:
    """Members that `fails` names by their place raise an error in the step that is struck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[Executor], bool]) -> None:
        self.failed: list[str] = []
        run = Executor.take_actions

        async def struck(executor: Executor, round: Any) -> None:
            if round.step == STRUCK and fails(executor):
                self.failed.append(executor.place.peer)
                raise RuntimeError(f"CUDA out of memory: tried to allocate {len(self.failed)}.00 GiB")
            await run(executor, round)

        monkeypatch.setattr(Executor, "take_actions", struck)


@pytest.mark.slow
def test_an_error_that_one_member_meets_is_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is asked to compute, it fails; it is not asked again."""
    victim: list[str] = []
    failing = Failing(monkeypatch, lambda executor: executor.place.peer in victim)

    def begin(storm: virtual_chaos.Storm) -> Callable[[Report], None]:
        def hear(report: Report) -> None:
            if report.step == 1:
                victim.append(storm.here.agents[storm.members()[1]].peer_id)

        return hear

    outcome, plans = played(tmp_path, begin)
    assert outcome == "equal"
    assert failing.failed == victim
    assert len(plans) == 2
    assert len(plans[0] - plans[1]) == 1


class Damaged(Failing):
    """What the members that `gets` names are sent for the step that is struck lacks its last byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gets: Callable[[Executor], bool]) -> None:
        self.failed = []
        take = Executor.take

        async def taken(executor: Executor, peer: str, frame: Frame) -> None:
            if executor.step == STRUCK and frame.kind == messages.F and gets(executor):
                self.failed.append(executor.place.peer)
                frame = replace(frame, payloads=[*frame.payloads[:-1], bytes(frame.payloads[-1])[:-1]])
            await take(executor, peer, frame)

        monkeypatch.setattr(Executor, "take", taken)


class Full(Failing):
    """The members that `fills` names have no room for the stage that they are to build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fills: Callable[[Offer], bool]) -> None:
        self.failed = []
        build = Offer.build

        def built(offer: Offer, *args: Any) -> StageRunner:
            if fills(offer):
                self.failed.append(offer.peer_id)
                raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(self.failed)}.00 GiB")
            return build(offer, *args)

        monkeypatch.setattr(Offer, "build", built)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [Damaged, Full], ids=["decode", "build"])
def test_a_member_that_cannot_decode_a_frame_or_build_its_stage_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Failing]
) -> None:
    def first(of: Any) -> bool:
        return of.place.is_last and set(failing.failed) <= {of.place.peer}

    failing = kind(monkeypatch, first)
    outcome, plans = played(tmp_path, lambda storm: lambda report: None)
    assert outcome == "equal"
    assert len(failing.failed) == 1
    assert len(plans) == 2
    assert len(plans[0] - plans[1]) == 1


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Damaged, r"peer p\d \(stage \d\) failed in step 5: .* bytes \([23] peers have failed alike"),
        (Full, r"peer p\d \(stage \d\) failed before the first step: .*out of memory.*\(2 peers have failed alike"),
    ],
    ids=["decode", "build"],
)
def test_what_two_members_cannot_decode_or_build_alike_ends_the_run_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Failing], says: str
) -> None:
    failing = kind(monkeypatch, lambda of: of.place.is_last)
    with pytest.raises(MeshceeError, match=says):
        played(tmp_path, lambda storm: lambda report: None)
    assert len(set(failing.failed)) >= 2


class Widened:
    """Rows of the values that a member sends have a number too many, and its frames say so: nothing is wrong with the bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sender, self.met = "", list[str]()
        take = Executor.take

        async def taken(executor: Executor, peer: str, frame: Frame) -> None:
            self.sender = self.sender or executor.place.stages[0].peers[0]
            if peer == self.sender and executor.step == STRUCK and frame.kind == messages.F:
                self.met.append(executor.place.peer)
                values = unpack(frame.header["tensors"], frame.payloads)
                wider = [torch.cat([v, v[..., :1]], -1) if isinstance(v, torch.Tensor) else v for v in values[:-1]]
                meta, payloads = pack([*wider, values[-1]])
                frame = replace(frame, header={**frame.header, "tensors": meta}, payloads=payloads)
            await take(executor, peer, frame)

        monkeypatch.setattr(Executor, "take", taken)


@pytest.mark.slow
def test_who_sends_what_no_stage_can_take_is_a_suspect_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receivers alone were: the second one's error was taken for the work's, and ended the run."""
    widened, hear, heard = Widened(monkeypatch), Suspects.hear, list[Fault]()

    def noted(suspects: Suspects, faults: Collection[Fault]) -> set[str]:
        heard.extend(faults)
        return hear(suspects, faults)

    monkeypatch.setattr(Suspects, "hear", noted)
    outcome, _ = played(tmp_path, lambda storm: lambda report: None)
    assert outcome == "equal"
    assert heard
    assert all(fault.suspects == {widened.sender, fault.peer} for fault in heard)


def test_what_two_members_fail_alike_at_ends_the_run_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, lambda executor: executor.place.is_first)
    with pytest.raises(
        MeshceeError,
        match=rf"failed in step {STRUCK + 1}.*CUDA out of memory.*\(2 peers have failed alike on the same blocks\)",
    ):
        played(tmp_path, lambda storm: lambda report: None)
    assert len(set(failing.failed)) == 2


@pytest.mark.slow
def test_a_member_that_never_becomes_ready_is_left_out_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers and says that it lives."""
    prepare, stuck = Member.prepare, list[str]()

    async def never(member: Member, *args: Any) -> Any:
        if member.peer_id in stuck:
            await asyncio.Event().wait()
        return await prepare(member, *args)

    monkeypatch.setattr(Member, "prepare", never)

    outcome, plans = played(tmp_path, offered_again(stuck))
    assert outcome == "equal"
    assert len(plans) == 3  # the first, one with the peer that does not become ready, one without it
    assert len(plans[1] - plans[2]) == 1


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("how", "times"), [("never ready", 1), ("says nothing", 2)])
def test_who_does_not_become_ready_for_the_first_offer_is_left_out_and_the_run_begins_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, times: int
) -> None:
    """It answers whoever calls the roll. A stream that ended may have been the network's fault once."""
    prepare, serve, stuck, at_s = Member.prepare, Member.serve_job, list[str](), list[float]()

    async def never(member: Member, *args: Any) -> Any:
        if not stuck:
            stuck.append(member.peer_id)
        if member.peer_id in stuck and how != "says nothing":
            at_s.append(virtual_chaos.now())
            await asyncio.Event().wait()
        return await prepare(member, *args)

    async def silent(member: Member, stream: Any) -> None:
        if not stuck:
            stuck.append(member.peer_id)
        if member.peer_id in stuck and how == "says nothing":
            at_s.append(virtual_chaos.now())
            await asyncio.Event().wait()
        await serve(member, stream)

    monkeypatch.setattr(Member, "prepare", never)
    monkeypatch.setattr(Member, "serve_job", silent)
    told_s: list[float] = []
    outcome, plans = played(tmp_path, lambda storm: lambda report: told_s.append(virtual_chaos.now()))
    assert outcome == "equal"
    assert len(plans) == 1 + times
    assert len(plans[0] - plans[-1]) == 1
    assert len(at_s) == times, "nobody asks it again"
    assert told_s[0] - at_s[0] < virtual_chaos.TIMES.offer_s + 30.0


@pytest.mark.slow
def test_a_member_that_hangs_up_during_its_offers_is_left_out_though_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that has no memory for what it is sent, and cannot say so any more."""
    prepare, full = Member.prepare, list[str]()

    async def hang_up(member: Member, stream: Any, *args: Any) -> Any:
        if member.peer_id in full:
            raise StreamClosed("a payload is announced, which this peer cannot hold")
        return await prepare(member, stream, *args)

    monkeypatch.setattr(Member, "prepare", hang_up)

    outcome, plans = played(tmp_path, offered_again(full))
    assert outcome == "equal"
    assert len(plans) == 3  # the first, one with the peer that hangs up, one without it
    assert len(plans[1] - plans[2]) == 1


@pytest.mark.slow
def test_a_device_that_hung_is_not_tried_again_while_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one hangs when the first would long have had another chance."""
    monkeypatch.setattr("peers.mesh_view.SHUNNED_S", 0.1)
    hung: list[str] = []

    def begin(storm: virtual_chaos.Storm) -> Callable[[Report], None]:
        def hear(report: Report) -> None:
            if report.step == STRUCK + 2 * len(hung) and len(hung) < 2:
                hung.append(storm.members()[0])
                storm.here.agents[hung[-1]].compute.pace = Pace(1e-9)

        return hear

    outcome, plans = played(tmp_path, begin)
    assert outcome == "equal"
    assert len(plans) == 3
    assert not plans[1] & {hung[0]}
    assert not plans[2] & {*hung}


@pytest.mark.slow
@pytest.mark.parametrize("planning", [(Training, "_plan"), (asking, "request_plan"), (Recovery, "see")])
def test_a_peer_that_has_gone_since_it_was_planned_with_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planning: tuple[Any, str]
) -> None:
    plan, storms, gone = getattr(*planning), list[virtual_chaos.Storm](), list[str]()

    async def planned_and_gone(asked: Any, *members: Sequence[str]) -> Any:
        planned = await plan(asked, *members)
        if not gone:
            (storm,) = storms
            gone.append((members[0] if planning[0] is Recovery else planned.plan.peers)[-1])
            storm.kill(storm.names[gone[0]])
            await storm.mesh.agent.directory.wait_for(lambda: gone[0] not in storm.mesh.agent.directory.peers)
        return planned

    monkeypatch.setattr(*planning, planned_and_gone)

    def begin(storm: virtual_chaos.Storm) -> Callable[[Report], None]:
        storms.append(storm)

        def hear(report: Report) -> None:
            if report.step == STRUCK and planning[0] is Recovery:
                storm.kill(storm.members()[0])

        return hear

    outcome, plans = played(tmp_path, begin)
    assert outcome == "equal"
    assert len(gone) == 1
    planned = plans[1:] if planning[0] is Recovery else plans
    assert planned
    assert not any(storms[0].names[gone[0]] in members for members in planned)  # no epoch begins with it


async def test_a_peer_that_fails_again_and_again_is_left_out_for_longer_and_longer() -> None:
    now_s = 0.0
    async with InProcess(JoinOptions(), monotonic=lambda: now_s) as here:
        agent, other = await here.start("a"), await here.start("b")
        await agent.wait_for_devices(2)
        for times in range(9):
            agent.shun([other.peer_id])
            assert set(agent.devices()) == {agent.peer_id}
            assert agent.shunned() == {other.peer_id}
            assert agent.failed() == {other.peer_id}
            now_s += min(SHUNNED_S * 2**times, LONGEST_SHUNNED_S)
            assert set(agent.devices()) == {agent.peer_id, other.peer_id}
        agent.shun([other.peer_id])
        known = agent.directory.peers[other.peer_id]
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(agent.directory.peers, other.peer_id, replace(known, instance="another process"))
            assert (agent.shunned(), agent.failed()) == (set(), set()), "who is started anew begins anew"
        assert agent.forgive()
        assert not agent.forgive()
        assert other.peer_id in agent.devices()


def fault(peer: str, text: str, blocks: tuple[int, int] = (0, 2), step: int | None = 3, *others: str) -> Fault:
    steps = None if step is None else range(step, step + 1)
    return Fault(peer, ProtocolError(f"peer {peer}: {text}"), text, blocks, steps, frozenset({peer, *others}))


def test_alike_is_the_same_error_on_the_same_work() -> None:
    first = fault("a", "stage 1: 20 bytes are missing at 0x7f2a")
    assert fault("b", "stage 2: 31 bytes are missing at 0x8f2a", (1, 3), 4).is_like(first)
    assert not fault("b", "stage 2: 31 bytes are too many at 0x8f2a").is_like(first)
    assert not fault("b", "stage 1: 20 bytes are missing at 0x7f2a", (2, 3)).is_like(first)
    assert not fault("b", "stage 1: 20 bytes are missing at 0x7f2a", (0, 2), 5).is_like(first)
    assert not fault("b", "stage 1: 20 bytes are missing at 0x7f2a", (0, 2), None).is_like(first)


def test_a_peer_that_does_not_say_its_step_may_have_been_in_any_that_was_fed() -> None:
    unsaid = replace(fault("a", "its process was ended"), steps=range(2, 5))
    for step, alike in [(0, False), (1, True), (4, True), (5, True), (6, False)]:
        said = fault("b", "its process was ended", step=step)
        assert said.is_like(unsaid) is unsaid.is_like(said) is alike


def test_who_sent_what_two_peers_cannot_read_is_the_one_at_fault() -> None:
    suspects = Suspects()
    assert suspects.hear([fault("b", "it is damaged", (0, 2), 3, "a")]) == {"b"}
    assert suspects.hear([fault("c", "it is damaged", (0, 2), 3, "a")]) == {"a"}
    with pytest.raises(ProtocolError, match=r"it is damaged \(3 peers have failed alike on the same blocks\)"):
        suspects.hear([fault("d", "it is damaged", (0, 2), 3, "e")])


def test_a_peer_that_fails_again_is_no_second_one() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert suspects.hear([fault("a", "no memory")]) == {"a"}


def test_a_loss_that_is_not_finite_is_no_peers_own() -> None:
    assert not is_own(NonFiniteLossError("nan"))
    assert is_own(MeshceeError("RuntimeError: out of memory"))
