"""Whose links a peer should measure, so that few probes tell enough of a large mesh.

The idea: up to FEW peers everybody measures everybody. Beyond, everybody first measures a few landmarks; peers that are as
far from each landmark are taken for one region. They measure each other, and leave the links to other regions to their first
peer. What nobody measured then has its regions' figures (planner/regions.py). Every peer decides for itself from the same
published links, and needs no coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshcee.figures import FEW, LinkProfile

__all__ = ["whom_to_probe"]

LANDMARKS = 6
NEIGHBOURS = 24  # of its own region that a peer measures
NEAR_S, NEAR = 0.003, 0.3  # latencies to a landmark may differ by so much, absolutely and relatively

Links = Mapping[tuple[str, str], LinkProfile]


def whom_to_probe(me: str, peers: Sequence[str], links: Links) -> list[str]:
    """Peers to which `me` should measure its link, most telling first. `links`: what everybody has published."""
    others = sorted(set(peers) - {me})
    if len(others) < FEW:
        return others
    everybody = sorted({me, *others})
    landmarks = everybody[:LANDMARKS]
    wanted = [p for p in landmarks if p != me]
    if any((me, p) not in links for p in wanted):
        return wanted
    regions = _regions(everybody, landmarks, links)
    own = next(region for region in regions if me in region)
    if me == own[0]:
        wanted += [region[0] for region in regions if region is not own]
    # the next ones in a circle, so that together they cover the region evenly
    at = own.index(me)
    wanted += [*own[at + 1 :], *own[:at]][:NEIGHBOURS]
    return list(dict.fromkeys(wanted))


def _regions(peers: Sequence[str], landmarks: Sequence[str], links: Links) -> list[list[str]]:
    """Peers in the order of their names, each with the first that is as far from every landmark; the unmeasured alone."""
    places = {p: _place(p, landmarks, links) for p in peers}
    regions: list[list[str]] = []
    for peer in peers:
        place = places[peer]
        home = next((r for r in regions if place is not None and _same(place, places[r[0]])), None)
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


def _same(a: Sequence[float], b: Sequence[float] | None) -> bool:
    return b is not None and all(abs(x - y) <= NEAR_S + NEAR * max(x, y) for x, y in zip(a, b))
