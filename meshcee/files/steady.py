"""Standard output and standard error that no disk and no letter can stop.

The idea: what a full disk refuses of a log must end nothing, least of all the run that warns of that disk. So it is dropped, line
by line, and once there is room again a line in its place says how many are missing. It is done below Python's own buffer, which
would keep a part of what was refused, and raise again for it when the process ends. A letter that cannot be encoded is spelled out.
"""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from meshcee.files.strict_json import dumps

__all__ = ["Steady", "steady_output"]


class Steady(io.RawIOBase):
    """Takes whatever `raw`, the file below a stream, refuses. A pipe whose reader has gone is no disk: BrokenPipeError, as ever."""

    def __init__(self, raw: io.RawIOBase, stream: TextIO) -> None:
        self._raw, self._stream = raw, stream  # kept, since it would close the file as it goes
        self._missing, self._why = 0, ""
        self._skips = self._is_torn = False  # the rest of a line that was refused; half a line stands last

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()

    def write(self, data: Any) -> int:
        left = bytes(data)
        if self._skips:
            _, end, left = left.partition(b"\n")
            self._skips = not end
        if left and (not self._missing or self._tell(is_json=left.startswith(b"{"))):
            left = self._put(left)
        if left:
            self._skips = not left.endswith(b"\n")
            self._missing += left.count(b"\n") + self._skips
        return len(data)

    def _tell(self, *, is_json: bool) -> bool:
        """In the form of the line that comes next."""
        said = f"{self._missing} lines are missing here: {self._why}"
        line = dumps({"note": said}) if is_json else f"meshcee: {said}"
        if self._put(b"\n" * self._is_torn + line.encode() + b"\n"):
            return False
        self._missing = 0
        return True

    def _put(self, data: bytes) -> bytes:
        """What was not taken of it."""
        try:
            while data and (count := self._raw.write(data)):
                self._is_torn = data[count - 1 : count] != b"\n"
                data = data[count:]
        except BrokenPipeError:
            raise
        except OSError as error:
            self._why = error.strerror or str(error)
        return data


def steady_output() -> None:
    """For the whole process, from now on. Twice is once; a stream with no file below it stays what it is."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # Python has no buffer of its own where it was told so (-u)
        if isinstance(raw, io.RawIOBase) and not isinstance(raw, Steady):
            stream.flush()
            as_before = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
            errors = "backslashreplace" if stream.errors in ("strict", "surrogateescape") else stream.errors
            setattr(sys, name, io.TextIOWrapper(Steady(raw, stream), errors=errors, **as_before))
