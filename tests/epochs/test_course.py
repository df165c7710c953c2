"""The course of a run: transcripts of situations, and runs in which chance answers every question."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcee.epochs import course, moves
from meshcee.epochs.course import FRUITLESS, LONGEST_PAUSE_S, REPLANS, Course, Missing, State
from meshcee.errors import JoinError, MeshceeError, PeerLostError, PlanError, StaleTermError
from peers.wire.suspects import Fault, Suspects
from tests.epochs.transcript import FOLDER, replayed
from tests.mutation import breaks, changed

PEERS = "abcdef"
QUESTIONS = tuple(moves.ANSWERS)
STALE, LOST = 1, 12  # of the ways in which an epoch fails
ENDS = (moves.Finish, moves.Fail, moves.GiveUp)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_situation_goes_as_its_transcript_says(path: Path) -> None:
    """After a change that is meant: `python -m tests.epochs.transcript`, and look at what has changed."""
    text = path.read_text()
    assert list(replayed(text)) == text.splitlines()


class World:
    """Answers what the machine asks, by chance, and holds what is done against what must always be so.

    Who is out is known here from the answers that were given, so the machine's own account is not asked.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.steps = self.chance.randrange(1, 8)
        self.told: dict[int, float] = dict.fromkeys(range(self.chance.choice((0, 0, self.steps - 1))), 0.5)
        self.course = Course(
            self.steps,
            told=self.told,
            done=self.chance.randrange(len(self.told) + 1),
            keeps=self.chance.random() < 0.9,
            blame=Suspects().hear,
            members=self.some(PEERS) if self.chance.random() < 0.2 else None,
        )
        self.now = 100.0
        self.out: set[str] = set()  # who was missed, shunned or not seen, and has not answered since
        self.shunned: set[str] = set()
        self.here: frozenset[str] = frozenset()  # when the last epoch ended in peace
        self.following: moves.Proposal | None = None  # found while an epoch ran
        self.leaving: frozenset[str] = frozenset()  # members that have asked to be left out of the running epoch
        self.faults = 0  # so far: no two are alike
        self.running: moves.Offer | None = None
        self.apart: frozenset[str] = frozenset()  # members that lost each other's copies
        self.aside: frozenset[str] = frozenset()  # of these, who is left out now
        self.silent: frozenset[str] = frozenset()  # who has not answered the last roll call
        self.unheard: frozenset[str] = frozenset()  # whom the last call of the roll found silent, and who was blamed
        self.blamed: frozenset[str] = frozenset()
        self.start = self.step = 0  # of the next epoch; that the running one does next
        self.epochs = 0
        self.reported = list(self.told)
        self.transitions: set[tuple[str, str, str]] = set()
        self.question: moves.Command = self.do(self.course.begin())

    def some(self, peers: str | frozenset[str]) -> frozenset[str]:
        return frozenset(p for p in sorted(peers) if self.chance.random() < 0.6)

    def give(self, event: moves.Event) -> None:
        before, self.now = self.course.state, self.now + 1
        is_late = type(event) not in self.awaited()
        commands = self.course.handle(event)
        if is_late:
            assert (commands, self.course.state) == ([], before)
            return
        if isinstance(event, moves.Ended | moves.Failed):
            self.running = None
        if isinstance(event, moves.States):  # answers what the last call of the roll led to
            self.aside = self.silent = frozenset()
            if self.course.state is State.OVER:
                assert event.on_disk == self.course.done > 0, "the disk has what is done"
                assert {*self.reported} <= {*range(self.course.done)}, "and what was told"
                assert self.course.done == self.steps or self.course.stopping
        if isinstance(event, moves.Failed):
            self.apart = event.losses.apart
            self.blamed = frozenset({event.losses.blamed} - {None})
        self.transitions.add((before.value, type(event).__name__, self.course.state.value))
        if isinstance(event, moves.Stopped):  # what was asked is still to be answered
            assert all(isinstance(command, moves.Stop) for command in commands)
            assert bool(commands) == (self.running is not None)
        else:
            self.question = self.do(commands)
        if isinstance(event, moves.Ended | moves.Failed):
            assert {*range(self.course.done)} <= {*self.reported}, (
                "every step that counts is told of, whatever ends its epoch"
            )

    def awaited(self) -> set[type]:
        state = self.course.state
        found = {*moves.ANSWERS.get(type(self.question), ())}
        found |= {moves.Failed} if state in course.EPOCH else set()
        found |= {moves.TimeUp} if state is State.SEARCHING else set()
        return found | ({moves.Stopped} if state is not State.OVER else set())

    # -- what must always be so

    def do(self, commands: list[moves.Command]) -> moves.Command:
        """What is to be answered."""
        for command in commands:
            assert command is commands[-1] or not isinstance(command, QUESTIONS), "a question is the last command"
            self.hold(command)
        last = commands[-1] if commands else None
        assert (self.course.state is State.OVER) == isinstance(last, ENDS)
        if last is not None and isinstance(last, (*QUESTIONS, *ENDS)):
            return last
        assert self.running is not None, "while nothing runs, something is asked"
        return self.running

    def hold(self, command: moves.Command) -> None:
        match command:
            case moves.Offer(proposal, number):
                assert self.running is None, "one epoch at a time"
                assert number == self.epochs + 1, "epochs rise"
                members = {*proposal.members}
                if proposal is self.following:
                    assert members <= self.here, "nobody who has left meanwhile"
                else:
                    assert not members & self.out, "nobody who is gone or shunned"
                self.epochs, self.running, self.following = number, command, None
                self.step, self.leaving = self.start, frozenset()
            case moves.Meet(proposal):  # what its members hold from now on can be given, unless they are missed again
                assert proposal is self.following or not {*proposal.members} & self.out, "nobody who is gone or shunned"
                self.out -= {*proposal.members}
                self.unheard -= {*proposal.members}
            case moves.GoOnFrom(step, _):
                assert step <= self.course.done
                self.start = step
            case moves.AskPlanOf(_, without):
                assert self.out <= {*without}
            case moves.Shun(peers):
                self.shunned |= peers
                self.out |= peers
            case moves.Tell(step):
                assert step not in self.reported, "no step is told of twice"
                self.reported.append(step)
            case moves.Compare(step):
                assert step in self.reported
            case moves.Stop():
                assert self.running is not None
            case moves.Pause(for_s):
                assert 0 < for_s <= LONGEST_PAUSE_S

    # -- what comes of a question

    def plan(self, without: set[str]) -> moves.Proposal | None:
        left = sorted({*PEERS} - without - self.shunned)
        members = self.chance.sample(left, self.chance.randrange(len(left) + 1))
        return moves.Proposal(tuple(members), (self.epochs, "")) if members else None

    def answer(self) -> moves.Event:
        likely = self.chance.random
        match self.question:
            case moves.TakeTurn():
                return moves.Turned(likely() < 0.5)
            case moves.Profile():
                return moves.Profiled()
            case moves.AskPlan() | moves.AskPlanOf():
                without = {*self.question.without} if isinstance(self.question, moves.AskPlanOf) else set()
                if (found := self.plan(without)) is None or likely() < 0.2:
                    return moves.NoPlan(self.chance.choice((PlanError("no room"), JoinError("no answer"))))
                if self.course.state is State.PARTING:
                    self.following = found
                return moves.Found(found)
            case moves.Meet():
                return moves.Met() if likely() < 0.9 else moves.Failed(PeerLostError("has gone"))
            case moves.Offer(proposal, _):
                return self.comes_of(frozenset(proposal.members))
            case moves.Consider():
                self.following = self.plan(set()) if likely() < 0.2 else None
                return moves.Better(self.following)
            case moves.CallRoll(members):
                here = self.some(frozenset(members))
                self.unheard = (self.unheard - here) | ({*members} - here) | self.blamed
                if self.course.state is State.CALLING:
                    missed = {*members} - here
                    self.silent = frozenset(missed)
                    assert self.course.plan is not None
                    missed &= {*self.course.plan.members}
                    self.aside = frozenset() if missed else self.apart
                    self.out |= self.silent | self.aside
                else:
                    self.out -= here
                return moves.Called(here, self.now)
            case moves.FindStates(done, mute):
                assert not self.aside & mute, "who is only cut off from another one can give what it holds"
                assert self.silent <= mute, "who does not answer gives nothing"
                assert mute <= self.unheard, (
                    "who was called last and answered, or was not called, can give what it holds"
                )
                older, newer = sorted(self.chance.randrange(done + 1) for _ in range(2))
                return moves.States(older, self.chance.choice((None, newer)))
            case moves.LookAround(missed):
                assert self.out <= {*missed}
                announced = dict.fromkeys(self.some(frozenset(missed)), self.now)
                devices = self.some(PEERS) if likely() < 0.3 else frozenset(PEERS)
                return moves.Around(announced, devices, self.now)
            case moves.See(members):
                if likely() < 0.8:
                    return moves.Seen()
                unseen = self.some(frozenset(members))
                self.out |= unseen
                return moves.Unseen(JoinError("not seen"), unseen, self.now)
            case moves.Forgive():
                some, self.shunned = bool(self.shunned), set()
                return moves.Forgiven(some)
            case _:
                return moves.Changed()

    def comes_of(self, members: frozenset[str]) -> moves.Event:
        """Of an epoch."""
        goes_over = self.course.state is State.HANDING_OVER and self.chance.random() < 0.5
        if self.step < self.steps and not goes_over and self.chance.random() < 0.8:
            self.step += 1
            if self.chance.random() < 0.3:
                self.leaving = self.some(members)
            return moves.Stepped(self.step - 1, 0.5, self.leaving)
        if goes_over or (
            self.chance.random() < 0.5 and (self.course.following or self.course.stopping or self.step == self.steps)
        ):
            leaving, here = self.some(PEERS), frozenset(PEERS) if self.chance.random() < 0.5 else self.some(PEERS)
            leaving = leaving if self.chance.random() < 0.5 else frozenset()
            self.here = here - leaving
            return moves.Ended(self.chance.random() < 0.3, leaving, here, self.now)
        return self.failure(members)

    def failure(self, members: frozenset[str], how: int | None = None) -> moves.Failed:
        self.following = None
        one = self.chance.choice(sorted(members))
        match self.chance.randrange(20) if how is None else how:
            case 0:
                return moves.Failed(MeshceeError("data[i] fails"))
            case 1 | 2 | 3:  # STALE
                return moves.Failed(StaleTermError("an older term"))
            case 4 | 5 | 6:
                return moves.Failed(PlanError("is taken"))
            case 7 | 8 | 9:
                self.faults += 1
                error = MeshceeError("fails")
                fault = Fault(one, error, "x" * self.faults, (0, 2), range(1, 2), frozenset({one}))
                return moves.Failed(error, moves.Losses(1.0, faults=(fault,)))
            case 10 | 11:
                return moves.Failed(PeerLostError("is stuck"), moves.Losses(1.0, stuck=frozenset({one})))
        other = self.chance.choice(sorted(members))  # LOST
        parted = frozenset({(one, other), (other, one)} if one != other else ())
        if self.chance.random() < 0.3:
            apart = frozenset({one, other})
            return moves.Failed(PeerLostError("not all has reached it"), moves.Losses(1.0, apart=apart))
        return moves.Failed(PeerLostError("is lost"), moves.Losses(1.0, parted=parted, blamed=one))

    def go_on(self, events: int) -> None:
        while events and self.course.state is not State.OVER:
            events -= 1
            if self.chance.random() < 0.1:
                self.give(self.chance.choice(ANY))
            elif self.running and not isinstance(self.question, moves.Offer) and self.chance.random() < 0.05:
                self.give(self.failure(frozenset(self.running.proposal.members)))
            else:
                self.give(self.answer())


# Events that come at any time; most come too late, or too early.
ANY: list[moves.Event] = [
    moves.Turned(True),
    moves.Profiled(),
    moves.Met(),
    moves.Seen(),
    moves.Forgiven(True),
    moves.Forgiven(False),
    moves.Changed(),
    moves.TimeUp(),
    moves.Stopped(),
    moves.States(0, None),
    moves.Better(None),
    moves.NoPlan(PlanError("no room")),
    moves.Around({}, frozenset(PEERS), 0.0),
    moves.Failed(PeerLostError("is lost")),
]
seeds = st.integers(0, 1 << 32)
MANY = 4000  # worlds, for what is rare in them


@given(seeds, st.integers(0, 300))
def test_whatever_happens_one_epoch_runs_at_a_time_with_peers_that_are_there_and_no_step_is_told_of_twice(
    seed: int, events: int
) -> None:
    World(seed).go_on(events)


def nothing_comes(world: World) -> moves.Event:
    match world.question:
        case moves.TakeTurn():
            return moves.Turned(False)
        case moves.Profile():
            return moves.Profiled()
        case moves.AskPlan() | moves.AskPlanOf():
            return moves.NoPlan(JoinError("no answer"))
        case moves.CallRoll():
            return moves.Called(frozenset(), world.now)
        case moves.FindStates():
            return moves.States(0, None)
        case moves.LookAround():
            return moves.Around({}, frozenset(), world.now)
        case moves.See(members):
            return moves.Unseen(JoinError("not seen"), frozenset(members), world.now)
        case moves.Forgive():
            return moves.Forgiven(False)
        case _:
            return moves.TimeUp() if world.course.state is State.SEARCHING else moves.Changed()


@given(seeds, st.integers(0, 100))
def test_when_nothing_comes_any_more_the_run_soon_ends_and_says_why(seed: int, events: int) -> None:
    world = World(seed)
    world.go_on(events)
    for _ in range(20):
        if world.course.state is State.OVER:
            break
        lost = world.running is not None or isinstance(world.question, moves.Meet)
        world.give(moves.Failed(PeerLostError("is lost")) if lost else nothing_comes(world))
    assert isinstance(world.question, ENDS)


def always_fails(seed: int) -> None:
    """Plans come, and no epoch does a step."""
    world = World(seed)
    how = world.chance.choice((None, STALE, LOST))
    most = {STALE: REPLANS + 1, LOST: FRUITLESS + 1}.get(how, (len(PEERS) + 1) * FRUITLESS + REPLANS + 1)
    while world.course.state is not State.OVER:
        if isinstance(world.question, moves.Offer):
            world.give(world.failure(frozenset(world.question.proposal.members), how))
        elif isinstance(world.question, moves.TakeTurn):
            world.give(moves.Turned(False))
        elif isinstance(world.question, moves.AwaitChange) and world.chance.random() < 0.5:
            world.give(moves.TimeUp())
        else:
            world.give(world.answer())
        assert world.epochs <= most


@given(seeds)
def test_plans_that_always_fail_do_not_go_on_for_ever(seed: int) -> None:
    """Who fails is left out once; what fails without anybody's fault is tried so often."""
    always_fails(seed)


def goes_on(seed: int) -> None:
    World(seed).go_on(400)


@pytest.mark.cases(9)
@pytest.mark.parametrize(
    ("story", "function", "line", "instead"),
    [
        (goes_on, Course, "type(event) not in self._awaited", "False"),
        (goes_on, Course, "self.missing.leave_out(event.peers, event.at)", "pass"),
        (goes_on, Course, "self._counts.epoch += 1", "pass"),
        (goes_on, Course, " or self.is_known(step.step)", ""),
        (goes_on, Course, "if late:", "if False:"),
        (goes_on, Course, "self._step = self.following = None", "self._step = None"),
        (goes_on, Course, "self._untold(event.losses) + self._failed(event)", "self._failed(event)"),
        (goes_on, Course, "missed | aside | silent, event.at", "missed, event.at"),
        (goes_on, Course, "losses.apart & event.here", "frozenset()"),
        (goes_on, Course, "(aside & event.here)", "(failed & event.here)"),
        (goes_on, Course, " - silent", ""),
        (goes_on, Missing.are_here, "if p not in peers", "if False"),
        (goes_on, Course, "self.missing.are_here(proposal.members)", "pass"),
        (goes_on, Course, " and not self.is_known(self.done)", ""),
        (goes_on, Course, "0 < event.on_disk == self.done", "True"),
        (always_fails, Course, "self._counts.refused(self.done) > REPLANS", "False"),
        (always_fails, Course, "in_vain >= FRUITLESS", "False"),
        (always_fails, Course, "if self.missing.gone:\n        return self._search()", "if False:\n        pass"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_without_its_line_a_run_breaks_what_must_be_so(
    story: Callable[[int], None], function: Callable[..., object], line: str, instead: str
) -> None:
    with changed(function, line, instead):
        assert breaks(lambda: [story(seed) for seed in range(MANY)])


ROW = re.compile(r"    (\S+(?: \S+)*)  +([A-Z]\w+) +(\S.*?)  +(\S.*)")


def test_the_table_of_transitions_is_what_the_machine_does() -> None:
    """Of the module's docstring: no transition is missing there, and none is there that never happens."""
    in_epoch = {state.value for state in course.EPOCH}
    rows: set[tuple[str, str, str]] = set()
    for line in (course.__doc__ or "").splitlines():
        if (row := ROW.fullmatch(line)) is not None and row[2] in vars(moves):
            rows |= {(row[1], row[2], after) for after in row[4].split(", ")}
    taken: set[tuple[str, str, str]] = set()
    with mock.patch.object(course, "FRUITLESS", 6):  # of which chance makes enough
        for seed in range(MANY):
            world = World(seed)
            world.go_on(400)
            taken |= world.transitions
    told: set[tuple[str, str, str]] = set()
    for before, event, after in sorted(taken):
        meant = {(before, event, after), ("epoch", event, after) if before in in_epoch else (before, event, after)}
        if event == "Stopped" and before not in in_epoch:
            assert before == after
            meant = {("other", event, "the same")}
        assert meant & rows, f"{before} --{event}--> {after} is not in the table"
        told |= meant & rows
    assert rows - told == set()
