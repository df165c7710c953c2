"""What the doctor has found on this machine: values without a verdict.

The idea: each group of facts is either there or `Unseen` with the reason. A `problem` is empty where there is none. So a test
plants a fault by writing a value, and no machine has to be broken for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshcee.figures import Versions

__all__ = [
    "FOR_TENSORS",
    "Device",
    "Door",
    "Exactness",
    "Facts",
    "Folder",
    "Guards",
    "Invite",
    "Kernels",
    "Link",
    "Memory",
    "Mesh",
    "Neighbour",
    "Network",
    "Package",
    "Pass",
    "Process",
    "Refused",
    "Shared",
    "Unseen",
]


@dataclass(frozen=True)
class Unseen:
    """A group of facts that could not be looked at."""

    why: str


@dataclass(frozen=True)
class Package:
    """A library, or the libp2p daemon: its version, and what happened when this process used it."""

    name: str
    version: str
    problem: str = ""


@dataclass(frozen=True)
class Device:
    """What computes here. `cores` are those that this process may use; `cards` counts NVIDIA's on the bus."""

    chosen: str  # what `--device auto` takes
    kernels: str
    threads: int
    cores: int
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of OpenMP and its relatives
    cards: int = 0
    driver: str = ""
    cuda_build: str = ""  # of torch; "" for a build without CUDA
    cuda_devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memory:
    """In bytes. `limit` and `free` are those of the narrowest limit around this process: of a container, or `ulimit -v`."""

    total: int
    available: int
    limit: int | None = None
    free: int | None = None


@dataclass(frozen=True)
class Shared:
    """What other processes use of this machine at one moment: cores of all, bytes of all, and those that use most of each."""

    cores: int
    busy: float
    total: int
    used: int
    by_cores: tuple[tuple[str, float], ...] = ()
    by_bytes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Folder:
    """A place that meshcee writes to."""

    what: str
    path: str
    free: int
    problem: str = ""
    is_full: bool = False


@dataclass(frozen=True)
class Network:
    """`binds` and `ports` say of each address what refused it."""

    binds: Mapping[str, str]
    ports: Mapping[str, str]
    ipv6: str
    host: str
    lookup: str
    lookup_s: float = 0.0


@dataclass(frozen=True)
class Guards:
    """What a worker got that checks graphs of others, as it says itself, and what the kernel allows a process here."""

    got: tuple[str, ...]
    missing: tuple[str, ...]
    possible: tuple[str, ...]
    problem: str = ""
    user_namespaces: int | None = None


@dataclass(frozen=True)
class Pass:
    """A membership that lies in this home. `founded` where this machine renews its own."""

    mesh: str
    role: str
    until: float
    file: str
    founded: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Invite:
    """What --join was given, as its signature says. `root` is the mesh."""

    root: str
    role: str
    until: float


@dataclass(frozen=True)
class Process:
    """Another process of meshcee; `orphan` when it is a helper whose peer is gone."""

    pid: int
    what: str
    orphan: bool = False


@dataclass(frozen=True)
class Kernels:
    """Fingerprints by kernel, each computed twice: of a device, and of a CPU with a number of threads."""

    device: str
    of: str  # the kernel class
    prints: Mapping[str, tuple[str, str]]
    problem: str = ""  # why they could not be computed


@dataclass(frozen=True)
class Exactness:
    """The self-test: what differs from the plain loop on the processor, and what kernels of each device give."""

    differs: str
    error: str
    kernels: tuple[Kernels, ...]


@dataclass(frozen=True)
class Link:
    """To a peer of another machine, in seconds one way and bytes per second: as measured now, and as a peer of this machine said
    in its record, `record_age_s` ago. None where nobody has measured it.
    """

    now: tuple[float, float] | None = None
    record: tuple[float, float] | None = None
    record_age_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Neighbour:
    """A peer of the mesh. `answers` is None where nobody has dialled; `measured_by` counts peers of other machines.

    kernels, prints  its kernel class, and the fingerprints that it tells; {}: none
    link, mtu        the way to it from here; bytes of the largest packet that goes there whole
    sees             the address at which it sees this machine
    direct           whether tensors to it take TCP connections of their own
    tensors          of a peer of this machine, its port for these connections; 0: it has none, or it is not known
    """

    name: str
    here: bool
    versions: Versions | None
    addresses: tuple[str, ...]
    answers: bool | None = None
    measured_by: int = 0
    kernels: str = ""
    prints: Mapping[str, str] = field(default_factory=dict)
    busy: bool = False
    link: Link | None = None
    mtu: int | None = None
    sees: str = ""
    direct: bool | None = None
    tensors: int = 0


FOR_TENSORS = ", for tensors"


@dataclass(frozen=True)
class Door:
    """A TCP port of this machine that peers of other machines were asked to dial: of which peer here, where, who was asked, and by
    whom it was reached."""

    port: int
    of: str  # "" where no peer runs here: a free port; with FOR_TENSORS behind the name: that one
    host: str
    asked: tuple[str, ...]
    reached_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mesh:
    """As the one sees it that was joined. `off` says whose clock is ahead; `root` whose signature makes members; `ours` are the
    addresses of this machine's interfaces; `doors` its ports, as others find them.
    """

    root: str
    peers: tuple[Neighbour, ...]
    off: str = ""
    ours: tuple[str, ...] = ()
    doors: tuple[Door, ...] = ()


@dataclass(frozen=True)
class Refused:
    """The mesh was not joined: the name of the error, and its sentence."""

    error: str
    why: str


@dataclass(frozen=True)
class Facts:
    """All of it. `mesh` is None without --join, and so is `invite`, also in an open mesh.

    files  the soft and the hard limit of open files
    """

    now: float
    versions: Versions
    packages: tuple[Package, ...]
    device: Device | Unseen
    memory: Memory | Unseen
    folders: tuple[Folder, ...]
    network: Network | Unseen
    files: tuple[int, int]
    guards: Guards | Unseen
    passes: tuple[Pass, ...] | Unseen
    processes: tuple[Process, ...] | Unseen
    exactness: Exactness | Unseen
    shared: Shared | Unseen
    mesh: Mesh | Refused | None = None
    invite: Invite | None = None
