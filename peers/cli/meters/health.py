"""Whether a peer or a run is well, and if not, why: what `/health` answers.

The idea: a function of what is known at the moment, so a test gives it values. A run that stands still, or looks for another
plan, says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshcee.files import dumps
from peers.cli.meters.server import Answer
from peers.mesh_view import MeshView

__all__ = ["Health", "answered", "of_mesh", "of_run"]

SLOW = 10.0  # times the step before, from which on a run is said to stand still
LEAST_S = 30.0  # that a step may always take
FIRST_S = (
    600.0  # that a run may take to its plan, from there to its first step (an offer over slow links), and an evaluation
)


@dataclass(frozen=True)
class Health:
    """`reason` is a sentence, empty where all is well; `facts` are for people who look."""

    reason: str
    facts: dict[str, Any]


def answered(found: Health) -> Answer:
    """200 and the facts, or 503 with the reason before them."""
    body = {"ok": not found.reason, **({"reason": found.reason} if found.reason else {}), **found.facts}
    return 503 if found.reason else 200, "application/json", dumps(body).encode() + b"\n"


def of_mesh(agent: MeshView) -> Health:
    """In the mesh, and somebody coordinates."""
    lease, peers = agent.lease, agent.directory.peers
    coordinator = peers[lease.peer_id].name if lease is not None and lease.peer_id in peers else None
    facts = {"peers": len(peers), "coordinator": coordinator}
    if agent.peer_id not in peers:
        return Health("this peer is not seen in the mesh", facts)
    if lease is None:
        return Health("no coordinator is seen", facts)
    if coordinator is None:
        return Health("the coordinator has left the mesh, and none has followed it yet", facts)
    return Health("", facts)


def of_run(
    since_s: float, step_s: float | None, step: int, steps: int, lost: str = "", *, is_planned: bool = True
) -> Health:
    """`since_s`: since the last step, or since the beginning; `step_s`: what the last one took, if there was one."""
    facts = {"step": step, "steps": steps, "seconds_since_step": round(since_s, 3)}
    if lost:
        return Health(f"the run looks for a plan without {lost}", facts)
    patience_s = FIRST_S if step_s is None else max(LEAST_S, SLOW * step_s)
    if since_s > patience_s:
        first = "the first step is not done" if is_planned else "the job has no plan"
        return Health(f"{first if step_s is None else 'no step has been done'} for {since_s:.0f} s", facts)
    return Health("", facts)
