"""From figures to a plan: `plan_job` for a live mesh, `plans` for a cluster in files, `comparison` for what else there is.

Dynamic programs propose (cut, rows, proposals), the simulator judges, small moves improve (search). rules says what may be
proposed, trust what figures count for, regions what is near. Effort is counted, never timed. No torch.
"""

from meshcee.planner.compare import COMPARED, Comparison, Found, Row, comparison
from meshcee.planner.live import (
    EFFORT,
    HURRIED,
    choose,
    has_room_for_copies,
    most_micros,
    plan_job,
    question_of,
    regions_of,
    situation,
)
from meshcee.planner.regions import NEAR_LATENCY_S, whom_to_probe
from meshcee.planner.rules import needs, remarks, shortages
from meshcee.planner.search import Effort, Question, plans

__all__ = [
    "COMPARED",
    "EFFORT",
    "HURRIED",
    "NEAR_LATENCY_S",
    "Comparison",
    "Effort",
    "Found",
    "Question",
    "Row",
    "choose",
    "comparison",
    "has_room_for_copies",
    "most_micros",
    "needs",
    "plan_job",
    "plans",
    "question_of",
    "regions_of",
    "remarks",
    "shortages",
    "situation",
    "whom_to_probe",
]
