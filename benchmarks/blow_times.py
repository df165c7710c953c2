"""How long each kind of blow took to be noticed and to be got over, as a table of docs/benchmarks.md.

`python -m benchmarks.blow_times RESULTS...` reads the lines that `python -m benchmarks.chaos` has printed. Detection is from the
blow until an owner, or who stands by for it, missed somebody. Recovery is from then to the first new step; of several losses
after one blow each counts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Blow", "by_kind", "table"]


@dataclass
class Blow:
    """One of these; `detected_s` is None where it missed nobody before the next blow."""

    kind: str
    detected_s: float | None = None
    back_s: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def by_kind(results: Iterable[Mapping[str, Any]]) -> dict[str, list[Blow]]:
    """All blows of these lines; those that have gone wrong have no times."""
    found = defaultdict(list)
    for result in results:
        for blow in result.get("times", ()):
            found[blow["kind"]].append(Blow(**blow))
    return dict(sorted(found.items()))


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """In Markdown, with all kinds together in the last row."""
    kinds = by_kind(results)
    kinds["all"] = [blow for blows in kinds.values() for blow in blows]
    rows = [
        "| blow | times | noticed as a loss | detection, median s | worst s | recoveries | recovery, median s | worst s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, blows in kinds.items():
        detected = [blow.detected_s for blow in blows if blow.detected_s is not None]
        back = [seconds for blow in blows for seconds in blow.back_s]
        cells = [kind, len(blows), len(detected), *_summary(detected), len(back), *_summary(back)]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _summary(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("–", "–")


def main() -> None:
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    print(table(json.loads(line) for line in lines if line.startswith("{")))


if __name__ == "__main__":
    main()
