"""Where a job's state is kept and how it comes back: copies with keepers, checkpoints on the owner's disk, the run's journal.

`fetch` moves tensors by the hash of their bits; `policy` says who keeps for whom and how often.
"""

from peers.state.checkpoint import (
    Checkpoint,
    CheckpointStore,
    check_same,
    check_weights,
    description,
    first_weights,
    made_by_code,
)
from peers.state.fetch import Reader
from peers.state.journal import Found, Journal, Mirror, seek, take
from peers.state.keep import Keeper
from peers.state.keeping import Beginning, Keeping, Supplies, state_for
from peers.state.manifest import CopySet, Ledger, Manifest, noted
from peers.state.policy import RETRY_S, Cadence, Keepers, keepers_with_room
from peers.state.restoring import Arrivals, Lender, Moments, restore
from peers.state.shelf import Shelf
from peers.state.store import CopyStore, by_parameter

__all__ = [
    "RETRY_S",
    "Arrivals",
    "Beginning",
    "Cadence",
    "Checkpoint",
    "CheckpointStore",
    "CopySet",
    "CopyStore",
    "Found",
    "Journal",
    "Keeper",
    "Keepers",
    "Keeping",
    "Ledger",
    "Lender",
    "Manifest",
    "Mirror",
    "Moments",
    "Reader",
    "Shelf",
    "Supplies",
    "by_parameter",
    "check_same",
    "check_weights",
    "description",
    "first_weights",
    "keepers_with_room",
    "made_by_code",
    "noted",
    "restore",
    "seek",
    "state_for",
    "take",
]
