"""Draws what `benchmarks/wan.py` has measured: a table for each network, and below it how meshcee stands to the rest.

The idea: every figure is a median over repetitions with its spread, every ratio names what it is a ratio to. A baseline that
failed, or whose losses are not the plain loop's, is no baseline, and the table says which. Where an aim is missed, what
limits the row stands beside it, from what its own steps reported: who was busy, which line was full, what was predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import row

__all__ = ["BUSY", "SAME", "table"]

BUSY = 0.7  # of the cores: beyond it devices are late: measure again, on a quieter machine or with a larger --slower
SAME = 1e-4  # how far a loss may be from the plain loop's
FULL = 0.85  # of a line: what is left goes to headers, copies and probes
SINGLE = "best single device"
OURS = ("meshcee", "meshcee 16-bit")
AIMS = {  # times as fast as the best baseline of several devices, and as the best device alone
    "cee-small": (2.8, 2.4),
    "last-mile": (2.8, 1.0),
}
OF_BOUND, OF_PREDICTED = 0.92, 0.10

Row = Mapping[str, Any]  # one repetition
Rows = Mapping[str, Sequence[Row]]  # by the label of a system


def table(data: Mapping[str, Any]) -> str:
    """`data` is what `wan.py` keeps: bounds by network, and rows by "network / system"."""
    lines = []
    for name in dict.fromkeys(key.split(" / ")[0] for key in data["rows"]):
        rows = {key.split(" / ")[1]: found for key, found in data["rows"].items() if key.startswith(f"{name} / ")}
        lines += _network(name, rows, data["bounds"][name])
    return "\n".join(lines)


def _network(name: str, rows: Rows, bound: Mapping[str, float]) -> list[str]:
    steps = {label: [float(r["step_s"]) for r in found if "step_s" in r] for label, found in rows.items()}
    ours = [statistics.median(steps[label]) for label in OURS if steps.get(label)]
    filled, rounded, bare = bound["filled"], bound["filled_16_bit"], bound["bare"]
    lines = [
        f"\n**{name}**: no system can take less than {filled:.2f} s a step with fill and drain ({rounded:.2f} s where packed "
        f"16 bits cross links), {bare:.2f} s without\n",
        row("system", "s a step", "spread", "of the bounds", "meshcee is faster by (16-bit)", "what limits it"),
        row(*["---"] * 6),
    ]
    for label, found in rows.items():
        if not steps[label]:
            lines.append(row(label, "-", "-", "-", "-", found[0]["why"] if found else ""))
            continue
        middle, least, most = statistics.median(steps[label]), min(steps[label]), max(steps[label])
        spread = f"{least:.2f} to {most:.2f} ({len(steps[label])})"
        shares = f"{_filled_s(found, bound) / middle:.2f} ({bare / middle:.2f})"
        ratio = " ".join(f"({middle / own:.2f})" if i else f"{middle / own:.2f}" for i, own in enumerate(ours))
        lines.append(row(label, f"{middle:.2f}", spread, shares, ratio, _limit(found)))
    judged = [_judged(name, label, rows, steps, bound) for label in OURS if steps.get(label)]
    return [*lines, "", *judged]


def _judged(name: str, label: str, rows: Rows, steps: Mapping[str, list[float]], bound: Mapping[str, float]) -> str:
    """How one of ours stands to the best of the rest, to the bounds and to what was predicted."""
    own, said, short, missing = steps[label], [], [], []
    alone = {other: s for other, s in steps.items() if other == SINGLE and s}
    rest = {o: s for o, s in steps.items() if s and o != SINGLE and not o.startswith("meshcee")}
    counts = {o: s for o, s in rest.items() if not _differ(rows[o])}
    for among, what, aim in zip(
        (counts, alone), ("the best of several devices", "one device"), AIMS.get(name, (1.0, 1.0))
    ):
        if not among:
            missing.append(f"{what} (not measured)")
            continue
        best = min(among, key=lambda other: statistics.median(among[other]))
        ratio = statistics.median(among[best]) / statistics.median(own)
        spread = f"{min(among[best]) / max(own):.2f} to {max(among[best]) / min(own):.2f}"
        said.append(f"{ratio:.2f} times as fast as {best} ({spread}; aim {aim:.1f})")
        if ratio < aim:
            short.append(f"{ratio:.2f} of {aim:.1f} against {best}")
    filled, bare = _filled_s(rows[label], bound), bound["bare"]
    for least, words, aim in ((filled, "bound with fill and drain", OF_BOUND), (bare, "bound without", 0.0)):
        share = least / statistics.median(own)
        said.append(f"{share:.2f} of the {words}" + (f" (aim {aim:.2f})" if aim else ""))
        if share < aim:
            short.append(f"{share:.2f} of {aim:.2f} of the {words}")
    if predicted := [_beside(r) for r in _good(rows[label]) if r.get("predicted_s")]:
        off = statistics.median(predicted)
        said.append(f"{100 * off:+.0f} % beside predicted (aim within {100 * OF_PREDICTED:.0f} %)")
        if abs(off) > OF_PREDICTED:
            short.append(f"{100 * off:+.0f} % beside predicted")
    left_out = missing + [f"{o} (losses differ)" for o in rest if o not in counts]
    left_out += [f"{o} ({'failed' if found else 'not measured'})" for o, found in rows.items() if not steps[o]]
    text = f"- {label}: {'; '.join(said)}."
    if short:
        text += f" SHORT: {'; '.join(short)}. Limited by {_limit(rows[label])}."
    return text + (f" Not counted: {', '.join(left_out)}." if left_out else "")


def _good(found: Sequence[Row]) -> list[Row]:
    return [r for r in found if "step_s" in r]


def _beside(found: Row) -> float:
    """How much longer a step took than was predicted for the network as it was first."""
    measured_s: float = found.get("step_before_s", found["step_s"])
    return measured_s / float(found["predicted_s"]) - 1


def _rounds(found: Row) -> bool:
    """Whether a stage of this plan of ours sends by a codec that rounds; told as in "host: 0..8, bf16, window 4"."""
    return any(stage.split(", ")[-2] not in ("none", "lossless") for stage in found.get("stages", ()))


def _filled_s(found: Sequence[Row], bound: Mapping[str, float]) -> float:
    return bound["filled_16_bit" if any(_rounds(r) for r in _good(found)) else "filled"]


def _differ(found: Sequence[Row]) -> bool:
    """Losses that are not the plain loop's, though nothing was rounded."""
    return any(r["loss_difference"] > SAME and not _rounds(r) for r in _good(found))


def _limit(found: Sequence[Row]) -> str:
    """The line that is full, or the busiest; what members reported of their waits; predictions; the steps before and after a
    trace's change; losses that are not the plain loop's."""
    good = _good(found)
    busiest = statistics.median(r["busiest_line_share"] for r in good)
    said = [f"{good[-1]['busiest_line']} {100 * busiest:.0f} % busy" + (", full" if busiest >= FULL else "")]
    if predicted := [r["predicted_s"] for r in good if r.get("predicted_s")]:
        said.append(f"{statistics.median(predicted):.2f} s predicted")
    if limits := dict.fromkeys(r["limit"] for r in good if r.get("limit")):
        said.append(f"reports say: {' / '.join(limits)}")
    if any("step_after_s" in r and "step_before_s" in r for r in good):
        both = [(r["step_before_s"], r["step_after_s"]) for r in good if "step_after_s" in r and "step_before_s" in r]
        said.append(
            f"{statistics.median(b for b, _ in both):.2f} s before, {statistics.median(a for _, a in both):.2f} s after"
        )
    if (busy := max(r.get("cores_busy", 0.0) for r in good)) > BUSY:
        said.append(f"CORES {100 * busy:.0f} % BUSY")
    worst = max(r["loss_difference"] for r in good)
    if _differ(found):
        said.append(f"LOSSES DIFFER by {worst:.1e}")
    elif worst > SAME:
        said.append(f"losses off by {worst:.1e}, as it rounds")
    return "; ".join(said)
