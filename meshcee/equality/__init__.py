"""Does a job train as the plain loop does? Stages beside the user's module, before the first step and for `meshcee check`.

`net` compares micro-batches of every size that the plan uses. `check` compares whole steps. `trial` compares the shares of
a group. `Watch`, `Recorder` and `line_that` find the tensor and the user's line that differ.
"""

from meshcee.equality.checking import STAGES, Checked, check, refuse
from meshcee.equality.net import cuts_of, examine, sizes_of
from meshcee.equality.trial import check_sharing, why_not_shared

__all__ = ["STAGES", "Checked", "check", "check_sharing", "cuts_of", "examine", "refuse", "sizes_of", "why_not_shared"]
