"""Where a job's state is kept and how it comes back: copies with keepers, checkpoints on the owner's disk, the run's journal.

`fetch` moves tensors by the hash of their bits; `policy` says who keeps for whom and how often. What disks keep is a wing, imported
by name: `checkpoint`, `journal`, `shelf`.
"""

from peers.state.fetch import Reader
from peers.state.keep import Keeper
from peers.state.keeping import Beginning, Keeping, Supplies, state_for
from peers.state.manifest import CopySet, Manifest
from peers.state.policy import RETRY_S, Cadence, Keepers, keepers_with_room
from peers.state.restoring import Arrivals, Lender, Moments, restore
from peers.state.store import CopyStore, by_parameter

__all__ = [
    "RETRY_S",
    "Arrivals",
    "Beginning",
    "Cadence",
    "CopySet",
    "CopyStore",
    "Keeper",
    "Keepers",
    "Keeping",
    "Lender",
    "Manifest",
    "Moments",
    "Reader",
    "Supplies",
    "by_parameter",
    "keepers_with_room",
    "restore",
    "state_for",
]
