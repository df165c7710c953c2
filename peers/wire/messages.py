"""Everything that crosses the wire between peers once a stream is open: the kinds, and how their headers are read.

The idea: one table of kinds, one way to read a header field. So a reader of this file knows all that a peer may be
told, and a mistyped field is a ProtocolError wherever it turns up.

Purposes of streams, and the frames on them:

    join    (joiner -> seed)            HELLO, WELCOME                 clocks, versions, a second peer with our identity
    probe   (peer -> peer)              PING, PONG                     latency and bandwidth
    sound   (owner -> peer)             SOUND                          probe this peer again, now, and tell everybody
    gossip  (peer -> peer)              NEWS                           sealed records that have just changed
    profile (owner -> peer)             PROFILE, PROFILED | WANTED, GRAPH, PROFILED; REFUSED at any time
    leave   (anybody -> peer)           LEAVE  ->  LEAVING at once, LEFT when its job goes on without it
    plan    (owner -> coordinator)      PLAN_REQUEST, PLAN | REFUSED
    job     (owner -> member)           OFFER, (STATE | RECIPES)*, STATE_END, READY | REFUSED
                                        (when resuming, of the optimizer too, and first what the member may still have; before
                                        READY perhaps AGAIN  ->  STATE*, STATE_END for what it has not, or a recipe did not
                                        give; and PONG both ways at any time: the member's says how much it has)
                                        STEP, INPUT*   ->  LOSS*, APPLIED
                                        EVALUATE, INPUT*  ->  OUTPUT*
                                        COPY  ->  COPIED: the stage is copied, and what the copy is
                                        KEEP  ->  KEPT from a keeper, near or far
                                        PROOF after each step, and AUDIT  ->  EVIDENCE, where the owner audits
                                        CLOCK  ->  CLOCK               before steps that are traced
                                        PING, and PONG unasked         as long as the other side is heard; a member's PONG
                                                                       says what it does, and whom it waits for
                                        END  ->  END when all before it is applied
                                        FAILED, LEAVING or, when what the optimizer has kept was not found, AGAIN at any time
    data    (owner -> supplier)         DATASET, OPENED | REFUSED, then READ  ->  GIVEN; PING; PONG unasked; FAILED at any time,
                                        and AWAITED where reading takes long
    inputs  (supplier -> member)        ATTACH both ways, then INPUT*; PONG both ways; FAILED at any time
    follow  (standby -> owner)          FOLLOW  ->  FILE*, SEALED as the run's journal grows, PONG, FOLLOWED when the run is over
    journal (owner -> shelf)            FILE*, SEALED as the run's journal grows, PONG, FOLLOWED when the run is over
                                        on both, SEALED  ->  KEPT: whether the other side has what was sealed
    shelf   (standby -> peer)           SEEK, FOUND: journals of a job it keeps, runs that are over; then PULL  ->  FILE*, FOLLOWED
    copies  (anybody -> member)         SEEK, FOUND, then PULL  ->  PART for each chunk
    stage   (member -> later member)    ATTACH, then both ways F, B, SHARED, TOTAL, NORMS, COMMIT; PONG as long as it is heard
                                        PART and SUM within a group and over pipelines, or WHOLE and MEET within a group;
                                        RATE after a step: how fast what the other side sent has come
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from meshcee import errors
from meshcee.errors import MeshceeError, ProtocolError
from meshcee.fields import Finite, read
from meshcee.plan import Epoch, Term
from meshcee.role import B, F

__all__ = ["B", "F", "Round", "besides_in", "epoch_of", "error_from", "error_header", "need", "run_of", "term_of"]

T = TypeVar("T")

MOST_BESIDES = 8

HELLO, WELCOME = "hello", "welcome"
PING, PONG = "ping", "pong"
SOUND = "sound"
NEWS = "news"
PROFILE, WANTED, GRAPH, PROFILED = "profile?", "wanted", "graph", "profiled"
PLAN_REQUEST, PLAN, REFUSED = "plan?", "plan", "refused"
OFFER, STATE, RECIPES, STATE_END, AGAIN, READY = "offer", "state", "recipes", "state_end", "again", "ready"
STEP, EVALUATE, INPUT = "step", "evaluate", "input"
ANSWERS = LOSS, OUTPUT, APPLIED = "loss", "output", "applied"
END, FAILED = "end", "failed"
LEAVE, LEAVING, LEFT = "leave", "leaving", "left"
CLOCK = "clock"
PROOF, AUDIT, EVIDENCE = "step proof", "audit", "evidence"
COPY, COPIED, KEEP, KEPT = "copy", "copied", "keep", "kept"
SEEK, FOUND, PULL = "seek", "found", "pull"
DATASET, OPENED, READ, AWAITED, GIVEN = "dataset?", "opened", "read", "awaited", "given"
ATTACH, SHARED, TOTAL, NORMS, COMMIT = "attach", "shared", "total", "norms", "commit"
RATE = "rate"
FOLLOW, FILE, SEALED, FOLLOWED = "follow", "file", "sealed", "followed"
MOST_RUN_CHARACTERS = 400
SUMS = PART, SUM, WHOLE, MEET = "part", "sum", "whole", "meet"


def need(header: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """The field, of exactly this type (a bool is no int, `list[str]` holds texts); ProtocolError otherwise."""
    value = header.get(name)
    return value if type(value) is kind else read(value, kind, f"header field {name!r}")


def epoch_of(header: Mapping[str, Any]) -> Epoch:
    """The epoch that a frame belongs to."""
    return need(header, "epoch", Epoch)


def run_of(header: Mapping[str, Any]) -> str:
    """The name of the run that an offer belongs to."""
    run = need(header, "run", str)
    if not 0 < len(run) <= MOST_RUN_CHARACTERS:
        raise ProtocolError(f"header field 'run' must have 1 to {MOST_RUN_CHARACTERS} characters")
    return run


def term_of(header: Mapping[str, Any]) -> Term:
    """The coordinator's term: its number and the coordinator's peer id."""
    return need(header, "term", Term)


@dataclass(frozen=True)
class Round:
    """What a member must know before it runs a step: how many micro-batches, their weights, this step's options.

    A pipeline's slice begins with micro-batch `first` of the whole; members count its micro-batches from 0.

    `number` is the ordinal among all steps and evaluations of the epoch, and the key of every frame that belongs to it.
    `step` is the optimizer step, from which seeds are derived. `weights[m]` is what the loss of micro-batch m is
    multiplied by (of the member's rows of it, in a group). `hyper` holds the options of each parameter group that the
    schedule drives. An evaluation (`forward_only`) applies nothing; its last micro-batch may have only `tail` samples.
    """

    number: int
    step: int
    weights: tuple[Finite, ...]
    hyper: tuple[Mapping[str, Any], ...] = ()
    forward_only: bool = False
    tail: Annotated[int, Meta(ge=1)] | None = None
    trace: bool = False  # members tell what they did when, with their APPLIED
    first: int = 0

    def slice(self, first: int, end: int) -> Round:
        """One pipeline's micro-batches: [first, end)."""
        tail = self.tail if end == self.num_micro else None
        return replace(self, weights=self.weights[first:end], tail=tail, first=first)

    def samples(self, micro: int, micro_batch: int) -> int:
        """Samples of a micro-batch."""
        return micro_batch if self.tail is None or micro + 1 < self.num_micro else self.tail

    @property
    def num_micro(self) -> int:
        return len(self.weights)

    def header(self) -> dict[str, Any]:
        same = len(set(self.weights)) == 1  # usual; an evaluation of many micro-batches must fit a header too
        return {
            "round": self.number,
            "step": self.step,
            "count": self.num_micro,
            "weights": list(self.weights[:1] if same else self.weights),
            "hyper": [dict(h) for h in self.hyper],
            "tail": self.tail,
            "trace": self.trace,
            "first": self.first,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], *, forward_only: bool, max_micro: int) -> Round:
        count, weights = need(header, "count", int), need(header, "weights", list)
        if not 1 <= count <= max_micro:
            raise ProtocolError(f"a step needs 1 to {max_micro} micro-batch weights")
        if len(weights) not in (1, count):
            raise ProtocolError(f"a step of {count} micro-batches needs one weight for all or one for each")
        weights = weights * (count // len(weights))
        number = need(header, "round", int)
        return read({**header, "number": number, "weights": weights, "forward_only": forward_only}, cls, "a step")


def error_header(error: BaseException, **more: Any) -> dict[str, Any]:
    """How an error travels: the class by name and the message; a foreign error becomes a MeshceeError."""
    known = isinstance(error, MeshceeError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return {"error": type(error).__name__ if known else "MeshceeError", "message": text[:4000], **more}


def error_from(header: Mapping[str, Any]) -> MeshceeError:
    """The error that another peer reported; an unknown class name becomes a plain MeshceeError."""
    name = need(header, "error", str)
    kind = getattr(errors, name, MeshceeError) if name in errors.__all__ else MeshceeError
    error: MeshceeError = kind(need(header, "message", str))
    return error


def besides_in(header: Mapping[str, Any]) -> tuple[int, ...]:
    """Steps before `since` whose copies are needed: three that may be gone back to, two that are being read, two of other regions
    and one on its way there."""
    return tuple(need(header, "besides", list[int]))[:MOST_BESIDES]
