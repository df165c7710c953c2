"""Options and arguments that several commands have: what each is called, what it means, and the variable that sets it.

The idea: a name here is the type of a command's parameter, so an option reads the same wherever it is. Where commands share many, a
class has them as its fields, with their defaults, and `spread` gives a command all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from meshcee.config import LONGEST_LEAVE_S
from meshcee.files.home import Home
from meshcee.files.token_file import read_token

__all__ = [
    "Announce",
    "Datasets",
    "Device",
    "DeviceProcess",
    "DirectPort",
    "Identity",
    "JobFile",
    "Join",
    "Json",
    "LeaveWithin",
    "Lent",
    "Listen",
    "Memory",
    "Metrics",
    "Name",
    "NoRelay",
    "PeerName",
    "Port",
    "Profiles",
    "Qr",
    "Region",
    "RunName",
    "ShowUi",
    "ShownRun",
    "Spot",
    "Stages",
    "Testbed",
    "Threads",
    "Valid",
    "When",
    "Yield",
    "runs_here",
    "spread",
]


def runs_here() -> list[str]:
    """With which the shell completes a run's name."""
    return ["last", *(run.id for run in Home().runs())]


def _join(context: typer.Context, text: str | None) -> str | None:
    """The line; `meshcee peer` reads it itself, as a word behind it may want standard input."""
    return text if hasattr(context.command, "commands") else read_token(text)


def _leave_within(within_s: float | None) -> float | None:
    if within_s is not None and not 0 <= within_s <= LONGEST_LEAVE_S:  # NaN compares as false
        raise typer.BadParameter(f"{within_s:g} s: a peer leaves within 0 to {LONGEST_LEAVE_S:g} s")
    return within_s


def _identity(file: Path | None) -> Path | None:
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"{file} is a folder: name a file in it, as {file / 'peer.key'}")
    return file


Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        "-j",
        envvar="MESHCEE_JOIN",
        callback=_join,
        help="The invite token or multiaddress of a peer, @FILE with one, or - for standard input.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, one object a line.")]
JobFile = Annotated[Path, typer.Argument(help="A Python file that defines `job = meshcee.Job(...)`.")]
PeerName = Annotated[str, typer.Argument(help="A peer's name, its id, or how that begins.")]
RunName = Annotated[str, typer.Argument(help="A run's id, its beginning, or last.", autocompletion=runs_here)]
Stages = Annotated[
    int | None,
    typer.Option(
        min=1, help="Use exactly this many stages, after a loss fewer if need be; default: the planner decides."
    ),
]
Valid = Annotated[str, typer.Option(help="How long the printed token admits peers, e.g. 12h, 7d.")]
ShownRun = Annotated[
    str | None,
    typer.Argument(
        help="A run of this machine: its id, its beginning, or last.",
        autocompletion=runs_here,
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Of the page, on 127.0.0.1; 0 takes a free one.")]
ShowUi = Annotated[bool, typer.Option("--ui", help="Show it live on a page of this machine: `meshcee ui`.")]
Testbed = Annotated[str | None, typer.Option(help="FILE:NAME of a testbed, or NAME of one that ships with meshcee.")]
Profiles = Annotated[
    Path | None, typer.Option(help="A file of device profiles; default: the one that ships with meshcee.")
]
Device = Annotated[str, typer.Option(envvar="MESHCEE_DEVICE", help="auto, cpu, cuda:N or mps.")]
Memory = Annotated[str | None, typer.Option(envvar="MESHCEE_MEMORY", help="What a stage may use, e.g. 8GiB.")]
Region = Annotated[str | None, typer.Option(envvar="MESHCEE_REGION", help="A hint at where this peer is.")]
Threads = Annotated[int | None, typer.Option(envvar="MESHCEE_THREADS", min=1, max=1024, help="CPU threads of torch.")]
Identity = Annotated[
    Path | None,
    typer.Option(envvar="MESHCEE_IDENTITY", callback=_identity, help="Identity file; default: a free one."),
]
Listen = Annotated[
    str,
    typer.Option(
        envvar="MESHCEE_LISTEN", help="ADDRESS:PORT to listen on, several with commas; port 0 takes a free one."
    ),
]
Announce = Annotated[
    str | None, typer.Option(envvar="MESHCEE_ANNOUNCE", help="PUBLIC-ADDRESS:PORT that others dial too.")
]
Yield = Annotated[
    bool,
    typer.Option(
        "--yield-to-owner",
        envvar="MESHCEE_YIELD_TO_OWNER",
        help="Leave in order while others use this machine, on battery or a metered network; come back when that is over.",
    ),
]
When = Annotated[str | None, typer.Option(envvar="MESHCEE_WHEN", help="Lend at these hours only, e.g. 20:00-07:00.")]
Spot = Annotated[
    str | None,
    typer.Option(
        envvar="MESHCEE_SPOT",
        help="A machine of a cloud that may be taken back: aws, gcp, azure or auto. Leave in order at the cloud's notice.",
        autocompletion=lambda: ["aws", "gcp", "azure", "auto"],
    ),
]
Name = Annotated[
    str | None, typer.Option(envvar="MESHCEE_NAME", help="Shown to people; default: host name and four letters.")
]
LeaveWithin = Annotated[
    float | None,
    typer.Option(
        envvar="MESHCEE_LEAVE_WITHIN", callback=_leave_within, help="Seconds that its job has to go on without it: 30."
    ),
]
DeviceProcess = Annotated[
    bool | None,
    typer.Option(
        "--device-process/--no-device-process",
        envvar="MESHCEE_DEVICE_PROCESS",
        help="Compute in a process of its own, without this peer's keys: a crash ends only that. Default: wherever it can.",
    ),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=FILE.py:FUNCTION. Jobs may read the set that FUNCTION() returns, at this peer; several are fine."
    ),
]
Qr = Annotated[bool, typer.Option("--qr", help="Show the line as a QR code too.")]
Metrics = Annotated[
    str | None,
    typer.Option(
        envvar="MESHCEE_METRICS",
        help="ADDRESS:PORT that answers /metrics (Prometheus) and /health, e.g. 127.0.0.1:9464; needs the extra `metrics`.",
    ),
]
DirectPort = Annotated[
    int,
    typer.Option(
        envvar="MESHCEE_DIRECT_PORT",
        min=-1,
        max=65535,
        help="TCP port for tensors; 0 takes a free one, -1 leaves them to libp2p, as a firewall does.",
    ),
]
NoRelay = Annotated[
    bool,
    typer.Option(
        "--no-relay",
        envvar="MESHCEE_NO_RELAY",
        help="Do not pass on the sealed bytes of two members that cannot reach each other.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Lent:
    """What a machine lends to which mesh, and how others reach it: what a peer is told, and a service that starts one."""

    join: Join = None
    name: Name = None
    device: Device = "auto"
    memory: Memory = None
    region: Region = None
    threads: Threads = None
    listen: Listen = "0.0.0.0:0"
    announce: Announce = None
    direct_port: DirectPort = 0
    no_relay: NoRelay = False
    leave_within: LeaveWithin = None
    yield_to_owner: Yield = False
    when: When = None
    spot: Spot = None
    dataset: Datasets = None


def spread(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with a parameter of this class, by its name in small letters, has the options that are its fields."""
    hints, name = get_type_hints(kind, include_extras=True), kind.__name__.lower()
    options = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(kind)
    ]

    def of(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            command(**{name: kind(**{one.name: given.pop(one.name) for one in options})}, **given)

        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for one in own.parameters.values():
            parameters += options if one.name == name else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        called.__dict__["__signature__"] = own.replace(parameters=parameters)
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return of
