"""Log lines of a device's process stand in its peer's log: printable, short, and no more than some in a minute.

The idea: both sides keep to the limit: the process to be understood, the peer because it believes the process nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from peers.node.device_process.messages import Said

__all__ = ["MOST_IN_A_MINUTE", "Hearing", "say_by"]

log = structlog.get_logger()

MOST_IN_A_MINUTE = 20
MOST_FIELDS, MOST_TEXT, MOST_TRACE = 8, 500, 2000
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "error"}


class _Limit:
    """Of lines. `left_out` counts those that were too many since the last one that was not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out = 0
        self._clock = clock
        self._lately: deque[float] = deque()

    def allows(self) -> bool:
        now_s = self._clock()
        while self._lately and now_s - self._lately[0] > 60:
            self._lately.popleft()
        if len(self._lately) >= MOST_IN_A_MINUTE:
            self.left_out += 1
            return False
        self._lately.append(now_s)
        return True

    def take(self) -> dict[str, str]:
        left_out, self.left_out = self.left_out, 0
        return {"lines_left_out": str(left_out)} if left_out else {}


class Hearing:
    """The peer's side."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = _Limit(clock)

    def hear(self, said: Said) -> None:
        if not self._limit.allows():
            return
        fields = {_printable(name): _printable(text) for name, text in said.fields.items() if name != "event"}
        getattr(log, said.level)(
            _printable(said.event), **{**fields, **self._limit.take(), "of": "the device's process"}
        )


def say_by(post: Callable[[Said], None]) -> None:
    """In the process: what is logged is posted, and goes nowhere else. `post` raises nothing."""

    limit = _Limit()

    def say(_: Any, name: str, line: MutableMapping[str, Any]) -> str:
        if name in LEVELS and limit.allows():
            trace = str(line.pop("exception", ""))[-MOST_TRACE:]
            event, fields = str(line.pop("event", "")), list(line.items())[: MOST_FIELDS - 2]
            texts = {_printable(str(key))[:MOST_TEXT]: _printable(str(value))[:MOST_TEXT] for key, value in fields}
            texts |= limit.take()
            texts |= {"exception": _printable(trace)[-MOST_TRACE:]} if trace else {}
            post(Said(LEVELS[name], _printable(event)[:MOST_TEXT], texts))  # type: ignore[arg-type]
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, say])


def _printable(text: str) -> str:
    """ASCII, so that its length is what a message bounds; nothing that moves a cursor."""
    return text.encode("ascii", "backslashreplace").decode().translate(_SPELLED)


_SPELLED = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): " | "}
