"""Does a job train as the plain loop does? Stages beside the user's module, before the first step and for `meshcee check`.

`net` compares micro-batches of every size that the plan uses. `check` compares whole steps. `trial` compares the shares of
a group. `blamed` says of which samples an error of the user's own code is. `Watch`, `Recorder` and `line_that` find the tensor
and the user's line that differ.
"""

from meshcee.equality.blame import blamed, refuse_failing
from meshcee.equality.checking import STAGES, Checked, check, refuse
from meshcee.equality.net import examine
from meshcee.equality.sizes import cuts_of, sizes_of
from meshcee.equality.trial import check_sharing, in_whole_batches, why_not_shared

__all__ = [
    "STAGES",
    "Checked",
    "blamed",
    "check",
    "check_sharing",
    "cuts_of",
    "examine",
    "in_whole_batches",
    "refuse",
    "refuse_failing",
    "sizes_of",
    "why_not_shared",
]
