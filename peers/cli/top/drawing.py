"""A picture as lines and cells for a terminal.

The idea: plain functions from the picture to texts, so what is shown can be tested without a screen. Names come from other
machines: every text is made printable here, once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from meshcee.figures.amounts import amount, size
from meshcee.picture import Mesh, Picture, PlanView
from meshcee.picture.values import Seat
from peers.cli.session import printable
from peers.cli.view import called

__all__ = ["COLUMNS", "clock_of", "events", "headline", "limits", "losses", "peer_rows", "pipeline"]

COLUMNS = ("peer", "region", "device", "memory", "speed", "state", "stage", "latency", "bandwidth")
MOST_EVENTS = 200
BAR = 12  # characters


def headline(picture: Picture) -> str:
    """Who is there and what runs, in one line."""
    mesh, run = picture.mesh, picture.run
    words = []
    if mesh is not None:
        lending = sum(bool(peer.device) for peer in mesh.peers)
        leader = next((p.name for p in mesh.peers if p.peer == mesh.coordinator), None)
        words.append(f"{lending} peers")
        words.append(f"coordinator {leader}, term {mesh.term}" if leader else "no coordinator")
    if run is None:
        words.append("no job is running")
    else:
        done = f"{run.step}" + (f" of {run.steps}" if run.steps else "") + " steps"
        loss = f", loss {run.loss:.4f}" if run.loss is not None else ""
        pace = f", {run.samples_per_s:.1f} samples/s" if run.samples_per_s is not None else ""
        owner = f" of {run.owner}" if run.owner else ""
        words.append(f"{run.name}{owner}: {run.state}, {done}{loss}{pace}")
    words += [f"{job.job} of {job.owner} is {job.state}" for job in (mesh.jobs if mesh is not None else ())]
    return printable(" | ".join(words))


def peer_rows(picture: Picture) -> list[tuple[str, ...]]:
    """A row a peer, in the order of their names: COLUMNS. Its links are those to the others: the slowest that was measured."""
    if picture.mesh is None:
        return []
    mesh, names = picture.mesh, called({p.peer: p.name for p in picture.mesh.peers})
    seats: dict[str, list[str]] = {}
    for seat in picture.plan.seats if picture.plan is not None else ():
        seats.setdefault(seat.peer, []).append(f"{seat.label}: {seat.first}..{seat.end - 1}")
    rows = []
    for peer in sorted(mesh.peers, key=lambda p: (not p.device, names[p.peer])):
        mark = " *" if peer.peer == mesh.coordinator else ""
        latency_s, bandwidth = _links(mesh, peer.peer)
        rows.append(
            (
                names[peer.peer] + mark,
                peer.region or "-",
                peer.device or "owner",
                size(peer.memory_bytes) if peer.memory_bytes else "-",
                f"{amount(peer.speed_flops_per_s)}FLOP/s" if peer.speed_flops_per_s else "-",
                peer.state,
                ", ".join(seats.get(peer.peer, ())) or "-",
                f"{latency_s * 1e3:.1f} ms" if latency_s is not None else "-",
                f"{8 * bandwidth / 1e6:.0f} Mbit/s" if bandwidth is not None else "-",
            )
        )
    return [tuple(map(printable, row)) for row in rows]


def _links(mesh: Mesh, peer: str) -> tuple[float | None, float | None]:
    own = [link for link in mesh.links if link.source == peer]
    return (
        max((link.latency_s for link in own), default=None),
        min((link.bandwidth_bytes_per_s for link in own), default=None),
    )


def pipeline(picture: Picture) -> list[str]:
    """A line a stage, with what crosses to the next below it; then who is left out and why."""
    plan = picture.plan
    if plan is None:
        return ["no plan runs"]
    expected = f", {plan.step_s:.3g} s a step expected" if plan.step_s else ""
    lines = [f"micro-batches of {plan.micro_batch}{expected}"]
    lines += _stages(plan)
    lines += [f"left out: {name}: {why}" for name, why in plan.left_out]
    return [printable(line) for line in lines]


def _stages(plan: PlanView) -> Iterator[str]:
    edges = {(edge.pipeline, edge.after): edge for edge in plan.boundaries}
    members: dict[tuple[int, int], list[Seat]] = {}
    for seat in plan.seats:
        members.setdefault((seat.pipeline, seat.stage), []).append(seat)
    for place, seats in members.items():
        head = f"stage {seats[0].label}  blocks {seats[0].first}..{seats[0].end - 1}"
        for seat in seats:
            yield f"{head:<24} {seat.name} x{seat.samples}{_time(seat)}{_memory(seat)}"
            head = ""
        if (edge := edges.get(place)) is not None:
            codec = edge.codec_out if edge.codec_out == edge.codec_back else f"{edge.codec_out}, back {edge.codec_back}"
            yield f"   | {codec}" + (f", {size(edge.bytes_out)} a micro-batch" if edge.bytes_out else "")


def _time(seat: Seat) -> str:
    """As measured where it is known, else as expected."""
    if seat.total_s and seat.compute_s is not None:
        return f"  {_bar(seat.compute_s / seat.total_s)} computes {seat.compute_s:.3g} of {seat.total_s:.3g} s"
    return f"  {_bar(seat.busy)} {seat.busy:.0%} busy" if seat.busy is not None else ""


def _memory(seat: Seat) -> str:
    known = seat.needed_bytes is not None and seat.memory_bytes is not None
    took = f", took {size(seat.held_bytes)}" if seat.held_bytes is not None else ""
    return f"  {size(seat.needed_bytes or 0)} of {size(seat.memory_bytes or 0)}{took}" if known else ""


def _bar(share: float) -> str:
    full = round(BAR * min(max(share, 0.0), 1.0))
    return "#" * full + "." * (BAR - full)


def losses(picture: Picture) -> list[float]:
    """The curve, for a sparkline."""
    return [loss for loss in picture.curves.loss if loss is not None]


def limits(picture: Picture) -> list[str]:
    """What bounds the speed, and what would help; nothing where that is not known here."""
    found = [f"limit: {picture.limit}"] if picture.limit else []
    found += [f"{help.text}: {help.step_s:.3g} s a step, {help.gain:.2f} times as fast" for help in picture.helps]
    return [printable(line) for line in found]


def events(picture: Picture) -> list[str]:
    """What happened, the newest first."""
    lines = []
    for moment in reversed(picture.moments[-MOST_EVENTS:]):
        step = f" step {moment.step + 1}:" if moment.step is not None else ""
        gain = f" ({moment.gain:.2f} times as fast expected" if moment.gain is not None else ""
        measured = f", {moment.gain_measured:.2f} measured" if gain and moment.gain_measured is not None else ""
        lines.append(printable(f"{clock_of(moment.at)}{step} {moment.text}{gain}{measured}{')' * bool(gain)}"))
    return lines


def clock_of(at: float) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))
