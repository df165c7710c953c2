"""What the steps of a job show of the mesh, held against what its plan was made from.

The idea: a figure counts once it has held for several steps, and then takes the place of the one before. So a change is
told once, and noise not at all. A link's rate is its bandwidth where more came while bytes were still on their way. A link that
was idle before each frame begins slowly, as TCP does: it has at least what it shows, and only how that changes says more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

from meshcee.figures import LEAST_BYTES, LinkProfile, Observed

__all__ = [
    "FAST",
    "LASTING_STEPS",
    "SHIFT",
    "Carries",
    "Computes",
    "Feeds",
    "Joined",
    "Pair",
    "Profiled",
    "Reads",
    "Searched",
    "Senses",
    "Shift",
    "as_shown",
    "together",
]

LASTING_STEPS = 5  # steps that a shift must last
SHIFT = 0.2  # less is noise: of 5 steps' medians on a busy machine
DOUBTFUL = 60  # steps after a link has recovered
FAST = 50e6  # bytes per second: above, a large frame takes so short that it shows the machine rather than the link
PROBED = 1.5  # times as much or as little, for a probe of a link that is not in use

Pair = tuple[str, str]
K = TypeVar("K")


@dataclass(frozen=True)
class Computes:
    """A peer computes in so many times the seconds that it took before."""

    peer: str
    times: float

    def text(self, names: Mapping[str, str]) -> str:
        return f"{names.get(self.peer, self.peer)} takes {self.times:.2f} times as long to compute"


@dataclass(frozen=True)
class Carries:
    """A link has so many times the bandwidth that it had before."""

    pair: Pair
    times: float

    def text(self, names: Mapping[str, str]) -> str:
        sender, receiver = (names.get(peer, peer) for peer in self.pair)
        return f"the link from {sender} to {receiver} has {self.times:.2f} times its bandwidth"


@dataclass(frozen=True)
class Feeds:
    """The same of the owner's or the supplier's link to a peer that is fed."""

    peer: str
    times: float

    def text(self, names: Mapping[str, str]) -> str:
        return f"the link that feeds {names.get(self.peer, self.peer)} has {self.times:.2f} times its bandwidth"


@dataclass(frozen=True)
class Reads:
    """The owner reads the samples of a step in so many seconds, which is not what it was."""

    seconds: float

    def text(self, names: Mapping[str, str]) -> str:
        return f"data: the samples of a step take {self.seconds:.2g} s"


@dataclass(frozen=True)
class Joined:
    """A peer that the plan could use has come."""

    peer: str

    def text(self, names: Mapping[str, str]) -> str:
        return f"{names.get(self.peer, self.peer)} has joined"


@dataclass(frozen=True)
class Profiled:
    """A peer that has no part in the plan was profiled again, and computes otherwise than was known of it."""

    peer: str

    def text(self, names: Mapping[str, str]) -> str:
        return f"{names.get(self.peer, self.peer)} computes otherwise than when it was profiled before"


@dataclass(frozen=True)
class Searched:
    """Nothing has changed: a longer search than the first one has come to its end."""

    def text(self, names: Mapping[str, str]) -> str:
        return "a longer search has found other plans"


Shift = Computes | Carries | Feeds | Reads | Joined | Profiled | Searched


_Scaled = Computes | Carries | Feeds


def together(shifts: Iterable[Shift]) -> tuple[Shift, ...]:
    """Each thing that has shifted once, by how much in all, in the order of the first shifts. What is as it was is left out, unless
    all is."""
    found: dict[Any, Shift] = {}
    for shift in shifts:
        key = (type(shift), getattr(shift, "peer", None) or getattr(shift, "pair", None))
        before = found.get(key)
        if isinstance(shift, _Scaled) and isinstance(before, _Scaled):
            shift = replace(shift, times=before.times * shift.times)
        found[key] = shift
    shifted = tuple(s for s in found.values() if not isinstance(s, _Scaled) or abs(s.times - 1) > SHIFT / 2)
    return shifted or tuple(found.values())


class Senses:
    """What steps show, held against what the plan was made from.

    slow   peer -> how many times its profiled seconds it computes now, where that has shifted
    rates  (from, to) -> bytes per second now, where that has shifted; FAST for that or more
    best   what links had that have sagged since
    """

    def __init__(self, bandwidths: Mapping[Pair, float], best: Mapping[Pair, float] | None = None) -> None:
        self.slow: dict[str, float] = {}
        self.rates: dict[Pair, float] = {}
        self._known = {pair: min(bandwidth, FAST) for pair, bandwidth in bandwidths.items()}
        self._best = self._known | {pair: min(bandwidth, FAST) for pair, bandwidth in (best or {}).items()}
        self._steps = 0
        self._sagged: dict[Pair, int] = {}  # when it was last known to be much worse than at its best
        self._usual_s: dict[str, float] = {}
        self._compute_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LASTING_STEPS))
        self._rates: defaultdict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=LASTING_STEPS))
        self._idle_rates: defaultdict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=LASTING_STEPS))
        self._usual_rates: dict[Pair, float] = {}  # of links that are idle before each frame
        self._probes: defaultdict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=2))
        self._warm = False

    @classmethod
    def of(cls, links: Mapping[Pair, LinkProfile]) -> Senses:
        """What records say. A link at the lower end of its range has sagged: `as_shown` leaves it so."""
        now = {pair: link.bandwidth_bytes_per_s for pair, link in links.items()}
        spans = {pair: link.bandwidth_range_bytes_per_s for pair, link in links.items()}
        return cls(now, {pair: span[1] for pair, span in spans.items() if span is not None and span[0] == now[pair]})

    def restart(self) -> None:
        """Another plan begins: members hold other blocks, and the first step warms up."""
        self._usual_s.clear()
        self._compute_s.clear()
        self._rates.clear()
        self._idle_rates.clear()
        self._usual_rates.clear()
        self._probes.clear()
        self._warm = False

    def forget(self, peer: str) -> None:
        """How slow a device was says nothing any more: another process of it has come, or it was profiled again."""
        self.slow.pop(peer, None)
        self._usual_s.pop(peer, None)
        self._compute_s.pop(peer, None)

    @property
    def compute_s(self) -> dict[str, float]:
        """Seconds that a step of the running plan takes each member to compute, once that is known."""
        rows = self._compute_s
        return {p: median(rows[p]) if len(rows[p]) == LASTING_STEPS else usual for p, usual in self._usual_s.items()}

    @property
    def doubtful(self) -> set[Pair]:
        """Links that were much better once, or have been so for few steps: whether they are now can change at any time."""
        for pair, rate in self._known.items():
            self._best[pair] = max(rate, self._best.get(pair, rate))
            if rate * PROBED <= self._best[pair]:
                self._sagged[pair] = self._steps
        return {pair for pair, step in self._sagged.items() if self._steps - step <= DOUBTFUL}

    def best(self, pair: Pair, otherwise: float) -> float:
        """The most that is known to have crossed a link, in bytes per second."""
        return self._best.get(pair, otherwise)

    def assume(self, pair: Pair, bandwidth: float) -> None:
        """What a link has by others that go the same way: what it showed before is older than that."""
        self._known[pair] = self.rates[pair] = min(bandwidth, FAST)
        self._rates[pair].clear()
        self._idle_rates[pair].clear()

    def share(self, pair: Pair) -> float:
        """What a link has of its best bandwidth, as far as is known."""
        return self._known[pair] / self._best[pair] if pair in self._best else 1.0

    def hear(self, observed: Observed) -> list[Shift]:
        """One more step; what has shifted."""
        self._steps += 1
        if not self._warm:
            self._warm = True
            return []
        shifts: list[Shift] = []
        for peer, seconds in observed.compute_s.items():
            if seconds > 0 and (change := _shift(self._compute_s[peer], seconds, self._usual_s, peer)) is not None:
                before = self.slow.get(peer, 1.0)
                after = max(1.0, before * change)  # what it gains beyond its profile, the first steps had lost
                if after != before:
                    self.slow[peer] = after
                    shifts.append(Computes(peer, after / before))
                elif change < 1:  # so what those steps made known of it has to be learnt anew
                    shifts.append(Computes(peer, change))
        for pair, rate in observed.rates.items():
            idle = observed.depths.get(pair, LEAST_BYTES) < LEAST_BYTES
            if (change := self._hear_link(pair, min(rate, FAST), idle=idle)) is not None:
                self.rates[pair] = self._known[pair]
                shifts.append(Carries(pair, change))
        return shifts

    def _hear_link(self, pair: Pair, rate: float, *, idle: bool) -> float | None:
        """How many times its known bandwidth a link has, if that is much; then it is known as that."""
        row = self._idle_rates[pair]
        if not idle:
            row.clear()
            if (change := _shift(self._rates[pair], rate, self._known, pair)) is not None:
                self._usual_rates.pop(pair, None)
            return change
        if pair in self._known:
            self._rates[pair].append(self._known[pair])  # nothing queued, so nothing speaks against it
        row.append(rate)
        if len(row) < LASTING_STEPS:
            return None
        least = median(row)
        usual = self._usual_rates.setdefault(pair, least)
        before = self._known.setdefault(pair, least)
        now = min(max(before * least / usual, least), FAST)
        if abs(now / before - 1) < SHIFT:
            return None
        self._known[pair], self._usual_rates[pair] = now, least
        self._rates[pair].clear()
        row.clear()
        return now / before

    def probed(self, bandwidths: Mapping[Pair, float]) -> list[Shift]:
        """What others have just measured of links that no step crosses; what has shifted.

        The better of the last two probes counts: what else a link carried meanwhile makes it look slower, nothing faster.
        """
        shifts: list[Shift] = []
        for pair, bandwidth in bandwidths.items():
            row = self._probes[pair]
            row.append(min(bandwidth, FAST))
            now = max(row)
            before = self._known.setdefault(pair, now)
            change = now / before
            if change >= PROBED or change <= 1 / PROBED:
                self._known[pair] = self.rates[pair] = now
                shifts.append(Carries(pair, change))
        return shifts


def as_shown(link: LinkProfile, rate: float) -> LinkProfile:
    """The link with the bandwidth that it has shown. How busy it is now makes it no other region's: the upper end of its range
    stays what it was; and above FAST that, which was probed, says more."""
    most = (link.bandwidth_range_bytes_per_s or (0.0, link.bandwidth_bytes_per_s))[1]
    now = max(rate, most) if rate >= FAST else rate
    return replace(link, bandwidth_bytes_per_s=now, bandwidth_range_bytes_per_s=(now, most) if now < most else None)


def _shift(row: deque[float], value: float, known: dict[K, float], key: K) -> float | None:
    """How many times the known figure the last LASTING_STEPS are, if that is much; then it is known as that."""
    row.append(value)
    if len(row) < LASTING_STEPS:
        return None
    now = median(row)
    before = known.setdefault(key, now)
    if before <= 0 or abs(now / before - 1) < SHIFT:
        return None
    known[key] = now
    row.clear()
    return now / before
