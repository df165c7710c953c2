"""Where the members of a process group find each other: a store of torch's whose entries travel over the members' own streams.

The idea: what torch would keep in a server that anybody can reach are a few addresses and an id. Each member tells the others
what it sets, over streams that are encrypted and theirs, so nothing listens, nothing is dialled, and no key is needed.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch.distributed
from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import read

__all__ = ["Meeting"]

MOST_ENTRIES, MOST_KEY_CHARS, MOST_VALUE_BYTES = 4096, 200, 16 << 10

distributed: Any = torch.distributed  # of what is used here torch declares no types


class Entry(NamedTuple):
    """What a member sets."""

    key: Annotated[str, Meta(max_length=MOST_KEY_CHARS)]
    value: Annotated[bytes, Meta(max_length=MOST_VALUE_BYTES)]


def _nobody(key: str, value: bytes) -> None:
    """Hears it."""


class Meeting(distributed.Store):  # type: ignore[misc]
    """Torch's threads call `get` and what else a Store has; `hear` and `close` are the event loop's.

    `tell(key, value)` is called, by any thread, with what this member sets.
    """

    def __init__(self, tell: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def hear(self, key: str, value: object) -> None:
        """Another member has set this. ProtocolError where it is too large or too much."""
        entry = read((key, value), Entry, "an entry of a group's meeting")
        with self._changed:
            if len(self._entries) >= MOST_ENTRIES:
                raise ProtocolError(f"a group meets by {MOST_ENTRIES} entries at most")
            self._entries[entry.key] = entry.value
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever still waits gets an error."""
        with self._changed:
            self._closed = True
            self._tell = _nobody  # who told the others is let go, and its group with it
            self._changed.notify_all()

    def unless_closed(self, call: Callable[[], None]) -> bool:
        """Whether the call was made: never at the same time as `close`, nor behind it."""
        with self._changed:
            if not self._closed:
                call()
            return not self._closed

    # -- as torch calls it

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.hear(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else min(timeout.total_seconds(), self._timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self.check(keys), limit_s) or self._closed:
                raise RuntimeError(f"the group did not meet: nobody has told {keys[0]!r}")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._entries for key in keys)
