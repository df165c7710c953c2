"""A member that lies is found and named, nobody else is, and the run ends as if it had never been there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from benchmarks import virtual_chaos
from benchmarks.storm_job import MICRO, STEPS, captured_job, expected, job_of
from meshcee.audit import chosen
from meshcee.capture import capture
from meshcee.errors import ProtocolError, UsageError, unwrap
from meshcee.figures import DeviceProfile
from meshcee.job import Job
from meshcee.optim import PER_PARAMETER, Optimizer
from meshcee.plan import Plan
from peers.member.audit import StepWitness
from peers.owner.audit import check_judges, own_class
from peers.owner.epoch import Report
from peers.owner.numbers import Losses
from peers.transport import Frame
from peers.transport.stream import FramedStream
from peers.wire import messages
from tests.rig import audited
from tests.rig.audited import Watched, identity, watch
from tests.rig.liars import LIES, Liar
from tests.rig.mesh_fixture import beside, even_plan
from tests.rig.virtual_time import quiet, run

FEW = 4
SECRET = b"secret"


def watched(share: float, lie: str = "", steps: int = FEW, place: int = 1) -> tuple[Watched, Liar]:
    """The member at this place lies in every step."""
    job = replace(job_of(), audit=share, steps=steps, checkpoint_every=0)
    liar = Liar(lie, lambda peer, step: peer == identity(place).peer_id)
    with quiet(), liar.at_work():
        return run(watch(job, captured_job(), 3, MICRO, seed=SECRET)), liar


def test_honest_members_prove_what_they_do() -> None:
    found, _ = watched(1.0)
    assert found.found == []
    assert found.judged == 3 * FEW
    assert found.losses == expected()[0][:FEW]


def test_evaluations_between_steps_are_no_part_of_it() -> None:
    whole = replace(job_of(), audit=1.0, steps=FEW, checkpoint_every=0, eval_data=[(1, 2)] * 10, eval_every=2)
    with quiet():
        found = run(watch(whole, capture(whole), 3, MICRO, seed=SECRET))
    assert (found.found, found.judged) == ([], 3 * FEW)
    assert found.losses == expected()[0][:FEW]


@pytest.mark.cases(6)
@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != "copy"])
def test_a_lie_is_found_where_it_is_looked_for_and_nobody_else_is(lie: str) -> None:
    place = 2 if lie == "loss" else 1
    found, liar = watched(1.0, lie, place=place)
    assert {peer for peer, _, _ in found.found} == {identity(place).peer_id}
    assert sorted({step for _, step, _ in found.found}) == list(range(FEW))
    assert liar.told or lie in ("what it sent", "what it received", "its state")


@pytest.mark.parametrize("lie", ["activation", "moment"])
def test_a_lie_is_found_in_the_steps_that_are_chosen_and_in_no_other(lie: str) -> None:
    steps = 12
    found, _ = watched(0.3, lie, steps)
    picked = [step for step in range(steps) if chosen(SECRET, 0.3, (1, 1), step, identity(1).peer_id)]
    assert 0 < len(picked) < steps
    assert [step for _, step, _ in found.found] == picked


def test_nothing_of_an_audit_happens_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, send = set[str](), FramedStream.send

    async def heard(stream: FramedStream, frame: Any) -> None:
        kinds.add(frame.kind)
        assert "signed" not in frame.header
        await send(stream, frame)

    monkeypatch.setattr(FramedStream, "send", heard)
    monkeypatch.delattr(StepWitness, "__init__")
    found, _ = watched(0.0)
    assert found.losses == expected()[0][:FEW]
    assert messages.APPLIED in kinds
    assert not kinds & {messages.PROOF, messages.AUDIT, messages.EVIDENCE}


class Frozen(nn.Module):
    """A model with a frozen parameter and a constant buffer, which no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 3)
        for layer in list(self.layers)[::2]:
            layer.weight.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x) + self.shift)
        return self.head(x)


def frozen_job(optimizer: str) -> Job:
    torch.manual_seed(0)
    data = [(torch.randn(8), i % 3) for i in range(32)]
    groups = {"*.bias": {"class": "SGD", "lr": 0.1}} if optimizer == "Muon" else {}  # which is for matrices
    return Job(
        Frozen(),
        nn.functional.cross_entropy,
        data,
        Optimizer(optimizer, lr=0.1, groups=groups),
        batch_size=8,
        micro_batch_size=MICRO,
        steps=FEW,
        seed=3,
        codec="none",
        audit=1.0,
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("optimizer", sorted(PER_PARAMETER))
def test_what_no_step_changes_is_the_owners_own_and_some_optimizers_begin_with_a_state(optimizer: str) -> None:
    job = frozen_job(optimizer)
    with quiet():
        found = run(watch(job, capture(job), 3, MICRO, seed=SECRET))
    assert (found.found, found.judged) == ([], 3 * FEW)


NO_ROOM = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes.")


def watched_by_a_judge_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Watched:
    async def fails(*case: Any) -> Any:
        raise error

    monkeypatch.setattr(audited, "again", fails)
    return watched(1.0)[0]


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), NO_ROOM])
def test_an_owner_without_memory_doubts_nobody(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    found = watched_by_a_judge_that_fails(monkeypatch, error)
    assert (found.found, found.judged) == ([], 0)


@pytest.mark.parametrize("error", [KeyError("weight"), ZeroDivisionError(), ValueError("nan"), RuntimeError("sqrt")])
def test_who_shows_what_no_step_can_be_computed_from_is_doubted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It was left in peace for ever, or the owner's run ended with a traceback."""
    found = watched_by_a_judge_that_fails(monkeypatch, error)
    first = min(identity(place).peer_id for place in range(3))
    assert (found.found, found.judged) == ([(first, step, "doubted") for step in range(FEW)], 0)


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf"), 9.0])
def test_a_count_of_steps_that_were_never_fed_is_a_lie(count: float) -> None:
    """The step after which the member says it is not chosen; the one behind is. No optimizer can step on from there."""
    picked = [chosen(SECRET, 0.1, (1, 1), step, identity(1).peer_id) for step in range(FEW)]
    assert picked == [False, True, False, False]
    job = replace(job_of(), audit=0.1, steps=FEW, checkpoint_every=0)
    liar = Liar("count", lambda peer, step: (peer, step) == (identity(1).peer_id, 0), count=count)
    with quiet(), liar.at_work():
        found = run(watch(job, captured_job(), 3, MICRO, seed=SECRET))
    assert liar.told == [(identity(1).peer_id, 0)]
    assert found.found == [(identity(1).peer_id, 1, "its optimizer counts steps that nobody has fed")]


def test_who_never_proves_a_step_is_doubted_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = StepWitness.proof

    async def never(witness: StepWitness) -> Any:
        if witness.me == identity(1).peer_id:
            await asyncio.Event().wait()
        return await proof(witness)

    monkeypatch.setattr(StepWitness, "proof", never)
    found, _ = watched(1.0)
    assert found.found == [(identity(1).peer_id, step, "doubted") for step in range(FEW)]


def test_evidence_that_contradicts_itself_is_its_members_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """One digest stands for five bytes, and for none."""
    show = StepWitness.show

    def doubled(witness: StepWitness, round: int) -> Frame:
        shown = show(witness, round)
        if witness.me != identity(1).peer_id:
            return shown
        *state, frames = shown.payloads
        told = msgpack.unpackb(frames)
        told[0][3:] = [[*told[0][3], told[0][3][0]], [*told[0][4], 0]]
        return replace(shown, payloads=[*state, msgpack.packb(told)])

    monkeypatch.setattr(StepWitness, "show", doubled)
    with pytest.raises(ProtocolError, match=f"{identity(1).peer_id}.*one digest for tensors of two shapes"):
        watched(1.0)


def test_an_audit_of_bf16_is_refused() -> None:
    with pytest.raises(UsageError, match="precision 'bf16'"):
        replace(job_of(), audit=0.1, precision="bf16")


# -- a whole run


@dataclass
class Run:
    """What a user saw."""

    told: list[int] = field(default_factory=list)
    plans: list[list[str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    liars: list[str] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        losses, state = expected()
        return self.losses == losses and all(torch.equal(tensor, state[name]) for name, tensor in self.state.items())


def played(
    folder: Path,
    share: float,
    lies: Callable[[Plan], AbstractContextManager[Any]] = lambda plan: nullcontext(),
    hear: Callable[[virtual_chaos.Storm, Report], None] = lambda storm, report: None,
) -> Run:
    """`lies` is what the first plan's members do, as long as the run takes."""
    found = Run()

    async def story() -> None:
        async with virtual_chaos.stormy(0, folder) as storm:
            at_work: list[AbstractContextManager[Any]] = []

            def on_plan(plan: Plan, names: Any) -> None:
                found.plans.append([names[peer] for peer in plan.peers])
                if not at_work:
                    at_work.append(lies(plan))
                    at_work[0].__enter__()

            def told(report: Report) -> None:
                found.told.append(report.step)
                hear(storm, report)

            try:
                async with asyncio.timeout(virtual_chaos.ENDS_WITHIN_S):
                    await virtual_chaos.train(storm, told, job=replace(job_of(), audit=share), on_plan=on_plan)
            finally:
                at_work[0].__exit__(None, None, None)
            result = storm.mesh.result
            found.losses, found.liars, found.state = result.losses, result.liars, result.state_dict

    with quiet(), virtual_chaos.quick_planning():
        try:
            run(story())
        except BaseExceptionGroup as group:
            raise unwrap(group) from group
    return found


def lying(lie: str, place: int, since: int = 0) -> Callable[[Plan], AbstractContextManager[Any]]:
    return lambda plan: Liar(lie, lambda peer, step: peer == plan.peers[place] and step >= since).at_work()


def assert_found(found: Run, place: int) -> None:
    first, *later = found.plans
    assert found.liars == [first[place]]
    assert len(later) == 1
    assert first[place] not in later[0]
    assert found.is_plain
    again = found.told.index(0, 1)
    assert found.told == [*range(again), *range(STEPS)], "what was told since the liar's first step is told again"


def test_a_run_with_a_liar_ends_as_the_plain_loop_and_without_it(tmp_path: Path) -> None:
    assert_found(played(tmp_path, 1.0, lying("update", 1, since=3)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("lie", LIES)
def test_whoever_lies_however(tmp_path: Path, lie: str, place: int) -> None:
    """The first stage sends no gradient, and the last one alone tells a loss. It sends no activations, and sums no gradient of
    its own: what it holds is tied to the first one's."""
    if (lie, place) in (("activation", 2), ("weight gradient", 2), ("gradient", 0), ("loss", 0), ("loss", 1)):
        return
    assert_found(played(tmp_path, 1.0, lying(lie, place, since=3)), place)


@pytest.mark.slow
def test_an_audit_now_and_then_finds_who_lies_again_and_again(tmp_path: Path) -> None:
    """Whatever is chosen: with a half of the steps, twelve lies escape once in four thousand runs."""
    assert_found(played(tmp_path, 0.5, lying("weight gradient", 1)), 1)


class Silent:
    """A member that does not show what it had."""

    def __init__(self, plan: Plan, how: Callable[[], None]) -> None:
        self.peer, self.how = plan.peers[1], how
        self._patched = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        show = StepWitness.show

        def nothing(witness: StepWitness, round: int) -> Any:
            self.how()
            return show(witness, round)

        self._patched.setattr(StepWitness, "show", nothing)

    def __exit__(self, *ended: object) -> None:
        self._patched.undo()


@pytest.mark.slow
def test_who_fails_when_it_must_show_is_left_out_unnamed_and_its_steps_are_taken_back(tmp_path: Path) -> None:
    struck: list[int] = []

    def fail() -> None:
        struck.append(1)
        if len(struck) == 5:
            raise ProtocolError("what it had is lost")

    found = played(tmp_path, 1.0, lambda plan: Silent(plan, fail))
    assert found.liars == []
    assert len(found.plans) == 2
    assert found.is_plain
    assert found.told.count(0) == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_who_is_killed_is_no_liar(tmp_path: Path, share: float, place: int) -> None:
    def hear(storm: virtual_chaos.Storm, report: Report) -> None:
        if report.step == 5 and len(storm.lending) == virtual_chaos.PEERS:
            storm.kill(storm.members()[place])

    found = played(tmp_path, share, hear=hear)
    assert found.liars == []
    assert found.is_plain


# -- who can be audited


def devices(plan: Plan, **changes: Any) -> dict[str, DeviceProfile]:
    own = own_class(plan.threads)
    assert own is not None
    like = DeviceProfile("cpu", "cpu", 1 << 30, 1e9, threads=1, capability=own.model)
    return dict.fromkeys(plan.peers, replace(like, **changes))


def test_a_plan_whose_members_nobody_can_check_is_refused() -> None:
    plan = replace(even_plan(6, 3, 8, 4), threads=1)
    with pytest.raises(UsageError, match="nobody can compute again what anna computes"):
        check_judges(plan, devices(plan, capability="another"), {"p0": "anna"})


def test_a_plan_whose_members_sum_gradients_is_refused() -> None:
    plan = replace(even_plan(6, 3, 8, 4), threads=1)
    twice = beside(plan, (1, [(6, (4,))]), (1, [(6, (4,))]))
    with pytest.raises(UsageError, match="as many stages as there are peers"):
        check_judges(twice, {}, {})


def test_steps_that_are_taken_back_were_not_told() -> None:
    losses = Losses()
    for step in range(4):
        losses[step] = 1.0
    assert losses.take_back(2) == [2, 3]
    assert [step in losses for step in range(4)] == [True, True, False, False]
    losses[3] = 2.0
    assert losses.take_back(0) == [0, 1, 3]
