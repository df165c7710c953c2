"""Everything that crosses between peers once a stream is open: the kinds of frames, how fields are read, and who owes what.

`messages` is the table of kinds, `Offer` what a member is told, outboxes and links carry frames, `progress` and `failures` say
whose fault a silence is.
"""

from peers.wire.failures import LOST_HERE, Failures, NotFoundError, most_telling, reported
from peers.wire.member_link import Link, check_replicas
from peers.wire.messages import MOST_RUN_CHARACTERS, Round, besides_in, need
from peers.wire.neighbour_link import Bandwidth, Crossed, Links, Witness
from peers.wire.offer import Offer, Terms
from peers.wire.outbox import Outbox
from peers.wire.progress import OWNER, Doing, Watch
from peers.wire.pulse import SILENT, beat, live, unless_closed, unless_late, unless_silent, while_alive, while_moving
from peers.wire.spans import Span, Spans, micro_of, read_spans
from peers.wire.suspects import Fault, Suspects, is_own
from peers.wire.weights import (
    DIGEST_BYTES,
    SLACK_BYTES,
    SLOWEST_BYTES_PER_S,
    StateReceiver,
    StateSender,
    digest_of,
    digests_in,
    digests_of,
    names_of,
    state_frames,
)

__all__ = [
    "DIGEST_BYTES",
    "LOST_HERE",
    "MOST_RUN_CHARACTERS",
    "OWNER",
    "SILENT",
    "SLACK_BYTES",
    "SLOWEST_BYTES_PER_S",
    "Bandwidth",
    "Crossed",
    "Doing",
    "Failures",
    "Fault",
    "Link",
    "Links",
    "NotFoundError",
    "Offer",
    "Outbox",
    "Round",
    "Span",
    "Spans",
    "StateReceiver",
    "StateSender",
    "Suspects",
    "Terms",
    "Watch",
    "Witness",
    "beat",
    "besides_in",
    "check_replicas",
    "digest_of",
    "digests_in",
    "digests_of",
    "is_own",
    "live",
    "micro_of",
    "most_telling",
    "names_of",
    "need",
    "read_spans",
    "reported",
    "state_frames",
    "unless_closed",
    "unless_late",
    "unless_silent",
    "while_alive",
    "while_moving",
]
