"""Blows that are aimed: at a moment of an offer, of a hand-over, of a checkpoint, between any two frames of it.

The idea: the run's own state machine says where the run is (meshcee/epochs/course.py), and the frames of its conversations are
counted from there on. An aimed blow falls before the n-th of them, and prefers the two peers that this frame is between. So every
message of a hand-over is some seed's moment: before a member is offered its stage, while it reads it, before it is ready.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

from meshcee.epochs import moves
from meshcee.epochs.course import Course, State
from peers.wire import messages
from tests.rig.frames import watched_frames

__all__ = ["CAUSES", "MOMENTS", "Aim", "Moments", "causes", "drawn"]

CHECKPOINT = {messages.COPY, messages.COPIED, messages.KEEP, messages.KEPT}
CHECKPOINT |= {messages.SEEK, messages.FOUND, messages.PULL, messages.PART}
OFFER = {messages.OFFER, messages.STATE, messages.RECIPES, messages.STATE_END, messages.AGAIN, messages.READY}
COUNTED = CHECKPOINT | OFFER | {messages.REFUSED, messages.STEP, messages.ATTACH, messages.LEAVING, messages.END}
MOMENTS = ("first offer", "re-offer", "re-offer", "hand-over", "hand-over", "hand-over", "checkpoint")
CAUSES = {  # what brings such a moment about
    "re-offer": ("kill a member", "full device"),
    "hand-over": ("another plan", "another plan", "another plan", "leave", "leave", "slow device", "fast join"),
}
TURNS = 0.75  # of runs come to a hand-over, aimed at or not, if nothing keeps them from it
FRAMES = {"first offer": 20, "re-offer": 40, "hand-over": 80, "checkpoint": 60}  # that a blow may wait for, at most
NEVER_AIMED = {"restart", "restart without its term", "join", "clock step"}


@dataclass
class Aim:
    """At such a moment, before the `after`th frame of it: a blow of this kind."""

    moment: str
    after: int
    kind: str


def drawn(chance: random.Random, kinds: Sequence[str]) -> list[Aim]:
    """Two at most."""
    wanted = [kind for kind in kinds if kind not in NEVER_AIMED] or kinds
    moments = chance.choices(MOMENTS, k=chance.choice((0, 1, 1, 2)))
    return [Aim(m, int(math.exp(chance.uniform(0, math.log(FRAMES[m])))), chance.choice(wanted)) for m in moments]


def causes(chance: random.Random, aims: Sequence[Aim], steps: int, *, turns: bool) -> list[tuple[int, str]]:
    """Steps, up to so many, and what happens in them so that these aims have their moments; of most runs a turn."""
    moments = [aim.moment for aim in aims if aim.moment in CAUSES]
    if turns and "hand-over" not in moments and chance.random() < TURNS:
        moments.append("hand-over")
    return [(chance.randrange(steps), chance.choice(CAUSES[moment])) for moment in moments]


class Moments:
    """Of one run. `strike` is told of an aim whose moment has come, and in words of which frame between whom (two ids).

    begun       hand-overs to another plan
    hand_overs  those of them that came to that plan's first step
    """

    def __init__(self, aims: list[Aim], strike: Callable[[Aim, str, tuple[str, str]], None]) -> None:
        self.aims = aims
        self.begun = self.hand_overs = 0
        self.strike = strike
        self._moment = ""  # "": a step, whose frames are a checkpoint's or nothing

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        handle = Course.handle

        def watching(course: Course, event: moves.Event) -> list[moves.Command]:
            commands = handle(course, event)
            self._goes(course.state, event, commands)
            return commands

        with mock.patch.object(Course, "handle", watching), watched_frames(self._frame):
            yield

    def _goes(self, state: State, event: moves.Event, commands: list[moves.Command]) -> None:
        if state is State.HANDING_OVER:
            self.begun += self._moment != "hand-over"
            self._moment = "hand-over"
        elif isinstance(event, moves.Failed | moves.Turned):
            self._moment = ""
        elif isinstance(event, moves.Stepped):
            self.hand_overs += self._moment == "hand-over"
            self._moment = ""
        for command in commands:
            if isinstance(command, moves.Offer) and self._moment != "hand-over":
                self._moment = "first offer" if command.epoch == 1 else "re-offer"

    def _frame(self, sender: str, receiver: str, kind: str) -> None:
        moment = self._moment or ("checkpoint" if kind in CHECKPOINT else "")
        if kind not in COUNTED:
            return
        for aim in [aim for aim in self.aims if aim.moment == moment]:
            aim.after -= 1
            if aim.after < 0:
                self.aims.remove(aim)
                self.strike(aim, kind, (sender, receiver))
