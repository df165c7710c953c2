"""The step and plan protocol of docs/architecture.md as an explicit-state model: two stages, an owner, several coordinators.

The idea: a state is a small tuple, a message once sent stays in a set for ever, and delivering it is one transition. So
loss (never delivered), duplication (delivered again), delay, reordering and isolation are all explored without a line
of their own; deaths are a transition too. `explore` visits every reachable state and checks what must hold in each.

What is modelled of a step: A (first stage) sends ACT, B (last) runs F and its B and sends GRAD, which is A's last
input-gradient and so the commit point; A sends COMMIT; each applies in its own time. What is modelled of a plan: FENCE(term)
-> STATUS, then OFFER(term, base) -> READY, and the owner's log, which takes a plan only if its last entry is the one that
the coordinator saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Model", "State", "Violation", "decide", "explore"]

A, B = 0, 1
RESTORE = -1  # what `decide` says when only a snapshot helps
LOST = -1  # the version of a stage whose holder died: a newcomer that knows nothing


class Member(NamedTuple):
    """One stage: the term that it promised, the plan it joined, steps applied, and the step whose gradient it holds.

    `life` counts the processes that have held the stage. Offers come over a stream to one process and end with it, so
    an offer to an earlier life is never delivered to a later one.
    """

    promised: int = 0
    joined: int = 0  # the term of the plan; plan 0 is in the log from the start
    fenced: bool = False
    version: int = 0
    held: int = 0
    life: int = 0


class Coordinator(NamedTuple):
    """One term's attempt: the length of the owner's log that it saw, and the base state that it offers."""

    saw: int = 0  # 0: has not begun
    base: int | None = None


class State(NamedTuple):
    members: tuple[Member, Member]
    coordinators: tuple[Coordinator, ...]  # of terms 1, 2, ...
    log: tuple[int, ...]  # terms of the plans that the owner has taken, in order
    messages: frozenset[tuple[int | str, ...]]
    deaths: int = 0


class Violation(Exception):
    """An invariant does not hold; `state` shows how."""

    def __init__(self, text: str, state: State) -> None:
        super().__init__(f"{text}: {state}")


def decide(a: tuple[int, int], b: tuple[int, int]) -> int:
    """What a coordinator concludes from (version, held) of both stages: the version to go on from, or RESTORE.

    Somebody has applied s and the other still holds its gradient: roll forward to s. Nobody has: drop what is held.
    """
    if LOST in (a[0], b[0]):
        return RESTORE
    if a[0] == b[0]:
        return a[0]
    ahead, behind = max(a, b), min(a, b)
    return ahead[0] if behind == (ahead[0] - 1, ahead[0]) else RESTORE


@dataclass(frozen=True)
class Model:
    """Bounds of the exploration, and four mistakes that it must find."""

    steps: int = 2
    terms: int = 2
    deaths: int = 1
    drops_on_timeout: bool = False  # a stage forgets its gradient when it has waited long enough
    applies_before_commit: bool = False  # the last stage applies as soon as its own gradient is complete
    deaf_to_fences: bool = False  # a stage answers a fence and goes on with its step
    offers_outlive_processes: bool = False  # an offer made to a process reaches the one that takes its place

    def start(self) -> State:
        return State((Member(), Member()), (Coordinator(),) * self.terms, (0,), frozenset())

    def successors(self, state: State) -> Iterator[State]:
        yield from self._steps(state)
        yield from self._fences(state)
        yield from self._offers(state)
        if state.deaths < self.deaths:
            for who in (A, B):
                dead = state.members[who]
                for promised in {dead.promised, 0}:  # a restart that kept its term; a newcomer, or the term was lost
                    fresh = Member(promised, joined=-1, fenced=True, version=LOST, life=dead.life + 1)
                    yield self._with(state, who, fresh, deaths=state.deaths + 1)

    # -- one step --------------------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[State]:
        a, b = state.members
        if self._runs(state, a):
            s = a.version + 1
            if a.held == 0 and s <= self.steps:
                if (act := ("act", a.joined, s)) not in state.messages:
                    yield self._send(state, act)
                if ("grad", a.joined, s) in state.messages:
                    yield self._with(state, A, a._replace(held=s), ("commit", a.joined, s))
            if a.held:
                yield self._with(state, A, a._replace(version=a.held, held=0))
        if self._runs(state, b):
            s = b.version + 1
            if b.held == 0 and ("act", b.joined, s) in state.messages:
                after = b._replace(version=s) if self.applies_before_commit else b._replace(held=s)
                yield self._with(state, B, after, ("grad", b.joined, s))
            # The commit, or the next step's activation, which the first stage sends only after it.
            if b.held and {("commit", b.joined, b.held), ("act", b.joined, b.held + 1)} & state.messages:
                yield self._with(state, B, b._replace(version=b.held, held=0))
            if b.held and self.drops_on_timeout:
                yield self._with(state, B, b._replace(held=0, fenced=True))

    def _runs(self, state: State, member: Member) -> bool:
        """It joined a plan, the owner feeds that plan, and no newer term has stopped it."""
        return (self.deaf_to_fences or not member.fenced) and member.joined == state.log[-1]

    # -- failure: fence, learn, offer --------------------------------------------------------------------------------

    def _fences(self, state: State) -> Iterator[State]:
        for term, coordinator in enumerate(state.coordinators, start=1):
            if coordinator.saw == 0:
                yield self._coordinate(state, term, Coordinator(saw=len(state.log)))
                continue
            for who, member in enumerate(state.members):
                if member.promised < term:
                    answer = ("status", term, who, member.version, member.held, member.life)
                    yield self._with(state, who, member._replace(promised=term, fenced=True), answer)
            if coordinator.base is None:
                for a in self._statuses(state, term, A):
                    for b in self._statuses(state, term, B):
                        base = decide(a[:2], b[:2])
                        if base == RESTORE and state.deaths == 0:
                            raise Violation("both stages live and can go neither forward nor back", state)
                        offer = ("offer", term, max(base, 0), int(base == RESTORE), a[2], b[2])
                        yield self._coordinate(state, term, coordinator._replace(base=base), offer)

    @staticmethod
    def _statuses(state: State, term: int, who: int) -> list[tuple[int, int, int]]:
        """(version, held, life) of every process of this stage that has answered."""
        return [(int(m[3]), int(m[4]), int(m[5])) for m in state.messages if m[:3] == ("status", term, who)]

    def _offers(self, state: State) -> Iterator[State]:
        for message in state.messages:
            if message[0] == "offer":
                term, base, restore, *lives = map(int, message[1:])
                for who, member in enumerate(state.members):
                    addressed = member.life == lives[who] or self.offers_outlive_processes
                    if addressed and member.promised == term and member.joined != term:
                        if not (restore or base in (member.version, member.held)):
                            raise Violation("a stage cannot reach the base that its own answer led to", state)
                        joined = Member(term, term, False, base, 0, member.life)
                        yield self._with(state, who, joined, ("ready", term, who))
        for term, coordinator in enumerate(state.coordinators, start=1):
            readies = {("ready", term, A), ("ready", term, B)}
            if readies <= state.messages and coordinator.saw == len(state.log) and term not in state.log:
                yield state._replace(log=(*state.log, term))

    # -- parts -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _send(state: State, message: tuple[int | str, ...]) -> State:
        return state._replace(messages=state.messages | {message})

    def _with(
        self, state: State, who: int, member: Member, message: tuple[int | str, ...] | None = None, deaths: int = -1
    ) -> State:
        members = (member, state.members[B]) if who == A else (state.members[A], member)
        deaths = state.deaths if deaths < 0 else deaths
        after = state._replace(members=members, deaths=deaths)
        return after if message is None else self._send(after, message)

    def _coordinate(
        self, state: State, term: int, coordinator: Coordinator, message: tuple[int | str, ...] | None = None
    ) -> State:
        all_of_them = (*state.coordinators[: term - 1], coordinator, *state.coordinators[term:])
        after = state._replace(coordinators=all_of_them)
        return after if message is None else self._send(after, message)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        a, b = state.members
        if self._runs(state, a) and self._runs(state, b):
            if LOST in (a.version, b.version):
                raise Violation("a plan runs on a stage without state", state)
            if decide(a[3:5], b[3:5]) == RESTORE:
                raise Violation("the stages of a running plan have drifted apart", state)
        for message in state.messages:
            if message[0] == "act" and message[1] not in state.log:
                raise Violation("a plan ran that the owner never took", state)

    def is_done(self, state: State) -> bool:
        return all(self._runs(state, m) and m.version == self.steps for m in state.members)


def explore(model: Model) -> int:
    """Visit every reachable state and return how many there are; raises Violation.

    Besides the invariants: from every state in which the last term has not begun yet, all steps can still be finished.
    Memory and time grow with the bounds: about 25 microseconds and 2 kB a state.
    """
    start = model.start()
    number = {start: 0}
    states: list[State] = [start]
    before: list[list[int]] = [[]]  # before: from where each state can be reached
    done: list[int] = []
    here = 0
    while here < len(states):
        state = states[here]
        model.check(state)
        if model.is_done(state):
            done.append(here)
        for after in model.successors(state):
            there = number.setdefault(after, len(states))
            if there == len(states):
                states.append(after)
                before.append([])
            before[there].append(here)
        here += 1
    can_finish = set(done)
    while done:
        for earlier in before[done.pop()]:
            if earlier not in can_finish:
                can_finish.add(earlier)
                done.append(earlier)
    for i, state in enumerate(states):
        if i not in can_finish and state.coordinators[-1].saw == 0:
            raise Violation("no later term can finish the steps", state)
    return len(states)
