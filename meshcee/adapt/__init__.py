"""When the network changes under a running plan: what steps show (senses), what it means (paces), whether to go over (rule).
`shares` moves micro-batches between pipelines from step to step, under any plan.

Pure: reports in, figures and choices out. `peers/owner/` asks and acts.
"""

from meshcee.adapt.feeding import Feeding
from meshcee.adapt.paces import Paces
from meshcee.adapt.rule import SETTLING_STEPS, Adapter, Decision
from meshcee.adapt.senses import (
    FAST,
    LASTING_STEPS,
    SHIFT,
    Joined,
    Pair,
    Profiled,
    Searched,
    Senses,
    Shift,
    as_shown,
    together,
)
from meshcee.adapt.shares import Shares, evened

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
    "Profiled",
    "Searched",
    "Senses",
    "Shares",
    "Shift",
    "as_shown",
    "evened",
    "together",
]
