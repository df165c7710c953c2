"""The side of a job that has the user's code and data: epochs from plan to plan, what is fed, what is heard, what is decided.

`Training` is a job from its first plan to its last step, `Owner` one epoch of it. Recovery, adaptation, evaluation. Where a run is
kept (`folder`), and who waits for an owner to die (`standby`), are imported by name. Members never import this room.
"""

from peers.owner.epoch import Report
from peers.owner.job_run import Training, own
from peers.owner.numbers import next_incarnation
from peers.owner.result import Result, Wanted

__all__ = [
    "Report",
    "Result",
    "Training",
    "Wanted",
    "next_incarnation",
    "own",
]
