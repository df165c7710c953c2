"""Emulates the devices and links of a testbed on one machine: paced compute, shaped transports, no root.

The idea: relative speeds are kept, absolute ones cannot be: all devices of a shape together are paced to what a small
machine computes with ease, so that pacing and not the processor decides. Links are the testbed's own.
"""

from __future__ import annotations

from meshcee.profile import LinkProfile
from meshcee.testbed import Testbed, gpu_speed_flops_per_s, load_testbed
from peers.compute import Pace
from peers.transport.shape import Shape

__all__ = ["TOTAL_FLOPS_PER_S", "device_names", "pace_of", "shape_of"]

TOTAL_FLOPS_PER_S = 6e9  # all devices of a shape together; two cores of 2020 compute about ten times as much


def device_names(where: str) -> list[str]:
    """The devices of a shape, which are also the names of its peers."""
    return [device.name for device in load_testbed(where).devices]


def pace_of(testbed: Testbed, name: str) -> Pace:
    """This device's share of the emulated total."""
    total = sum(gpu_speed_flops_per_s(device.gpu) for device in testbed.devices)
    return Pace(gpu_speed_flops_per_s(testbed.device(name).gpu) / total * TOTAL_FLOPS_PER_S)


def shape_of(testbed: Testbed, name: str) -> Shape:
    """What this device sends: a link to every other, its port, and its region's line to each other region.

    A line shared by several devices is exact within one process only: each process shapes what it sends itself.
    """
    me = testbed.device(name)
    links: dict[tuple[str, str], LinkProfile] = {}
    for other in testbed.devices:
        if other != me:
            links[name, other.name] = testbed.link(me, other)
            links[other.name, name] = testbed.link(other, me)
    port = testbed.regions[me.region].bandwidth_bytes_per_s
    return Shape(links, ports={name: port}, jitter_s=testbed.jitter_s)
