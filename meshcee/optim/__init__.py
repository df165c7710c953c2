"""Optimizers and schedules of learning rates, by name: what a Job says, and what a stage builds of it.

The owner evaluates the options of each step. `rates`, `digests` and `adamw8bit`, a class of our own, are wings: loaded where a job
names one, and importable for loops of your own.
"""

from meshcee.optim.hyper import HyperSchedule, scheduled
from meshcee.optim.optimizer import PER_PARAMETER, Optimizer, plain_number

__all__ = ["PER_PARAMETER", "HyperSchedule", "Optimizer", "plain_number", "scheduled"]
