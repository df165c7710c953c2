"""A stage at work: F, B and W of its blocks, bit for bit what the eager loop would compute. No peers, no links, no time.

`StageRunner` computes, `Weights` is what stays between steps, `Boundary` cuts values for groups of different width. `chain`,
a pipeline of stages in one thread, is imported by name. Imports capture.graph and codec.
"""

from meshcee.stage.boundary import Boundaries, Boundary
from meshcee.stage.plan_checks import check_count, check_kinds, check_pipelines, remarks, why_one_pipeline
from meshcee.stage.runner import StageRunner
from meshcee.stage.weights import AVERAGE, first_moments, optimizer_layout

__all__ = [
    "AVERAGE",
    "Boundaries",
    "Boundary",
    "StageRunner",
    "check_count",
    "check_kinds",
    "check_pipelines",
    "first_moments",
    "optimizer_layout",
    "remarks",
    "why_one_pipeline",
]
