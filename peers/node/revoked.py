"""Whom one admin has revoked, and the invites that ended with them: on its disk without an end, for lists that end.

The idea: what the mesh is told holds for some days, so that old lists need not be kept for ever. The admin forgets nobody. So its
list is written from the disk each time, and two commands that write at once wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

from dht import MAX_REVOKED, RENEWED_AFTER_S, RevokedList, RevokedRecord, dated
from meshcee.errors import ProtocolError, UsageError
from meshcee.files import disk, dumps, loads

__all__ = ["Revoked"]


class Revoked:
    """Of this admin. Without a `file` it lasts as long as the process."""

    def __init__(self, admin: str, file: Path | None) -> None:
        self._file = file
        self._record = RevokedRecord(admin, 0.0)
        self._record = self._read()

    @property
    def peers(self) -> tuple[str, ...]:
        return self._record.peers

    @property
    def invites(self) -> tuple[str, ...]:
        return self._record.invites

    def is_due(self, told: RevokedList | None, now: float) -> bool:
        """Whether the list that others were told says something else, or will end in some days."""
        if told is None:
            return bool(self.peers or self.invites)
        differs = told.peers != set(self.peers) or told.invites != set(self.invites)
        return differs or now - told.sent_at >= RENEWED_AFTER_S

    def add(
        self,
        told: RevokedList | None,
        peers: Iterable[str],
        invites: Iterable[str],
        now: float,
        sealed: Callable[[RevokedRecord], bytes],
    ) -> bytes:
        """The sealed list of all there are and these. UsageError where they are too many, or the disk's cannot be read."""
        with disk.locked(self._file) if self._file is not None else nullcontext():
            here = self._read()
            found = RevokedRecord(
                here.peer_id,
                dated(now, max(here.sent_at, told.sent_at if told else 0.0)),
                tuple(sorted({*here.peers, *(told.peers if told else ()), *peers})),
                tuple(sorted({*here.invites, *(told.invites if told else ()), *invites})),
            )
            if max(len(found.peers), len(found.invites)) > MAX_REVOKED:
                raise UsageError(
                    f"this admin has revoked {MAX_REVOKED} peers, as many as a list can hold: found a new mesh; peers of one "
                    "invite take one entry by `meshcee revoke PEER --all`"
                )
            data = sealed(found)
            if self._file is not None:
                disk.write_whole(self._file, dumps(found.to_wire(), indent=1).encode())
            self._record = found
        return data

    def _read(self) -> RevokedRecord:
        """As the disk has it; another process may have added to it."""
        if self._file is None:
            return self._record
        try:
            return RevokedRecord.from_wire(loads(self._file.read_text()), self._record.peer_id, "its list")
        except FileNotFoundError:
            return self._record
        except (OSError, ValueError, TypeError, ProtocolError) as error:
            raise UsageError(
                f"{self._file}, which says whom this admin has revoked, cannot be read ({error}): restore it, or remove it and "
                "revoke them again"
            ) from error
