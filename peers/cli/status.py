"""`meshcee status`: join as an observer, look for a moment, print, leave; with --watch look again and again.

The idea: what is seen is a value, and what people read is made from it alone. Whoever watches prints again when that has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from meshcee.errors import UsageError
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from meshcee.plan import Plan
from peers.cli.session import Screen, configure_logging, run_async, waiting
from peers.cli.view import GONE, called, plan_table
from peers.measure import MOST_MEASURED_BYTES_PER_S
from peers.node import JoinOptions, join

__all__ = ["report", "run_status", "show", "telling", "watch"]

LOOKS_EVERY_S = 1.0


def run_status(token: str | None, *, as_json: bool, watches: bool = False) -> None:
    configure_logging(as_json=as_json, level="warning")
    if watches:
        over, up = asyncio.Event(), asyncio.Event()

        def polite() -> bool:
            over.set()
            return up.is_set()  # while it joins it can only be cancelled

        run_async(_watch(_required(token), over, up, as_json=as_json), polite)
        return
    with waiting("joining the mesh, to look at it", as_json=as_json):
        data = run_async(_look(_required(token)))
    if as_json:
        write_fact(data)
    else:
        show(data)


def _required(token: str | None) -> str:
    if token is None:
        raise UsageError("say which mesh: --join TOKEN, the line that `meshcee peer` printed (or set MESHCEE_JOIN)")
    return token


async def _look(token: str) -> dict[str, Any]:
    async with join(JoinOptions(token=token, name="status", observes=True), Home()) as mesh:
        return await mesh.agent.status()


async def _watch(token: str, over: asyncio.Event, up: asyncio.Event, *, as_json: bool) -> None:
    async with join(JoinOptions(token=token, name="status", observes=True), Home()) as mesh:
        up.set()
        with telling(Screen(), as_json=as_json) as tell:
            await watch(mesh.agent.status, tell, over)


@contextlib.contextmanager
def telling(console: Screen, *, as_json: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What shows a mesh. A screen is drawn anew, and what was seen last stays when it ends; elsewhere changes are printed."""
    if as_json:
        yield lambda data: write_fact(data)
    elif not console.is_live:
        yield brief(console)
    else:
        seen: dict[str, Any] = {}

        def draw(data: dict[str, Any]) -> None:
            seen.update(data)
            live.update(report(data), refresh=True)

        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield draw
        if seen:
            show(seen, console)


def brief(console: Screen) -> Callable[[dict[str, Any]], None]:
    """Shows all that is new, and where runs have only got on, a line for each."""
    shown: dict[str, Any] = {}

    def tell(data: dict[str, Any]) -> None:
        still = {**data, "runs": [{**run, "step": None, "loss": None} for run in data["runs"]]}
        if still != shown:
            show(data, console)
        else:
            console.print(
                "\n".join(_run(run, called({p["peer"]: p["name"] for p in data["peers"]})) for run in data["runs"])
            )
        shown.clear()
        shown.update(still)

    return tell


async def watch(
    look: Callable[[], Awaitable[dict[str, Any]]], tell: Callable[[dict[str, Any]], None], over: asyncio.Event
) -> None:
    """Look every second, tell what has changed, until it is over; the first look counts as a change."""
    before: dict[str, Any] | None = None
    while not over.is_set():
        data = await look()
        if data != before:
            tell(data)
            before = data
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKS_EVERY_S):
                await over.wait()


def rate(bytes_per_s: float) -> str:
    if bytes_per_s >= MOST_MEASURED_BYTES_PER_S:
        return f"over {MOST_MEASURED_BYTES_PER_S * 8 / 1e9:.0f} Gbit/s"
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def show(data: dict[str, Any], console: Screen | None = None) -> None:
    """For people."""
    (console or Screen()).print(report(data))


def report(data: dict[str, Any]) -> RenderableType:
    """Peers, who checks graphs where, the coordinator, links and runs, in this order."""
    names = called({p["peer"]: p["name"] for p in data["peers"]})
    found: list[RenderableType] = [_peers(data, names)]
    for p in data["peers"]:
        if p["outside"]:
            found.append(f'{names[p["peer"]]} runs {p["outside"]}: jobs use it only with Job(mix="versions")')
    apart: dict[str, list[str]] = {}
    for p in data["peers"]:
        if p["device"]:
            behind = (
                f"behind {', '.join(p['guards'])}" if p["guards"] else "in a process whose guards are not known yet"
            )
            where = "in the process that holds the keys" if p["guards"] is None else f"apart, {behind}"
            apart.setdefault(where, []).append(names[p["peer"]])
    found += [f"graphs of others are checked {where}: {', '.join(checking)}" for where, checking in apart.items()]
    for p in data["peers"]:
        for name, samples in p.get("datasets", {}).items():
            found.append(f"dataset {name} stays at {names[p['peer']]}, with {samples} samples")
    coordinator = data["coordinator"]
    if coordinator:
        found.append(f"* coordinator: {names.get(coordinator['peer'], GONE)}, term {coordinator['term']}")
    else:
        found.append("no coordinator at the moment")
    if data["links"]:
        found.append(_links(data, names))
    for run in data["runs"]:
        found.append(_run(run, names))
        if run["plan"] is not None:
            found.append(plan_table(Plan.from_json(run["plan"]), names))
    if not data["runs"]:
        found.append("no job is running")
    return Group(*found)


def _run(run: dict[str, Any], names: dict[str, str]) -> str:
    loss = run.get("loss")  # of a finished step; where the plan is too long for a record, the record has none
    done = f"step {run['step'] + 1}, loss {loss:.4f}" if loss is not None and math.isfinite(loss) else run["state"]
    return f"run {run['job']}: {done}, owner {names.get(run['owner'], GONE)}"


def _peers(data: dict[str, Any], names: dict[str, str]) -> Table:
    table = Table(title=f"{len(data['peers'])} peers", title_justify="left")
    for column in ("peer", "kernel class", "memory", "speed", "state", "address"):
        table.add_column(column, no_wrap=column in ("peer", "state"))  # a narrow terminal takes from the others
    for p in data["peers"]:
        mark = " *" if data["coordinator"] and p["peer"] == data["coordinator"]["peer"] else ""
        device = p["device"]
        table.add_row(
            names[p["peer"]] + mark,
            p["kernels"] if device else "owner",
            f"{device['memory_bytes'] / 2**30:.1f} GiB" if device else "-",
            f"{device['speed_flops_per_s'] / 1e9:.1f} GFLOP/s" if device else "-",
            p["state"],
            (p["addresses"] or ["-"])[0].split("/p2p/")[0],
        )
    return table


def _links(data: dict[str, Any], names: dict[str, str]) -> Table:
    links = Table(title="links", title_justify="left")
    for column in ("from", "to", "latency", "bandwidth"):
        links.add_column(column)
    for link in data["links"]:
        links.add_row(
            names.get(link["from"], GONE),
            names.get(link["to"], GONE),
            f"{link['latency_s'] * 1e3:.1f} ms",
            rate(link["bandwidth_bytes_per_s"]),
        )
    return links
