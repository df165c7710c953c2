"""How far a run went back after each loss, by its owner's log, held against the copies of its state that there were.

The idea: the log tells when copies are asked for, when all stages have them and who holds them, of each checkpoint on the disk,
and of who was missed. What a run must go on from follows from these alone. While one copy of each stage survives, it is the newest
that is within reach, and at most k + 1 steps are computed again, k being how often copies are made: the most steps between two
of them in this run. A loss may meet copies in the making. Then the steps since they were asked for come on top, but no more than
copies of this run took to be whole, as a thin line carries them for many steps. A hand-over drops copies that are not whole, so
these count as none. When no copy survives, it is the newest copy in other regions, or the last checkpoint. Copies before the newest
may serve as long as they are there: members forget them when they are asked for the next. Copies are out of reach when two epochs
that began with them did not bring all to a member, as when a link between two that live is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from meshcee.events import Event

__all__ = ["Back", "Past", "going_back"]

TRIES = 2  # epochs that begin with copies which do not reach a member
AHEAD = 3  # steps that members are fed before the first of them is reported: while the owner sleeps, they compute them


@dataclass(frozen=True)
class Back:
    """A run that had `done` steps went on from the state before `next_step`: one that peers held, or the disk's.

    `held` is the newest step of which every stage had a surviving copy, `sure` the same where these were the newest copies, `kept`
    that of the last checkpoint; `far` tells that only copies for the loss of a region were left of `held`. `anew` tells that no
    step was new since the way back before, `in_peace` that nobody was lost since: another plan goes on where this one ended.
    `dropped` are the steps from the last whole copies to a hand-over that dropped the next ones, `making` those since copies were
    asked for that were not whole yet.
    """

    done: int
    next_step: int
    with_peers: bool
    held: int | None
    kept: int
    far: bool = False
    sure: int | None = None
    anew: bool = False
    in_peace: bool = False
    dropped: int = 0
    making: int = 0

    @property
    def again(self) -> int:
        """Steps computed again."""
        return self.done - self.next_step

    def wrong(self, every: int, ahead: int = 0, making: float = 0.0) -> str:
        """What this should not have been, or nothing; `every` is k, `ahead` steps more may have no copy, `making` as in `Past`."""
        most = max(every, self.dropped) + 1 + ahead + min(self.making, making)
        where = f"after {self.done} steps the run went back to {self.next_step}"
        if self.with_peers and self.next_step != self.held:
            return f"{where} of peers, who held {self.held}"
        if self.with_peers and not (self.far or self.anew) and self.again > most:
            return f"{where}, with copies every {every} steps at most"
        if not self.with_peers and self.sure is not None and self.sure > self.next_step:
            return f"{where} of the disk, though peers held {self.sure}"
        if not self.with_peers and self.next_step < self.kept:
            return f"{where}, though the disk had {self.kept}"
        if self.in_peace and self.again and not self.anew:
            return f"{where}, and nobody was lost"
        return ""

    def to_json(self) -> dict[str, Any]:
        where = "peers" if self.with_peers else "disk" if self.next_step else "start"
        return {"done": self.done, "again": self.again, "from": where}


@dataclass
class Past:
    """`every` is k, the most steps between two copies that were asked for, or from one to the loss that came next. `making`: the
    most steps that whole ones took. `ahead` is more than 0 for an owner that slept, whose members go on with what they were fed.
    """

    every: int = 0
    ahead: int = 0
    making: float = 0.0
    backs: list[Back] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [wrong for back in self.backs if (wrong := back.wrong(self.every, self.ahead, self.making))]


def going_back(entries: Iterable[Mapping[str, Any]], names: Mapping[str, str], *, slept: bool = False) -> Past:
    """`entries` are the lines of the log, from debug upwards, `names` those of the peers by id, as far as the log does not tell:
    who joins with the id of one that is gone has another name from then on. `slept`: the owner was suspended.
    """
    past, asked, made, kept, handed, in_peace = Past(ahead=AHEAD if slept else 0), 0, 0, 0, 0, True
    dropped = 0
    took_s = asked_s = 0.0  # what the last copies took to be whole, and when they were asked for
    names = dict(names)
    # The last two of each kind: the step, and of its tensors who has them.
    whole: dict[str, list[tuple[int, list[set[str]]]]] = {"copies": [], "far copies": []}
    for entry in entries:
        event = entry["event"]
        if event in ("peer joined", "peer changed"):
            names[entry["peer"]] = entry["name"]
        elif event == "copies are asked for":
            past.every = max(past.every, entry["next_step"] - asked)
            now_s = _when(entry)
            if took_s:  # the steps between two that were asked for are taken to be of one length
                past.making = max(past.making, (entry["next_step"] - asked) * took_s / (now_s - asked_s))
            asked, asked_s, took_s = entry["next_step"], now_s, 0.0
        elif event in whole or event == "copies are handed over":
            tier = event if event in whole else "copies"
            if event == "copies":
                made, dropped, took_s = entry["next_step"], 0, _when(entry) - asked_s
            elif event not in whole:
                handed = entry["next_step"]
                dropped = handed - made if asked > made else 0
            held_by = [{names.get(peer, peer) for peer in peers} for peers in entry["held_by"]]
            older = [c for c in whole[tier] if c[0] < entry["next_step"]]
            whole[tier] = [*older[-1:], (entry["next_step"], held_by)]
            if event == "copies":  # older far ones count on members of this plan alone, if it has any
                members = (
                    {names.get(peer, peer) for stage in entry["holders"] for peer in stage} if entry["far"] else set()
                )
                for _, found in whole["far copies"]:
                    for peers in found:
                        peers.intersection_update(members)
        elif event == "checkpoint":
            kept = entry["next_step"]
        elif event == Event.MEMBER_LOST:
            in_peace = False
            for _, held_by in [*whole["copies"], *whole["far copies"]]:
                for peers in held_by:
                    peers.difference_update(names.get(peer, peer) for peer in entry["gone"])
        elif event == Event.COPIES_OUT_OF_REACH and entry["epochs"] >= TRIES:
            tier = "far copies" if entry["far"] else "copies"
            whole[tier] = [c for c in whole[tier] if c[0] != entry["next_step"]]
        elif event == Event.STATE_FOUND:
            done = entry["done"]
            known = [[c for c in found if c[0] <= done] for found in whole.values()]
            near, far = (max((s for s, held_by in found if all(held_by)), default=-1) for found in known)
            newest = [s for found in known for s, held_by in found[-1:] if all(held_by)]
            held, sure = max(near, far), max(newest, default=None)
            anew = bool(past.backs) and past.backs[-1].done == done
            with_peers, held_step = entry["with_peers"], held if held >= 0 else None
            making = done - asked if asked > made else 0
            back = Back(
                done, entry["next_step"], with_peers, held_step, kept, far > near, sure, anew, in_peace, dropped, making
            )
            took_s = 0.0
            in_peace = True
            whole["far copies"] = [c for c in whole["far copies"] if c[0] <= back.next_step]
            past.every = max(past.every, done - asked)
            past.backs.append(back)
            if back.next_step != handed:  # what was handed over dies with any of its makers
                asked = made = back.next_step
                dropped = 0
            kept = kept if back.with_peers else back.next_step
    return past


def _when(entry: Mapping[str, Any]) -> float:
    """Seconds since an epoch; the entries of a test may have none."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp() if "timestamp" in entry else 0.0
