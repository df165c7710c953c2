"""Time-outs and limits as value objects, passed in by whoever owns the component.

The idea: time-outs are ordered `stream < step < lease < join`, so that the narrowest scope fails first; limits bound
what anything from the network may cost before it is believed.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AUDIT_COPIES", "FAR_COPIES", "LONGEST_LEAVE_S", "OTHERS_COPIES", "OWN_COPIES", "Limits", "Timeouts"]

OWN_COPIES = 3  # of its stage that a member may hold: the last, one that the owner reads, one that the keeper reads
OTHERS_COPIES = 2  # of another one's: the last, and the one in the making
FAR_COPIES = 2  # more of each where there are far keepers: again the last, and the one in the making
AUDIT_COPIES = 5  # more of its own where steps are audited: before each of the last four, and the newest

LONGEST_LEAVE_S = 86400.0  # that a peer may take to leave


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Defaults suit links of up to 300 ms."""

    dial_s: float = 5.0  # one connection attempt
    handshake_s: float = 5.0  # the HELLO exchange on a new stream
    direct_s: float = 1.5  # of it, for connections beside libp2p: a firewall that drops them costs this once
    join_s: float = 20.0  # all attempts over all seeds
    record_ttl_s: float = 8.0  # a peer that stops announcing is gone after this
    announce_every_s: float = 2.5
    directory_poll_s: float = 1.0
    lease_ttl_s: float = 8.0
    lease_confirm_s: float = 1.0  # between writing a claim and believing it
    offer_s: float = 120.0  # that an offer may stand still; it may take as long as it gets on
    idle_step_s: float = 600.0  # a running step without any progress, where nothing tells how long steps take
    hung_s: float = 30.0  # the same where something does, at least
    beat_s: float = 2.0  # between two signs of life, of owner and member or of two members
    silent_s: float = 10.0  # without any, the other side is given up
    regroup_s: float = 60.0  # that an owner waits for peers who can go on with its job
    leave_s: float = 30.0  # that a peer which is asked to leave holds its stage for its job to go on without it
    worker_s: float = 60.0  # until the process that checks graphs is ready
    shutdown_s: float = 3.0  # each component's bounded shutdown


@dataclass(frozen=True)
class Limits:
    """Bytes and counts that bound what the network may cost us."""

    header_bytes: int = 64 * 1024
    payload_bytes: int = 1 << 30  # all payloads of one frame; consumers lower it to what they expect
    payloads: int = 1024  # payloads in a frame
    chunk_bytes: int = 1 << 20  # payloads are written in chunks of this size
    window_bytes: int = 64 << 20  # unread bytes in flight per stream and direction; of one that came in 1 MiB at first
    graph_bytes: int = 16 << 20
    check_bytes: int = 1 << 30  # of memory for reading and checking one
    check_s: float = 10.0  # of CPU time for that, and 20 s more for each megabyte of it
    record_bytes: int = 16 * 1024
    streams_per_peer: int = 64
