"""Which samples a step sees and how each is read: the part of the promise that surrounds the model.

The order of samples, the generators around each read, batches from samples, what was fed before, the optimizer's options of
each step. The owner and the plain loop share this room; members never see a dataset. `readers` is imported by name.
"""

from meshcee.sampling.data import batch_of, call_model, inputs_of, rebuild, stack
from meshcee.sampling.fed import FED, Fed, repeats, unrepeatable
from meshcee.sampling.hyper import HyperSchedule
from meshcee.sampling.order import GENERATORS, NO_STEP, draw, generators_put_back, read

__all__ = [
    "FED",
    "GENERATORS",
    "NO_STEP",
    "Fed",
    "HyperSchedule",
    "batch_of",
    "call_model",
    "draw",
    "generators_put_back",
    "inputs_of",
    "read",
    "rebuild",
    "repeats",
    "stack",
    "unrepeatable",
]
