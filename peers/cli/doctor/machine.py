"""Looks at this machine: software, device, memory, folders, ports, guards, memberships, processes. Nothing is changed.

The idea: each look is a few lines, and what it cannot see becomes a reason. Judgement is elsewhere. What needs torch or hivemind is
imported by the look that needs it, as either may be what is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

import meshcee
from dht import Members
from meshcee.config import Limits, Timeouts
from meshcee.errors import MeshceeError, UsageError
from meshcee.figures import Versions
from meshcee.files import disk, limits, loads
from meshcee.files.home import Home, is_locked
from peers.cli.doctor.facts import Device, Folder, Guards, Memory, Network, Package, Pass, Process, Shared, Unseen
from peers.cli.joining.owner_use import busy_core_seconds

__all__ = [
    "Row",
    "device",
    "folders",
    "guards",
    "memory",
    "network",
    "packages",
    "passes",
    "processes",
    "processes_of",
    "shared",
    "versions",
]

VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "MESHCEE_THREADS")
NVIDIA, DISPLAY = "0x10de", "0x03"
P2PD_S, LOOKUP_S = 10.0, 4.0
PROBE_BYTES = 4096
MOMENT_S = 0.5  # over which what others compute is counted
MOST_SHOWN = 3


# -- software


def versions() -> Versions:
    with suppress(ImportError):
        from peers.device import versions as found

        return found()
    return Versions(meshcee.__version__, "none", platform.python_version())


def packages() -> tuple[Package, ...]:
    """What cannot be done without: each as meshcee itself imports and starts it."""
    found = [_package("torch", "torch"), _package("uvloop", "uvloop"), _package("hivemind", "peers.transport.p2p")]
    return (*found, _p2pd() if not found[-1].problem else Package("p2pd", "", "it comes with hivemind"))


def _package(name: str, module: str) -> Package:
    try:
        version = importlib.metadata.version(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # whatever an installation that is torn may raise
        return Package(name, "", f"{type(error).__name__}: {error}")
    return Package(name, version)


def _p2pd() -> Package:
    binary = importlib.resources.files("hivemind.hivemind_cli") / "p2pd"
    try:
        done = subprocess.run(
            [str(binary), "--help"], capture_output=True, timeout=P2PD_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Package("p2pd", "", f"{binary} does not start: {error}")
    said = (done.stderr + done.stdout).decode(errors="replace")
    if "hostAddrs" not in said:
        return Package("p2pd", "", f"{binary} is no libp2p daemon: {said[-200:] or f'it ended with {done.returncode}'}")
    return Package("p2pd", "runs, as hivemind brings it")


# -- device and memory


def device() -> Device:
    import torch

    from peers.device import cores, kernel_class, resolve_device, take_threads

    take_threads(None)  # as a peer does
    chosen, threads = resolve_device("auto"), torch.get_num_threads()
    cuda = tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    return Device(
        chosen,
        str(kernel_class(torch.device(chosen), threads)),
        threads,
        cores(),
        {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        sum(_is_nvidia(place) for place in Path("/sys/bus/pci/devices").glob("*")),
        driver_of(_first_line(Path("/proc/driver/nvidia/version"))),
        torch.version.cuda or "",
        cuda,
    )


def driver_of(line: str) -> str:
    """What the driver says of itself, in one of two ways: "... x86_64 Kernel Module  535.104.05  Sat ..." or, where its source is
    open, "... Open Kernel Module for x86_64  580.159.04  Release ..."."""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", f"{line} ")
    return found[1] if found else ""


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except (OSError, ValueError):
        return ""


def _is_nvidia(place: Path) -> bool:
    return _first_line(place / "vendor") == NVIDIA and _first_line(place / "class").startswith(DISPLAY)


def memory() -> Memory:
    machine = psutil.virtual_memory()
    free, limit = limits.narrowest()
    return Memory(machine.total, machine.available, limit, free)


def shared() -> Shared:
    """Blocks for a moment. In a container the processes of others have no names here, and count all the same."""
    before, busy_before, start_s = _core_seconds(), busy_core_seconds(), time.monotonic()
    time.sleep(MOMENT_S)
    after, busy, took_s = _core_seconds(), busy_core_seconds(), time.monotonic() - start_s
    rest, cores = psutil.virtual_memory(), psutil.cpu_count() or 1
    ours = psutil.Process()
    ours_s = after.get(ours.pid, ("", 0.0, 0))[1] - before.get(ours.pid, ("", 0.0, 0))[1]
    others = {pid: one for pid, one in after.items() if pid != ours.pid}
    by_cores = [(name, (s - before[pid][1]) / took_s) for pid, (name, s, _) in others.items() if pid in before]
    by_bytes = [(name, size) for name, _, size in others.values()]
    return Shared(
        cores,
        min(float(cores), max(0.0, (busy - busy_before - ours_s) / took_s)),
        rest.total,
        max(0, rest.total - rest.available - ours.memory_info().rss),
        tuple(sorted((one for one in by_cores if one[1] >= 0.05), key=lambda one: -one[1])[:MOST_SHOWN]),
        tuple(sorted((one for one in by_bytes if one[1] >= 64 << 20), key=lambda one: -one[1])[:MOST_SHOWN]),
    )


def _core_seconds() -> dict[int, tuple[str, float, int]]:
    """By process id: its name with that id, what it has computed, and its memory."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times", "memory_info"]):
        info = process.info
        if (times := info["cpu_times"]) is not None and (held := info["memory_info"]) is not None:
            found[process.pid] = (f"{info['name']} {process.pid}", times.user + times.system, held.rss)
    return found


# -- files


def folders(home: Home) -> tuple[Folder, ...]:
    return _folder("home", home.folder), _folder("temporary files", Path(tempfile.gettempdir()))


def _folder(what: str, path: Path) -> Folder:
    """A file that has no name is written, where the folder is or would be made."""
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), path)
    free = 0
    try:
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(what, str(path), free, error.strerror or str(error), disk.is_full(error))
    return Folder(what, str(path), free)


def open_files() -> tuple[int, int]:
    """The soft and the hard limit; -1 for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(-1 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]


# -- network


def network(home: Home, environment: Mapping[str, str] = os.environ) -> Network:
    host = socket.gethostname()
    lookup, took_s = _lookup(host)
    binds = {"TCP": _bound(socket.SOCK_STREAM), "UDP": _bound(socket.SOCK_DGRAM)}
    return Network(binds, _ports(home, environment), _bound(socket.SOCK_STREAM, socket.AF_INET6), host, lookup, took_s)


def _bound(kind: int, family: int = socket.AF_INET, host: str = "", port: int = 0) -> str:
    """What refuses this address; "" for nothing."""
    try:
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host or ("::1" if family == socket.AF_INET6 else "127.0.0.1"), port))
            if kind == socket.SOCK_STREAM:
                tried.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ports(home: Home, environment: Mapping[str, str]) -> dict[str, str]:
    """Where the next peer of this machine would listen: as the environment says, and as its own mesh did before."""
    wanted = [environment.get("MESHCEE_LISTEN", "0.0.0.0:0")]
    file = home.folder / "mesh.founded.json"
    if file.exists() and not is_locked(Path(f"{file}.lock")):
        with suppress(OSError, ValueError, AttributeError):
            wanted += [str(where) for where in loads(file.read_text())["listening"].values()]
    found = {where: _reserved(where) for where in dict.fromkeys(wanted)}
    direct = environment.get("MESHCEE_DIRECT_PORT", "")
    if direct.isdecimal() and 0 < int(direct) <= 65535:
        found[f"direct port {direct}"] = _bound(socket.SOCK_STREAM, host="0.0.0.0", port=int(direct))
    return found


def _reserved(where: str) -> str:
    try:
        from peers.transport.p2p import reserve

        _, sockets = reserve([where])
    except (MeshceeError, ImportError) as error:
        return str(error)
    for one in sockets:
        one.close()
    return ""


def _lookup(host: str) -> tuple[str, float]:
    """In a thread that nobody waits for: a resolver may take minutes."""
    said: list[str] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None)
            said.append("")
        except OSError as error:
            said.append(error.strerror or str(error))

    start_s = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return said[0] if said else f"no answer within {LOOKUP_S:.0f} s", time.monotonic() - start_s


# -- guards


async def guards() -> Guards | Unseen:
    """What a worker gets, as `meshcee peer` starts one."""
    if sys.platform != "linux":
        return Unseen("graphs are checked in a process of their own on Linux only")
    from peers.device.worker import Workers

    text = _first_line(Path("/proc/sys/user/max_user_namespaces"))
    namespaces = int(text) if text.isdecimal() else None
    async with Workers(Limits(), Timeouts()) as workers:
        await workers.get_ready()
        if workers.confinement is None:
            try:
                await workers.read([b"none"])  # says why
            except MeshceeError as error:
                return Guards((), (), (), str(error), namespaces)
        found = workers.confinement
        if found is None:
            return Unseen("the process that checks graphs has not said what it has given up")
        return Guards(found.got, found.missing, found.possible, "", namespaces)


# -- memberships


def passes(home: Home) -> tuple[Pass, ...]:
    """Of each mesh the one that ends last, those that end last first."""
    from peers.node.admission import Membership
    from peers.node.founding import founded

    try:
        own = founded(home)
        root = own[0].peer_id if own is not None else ""
    except (UsageError, OSError):
        root = ""
    best: dict[str, Pass] = {}
    for file in Membership.files(home):
        found = _pass(file, root)
        before = best.get(found.mesh)
        if before is None or before.until < found.until:
            best[found.mesh] = found
    return tuple(sorted(best.values(), key=lambda one: -one.until))


def _pass(file: Path, founder: str) -> Pass:
    from peers.node.admission import Membership

    membership = Membership.read(file)
    if membership is None:
        return Pass(file.name, "", 0.0, str(file), problem="what this peer was given when it joined cannot be read")
    try:
        certificate = Members(membership.root, membership.certificate).own
    except MeshceeError as error:
        return Pass(membership.root, "", 0.0, str(file), problem=str(error))
    if certificate is None:
        return Pass(membership.root, "", 0.0, str(file), problem="it holds no certificate")
    return Pass(membership.root, certificate.role, certificate.until, str(file), membership.root == founder)


# -- processes


HELPERS = {  # what runs our modules, as `own_python` starts them
    "peers.device.worker.child": "graph checker",
    "peers.node.device_process": "device",
    "peers.cli.children.source": "peer of `meshcee local` or `demo`",
}


class Row(NamedTuple):
    """A process of this user."""

    pid: int
    parent: int
    command: Sequence[str]


def processes() -> tuple[Process, ...] | Unseen:
    """All but this process and what it has started."""
    own, rows = os.getuid(), []
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "uids"]):
        info = process.info
        if info["uids"] is not None and info["uids"].real == own and info["cmdline"]:
            rows.append(Row(info["pid"], info["ppid"], info["cmdline"]))
    if not rows:
        return Unseen("the system lists no processes")
    return processes_of([row for row in rows if os.getpid() not in (row.pid, row.parent)])


def processes_of(rows: Sequence[Row]) -> tuple[Process, ...]:
    """Those of meshcee. A helper names its peer in its arguments: under another parent it is an orphan."""
    by_pid = {row.pid: row for row in rows}
    return tuple(found for row in rows if (found := _process(row, by_pid.get(row.parent))) is not None)


def _process(row: Row, parent: Row | None) -> Process | None:
    arguments = list(row.command)
    for place, argument in enumerate(arguments):
        if argument.endswith("p2p/launcher.py"):
            return Process(row.pid, "launcher", _argument(arguments, place + 2) not in ("", str(row.parent)))
        for module, what in HELPERS.items():
            if f"from {module}" in argument:
                is_copy = parent is not None and parent.command == row.command
                named = _argument(arguments, place + 2)
                return Process(row.pid, what, not is_copy and named not in ("", str(row.parent)))
    if Path(arguments[0]).name == "p2pd":
        cared = parent is not None and any(word.endswith("p2p/launcher.py") for word in parent.command)
        return Process(row.pid, "p2pd", not cared)
    for place, argument in enumerate(arguments[:4]):
        if Path(argument).name == "meshcee" and "=" not in argument:
            words = [word for word in arguments[place + 1 : place + 3] if word]
            if words[:1] != ["peer"] or words[1:2] == [] or words[1].startswith("-"):
                words = words[:1]  # `meshcee peer logs` lends nothing
            return Process(row.pid, " ".join(["meshcee", *words]))
    return None


def _argument(arguments: Sequence[str], place: int) -> str:
    return arguments[place] if place < len(arguments) else ""
