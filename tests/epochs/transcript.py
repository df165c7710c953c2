"""Runs as text: `> event` lines, and after each what the machine of meshcee/epochs/course.py asks for, and its state.

The idea: a situation is read, not decoded, and a change of behaviour is a change of a text file that a person looks at.
`python -m tests.epochs.transcript` writes the commands of all transcripts anew; look at what has changed before it is kept.

The first line after the comments makes the run: `run steps=9 disk keeps`. A plan is its members and its term, `a,b,c@1`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshcee import errors
from meshcee.epochs import course, moves
from peers.wire.suspects import Fault, Suspects

FOLDER = Path(__file__).parent / "transcripts"
EVENTS = {re.sub(r"(?<=.)([A-Z])", r" \1", kind.__name__).lower(): kind for kind in moves.Event.__args__}


def told(value: Any) -> str:
    """A value of a command, in words."""
    match value:
        case moves.Proposal():
            return f"{','.join(value.members)}@{value.term[0]}"
        case Exception():
            return f"{type(value).__name__}: {value}"
        case (int(), str()):  # a term
            return str(value[0])
        case frozenset() | tuple():
            return ",".join("-".join(one) if isinstance(one, tuple) else one for one in sorted(value)) or "nobody"
        case str():
            return value
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case _:
            return f"{value:g}"


def line_of(command: moves.Command) -> str:
    name = re.sub(r"(?<=.)([A-Z])", r" \1", type(command).__name__).lower()
    shown = [
        (f.name, told(getattr(command, f.name)))
        for f in fields(command)
        if f.repr and (f.name, getattr(command, f.name)) != ("silent", frozenset())
    ]
    return " ".join([name, *(f"{key}={shlex.quote(text)}" for key, text in shown)])


def peers_of(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


def pairs_of(text: str) -> frozenset[tuple[str, str]]:
    one_way = [tuple(pair.split("-")) for pair in text.split(",")]
    return frozenset(pair for a, b in one_way for pair in ((a, b), (b, a)))


def event_of(line: str) -> moves.Event:
    """`> failed error="PeerLostError: c is gone" stuck=b`: the event; what a line leaves out is as usual."""
    head = re.match(r"[a-z ]*[a-z](?=$| [a-z_]+=)", line)
    assert head is not None, line
    given = dict(word.partition("=")[::2] for word in shlex.split(line[head.end() :]))
    kind = EVENTS[head.group()]
    values: dict[str, Any] = {}
    if "error" in given:
        name, _, text = given.pop("error").partition(": ")
        values["error"] = getattr(errors, name)(text)
    match kind:
        case moves.Failed:
            error = values["error"]
            faults = [
                Fault(p, error, str(error), (0, 2), range(3, 4), frozenset({p}))
                for p in peers_of(given.get("faults", ""))
            ]
            parted = pairs_of(given["parted"]) if "parted" in given else frozenset()
            stuck, blamed = peers_of(given.get("stuck", "")), given.get("blamed")
            wrong_from = int(given["wrong_from"]) if "wrong_from" in given else None
            losses = moves.Losses(
                1.0, stuck, tuple(faults), parted, blamed, wrong_from=wrong_from, busy="busy" in given
            )
            return moves.Failed(error, losses)
        case moves.Found | moves.Better:
            return kind(plan_of(given["proposal"]) if given["proposal"] != "none" else None)  # type: ignore[arg-type]
    for key, text in given.items():
        if key in ("here", "leaving", "devices", "peers"):
            values[key] = peers_of(text)
        elif key == "announced":
            values[key] = {
                peer: float(at) for peer, _, at in (one.partition(":") for one in filter(None, text.split(",")))
            }
        elif text in ("yes", "no"):
            values[key] = text == "yes"
        else:
            values[key] = None if text == "none" else float(text) if key == "at" else int(text)
    if kind is moves.Stepped:
        values.setdefault("loss", 0.5)
    return kind(**values)  # type: ignore[no-any-return]


def plan_of(text: str) -> moves.Proposal:
    members, _, term = text.partition("@")
    return moves.Proposal(tuple(members.split(",")), (int(term), ""))


def begun(line: str) -> course.Course:
    """`run steps=9 told=3 done=2 keeps members=a,b`"""
    given = dict(word.partition("=")[::2] for word in line.split()[1:])
    return course.Course(
        int(given["steps"]),
        told=dict.fromkeys(range(int(given.get("told", 0))), 0.5),
        done=int(given.get("done", 0)),
        keeps="keeps" in given,
        blame=Suspects().hear,
        members=peers_of(given["members"]) if "members" in given else None,
    )


def replayed(text: str) -> Iterator[str]:
    """The lines of a transcript as the machine has them today."""
    machine: course.Course | None = None
    for line in text.splitlines():
        if line.startswith("#") or (not line and machine is None):
            yield line
        elif line.startswith("run "):
            machine = begun(line)
            yield line
            yield from (f"  {line_of(command)}" for command in machine.begin())
        elif line.startswith("> "):
            assert machine is not None
            commands = machine.handle(event_of(line[2:]))
            yield ""
            yield line
            yield from (f"  {line_of(command)}" for command in commands)
            yield f"  = {machine.state.value}"


def main() -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text("\n".join(replayed(path.read_text())) + "\n")


if __name__ == "__main__":
    main()
