"""Who is near whom: regions, from what peers measured of one another, and whose links a peer should measure.

The idea: two peers are near when a boundary tensor gets from one to the other quickly. Single linkage on the logarithm of
that time gives a row of merges. Where consecutive merges differ most, and by at least a factor of three, is the border
between "inside a region" and "between regions". Links as short as a LAN's are inside whatever their ratio, which is noise
or the difference between a wire and no wire. What people say of regions is a hint that measurement may overrule.

Peers as short as a LAN apart may be in several regions, when what joins them is thin. They are in one area all the same:
nobody has measured two of their links at once. So what goes from one area to another is taken to share one line.

Up to FEW peers everybody measures everybody. Beyond, everybody first measures a few landmarks, and peers that are as far from
each landmark are taken for neighbours. They measure each other, and leave the links to others to their first peer. Every peer
decides for itself from the same published links, and needs no coordinator. What nobody measured has its regions' figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median

import networkx as nx
from networkx.utils import UnionFind

from meshcee.errors import UsageError
from meshcee.figures import FEW, Cluster, Device, DeviceProfile, LinkProfile

__all__ = ["NEAR_LATENCY_S", "cluster_of", "find_regions", "whom_to_probe"]

LEAST_GAP = 3.0  # between the slowest link inside a region and the fastest between regions
# What is near whatever the ratio: 10 ms there and back at most (a LAN has 0.1 to 4, by radio too; the two nearest cities of
# the testbeds 11), and 20 ms for the bytes of a boundary tensor, of which 1 MB counts (8 ms at 1 Gbit/s). The rest is for
# machines that are busy.
NEAR_LATENCY_S = 0.005
NEAR_SEND_S = 0.02
NEAR_BYTES = 1e6
ODD = 2.0  # a pair whose time differs from its regions' by this factor keeps a line of its own
ALIKE = 1.1  # speeds within this factor are one kind, once there are many devices
APART = 8  # devices that are all told apart


def find_regions(
    peers: Sequence[str], links: Mapping[tuple[str, str], LinkProfile], tensor_bytes: float
) -> list[list[str]]:
    """Regions in the order of their first peers. Peers that nobody measured are alone."""
    place = {p: i for i, p in enumerate(peers)}
    pairs: dict[tuple[str, str], tuple[bool, float]] = {}  # whether it is far, and log seconds
    for (a, b), link in links.items():
        if a != b and a in place and b in place:
            seconds = math.log(max(link.latency_s + tensor_bytes / link.bandwidth_bytes_per_s, 1e-9))
            pair = (a, b) if place[a] < place[b] else (b, a)
            found = (not _is_near(link, tensor_bytes), seconds)
            pairs[pair] = max(pairs.get(pair, found), found)  # the slower direction counts
    joined = UnionFind(peers)
    merges: list[tuple[bool, float, str, str]] = []
    for (a, b), (far, seconds) in sorted(pairs.items(), key=lambda x: x[1]):
        if joined[a] != joined[b]:
            joined.union(a, b)
            merges.append((far, seconds, a, b))
    gaps = [(b[1] - a[1], (a[1] + b[1]) / 2) for a, b in pairwise(merges) if b[0]]
    gap, border = max(gaps, default=(0.0, math.inf))
    if gap < math.log(LEAST_GAP):
        border = math.inf
    near = nx.Graph()
    near.add_nodes_from(peers)
    near.add_edges_from((a, b) for far, seconds, a, b in merges if not far or seconds < border)
    groups = [sorted(group, key=place.__getitem__) for group in nx.connected_components(near)]
    return sorted(groups, key=lambda g: place[g[0]])


def _is_near(link: LinkProfile, tensor_bytes: float) -> bool:
    """By the best that was measured: a machine that is busy makes its links look longer, never shorter."""
    bandwidth = (link.bandwidth_range_bytes_per_s or (link.bandwidth_bytes_per_s,))[-1]
    return _is_short(link) and min(tensor_bytes, NEAR_BYTES) / bandwidth <= NEAR_SEND_S


def _is_short(link: LinkProfile) -> bool:
    return (link.latency_range_s or (link.latency_s,))[0] <= NEAR_LATENCY_S


def _areas(region_of: Mapping[str, str], links: Mapping[tuple[str, str], LinkProfile]) -> list[list[str]]:
    """Regions that short links join, where there are several."""
    joined = UnionFind(region_of.values())
    for (a, b), link in links.items():
        if _is_short(link):
            joined.union(region_of[a], region_of[b])
    areas: dict[str, list[str]] = {}
    for region in dict.fromkeys(region_of.values()):
        areas.setdefault(joined[region], []).append(region)
    return [regions for regions in areas.values() if len(regions) > 1]


def cluster_of(
    devices: Mapping[str, DeviceProfile],
    links: Mapping[tuple[str, str], LinkProfile],
    tensor_bytes: float,
    hints: Mapping[str, str] | None = None,
) -> Cluster:
    """A cluster as its peers measured it; `notes` says which hints were overruled and which links are guesses."""
    if not devices:
        raise UsageError("no peer lends a device: start one with `meshcee peer --join TOKEN`")
    peers = list(devices)
    known = {k: v for k, v in links.items() if k[0] in devices and k[1] in devices and k[0] != k[1]}
    for (a, b), link in list(known.items()):
        known.setdefault((b, a), link)  # only one direction was measured
    notes: list[str] = []
    region_of: dict[str, str] = {}
    for i, group in enumerate(find_regions(peers, known, tensor_bytes)):
        said = [hints[p] for p in group if hints and p in hints]
        name = max(dict.fromkeys(said), key=said.count) if said else f"region-{i}"
        name = name if name not in region_of.values() else f"{name}-{i}"
        for peer in group:
            region_of[peer] = name
            if hints and hints.get(peer, name) != name:
                notes.append(f"{peer} said it is in {hints[peer]}, but its links say {name}")
    kinds = _kinds(devices)
    grouped: dict[tuple[str, str], list[LinkProfile]] = {}
    for (a, b), link in known.items():
        grouped.setdefault((region_of[a], region_of[b]), []).append(link)
    inside = {
        r: median([x.latency_s for x in grouped.get((r, r), [])] or [0.0]) for r in dict.fromkeys(region_of.values())
    }
    between = {
        pair: LinkProfile(median(x.latency_s for x in found), max(x.bandwidth_bytes_per_s for x in found))
        for pair, found in grouped.items()
        if pair[0] != pair[1]
    }
    ports: dict[str, float] = {}
    for (a, b), link in known.items():  # no port is slower than the fastest that was seen through it
        for peer in (a, b):
            ports[peer] = max(ports.get(peer, 0.0), link.bandwidth_bytes_per_s)
    together = Counter(d.host for d in devices.values() if d.kind == "cpu")
    members = []
    for p, d in devices.items():
        host = d.host if d.kind == "cpu" and d.cores and together[d.host] > 1 else ""
        load = d.threads / d.cores if host else 0.0
        members.append(Device(p, kinds[p], region_of[p], d.memory_bytes, ports.get(p, math.inf), host, load))
    areas = _areas(region_of, known)
    plain = Cluster(members, inside_latency_s=inside, between=between, areas=areas)
    odd = {}
    for (a, b), link in known.items():
        path = plain.path(a, b)
        seconds = link.latency_s + tensor_bytes / link.bandwidth_bytes_per_s
        if path is None or not 1 / ODD < path.seconds(tensor_bytes) / max(seconds, 1e-9) < ODD:
            odd[a, b] = link
    cluster = Cluster(members, inside_latency_s=inside, between=between, measured=odd, areas=areas)
    cluster.notes += notes
    missing = [(a, b) for a in peers for b in peers if a != b and (a, b) not in known]
    if missing:
        notes_of = f"{len(missing)} ordered pairs were not measured; their regions' figures stand in"
        cluster.notes.append(notes_of)
    return cluster


def _kinds(devices: Mapping[str, DeviceProfile]) -> dict[str, str]:
    """Which devices may count as alike. Few are all told apart."""
    if len(devices) <= APART:
        return {p: p for p in devices}
    kinds: dict[str, str] = {}
    leaders: list[tuple[str, DeviceProfile]] = []
    for peer, device in sorted(devices.items(), key=lambda x: (x[1].speed_flops_per_s, x[0])):
        for leader, first in leaders:
            alike = device.speed_flops_per_s <= ALIKE * first.speed_flops_per_s
            if alike and (device.kind, device.name) == (first.kind, first.name):
                kinds[peer] = leader
                break
        else:
            leaders.append((peer, device))
            kinds[peer] = peer
    return kinds


LANDMARKS = 6
NEIGHBOURS = 24  # of its own region that a peer measures
PLACE_S, PLACE = 0.003, 0.3  # latencies to a landmark may differ by so much, absolutely and relatively

Links = Mapping[tuple[str, str], LinkProfile]


def whom_to_probe(me: str, peers: Sequence[str], links: Links, failing: Collection[str] = ()) -> list[str]:
    """Peers to which `me` should measure its link, most telling first. `links`: what everybody has published.

    Of the landmarks those that `me` tries in vain (`failing`) say nothing; the others are waited for.
    """
    others = sorted(set(peers) - {me})
    if len(others) < FEW:
        return others
    everybody = sorted({me, *others})
    landmarks = everybody[:LANDMARKS]
    wanted = [p for p in landmarks if p != me]
    if any((me, p) not in links for p in wanted if p not in failing):
        return wanted
    landmarks = [p for p in landmarks if (me, p) in links or p == me]
    regions = _neighbourhoods(everybody, landmarks, links)
    own = next(region for region in regions if me in region)
    if me == own[0]:
        wanted += [region[0] for region in regions if region is not own]
    # the next ones in a circle, so that together they cover the region evenly
    at = own.index(me)
    wanted += [*own[at + 1 :], *own[:at]][:NEIGHBOURS]
    return list(dict.fromkeys(wanted))


def _neighbourhoods(peers: Sequence[str], landmarks: Sequence[str], links: Links) -> list[list[str]]:
    """Peers in the order of their names, each with the first that is as far from every landmark; the unmeasured alone."""
    places = {p: _place(p, landmarks, links) for p in peers}
    regions: list[list[str]] = []
    for peer in peers:
        place = places[peer]
        home = next((r for r in regions if place is not None and _as_far(place, places[r[0]])), None)
        if home is None:
            regions.append([peer])
        else:
            home.append(peer)
    return [r for r in regions if places[r[0]] is not None] + [[p] for p in peers if places[p] is None]


def _place(peer: str, landmarks: Sequence[str], links: Links) -> list[float] | None:
    """Seconds to each landmark, none to itself; None while any is not measured."""
    if any(mark != peer and (peer, mark) not in links for mark in landmarks):
        return None
    return [0.0 if mark == peer else links[peer, mark].latency_s for mark in landmarks]


def _as_far(a: Sequence[float], b: Sequence[float] | None) -> bool:
    return b is not None and all(abs(x - y) <= PLACE_S + PLACE * max(x, y) for x, y in zip(a, b))
