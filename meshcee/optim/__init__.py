"""Optimizers and schedules of learning rates, by name: what a Job says, and what a stage builds of it.

`adamw8bit`, a class of our own, is a wing: loaded where a job names it, and importable for loops of your own.
"""

from meshcee.optim.optimizer import PER_PARAMETER, Optimizer, plain_number
from meshcee.optim.rates import Schedule

__all__ = ["PER_PARAMETER", "Optimizer", "Schedule", "plain_number"]
