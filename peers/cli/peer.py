"""`meshcee peer` and `meshcee drain`: lend this machine to a mesh, until Ctrl-C, SIGTERM or until somebody drains the peer."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from meshcee.errors import JoinError, NotPermittedError, PeerLostError, UsageError
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from peers.cli.children import die_with_parent
from peers.cli.joining.joined import look
from peers.cli.joining.lines import keep_line, limits, line_file
from peers.cli.joining.notice import find, heeded
from peers.cli.joining.owner_use import Machine
from peers.cli.joining.staying import Stay, Watch
from peers.cli.joining.yielding import Hours, Rule
from peers.cli.meters import Meters, address_of, metered
from peers.cli.session import Screen, configure_logging, parse_bytes, printable, run_async
from peers.cli.settings.options import Lent
from peers.device import resolve_device, take_threads, versions
from peers.device.emulation import paced
from peers.node import JoinOptions, join
from peers.node.assemble import Node, a_peer
from peers.node.departure import Departure, ask_to_leave, find_peer

__all__ = ["PeerOptions", "asks_people", "lent_peer", "parse_duration_s", "run_drain", "run_peer"]

log = structlog.get_logger()

SUPPLIES = (
    "supplies {dataset!r} to a running job, and leaves once another peer of its name or region does so: start one with "
    "`meshcee peer --dataset {dataset}=FILE.py:make`, or end the job with `meshcee run stop`"
)
NO_SUPPLIER = (
    "has gone, and its job has found no other peer with dataset {dataset!r}: start one with `meshcee peer --dataset "
    "{dataset}=FILE.py:make`; the job waits a minute for that, and then ends with the command that resumes it"
)


LONGEST_S = 10 * 366 * 86400.0


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Lent):
    """The flags of `meshcee peer`."""

    identity: Path | None
    open: bool
    valid: str
    shape: str | None
    shape_device: str | None
    jitter_ms: float
    pace_gflops: float | None
    device_process: bool | None
    direct_sums: bool
    lan: bool = True
    metrics: str | None = None


def parse_duration_s(text: str, option: str = "--valid") -> float:
    """ "30m", "12h" or "7d", in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])", text.strip().lower())
    found_s = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match is not None else 0.0
    if not 0 < found_s <= LONGEST_S:
        raise UsageError(f"{option} {text!r:.40} is no duration of up to ten years; write for example 30m, 12h or 7d")
    return found_s


def somebody_sits_here(options: PeerOptions, *, as_json: bool) -> bool:
    """At a terminal: what a script has joined is said each time, and not remembered."""
    said = options.open or options.shape or as_json or not options.lan
    return not said and sys.stdin.isatty() and sys.stdout.isatty()


def asks_people(options: PeerOptions, *, as_json: bool) -> bool:
    """Whether somebody sits here who can type a code, or read one to somebody else. A script is never asked."""
    return not options.join and somebody_sits_here(options, as_json=as_json)


def has_own_process(said: bool | None, *, emulated: bool) -> bool:
    """Whether the device computes in a process of its own: where it can, unless something else is said."""
    for hinders, why in (
        (sys.platform != "linux", "a process for the device needs Linux"),
        (emulated, "an emulated device computes in the peer's own process"),
    ):
        if hinders:
            if said:
                raise UsageError(f"{why}: leave out --device-process")
            return False
    return said is not False


def run_peer(options: PeerOptions, *, as_json: bool) -> None:
    die_with_parent()
    if (options.shape is None) != (options.shape_device is None):
        raise UsageError("--shape and --shape-device go together")
    if options.shape and options.pace_gflops:
        raise UsageError("--shape paces the device itself: leave out --pace-gflops")
    if options.join and options.open:
        raise UsageError("--open starts a mesh without a key; a mesh that is joined has already decided")
    configure_logging(as_json=as_json)
    emulated = bool(options.shape or options.pace_gflops)
    own_process = has_own_process(options.device_process, emulated=emulated)
    where_metered = address_of(options.metrics)
    memory_bytes = parse_bytes(options.memory) if options.memory else None
    hours = Hours.parse(options.when) if options.when else None
    device = resolve_device(options.device)
    spot = find(options.spot) if options.spot is not None else None
    line, asks = options.join, asks_people(options, as_json=as_json)
    keeps = line is not None and somebody_sits_here(options, as_json=as_json)
    if asks:
        from peers.cli.joining.nearby import line_by_code  # half a second that a script need not wait

        line = line_by_code(Home(), options.identity)
    where = JoinOptions(
        token=line,
        name=options.name or options.shape_device or "",
        compute=True,
        device=device,
        memory_bytes=memory_bytes,
        region=options.region,
        listen=options.listen,
        announce=options.announce,
        direct_port=options.direct_port,
        relay=not options.no_relay,
        identity=options.identity,
        open=options.open,
        valid_s=parse_duration_s(options.valid),
        shape=options.shape,
        shape_device=options.shape_device,
        jitter_s=options.jitter_ms / 1e3,
        pace=paced(options.pace_gflops * 1e9) if options.pace_gflops else None,
        leave_s=options.leave_within if options.leave_within is not None or spot is None else spot.leave_s,
        device_process=own_process,
        direct_sums=options.direct_sums,
        datasets=tuple(options.dataset or ()),
        threads_said=take_threads(options.threads),
    )
    if (outside := versions().outside()) is not None:
        log.warning(f'this peer runs {outside}: jobs use it only with Job(mix="versions")')
    yields = options.yield_to_owner or hours is not None
    rule = Rule(owner=options.yield_to_owner, hours=hours)
    stay = Stay(Watch(rule, Machine(device).look) if yields else None)
    screen = Screen(stderr=as_json)

    def tell(text: str) -> None:
        screen.print(text, soft_wrap=True)

    async def staying() -> bool:
        async with metered(where_metered) as meters, heeded(spot, stay.ask, tell):

            def lend() -> AbstractAsyncContextManager[Departure]:
                return lent_peer(where, meters, shows_codes=asks, keeps=keeps, as_json=as_json)

            return await stay.run(lend, tell)

    try:
        in_time = run_async(staying(), stay.ask)
    except (JoinError, NotPermittedError) as error:
        if not asks or line is None:
            raise
        raise type(error)(f"{error}; where the mesh of the last time is no more, remove {line_file(Home())}") from error
    if not in_time:
        raise PeerLostError(
            "this peer has left with a stage of a job, or with its data: the owner goes on from its newest copies"
        )


@asynccontextmanager
async def lent_peer(
    where: JoinOptions, meters: Meters, *, shows_codes: bool, keeps: bool = False, as_json: bool
) -> AsyncIterator[Departure]:
    """The peer is up, and what people need to know of it is printed. With `keeps` the line that it joined by is kept."""
    async with a_peer(where, Home()) as me, meters.of_peer(me):
        departure = Departure(me)
        await me.directory.refresh()
        for why in dict.fromkeys(
            d.versions and versions().unlike(d.versions, "others have") for d in me.lent().values()
        ):
            if why:
                log.warning(
                    f'this peer runs {why}: its results may differ from theirs, and a job uses both only with Job(mix="versions")'
                )
        invite = me.invite(where.valid_s)
        if as_json:
            write_fact({"peer": me.peer_id, "token": invite, "addresses": list(me.transport.addresses)})
        else:
            console = Screen()
            console.print(f"{me.options.name} is up as …{me.peer_id[-8:]} on {where.device}.")
            console.print(_for_others(me, invite), soft_wrap=True)
            if keeps and where.token and (kept := keep_line(Home(), where.token, where.identity)):
                console.print(kept, soft_wrap=True)
        if me.joined_by is not None:
            me.spawn(_say_joined(me, as_json=as_json))
        elif (admin := me.admin) is not None and shows_codes and me.reachable_from_elsewhere:
            from peers.cli.joining.nearby import CODE_ADDRESSES, CODE_USES, show_codes

            here = tuple(me.transport.addresses)[:CODE_ADDRESSES]
            me.spawn(show_codes(me.peer_id, lambda: admin.invite(here, "own", CODE_USES, where.valid_s).encode()))
        yield departure


def _for_others(me: Node, invite: str) -> str:
    """How another machine comes in, as far as this one knows. An invite for a number of peers was for this machine."""
    by = me.joined_by if me.admin is None else None
    if by is not None and by.grant is not None and (by.grant.uses is not None or by.grant.expires_at <= me.clock()):
        admin = me.directory.peers.get(by.grant.at)
        return f"For another machine: `meshcee invite` on {admin.name if admin else 'a machine of an admin'}."
    said = f"On every other machine:\n\n  meshcee peer --join {invite}\n"
    limited = limits(invite) if by is None else None
    return f"{said}\n{limited}\n" if limited else said


async def _say_joined(me: Node, *, as_json: bool) -> None:
    """Once it is known, or most of it."""
    by = me.joined_by
    at = by.grant.at if by is not None and by.grant is not None else ""
    found = await look(me, at, "" if me.mesh_key.is_open else me.mesh_key.fingerprint)
    if as_json:
        write_fact(found.facts())
        return
    console = Screen()
    console.print(found.sentence(), soft_wrap=True)
    if advice := found.advice():
        console.print(advice, soft_wrap=True)


def run_drain(wanted: str, token: str | None, *, as_json: bool) -> None:
    """Raises PeerLostError when the peer left before its job could go on without it."""
    if token is None:
        raise UsageError("say which mesh: --join TOKEN, the line that `meshcee peer` printed (or set MESHCEE_JOIN)")
    configure_logging(as_json=as_json, level="warning")
    run_async(_drain(wanted, token, as_json=as_json))


async def _drain(wanted: str, token: str, *, as_json: bool) -> None:
    async with join(JoinOptions(token=token, name="drain", observes=True), Home()) as mesh:
        await mesh.agent.directory.refresh()
        peer = find_peer(mesh.agent.directory.peers, wanted)

        dataset = ""  # that a job is fed from

        def hear(within_s: float, supplies: list[str]) -> None:
            nonlocal dataset
            dataset = printable(supplies[0]) if supplies else ""
            if not as_json:
                print(f"{peer.name} leaves, within {within_s:.0f} s", flush=True)
                if dataset:
                    print(f"{peer.name} {SUPPLIES.format(dataset=dataset)}", flush=True)

        start_s = time.perf_counter()
        in_time = await ask_to_leave(mesh.agent, peer.peer_id, hear)
        took_s = time.perf_counter() - start_s
    if not in_time and dataset:
        raise PeerLostError(f"{peer.name} {NO_SUPPLIER.format(dataset=dataset)}")
    if not in_time:
        raise PeerLostError(
            f"{peer.name} has gone before its job could go on without it: the owner goes on from its newest copies"
        )
    if as_json:
        write_fact({"left": {"peer": peer.peer_id, "name": peer.name, "took_s": took_s}})
    else:
        print(f"{peer.name} has gone, after {took_s:.1f} s")
