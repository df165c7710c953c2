"""Testbeds: clusters in a file, for planning without machines and for emulating them on one.

The idea: one schema and one loader. A testbed names regions (the network inside), devices (a GPU each, in a region),
and links between regions; a GPU's speed follows from layer times that others have measured on the real thing.

Schema: see "format" in meshcee/testbeds/testbeds.json. The GPU profiles were published by the Sailor project
(eth-easl/sailor, MIT licence).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshcee.errors import UsageError
from meshcee.profile import LinkProfile

__all__ = ["Testbed", "TestbedDevice", "gpu_speed_flops_per_s", "load_testbed"]

PACKAGED = "testbeds.json"


@dataclass(frozen=True)
class TestbedDevice:
    """One device: its name, what GPU it is, and where it stands."""

    __test__ = False  # pytest: not a test class

    name: str
    gpu: str
    region: str


@dataclass(frozen=True)
class Testbed:
    """A cluster. Links are per ordered pair of devices; `jitter_s` is what each message may be late."""

    __test__ = False

    name: str
    devices: tuple[TestbedDevice, ...]
    regions: Mapping[str, LinkProfile]
    between: Mapping[frozenset[str], LinkProfile]
    jitter_s: float = 0.0

    def link(self, source: TestbedDevice, target: TestbedDevice) -> LinkProfile:
        if source.region == target.region:
            return self.regions[source.region]
        return self.between[frozenset((source.region, target.region))]

    def device(self, name: str) -> TestbedDevice:
        for device in self.devices:
            if device.name == name:
                return device
        raise UsageError(f"testbed {self.name} has no device {name!r}; it has {', '.join(d.name for d in self.devices)}")


def load_testbed(where: str) -> Testbed:
    """ "FILE:NAME", or NAME alone for one that ships with meshcee. Raises UsageError naming what is wrong in the file."""
    file, _, name = where.rpartition(":")
    try:
        text = Path(file).read_text() if file else files("meshcee.testbeds").joinpath(PACKAGED).read_text()
        found = {str(t["name"]): t for t in json.loads(text)["testbeds"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file or PACKAGED} is not a testbed file: {error}") from error
    if name not in found:
        raise UsageError(f"there is no testbed {name!r} in {file or 'the package'}; there are {', '.join(found)}")
    try:
        return _parse(name, found[name])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"testbed {name!r}: {error!r} is missing or wrong; every region pair needs a link") from error


def _link(data: Mapping[str, Any]) -> LinkProfile:
    gbps, rtt_ms = float(data["gbps"]), float(data["rtt_ms"])
    if not (math.isfinite(gbps) and gbps > 0 and math.isfinite(rtt_ms) and rtt_ms >= 0):
        raise UsageError(f"a link needs gbps > 0 and rtt_ms >= 0, got {data}")
    return LinkProfile(latency_s=rtt_ms / 2e3, bandwidth_bytes_per_s=gbps * 1e9 / 8)


def _parse(name: str, data: Mapping[str, Any]) -> Testbed:
    regions = {str(region): _link(inside) for region, inside in data["regions"].items()}
    devices = tuple(TestbedDevice(str(d["name"]), str(d["gpu"]), str(d["region"])) for d in data["devices"])
    if len({d.name for d in devices}) != len(devices):
        raise UsageError(f"testbed {name!r}: two devices have one name")
    between = {frozenset(map(str, link["between"])): _link(link) for link in data["links"]}
    used = sorted({d.region for d in devices})
    for a in used:
        if a not in regions:
            raise UsageError(f"testbed {name!r}: device region {a!r} is not in regions")
        for b in used:
            if a < b and frozenset((a, b)) not in between:
                raise UsageError(f"testbed {name!r}: there is no link between {a} and {b}")
    return Testbed(name, devices, regions, between, float(data.get("jitter_ms", 0.0)) / 1e3)


@cache
def _profiles() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files("meshcee.testbeds").joinpath("gpu_profiles.json").read_text())
    return data


def gpu_speed_flops_per_s(gpu: str) -> float:
    """Effective forward speed of a GPU on one transformer block at one sample, from the published layer times."""
    for model in _profiles()["models"].values():
        if gpu in model["gpus"]:
            hidden, tokens = model["hidden"], model["sequence"]
            flops = 2 * tokens * 12 * hidden**2 + 4 * tokens**2 * hidden
            return float(flops / model["gpus"][gpu]["1"]["block"][0])
    known = sorted({g for m in _profiles()["models"].values() for g in m["gpus"]})
    raise UsageError(f"there is no profile of a {gpu!r}; profiled are {', '.join(known)}")
