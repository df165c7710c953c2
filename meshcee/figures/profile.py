"""What is known of devices, links and blocks: the numbers that a planner may use.

The idea: plain frozen values with units in their names, validated on construction, so that an absurd figure from the
network is refused here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from meshcee.errors import ProtocolError, UsageError
from meshcee.fields import Count, Finite, Name, NotNegative, ShortText
from meshcee.figures.versions import Versions

__all__ = ["AT_HAND", "BlockCost", "Cluster", "Device", "DeviceProfile", "LinkProfile", "Path"]

MAX_FINGERPRINTS = 8  # of one device
Cores = Annotated[int, Meta(ge=0, le=1 << 16)]


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not math.isfinite(value) or value <= 0:
            raise ProtocolError(f"{name} must be a positive finite number, got {value!r}")


@dataclass(frozen=True)
class DeviceProfile:
    """One device. `speed_flops_per_s` is measured (a matrix product and a small block), never a data sheet's.

    host     the same for peers that share cores and memory, for the eyes of their mesh only; "": it shares with nobody
    """

    kind: Annotated[str, Meta(max_length=16)]  # "cpu", "cuda", "mps"
    name: Name  # what the vendor calls it
    memory_bytes: Count  # what a stage may use, if nobody of the host takes part of it
    speed_flops_per_s: Finite
    threads: Cores = 1
    capability: ShortText = ""  # of a CPU: whose, and the instructions that torch's kernels use
    versions: Versions | None = None
    host: ShortText = ""
    cores: Cores = 0  # of the host
    threads_said: bool = False  # by its user: so many at most, whoever else is on the host
    memory_said: bool = False
    # What its kernels give for the same numbers (peers/device/kernels.py): names and digits. (): an older peer.
    fingerprints: Annotated[tuple[tuple[ShortText, ShortText], ...], Meta(max_length=MAX_FINGERPRINTS)] = ()

    def __post_init__(self) -> None:
        _positive(memory_bytes=self.memory_bytes, speed_flops_per_s=self.speed_flops_per_s, threads=self.threads)

    @property
    def most_threads(self) -> int:
        """With which it can compute, be it at the cost of others on its host."""
        return self.threads if self.threads_said or not self.host else max(self.threads, self.cores)


@dataclass(frozen=True)
class LinkProfile:
    """One ordered pair of peers, as measured by the sender: medians, and p10 and p90 where it measured several times."""

    latency_s: float  # one way
    bandwidth_bytes_per_s: float
    measured_at: Finite = 0.0  # wall clock, seconds since the epoch
    latency_range_s: tuple[float, float] | None = None
    bandwidth_range_bytes_per_s: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _positive(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        if not math.isfinite(self.latency_s) or self.latency_s < 0:
            raise ProtocolError(f"latency_s must be finite and not negative, got {self.latency_s!r}")
        for middle, spread in (
            (self.latency_s, self.latency_range_s),
            (self.bandwidth_bytes_per_s, self.bandwidth_range_bytes_per_s),
        ):
            if spread is not None and not 0 <= spread[0] <= middle <= spread[1] < math.inf:
                raise ProtocolError(f"p10 <= p50 <= p90 must be finite, not negative, got {spread} around {middle!r}")

    def with_share(self, share: float) -> LinkProfile:
        """What is left of it for whoever has this share of its bandwidth."""
        low, high = self.bandwidth_range_bytes_per_s or (self.bandwidth_bytes_per_s,) * 2
        span = (share * low, share * high)
        return replace(self, bandwidth_bytes_per_s=share * self.bandwidth_bytes_per_s, bandwidth_range_bytes_per_s=span)


AT_HAND = LinkProfile(0.0, 1e15)  # from a peer to itself: nothing crosses a wire


@dataclass(frozen=True)
class BlockCost:
    """The cost of one block for ONE sample of a micro-batch (parameters are per block, whatever the batch).

    `boundary_bytes` is what crosses the cut after this block, forward, per sample; `boundary_grad_bytes` what comes
    back. `activation_bytes` is held from F until W.
    """

    name: str  # the modules it covers, e.g. "h.0" or "wte..h.0"
    flops: NotNegative  # forward, per sample
    parameter_bytes: Count  # at full precision, trainable and frozen; and of buffers
    trainable_bytes: Count
    activation_bytes: Count
    boundary_bytes: Count
    boundary_grad_bytes: Count
    parameters: tuple[str, ...] = field(default=())  # original names
    full_bytes: Count = 0  # of `trainable_bytes`, those in fp32: in a bf16 job such weights are their own masters


@dataclass(frozen=True)
class Device:
    """A device of a cluster as the planner sees it. `kind` keys its block times in a Workload."""

    name: str
    kind: str
    region: str
    memory_bytes: int
    port_bytes_per_s: float = math.inf  # in each direction, shared by all that it sends or receives
    host: str = ""  # the same for devices that share cores; "": none are shared
    load: float = 0.0  # the share of its host's cores that it takes while it computes

    def __post_init__(self) -> None:
        _positive(memory_bytes=self.memory_bytes)
        if not self.port_bytes_per_s > 0:
            raise ProtocolError(f"port_bytes_per_s of {self.name} must be positive, got {self.port_bytes_per_s!r}")


@dataclass(frozen=True)
class Path:
    """How bytes get from one device to another: one latency, and the lines whose bandwidth they share with others."""

    latency_s: float
    lines: tuple[tuple[str, str], ...]  # edges of the cluster's graph
    bandwidth_bytes_per_s: float  # the least of the lines

    def seconds(self, size: float) -> float:
        """For one message on an idle path."""
        return self.latency_s + size / self.bandwidth_bytes_per_s


class Cluster:
    """Devices, regions and what joins them, as one directed graph.

    Nodes are devices and regions (written "@name"); a region is a switch. Edges are lines with a bandwidth: a device's
    port out and in, a region's line to another region, and, where peers measured each other, device to device. A path
    takes the measured line if there is one, else port, (line between regions,) port.

    areas   regions that share what joins them to others: all that goes from one area to another takes a line as fast as the
            fastest between their regions, besides. A region that is in none is an area of its own.
    """

    def __init__(
        self,
        devices: Iterable[Device],
        *,
        inside_latency_s: Mapping[str, float],
        between: Mapping[tuple[str, str], LinkProfile],
        measured: Mapping[tuple[str, str], LinkProfile] | None = None,
        areas: Iterable[Sequence[str]] = (),
    ) -> None:
        import networkx as nx  # a fifth of a second, which most commands need not wait for

        self.graph = nx.DiGraph()
        self.devices: dict[str, Device] = {}
        self.notes: list[str] = []  # figures set aside, hints overruled: for people
        self.feeds: dict[str, LinkProfile] = {}  # from the owner to devices, where anybody has measured
        self.areas = [tuple(area) for area in areas]
        for device in devices:
            if device.name in self.devices:
                raise UsageError(f"device {device.name} is there twice; give each device a name of its own")
            if device.region not in inside_latency_s:
                raise UsageError(f"device {device.name} is in region {device.region!r}, which has no network")
            self.devices[device.name] = device
            switch = "@" + device.region
            self.graph.add_node(device.name)
            self.graph.add_edge(device.name, switch, bandwidth=device.port_bytes_per_s, latency=0.0)
            self.graph.add_edge(switch, device.name, bandwidth=device.port_bytes_per_s, latency=0.0)
        if not self.devices:
            raise UsageError("the cluster has no devices; add at least one")
        self.inside_latency_s = dict(inside_latency_s)
        for (a, b), link in between.items():
            self.graph.add_edge("@" + a, "@" + b, bandwidth=link.bandwidth_bytes_per_s, latency=link.latency_s)
        for (a, b), link in (measured or {}).items():
            if a not in self.devices or b not in self.devices:
                raise UsageError(f"a link between {a} and {b} was given, but not both are devices of this cluster")
            self.graph.add_edge(a, b, bandwidth=link.bandwidth_bytes_per_s, latency=link.latency_s)
        self._paths: dict[tuple[str, str], Path | None] = {}
        self._bandwidths = {(a, b): float(edge["bandwidth"]) for a, b, edge in self.graph.edges(data=True)}
        self._area_of = {region: "@" + " + ".join(area) for area in self.areas for region in area}
        for (a, b), link in between.items():
            line = self._between(a, b)
            self._bandwidths[line] = max(self._bandwidths.get(line, 0.0), link.bandwidth_bytes_per_s)

    @property
    def regions(self) -> dict[str, list[str]]:
        """Region -> its devices, both in the order in which they were given."""
        found: dict[str, list[str]] = {}
        for device in self.devices.values():
            found.setdefault(device.region, []).append(device.name)
        return found

    def bandwidth(self, line: tuple[str, str]) -> float:
        return self._bandwidths[line]

    def shared_line(self, source: str, target: str) -> tuple[str, str] | None:
        """What the path between two devices shares with others, ports aside; None inside a region, and for strangers."""
        regions = [self.devices[name].region for name in (source, target) if name in self.devices]
        return self._between(regions[0], regions[1]) if len(set(regions)) == 2 else None

    def _between(self, a: str, b: str) -> tuple[str, str]:
        """The line between the areas of two regions, or in one area between the two."""
        line = self._area_of.get(a, "@" + a), self._area_of.get(b, "@" + b)
        return line if line[0] != line[1] else ("@" + a, "@" + b)

    def path(self, source: str, target: str) -> Path | None:
        """From one device to another; None when nothing joins them."""
        key = (source, target)
        if key not in self._paths:
            self._paths[key] = self._find_path(source, target)
        return self._paths[key]

    def _find_path(self, source: str, target: str) -> Path | None:
        a, b = self.devices[source].region, self.devices[target].region
        out, into = (source, "@" + a), ("@" + b, target)
        joined = a != b and self.graph.has_edge("@" + a, "@" + b)
        crossed = tuple(dict.fromkeys((("@" + a, "@" + b), self._between(a, b)))) if joined else ()
        lines: tuple[tuple[str, str], ...]
        if self.graph.has_edge(source, target):
            edge = self.graph.edges[source, target]
            lines, latency = ((source, target), out, into, *crossed), float(edge["latency"])
        elif a == b:
            lines, latency = (out, into), self.inside_latency_s[a]
        elif joined:
            lines, latency = (out, *crossed, into), float(self.graph.edges["@" + a, "@" + b]["latency"])
        else:
            return None
        lines = tuple(line for line in lines if math.isfinite(self.bandwidth(line)))
        least = min((self.bandwidth(line) for line in lines), default=math.inf)
        return Path(latency, lines, least)
