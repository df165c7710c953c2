"""When the network changes under a running plan: what steps show (senses), what it means (paces), whether to go over (rule).

Pure: reports in, figures and a choice out. `peers/owner/adaptation.py` asks and acts.
"""

from meshcee.adapt.feeding import Feeding
from meshcee.adapt.paces import Paces
from meshcee.adapt.rule import SETTLING_STEPS, Adapter, Decision
from meshcee.adapt.senses import FAST, HELD, SHIFT, Pair, Senses, as_shown

__all__ = [
    "FAST",
    "HELD",
    "SETTLING_STEPS",
    "SHIFT",
    "Adapter",
    "Decision",
    "Feeding",
    "Paces",
    "Pair",
    "Senses",
    "as_shown",
]
