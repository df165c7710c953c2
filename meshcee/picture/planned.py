"""The picture of a plan that nobody trains by yet: `meshcee plan --html`.

The idea: what a cluster is and what the simulator expects stand where records and reports stand in the picture of a run, so the
same page draws both.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshcee.figures import Cluster, LinkProfile
from meshcee.figures.workload import Workload
from meshcee.picture.account import account_of
from meshcee.picture.gantt import expected_gantt
from meshcee.picture.layout import places
from meshcee.picture.values import Link, Mesh, Peer, Picture
from meshcee.plan import Plan
from meshcee.simulator import simulate

__all__ = ["picture_of_plan"]

MOST_PAIRS = 60 * 60  # of devices whose links are drawn


def picture_of_plan(
    plan: Plan, cluster: Cluster, workload: Workload, names: Mapping[str, str], words: str, at: float
) -> Picture:
    """`words` explain it."""
    account = account_of(plan, cluster, workload, names)
    timeline = simulate(plan, cluster, workload, steps=3, record=True)
    return Picture(
        at=at,
        mesh=_mesh(plan, cluster, names, at),
        plan=account.plan,
        limit=account.limit,
        helps=account.helps,
        gantt=expected_gantt(timeline, names),
        words=words,
    )


def _mesh(plan: Plan, cluster: Cluster, names: Mapping[str, str], at: float) -> Mesh:
    devices, works = cluster.devices, {*plan.peers}
    links: dict[tuple[str, str], LinkProfile] = {}
    if len(devices) ** 2 <= MOST_PAIRS:
        for a in devices:
            for b in devices:
                if a != b and (path := cluster.path(a, b)) is not None:
                    links[a, b] = LinkProfile(path.latency_s, path.bandwidth_bytes_per_s)
    hints = {name: device.region for name, device in devices.items()}
    where = places(list(devices), links, hints, regions=list(cluster.regions.values()))
    peers = []
    for name, device in devices.items():
        x, y, area = where[name]
        state = "in the plan" if name in works else "left out"
        peers.append(
            Peer(name, names.get(name, name), state, device.region, area, x, y, device.kind, device.memory_bytes)
        )
    drawn = (
        Link(a, b, x.latency_s, x.bandwidth_bytes_per_s, x.bandwidth_bytes_per_s, at) for (a, b), x in links.items()
    )
    return Mesh(at, tuple(peers), tuple(drawn))
