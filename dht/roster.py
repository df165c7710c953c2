"""Whom to believe alive, from records that arrive late, twice, not at all, or from a clock that is off.

The idea: a peer lives as long as its record keeps CHANGING, by our own monotonic clock. The sender's clock is consulted
only when a record is seen for the first time. So a read that fails loses nobody, a skewed clock does not make a peer
flap. A peer that has died is gone everywhere after one ttl, whatever its last record says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from dht.records import PeerRecord, Record, is_ahead

__all__ = ["MAX_RECORDS", "Change", "Roster", "differences"]

R = TypeVar("R", bound=Record)
MAX_RECORDS = 4096  # of one kind


@dataclass(frozen=True)
class Change:
    """A peer has "joined", "left" (it said so, or fell silent) or "changed"; `record` is the newest seen of it."""

    kind: str
    record: PeerRecord


@dataclass
class _Heard(Generic[R]):
    record: R
    changed_at_s: float  # our monotonic clock when this version appeared; for the first one, less its age

    def silent_s(self, mono_s: float) -> float:
        return mono_s - self.changed_at_s


class Roster(Generic[R]):
    """The newest record of each peer and when it last changed."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._heard: dict[str, _Heard[R]] = {}

    def absorb(self, found: Mapping[str, R], wall: float, mono_s: float, rarer_s: float = 0.0) -> dict[str, R]:
        """Take in what one read has found, possibly nothing; who lives now. Where reads come `rarer_s` later one after
        the other than usual, silence may last so much longer."""
        limit_s = self._ttl_s + rarer_s
        for peer_id, record in found.items():
            heard = self._heard.get(peer_id)
            if heard is None:
                if len(self._heard) < MAX_RECORDS:
                    age_s = max(0.0, wall - record.sent_at)
                    self._heard[peer_id] = _Heard(record, mono_s - age_s)
            elif self.is_news(record, wall):
                self._heard[peer_id] = _Heard(record, mono_s)
        for peer_id in [p for p, h in self._heard.items() if p not in found and h.silent_s(mono_s) >= limit_s]:
            del self._heard[peer_id]  # while it is still found it is remembered, or it would seem to be new
        return {p: h.record for p, h in self._heard.items() if h.silent_s(mono_s) < limit_s}

    def is_news(self, record: R, wall: float) -> bool:
        """Whether this is newer than what was heard of its peer; what was heard while our clock ran ahead does not count."""
        heard = self._heard.get(record.peer_id)
        return heard is None or record.sent_at > heard.record.sent_at or is_ahead(heard.record.sent_at, wall)


def differences(before: Mapping[str, PeerRecord], after: Mapping[str, PeerRecord]) -> list[Change]:
    """What happened between two views; a record that was merely sent again has not changed."""
    changes = [Change("left", before[p]) for p in before.keys() - after.keys()]
    for peer_id, record in after.items():
        old = before.get(peer_id)
        if old is None:
            changes.append(Change("joined", record))
        elif old.instance != record.instance:  # the process was restarted in between
            changes += [Change("left", old), Change("joined", record)]
        elif old is not record and replace(old, sent_at=record.sent_at) != record:
            changes.append(Change("changed", record))
    return changes
