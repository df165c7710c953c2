"""What people write in models: one small module for each habit, what its samples are like, and how it is refused, if it is.

The idea: a habit is a class that a stranger could have written. A chain of stages equals the plain loop, or the job is refused
before the first step, and the refusal says what helps.
"""

from tests.rig.habits import architectures, gradients, interfaces, state
from tests.rig.habits.registry import HABITS, Habit, job_of

__all__ = ["HABITS", "Habit", "architectures", "gradients", "interfaces", "job_of", "state"]
