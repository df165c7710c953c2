"""A program: a model's forward pass as data, node by node in eager order, and what can be told of it without computing.

Slices become stages, bytes become programs and are checked before anybody believes them. Members import this room of the
capture and no other, so no code of the user's can reach them. `rows` and `draws` are of groups, which share a stage by samples.
"""

from meshcee.capture.graph.analysis import Analysis, analyse, find_recomputed, quiet, resolve, unfolded
from meshcee.capture.graph.guards import ATTENTION, FAILED_ASSERT, teach_shapes
from meshcee.capture.graph.operators import (
    FUNCTION,
    Operator,
    find_operator,
    given_to_write,
    operator_name,
    places_written,
    without_out,
)
from meshcee.capture.graph.program import Batch, Dim, Free, Input, Node, Program, Ref, StageSpec, Value, is_random
from meshcee.capture.graph.same_work import alike, tied
from meshcee.capture.graph.strides import canonical, contiguous, dense, moved, unexpanded
from meshcee.capture.graph.verify import NodeRefused

__all__ = [
    "ATTENTION",
    "FAILED_ASSERT",
    "FUNCTION",
    "Analysis",
    "Batch",
    "Dim",
    "Free",
    "Input",
    "Node",
    "NodeRefused",
    "Operator",
    "Program",
    "Ref",
    "StageSpec",
    "Value",
    "alike",
    "analyse",
    "canonical",
    "contiguous",
    "dense",
    "find_operator",
    "find_recomputed",
    "given_to_write",
    "is_random",
    "moved",
    "operator_name",
    "places_written",
    "quiet",
    "resolve",
    "teach_shapes",
    "tied",
    "unexpanded",
    "unfolded",
    "without_out",
]
