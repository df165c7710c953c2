"""`meshcee status`: join as an observer, look for a moment, print, leave."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from meshcee.errors import UsageError
from meshcee.files import Home, dumps
from meshcee.plan import Plan
from peers.cli.session import Screen, configure_logging, run_async
from peers.cli.view import plan_table
from peers.measure import MOST_MEASURED_BYTES_PER_S
from peers.node import JoinOptions, join

__all__ = ["run_status", "show"]


def run_status(token: str | None, *, as_json: bool) -> None:
    configure_logging(as_json=as_json, level="warning")
    data = run_async(_look(_required(token)))
    if as_json:
        print(dumps(data), flush=True)
    else:
        show(data)


def _required(token: str | None) -> str:
    if token is None:
        raise UsageError("say which mesh: --join TOKEN, the line that `meshcee peer` printed (or set MESHCEE_JOIN)")
    return token


async def _look(token: str) -> dict[str, Any]:
    async with join(JoinOptions(token=token, name="status", observes=True), Home()) as mesh:
        return await mesh.agent.status()


def rate(bytes_per_s: float) -> str:
    if bytes_per_s >= MOST_MEASURED_BYTES_PER_S:
        return f"over {MOST_MEASURED_BYTES_PER_S * 8 / 1e9:.0f} Gbit/s"
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def show(data: dict[str, Any]) -> None:
    """For people."""
    console = Screen()
    names = {p["peer"]: p["name"] for p in data["peers"]}
    table = Table(title=f"{len(data['peers'])} peers", title_justify="left")
    for column in ("peer", "id", "kernel class", "memory", "speed", "state", "address"):
        table.add_column(column)
    for p in data["peers"]:
        mark = " *" if data["coordinator"] and p["peer"] == data["coordinator"]["peer"] else ""
        device = p["device"]
        table.add_row(
            p["name"] + mark,
            "…" + p["peer"][-8:],
            p["kernels"] if device else "owner",
            f"{device['memory_bytes'] / 2**30:.1f} GiB" if device else "-",
            f"{device['speed_flops_per_s'] / 1e9:.1f} GFLOP/s" if device else "-",
            p["state"],
            (p["addresses"] or ["-"])[0].split("/p2p/")[0],
        )
    console.print(table)
    for p in data["peers"]:
        if p["outside"]:
            console.print(f'{p["name"]} runs {p["outside"]}: jobs use it only with Job(mix="versions")')
    apart: dict[str, list[str]] = {}
    for p in data["peers"]:
        if p["device"]:
            behind = ", ".join(p["guards"] or ("no guard that is known yet",))
            where = "in the process that holds the keys" if p["guards"] is None else f"apart, behind {behind}"
            apart.setdefault(where, []).append(p["name"])
    for where, checking in apart.items():
        console.print(f"graphs of others are checked {where}: {', '.join(checking)}")
    coordinator = data["coordinator"]
    if coordinator:
        console.print(
            f"* coordinator: {names.get(coordinator['peer'], coordinator['peer'])}, term {coordinator['term']}"
        )
    else:
        console.print("no coordinator at the moment")
    if data["links"]:
        links = Table(title="links", title_justify="left")
        for column in ("from", "to", "latency", "bandwidth"):
            links.add_column(column)
        for link in data["links"]:
            links.add_row(
                names.get(link["from"], link["from"][-8:]),
                names.get(link["to"], link["to"][-8:]),
                f"{link['latency_s'] * 1e3:.1f} ms",
                rate(link["bandwidth_bytes_per_s"]),
            )
        console.print(links)
    for run in data["runs"]:
        if run["plan"] is None:
            console.print(f"run {run['job']}: {run['state']}, owner {names.get(run['owner'], run['owner'][-8:])}")
            continue
        console.print(
            f"run {run['job']}: step {run['step'] + 1}, loss {run['loss']:.4f}, owner {names.get(run['owner'], run['owner'][-8:])}"
        )
        console.print(plan_table(Plan.from_json(run["plan"]), names))
    if not data["runs"]:
        console.print("no job is running")
