"""The search: candidates by estimate, judged by the simulator, then improved by small moves.

The idea: an estimate looks at many rows and knows little (no shared lines, no tails of a step); the simulator
knows all and looks at few. The best candidates of the one start a local search under the other, whose moves also reach
what the first cannot express: regions visited twice, unlike devices in one group. What its busiest device or line forbids
is not simulated. Effort is counted in simulated events, never in seconds, so that the same question has the same answer on
any machine.

`plans` is the front of the planner: a cluster and a workload in, the best plan found out, with every device accounted for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from math import inf, perm

from meshcee.errors import PlanError
from meshcee.figures import MOST_MICROS, Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import LeftOut, Pipeline, Plan, Predicted
from meshcee.planner.chain import Chain, ChainStage, Codecs, Layout, layout_of, peers_of, to_plan
from meshcee.planner.moves import SLACKS, Moves, all_shifted
from meshcee.planner.proposals import Effort, Proposals
from meshcee.planner.rules import Runs, lower_bound_s, shortage, shortages, why_left_out
from meshcee.planner.steady import NEARLY, steadiest
from meshcee.simulator import bound_s, build, period_s, quick_period_s

__all__ = ["Allowed", "Choice", "Effort", "Question", "Runs", "Search", "plans"]

RESCORED = 24  # rows that are simulated, of those that estimates think best
STARTS = 4  # rows that are improved by moves
FINALISTS = 6  # simulated whole
MANY, LEAST_SHARE = 18, 0.2  # devices, beyond which fewer events are simulated, down to this share
MICROS = 24  # micro-batches simulated of a step; the rest is extrapolated
SHAKEN, SHAKEN_FROM = 2, 60
WINDOWS = 0.2  # of the events are for their windows
TUNED = 8  # rows whose windows are tuned before the best of them are improved
FAR_BEHIND = 1.08  # a start that is this many times as slow as the best is not worth improving
CELLS = 200  # of the dynamic program over rows that take as long as one simulated event
BASIS, CLOSE, WON = (
    2,
    16,
    3,
)  # layouts whose neighbours are looked at, neighbours that are simulated, and what is simulated whole

Allowed = Callable[[Sequence[str], int], bool]  # of a layout: its devices, and its number of pipelines


@dataclass(frozen=True)
class Question:
    """Where to train what, as what boundaries may travel, and what a plan may be.

    share  of what a link carries, the part that its line in the cluster has
    """

    cluster: Cluster
    workload: Workload
    codecs: tuple[str, ...]
    runs: Runs = field(default_factory=Runs)
    share: float = 1.0


class Search:
    """One question: a cluster, a workload, codecs that may be used, and what a plan may contain."""

    def __init__(self, cluster: Cluster, workload: Workload, codecs: Sequence[str], effort: Effort, runs: Runs) -> None:
        self.cluster, self.workload, self.effort, self.runs = cluster, workload, effort, runs
        self.codecs = tuple(codecs)
        self.proposals = Proposals(cluster, workload, codecs, effort, runs)
        self.classes, self.rows = self.proposals.classes, self.proposals.rows
        self.events = 0
        self._known: dict[Layout, float] = {}
        self._periods: dict[tuple[Pipeline, ...], float] = {}
        self._bounds: dict[Layout, float] = {}  # of layouts that were not simulated

    def run(self, starts: Sequence[Layout] = ()) -> list[tuple[float, Layout]]:
        """The best layouts found with their periods, best first; empty when nothing fits."""
        small = 9 / len(self.cluster.devices)  # a simulation costs so much less there
        events = self.effort.events * min(1.0, max(LEAST_SHARE, MANY / len(self.cluster.devices)))
        rescored = int(RESCORED * min(6.0, max(1.0, small**2)))
        ranked = self.rank([*starts, *self.proposals.singles(), *self.proposals.layouts(rescored)])
        self.events = 0
        begun = self.tuned(ranked, small)
        for layout in begun:
            self.improve(layout, int(events * (1 - WINDOWS)) // len(begun))
        # windows alone are worth two percent, and no formula knows which: the best rows, their windows shaken
        shaken: dict[object, Layout] = {}
        for _, layout in self.rank(list(self._known))[:SHAKEN_FROM]:
            if len(peers_of(layout)) > 1 and len(shaken) < SHAKEN:
                shaken.setdefault(self._form(layout), layout)
        for layout in shaken.values():
            self.improve(layout, int(events * WINDOWS) // len(shaken), windows_only=True)
        ranked = self.rank(list(self._known))
        finalists: dict[tuple[Pipeline, ...], Layout] = {}
        for _, layout in ranked:
            plan = to_plan(layout, self.cluster, self.workload)
            if plan is not None and len(finalists) < FINALISTS * min(3, max(1, round(small**2))):
                finalists.setdefault(plan.pipelines, layout)
        near: dict[object, Layout] = {}  # rows whose best is nearly the best of all: the last choice is between these
        for period, layout in ranked:
            if period <= NEARLY * ranked[0][0] and len(near) < FINALISTS:
                near.setdefault(self._form(layout), layout)
        chosen = dict.fromkeys([*finalists.values(), *near.values()])
        chosen |= dict.fromkeys([layout for _, layout in ranked if len(peers_of(layout)) == 1][:1])
        return sorted(((self.simulated_s(layout), layout) for layout in chosen), key=lambda x: x[0])

    def simulated_s(self, layout: Layout) -> float:
        """The period, simulated whole."""
        plan = to_plan(layout, self.cluster, self.workload)
        return math.inf if plan is None else period_s(plan, self.cluster, self.workload)

    def _form(self, layout: Layout) -> object:
        """What layouts share that differ in cuts and windows only."""
        return tuple((c.micro_batch, self.rows.shape(tuple(s.peers for s in c.stages))) for c in layout)

    def tuned(self, ranked: Sequence[tuple[float, Layout]], small: float) -> list[Layout]:
        """Where to start from: the best rows that are not far behind, of several micro-batch sizes, with their best windows.

        small   where simulations cost little, more rows are looked at, and with every boundary moved
        """
        forms: dict[object, Layout] = {}
        near = FAR_BEHIND if small <= 1 else 1 + 3 * (FAR_BEHIND - 1)
        for period, layout in ranked:
            if period < near * ranked[0][0] and len(forms) < TUNED * min(2.0, max(1.0, small)):
                forms.setdefault(self._form(layout), layout)
        others = [tuple(replace(c, slack=s) for c in layout) for layout in forms.values() for s in SLACKS[1::2]]
        if small > 1.5:
            others += [other for layout in forms.values() for other in all_shifted(layout)]
        starts: dict[object, Layout] = {}
        kinds: dict[tuple[int, int], int] = {}
        for _, layout in self.rank([*forms.values(), *others]):
            form, kind = self._form(layout), (layout[0].micro_batch, len(layout))
            if form not in starts and kinds.get(kind, 0) < 2 and len(starts) < STARTS:
                starts[form] = layout
                kinds[kind] = kinds.get(kind, 0) + 1
        return list(starts.values())

    def best_single(self) -> tuple[str, float] | None:
        """The fastest device that trains alone, and its seconds per step."""
        alone = [(p, x) for x, p in self._known.items() if len(peers_of(x)) == 1]
        if not alone:
            return None
        _, layout = min(alone, key=lambda x: x[0])
        return peers_of(layout)[0], self.simulated_s(layout)

    def best_with(self, peers: Sequence[str]) -> tuple[float, Layout] | None:
        """The fastest layout looked at that uses one of these devices, and others besides."""
        wanted = set(peers)
        with_it = [(p, x) for x, p in self._known.items() if wanted.intersection(peers_of(x))]
        if not with_it:  # none was simulated, as they could not have been faster
            bounded = [(b, x) for x, b in self._bounds.items() if wanted.intersection(peers_of(x))]
            with_it = [(self.price(x), x) for _, x in sorted(bounded, key=lambda x: x[0])[:1]]
        return min(with_it, key=lambda x: x[0], default=None)

    def best(self, allowed: Allowed, events: int, starts: Sequence[Layout] = ()) -> tuple[float, Plan] | None:
        """The fastest plan found that is allowed: of layouts known, of `starts`, and of those one change away from the best."""

        def may(layout: Layout) -> bool:
            return allowed(peers_of(layout), len(layout))

        looked_at = [*starts, *self.proposals.parallel, *self._known]
        known = [layout for _, layout in self.rank(looked_at)[:BASIS]]
        close = [] if known and may(known[0]) else self._close(known, allowed)
        # what could not have been faster was not simulated
        bounded = sorted((b, i, x) for i, (x, b) in enumerate(self._bounds.items()) if b < inf and may(x))
        ranked = self.rank([*filter(may, looked_at), *close, *(x for _, _, x in bounded[:CLOSE])])
        for _, layout in ranked[:BASIS]:
            self.improve(layout, events // BASIS, may=may)
        won = self.rank([layout for layout in self._known if may(layout)])[:WON]
        plans = [self.as_run(layout) for _, layout in won]
        return min((found for found in plans if found is not None), key=lambda x: x[0], default=None)

    def _close(self, layouts: Sequence[Layout], allowed: Allowed) -> list[Layout]:
        """Of all that is allowed one change away, what estimates think best."""
        found: list[tuple[float, int, Layout]] = []
        for layout in layouts:
            for i, chain in enumerate(layout):
                others = peers_of((*layout[:i], *layout[i + 1 :]))
                codec = chain.codecs[0].out if chain.codecs else self.codecs[0]
                for row in self.rows.neighbours(tuple(stage.peers for stage in chain.stages)):
                    peers = (*others, *(peer for group in row for peer in group))
                    if len(set(peers)) < len(peers) or not allowed(peers, len(layout)):
                        continue
                    cut = self.rows.best(row, chain.micro_batch, codec, chain.num_micro)
                    if cut is not None:
                        other = (*layout[:i], replace(cut[1], slack=chain.slack), *layout[i + 1 :])
                        found.append((cut[0], len(found), other))
        return [layout for _, _, layout in sorted(found)[:CLOSE]]

    def as_run(self, layout: Layout) -> tuple[float, Plan] | None:
        """The period, simulated whole, and the plan as it will be run; None where it does not fit."""
        plan = to_plan(self.runs.coded(layout), self.cluster, self.workload)
        if plan is None:
            return None
        return _as_run(period_s(plan, self.cluster, self.workload), plan, self.cluster, self.workload, self.runs)

    def leaders(self, count: int) -> list[Layout]:
        """The best layouts known, one of each form."""
        forms: dict[object, Layout] = {}
        for _, layout in self.rank(list(self._known)):
            if len(forms) < count:
                forms.setdefault(self._form(layout), layout)
        return list(forms.values())

    def rank(self, layouts: Sequence[Layout]) -> list[tuple[float, Layout]]:
        """Those that fit and are not far behind, best first."""
        priced, best = [], math.inf
        for i, layout in enumerate(dict.fromkeys(map(self.runs.coded, layouts))):
            period = self.price(layout, FAR_BEHIND * best)
            best = min(best, period)
            priced.append((period, i, layout))
        return [(p, x) for p, _, x in sorted(priced, key=lambda x: x[:2]) if x in self._known]

    def price(self, layout: Layout, limit: float = math.inf) -> float:
        """The period of consecutive steps, extrapolated; infinite when the layout does not fit or is not allowed.

        limit   where the busiest device or line forbids a period below it, nothing is simulated and that bound returned
        """
        layout = self.runs.coded(layout)
        if (known := self._known.get(layout)) is not None:
            return known
        if (bound := self._bounds.get(layout, -math.inf)) >= min(limit, 1e300):
            return bound
        if (bound := self._least(layout)) >= limit:
            self._bounds[layout] = bound
            return bound
        self.events += 200
        plan = to_plan(layout, self.cluster, self.workload) if self.runs.permits(layout) else None
        period = math.inf if plan is None else self._simulated(plan, layout, limit)
        if layout not in self._known:
            self._bounds[layout] = period
        return period

    def _least(self, layout: Layout) -> float:
        """Seconds of a step on the busiest device, as far as that is seen without a plan; groups share equally at best."""
        least = 0.0
        for chain in layout:
            for stage in chain.stages:
                kinds = {self.cluster.devices[p].kind for p in stage.peers}
                times = self.workload.times[kinds.pop()]
                samples = -(-chain.micro_batch // len(stage.peers))
                if not kinds and times.sizes[0] <= samples <= times.largest:
                    seconds = times.stage(stage.first, stage.end, samples, stage.recompute).total_s
                    least = max(least, chain.num_micro * seconds)
        return least

    def _simulated(self, plan: Plan, layout: Layout, limit: float) -> float:
        """As `price`, for what fits; other windows in name only have been simulated before."""
        period = self._periods.get(plan.pipelines)
        if period is None:
            try:
                instance = build(plan, self.cluster, self.workload)
            except PlanError:  # a link is missing that only the reduction of a group would use
                return math.inf
            if (bound := bound_s(instance)) >= limit:
                return bound
            period, events = quick_period_s(instance, MICROS, limit)
            self.events += events
            if period >= limit:
                return period
            self._periods[plan.pipelines] = period
        self._known[layout] = period
        return period

    def improve(
        self, layout: Layout, events: int, *, windows_only: bool = False, may: Callable[[Layout], bool] | None = None
    ) -> Layout:
        """Annealing by small moves, from a seed; among layouts that may be."""
        moves = Moves(self.rows, self.codecs, random.Random(0))
        best = now = layout
        best_s = now_s = self.price(layout)
        begun, cut = self.events, self.rows.work
        while (spent := self.events - begun + (self.rows.work - cut) // CELLS) < events:
            self.events += 60
            other = moves.shake(now) if windows_only else moves.propose(now)
            if other is None or (may is not None and not may(other)):
                continue
            heat = 0.01 * (1 - spent / events)
            limit = now_s * (1 - heat * math.log(1 - moves.random.random()))
            other_s = self.price(other, limit)
            if other_s < limit:
                now, now_s = other, other_s
                if now_s < best_s:
                    best, best_s = now, now_s
            elif now_s > 1.02 * best_s:
                now, now_s = best, best_s
        return best


RUNNERS_UP = 2  # that are kept of a search
ROWS = 40  # orders of devices that a search for an exact number of stages begins with


class Choice:
    """The plans found, best first, with their periods: the winner, and runner-ups kept for fast switching."""

    def __init__(self, best: Plan, runners_up: Sequence[Plan], single: tuple[str, float] | None) -> None:
        self.best = best
        self.runners_up = tuple(runners_up)
        self.single = single  # the best device alone, and its seconds per step

    @property
    def candidates(self) -> list[Plan]:
        """The best plan, and the others that a running job may go over to later."""
        return [self.best, *self.runners_up[:RUNNERS_UP]]


def plans(
    cluster: Cluster,
    workload: Workload,
    *,
    codecs: Sequence[str] = ("bf16",),
    start: Plan | None = None,
    effort: Effort | None = None,
    runs: Runs | None = None,
    steady: bool = False,
) -> Choice:
    """The best plan found, the runner-ups and the best single device; nothing that `runs` excludes.

    The best plan is no slower than `start`, nor than the best single device that fits. Raises PlanError saying what is
    missing when nothing fits.

    steady  figures are measured, not true: of plans that are nearly as fast as the best the steadiest (steady.py)
    """
    runs = runs or Runs()
    for device in cluster.devices.values():
        if device.kind not in workload.times:
            raise PlanError(f"device {device.name} is a {device.kind}, which is in no profile; profile it first")
    effort = effort or Effort()
    if runs.stages is not None:
        _check_count(runs.stages, cluster, workload)
    search = Search(cluster, workload, codecs, effort, runs)
    if not search.proposals.sizes():
        raise PlanError(
            f"a batch of {workload.global_batch} samples makes more than {MOST_MICROS} micro-batches of any size that was "
            "profiled: make the batch smaller, or add devices with more memory"
        )
    old = None if start is None or not runs.permits(layout_of(start)) else _reprice(start, cluster, workload)
    found = search.run([*([] if old is None else [layout_of(old[1])]), *_exactly(search, runs.stages)])
    priced = [(p, plan) for p, c in found if (plan := to_plan(c, cluster, workload)) is not None]
    priced = sorted((_as_run(p, plan, cluster, workload, runs) for p, plan in priced), key=lambda x: x[0])
    if old is not None:
        priced.append(old)
        priced.sort(key=lambda x: x[0])
    if not priced:
        missing = shortage(cluster, workload, search.classes)
        if runs.stages is None:
            raise missing
        raise PlanError(f"no plan of exactly {runs.stages} stages fits; ask for another number: {missing}")
    single = search.best_single()
    if steady and len(priced[0][1].peers) > 1:
        limit_s = min(inf if old is None else old[0], inf if single is None else single[1])
        chosen = steadiest(priced, cluster, workload, limit_s=limit_s, events=effort.events, micros=MICROS)
        priced = [chosen, *(other for other in priced if other[1] != chosen[1])]
    period, best = priced[0]
    left = _left_out(search, best, period, runs)
    bound = lower_bound_s(cluster, workload)
    done = [replace(p, predicted=_predicted(s, workload, bound)) for s, p in priced]
    return Choice(replace(done[0], left_out=tuple(left)), done[1:], single)


def _check_count(stages: int, cluster: Cluster, workload: Workload) -> None:
    if stages > len(cluster.devices):
        devices = f"{len(cluster.devices)} device{'s' * (len(cluster.devices) != 1)}"
        raise PlanError(f"{stages} stages were asked for on {devices}: join more peers, or ask for fewer stages")
    if stages > workload.num_blocks:
        blocks = f"{workload.num_blocks} block{'s' * (workload.num_blocks != 1)}"
        raise PlanError(f"{stages} stages were asked for and the model has {blocks}: ask for fewer stages")


def _exactly(search: Search, stages: int | None) -> Iterator[Layout]:
    """Rows of so many devices, each with its best cut: all orders of few devices, else the fastest and a sample."""
    if stages is None:
        return
    names = sorted(search.cluster.devices, key=lambda p: search.proposals.seconds_alone(p))
    rows: list[tuple[str, ...]] = []
    if perm(len(names), stages) <= ROWS:
        rows = list(permutations(names, stages))
    else:
        chance = random.Random(0)
        rows = [tuple(names[:stages]), *islice(permutations(names[:stages]), 1, ROWS // 4)]
        rows += [tuple(chance.sample(names, stages)) for _ in range(ROWS - len(rows))]
    rows = list(dict.fromkeys(rows))
    for size in search.proposals.sizes():
        found = [c for row in rows if (c := search.rows.best(tuple((p,) for p in row), size, search.codecs[0]))]
        yield from ((chain,) for _, chain in found)
        if not found:  # a device may be so slow that the search looks at no such period
            yield from ((chain,) for row in rows[: ROWS // 4] if (chain := _balanced(search, row, size)) is not None)


def _balanced(search: Search, row: Sequence[str], size: int) -> Chain | None:
    """The cut with the least time of the slowest stage, by dynamic programming; None when sizes or memory do not fit."""
    work, count = search.workload, search.workload.num_blocks
    best, choices = [0.0] + [inf] * count, []
    for peer in row:
        device = search.cluster.devices[peer]
        times = work.times[device.kind]
        if not times.sizes[0] <= size <= times.largest:
            return None
        f, b, w = times.cumulated(size)
        total = f + b + w
        now, choice = [inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for first in range(end - 1, -1, -1):
                seconds = float(total[end] - total[first])
                if seconds >= now[end] or work.stage_bytes(first, end, size, 1) > device.memory_bytes:
                    break  # longer stages only get slower and larger
                if (slowest := max(best[first], seconds)) < now[end]:
                    now[end], choice[end] = slowest, first
        best = now
        choices.append(choice)
    if best[count] == inf:
        return None
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    bounds.reverse()
    stages = tuple(ChainStage(a, b, (p,)) for a, b, p in zip(bounds, bounds[1:], row))
    codecs = (Codecs(search.codecs[0], search.codecs[0]),) * (len(stages) - 1)
    return Chain(size, work.global_batch // size, stages, codecs)


def _as_run(period: float, plan: Plan, cluster: Cluster, workload: Workload, runs: Runs) -> tuple[float, Plan]:
    """Recomputation as it will be run: the last stage may not, and runs its W's at once instead; others may have to."""
    if runs.recompute_last and not runs.recompute:
        return period, plan
    changed = []
    for pipeline in plan.pipelines:
        *others, last = pipeline.stages
        if runs.recompute:
            others = [replace(s, recompute=True) for s in others]
        if last.recompute and not runs.recompute_last:
            last = replace(last, recompute=False, window=1, live_cap=1)
        changed.append(replace(pipeline, stages=(*others, last)))
    other = replace(plan, pipelines=tuple(changed))
    return (period, plan) if other == plan else (period_s(other, cluster, workload), other)


def _predicted(period: float, workload: Workload, bound: float) -> Predicted:
    return Predicted(step_s=period, samples_per_s=workload.global_batch / period, lower_bound_s=min(bound, period))


def _reprice(plan: Plan, cluster: Cluster, workload: Workload) -> tuple[float, Plan] | None:
    """The old plan as it is, if it still fits."""
    try:
        if plan.global_batch != workload.global_batch or shortages(plan, cluster, workload):
            return None  # another job, or less memory than there was
        return period_s(plan, cluster, workload), replace(plan, left_out=())
    except PlanError:
        return None  # it names devices that have gone


def _left_out(search: Search, plan: Plan, period: float, runs: Runs) -> list[LeftOut]:
    used = set(plan.peers)
    left = []
    for of in search.classes:
        rest = [p for p in of.peers if p not in used]
        if not rest:
            continue
        with_one = search.best_with(rest)
        why = why_left_out(of, with_one, period, layout_of(plan), search.cluster, search.workload)
        if with_one is None and runs.stages == len(plan.peers):
            why = f"{runs.stages} stages of one device each were asked for"
        left += [LeftOut(p, why) for p in rest]
    order = {p: i for i, p in enumerate(search.cluster.devices)}
    return sorted(left, key=lambda x: order[x.peer])
