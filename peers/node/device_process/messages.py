"""What a peer and the process of its device say to each other, beside what their streams need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

from msgspec import Meta

from meshcee.config import Limits, Timeouts
from meshcee.fields import Count, Small
from meshcee.figures import DeviceProfile
from peers.device.worker.packets import Confinement

__all__ = [
    "FROM_DEVICE",
    "MOST_CHECKS",
    "TO_DEVICE",
    "Accept",
    "Answer",
    "Bandwidth",
    "Begin",
    "Begun",
    "Check",
    "Crossed",
    "Drop",
    "Leave",
    "Ping",
    "Pong",
    "Ready",
    "Said",
    "Speaks",
    "State",
    "first",
]

_Text = Annotated[str, Meta(max_length=2000)]
_Name = Annotated[str, Meta(max_length=256)]
_Figure = Annotated[float, Meta(ge=0)]
MOST_FIGURES = 128
MOST_CHECKS = 8  # that wait
_Key = Annotated[bytes, Meta(max_length=104)]  # that signs audited steps for the peer, packed; or none
_Figures = Annotated[Mapping[_Name, _Figure], Meta(max_length=MOST_FIGURES)]


@dataclass(frozen=True)
class Begin:
    """To the device, first: who it works for, and with what."""

    peer: _Name
    device: _Name
    threads: Annotated[int, Meta(ge=1, le=4096)]
    memory_bytes: Count | None
    host: _Text
    threads_said: bool
    known: DeviceProfile | None  # what an earlier process has measured, and the mesh was promised
    direct_sums: bool  # it may use the network, for these alone
    speaks: _Key
    limits: Limits
    timeouts: Timeouts


@dataclass(frozen=True)
class Ready:
    """The device has been measured, and a first step imports nothing."""

    device: DeviceProfile
    confinement: Confinement


@dataclass(frozen=True)
class State:
    """The device has become busy or idle."""

    busy: bool


@dataclass(frozen=True)
class Check:
    """Graphs of an offer or a request, in the memory that comes along, to be checked in a process with nothing to lose."""

    number: Small
    sizes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=16)]


@dataclass(frozen=True)
class Accept:
    """Whether an owner's term is none that is over."""

    number: Small
    owner: _Name
    term: tuple[Small, _Name]


@dataclass(frozen=True)
class Answer:
    """To a Check or an Accept with this number: what is wrong, or "", and the class of that error."""

    number: Small
    wrong: _Text = ""
    kind: _Name = ""


@dataclass(frozen=True)
class Begun:
    """A plan begins, of which each step is told."""


@dataclass(frozen=True)
class Crossed:
    """Of a step: by peer, bytes per second that crossed the link, and frames that queued for it."""

    rates: _Figures
    depths: _Figures


@dataclass(frozen=True)
class Bandwidth:
    """Of the links from here, as published; a peer that is not named has none."""

    bytes_per_s: _Figures


@dataclass(frozen=True)
class Speaks:
    """The key from now on: the one before ends."""

    key: _Key


@dataclass(frozen=True)
class Ping:
    """Is anybody there?"""


@dataclass(frozen=True)
class Pong:
    """The answer."""


@dataclass(frozen=True)
class Said:
    """A line for the peer's log."""

    level: Literal["info", "warning", "error"]
    event: _Text
    fields: Annotated[Mapping[_Name, _Text], Meta(max_length=8)]


@dataclass(frozen=True)
class Leave:
    """Take no further offer."""


@dataclass(frozen=True)
class Drop:
    """End the running job here."""


TO_DEVICE: tuple[type[Any], ...] = (Begin, Answer, Bandwidth, Speaks, Ping, Leave, Drop)
FROM_DEVICE: tuple[type[Any], ...] = (Ready, State, Check, Accept, Begun, Crossed, Pong, Said)


def first(figures: Mapping[str, float]) -> dict[str, float]:
    """As many as a message may have."""
    return dict(islice(figures.items(), MOST_FIGURES))
