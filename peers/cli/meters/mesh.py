"""What a peer knows of its mesh and of itself, as metrics of Prometheus.

The idea: nothing is counted in passing. Whoever asks causes one look at the directory, which is in memory. Labels are
peers' names.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from prometheus_client.registry import Collector

from meshcee import __version__
from peers.cli.meters.server import Answer
from peers.cli.view import called
from peers.mesh_view import MeshView
from peers.transport.endpoint import Endpoint

__all__ = ["MeshMeter", "exposed"]


def exposed(*collectors: Collector) -> Answer:
    """What `/metrics` answers: all that these tell, now."""
    registry = CollectorRegistry()
    for one in collectors:
        registry.register(one)
    return 200, CONTENT_TYPE_PLAIN_1_0_0, generate_latest(registry)


class MeshMeter(Collector):
    """`among`: peers whose links are told beside this one's own, such as the members of a run."""

    def __init__(
        self,
        agent: MeshView,
        among: Callable[[], Collection[str]] = frozenset,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._agent = agent
        self._among = among
        self._clock = clock
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        agent, now = self._agent, self._clock()
        peers = agent.directory.peers
        names = called(agent.names())
        own = {"version": __version__, "peer": names.get(agent.peer_id, "")}
        yield InfoMetricFamily("meshcee", "This process: its version, and its name in the mesh.", own)
        states = Counter("leaving" if r.leaving else "busy" if r.busy else "idle" for r in peers.values() if r.device)
        seen = GaugeMetricFamily("meshcee_peers", "Peers seen that lend a device, by what they do.", labels=["state"])
        for state in ("idle", "busy", "leaving"):
            seen.add_metric([state], states[state])
        yield seen
        lease = agent.lease
        yield _gauge("meshcee_coordinator_seen", "1 while a coordinator is seen.", float(lease is not None))
        yield _gauge("meshcee_coordinator_term", "Number of the lease.", float(lease.counter) if lease else 0.0)
        leads = lease is not None and lease.peer_id == agent.peer_id
        yield _gauge("meshcee_coordinating", "1 while this peer is the coordinator.", float(leads))
        jobs = Counter[str](record.state for record in agent.directory.runs.values())
        runs = GaugeMetricFamily("meshcee_jobs", "Jobs of the mesh, by what they do.", labels=["state"])
        for state in ("running", "waiting"):
            runs.add_metric([state], jobs[state])
        yield runs
        yield from self._links(names, now)
        if isinstance(agent.transport, Endpoint):
            sent, received = agent.transport.carried_bytes()
            yield CounterMetricFamily("meshcee_sent_bytes", "Bytes that this peer has sent to others.", sent)
            yield CounterMetricFamily("meshcee_received_bytes", "Bytes that it has received from others.", received)
        device = peers[agent.peer_id].device if agent.peer_id in peers else None
        lent = float(device.memory_bytes) if device is not None else 0.0
        yield _gauge("meshcee_memory_lent_bytes", "Memory that a stage may use here.", lent)
        yield _gauge(
            "meshcee_memory_resident_bytes", "Memory that this process has.", float(self._process.memory_info().rss)
        )

    def _links(self, names: dict[str, str], now: float) -> Iterator[Metric]:
        ends = ["source", "target"]
        what = "of a link, as its first end measured it."
        wide = GaugeMetricFamily("meshcee_link_bandwidth_bytes_per_second", f"Bandwidth {what}", labels=ends)
        late = GaugeMetricFamily("meshcee_link_latency_seconds", f"Latency one way {what}", labels=ends)
        old = GaugeMetricFamily("meshcee_link_age_seconds", f"Age of the figures {what}", labels=ends)
        here = self._agent.peer_id
        among = {*self._among(), here}
        for source, record in sorted(self._agent.directory.links.items()):
            for target, link in record.links:
                if source in names and target in names and (source == here or {source, target} <= among):
                    pair = [names[source], names[target]]
                    wide.add_metric(pair, link.bandwidth_bytes_per_s)
                    late.add_metric(pair, link.latency_s)
                    old.add_metric(pair, max(0.0, now - link.measured_at))
        yield from (wide, late, old)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value)
