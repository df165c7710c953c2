"""Figures that peers tell of themselves and their links, held against what others measured.

The idea: a peer may be wrong, or lie. A figure that nothing in this world has, or that contradicts what the other end of a
link or the peer's own work showed, is not believed. It is set aside in favour of the careful one, and people are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_low

from meshcee.figures import BlockTimes, DeviceProfile, LinkProfile
from meshcee.figures.amounts import size

__all__ = ["believed_devices", "believed_links", "believed_speeds"]

MOST_FLOPS_PER_S = 1e17  # ten times the fastest accelerator there is
MOST_MEMORY_BYTES = 1 << 46
MOST_BYTES_PER_S, LEAST_BYTES_PER_S = 1e12, 10.0
LONGEST_S = 30.0  # one way
SAME_ROUND_TRIP, SAME_S = (
    4.0,
    0.01,
)  # both ends measure the same round trip: it differs by this factor and more than so much
LOPSIDED = 100.0  # a link may be so many times as fast as the other way and as anything else that reaches its end
FEW = 3  # profiles, of which no middle one says who is wrong
CLAIM = 3.0  # a device may claim so many times the speed that its blocks showed, compared with the others, or a third

Pair = tuple[str, str]


def believed_devices(devices: Mapping[str, DeviceProfile], notes: list[str]) -> dict[str, DeviceProfile]:
    """Devices without those that claim what no device has."""
    found = {}
    for peer, device in devices.items():
        if device.speed_flops_per_s > MOST_FLOPS_PER_S or device.memory_bytes > MOST_MEMORY_BYTES:
            notes.append(
                f"{peer} is left out: it claims {device.speed_flops_per_s:.3g} FLOP/s and {device.memory_bytes / 2**30:.3g} "
                "GiB, which no device has"
            )
        else:
            found[peer] = device
    return found


def believed_links(
    peers: Sequence[str], links: Mapping[Pair, LinkProfile], notes: list[str]
) -> dict[Pair, LinkProfile]:
    """Links between these peers, less what is absurd, and no better than the other end bears out."""
    here = set(peers)
    sane: dict[Pair, LinkProfile] = {}
    for (a, b), link in links.items():
        if a == b or a not in here or b not in here:
            continue
        if not LEAST_BYTES_PER_S <= link.bandwidth_bytes_per_s <= MOST_BYTES_PER_S or link.latency_s > LONGEST_S:
            notes.append(
                f"what {a} says of its link to {b} is set aside: {size(link.bandwidth_bytes_per_s)}/s, {link.latency_s:.3g} s"
            )
        else:
            sane[a, b] = link
    into = _fastest_into(sane)
    found = {}
    for (a, b), link in sane.items():
        back = sane.get((b, a))
        borne = [
            x for x in (back.bandwidth_bytes_per_s if back else None, _by_others(into.get(b, ()), a)) if x is not None
        ]
        if borne and link.bandwidth_bytes_per_s > LOPSIDED * max(borne):
            notes.append(
                f"{a} says that it sends {size(link.bandwidth_bytes_per_s)}/s to {b}, and nobody else measured more "
                f"than {max(borne):.3g} there; that counts"
            )
            link = replace(link, bandwidth_bytes_per_s=max(borne), bandwidth_range_bytes_per_s=None)
        if (
            back is not None
            and back.latency_s > SAME_ROUND_TRIP * link.latency_s
            and back.latency_s - link.latency_s > SAME_S
        ):
            notes.append(
                f"{a} and {b} measured the same round trip as {2 * link.latency_s:.3g} and {2 * back.latency_s:.3g} s; "
                "the longer counts"
            )
            link = replace(link, latency_s=back.latency_s, latency_range_s=back.latency_range_s)
        found[a, b] = link
    return found


def _fastest_into(links: Mapping[Pair, LinkProfile]) -> dict[str, list[tuple[float, str]]]:
    """Per peer the two fastest links that reach it, each from another source."""
    into: dict[str, list[tuple[float, str]]] = {}
    for (a, b), link in links.items():
        into[b] = sorted([*into.get(b, ()), (link.bandwidth_bytes_per_s, a)], reverse=True)[:2]
    return into


def _by_others(fastest: Sequence[tuple[float, str]], a: str) -> float | None:
    return next((bandwidth for bandwidth, source in fastest if source != a), None)


def believed_speeds(
    devices: Mapping[str, DeviceProfile],
    times: Mapping[str, BlockTimes],
    places: Sequence[int],
    flops: Sequence[float],
    notes: list[str],
) -> tuple[dict[str, DeviceProfile], dict[str, BlockTimes]]:
    """Speeds as the job's blocks showed them; of the others, what they claim, as far as claims were right elsewhere.

    Claims are compared among devices of one kind, as a GPU's large matrix product says less of small blocks than a CPU's.
    Of fewer than FEW profiles of a kind the fastest is held to be right: one that was disturbed sets no other aside.

    Returns the devices with those speeds, and the profiles that count.
    """
    shown = {p: t.speed_flops_per_s(places, flops) for p, t in times.items()}
    for peer in [p for p, speed in shown.items() if speed > MOST_FLOPS_PER_S]:
        notes.append(f"the profile of {peer} is set aside: no device computes {shown.pop(peer):.3g} FLOP/s")
    if not shown:
        notes.append("no device has profiled the job's blocks; claimed speeds stand in")
        return dict(devices), {}
    of_kind: dict[str, list[float]] = {}
    for peer, speed in shown.items():
        of_kind.setdefault(devices[peer].kind, []).append(speed / devices[peer].speed_flops_per_s)
    every = [share for shares in of_kind.values() for share in shares]
    found, counted = {}, {}
    for peer, device in devices.items():
        shares = of_kind.get(device.kind, every)
        share = max(shares) if peer in shown and len(shares) < FEW else median_low(shares)
        claimed = share * device.speed_flops_per_s
        if peer not in shown:
            notes.append(f"{peer} has not profiled the job's blocks; {share:.2g} of its claimed speed stands in")
        elif shown[peer] > CLAIM * claimed:
            notes.append(
                f"the profile of {peer} is set aside: it is {shown[peer] / claimed:.1f} times as fast as its claimed speed "
                "bears out"
            )
        else:
            if claimed > CLAIM * shown[peer]:
                notes.append(
                    f"{peer} claims {claimed / shown[peer]:.1f} times the speed that its blocks showed; its blocks count"
                )
            claimed, counted[peer] = shown[peer], times[peer]
        found[peer] = replace(device, speed_flops_per_s=claimed)
    return found, counted
