"""What happens to a run between its epochs and in them, and what is to be done then: the events and commands of course.py.

The idea: values and no behaviour, so that a transcript of a run is a list of them (tests/epochs/transcripts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshcee.errors import JoinError, MeshceeError
from meshcee.plan import Term

Pairs = frozenset[tuple[str, str]]


class Fault(Protocol):
    """An error that one member has met by itself."""

    @property
    def error(self) -> MeshceeError: ...


@dataclass(frozen=True)
class Proposal:
    """A plan as far as the machine looks into it: its members, and the term under which it was made."""

    members: tuple[str, ...]
    term: Term
    what: Any = field(default=None, repr=False, compare=False)  # the shell's


@dataclass(frozen=True)
class Losses:
    """What members of an epoch have told of each other when it failed."""

    noticed_s: float | None = None  # by the loop's clock
    stuck: frozenset[str] = frozenset()  # they answer, and do not do what is theirs to do
    faults: tuple[Fault, ...] = ()
    parted: Pairs = frozenset()  # links that nothing crosses any more, both ways
    blamed: str | None = None  # who was lost by most others
    apart: frozenset[str] = frozenset()  # members that did not get copies, and members that hold these
    wrong_from: int | None = None  # the first step of one that has lied: what was told since is not to be believed
    silent: frozenset[str] = frozenset()  # nothing has come from them for too long
    busy: bool = False  # a member has refused the plan, as it runs another job


# -- what happens to the machine. `at` is the time by the clock of records


@dataclass(frozen=True)
class Turned:
    """No job is before this one; `waited`: there was one."""

    waited: bool


@dataclass(frozen=True)
class Profiled:
    """What the idle devices need for the job's blocks is known."""


@dataclass(frozen=True)
class Found:
    """A plan has come."""

    proposal: Proposal


@dataclass(frozen=True)
class NoPlan:
    """PlanError: nobody can hold the job. JoinError: nobody has answered."""

    error: MeshceeError


@dataclass(frozen=True)
class Met:
    """All members of the plan are here."""


@dataclass(frozen=True)
class Stepped:
    """A step is done under the running plan; `leaving` are members that ask to be left out."""

    step: int
    loss: float
    leaving: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Better:
    """Another plan is faster, or None is."""

    proposal: Proposal | None


@dataclass(frozen=True)
class Failed:
    """The epoch has ended with an error, or could not begin."""

    error: MeshceeError
    losses: Losses = Losses()


@dataclass(frozen=True)
class Stopped:
    """The user wants the run to end after the running step."""


@dataclass(frozen=True)
class Ended:
    """The epoch has ended in peace, `saved` where the owner has its weights. `here` are the peers that are announced, and not as
    leaving.
    """

    saved: bool
    leaving: frozenset[str]
    here: frozenset[str]
    at: float


@dataclass(frozen=True)
class Called:
    """These have answered."""

    here: frozenset[str]
    at: float


@dataclass(frozen=True)
class States:
    """The steps after which a state is kept: on the disk (0: none, but the model as captured), and with peers (None: nowhere)."""

    on_disk: int
    with_peers: int | None
    copies: Any = field(default=None, repr=False, compare=False)  # the shell's


@dataclass(frozen=True)
class Around:
    """When those who were missed announced themselves last, if they may take part, and whose devices a plan may use."""

    announced: Mapping[str, float]
    devices: frozenset[str]
    at: float


@dataclass(frozen=True)
class Seen:
    """The records of all members of the plan are known here."""


@dataclass(frozen=True)
class Unseen:
    """Those of these are not."""

    error: JoinError
    peers: frozenset[str]
    at: float


@dataclass(frozen=True)
class Forgiven:
    """Those who were shunned may be planned with again; `any`: there were some."""

    any: bool


@dataclass(frozen=True)
class Changed:
    """The mesh is not as it was; or the newer term that was waited for has come, or does not."""


@dataclass(frozen=True)
class TimeUp:
    """The search for a plan has taken as long as it may (regroup_s)."""


Event = (
    Turned
    | Profiled
    | Found
    | NoPlan
    | Met
    | Stepped
    | Better
    | Failed
    | Stopped
    | Ended
    | Called
    | States
    | Around
    | Seen
    | Unseen
    | Forgiven
    | Changed
    | TimeUp
)


# -- what the machine asks for and an event answers: one at most, the last of its commands


@dataclass(frozen=True)
class TakeTurn:
    """Wait for the jobs that came before: Turned."""


@dataclass(frozen=True)
class Profile:
    """Have the idle devices profiled: Profiled."""


@dataclass(frozen=True)
class AskPlan:
    """Of the devices that are idle: Found or NoPlan."""


@dataclass(frozen=True)
class AskPlanOf:
    """With these too, whatever their records say, and without those: Found or NoPlan."""

    free: tuple[str, ...]
    without: tuple[str, ...]


@dataclass(frozen=True)
class Meet:
    """See whether the members are still here: Met or Failed."""

    proposal: Proposal


@dataclass(frozen=True)
class Offer:
    """Begin this epoch: Stepped as often as it does a step, then Ended or Failed."""

    proposal: Proposal
    epoch: int


@dataclass(frozen=True)
class Consider:
    """Whether another plan is better by now: Better."""


@dataclass(frozen=True)
class CallRoll:
    """Ask these whether they are there: Called. For an answer of those who were `silent` before nobody waits for long."""

    members: tuple[str, ...]
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FindStates:
    """Which states are kept, with copies of those only who can give them: States."""

    done: int
    without: frozenset[str]


@dataclass(frozen=True)
class LookAround:
    """At the mesh, for those who were missed too: Around."""

    missed: tuple[str, ...] = ()


@dataclass(frozen=True)
class See:
    """Wait for the records of these: Seen or Unseen."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Forgive:
    """Plan with those who were shunned again: Forgiven."""


@dataclass(frozen=True)
class AwaitChange:
    """Of the mesh: Changed."""


@dataclass(frozen=True)
class AwaitTerm:
    """A later one than this, for a while: Changed."""

    term: Term


Asking = (
    TakeTurn
    | Profile
    | AskPlan
    | AskPlanOf
    | Meet
    | Offer
    | Consider
    | CallRoll
    | FindStates
    | LookAround
    | See
    | Forgive
    | AwaitChange
    | AwaitTerm
)


# -- what the machine asks for, and no event answers


@dataclass(frozen=True)
class Notice:
    """A member was lost, at this time of the loop's clock."""

    at_s: float | None


@dataclass(frozen=True)
class Mark:
    """A recovery has come so far: "called", "planned"."""

    moment: str


@dataclass(frozen=True)
class TakeBack:
    """What was told of this step and of all later ones: a member that computed them has lied."""

    step: int


@dataclass(frozen=True)
class Pause:
    """Before the next command."""

    for_s: float


@dataclass(frozen=True)
class CutOff:
    """Plan no link between these until a probe has crossed it."""

    pairs: Pairs


@dataclass(frozen=True)
class Shun:
    """Plan no job with these for a while."""

    peers: frozenset[str]


@dataclass(frozen=True)
class TellLost:
    """In the log: who is gone, who has failed (and may be gone, too), who is left, and who lost each other."""

    error: MeshceeError
    gone: tuple[str, ...]
    failed: tuple[str, ...]
    left: tuple[str, ...]
    parted: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TellLeaving:
    """In the log: these want to leave, and the job goes on without them, or cannot (the error)."""

    who: tuple[str, ...]
    error: MeshceeError | None = None


@dataclass(frozen=True)
class GoOnFrom:
    """The next epoch begins with this state."""

    step: int
    with_peers: bool
    copies: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Compare:
    """The step was told of: its loss must be the same."""

    step: int


@dataclass(frozen=True)
class Count:
    """The step is the next of the run: its loss belongs to the result."""

    step: int


@dataclass(frozen=True)
class Tell:
    """The user of this step."""

    step: int


@dataclass(frozen=True)
class Stop:
    """Feed no further step; `hand_over`: members keep what another plan goes on from, and nothing is collected."""

    hand_over: bool


@dataclass(frozen=True)
class Finish:
    """The run has ended in peace."""


@dataclass(frozen=True)
class Fail:
    """The run has ended with this error."""

    error: MeshceeError


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on without those who are lost: say how it could. `error` is why."""

    lost: MeshceeError | None
    error: MeshceeError


Doing = (
    Notice
    | TakeBack
    | Mark
    | Pause
    | CutOff
    | Shun
    | TellLost
    | TellLeaving
    | GoOnFrom
    | Compare
    | Count
    | Tell
    | Stop
    | Finish
    | Fail
    | GiveUp
)
Command = Asking | Doing

# What may come of a question. In an epoch its end is an answer to every question, and an end is all that `Offer` waits for.
ANSWERS: Mapping[type, frozenset[type]] = {
    TakeTurn: frozenset({Turned}),
    Profile: frozenset({Profiled}),
    AskPlan: frozenset({Found, NoPlan}),
    AskPlanOf: frozenset({Found, NoPlan}),
    Meet: frozenset({Met, Failed}),
    Offer: frozenset({Stepped, Ended, Failed}),
    Consider: frozenset({Better}),
    CallRoll: frozenset({Called}),
    FindStates: frozenset({States}),
    LookAround: frozenset({Around}),
    See: frozenset({Seen, Unseen}),
    Forgive: frozenset({Forgiven}),
    AwaitChange: frozenset({Changed}),
    AwaitTerm: frozenset({Changed}),
}
