"""A cluster and a model in files: testbeds and the profiles of devices, read strictly for planning.

The idea: what does not make sense is refused here, with the place where it stands, so that no plan is built on it.

A testbed file has `testbeds`. Each has name, model, global_batch, `regions` (gbps per device port and direction,
rtt_ms), `devices` (name, gpu, region). And it has `links` between regions (gbps per direction, shared by all that crosses;
rtt_ms). It may have a `trace` of link changes. For emulation a device may have `really`, the share of its speed that it delivers,
and the testbed `emulated_gflops`, the speed of all devices together. A profile file has `models` (layers, hidden, vocab,
sequence, and per device kind and micro-batch size the seconds [forward, backward, optimizer] of embed, block and head),
`memory_gib` and `memory_model`. Block 0 is the embedding, 1..layers the transformer blocks, layers + 1 the head with the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshcee.errors import MeshceeError, UsageError
from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import KindTimes, Workload
from meshcee.files import loads

__all__ = ["LinkChange", "Scenario", "load_scenario", "packaged"]

GBPS = 1e9 / 8
GIB = 2**30
BYTES_PER_ELEMENT = 2  # boundaries and gradients are 16-bit
BYTES_PER_PARAMETER = 16
ACTIVATION_FACTOR = 34  # bytes per hidden element and block, attention not materialised


@dataclass(frozen=True)
class LinkChange:
    """From `at_s` on, the lines between two regions have this bandwidth, or so much more latency, both ways."""

    at_s: float
    between: tuple[str, str]
    bandwidth_bytes_per_s: float | None = None
    extra_latency_s: float | None = None  # one way, over the nominal one


@dataclass(frozen=True)
class Scenario:
    """A named cluster in a file, what is trained on it, and what happens to its links."""

    name: str
    cluster: Cluster
    workload: Workload
    trace: tuple[LinkChange, ...] = ()
    really: Mapping[str, float] = field(default_factory=dict)  # device -> share of its speed that it has when emulated
    emulated_flops_per_s: float | None = None  # all devices together


def packaged(name: str) -> Path:
    """A testbed or profile file that comes with meshcee."""
    return Path(str(files("meshcee.figures.testbeds").joinpath(name)))


def load_scenario(testbeds: Path, name: str, profiles: Path) -> Scenario:
    """The testbed of this name, with its model's costs on the kinds of devices that it has."""
    data = _read(profiles)
    if not isinstance(data, Mapping) or not isinstance(data.get("models"), Mapping):
        raise UsageError(f"{profiles} has no object `models`; give --profiles a file of device profiles")
    memory_gib, memory = data.get("memory_gib"), data.get("memory_model", {})
    if not isinstance(memory_gib, Mapping) or not isinstance(memory, Mapping):
        raise UsageError(f"{profiles} needs the objects memory_gib and memory_model")
    entry = _entry(testbeds, name)
    where = f"{testbeds.name}:{name}"
    place = f"{profiles.name}: memory_model"
    reserve_gib = _number(place, memory, "reserve_gib", zero=True) if "reserve_gib" in memory else 0.0
    per_parameter = _number(place, {"bytes_per_parameter": BYTES_PER_PARAMETER, **memory}, "bytes_per_parameter")
    model_name = _text(where, entry, "model")
    model = data["models"].get(model_name)
    if not isinstance(model, Mapping):
        raise UsageError(f"{profiles} has no model {model_name!r}; it has {', '.join(data['models'])}")
    cluster = _cluster(where, entry, memory_gib, reserve_gib)
    kinds = list(dict.fromkeys(d.kind for d in cluster.devices.values()))
    batch = _whole(where, entry, "global_batch")
    workload = _workload(f"{profiles.name}: {model_name}", model, kinds, batch, per_parameter)
    really = {
        d["name"]: _number(f"{where}: device {d['name']}", d, "really") for d in entry["devices"] if "really" in d
    }
    flops = 1e9 * _number(where, entry, "emulated_gflops") if "emulated_gflops" in entry else None
    return Scenario(name, cluster, workload, _trace(where, entry, cluster), really, flops)


def _read(path: Path) -> Any:
    try:
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name an existing file") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def _entry(path: Path, name: str) -> Mapping[str, Any]:
    data = _read(path)
    entries = data.get("testbeds") if isinstance(data, Mapping) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path} has no list `testbeds`")
    known = {e.get("name"): e for e in entries if isinstance(e, Mapping)}
    if name not in known:
        raise UsageError(f"{path} has no testbed {name!r}; it has {', '.join(map(str, known))}")
    entry: Mapping[str, Any] = known[name]
    return entry


def _number(where: str, data: Any, key: str, *, zero: bool = False) -> float:
    value = data.get(key) if isinstance(data, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{where}: {key} must be a finite number, got {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise UsageError(f"{where}: {key} must be {'at least 0' if zero else 'positive'}, got {value!r}")
    return float(value)


def _whole(where: str, data: Any, key: str) -> int:
    value = _number(where, data, key)
    if value != int(value):
        raise UsageError(f"{where}: {key} must be a whole number, got {value!r}")
    return int(value)


def _text(where: str, data: Any, key: str) -> str:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, str) or not value or value.startswith("@"):
        raise UsageError(f"{where}: {key} must be a name, got {value!r}")
    return value


def _between(where: str, data: Any, regions: Mapping[str, Any]) -> tuple[str, str]:
    pair = data.get("between") if isinstance(data, Mapping) else None
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
        raise UsageError(f"{where}: between must name two regions, got {pair!r}")
    for name in pair:
        if not isinstance(name, str) or name not in regions:
            raise UsageError(f"{where}: between names {name!r}, which is no region; regions are {', '.join(regions)}")
    return pair[0], pair[1]


def _cluster(where: str, data: Mapping[str, Any], memory_gib: Mapping[str, Any], reserve_gib: float) -> Cluster:
    regions, devices, links = (data.get(k) for k in ("regions", "devices", "links"))
    if not isinstance(regions, Mapping) or not isinstance(devices, list) or not isinstance(links, list):
        raise UsageError(f"{where}: needs regions (an object), devices (a list) and links (a list)")
    if not devices:
        raise UsageError(f"{where}: has no devices; add at least one")
    ports = {r: _number(f"{where}: region {r}", v, "gbps") * GBPS for r, v in regions.items()}
    inside = {r: _number(f"{where}: region {r}", v, "rtt_ms", zero=True) / 2e3 for r, v in regions.items()}
    found = []
    for i, entry in enumerate(devices):
        name, gpu, region = (_text(f"{where}: device {i}", entry, key) for key in ("name", "gpu", "region"))
        if region not in ports:
            raise UsageError(f"{where}: device {name} is in region {region!r}, which is not in regions")
        if gpu not in memory_gib:
            raise UsageError(f"{where}: device {name} is a {gpu}, which is in no profile; add it to the profile file")
        room = _number(f"memory_gib of {gpu}", memory_gib, gpu) - reserve_gib
        if room <= 0:
            raise UsageError(f"{where}: {gpu} has no memory left after the reserve of {reserve_gib} GiB")
        found.append(Device(name, gpu, region, int(room * GIB), ports[region]))
    between: dict[tuple[str, str], LinkProfile] = {}
    for i, entry in enumerate(links):
        place = f"{where}: link {i}"
        a, b = _between(place, entry, regions)
        if (a, b) in between:
            raise UsageError(f"{place}: {a} and {b} are linked twice; keep one entry")
        profile = LinkProfile(_number(place, entry, "rtt_ms", zero=True) / 2e3, _number(place, entry, "gbps") * GBPS)
        between[a, b] = between[b, a] = profile
    used = list(dict.fromkeys(d.region for d in found))
    for i, a in enumerate(used):
        for b in used[i + 1 :]:
            if (a, b) not in between:
                raise UsageError(f"{where}: there is no link between {a} and {b}; add one to links")
    return Cluster(found, inside_latency_s=inside, between=between)


def _trace(where: str, data: Mapping[str, Any], cluster: Cluster) -> tuple[LinkChange, ...]:
    changes = data.get("trace", [])
    if not isinstance(changes, list):
        raise UsageError(f"{where}: trace must be a list")
    trace = []
    for i, change in enumerate(changes):
        place = f"{where}: trace {i}"
        a, b = _between(place, change, data["regions"])
        bandwidth = _number(place, change, "gbps") * GBPS if "gbps" in change else None
        extra = None
        if "rtt_ms" in change:
            extra = _number(place, change, "rtt_ms", zero=True) / 2e3 - cluster.graph.edges["@" + a, "@" + b]["latency"]
        trace.append(LinkChange(_number(place, change, "at_s", zero=True), (a, b), bandwidth, extra))
    return tuple(trace)


def _workload(where: str, model: Mapping[str, Any], kinds: list[str], batch: int, per_parameter: float) -> Workload:
    layers, hidden, vocab, sequence = (_whole(where, model, k) for k in ("layers", "hidden", "vocab", "sequence"))
    gpus = model.get("gpus")
    if not isinstance(gpus, Mapping):
        raise UsageError(f"{where}: needs `gpus`, the times of each device kind")
    for kind in kinds:
        if kind not in gpus:
            raise UsageError(f"{where}: there are no times for {kind}; profile it, or take it out of the testbed")
    count = layers + 2
    block, embed, head = 12 * hidden**2 + 13 * hidden, (vocab + sequence) * hidden, vocab * hidden
    parameters = [embed, *[block] * layers, head]
    boundary = sequence * hidden * BYTES_PER_ELEMENT
    return Workload(
        names=("embedding", *(f"block {i}" for i in range(1, layers + 1)), "head"),
        global_batch=batch,
        times={kind: _kind_times(f"{where}: {kind}", gpus[kind], layers) for kind in kinds},
        state_bytes=tuple(math.ceil(per_parameter * p) for p in parameters),
        gradient_bytes=tuple(BYTES_PER_ELEMENT * p for p in parameters),
        # stated for a block; embedding and head are blocks too, and to count them is the careful reading
        activation_bytes=(ACTIVATION_FACTOR * sequence * hidden,) * count,
        boundary_bytes=(boundary,) * (count - 1) + (0,),
        boundary_back_bytes=(boundary,) * (count - 1) + (0,),
        element_bytes=BYTES_PER_ELEMENT,
    )


def _kind_times(where: str, table: Any, layers: int) -> KindTimes:
    if not isinstance(table, Mapping) or not table:
        raise UsageError(f"{where}: needs times for at least one micro-batch size")
    try:
        sizes = sorted(int(size) for size in table)
    except ValueError as error:
        raise UsageError(f"{where}: micro-batch sizes must be whole numbers: {error}") from error
    f_s, b_s, w_s, optimizer_s = [], [], [], []
    for size in sizes:
        rows = [_triple(f"{where}: size {size}", table[str(size)], part) for part in ("embed", "block", "head")]
        columns = [rows[0], *[rows[1]] * layers, rows[2]]
        f_s.append([c[0] for c in columns])
        # the source does not split the backward: half of it each, as the file's note says
        b_s.append([c[1] / 2 for c in columns])
        w_s.append([c[1] / 2 for c in columns])
        optimizer_s.append([c[2] for c in columns])
    try:
        return KindTimes(sizes, f_s, b_s, w_s, optimizer_s[0])
    except MeshceeError as error:
        raise UsageError(f"{where}: {error}") from error


def _triple(where: str, row: Any, part: str) -> tuple[float, float, float]:
    values = row.get(part) if isinstance(row, Mapping) else None
    if not isinstance(values, list) or len(values) != 3:
        raise UsageError(f"{where}: {part} must be [forward, backward, optimizer] in seconds, got {values!r}")
    named = dict(zip(("forward", "backward", "optimizer"), values))
    f, b, o = (_number(f"{where}: {part}", named, key, zero=True) for key in named)
    return f, b, o
