"""What is shown of a mesh and of a run: one value, made of records, reports, plans, events and traces.

`Painter` hears all of these and gives a `Picture`, which is plain data with a version. Pages, terminals and files draw it.
Pure: no clocks, no threads, no files.
"""

from meshcee.picture.account import account_of
from meshcee.picture.captured import picture_of_capture
from meshcee.picture.gantt import gantt_of
from meshcee.picture.layout import places
from meshcee.picture.painter import Painter
from meshcee.picture.planned import picture_of_plan
from meshcee.picture.series import Series
from meshcee.picture.values import FIGURES, VERSION, Mesh, Moment, Picture, PlanView, RunView

__all__ = [
    "FIGURES",
    "VERSION",
    "Mesh",
    "Moment",
    "Painter",
    "Picture",
    "PlanView",
    "RunView",
    "Series",
    "account_of",
    "gantt_of",
    "picture_of_capture",
    "picture_of_plan",
    "places",
]
