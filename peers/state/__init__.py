"""Where a job's state is kept and how it comes back: copies with buddies, checkpoints on the owner's disk, the run's journal.

`fetch` moves tensors by the hash of their bits; `policy` says who keeps for whom and how often.
"""

from peers.state.buddy import Buddy
from peers.state.checkpoint import Checkpoint, CheckpointStore, check_same, description
from peers.state.copies import Copied, Copies, Ledger, noted
from peers.state.journal import Journal, Mirror, seek, take
from peers.state.keeping import Keeping
from peers.state.kept import Kept, Part, state_for
from peers.state.policy import RETRY_S, Buddies, Cadence, buddies_with_room
from peers.state.restoring import Moments, Remains, Taken, restore
from peers.state.shelf import Shelf
from peers.state.snapshot import Held, by_parameter

__all__ = [
    "RETRY_S",
    "Buddies",
    "Buddy",
    "Cadence",
    "Checkpoint",
    "CheckpointStore",
    "Copied",
    "Copies",
    "Held",
    "Journal",
    "Keeping",
    "Kept",
    "Ledger",
    "Mirror",
    "Moments",
    "Part",
    "Remains",
    "Shelf",
    "Taken",
    "buddies_with_room",
    "by_parameter",
    "check_same",
    "description",
    "noted",
    "restore",
    "seek",
    "state_for",
    "take",
]
