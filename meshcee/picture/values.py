"""The picture as a value: everything that a page, a terminal or a file may show of a mesh and of a run.

The idea: plain data with a version, in and out of JSON. Whoever draws it looks nowhere else, so all that draw it agree. Steps count
from 0 here, as everywhere in JSON; a figure that nobody knows is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshcee.errors import UsageError
from meshcee.fields import plain, read
from meshcee.figures import BlockCost

__all__ = [
    "FIGURES",
    "VERSION",
    "Boundary",
    "Curves",
    "Figures",
    "Gantt",
    "Help",
    "Lane",
    "Link",
    "Mesh",
    "Moment",
    "Peer",
    "Picture",
    "PlanView",
    "RunView",
    "Seat",
    "Waiting",
]

VERSION = 1  # of the JSON form; a reader refuses a newer one


@dataclass(frozen=True)
class Peer:
    """A peer of the mesh. `x` and `y` are its place on the map, from 0 to 1; `area` is the region that measurement finds."""

    peer: str
    name: str
    state: str  # idle, busy, leaving
    region: str | None = None  # as its user says
    area: int = 0
    x: float = 0.5
    y: float = 0.5
    device: str = ""  # in words; "": it lends none
    memory_bytes: int | None = None
    speed_flops_per_s: float | None = None
    kernels: str | None = None
    software: str = ""
    outside: str | None = None  # versions of its own, that jobs mix in only on request


@dataclass(frozen=True)
class Link:
    """An ordered pair of peers, as its first one measured."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float
    best_bytes_per_s: float  # of what was measured lately: how far it has sagged
    measured_at: float = 0.0


@dataclass(frozen=True)
class Waiting:
    """A job of the mesh that the picture is not about."""

    job: str
    owner: str
    state: str
    step: int


@dataclass(frozen=True)
class Mesh:
    """Who is there; `at` is when that was true."""

    at: float
    peers: tuple[Peer, ...] = ()
    links: tuple[Link, ...] = ()
    coordinator: str | None = None
    term: int | None = None
    jobs: tuple[Waiting, ...] = ()


@dataclass(frozen=True)
class Seat:
    """A member of a stage: what the plan expects of it, what its memory is for, and what the last steps took."""

    label: str  # of its stage
    pipeline: int
    stage: int
    peer: str
    name: str
    first: int
    end: int  # blocks [first, end)
    samples: int
    f_s: float | None = None  # of a micro-batch, as expected
    b_s: float | None = None
    w_s: float | None = None
    busy: float | None = None  # share of the time that it computes, as expected
    needed_bytes: int | None = None
    memory_bytes: int | None = None
    held_bytes: float | None = None  # the most that was taken, as measured
    compute_s: float | None = None  # of a step, as measured
    wait_s: float | None = None
    code_s: float | None = None  # encoding and decoding
    apply_s: float | None = None
    data_s: float | None = None  # that samples were on their way to it
    total_s: float | None = None


@dataclass(frozen=True)
class Boundary:
    """What crosses from a stage to the next: one micro-batch, out and back."""

    pipeline: int
    after: int
    codec_out: str
    codec_back: str
    bytes_out: float | None = None
    bytes_back: float | None = None
    seconds_out: float | None = None
    seconds_back: float | None = None
    busy: float | None = None  # share of the time that its busier line is in use, as expected
    rate_bytes_per_s: float | None = None  # of the slowest pair, as large frames passed
    queued_bytes: float | None = None  # on their way when more came, at most


@dataclass(frozen=True)
class PlanView:
    """The plan that runs. `left_out` are peers with the reason."""

    micro_batch: int
    micros: tuple[int, ...]  # of each pipeline, in a step
    seats: tuple[Seat, ...]
    boundaries: tuple[Boundary, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    kernels: tuple[str, ...] = ()
    step_s: float | None = None  # as expected
    samples_per_s: float | None = None
    bound_s: float | None = None  # with all devices busy and links free


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a report says of its step in one number each."""

    loss: float | None = None
    lr: float | None = None
    norm: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None


FIGURES = tuple(one.name for one in fields(Figures))


@dataclass(frozen=True)
class RunView(Figures):
    """A run, with the figures of its last step; `step` counts those that are done."""

    name: str
    id: str | None = None
    owner: str | None = None
    state: str = "running"  # waiting, done, stopped, failed, aborted, died
    step: int = 0
    steps: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    error: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """Something that happened; `text` is a sentence. `gain` is old step over new: as expected, and as measured since."""

    at: float
    kind: str  # planned, replanned, lost, recovered, leaving, joined, left, coordinator, resumed, ended
    text: str
    step: int | None = None
    gain: float | None = None
    gain_measured: float | None = None


@dataclass(frozen=True)
class Curves:
    """Of a long run one point stands for `stride` steps: means, and of the loss the extremes too. `metrics` are those of
    evaluations, and the loss's terms as train/NAME.
    """

    stride: int = 1
    steps: tuple[int, ...] = ()  # the first of each point
    loss: tuple[float | None, ...] = ()
    loss_low: tuple[float | None, ...] = ()
    loss_high: tuple[float | None, ...] = ()
    lr: tuple[float | None, ...] = ()
    norm: tuple[float | None, ...] = ()
    samples_per_s: tuple[float | None, ...] = ()
    step_s: tuple[float | None, ...] = ()
    metrics: Mapping[str, tuple[tuple[int, float | None], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Help:
    """What would make a step faster, and the step then, by the same plan."""

    text: str
    step_s: float
    gain: float


@dataclass(frozen=True)
class Lane:
    """A member in one step: spans of (kind, micro-batch or -1, start, end), in seconds from the first forward."""

    label: str
    expected: tuple[tuple[str, int, float, float], ...] = ()
    measured: tuple[tuple[str, int, float, float], ...] = ()


@dataclass(frozen=True)
class Gantt:
    """One step that was traced."""

    step: int
    end_s: float
    lanes: tuple[Lane, ...] = ()


@dataclass(frozen=True)
class Picture:
    """All of it, at a moment."""

    at: float
    version: int = VERSION
    mesh: Mesh | None = None
    run: RunView | None = None
    plan: PlanView | None = None
    limit: str = ""  # what bounds the speed now, in words
    helps: tuple[Help, ...] = ()
    curves: Curves = field(default_factory=Curves)
    moments: tuple[Moment, ...] = ()  # the newest last
    gantt: Gantt | None = None
    words: str = ""  # of a plan that nobody trains by yet: every figure behind it
    blocks: tuple[BlockCost, ...] = ()  # of a model that was captured, and no more

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self.__dict__)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Picture:
        """Inverse of `to_json`; ProtocolError on anything else, UsageError where a newer meshcee wrote it."""
        if isinstance(version := data.get("version"), int) and version > VERSION:
            raise UsageError(f"the picture has version {version}, newer than {VERSION}: upgrade meshcee to see it")
        return read(data, cls, "a picture", defaults=True)
