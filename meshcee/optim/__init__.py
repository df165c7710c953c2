"""Optimizers and schedules of learning rates, by name: what a Job says, and what a stage builds of it.

`rates` and `adamw8bit`, a class of our own, are wings: loaded where a job names one, and importable for loops of your own.
"""

from meshcee.optim.optimizer import PER_PARAMETER, Optimizer, plain_number

__all__ = ["PER_PARAMETER", "Optimizer", "plain_number"]
