"""What the mesh and the paths to its peers mean: findings, as judge.py makes them of this machine's own facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshcee import errors
from peers.cli.doctor.facts import FOR_TENSORS, Door, Mesh, Neighbour, Refused
from peers.cli.doctor.finding import Finding, bad, count, ok, span, unknown, warn
from peers.cli.joining.ports import opened

__all__ = ["clock", "neighbours"]

SAGS, LATER_S = 2.0, 0.01  # times slower than told, or later; of latency, this much more besides
LEAST_MTU, USUAL_MTU = 1280, 1500  # of IPv6, and of Ethernet


def clock(mesh: Mesh | Refused | None) -> Finding:
    mend = "set the clock by NTP (timedatectl set-ntp true), here or on the machine that is named"
    off = mesh.off if isinstance(mesh, Mesh) else mesh.why if mesh is not None and mesh.error == "ClockError" else ""
    if off:
        return bad("mesh", "clock", off, mend, errors.ClockError)
    if mesh is None:
        return unknown("mesh", "clock", "there is nothing to compare it with: add --join LINE")
    if isinstance(mesh, Refused) or not mesh.peers:
        return unknown("mesh", "clock", "no peer's record was read to compare it with")
    return ok("mesh", "clock", f"agrees with the records of {count(len(mesh.peers), 'peer')}")


def neighbours(mesh: Mesh | Refused | None) -> Iterator[Finding]:
    if mesh is None:
        yield unknown("mesh", "reach", "whether peers and this machine reach each other: add --join LINE")
        return
    if isinstance(mesh, Refused):
        kind = getattr(errors, mesh.error) if mesh.error in errors.__all__ else errors.JoinError
        if kind is not errors.ClockError:
            mend = (
                "ask for a new line: `meshcee invite` on an admin's machine"
                if kind is errors.NotPermittedError
                else "start `meshcee peer` there, open its port in both firewalls, or ask for a fresh line (`meshcee token`)"
            )
            yield bad("mesh", "join", f"the mesh was not joined: {mesh.why}", mend, kind)
        return
    yield ok("mesh", "join", f"it has {count(len(mesh.peers), 'peer')} that lend a device")
    far, here = [p for p in mesh.peers if not p.here], [p for p in mesh.peers if p.here]
    for peer in far:
        if peer.answers is False:
            yield warn(
                "mesh",
                "direct path",
                f"{peer.name} does not answer at {', '.join(peer.addresses[:2]) or 'any address'}",
                "open that port in the firewall there, or start the peer there with --listen and --announce of an open one",
            )
    if answer := sum(p.answers is True for p in far):
        yield ok("mesh", "direct path", f"{answer} of {len(far)} peers of other machines answer at their addresses")
    for peer in far:
        if peer.answers and peer.direct is False:
            yield warn(
                "mesh",
                "direct port",
                f"tensors to {peer.name} stay inside libp2p's daemon, which is slower on long links: no connection to its port "
                "for them comes about",
                "let that port in at the firewall there, and start the peer there with --direct-port of it",
            )
    if direct := sum(p.direct is True for p in far):
        yield ok("mesh", "direct port", f"tensors take connections of their own to {count(direct, 'peer')}")
    yield from _doors(mesh.doors)
    for peer in far:
        yield from _link(peer)
    yield from _packets(far)
    yield from _translation(mesh.ours, here, far)
    if not here or not far:
        whose = "other machines" if here else "this machine"
        yield unknown("mesh", "reach", f"no peer of {whose} is there, so nobody has measured a link to here")
    for peer in here:
        if far and peer.measured_by == 0:
            yield warn(
                "mesh",
                "reach",
                f"no other machine has measured a link to {peer.name}, which runs here",
                "wait a minute after its start; then open its port, or start it with --listen and --announce of an open one",
            )
        elif far:
            yield ok(
                "mesh", "reach", f"{count(peer.measured_by, 'peer')} of other machines measured a link to {peer.name}"
            )


def _doors(doors: Sequence[Door]) -> Iterator[Finding]:
    """Ports of this machine, dialled from outside."""
    what = "ports from outside"
    for door in doors:
        where = f"port {door.port} of {door.of}" if door.of else f"port {door.port}, a free one,"
        if not door.asked:
            yield unknown("mesh", what, f"no peer of another machine could be asked to dial {where.rstrip(',')}")
        elif door.reached_by:
            yield ok("mesh", what, f"{where} is open at {door.host}: {', '.join(door.reached_by)} dialled it")
        else:
            mend = _let_in(door, {one.of: one.port for one in doors})
            asked = ", ".join(door.asked)
            yield warn("mesh", what, f"{where} is closed at {door.host}: {asked} dialled it in vain", mend)


def _let_in(door: Door, ports: Mapping[str, int]) -> str:
    """What opens a door; `ports` are those of all doors."""
    where = "in at this machine's firewall and at its router, with the same number, and start the peer here with"
    if door.of.endswith(FOR_TENSORS):
        return f"let TCP port {door.port} {where} --direct-port {door.port}"
    both, options = opened(door.port if door.of else 4001, door.host, ports.get(door.of + FOR_TENSORS))
    return f"let {both} {where.replace('number', 'numbers')} {options}"


def _link(peer: Neighbour) -> Iterator[Finding]:
    """As it is now beside what a peer of this machine tells, by which jobs are planned."""
    link, what = peer.link, f"link to {peer.name}"
    if link is None:
        return
    told = f"{_speed(*link.record)} by the record of a peer here, {span(link.record_age_s)} ago" if link.record else ""
    if link.now is None:
        why = link.problem or "that peer trains, and its steps need the line"
        yield unknown("mesh", what, f"not measured now: {why}" + (f"; {told}" if told else ""))
        return
    text = f"{_speed(*link.now)} now" + (f"; {told}" if told else "")
    if link.record and (link.now[1] < link.record[1] / SAGS or link.now[0] > SAGS * link.record[0] + LATER_S):
        mend = "end what else uses the line (`ss -tip` lists connections), or wait: within 8 minutes peers tell what it is now"
        yield warn("mesh", what, f"it sags: {text}", mend)
    else:
        yield ok("mesh", what, text)


def _speed(latency_s: float, bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.3g} Mbit/s and {1e3 * latency_s:.3g} ms"


def _packets(far: Sequence[Neighbour]) -> Iterator[Finding]:
    known = [(peer.mtu, peer) for peer in far if peer.mtu is not None]
    for mtu, peer in known:
        if mtu < LEAST_MTU:
            mend = "ip link set dev DEVICE mtu 1500, here or at the tunnel on the way; `ip route get ADDRESS` names the device"
            detail = f"packets to {peer.name} have {mtu} bytes at most, and some networks cut or drop what is below {LEAST_MTU}"
            yield warn("mesh", "MTU", detail, mend)
    if good := [mtu for mtu, _ in known if mtu >= LEAST_MTU]:
        small = ": a tunnel is on the way, and TCP fits itself to it" if min(good) < USUAL_MTU else ""
        yield ok(
            "mesh",
            "MTU",
            f"packets of {min(good)} bytes reach {count(len(good), 'peer')} of other machines whole{small}",
        )


def _translation(ours: Sequence[str], here: Sequence[Neighbour], far: Sequence[Neighbour]) -> Iterator[Finding]:
    """Whether a router gives this machine another address outside."""
    seen = [peer for peer in far if peer.sees]
    if not seen:
        return
    strange = [peer for peer in seen if peer.sees not in ours]
    if not strange:
        yield ok("mesh", "NAT", f"none: {seen[0].name} sees this machine at {seen[0].sees}, its own address")
        return
    outside = strange[0].sees
    text = f"behind a router: {strange[0].name} sees this machine at {outside}, which is no address of its own"
    if len({peer.sees for peer in strange}) > 1:
        text += f", and {strange[-1].name} at {strange[-1].sees}"
    if here and not any(outside in address.split("/") for peer in here for address in peer.addresses):
        ports, options = opened(place=outside)
        mend = f"let {ports} in at the router, with the same numbers, and start the peer here with {options}"
        yield warn("mesh", "NAT", f"{text}, and no peer here announces it", mend)
    else:
        yield ok("mesh", "NAT", text)
