"""Which samples a step sees and how each is read: the part of the promise that surrounds the model.

The order of samples, the generators around each read, batches from samples, and what was fed before. The owner and
the plain loop share this room; members never see a dataset. What few jobs need is imported by name.
"""

from meshcee.sampling.again import FED, Reading, repeats, unrepeatable
from meshcee.sampling.data import batch_of, batched, call_model, inputs_of, rebuild, stack
from meshcee.sampling.order import GENERATORS, KERNELS, NO_STEP, collated, draw, generators_put_back, read
from meshcee.sampling.source import (
    Source,
    few_of,
    indices_of,
    inputs_of_one,
    look_anew,
    order_digest,
    probes,
    source_of,
)
from meshcee.sampling.traces import leaving_nothing

__all__ = [
    "FED",
    "GENERATORS",
    "KERNELS",
    "NO_STEP",
    "Reading",
    "Source",
    "batch_of",
    "batched",
    "call_model",
    "collated",
    "draw",
    "few_of",
    "generators_put_back",
    "indices_of",
    "inputs_of",
    "inputs_of_one",
    "leaving_nothing",
    "look_anew",
    "order_digest",
    "probes",
    "read",
    "rebuild",
    "repeats",
    "source_of",
    "stack",
    "unrepeatable",
]
