"""When a peer yields to its machine's owner, and when it comes back: a rule over what is seen, without a clock of its own.

The idea: two bounds and two times. Others must keep the machine busy for a while before the peer goes, and leave it rather idle
for longer before it comes back. In between nothing changes, so a peer does not come and go with every mouse click.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshcee.errors import UsageError

__all__ = ["Hours", "Rule", "Seen", "Standing", "why_yield"]

DAY_MIN = 24 * 60


@dataclass(frozen=True)
class Hours:
    """Minutes of the day, local time, in which a machine may be lent; `until` before `start` is past midnight."""

    start_min: int
    until_min: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """ "20:00-07:00"."""
        match = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*", text, re.ASCII)
        hours = [int(part) for part in match.groups()] if match else []
        if (
            not hours
            or hours[0] > 23
            or hours[2] > 24
            or max(hours[1], hours[3]) > 59
            or hours[2] * 60 + hours[3] > DAY_MIN
        ):
            raise UsageError(f"--when {text!r} is no time of day: write for example 20:00-07:00")
        start, until = hours[0] * 60 + hours[1], (hours[2] * 60 + hours[3]) % DAY_MIN
        if start == until:
            raise UsageError(f"--when {text!r} begins when it ends: leave it out to lend at all times")
        return cls(start, until)

    def hold(self, minute: int) -> bool:
        if self.start_min < self.until_min:
            return self.start_min <= minute < self.until_min
        return minute >= self.start_min or minute < self.until_min

    def __str__(self) -> str:
        times = (f"{m // 60:02}:{m % 60:02}" for m in (self.start_min, self.until_min))
        return "-".join(times)


@dataclass(frozen=True)
class Seen:
    """The machine at one moment; None where nobody can tell."""

    at_s: float  # of a clock that never goes back
    minute: int  # of the day, local time
    cpu: float | None = None  # share of all cores that others than this peer use
    gpu: float | None = None  # share of the lent GPU's time that others use
    on_battery: bool | None = None
    metered: bool | None = None  # its network costs by the volume


@dataclass(frozen=True)
class Rule:
    """What counts. Without `owner` only the hours do."""

    owner: bool = True
    hours: Hours | None = None
    busy: float = 0.5  # a share from which others are at work
    free: float = 0.2  # a share below which they are not
    leave_after_s: float = 10.0
    return_after_s: float = 60.0


@dataclass(frozen=True)
class Standing:
    """Where a peer stands: whether it lends, and since when what is seen speaks against that."""

    lends: bool = True
    why: str = ""  # it does not, or is about not to
    against_since_s: float | None = None

    @classmethod
    def at_first(cls, seen: Seen, rule: Rule) -> Standing:
        """Of a peer that starts: it need not come to go at once."""
        why = why_yield(seen, rule, rule.busy)
        return cls(not why, why)

    def after(self, seen: Seen, rule: Rule) -> Standing:
        """One look later."""
        why = why_yield(seen, rule, rule.busy if self.lends else rule.free)
        against = bool(why) == self.lends
        if not against:
            return Standing(self.lends, self.why if not self.lends and not why else why)
        since_s = self.against_since_s if self.against_since_s is not None else seen.at_s
        needed_s = rule.leave_after_s if self.lends else rule.return_after_s
        if seen.at_s - since_s >= needed_s:
            return Standing(not self.lends, why)
        return Standing(self.lends, why or self.why, since_s)


def why_yield(seen: Seen, rule: Rule, share: float) -> str:
    """What speaks for the owner when others may use less than this share; "" for nothing."""
    if rule.hours is not None and not rule.hours.hold(seen.minute):
        return f"this machine is lent at {rule.hours} only"
    if not rule.owner:
        return ""
    if seen.on_battery:
        return "this machine runs on its battery"
    if seen.metered:
        return "this machine's network is metered"
    if seen.gpu is not None and seen.gpu >= share:
        return f"others use {seen.gpu:.0%} of the GPU"
    if seen.cpu is not None and seen.cpu >= share:
        return f"others use {seen.cpu:.0%} of the processor"
    return ""
