"""The course of a run from epoch to epoch: what to do next when a plan comes, a step is done, a peer is lost, or nothing comes.

The idea: a pure state machine decides, as in dht/election.py; a small shell (peers/owner/job_run.py, peers/owner/recovery.py)
carries out its commands and tells what came of them. The machine knows peers by their ids, and time only as numbers it is given.

    turn --> planning --> meeting --> offered --> running -----------> collecting --> over
     ^          ^         ^    |          |        |    ^
     |          '-(stale)-|----|----------+        v    | (no plan without who leaves)
     '--------------------|----|--(taken)-'       parting
                          |    |                   |
                          |    |                   '--> handing over --> finding --> meeting
                          |    '-(a member has gone since)-.
                          |                                v
                      searching <-- finding <---------- calling <-- (a peer is lost, in any state of an epoch)
                                       |
                                       '--> over (nothing is left to do, and the disk has all)

    in            event     what follows                                                             next
    turn          Turned    profile, or plan; of another owner's run, call the roll of its members   planning, turn, searching
    turn          Turned    nobody was before us, so the plan was refused for another reason: fail   over
    turn          Called    who answers is free for the first plan, but those who failed: profile    planning
    planning      Profiled  ask for a plan; for another owner's run, as after a loss                 planning, searching
    planning      Found     see whether all its members are still here                               meeting
    planning      NoPlan    the first: wait for our turn; a later one: fail                          turn, over
    planning      Changed   the newer term is known: ask for a plan; look around where some miss  planning, searching
    meeting       Met       offer the next epoch                                                     offered
    meeting       Failed    a member has gone since: call the roll; the ninth in vain is the end     calling, over
    epoch         Stepped   compare a step that was told of, count it, consider another plan         running, collecting
    epoch         Stepped   plan without members that want to leave, where a further step comes      parting
    handing over  Stepped   compare, count, tell                                                     handing over
    epoch         Better    tell of the step; go over where another plan is faster                 handing over, running, collecting
    parting       Around    welcome who is back, ask for a plan, or stay: nothing is new, or a stop  parting, running, collecting
    parting       Called    who answers is back: ask for a plan, or stay where nothing is new        parting, running, collecting
    parting       Found     wait for its members' records                                            parting
    parting       Seen      tell of the step; go over, or stay where the user stops                  handing over, collecting
    parting       NoPlan    tell that members want to leave; stay                                    running, collecting
    parting       Unseen    tell that members want to leave; stay                                    running, collecting
    epoch         Ended     with a plan to go over to: find the newest state; else the run is over   finding, over
    epoch         Failed    stale: wait for the newer term, plan again; the fourth in a row fails    planning, finding, over
    epoch         Failed    lost, or one member's own: call the roll, after a pause if in vain       calling
    epoch         Failed    a member has lied: take back what was told since its first step, then as for lost  calling
    epoch         Failed    taken or refused: wait for our turn; after another epoch, as for lost    turn, calling
    epoch         Failed    the ninth in vain, or a fault that peers share, or any other: the end    over
    calling       Called    leave out who is missed or got no copies, shun who failed, part who lost each other  finding
    finding       Changed   the newer term is known: find the newest state                           finding
    finding       States    go on from copies where they are newer than the disk                     searching, meeting
    finding       States    all steps are done, or the user stops, and the disk has the newest state: end  over
    searching     Around    welcome who is back; ask for a plan                                      searching
    searching     Called    who answers is back: ask for a plan                                      searching
    searching     Found     wait for its members' records                                            searching
    searching     Seen      see whether all its members are still here                               meeting
    searching     NoPlan    forgive who is shunned; where nobody is, wait for a change               searching
    searching     Unseen    leave out who was not seen; wait for a change                            searching
    searching     Forgiven  look around, or wait for a change                                        searching
    searching     Changed   look around                                                              searching
    searching     TimeUp    nobody can hold the job: give up                                         over
    epoch         Stopped   finish the running step, collect the weights                             offered, parting, collecting
    other         Stopped   the next epoch will be stopped as it begins                              the same

What is not here: when another plan is better (rule.py), whose fault an error is (peers/wire/suspects.py, handed in as `blame`),
how a plan is asked for (peers/owner/recovery.py). Nor is what happens within an epoch (peers/owner/epoch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from meshcee.epochs.moves import (
    ANSWERS,
    Around,
    AskPlan,
    AskPlanOf,
    AwaitChange,
    AwaitTerm,
    Better,
    Called,
    CallRoll,
    Changed,
    Command,
    Compare,
    Consider,
    Count,
    CutOff,
    Ended,
    Event,
    Fail,
    Failed,
    FindStates,
    Finish,
    Forgive,
    Forgiven,
    Found,
    GiveUp,
    GoOnFrom,
    LookAround,
    Losses,
    Mark,
    Meet,
    Met,
    NoPlan,
    Notice,
    Offer,
    Pause,
    Profile,
    Profiled,
    Proposal,
    See,
    Seen,
    Shun,
    States,
    Stepped,
    Stop,
    Stopped,
    TakeBack,
    TakeTurn,
    Tell,
    TellLeaving,
    TellLost,
    TimeUp,
    Turned,
    Unseen,
)
from meshcee.errors import JoinError, MeshceeError, PeerLostError, PlanError, StaleTermError

REPLANS = 3  # when the coordinator changes between planning and offering
FRUITLESS = 9  # recoveries in a row after which no new step was done: a poor link may last a minute
LONGEST_PAUSE_S = 8.0


class KnownLosses(Protocol):
    """Steps that were told of, and their losses."""

    def __contains__(self, step: int, /) -> bool: ...

    def __setitem__(self, step: int, loss: float, /) -> None: ...


class State(Enum):
    """Of a run, between its events."""

    TURN = "turn"
    PLANNING = "planning"
    MEETING = "meeting"
    OFFERED = "offered"
    RUNNING = "running"
    PARTING = "parting"
    HANDING_OVER = "handing over"
    COLLECTING = "collecting"
    CALLING = "calling"
    FINDING = "finding"
    SEARCHING = "searching"
    OVER = "over"


EPOCH = frozenset({State.OFFERED, State.RUNNING, State.PARTING, State.HANDING_OVER, State.COLLECTING})


@dataclass
class Missing:
    """Who takes no part for now. `gone` maps a peer to when it was missed, by the clock of records."""

    gone: dict[str, float] = field(default_factory=dict)
    free: tuple[str, ...] = ()  # our own members, to be used whatever their records still say
    answering: frozenset[str] = frozenset()  # who may still give what it holds: it did answer, or was not asked since
    failed: frozenset[str] = frozenset()  # who ever answered, and failed
    parted: tuple[frozenset[str], frozenset[str]] | None = None  # who wanted to leave last, and the other devices then

    @property
    def mute(self) -> frozenset[str]:
        """Of those who are gone, whose copies are gone too."""
        return frozenset(self.gone) - self.answering

    def back(self, announced: Mapping[str, float]) -> tuple[str, ...]:
        """Who was missed and has announced itself since."""
        return tuple(p for p, missed_at in self.gone.items() if announced.get(p, missed_at) > missed_at)

    def are_here(self, peers: Collection[str]) -> None:
        """Until they are missed again: what they hold from now on can be given."""
        self.gone = {p: at for p, at in self.gone.items() if p not in peers}

    def leave_out(self, peers: Collection[str], at: float) -> None:
        """Of the next plan, without having called them: the roll is called before anybody's copies count as gone."""
        self.gone.update(dict.fromkeys(peers, at))
        self.answering |= frozenset(peers)


@dataclass
class Counts:
    """Epochs so far, and how often the run came to the same place again."""

    epoch: int = 0
    begun: bool = False  # an epoch was left for another one: a refusal is no longer that of a first plan
    stale: int = 0  # plans in a row that were refused as of an old term
    stale_at: int = 0  # steps that were done then
    losses: int = 0  # recoveries in a row without a new step
    lost_at: int = -1

    def refused(self, done: int) -> int:
        self.stale, self.stale_at = self.stale + 1 if done == self.stale_at else 1, done
        return self.stale

    def lost(self, done: int, *, is_news: bool) -> int:
        self.losses, self.lost_at = self.losses + 1 if done == self.lost_at and not is_news else 0, done
        return self.losses


@dataclass
class Setback:
    """What keeps the run from going on: the loss of a peer, if that is the reason, and the last error on the way back."""

    lost: PeerLostError | None = None
    losses: Losses = field(default_factory=Losses)
    failed: frozenset[str] = frozenset()
    why: MeshceeError | None = None
    around: Around | None = None  # the last look at the mesh
    proposal: Proposal | None = None  # whose members' records are waited for


class Course:
    """The state machine of one run of so many `steps`.

    told     steps that were told of; the machine adds to them
    done     steps whose losses belong to the result already
    keeps    whether another epoch can begin with what this one has done
    members  of another peer, whose run this was: who answers of them is free for the first plan
    blame    whose fault these faults are; raises the error that peers have in common
    """

    def __init__(
        self,
        steps: int,
        *,
        told: KnownLosses,
        done: int,
        keeps: bool,
        blame: Callable[[Collection[Any]], Collection[str]],
        members: Collection[str] | None = None,
        failed: Collection[str] = (),
    ) -> None:
        self.state = State.TURN
        self.plan: Proposal | None = None  # the newest that was to be run
        self.following: Proposal | None = None  # to go over to at the next step's end
        self.done = done
        self.stopping = False
        self.missing = Missing(failed=frozenset(failed))  # of another owner's run, whom that one left out
        self._steps = steps
        self._told = told
        self._keeps = keeps
        self._blame = blame
        self._members = None if members is None else tuple(members)
        self._counts = Counts()
        self._step: Stepped | None = None  # for which another plan is looked for; it may be told of after that
        self._setback = Setback()
        self._awaited = ANSWERS[TakeTurn]

    def begin(self) -> list[Command]:
        return [TakeTurn()]

    def is_known(self, step: int) -> bool:
        """Whether the step was told of."""
        return step in self._told

    def handle(self, event: Event) -> list[Command]:
        """The next state, and what is to be done, in this order. An event that nobody waits for has come too late."""
        if isinstance(event, Stopped):
            return self._stop()
        if isinstance(event, TimeUp):
            return self._time_up()
        if type(event) not in self._awaited:
            return []
        commands = self._next(event)
        asked = ANSWERS.get(type(commands[-1])) if commands else None
        if self.state in EPOCH:
            self._awaited = ANSWERS[Offer] if asked is None else asked | {Failed}
        else:
            self._awaited = asked or frozenset()
        return commands

    def _next(self, event: Event) -> list[Command]:
        match event:
            case Turned():
                return self._turned(event)
            case Called():
                return self._called(event)
            case Profiled():
                return [AskPlan()] if self._members is None else self._search()
            case Found():
                return self._found(event.proposal)
            case NoPlan():
                return self._no_plan(event.error)
            case Met():
                return self._offer()
            case Stepped():
                return self._stepped(event)
            case Better():
                return self._better(event.proposal)
            case Failed():
                return self._untold(event.losses) + self._failed(event)
            case Ended():
                return self._ended(event)
            case States():
                return self._found_states(event)
            case Around():
                return self._around(event)
            case Seen():
                return self._seen()
            case Unseen():
                self.missing.leave_out(event.peers, event.at)
                return self._no_plan(event.error)
            case Forgiven():
                return [self._look()] if event.any else [AwaitChange()]
            case Changed():
                return self._changed()
        raise AssertionError(event)

    # -- a plan

    def _turned(self, event: Turned) -> list[Command]:
        refused, self._setback.why = self._setback.why, None
        if refused is not None and not event.waited:
            return self._fail(refused)
        if self.plan is not None:
            self.missing.free = ()
            return self._plan_anew()
        if self._members is not None:
            return [CallRoll((*self._members, *sorted(self.missing.failed - {*self._members})))]
        self.state = State.PLANNING
        return [Profile()]

    def _found(self, proposal: Proposal) -> list[Command]:
        if self.state is State.PLANNING:
            return self._meet(proposal)
        self._setback.proposal = proposal
        return [See(proposal.members)]

    def _seen(self) -> list[Command]:
        proposal = self._setback.proposal
        assert proposal is not None
        if self.state is State.PARTING:
            assert self._step is not None
            if self.stopping:
                return self._stay()
            return [TellLeaving(tuple(sorted(self._step.leaving))), *self._go_over(proposal)]
        return [Mark("planned"), *self._meet(proposal)]

    def _no_plan(self, error: MeshceeError) -> list[Command]:
        self._setback.why = error
        if self.state is State.PARTING:
            assert self._step is not None
            return [TellLeaving(tuple(sorted(self._step.leaving)), error), *self._stay()]
        if self.state is State.SEARCHING:
            return [Forgive()] if isinstance(error, PlanError) else [AwaitChange()]
        if self.plan is not None or not isinstance(error, PlanError):
            return self._fail(error)
        self.state = State.TURN  # somebody else may have been quicker
        return [TakeTurn()]

    def _meet(self, proposal: Proposal) -> list[Command]:
        self.state, self.plan = State.MEETING, proposal
        self.missing.are_here(proposal.members)  # a better plan may have members that were missed once
        return [Meet(proposal)]

    def _offer(self) -> list[Command]:
        assert self.plan is not None
        self.state, self._setback = State.OFFERED, Setback()
        self._counts.epoch += 1
        return [Offer(self.plan, self._counts.epoch)]

    # -- an epoch

    def _stepped(self, event: Stepped) -> list[Command]:
        if self.state is State.OFFERED:
            self.state = State.RUNNING
        commands: list[Command] = []
        if self.is_known(event.step):
            commands.append(Compare(event.step))
        if event.step == self.done:
            self.done += 1
            commands.append(Count(event.step))
        self._step = event
        if self.following is not None:
            return commands + self._tell()
        if event.leaving and self._keeps and not self.stopping and event.step + 1 < self._steps:
            self.state = State.PARTING
            return [*commands, self._look()]
        self._stay_or_collect()
        return [*commands, Consider()]

    def _stay_or_collect(self) -> None:
        self.state = State.COLLECTING if self.stopping or self.done == self._steps else State.RUNNING

    def _better(self, proposal: Proposal | None) -> list[Command]:
        return self._stay() if proposal is None or self.stopping else self._go_over(proposal)

    def _stay(self) -> list[Command]:
        self._stay_or_collect()
        return self._tell()

    def _go_over(self, proposal: Proposal) -> list[Command]:
        self.state, self.following = State.HANDING_OVER, proposal
        return [Stop(hand_over=True), *self._tell()]

    def _tell(self) -> list[Command]:
        """Of a step that was computed; not of one that is computed again."""
        step, self._step = self._step, None
        if step is None or self.is_known(step.step):
            return []
        self._told[step.step] = step.loss
        return [Tell(step.step)]

    def _stop(self) -> list[Command]:
        self.stopping = self.stopping or self.state is not State.OVER
        if self.state not in EPOCH:
            return []
        if self.state in (State.RUNNING, State.HANDING_OVER):
            self.state = State.COLLECTING
        return [Stop(hand_over=False)]

    def _ended(self, event: Ended) -> list[Command]:
        following, self._step = self.following, None
        over = event.saved and (self.stopping or self.done == self._steps)
        if following is None or over:
            self.state = State.OVER
            return [Finish()]
        late = [p for p in following.members if p in event.leaving or p not in event.here]
        self._leave_out(late, event.at)  # they have left, or are about to, since the plan was made
        if late:
            self.following = None
        return self._find_states()

    # -- a member asks to leave

    def _look(self) -> LookAround:
        return LookAround(tuple(sorted(self.missing.gone)))

    def _around(self, event: Around) -> list[Command]:
        self._setback.around = event
        back = self.missing.back(event.announced)
        return [CallRoll(back)] if back else self._ask()

    def _ask(self) -> list[Command]:
        """All who are back are known: for a plan, unless the members run, and nothing is new or the user stops."""
        if self.state is State.PARTING:
            around = self._setback.around
            assert self._step is not None
            assert around is not None
            leaving = self._step.leaving
            seen = leaving, around.devices - leaving - self.missing.gone.keys()
            if self.stopping or seen == self.missing.parted:
                return self._stay()
            self.missing.parted = seen
            self._leave_out(leaving, around.at)
        return [AskPlanOf(self.missing.free, tuple(sorted(self.missing.gone)))]

    def _leave_out(self, leaving: Collection[str], at: float) -> None:
        assert self.plan is not None
        self._counts.begun = True
        self.missing.leave_out(leaving, at)
        self.missing.free = tuple(sorted({*self.plan.members} - self.missing.gone.keys()))

    # -- an epoch fails

    def _untold(self, losses: Losses) -> list[Command]:
        """A step may be done, and count, and its epoch end before the user has heard of it; unless it was computed wrongly."""
        step, wrong_from = self._step, losses.wrong_from
        return [] if step is None or (wrong_from is not None and wrong_from <= step.step) else self._tell()

    def _failed(self, event: Failed) -> list[Command]:
        assert self.plan is not None
        error, losses = event.error, event.losses
        self._step = self.following = None
        match error:
            case StaleTermError():  # another coordinator came between planning and offering; nothing has run yet
                if self._counts.refused(self.done) > REPLANS:
                    return self._fail(error)
                self.state = State.FINDING if self._counts.begun else State.PLANNING
                return [AwaitTerm(self.plan.term)]
            case PeerLostError():
                return self._lose(error, losses)
            case PlanError() if self._counts.begun:  # a member could not, or somebody else was quicker
                return self._lose(PeerLostError(str(error)), losses)
            case PlanError():
                self.state, self._setback.why = State.TURN, error
                return [TakeTurn()]
            case _ if any(fault.error is error for fault in losses.faults):
                return self._lose(PeerLostError(str(error)), losses)
        return self._fail(error)

    def _lose(self, lost: PeerLostError, losses: Losses) -> list[Command]:
        """Find out who is left, unless going on again and again leads nowhere, or peers have failed alike."""
        assert self.plan is not None
        self._counts.begun = True
        self._setback = Setback(lost, losses)
        back: list[Command] = []
        if losses.wrong_from is not None:
            self.done = min(self.done, losses.wrong_from)
            back = [TakeBack(losses.wrong_from)]
        try:
            failed = losses.stuck | frozenset(self._blame(losses.faults))
        except (PeerLostError, PlanError, JoinError) as error:
            return [*back, *self._give_up(error)]
        except MeshceeError as error:
            return [*back, *self._fail(error)]
        # Who is left out from now on: that leads somewhere, as often as there are peers.
        is_news = bool(failed - self.missing.failed)
        self.missing.failed |= failed
        in_vain = self._counts.lost(self.done, is_news=is_news)
        if in_vain >= FRUITLESS:
            return [*back, *self._give_up(lost)]
        self.state, self._setback.failed = State.CALLING, failed
        pause = [Pause(min(0.5 * 2**in_vain, LONGEST_PAUSE_S))] if in_vain > 1 else []
        # Who has no part in the plan may hold copies that the next one begins with: whether that peer still answers counts, too.
        asked = tuple(sorted({*self.plan.members, *self.missing.answering}))
        return [*back, Notice(losses.noticed_s), *pause, CallRoll(asked, losses.silent)]

    def _called(self, event: Called) -> list[Command]:
        match self.state:
            case State.TURN:
                failed = self.missing.failed
                self.missing.answering = failed & event.here
                self.missing.gone.update(dict.fromkeys(failed, event.at))
                self.missing.free = tuple(sorted(event.here - failed))
                self.state = State.PLANNING
                return [*([Shun(failed)] if failed else []), Profile()]
            case State.CALLING:
                return self._count_losses(event)
        self.missing.are_here(event.here)
        return self._ask()

    def _count_losses(self, event: Called) -> list[Command]:
        assert self.plan is not None
        assert self._setback.lost is not None
        members, losses, failed = frozenset(self.plan.members), self._setback.losses, self._setback.failed
        silent = self.missing.answering - event.here
        missed = members - event.here
        parted = losses.parted if not missed else frozenset()  # who is missed explains what others have lost
        if self._counts.losses and not missed and losses.blamed is not None:
            missed = frozenset({losses.blamed})  # that peer answers us, but others keep losing it
        # Two members that do not reach each other can both give to others what they hold: they have no part in the next plan.
        aside = failed | (losses.apart & event.here if not missed else frozenset())
        self.missing.answering = (self.missing.answering | (aside & event.here)) - (missed - failed) - silent
        self.missing.gone.update(dict.fromkeys(missed | aside | silent, event.at))
        left = tuple(sorted(members - missed - aside))
        self.missing.free = () if losses.busy else left  # who took one may have taken others: their records say so
        ways = tuple(pair for pair in sorted(parted) if pair[0] < pair[1])
        told = TellLost(self._setback.lost, tuple(sorted(missed | silent)), tuple(sorted(failed)), left, ways)
        return [Mark("called"), CutOff(parted), Shun(failed), told, *self._find_states()]

    def _find_states(self) -> list[Command]:
        self.state = State.FINDING
        return [FindStates(self.done, self.missing.mute)]

    def _found_states(self, event: States) -> list[Command]:
        """Copies that peers hold, where they are newer than what is on the disk; the end where nothing is left to do."""
        is_enough = self.done == self._steps or (self.stopping and not self.is_known(self.done))
        if is_enough and 0 < event.on_disk == self.done:
            self.state = State.OVER
            return [Finish()]
        if event.with_peers is not None and event.with_peers > event.on_disk:
            go_on = GoOnFrom(event.with_peers, True, event.copies)
        else:
            go_on = GoOnFrom(event.on_disk, False)
        following, self.following = self.following, None
        return [go_on, *(self._search() if following is None else self._meet(following))]

    def _search(self) -> list[Command]:
        self.state, self._setback.why = State.SEARCHING, None
        return [self._look()]

    def _changed(self) -> list[Command]:
        match self.state:
            case State.SEARCHING:
                return [self._look()]
            case State.FINDING:
                return self._find_states()
        return self._plan_anew()

    def _plan_anew(self) -> list[Command]:
        """No step is done yet; but who takes a run over may miss peers already, and those are left out."""
        if self.missing.gone:
            return self._search()
        self.state = State.PLANNING
        return [AskPlan()]

    # -- the end

    def _fail(self, error: MeshceeError) -> list[Command]:
        self.state = State.OVER
        return [Fail(error)]

    def _give_up(self, error: MeshceeError) -> list[Command]:
        self.state = State.OVER
        return [GiveUp(self._setback.lost, error)]

    def _time_up(self) -> list[Command]:
        if self.state is not State.SEARCHING:
            return []
        self._awaited = frozenset()
        return self._give_up(self._setback.why or JoinError("nobody planned in time"))
