"""Standard output and standard error that no disk, no letter and no reader can stop.

The idea: what a full disk refuses of a log must end nothing, least of all the run that warns of that disk. So it is dropped, line
by line, and once there is room again a line in its place says how many are missing. It is done below Python's own buffer, which
would keep a part of what was refused, and raise again for it when the process ends. A letter that cannot be encoded is spelled out.

A pipe that nobody reads, or a terminal after Ctrl-S, takes nothing and refuses nothing: a write waits. While an event loop runs, a
thread waits in its place, and lines wait in memory. What is too much for that is refused, so it is counted as on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, TextIO

from meshcee.files.strict_json import dumps

__all__ = ["MOST_WAITING", "Steady", "lost_lines", "part_prints", "steady_output", "write_fact", "written_apart"]

MOST_WAITING = 1 << 20  # bytes of a stream, some 10,000 steps
ENDS_WITHIN_S = 2.0  # of a command that is interrupted while nobody reads


class _Over(io.RawIOBase):
    """What is written over another file, and is that file otherwise."""

    raw: io.RawIOBase

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.raw.fileno()

    def isatty(self) -> bool:
        return self.raw.isatty()


class Steady(_Over):
    """Takes whatever `raw`, the file below a stream, refuses. A pipe whose reader has gone is no disk: BrokenPipeError, as ever."""

    def __init__(self, raw: io.RawIOBase, stream: TextIO | None = None) -> None:
        self.raw, self._stream = raw, stream  # kept, since it would close the file as it goes
        self._missing, self._why = 0, ""
        self._skips = self._is_torn = False  # the rest of a line that was refused; half a line stands last

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

    @property
    def lost(self) -> str:
        """What is missing at the end, in words; nothing where all was taken."""
        return f"{self._why}; lost lines: {self._missing}" if self._missing else ""

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
            while data and (count := self.raw.write(data)):
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


def lost_lines() -> str:
    """What standard output has refused, as `Steady.lost`."""
    with contextlib.suppress(ValueError, OSError):  # it is closed
        sys.stdout.flush()
    below = getattr(sys.stdout, "buffer", None)
    return below.lost if isinstance(below, Steady) else ""


class _Apart(_Over):
    """A thread writes to `raw`. A write here takes all of its bytes at once, or is refused."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self.raw = raw
        self._below = Steady(raw)
        self._lines: deque[bytes] = deque()
        self._waiting, self._is_over = 0, False
        self._gone: BrokenPipeError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        with self._changed:
            if self._gone is not None:
                raise self._gone
            if self._waiting + len(data) > MOST_WAITING:
                raise OSError(errno.ENOBUFS, "nobody read what was written before")
            self._waiting += len(data)
            self._lines.append(bytes(data))
            self._changed.notify()
        return len(data)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_over)
                if not self._lines:
                    return
                line = self._lines.popleft()
            try:
                self._below.write(line)
            except BrokenPipeError as error:
                self._gone = error
                return
            with self._changed:
                self._waiting -= len(line)

    def end(self, within_s: float | None) -> bool:
        """Whether the thread has ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        """BrokenPipeError where the reader has gone before the last line."""
        if self._gone is not None:
            raise self._gone


_facts: list[TextIO] = []  # standard output, while it is kept for facts


@contextlib.contextmanager
def part_prints(*, wanted: bool) -> Iterator[None]:
    """Around a command with --json: what the user's code prints, and torch, goes to standard error."""
    if not wanted:
        yield
        return
    _facts.append(sys.stdout)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = _facts.pop()


def write_fact(fact: object) -> None:
    """One JSON object, which is a line of its own on standard output."""
    print(dumps(fact), file=_facts[-1] if _facts else sys.stdout, flush=True)


@contextlib.contextmanager
def written_apart() -> Iterator[None]:
    """For as long as an event loop runs: threads write what goes to the two streams, where they are steady.

    At the end they write what is left, for as long as that takes, as any command does; two seconds when the user wants the end.
    """
    streams = dict.fromkeys((sys.stdout, sys.stderr, _facts[-1] if _facts else sys.stdout))
    steady = [raw for stream in streams if isinstance(raw := getattr(stream, "buffer", None), Steady)]
    apart = [(below, _Apart(below.raw)) for below in steady]
    for below, thread in apart:
        below.raw = thread
    within_s: float | None = None
    try:
        yield
    except BaseException as error:
        within_s = None if isinstance(error, Exception) else ENDS_WITHIN_S
        raise
    finally:
        for below, thread in apart:
            if thread.end(within_s):
                below.raw = thread.raw
    for _, thread in apart:
        thread.check()
