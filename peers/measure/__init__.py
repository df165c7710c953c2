"""What peers measure and tell: their device, their links, a job's blocks, and a few steps as a picture (trace)."""

from peers.measure.block_profiler import BUDGET_S, LONGEST, BlockProfiler, ProfileRequest
from peers.measure.link_report import LinkReport
from peers.measure.profiler import (
    LIGHT_S,
    MOST_MEASURED_BYTES_PER_S,
    TARGET_S,
    measure_device,
    probe_link,
    resolve_device,
    serve_probe,
)
from peers.measure.sounding import Wishes, sound
from peers.measure.trace import Trace

__all__ = [
    "BUDGET_S",
    "LIGHT_S",
    "LONGEST",
    "MOST_MEASURED_BYTES_PER_S",
    "TARGET_S",
    "BlockProfiler",
    "LinkReport",
    "ProfileRequest",
    "Trace",
    "Wishes",
    "measure_device",
    "probe_link",
    "resolve_device",
    "serve_probe",
    "sound",
]
