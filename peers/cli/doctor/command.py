"""`meshcee doctor`: gathers the facts, has them judged, prints the findings, and ends with the code of the first that is bad."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from dht import Token
from meshcee import __version__
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from peers.cli.doctor import machine
from peers.cli.doctor.facts import Device, Exactness, Facts, Guards, Invite, Mesh, Refused, Unseen
from peers.cli.doctor.finding import Finding
from peers.cli.doctor.judge import judge
from peers.cli.session import Screen, configure_logging, waiting

__all__ = ["run_doctor", "show"]

T = TypeVar("T")
MARKS = {"ok": ("ok", "green"), "warn": ("!", "yellow"), "bad": ("x", "red"), "unknown": ("?", "dim")}


def run_doctor(token: str | None, *, as_json: bool) -> None:
    """Raises the error of the first finding that is bad, once all are printed."""
    configure_logging(as_json=as_json, level="error")
    # What is no invite is the user's to mend, and no fact of the machine.
    invite = Token.parse(token) if token is not None else None
    begun_s = time.monotonic()
    looking = f"looking at this machine{' and its mesh' if token is not None else ''}, some 15 s"
    with waiting(looking, as_json=as_json):
        findings = judge(asyncio.run(_gather(token, invite, Home())))  # without uvloop, which may be what is missing
    took_s = time.monotonic() - begun_s
    if as_json:
        for finding in findings:
            write_fact({"finding": _plain(finding)})
        counts = Counter[str](finding.level for finding in findings)
        result = {"meshcee": __version__, "seconds": round(took_s, 1), **{level: counts[level] for level in MARKS}}
        write_fact({"result": result})
    else:
        show(findings, took_s, Screen())
    if bad := [finding for finding in findings if finding.error is not None]:
        names = ", ".join(dict.fromkeys(finding.what for finding in bad))
        assert bad[0].error is not None
        raise bad[0].error(f"{len(bad)} of {len(findings)} findings are bad ({names}): do what the lines marked x say")


def _plain(finding: Finding) -> dict[str, Any]:
    data = dataclasses.asdict(finding) | {"error": finding.error.__name__ if finding.error is not None else None}
    return data | {"exit_code": finding.error.exit_code if finding.error is not None else 0}


def show(findings: Sequence[Finding], took_s: float, console: Screen) -> None:
    """For people: a table in a terminal, else lines; a mend stands below what it mends. Last, what it comes to, and the seconds."""
    group = ""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("group", "mark", "what", "detail"):
        table.add_column(column, no_wrap=column != "detail", style="bold" if column == "group" else None)
    for finding in findings:
        mark, style = MARKS[finding.level]
        first = finding.group if finding.group != group else ""
        group = finding.group
        detail = Text(finding.detail)
        if finding.mend:
            detail.append(f"\n-> {finding.mend}", style="bold")
        if console.is_terminal:
            table.add_row(first, Text(mark, style=style), finding.what, detail)
        else:
            console.print(f"{first:<10} {mark:<2} {finding.what}: {finding.detail}", soft_wrap=True)
            if finding.mend:
                console.print(f"{'':<13} -> {finding.mend}", soft_wrap=True)
    if console.is_terminal:
        console.print(table)
    console.print(_sum(findings, took_s))


def _sum(findings: Sequence[Finding], took_s: float) -> str:
    """In one sentence."""
    counts = Counter[str](finding.level for finding in findings)
    if not counts["bad"] and not counts["warn"]:
        rest = f", and nobody could look at {counts['unknown']}" if counts["unknown"] else ""
        return f"all is well: {counts['ok']} findings{rest}, in {took_s:.1f} s"
    told = [f"{counts[level]} {word}" for level, word in (("bad", "bad"), ("warn", "to look at"), ("ok", "well"))]
    return f"{', '.join(told)}, {counts['unknown']} unknown, in {took_s:.1f} s"


async def _gather(token: str | None, invite: Token | None, home: Home) -> Facts:
    """Before this process starts helpers of its own, computes or joins, what is here already is looked at. The rest runs side by
    side."""
    kept = _seen(lambda: machine.passes(home))
    processes, shared = _seen(machine.processes), await asyncio.to_thread(_seen, machine.shared)
    packages = await asyncio.to_thread(machine.packages)
    device = _seen(machine.device)
    async with asyncio.TaskGroup() as group:
        guards = group.create_task(_guards())
        mesh = group.create_task(_mesh(token, home))
        network = group.create_task(asyncio.to_thread(_seen, lambda: machine.network(home)))
        exactness = group.create_task(asyncio.to_thread(_exactness, device))
    return Facts(
        time.time(),
        machine.versions(),
        packages,
        device,
        _seen(machine.memory),
        machine.folders(home),
        network.result(),
        machine.open_files(),
        guards.result(),
        kept,
        processes,
        exactness.result(),
        shared,
        mesh.result(),
        Invite(grant.root, grant.role, grant.expires_at) if invite is not None and (grant := invite.grant) else None,
    )


def _seen(look: Callable[[], T]) -> T | Unseen:
    """A look that fails is a fact too: this command is called where things are broken."""
    try:
        return look()
    except Exception as error:
        return _unseen(error)


def _unseen(error: Exception) -> Unseen:
    return Unseen(f"{type(error).__name__}: {error}")


async def _guards() -> Guards | Unseen:
    try:
        return await machine.guards()
    except Exception as error:
        return _unseen(error)


async def _mesh(token: str | None, home: Home) -> Mesh | Refused | None:
    if token is None:
        return None
    try:
        from peers.cli.doctor.mesh import look_at_mesh
    except ImportError as error:
        return Refused("JoinError", f"a library is missing: {error}")
    return await look_at_mesh(token, home)


def _exactness(device: Device | Unseen) -> Exactness | Unseen:
    if isinstance(device, Unseen):
        return device

    def test() -> Exactness:
        from peers.cli.doctor.exactness import self_test

        return self_test(device.threads, device.cores)

    return _seen(test)
