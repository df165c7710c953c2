"""A finding of the doctor: one thing that was looked at, how it is, and what mends it. And the words of findings.

The idea: texts in facts may be of other machines, so `clean` makes one printable sentence of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from meshcee import errors
from peers.cli.session import printable

__all__ = ["GIB", "Finding", "Level", "bad", "clean", "count", "ok", "size", "span", "unknown", "warn"]

Level = Literal["ok", "warn", "bad", "unknown"]

GIB = 1 << 30
MOST_CHARS = 400
LONGEST_S = 1e6 * 86400.0
UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `error` is the class whose exit code it stands for, where it is bad."""

    level: Level
    group: str
    what: str
    detail: str
    mend: str = ""
    error: type[errors.MeshceeError] | None = None


def ok(group: str, what: str, detail: str) -> Finding:
    return Finding("ok", group, what, detail)


def unknown(group: str, what: str, detail: str) -> Finding:
    return Finding("unknown", group, what, detail)


def warn(group: str, what: str, detail: str, mend: str) -> Finding:
    return Finding("warn", group, what, detail, mend)


def bad(group: str, what: str, detail: str, mend: str, error: type[errors.MeshceeError]) -> Finding:
    return Finding("bad", group, what, detail, mend, error)


def _sentence(text: str) -> str:
    """One line, printable, of bounded length, without the end of a sentence inside."""
    one = re.sub(r"[.!?]+\s+", "; ", printable(" ".join(text.split())).replace("\n", " ").strip())
    return one if len(one) <= MOST_CHARS else one[: MOST_CHARS - 1] + "…"


def clean(finding: Finding) -> Finding:
    what, detail, mend = map(_sentence, (finding.what, finding.detail, finding.mend))
    return replace(finding, what=what or "?", detail=detail or "nothing is told", mend=mend)


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if abs(count) >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"


def count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def span(seconds: float) -> str:
    unit_s, unit = next((one for one in UNITS if seconds >= one[0]), UNITS[-1])
    return count(int(seconds / unit_s), unit) if abs(seconds) < LONGEST_S else "very long"
