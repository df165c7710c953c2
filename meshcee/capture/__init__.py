"""Any nn.Module as a program: exported, cut into blocks, priced, encoded, sliced into stages.

meshcee.capture(job)            -> Capture(train: Program, evaluate: Program | None, costs, state)
Program.slice(first, end)       -> StageSpec -> build() -> a function of (raw inputs, received, parameters, buffers)
encode_program, decode_program  the same as bytes that an untrusting peer can read
"""

import sys
import types
from typing import Any

from meshcee.capture.capture import Capture, capture, watch_sizes
from meshcee.capture.graph.encoding import decode_program, encode_program
from meshcee.capture.graph.program import Batch, Free, Program, StageSpec, Value
from meshcee.capture.graph.verify import prepare
from meshcee.sampling import inputs_of, stack

__all__ = [
    "Batch",
    "Capture",
    "Free",
    "Program",
    "StageSpec",
    "Value",
    "capture",
    "decode_program",
    "encode_program",
    "inputs_of",
    "prepare",
    "stack",
    "watch_sizes",
]


class _Called(types.ModuleType):
    """A package that is its function too: `meshcee.capture(job)` means the same whether or not a submodule was imported."""

    __call__: Any = staticmethod(capture)


sys.modules[__name__].__class__ = _Called
