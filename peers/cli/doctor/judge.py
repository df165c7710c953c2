"""What the facts of a machine mean: findings, each with what mends it.

The idea: a pure function from `Facts` to a list of `Finding`. What is bad names the class of the error that other commands end
with for the same reason, and so the exit code. Texts in facts may be of other machines: each becomes one printable sentence.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from meshcee import errors
from meshcee.config import Limits
from meshcee.figures import Versions
from meshcee.figures.kernels import without_settings
from meshcee.figures.versions import PYTHON_FROM, TORCH_BELOW, TORCH_FROM
from peers.cli.doctor.facts import (
    Device,
    Exactness,
    Facts,
    Folder,
    Guards,
    Invite,
    Kernels,
    Memory,
    Mesh,
    Neighbour,
    Network,
    Package,
    Pass,
    Process,
    Refused,
    Shared,
    Unseen,
)
from peers.cli.doctor.finding import GIB, Finding, bad, clean, count, ok, size, span, unknown, warn
from peers.cli.doctor.judge_mesh import clock, neighbours
from peers.cli.session import SETTINGS

__all__ = ["judge"]

T = TypeVar("T")

LEAST_BYTES = Limits().check_bytes  # the process that checks graphs may take so much
LITTLE_BYTES = 4 * LEAST_BYTES
BUSY_SHARE, HELD_SHARE = 0.5, 0.75  # of all cores, and of all memory, from which others are in a peer's way
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = GIB // 16, 5 * GIB  # an identity and a log; two checkpoints of a middling model
FEW_FILES, LEAST_FILES = 1024, 128  # a stream may take a dozen connections
SLOW_LOOKUP_S = 2.0
SPINS_LONGER = 100  # times what meshcee sets itself
SOON_S = 86400.0
MOST_PASSES = 4
MOST_NAMED = 8
LIMITING = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS", "MESHCEE_THREADS")
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
MENDS_PACKAGE = {"p2pd": "pip install --force-reinstall --no-deps hivemind"}
MENDS_GUARD = {
    "one thread": "unset the variables that start threads in every Python process here (OMP_*, MKL_*)",
    "namespaces": "allow user namespaces: sysctl -w user.max_user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0, "
    "or start the container with a profile that allows unshare",
    "landlock": "boot Linux 5.13 or newer with landlock in its lsm= list, and let the container's profile pass its system calls",
    "seccomp": "use a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64",
}


def judge(facts: Facts) -> list[Finding]:
    """In the order in which they are printed."""
    found = [
        *(_package(package) for package in facts.packages),
        _versions(facts.versions, facts.mesh),
        *_group("device", "processor", facts.device, _device),
        *_group("device", "memory", facts.memory, _memory),
        *_group("device", "shared", facts.shared, _shared),
        *(_folder(folder) for folder in facts.folders),
        _files(*facts.files),
        *_group("network", "ports", facts.network, _network),
        clock(facts.mesh),
        *neighbours(facts.mesh),
        *_group("guards", "worker", facts.guards, _guards),
        *_invite(facts.invite, facts.passes, facts.now),
        *_group("membership", "certificates", facts.passes, lambda found: _passes(found, facts.now, facts.mesh)),
        *_group("processes", "meshcee", facts.processes, lambda found: _processes(found, facts.mesh)),
        *_group("exactness", "self-test", facts.exactness, lambda found: _exactness(found, facts.mesh)),
    ]
    return [clean(finding) for finding in found]


def _group(group: str, what: str, facts: T | Unseen, look: Callable[[T], Iterable[Finding]]) -> Iterable[Finding]:
    if isinstance(facts, Unseen):
        return [unknown(group, what, f"not looked at: {facts.why}")]
    return look(facts)


# -- software


def _package(package: Package) -> Finding:
    if not package.problem:
        return ok("software", package.name, package.version or "runs")
    mend = MENDS_PACKAGE.get(package.name, f"pip install --force-reinstall {shlex.quote(package.name)}")
    return bad("software", package.name, f"cannot be used: {package.problem}", mend, errors.JoinError)


def _versions(ours: Versions, mesh: Mesh | Refused | None) -> Finding:
    text = f"meshcee {ours.meshcee}, Python {ours.python}, torch {ours.torch}"
    if (outside := ours.outside()) is not None:
        return warn("software", "versions", f"this machine runs {outside}", _supported())
    known = [p for p in mesh.peers if p.versions is not None and not p.here] if isinstance(mesh, Mesh) else []
    unlike = [
        (p.name, why, p.versions) for p in known if p.versions and (why := ours.unlike(p.versions, f"{p.name} has"))
    ]
    if unlike:
        (release, _), *_ = Counter(v.torch_release for _, _, v in unlike).most_common()
        return warn(
            "software",
            "versions",
            f"unlike those of {len(unlike)} of {len(known)} peers, so jobs leave one of them out: this machine runs {unlike[0][1]}",
            f"pip install torch=={shlex.quote(release)} here, and the same meshcee as there; or train with --mix versions",
        )
    like = f", as {count(len(known), 'peer')} of other machines" if known else ""
    return ok("software", "versions", text + like)


def _supported() -> str:
    def dotted(version: tuple[int, int]) -> str:
        return ".".join(map(str, version))

    releases = f"torch>={dotted(TORCH_FROM)},<{dotted(TORCH_BELOW)}"
    return f"pip install '{releases}' in an environment of Python {dotted(PYTHON_FROM)} or newer"


# -- device, memory, files


def _device(device: Device) -> Iterator[Finding]:
    yield ok("device", "kernel class", f"{device.kernels}; --device auto takes {device.chosen}")
    yield _cuda(device)
    yield _threads(device)
    if spinning := _spinning(device.environment):
        yield warn(
            "device",
            "waiting threads",
            f"{spinning} makes threads that wait keep their cores busy, and other peers here need them",
            f"unset {spinning.partition('=')[0]}",
        )
    if pins := [
        name for name in PINNING if device.environment.get(name, "false").lower() not in ("", "false", "disabled")
    ]:
        yield warn(
            "device",
            "pinned threads",
            f"{pins[0]} binds threads to cores: those of several peers to the same ones",
            f"unset {' '.join(pins)}",
        )


def _cuda(device: Device) -> Finding:
    what = "CUDA"
    if device.cuda_devices:
        return ok("device", what, f"{', '.join(device.cuda_devices)}; driver {device.driver or 'of unknown version'}")
    if not device.cards and not device.driver:
        return ok("device", what, "no NVIDIA card is here: the processor computes")
    if not device.driver:
        return warn(
            "device",
            what,
            f"no driver is here for {count(device.cards, 'NVIDIA card')}",
            "install NVIDIA's driver, or start the container with --gpus all",
        )
    if not device.cuda_build:
        return warn(
            "device",
            what,
            f"a driver is here ({device.driver}), and this torch was built without CUDA",
            "install torch with the index that pytorch.org names for CUDA",
        )
    return warn(
        "device",
        what,
        f"torch for CUDA {device.cuda_build} finds no device under the driver {device.driver}",
        "see whether nvidia-smi lists a card, set CUDA_VISIBLE_DEVICES to it, or take a driver that is as new as torch's CUDA",
    )


def _threads(device: Device) -> Finding:
    may = device.cores
    text = f"torch computes with {count(device.threads, 'thread')}, and this process may use {count(may, 'core')}"
    if device.threads > may:
        return warn("device", "threads", text, f"start peers with --threads {may}")
    said = [name for name in LIMITING if device.environment.get(name)]
    if device.threads < may and said:
        return warn(
            "device",
            "threads",
            f"{text}: {said[0]} limits them",
            f"unset {said[0]}, or start peers with --threads {may}",
        )
    return ok("device", "threads", text)


def _spinning(environment: Mapping[str, str]) -> str:
    """The variable and its value by which threads that wait compute on; "" for none."""
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        return f"OMP_WAIT_POLICY={environment['OMP_WAIT_POLICY']}"
    for name, usual in SETTINGS.items():
        value = environment.get(name, "").strip().lower()
        number = re.match(r"\d{1,18}", value)
        if value.startswith("infin") or (number and int(number[0]) > SPINS_LONGER * int(usual)):
            return f"{name}={value}"
    return ""


def _memory(memory: Memory) -> Iterator[Finding]:
    free = memory.available if memory.free is None else min(memory.available, memory.free)
    text = f"{size(free)} of {size(memory.total)} are free"
    if memory.limit is not None:
        text += f", within a limit of {size(memory.limit)} (a container, or ulimit -v)"
    mend = "end what takes memory (`ps aux --sort=-rss` lists it), or raise the limit (ulimit -v unlimited, or the container's)"
    if free < LEAST_BYTES:
        detail = f"{text}: the process that checks graphs may take {size(LEAST_BYTES)} alone"
        yield bad("device", "memory", detail, mend, errors.PlanError)
    elif free < LITTLE_BYTES:
        yield warn("device", "memory", text, mend)
    else:
        yield ok("device", "memory", text)


def _shared(found: Shared) -> Iterator[Finding]:
    """With all others on this machine, of meshcee or not."""
    most = ", ".join(f"{name}: {busy:.1f}" for name, busy in found.by_cores)
    text = f"others use {found.busy:.1f} of {count(found.cores, 'core')} now" + (f" ({most})" if most else "")
    if found.busy >= BUSY_SHARE * found.cores:
        left = max(1, math.floor(found.cores - min(found.busy, found.cores)))
        mend = f"start peers with --threads {left}, or with --yield-to-owner; or end what computes (`top` lists it)"
        yield warn("device", "shared cores", f"{text}, so a step here takes longer than the plan counts on", mend)
    else:
        yield ok("device", "shared cores", text)
    most = ", ".join(f"{name}: {size(held)}" for name, held in found.by_bytes)
    text = f"others hold {size(found.used)} of {size(found.total)}" + (f" ({most})" if most else "")
    if found.used >= HELD_SHARE * found.total:
        mend = "end what takes memory (`ps aux --sort=-rss` lists it), or start peers with --memory of what they leave"
        yield warn("device", "shared memory", f"{text}, and what they take next a stage lacks", mend)
    else:
        yield ok("device", "shared memory", text)


def _folder(folder: Folder) -> Finding:
    text = f"{folder.path} has {size(folder.free)} free"
    name = "MESHCEE_HOME" if folder.what == "home" else "TMPDIR"
    if folder.is_full or (folder.free < LEAST_DISK_BYTES and not folder.problem):
        detail = f"{text}: {folder.problem}" if folder.problem else text
        return bad(
            "files", folder.what, detail, f"make room, or set {name} to a folder on another disk", errors.NotNowError
        )
    if folder.problem:
        mend = f"check owner and permissions, or set {name} to another folder"
        return bad("files", folder.what, f"{folder.path} cannot be written: {folder.problem}", mend, errors.UsageError)
    if folder.free < LITTLE_DISK_BYTES:
        mend = f"make room (`meshcee run list` shows old runs), or set {name} to a folder on another disk"
        return warn("files", folder.what, f"{text}, and checkpoints take room", mend)
    return ok("files", folder.what, f"{text} and can be written")


def _files(soft: int, hard: int) -> Finding:
    what, text = "open files", f"a process may open {soft} files at once" if soft >= 0 else "without limit"
    if soft < 0 or soft >= FEW_FILES:
        return ok("files", what, text)
    raises = hard < 0 or hard >= FEW_FILES
    mend = (
        f"ulimit -n {4 * FEW_FILES if hard < 0 else min(hard, 4 * FEW_FILES)}"
        if raises
        else (f"raise nofile to {4 * FEW_FILES} in /etc/security/limits.conf, or --ulimit nofile of the container")
    )
    if soft < LEAST_FILES:
        return bad("files", what, text, mend, errors.JoinError)
    return warn("files", what, f"{text}: a mesh of many peers takes more", mend)


# -- network


def _network(network: Network) -> Iterator[Finding]:
    if refused := {kind: why for kind, why in network.binds.items() if why}:
        kind, why = next(iter(refused.items()))
        detail = f"{kind} on 127.0.0.1 is refused: {why}"
        yield bad(
            "network",
            "loopback",
            detail,
            "bring it up (ip link set lo up), or let the sandbox open sockets",
            errors.JoinError,
        )
    else:
        yield ok("network", "loopback", f"{' and '.join(network.binds) or 'nothing'} can be bound")
    for where, why in network.ports.items():
        if why:
            mend = (
                "end what listens there (`ss -ltnp` names it), or start the peer with another --listen or --direct-port"
            )
            yield bad("network", "port", f"{where}: {why}", mend, errors.JoinError)
        else:
            yield ok("network", "port", f"{where} can be listened on")
    yield ok("network", "IPv6", f"none here ({network.ipv6}): IPv4 is used" if network.ipv6 else "present")
    mend = f"write 127.0.1.1 {shlex.quote(network.host)} into /etc/hosts, or mend /etc/resolv.conf"
    if network.lookup:
        yield warn("network", "host name", f"{network.host!r} is not found: {network.lookup}", mend)
    elif network.lookup_s > SLOW_LOOKUP_S:
        yield warn("network", "host name", f"the look-up of {network.host!r} took {network.lookup_s:.1f} s", mend)
    else:
        yield ok("network", "host name", f"{network.host!r} is found")


# -- guards, memberships, processes


def _guards(guards: Guards) -> Iterator[Finding]:
    if guards.problem:
        yield bad(
            "guards",
            "worker",
            f"the process that checks graphs does not start: {guards.problem}",
            "raise the limits of processes and memory (ulimit -u, ulimit -v), and see that torch can be imported",
            errors.PlanError,
        )
        return
    if guards.got:
        yield ok("guards", "worker", f"graphs of others are checked behind {', '.join(guards.got)}")
    for missing in guards.missing:
        name, _, why = missing.partition(": ")
        mend = MENDS_GUARD.get(name, "update the kernel, or start the container with a profile that allows this guard")
        allowed = (
            f", of {guards.user_namespaces} namespaces allowed"
            if name == "namespaces" and guards.user_namespaces is not None
            else ""
        )
        yield warn("guards", name, f"the kernel refuses this guard: {why or 'no reason is given'}{allowed}", mend)
    if guards.possible:
        names = " and ".join(m.partition(":")[0] for m in guards.missing) or "these guards"
        detail = f"a process that checks graphs of others can still {', '.join(guards.possible)}"
        yield warn("guards", "worker", detail, f"mend {names}, and join only owners whom you trust until then")


def _invite(invite: Invite | None, passes: tuple[Pass, ...] | Unseen, now: float) -> Iterator[Finding]:
    """A member of the mesh needs it no more."""
    if invite is None:
        return
    what, ends = "invite", f"it makes a peer {invite.role} here, and {_ends(invite.until, now)}"
    kept = [] if isinstance(passes, Unseen) else passes
    if any(one.mesh == invite.root and not one.problem and one.until > now for one in kept):
        yield ok("membership", what, f"{ends}; this machine is a member already")
    elif invite.until - now < SOON_S:
        mend = (
            "ask an admin for a new line (`meshcee invite`)"
            if invite.until <= now
            else "join with it before, once is enough"
        )
        yield warn("membership", what, ends, mend)
    else:
        yield ok("membership", what, ends)


def _ends(until: float, now: float) -> str:
    """When something ends, as a person says it."""
    between = span(abs(until - now))
    return f"ends in {between}, on {_date(until)}" if until > now else f"has ended {between} ago, on {_date(until)}"


def _passes(passes: tuple[Pass, ...], now: float, mesh: Mesh | Refused | None) -> Iterator[Finding]:
    if not passes:
        yield ok("membership", "certificates", "none lie here yet: the first `meshcee peer` makes one")
    for one in passes[:MOST_PASSES]:
        what, joins = f"mesh …{one.mesh[-8:]}", isinstance(mesh, Mesh) and mesh.root == one.mesh
        new = "ask an admin for a new line (`meshcee invite`) and join with it"
        if one.problem:
            yield warn("membership", what, f"{one.file}: {one.problem}", f"{new}, or remove the file")
        elif one.founded:
            yield ok("membership", what, "this machine has founded it, and renews its own certificate")
        elif one.until <= now:
            detail = f"the certificate to {one.role} {_ends(one.until, now)}"
            if joins:
                yield bad("membership", what, detail, new, errors.NotPermittedError)
            else:
                yield warn("membership", what, detail, f"{new}, or remove {one.file}")
        elif one.until - now < SOON_S:
            mend = "let an admin's peer run for an hour while yours does: it renews the certificate"
            yield warn("membership", what, f"the certificate to {one.role} {_ends(one.until, now)}", mend)
        else:
            yield ok("membership", what, f"the certificate to {one.role} {_ends(one.until, now)}")
    if len(passes) > MOST_PASSES:
        yield ok("membership", "certificates", f"{len(passes) - MOST_PASSES} older ones lie here too")


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"second {seconds:g}"


def _processes(found: tuple[Process, ...], mesh: Mesh | Refused | None) -> Iterator[Finding]:
    orphans, others = [p for p in found if p.orphan], [p for p in found if not p.orphan]
    running = [p for p in others if p.what == "meshcee peer"]
    if isinstance(mesh, Mesh) and len(running) > (known := sum(peer.here for peer in mesh.peers)):
        yield warn(
            "processes",
            "other mesh",
            f"{count(len(running), 'peer')} of this user run here, and {known} of this mesh: the rest lend the same cores and "
            "memory to another one",
            f"end a peer that is not needed (kill {' '.join(str(p.pid) for p in running[:MOST_NAMED])}), or start each with "
            "--threads and --memory of its share",
        )
    if orphans:
        yield warn(
            "processes",
            "orphans",
            f"{count(len(orphans), 'helper')} without a peer: {', '.join(f'{p.what} {p.pid}' for p in orphans[:8])}",
            f"kill {' '.join(str(p.pid) for p in orphans)}",
        )
    kinds = Counter(p.what if p.what.startswith("meshcee") else "helpers" for p in others)
    text = ", ".join(f"{what} ({count})" for what, count in sorted(kinds.items(), reverse=True))
    yield ok("processes", "meshcee", f"here run: {text}" if text else "nothing else of meshcee runs here")


# -- exactness


def _exactness(test: Exactness, mesh: Mesh | Refused | None) -> Iterator[Finding]:
    rest = "run it again without other load, and if it repeats reinstall torch, then test the memory and the processor"
    if test.error:
        yield bad(
            "exactness",
            "self-test",
            f"it could not be computed: {test.error}",
            "pip install --force-reinstall torch",
            errors.CaptureError,
        )
    elif test.differs:
        yield bad("exactness", "self-test", f"not equal to the plain loop: {test.differs}", rest, errors.UnequalError)
    else:
        yield ok("exactness", "self-test", "2 steps on 1 and 2 stages equal the plain loop bit for bit")
    known = [peer for peer in mesh.peers if peer.prints] if isinstance(mesh, Mesh) else []
    for kernels in test.kernels:
        alike = [peer for peer in known if peer.kernels == kernels.of]
        if alike or kernels.device != "cpu" or kernels is test.kernels[0]:  # else nobody asks for so many threads
            yield _kernels(kernels, alike, rest)
        own = without_settings(kernels.of)
        others = [peer for peer in known if peer.kernels != kernels.of and without_settings(peer.kernels) == own]
        if others and kernels.device == "cpu":
            detail = f"its libraries compute other bits: {kernels.of} here, {others[0].kernels} on {others[0].name}"
            mend = "set variables that begin with MKL_, ONEDNN_ or DNNL_ alike here and there, or leave them out"
            yield warn("exactness", "kernels", detail, mend)


def _kernels(kernels: Kernels, alike: Sequence[Neighbour], rest: str) -> Finding:
    """Beside what peers of the same kernel class tell: there the bits are the same."""
    what = "kernels" if kernels.device == "cpu" else f"kernels of {kernels.device}"
    if kernels.problem:
        detail = f"they could not be computed: {kernels.problem}"
        mend = f"see whether nvidia-smi lists the card, or lend another device than {kernels.device} (--device cpu)"
        return bad("exactness", what, detail, mend, errors.UnequalError)
    for name, (first, again) in kernels.prints.items():
        if first != again:
            detail = f"{name} computed twice from the same numbers gave {first} and {again}"
            return bad("exactness", what, detail, rest, errors.UnequalError)
    ours = {name: first for name, (first, _) in kernels.prints.items()}
    others = [peer for peer in alike if any(ours.get(name, told) != told for name, told in peer.prints.items())]
    if others:
        name = next(name for name, told in others[0].prints.items() if ours.get(name, told) != told)
        names = ", ".join(peer.name for peer in others[:MOST_NAMED])
        detail = (
            f"{name} is {ours[name]} here and {others[0].prints[name]} on {others[0].name}, and both are {kernels.of}; "
            f"{len(others)} of {count(len(alike), 'peer')} of that class differ ({names})"
        )
        if 2 * len(others) < len(alike):
            one = others[0].name
            mend = f"run meshcee doctor on {one}; until it agrees: meshcee drain {shlex.quote(one)} --join LINE"
            return warn("exactness", what, detail, mend)
        build = shlex.quote(re.sub(r"[^0-9.].*", "", kernels.of.partition("torch ")[2]))
        mend = (
            f"pip install --force-reinstall torch=={build} here and there; until they agree, let one of the two leave"
        )
        return bad("exactness", what, detail, mend, errors.UnequalError)
    told = ", ".join(f"{name} {first}" for name, first in ours.items()) or "no fingerprints"
    like = f", as {count(len(alike), 'peer')} of that class" if alike else ""
    return ok("exactness", what, f"{told}, on {kernels.of}{like}")
