"""From figures to a plan: `plan_job` for a live mesh, `plans` for a cluster in files.

Dynamic programs propose (cut, rows, proposals), the simulator judges, small moves improve (search). rules says what may be
proposed, trust what figures count for, regions and probing what is near. Effort is counted, never timed. No torch.
"""

from meshcee.planner.live import HURRIED, choose, has_room_for_copies, most_micros, plan_job, regions_of, situation
from meshcee.planner.probing import whom_to_probe
from meshcee.planner.rules import needs, remarks, shortages
from meshcee.planner.search import Effort, plans

__all__ = [
    "HURRIED",
    "Effort",
    "choose",
    "has_room_for_copies",
    "most_micros",
    "needs",
    "plan_job",
    "plans",
    "regions_of",
    "remarks",
    "shortages",
    "situation",
    "whom_to_probe",
]
