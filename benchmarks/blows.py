"""What befalls a mesh in a storm (benchmarks/virtual_chaos.py): blows by their names; whom they hit and how long by the seed.

The idea: a blow is drawn and struck here, and made of what a Storm can do to its mesh. An aimed blow prefers those who are at work
at that moment (benchmarks/aims.py). Weather is no blow: devices, links and newcomers tempt the run to go over to another plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshcee.errors import MeshceeError
from meshcee.plan import Plan
from peers.device.compute import Pace
from peers.measure.sounding import sound
from peers.node.departure import ask_to_leave
from peers.owner.adaptation import Adaptation
from peers.owner.epoch import Report
from peers.transport import StreamClosed
from peers.transport.memory import Impairment

if TYPE_CHECKING:
    from benchmarks.virtual_chaos import Storm

__all__ = ["BLOWS", "LINK", "REFUSALS", "WEATHER", "Blows", "restless"]

LINK = Impairment(latency_s=0.02, bandwidth_bytes_per_s=12.5e6, jitter_s=0.01)
KILLS = ("kill a member", "kill the coordinator", "kill two", "kill a holder and its keeper")
REFUSALS = {"disk full": errno.ENOSPC, "read-only disk": errno.EROFS}
WEATHER = ("slow device", "sagging link", "fast join", "another plan")
BLOWS = (
    *KILLS,
    "restart",
    "restart without its term",
    "stop",
    "cut",
    "silent link",
    "partition",
    "slow",
    "lossy",
    "join",
    "leave",
    "hung device",
    "full device",
    *REFUSALS,
    "clock step",
    "slow loris",
    "suspend",
    "lose a region",
    "kill the owner",
    *WEATHER,
)
STEP_S = 2.0, 3600.0  # of a clock
SUSPENDED_S = 5.0, 200.0
LORIS_BYTES_PER_S = 20.0, 400.0
SAGS_TO_BYTES_PER_S = 500.0, 5e3  # an activation with its header has some hundred bytes
TIMES_SLOWER = 2.0, 8.0
TIMES_FASTER = 2.0, 6.0


@dataclass(frozen=True)
class Hung(Pace):
    """No call ends before then, by the loop's clock."""

    ends_s: float = math.inf

    def seconds(self, flops: float) -> float:
        return max(0.0, self.ends_s - asyncio.get_running_loop().time()) + super().seconds(flops)


class Blows:
    """Those of one storm. `near` are names: while an aimed blow is struck, whom it prefers."""

    def __init__(self, storm: Storm, seed: int) -> None:
        self.storm, self.chance = storm, random.Random(seed)
        self.tempted = 0  # plans that the run is still to be tempted by
        self._near: tuple[str, ...] = ()
        self._has_filled = False  # a device was out of memory
        self._hung: set[str] = set()

    async def strike(self, kind: str, near: Sequence[str] = ()) -> str:
        """One blow; what it was. Whatever it breaks for a while is whole again after `last_s`; two peers or more stay, and until
        the first plan the owner can reach as many as the job asks for."""
        self._near = tuple(near)
        try:
            return await self._strike(kind)
        finally:
            self._near = ()

    async def _strike(self, kind: str) -> str:
        storm, chance, last_s = self.storm, self.chance, self.chance.uniform(1.0, 25.0)
        if kind in ("restart", "restart without its term") and storm.away:
            name = chance.choice(sorted(storm.away))
            del storm.away[name]
            await storm.start(name, forget=kind != "restart")
            return f"{name} {kind}"
        two = kind in ("kill two", "kill a holder and its keeper")
        least = storm.least
        if kind in KILLS and len(storm.staying) > least + two:
            return self._kill(kind)
        if kind == "kill the owner" and storm.can_lose_the_owner:
            return self._kill_owner()
        if kind == "lose a region" and len(storm.staying) >= least + 2:
            return self._lose_region(chance.randint(2, len(storm.staying) - least), last_s)
        stay = [name for name in storm.members() if name in storm.staying]
        if kind == "leave" and stay and len(storm.staying) > least:
            return self._leave(self._one_of(stay))
        if kind in REFUSALS and storm.disk.error is None:
            return self._refuse(kind, last_s)
        if kind == "clock step":
            return self._step_clock(self._one_of([*storm.members(), storm.owner]), last_s)
        if kind == "suspend":
            spared = storm.mesh.result.plan is None and len(storm.staying) <= least
            victims = [storm.owner] if spared else [*storm.members(), storm.owner]
            return self.suspend(self._one_of(victims), chance.uniform(*SUSPENDED_S))
        if kind == "slow loris":
            victim, rate = self._one_of(storm.members()), self._between(LORIS_BYTES_PER_S)
            self._answer(victim, replace(LINK, bandwidth_bytes_per_s=rate))
            asyncio.get_running_loop().call_later(last_s, self._answer, victim, LINK)
            return f"{victim} answers with {rate:.0f} bytes a second for {last_s:.1f} s"
        if kind == "stop":
            victim = self._one_of(storm.members())
            self._impair(victim, replace(LINK, latency_s=last_s), last_s)
            return f"{victim} stopped for {last_s:.1f} s"
        if kind == "cut":
            a, b = self._two_of([*storm.lending, storm.owner])
            storm.here.network.cut(storm.here.agents[a].peer_id, storm.here.agents[b].peer_id)
            asyncio.get_running_loop().call_later(last_s, storm.heal)
            return f"{a} and {b} cut off from each other for {last_s:.1f} s"
        if kind == "silent link":
            a, b = self._two_of([*storm.lending, storm.owner])
            self._change_link(a, b, replace(LINK, latency_s=last_s), last_s)
            return f"nothing arrives between {a} and {b} for {last_s:.1f} s"
        if kind == "partition" and not storm.is_parted:
            return self._partition(last_s)
        if kind == "slow":
            victim = self._one_of(storm.members())
            self._impair(victim, replace(LINK, bandwidth_bytes_per_s=2e4), last_s)
            return f"{victim} on slow links for {last_s:.1f} s"
        if kind == "hung device" and len(storm.lending) - len(self._hung) > least:
            return self._hang(last_s * 20)
        if kind == "full device" and not self._has_filled:
            self._has_filled = True  # two that fail alike on the same work end a run, as they should
            victim = self._one_of(storm.members())
            storm.full.add(storm.here.agents[victim].peer_id)
            return f"{victim} is out of memory in its next call"
        if kind == "lossy":
            victim = self._one_of(storm.members())
            self._impair(victim, replace(LINK, loss=0.02), last_s)
            return f"{victim} on lossy links for {last_s:.1f} s"
        if kind in WEATHER:
            return await self._tempt(kind, last_s)
        return f"{await storm.newcomer()} joined"

    # -- whom

    def _between(self, bounds: tuple[float, float]) -> float:
        """Of any order of magnitude alike."""
        return math.exp(self.chance.uniform(*map(math.log, bounds)))

    def _one_of(self, names: Sequence[str]) -> str:
        return self.chance.choice([name for name in self._near if name in names] or names)

    def _two_of(self, names: Sequence[str]) -> tuple[str, str]:
        near = list(dict.fromkeys(name for name in self._near if name in names))
        a, b = near if len(near) == 2 else self.chance.sample(names, 2)
        return a, b

    # -- blows

    def _hang(self, last_s: float) -> str:
        """Its device takes a call and does not end it meanwhile; the peer itself answers, and becomes ready for anything."""
        victim = self._one_of(self.storm.members())
        self._hung.add(victim)
        usual, ends_s = self.storm.paces[victim], asyncio.get_running_loop().time() + last_s
        recover = self._pace(victim, Hung(usual.speed_flops_per_s, usual.claimed_flops_per_s, ends_s))

        def end() -> None:
            recover()
            self._hung.discard(victim)

        asyncio.get_running_loop().call_later(last_s, end)
        return f"the device of {victim} hangs for {last_s:.0f} s"

    def _pace(self, victim: str, pace: Pace) -> Any:
        """Until what is returned is called, unless it hangs then."""
        compute, usual = self.storm.here.agents[victim].compute, self.storm.paces[victim]
        assert compute is not None
        compute.pace = pace

        def recover() -> None:
            if compute.pace is pace:
                compute.pace = usual

        return recover

    def _kill(self, kind: str) -> str:
        members = self.storm.members()
        first = members.index(self._one_of(members))
        victims = members[first : first + 2] if kind == "kill two" else [members[first]]
        if kind == "kill a holder and its keeper":
            victims = list(dict.fromkeys([victims[0], self.storm.keeper_of(victims[0])]))
        if kind == "kill the coordinator" and (coordinator := self.storm.coordinator()) is not None:
            victims = [coordinator]
        for victim in victims:
            self.storm.kill(victim)
        return f"{' and '.join(victims)} killed"

    def _kill_owner(self) -> str:
        """Nothing of it runs any more: what it would do next, it has not done."""
        storm = self.storm
        storm.here.crash(storm.owner)
        storm.stand_still(storm.owner)
        return "the owner killed"

    def _leave(self, victim: str) -> str:
        """It is asked by a signal, or by the owner's `meshcee leave`, as far as that gets through."""
        storm = self.storm
        storm.doomed.add(victim)
        if self.chance.random() < 0.5:
            storm.departures[victim].ask()
            return f"{victim} leaves"

        async def ask() -> None:
            with contextlib.suppress(MeshceeError, StreamClosed, TimeoutError):
                agent = storm.here.agents[victim]
                await ask_to_leave(storm.mesh.agent, agent.peer_id, lambda within_s, supplies: None)

        with storm.in_life(storm.owner):
            storm.later(ask())
        return f"{victim} is asked to leave"

    def _lose_region(self, count: int, last_s: float) -> str:
        """Members beside each other die at once, or are cut off from all others and die then; later they are there again."""
        storm, chance = self.storm, self.chance
        members = storm.members()
        first = chance.randrange(max(1, len(members) - count + 1))
        victims = members[first : first + count]
        others = sorted(set(storm.lending) - set(victims))
        victims += chance.sample(others, min(count - len(victims), len(others)))
        cut_off = not storm.is_parted and chance.random() < 0.5
        if cut_off:
            storm.part(victims)
            storm.doomed.update(victims)
        away_s = chance.uniform(5, 60)

        async def lose() -> None:
            if cut_off:
                await asyncio.sleep(last_s)
            for victim in victims:
                storm.kill(victim)
            storm.doomed.difference_update(victims)
            if cut_off:
                storm.heal()
            await asyncio.sleep(away_s)
            for victim in victims:
                if storm.away.pop(victim, None) is not None:
                    await storm.start(victim)

        if not cut_off:
            for victim in victims:
                storm.kill(victim)
        storm.later(lose())
        how = f"cut off from the rest for {last_s:.1f} s, then lost" if cut_off else "lost at once"
        return f"{', '.join(victims)} {how}; there again {away_s:.0f} s later"

    def _refuse(self, kind: str, last_s: float) -> str:
        """The disk of the owner, once there is a first step (before, that is an error), or of a member."""
        storm = self.storm
        names = [*storm.members(), *([storm.owner] * 3 if storm.mesh.result.losses else [])]
        victim = self._one_of(names)
        storm.disk.folder, storm.disk.error = storm.home_of(victim), REFUSALS[kind]
        asyncio.get_running_loop().call_later(last_s, setattr, storm.disk, "error", None)
        return f"{kind} at {victim} for {last_s:.1f} s"

    def _step_clock(self, victim: str, last_s: float) -> str:
        """Its wall clock, until somebody sets it right."""
        step_s = self._between(STEP_S) * self.chance.choice((-1, 1))
        self.storm.ahead_s[victim] = step_s
        asyncio.get_running_loop().call_later(last_s, self.storm.ahead_s.pop, victim, None)
        return f"the clock of {victim} is {step_s:+.0f} s off for {last_s:.1f} s"

    def suspend(self, victim: str, last_s: float) -> str:
        life = self.storm.stand_still(victim)
        self.storm.asleep.add(life)
        asyncio.get_running_loop().call_later(last_s, self.storm.wake, victim, life)
        return f"{victim} suspended for {last_s:.0f} s"

    def _partition(self, last_s: float) -> str:
        storm = self.storm
        names = [*storm.lending, storm.owner]
        other = self.chance.sample(names, self.chance.randrange(1, len(names)))
        beside_owner = [n for n in storm.lending if (n in other) == (storm.owner in other)]
        if storm.mesh.result.plan is None and len(beside_owner) < storm.least:
            other = self.chance.sample(storm.lending, max(0, len(storm.lending) - storm.least))
        storm.part(other)
        asyncio.get_running_loop().call_later(last_s, storm.heal)
        return f"{', '.join(other)} apart from the rest for {last_s:.1f} s"

    # -- links

    def _answer(self, victim: str, how: Impairment) -> None:
        """All that it sends."""
        ids = {name: agent.peer_id for name, agent in self.storm.here.agents.items()}
        for name in ids.keys() - {victim}:
            self.storm.here.network.impair(ids[victim], ids[name], how)

    def _impair(self, victim: str, how: Impairment, last_s: float) -> None:
        self.storm.set_links(victim, how)
        asyncio.get_running_loop().call_later(last_s, self.storm.set_links, victim, LINK)

    def _change_link(self, a: str, b: str, how: Impairment, last_s: float) -> None:
        self.storm.between(a, b, how)
        asyncio.get_running_loop().call_later(last_s, self.storm.between, a, b, LINK)

    # -- weather

    async def _tempt(self, kind: str, last_s: float) -> str:
        storm = self.storm
        if kind == "another plan":
            self.tempted += 1
            return "another plan is better"
        if kind == "fast join":
            times = self.chance.uniform(*TIMES_FASTER)
            return f"{await storm.newcomer(times)} joined, {times:.1f} times as fast"
        if kind == "slow device":
            victim, times = self._one_of(storm.members()), self.chance.uniform(*TIMES_SLOWER)
            usual = storm.paces[victim]
            if victim not in self._hung:
                recover = self._pace(victim, Pace(usual.speed_flops_per_s / times))
                asyncio.get_running_loop().call_later(4 * last_s, recover)
            return f"the device of {victim} is {times:.1f} times as slow for {4 * last_s:.0f} s"
        a, b = self._two_of(storm.members()) if len(storm.members()) > 1 else self._two_of(storm.lending)
        rate = self._between(SAGS_TO_BYTES_PER_S)
        self._change_link(a, b, replace(LINK, bandwidth_bytes_per_s=rate), 4 * last_s)
        ids = storm.here.agents[a].peer_id, storm.here.agents[b].peer_id
        with storm.in_life(storm.owner):
            storm.later(sound(storm.mesh.agent, [ids, ids[::-1]]))
        return f"the link between {a} and {b} carries {rate:.0f} bytes a second for {4 * last_s:.0f} s"

    def another_plan(self, running: Plan) -> Plan | None:
        """A stage each for some of those who are there, in any order, members or not; None where that is the running plan."""
        agent = self.storm.mesh.agent
        there = sorted(agent.devices(running.peers))
        if not there:
            return None
        found = self.storm.work.another_plan(there, self.chance)
        if list(running.peers) == list(found.peers):
            return None
        return replace(found, threads=running.threads, kernels=running.kernels)


@contextlib.contextmanager
def restless(blows: Blows) -> Iterator[None]:
    """What takes a run many steps takes it a few: a storm's is over soon."""
    hasty = {
        "peers.owner.adaptation.Adaptation": partial(Restless, blows),
        "peers.owner.adaptation.LASTING_STEPS": 2,
        "meshcee.adapt.senses.LASTING_STEPS": 2,
        "peers.owner.adaptation.LINKS_S": 1.0,
        "peers.owner.adaptation.SETTLING_STEPS": 0.2,
        "meshcee.adapt.rule.SETTLING_STEPS": 0.2,
        "peers.owner.adaptation.CHANGE_SHARE": 1.0,
        "meshcee.adapt.rule.REST_STEPS": 2,
    }
    with contextlib.ExitStack() as stack:
        for name, value in hasty.items():
            stack.enter_context(mock.patch(name, value))
        yield


class Restless(Adaptation):
    """In the place of Adaptation: goes over to a plan that the storm thinks of, too."""

    def __init__(self, blows: Blows, *how: Any) -> None:
        super().__init__(*how)
        self._blows = blows

    async def hear(self, report: Report, can_move: bool) -> Plan | None:
        found = await super().hear(report, can_move)
        if found is None and can_move and self._blows.tempted and report.step < report.steps - 2:
            self._blows.tempted -= 1
            found = self._blows.another_plan(self._plan)
        return found
