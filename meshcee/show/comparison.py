"""A comparison as a table, and the gain of more hardware in sentences.

The idea: one line for each alternative, in figures that a person can weigh: seconds, bytes, shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshcee.figures.amounts import size
from meshcee.planner import Comparison, Found, Row
from meshcee.show.words import with_names

__all__ = ["comparison_text"]

HEADINGS = ("", "step", "times", "crosses links", "fullest device", "bits", "stages")
RIGHT = (1, 2, 3)  # columns of figures
CODECS = {"lossless": "exact", "bf16": "16 bits", "int8": "8 bits", "int4": "4 bits"}
MANY = 10.0  # times as much, from which on nobody asks for percents
LONGER = 0.995  # times the plan's step: what a longer search found is worth a word
NAMED = 3  # devices that are named of those that are alike
FASTER = "* faster than the plan, which could have been it: this search was longer, or the plan keeps its pace better as links vary"


def comparison_text(compared: Comparison, names: Mapping[str, str] | None = None) -> str:
    """The table and the sentences. `names`: of peers that have ids."""
    named = names or {}
    taken = compared.chosen
    lines = [("the plan", *_figures(taken, taken, named), "")]
    for row in compared.rows:
        mark = " *" if compared.is_faster(row) else ""
        if row.found is not None:
            note = f"({with_names(row.why, named)})" if row.why else ""
            lines.append((_what(row, named) + mark, *_figures(row.found, taken, named), note))
        else:
            lines.append((_what(row, named), *[""] * (len(HEADINGS) - 1), _why_not(row, named)))
    text = [_aligned(lines)]
    if any(compared.is_faster(row) for row in compared.rows):
        text.append(FASTER)
    elif compared.best_s < LONGER * compared.chosen.step_s:
        text.append(f"a longer search found {compared.best_s:.4g} s a step on the devices that are there")
    text += ["", "to buy:", *(f"  {_bought(row, compared.best_s, named)}" for row in compared.buys)]
    return "\n".join(text)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """The last of each line is a note, which takes the place of figures where there are none."""
    figures = [HEADINGS, *(line[:-1] for line in lines)]
    widths = [max(len(line[column]) for line in figures) for column in range(len(HEADINGS))]
    text = []
    for line in [(*HEADINGS, ""), *lines]:
        *cells, note = line
        if not any(cells[1:]) and note:
            cells, note = [cells[0]], note
        shown = [c.rjust(w) if k in RIGHT else c.ljust(w) for k, (c, w) in enumerate(zip(cells, widths))]
        text.append("  ".join([*shown, note]).rstrip())
    return "\n".join(text)


def _figures(found: Found, taken: Found, names: Mapping[str, str]) -> tuple[str, ...]:
    ratio = found.step_s / taken.step_s
    share = found.needed_bytes / found.memory_bytes
    held = f"{size(found.needed_bytes)}, {share:.0%} of {_name(found.fullest, names)}"
    stages = " + ".join(str(len(pipeline.stages)) for pipeline in found.plan.pipelines)
    return (
        f"{found.step_s:.4g} s",
        f"{ratio:.2f}" if ratio < MANY else f"{ratio:.0f}",
        size(found.sent_bytes),
        held,
        _bits(found),
        stages,
    )


def _bits(found: Found) -> str:
    """Whether the bits are plain PyTorch's, or the coarsest thing that changes them."""
    if found.rounded_to is not None:
        return f"rounded to {found.rounded_to} bits"
    if found.plan.shares_samples:
        return "sums reordered"
    return "equal" if found.kernel_classes == 1 else "equal per kernel class"


def _name(peer: str, names: Mapping[str, str]) -> str:
    """A device that could be bought is named after one that is there."""
    new = " (new)"
    return names.get(peer.removesuffix(new), peer.removesuffix(new)) + new * peer.endswith(new)


def _like(peers: Sequence[str], names: Mapping[str, str]) -> str:
    """One device, and those that are like it."""
    first, *others = (_name(peer, names) for peer in peers)
    if not others:
        return first
    more = ", ".join(others) if len(others) < NAMED else f"{len(others)} more like it"
    return f"{first} (or {more})"


def _what(row: Row, names: Mapping[str, str]) -> str:
    if row.kind == "codec":
        form = "" if row.several is None else ", several pipelines" if row.several else ", one pipeline"
        return f"codec {row.codec} ({CODECS[row.codec]}){form}"
    if row.kind == "pipelines":
        return "several pipelines" if row.several else "one pipeline"
    return f"{row.kind} {_like(row.peers, names)}"


def _why_not(row: Row, names: Mapping[str, str]) -> str:
    if row.short is None:
        return with_names(row.why, names)
    who = _name(row.short.peer, names) if row.short.peer else "all devices together"
    verb = "has" if row.short.peer else "have"
    return f"does not fit: needs {size(row.short.needed_bytes)}, {who} {verb} {size(row.short.memory_bytes)}"


def _bought(row: Row, best_s: float, names: Mapping[str, str]) -> str:
    ends = [_name(end, names) for end in row.place]
    if row.kind == "link":
        which = f"of {_name(row.peers[0], names)}" if len(row.peers) == 1 else f"between {ends[0]} and {ends[1]}"
        what = f"the link {which} twice as fast, {8 * row.amount / 1e6:.4g} Mbit/s"
    elif row.kind == "device":
        what = f"one more device like {_name(row.peers[0], names)}, in {ends[0]}"
    else:
        what = f"twice the memory on {_name(row.peers[0], names)}, {size(row.amount)}"
    if row.found is None:
        return f"{what}: {row.why}"
    gain = best_s / row.found.step_s
    said = f"{1 - 1 / gain:.0%} less" if gain < MANY else f"{gain:.0f} times as fast"
    return f"{what}: {row.found.step_s:.4g} s a step, {said}"
