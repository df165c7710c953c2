"""From the user's module to a program, or one sentence of refusal: the operation, the line, what to write instead.

Runs on the owner only. `watch` holds eager code beside the graph; `refusals` has the words.
"""

from meshcee.capture.export.cuts import find_cuts, named_cuts, positions
from meshcee.capture.export.flatten import EXAMPLES, Exported, export_module
from meshcee.capture.export.masks import asked_for_masks, causal_masks, refuse_idle
from meshcee.capture.export.modes import Owned, one_by_one
from meshcee.capture.export.refusals import explain, faithful, hooked
from meshcee.capture.export.settings import peers_default, refuse_settings
from meshcee.capture.export.sizes import Branch, sizes_that_vary
from meshcee.capture.export.unchanged import Unchanged
from meshcee.capture.export.watch import Watch, keeping
from meshcee.capture.export.writes import overlap, place_of, refuse_aliases, refuse_overlaps, refuse_shared, settled

__all__ = [
    "EXAMPLES",
    "Branch",
    "Exported",
    "Owned",
    "Unchanged",
    "Watch",
    "asked_for_masks",
    "causal_masks",
    "explain",
    "export_module",
    "faithful",
    "find_cuts",
    "hooked",
    "keeping",
    "named_cuts",
    "one_by_one",
    "overlap",
    "peers_default",
    "place_of",
    "positions",
    "refuse_aliases",
    "refuse_idle",
    "refuse_overlaps",
    "refuse_settings",
    "refuse_shared",
    "settled",
    "sizes_that_vary",
]
