"""What a plan would do on a cluster, before anyone rents a machine.

`simulate` plays a plan on a cluster by discrete events (engine.py) over a plan made ready (instance.py), under links that
may change (weather.py). `period_s` is the seconds of a step that a plan is judged by. Pure: numbers in, numbers out, no torch.
"""

from meshcee.simulator.instance import Edge, Instance, build
from meshcee.simulator.timeline import Span, Timeline, bound_s, period_s, quick_period_s, simulate, slowest_s

__all__ = [
    "Edge",
    "Instance",
    "Span",
    "Timeline",
    "bound_s",
    "build",
    "period_s",
    "quick_period_s",
    "simulate",
    "slowest_s",
]
