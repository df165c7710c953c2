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
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from meshcee.errors import MeshceeError, ProtocolError, UsageError
from meshcee.fields import NotNegative, read
from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import KindTimes, Workload
from meshcee.files import loads

__all__ = ["LinkChange", "Scenario", "load_scenario", "packaged"]

GBPS = 1e9 / 8
GIB = 2**30
BYTES_PER_ELEMENT = 2  # boundaries and gradients are 16-bit
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


# -- what the files hold, as it stands there; entries that have names are read one by one, to be refused by name

T = TypeVar("T")
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1 << 53)]
Named = Annotated[str, Meta(pattern="^[^@]")]  # @ begins the names of switches
Sizes = Annotated[dict[Annotated[str, Meta(pattern="^[1-9][0-9]*$")], Any], Meta(min_length=1)]
Seconds = tuple[NotNegative, NotNegative, NotNegative]  # forward, backward, optimizer


@dataclass(frozen=True)
class _Region:
    gbps: Positive
    rtt_ms: NotNegative


@dataclass(frozen=True)
class _Device:
    name: Named
    gpu: Named
    region: Named
    really: Positive | None = None


@dataclass(frozen=True)
class _Link:
    between: tuple[Named, Named]
    gbps: Positive
    rtt_ms: NotNegative


@dataclass(frozen=True)
class _Change:
    at_s: NotNegative
    between: tuple[Named, Named]
    gbps: Positive | None = None
    rtt_ms: NotNegative | None = None


@dataclass(frozen=True)
class _Testbed:
    model: Named
    global_batch: AtLeastOne
    regions: Mapping[str, Any]  # of _Region
    devices: Annotated[tuple[_Device, ...], Meta(min_length=1)]
    links: tuple[_Link, ...]
    trace: tuple[_Change, ...] = ()
    emulated_gflops: Positive | None = None


@dataclass(frozen=True)
class _Times:
    embed: Seconds
    block: Seconds
    head: Seconds


@dataclass(frozen=True)
class _Model:
    layers: AtLeastOne
    hidden: AtLeastOne
    vocab: AtLeastOne
    sequence: AtLeastOne
    gpus: Mapping[str, Any]  # kind -> size -> _Times


@dataclass(frozen=True)
class _Memory:
    bytes_per_parameter: Positive = 16.0
    reserve_gib: NotNegative = 0.0


@dataclass(frozen=True)
class _Profiles:
    models: Mapping[str, Any]  # of _Model
    memory_gib: Mapping[str, Positive]
    memory_model: _Memory = field(default_factory=_Memory)


@dataclass(frozen=True)
class _Testbeds:
    testbeds: tuple[Any, ...]  # of _Testbed


# -- from there to a cluster and a workload


def packaged(name: str) -> Path:
    """A testbed or profile file that comes with meshcee."""
    return Path(str(files("meshcee.figures.testbeds").joinpath(name)))


def load_scenario(testbeds: Path, name: str, profiles: Path) -> Scenario:
    """The testbed of this name, with its model's costs on the kinds of devices that it has."""
    figures = _meant(_read(profiles), _Profiles, f"{profiles.name} is no file of device profiles")
    entries = _meant(_read(testbeds), _Testbeds, f"{testbeds.name} is no file of testbeds").testbeds
    known = {entry.get("name"): entry for entry in entries if isinstance(entry, Mapping)}
    if name not in known:
        raise UsageError(f"{testbeds} has no testbed {name!r}; it has {', '.join(map(str, known))}")
    where = f"{testbeds.name}:{name}"
    testbed = _meant(known[name], _Testbed, where)
    if testbed.model not in figures.models:
        raise UsageError(f"{profiles} has no model {testbed.model!r}; it has {', '.join(figures.models)}")
    place = f"{profiles.name}: {testbed.model}"
    model = _meant(figures.models[testbed.model], _Model, place)
    links = _links(where, testbed)
    cluster = _cluster(where, testbed, links, figures)
    kinds = list(dict.fromkeys(d.kind for d in cluster.devices.values()))
    workload = _workload(place, model, kinds, testbed.global_batch, figures.memory_model.bytes_per_parameter)
    really = {d.name: d.really for d in testbed.devices if d.really is not None}
    flops = None if testbed.emulated_gflops is None else 1e9 * testbed.emulated_gflops
    return Scenario(name, cluster, workload, tuple(_trace(where, testbed, links)), really, flops)


def _read(path: Path) -> Any:
    try:
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name an existing file") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def _meant(value: Any, kind: type[T], where: str) -> T:
    try:
        return read(value, kind, where, defaults=True)
    except ProtocolError as error:
        raise UsageError(f"{error}; correct it in the file") from error


def _links(where: str, testbed: _Testbed) -> dict[tuple[str, str], LinkProfile]:
    """Both ways."""
    found: dict[tuple[str, str], LinkProfile] = {}
    for i, link in enumerate(testbed.links):
        a, b = _between(f"{where}: link {i}", link.between, testbed.regions)
        if (a, b) in found:
            raise UsageError(f"{where}: link {i}: {a} and {b} are linked twice; keep one entry")
        found[a, b] = found[b, a] = LinkProfile(link.rtt_ms / 2e3, link.gbps * GBPS)
    return found


def _between(where: str, pair: tuple[str, str], regions: Mapping[str, Any]) -> tuple[str, str]:
    for name in pair:
        if name not in regions:
            raise UsageError(f"{where}: between names {name!r}, which is no region; regions are {', '.join(regions)}")
    if pair[0] == pair[1]:
        raise UsageError(f"{where}: between names {pair[0]!r} twice; name two regions")
    return pair


def _cluster(
    where: str, testbed: _Testbed, links: Mapping[tuple[str, str], LinkProfile], profiles: _Profiles
) -> Cluster:
    regions = {name: _meant(one, _Region, f"{where}: region {name}") for name, one in testbed.regions.items()}
    found = []
    for device in testbed.devices:
        if device.region not in regions:
            raise UsageError(
                f"{where}: device {device.name} is in region {device.region!r}, which is not in regions; add it there"
            )
        if device.gpu not in profiles.memory_gib:
            raise UsageError(
                f"{where}: device {device.name} is a {device.gpu}, which is in no profile; add it to the profile file"
            )
        room = profiles.memory_gib[device.gpu] - profiles.memory_model.reserve_gib
        if room <= 0:
            raise UsageError(
                f"{where}: {device.gpu} has no memory left after the reserve of {profiles.memory_model.reserve_gib} GiB; "
                "give it more in memory_gib"
            )
        port = regions[device.region].gbps * GBPS
        found.append(Device(device.name, device.gpu, device.region, int(room * GIB), port))
    used = list(dict.fromkeys(d.region for d in found))
    for i, a in enumerate(used):
        for b in used[i + 1 :]:
            if (a, b) not in links:
                raise UsageError(f"{where}: there is no link between {a} and {b}; add one to links")
    inside = {name: region.rtt_ms / 2e3 for name, region in regions.items()}
    return Cluster(found, inside_latency_s=inside, between=links)


def _trace(where: str, testbed: _Testbed, links: Mapping[tuple[str, str], LinkProfile]) -> Iterator[LinkChange]:
    for i, change in enumerate(testbed.trace):
        pair = _between(f"{where}: trace {i}", change.between, testbed.regions)
        if pair not in links:
            raise UsageError(
                f"{where}: trace {i}: {pair[0]} and {pair[1]} have no link that could change; add one to links"
            )
        bandwidth = None if change.gbps is None else change.gbps * GBPS
        extra = None if change.rtt_ms is None else change.rtt_ms / 2e3 - links[pair].latency_s
        yield LinkChange(change.at_s, pair, bandwidth, extra)


def _workload(where: str, model: _Model, kinds: list[str], batch: int, per_parameter: float) -> Workload:
    for kind in kinds:
        if kind not in model.gpus:
            raise UsageError(f"{where}: there are no times for {kind}; profile it, or take it out of the testbed")
    layers, hidden = model.layers, model.hidden
    count = layers + 2
    block, embed, head = 12 * hidden**2 + 13 * hidden, (model.vocab + model.sequence) * hidden, model.vocab * hidden
    parameters = [embed, *[block] * layers, head]
    boundary = model.sequence * hidden * BYTES_PER_ELEMENT
    return Workload(
        names=("embedding", *(f"block {i}" for i in range(1, layers + 1)), "head"),
        global_batch=batch,
        times={kind: _kind_times(f"{where}: {kind}", model.gpus[kind], layers) for kind in kinds},
        state_bytes=tuple(math.ceil(per_parameter * p) for p in parameters),
        gradient_bytes=tuple(BYTES_PER_ELEMENT * p for p in parameters),
        # stated for a block; embedding and head are blocks too, and to count them is the careful reading
        activation_bytes=(ACTIVATION_FACTOR * model.sequence * hidden,) * count,
        boundary_bytes=(boundary,) * (count - 1) + (0,),
        boundary_back_bytes=(boundary,) * (count - 1) + (0,),
        element_bytes=BYTES_PER_ELEMENT,
    )


def _kind_times(where: str, table: Any, layers: int) -> KindTimes:
    rows = _meant(table, Sizes, where)
    sizes = sorted(map(int, rows))
    f_s, b_s, w_s, optimizer_s = [], [], [], []
    for size in sizes:
        times = _meant(rows[str(size)], _Times, f"{where}: size {size}")
        columns = [times.embed, *[times.block] * layers, times.head]
        f_s.append([c[0] for c in columns])
        # the source does not split the backward: half of it each, as the file's note says
        b_s.append([c[1] / 2 for c in columns])
        w_s.append([c[1] / 2 for c in columns])
        optimizer_s.append([c[2] for c in columns])
    try:
        return KindTimes(sizes, f_s, b_s, w_s, optimizer_s[0])
    except MeshceeError as error:
        raise UsageError(f"{where}: {error}") from error
