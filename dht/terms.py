"""The terms that a peer must not forget: on disk before they are used.

The idea: two numbers. `counter` is the highest that this peer has seen in claims or claimed, so that no claim is ever made twice.
`accepted` is the highest term that it has believed, below which it believes nobody: it may be one of a plan, and then be the higher
of the two. One small file, replaced whole. While the disk refuses it, its peer claims nothing, and what it believes ends with
its process.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from meshcee.errors import ProtocolError, UsageError
from meshcee.fields import Count, read
from meshcee.files import disk, loads
from meshcee.plan import Term

__all__ = ["Term", "TermFile", "Terms"]

NONE = Term(0, "")  # older than any


@dataclass(frozen=True)
class Terms:
    counter: Count = 0
    accepted: Term = NONE


class TermFile:
    """`save` returns once the terms would survive a power cut. Without a path they live as long as the process.

    Terms only grow: of two saves at once, from two threads, the file ends with the higher of each.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._saved = Terms()

    def load(self) -> Terms:
        """What was saved last; nothing yet when there is no file. A damaged file is an error, never a fresh start."""
        if self.path is None:
            return Terms()
        try:
            return read(loads(self.path.read_text()), Terms, "it")
        except FileNotFoundError:
            return Terms()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the file of accepted terms {self.path} cannot be read ({error}): "
                "restore it, or remove it together with the identity beside it"
            ) from error
        except ProtocolError as error:
            raise UsageError(
                f"the file of accepted terms {self.path} is damaged ({error}): restore it, or remove it and the identity"
            ) from error

    def save(self, terms: Terms) -> None:
        if self.path is None:
            return
        with self._lock:
            old = self._saved
            self._saved = Terms(max(old.counter, terms.counter), max(old.accepted, terms.accepted))
            data = {"counter": self._saved.counter, "accepted": list(self._saved.accepted)}
            disk.write_whole(self.path, json.dumps(data).encode())
