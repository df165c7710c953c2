"""When the network changes under a running plan: what steps show (senses), what it means (paces), whether to go over (rule).

And what a run does from epoch to epoch, whatever befalls its members (course, moves).
Pure: reports and events in, figures, choices and commands out. `peers/owner/` asks and acts.
"""

from meshcee.adapt import course, moves
from meshcee.adapt.feeding import Feeding
from meshcee.adapt.paces import Paces
from meshcee.adapt.rule import SETTLING_STEPS, Adapter, Decision
from meshcee.adapt.senses import FAST, LASTING_STEPS, SHIFT, Joined, Pair, Senses, Shift, as_shown

__all__ = [
    "FAST",
    "LASTING_STEPS",
    "SETTLING_STEPS",
    "SHIFT",
    "Adapter",
    "Decision",
    "Feeding",
    "Joined",
    "Paces",
    "Pair",
    "Senses",
    "Shift",
    "as_shown",
    "course",
    "moves",
]
