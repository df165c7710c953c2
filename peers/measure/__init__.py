"""What peers measure and tell: their links, a job's blocks, and a few steps as a picture (trace)."""

from peers.measure.block_profiler import BUDGET_S, FRESH_S, LONGEST, ProfileRequest
from peers.measure.measuring import Measuring, lend_profiles
from peers.measure.probe import LIGHT_S, MOST_MEASURED_BYTES_PER_S, probe_link
from peers.measure.sounding import sound
from peers.measure.trace import Trace

__all__ = [
    "BUDGET_S",
    "FRESH_S",
    "LIGHT_S",
    "LONGEST",
    "MOST_MEASURED_BYTES_PER_S",
    "Measuring",
    "ProfileRequest",
    "Trace",
    "lend_profiles",
    "probe_link",
    "sound",
]
