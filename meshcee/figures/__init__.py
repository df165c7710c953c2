"""The numbers that a planner may use: profiles of devices and links, costs of blocks, seconds that were measured, testbeds.

Values only. Figures are in bytes, seconds and operations, and say where they come from; no torch is loaded, so a plan can be
made where nothing can be trained. `kernels` says which devices compute the same bits. `workload`, what a planner
knows of a model, `scenario`, which reads testbeds, and `amounts`, which puts figures into words, are imported by name.
"""

from meshcee.figures.hosts import as_run, threads_of
from meshcee.figures.kernels import MIXES, class_of, fitting, remark, with_classes
from meshcee.figures.measured import DEFAULT_LINK, FEW, MOST_MICROS, JobCosts, Measured, without_links
from meshcee.figures.observed import Observed
from meshcee.figures.profile import AT_HAND, BlockCost, Cluster, Device, DeviceProfile, LinkProfile
from meshcee.figures.rate import LEAST_BYTES, Rate
from meshcee.figures.timing import KINDS, MAX_DISTINCT, MAX_SIZES, BlockTimes, Triple
from meshcee.figures.versions import Versions

__all__ = [
    "AT_HAND",
    "DEFAULT_LINK",
    "FEW",
    "KINDS",
    "LEAST_BYTES",
    "MAX_DISTINCT",
    "MAX_SIZES",
    "MIXES",
    "MOST_MICROS",
    "BlockCost",
    "BlockTimes",
    "Cluster",
    "Device",
    "DeviceProfile",
    "JobCosts",
    "LinkProfile",
    "Measured",
    "Observed",
    "Rate",
    "Triple",
    "Versions",
    "as_run",
    "class_of",
    "fitting",
    "remark",
    "threads_of",
    "with_classes",
    "without_links",
]
