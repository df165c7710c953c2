"""Alternatives to a plan: other codecs, pipelines side by side or not, devices out and in, and the gain of more hardware.

The idea: a plan names the best way, and not by how much. Here each alternative has the best plan found for that alternative, priced
by the same simulator. One search answers all rows on the cluster as it is. Its best layouts are the starts of the searches under
other codecs and on other hardware. Effort is counted. All rows together take a few times as long as the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

from meshcee.errors import PlanError
from meshcee.figures import Cluster, Device, LinkProfile
from meshcee.figures.workload import CODECS, Workload
from meshcee.plan import Plan
from meshcee.planner.chain import Codecs, Layout, layout_of
from meshcee.planner.rules import Shortage, missing, needs, shortages
from meshcee.planner.search import Allowed, Effort, Question, Search
from meshcee.simulator import build, period_s, simulate

__all__ = ["COMPARED", "Comparison", "Found", "Row", "comparison"]

COMPARED = ("lossless", "bf16", "int8", "int4")

LOOK = Effort(rows=2_000_000, events=20_000)  # of a search under another codec, or on other hardware
ROW_EVENTS = 20_000  # of a row that the search on the cluster as it is answers
PLACE_EVENTS = 1_500  # of one more device in one region
TOPS = 4  # layouts that other searches begin with
PLACES, KINDS = 2, 6  # regions that one more device is tried in, and kinds of devices that are tried
HOPEFUL = 1.04  # times the plan's step: one more device that looks slower than that is not searched for further
GAIN = 0.005  # of a step: less is nothing
OWN = ("pipelines", "without", "with")  # kinds of rows that the plan could have been itself
NONE = "no such plan was found"
NO_COPIES = "leaves no room for copies of the state"


@dataclass(frozen=True)
class Found:
    """A plan and its figures on the cluster of its search."""

    plan: Plan
    step_s: float
    sent_bytes: float  # by devices to one another in a step
    fullest: str
    needed_bytes: int
    memory_bytes: int
    rounded_to: int | None  # bits that the coarsest boundary has; None: no boundary rounds
    kernel_classes: int

    def to_json(self) -> dict[str, Any]:
        """The figures, and the plan as `meshcee train --plan` takes it."""
        return {
            "step_s": self.step_s,
            "sent_bytes": self.sent_bytes,
            "fullest": {
                "peer": self.fullest,
                "needed_bytes": self.needed_bytes,
                "memory_bytes": self.memory_bytes,
            },
            "rounded_to": self.rounded_to,
            "sums_reordered": self.plan.shares_samples,
            "kernel_classes": self.kernel_classes,
            "stages": [len(pipeline.stages) for pipeline in self.plan.pipelines],
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True)
class Row:
    """An alternative.

    kind     "pipelines", "codec", "without" or "with"; of what could be bought "link", "device" or "memory"
    peers    the device that the row is about, and behind it those that are like it; of a link the ends that are devices
    several  whether the plan has several pipelines; None: either
    place    the two ends of a link, or the region of one more device
    amount   bytes per second of the faster link, as it would be measured, or bytes of the larger memory
    short    the memory that is missing, where nothing fits
    why      the other reason for a row without a plan, or a remark on the plan
    """

    kind: str
    peers: tuple[str, ...] = ()
    codec: str = ""
    several: bool | None = None
    place: tuple[str, ...] = ()
    amount: float = 0.0
    found: Found | None = None
    short: Shortage | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As `meshcee plan --compare --json` prints it."""
        return {
            "kind": self.kind,
            "peers": list(self.peers),
            "codec": self.codec or None,
            "several": self.several,
            "place": list(self.place),
            "amount": self.amount or None,
            "found": None if self.found is None else self.found.to_json(),
            "short": None if self.short is None else vars(self.short),
            "why": self.why,
        }


@dataclass(frozen=True)
class Comparison:
    """The plan that is taken, its alternatives, and the gain of more hardware.

    best_s  the fastest step found on the hardware that is there, with the plan's own codec: gains are counted from here
    """

    chosen: Found
    rows: tuple[Row, ...]
    buys: tuple[Row, ...]
    best_s: float

    def is_faster(self, row: Row) -> bool:
        """Whether the row's plan is faster than the plan that is taken, though the search for that one might have found it."""
        could_be = row.kind in OWN and row.why != NO_COPIES
        return could_be and row.found is not None and row.found.step_s < self.chosen.step_s * (1 - 1e-9)

    def to_json(self) -> dict[str, Any]:
        """The value of `comparison` in what `meshcee plan --compare --json` prints."""
        return {
            "chosen": self.chosen.to_json(),
            "rows": [{**row.to_json(), "faster": self.is_faster(row)} for row in self.rows],
            "buys": [row.to_json() for row in self.buys],
            "best_s": self.best_s,
        }


def comparison(
    plan: Plan,
    asked: Mapping[str, Question],
    *,
    plain: Workload | None = None,
    kernels: Mapping[str, str] | None = None,
) -> Comparison:
    """A plan beside its alternatives. Raises PlanError for a plan of another cluster or job.

    asked    by codec: first the plan's own question, then the same with other codecs
    plain    the workload without room for copies of the state, where `asked` leaves such room
    kernels  device -> its kernel class; the device's kind stands in where nothing is known
    """
    own, *others = asked.items()
    return _Comparing(plan, own[1], plain or own[1].workload, kernels or {}).all(others)


class _Comparing:
    """One comparison at work."""

    def __init__(self, plan: Plan, asked: Question, plain: Workload, kernels: Mapping[str, str]) -> None:
        self.plan, self.asked, self.plain, self.kernels = plan, asked, plain, kernels
        self.chosen = self.found((period_s(plan, asked.cluster, plain), plan))
        self.search = _searched(asked, [layout_of(plan)])
        self.tops = [layout_of(plan), *self.search.leaders(TOPS)]

    def all(self, others: Sequence[tuple[str, Question]]) -> Comparison:
        several = self.search.best(_is_several, ROW_EVENTS)
        self.tops += [] if several is None else [layout_of(several[1])]
        forms: dict[bool | None, Allowed] = {False: _is_one, True: _is_several} if several else {None: _is_any}
        searches = {name: self.coded(asked, forms.values()) for name, asked in others}
        rows = self.pipelines()
        self.tops += [layout_of(row.found.plan) for row in rows if row.found is not None]
        rows = _differing(self.plan, [*rows, *self.codecs(searches, forms)])
        rows += [*self.without(), *self.with_more()]
        self.tops = [layout_of(self.plan), *self.search.leaders(TOPS)]
        own = [row.found.step_s for row in rows if row.kind in OWN and row.found is not None]
        bought = [*self.link(), *self.devices(), self.memory()]
        # what was found for other hardware may run on today's as well: then the search was longer, and nothing is gained
        today = [self.today_s(row.found.plan) for row in bought if row.found is not None]
        best_s = min([self.chosen.step_s, *own, *today])
        return Comparison(self.chosen, tuple(rows), tuple(_gaining(row, best_s) for row in bought), best_s)

    def found(self, best: tuple[float, Plan], cluster: Cluster | None = None) -> Found:
        step_s, plan = best
        cluster = cluster or self.asked.cluster
        needed = needs(plan, cluster, self.plain)
        fullest = max(needed, key=lambda p: needed[p] / cluster.devices[p].memory_bytes)
        inner = {c for chain in layout_of(plan) for codecs in chain.codecs for c in (codecs.out, codecs.back)}
        bits = [int(CODECS[codec].bits) for codec in inner - {"none", "lossless"}]
        classes = {self.kernels.get(p, cluster.devices[p].kind) for p in plan.peers}
        return Found(
            plan, step_s, sent_bytes(plan, cluster, self.plain), fullest, needed[fullest],
            cluster.devices[fullest].memory_bytes, min(bits, default=None), len(classes),
        )  # fmt: skip

    def today_s(self, plan: Plan) -> float:
        """On the cluster as it is; infinite where the plan cannot run there."""
        try:
            period = period_s(plan, self.asked.cluster, self.asked.workload)
        except PlanError:
            return math.inf
        return math.inf if shortages(plan, self.asked.cluster, self.asked.workload) else period

    # -- on the cluster as it is -----------------------------------------------------------------------------------

    @cached_property
    def tight(self) -> Search:
        """Of plans that leave no room for copies of the state."""
        return _searched(replace(self.asked, workload=self.plain), self.tops)

    def best(self, row: Row, allowed: Allowed, short: Shortage | None, why: str) -> Row:
        """The row with the best plan that is allowed; else with the memory that is missing, or the reason."""
        if (best := self.search.best(allowed, ROW_EVENTS, self.tops)) is not None:
            return replace(row, found=self.found(best))
        roomy = self.asked.workload.state_bytes != self.plain.state_bytes
        if roomy and (best := self.tight.best(allowed, ROW_EVENTS)) is not None:
            return replace(row, found=self.found(best), why=NO_COPIES)
        return replace(row, short=short, why="" if short else why)

    def pipelines(self) -> list[Row]:
        """Several pipelines where the plan has one, or one where it has several; nothing where only one may be."""
        if self.asked.runs.pipelines == 1:
            return []
        if len(self.plan.pipelines) > 1:
            return [self.best(Row("pipelines", several=False), _is_one, None, NONE)]
        classes = list((self.asked.runs.classes or {}).values())
        unlike = bool(classes) and len(set(classes)) == len(classes)
        why = "no two devices are of one kernel class" if unlike else NONE
        short = missing(self.asked.cluster, self.plain, pipelines=2)
        return [self.best(Row("pipelines", several=True), _is_several, short, why)]

    def coded(self, asked: Question, forms: Iterable[Allowed]) -> Search:
        """The search under another codec. A layout that is good there is a start everywhere."""
        search = _searched(asked, [_coded(layout, asked.codecs[0]) for layout in self.tops])
        for allowed in forms:
            if (best := search.best(allowed, ROW_EVENTS)) is not None:
                self.tops.append(_coded(layout_of(best[1]), self.asked.codecs[0]))
        return search

    def codecs(self, searches: Mapping[str, Search], forms: Mapping[bool | None, Allowed]) -> list[Row]:
        """Other codecs: with one pipeline and with several, or with any number."""
        rows = []
        for name, search in searches.items():
            starts = [_coded(layout, search.codecs[0]) for layout in self.tops]
            for several, allowed in forms.items():
                best = search.best(allowed, 0, starts)
                row = Row("codec", codec=name, several=several)
                rows.append(replace(row, why=NONE) if best is None else replace(row, found=self.found(best)))
        return rows

    def members(self) -> list[tuple[list[str], list[str]]]:
        """Of devices that are alike: those in the plan, and those that are left out."""
        used = set(self.plan.peers)
        return [([p for p in c.peers if p in used], [p for p in c.peers if p not in used]) for c in self.search.classes]

    def without(self) -> list[Row]:
        """Without a member, once for members that are alike; a device like it takes its place, if one is left out."""
        rows = []
        cluster = self.asked.cluster
        for mine, rest in self.members():
            if not mine:
                continue
            gone = mine[-1]
            row = Row("without", peers=(gone, *mine[:-1]))
            if rest and (same := self.exchanged(gone, rest[0])) is not None:
                rows.append(replace(row, found=self.found(same), why=f"{rest[0]}, which is like it, takes its place"))
                continue
            left = [device for peer, device in cluster.devices.items() if peer != gone]
            short = missing(_changed(cluster, left), self.plain) if left else None
            rows.append(self.best(row, _lacks(gone), short, NONE if left else "no other device is there"))
        return rows

    def exchanged(self, gone: str, other: str) -> tuple[float, Plan] | None:
        """The plan with another device in a member's place; None where that may not be."""
        pipelines = [
            replace(pipeline, stages=tuple(
                replace(s, members=tuple(replace(m, peer=other) if m.peer == gone else m for m in s.members))
                for s in pipeline.stages
            ))
            for pipeline in self.plan.pipelines
        ]  # fmt: skip
        plan = Plan(self.plan.micro_batch, tuple(pipelines), threads=self.plan.threads)
        step_s = self.today_s(plan) if self.asked.runs.permits(layout_of(plan)) else math.inf
        return None if math.isinf(step_s) else (step_s, plan)

    def with_more(self) -> list[Row]:
        """With a device that the plan has left out, once for devices that are alike."""
        rows = []
        cluster, work = self.asked.cluster, self.plain
        whys = {left.peer: left.why for left in self.plan.left_out}
        for _, rest in self.members():
            if not rest:
                continue
            memory_bytes = cluster.devices[rest[0]].memory_bytes
            samples = work.times[cluster.devices[rest[0]].kind].sizes[0]
            least = min(work.stage_bytes(k, k + 1, samples, 1) for k in range(work.num_blocks))
            short = Shortage(rest[0], least, memory_bytes) if least > memory_bytes else None
            rows.append(self.best(Row("with", peers=tuple(rest)), _has(rest[0]), short, whys.get(rest[0], NONE)))
        unfit = [Row("with", peers=(p,), why=why) for p, why in whys.items() if p not in cluster.devices]
        return [*rows, *unfit]

    # -- on other hardware -----------------------------------------------------------------------------------------

    def bought(self, row: Row, asked: Question, *starts: Layout) -> Row:
        best = _searched(asked, [*self.tops, *starts]).best(_is_any, ROW_EVENTS)
        return row if best is None else replace(row, found=self.found(best, asked.cluster))

    def link(self) -> list[Row]:
        """The line that messages hold longest twice as fast, and all on their way at least so fast; no row without links."""
        cluster, plan = self.asked.cluster, self.plan
        if len(plan.peers) == 1:
            best = self.search.best(lambda peers, _: len(peers) > 1, ROW_EVENTS)
            if best is None:
                return []
            plan = best[1]
        timeline = simulate(plan, cluster, self.plain, steps=2)
        instance, held_s = timeline.instance, timeline.outcome.line_s
        if not instance.lines:
            return []
        busiest = max(range(len(held_s)), key=held_s.__getitem__)
        line = instance.lines[busiest]
        pairs = [
            (node.peer, instance.nodes[edge.target].peer)
            for node in instance.nodes
            for edge in (*node.forward, *node.back)
            if busiest in dict(edge.lines)
        ] or [(a, b) for a, b in permutations(plan.peers, 2) if (path := cluster.path(a, b)) and line in path.lines]
        least = 2 * cluster.bandwidth(line)
        ends = tuple(end.removeprefix("@") for end in line)
        devices = tuple(end for end in line if end in cluster.devices)
        row = Row("link", peers=devices, place=ends, amount=least / self.asked.share)
        return [self.bought(row, replace(self.asked, cluster=_faster(cluster, pairs, least)))]

    def memory(self) -> Row:
        """The fullest device with twice the memory."""
        peer, amount = self.chosen.fullest, 2 * self.chosen.memory_bytes
        devices = [
            replace(d, memory_bytes=amount) if d.name == peer else d for d in self.asked.cluster.devices.values()
        ]
        row = Row("memory", peers=(peer,), amount=amount)
        return self.bought(row, replace(self.asked, cluster=_changed(self.asked.cluster, devices)))

    def devices(self) -> list[Row]:
        """One more device of each kind, the fastest kinds first, in the region with the largest gain."""
        cluster = self.asked.cluster
        kinds: dict[str, Device] = {}
        for device in sorted(cluster.devices.values(), key=lambda d: -d.memory_bytes):
            kinds.setdefault(device.kind, device)
        members = [cluster.devices[p].region for p in self.plan.peers]
        rows = []
        for of in sorted(kinds.values(), key=lambda d: self.search.proposals.seconds_alone(d.name))[:KINDS]:
            places = list(dict.fromkeys([of.region, *sorted(members, key=lambda r: -members.count(r))]))[:PLACES]
            tried = []
            for place in places:
                asked, name = _with_another(self.asked, of, place)
                best = _search(asked).best(_has(name), PLACE_EVENTS, self.tops[:2])
                if best is not None:
                    tried.append((best[0], place, asked, layout_of(best[1])))
            row = Row("device", peers=(of.name,), place=(of.region,))
            if tried:
                look_s, place, asked, layout = min(tried, key=lambda x: x[0])
                row = replace(row, place=(place,))
                row = self.bought(row, asked, layout) if look_s < HOPEFUL * self.chosen.step_s else row
            rows.append(row)
        return rows


def sent_bytes(plan: Plan, cluster: Cluster, workload: Workload) -> float:
    """By devices to one another in a step: activations, gradients back, and gradients that are summed."""
    nodes = build(plan, cluster, workload).nodes
    total = sum(node.num_micro * edge.size for node in nodes for edge in (*node.forward, *node.back))
    for block, size in enumerate(workload.gradient_bytes):
        holders = sum(node.first <= block < node.end for node in nodes)
        if holders > 1:
            total += holders * workload.sum_costs(holders)[0] * size
    return total


def _is_any(peers: Sequence[str], pipelines: int) -> bool:
    return True


def _is_one(peers: Sequence[str], pipelines: int) -> bool:
    return pipelines == 1


def _is_several(peers: Sequence[str], pipelines: int) -> bool:
    return pipelines > 1


def _has(peer: str) -> Allowed:
    return lambda peers, _: peer in peers


def _lacks(peer: str) -> Allowed:
    return lambda peers, _: peer not in peers


def _search(asked: Question) -> Search:
    return Search(asked.cluster, asked.workload, asked.codecs, LOOK, asked.runs)


def _searched(asked: Question, starts: Sequence[Layout]) -> Search:
    search = _search(asked)
    search.run(starts)
    return search


def _coded(layout: Layout, codec: str) -> Layout:
    return tuple(replace(chain, codecs=(Codecs(codec, codec),) * len(chain.codecs)) for chain in layout)


def _differing(plan: Plan, rows: Iterable[Row]) -> list[Row]:
    """Rows with a plan that is neither this one nor an earlier row's: codecs make no difference where no boundary is."""
    forms, kept = [_form(plan)], []
    for row in rows:
        form = None if row.found is None else _form(row.found.plan)
        if form is None or form not in forms:
            kept.append(row)
            forms.append(form)
    return kept


def _form(plan: Plan) -> object:
    """The same for plans that differ in windows only."""
    return [(c.micro_batch, c.num_micro, c.stages, c.codecs) for c in layout_of(plan)]


def _gaining(row: Row, best_s: float) -> Row:
    if row.found is not None and row.found.step_s < (1 - GAIN) * best_s:
        return row
    return replace(row, found=None, why="gains nothing")


def _changed(
    cluster: Cluster, devices: Iterable[Device], pairs: Iterable[tuple[str, str]] = (), least: float = 0.0
) -> Cluster:
    """The cluster with these devices. Of these pairs no line between regions, and no measured one, is slower than `least`."""
    devices = list(devices)
    names = {device.name for device in devices}
    lines = {
        (a, b): LinkProfile(e["latency"], e["bandwidth"])
        for a, b, e in cluster.graph.edges(data=True)
        if (a[0] == "@") == (b[0] == "@")  # ports are the devices' own
    }
    for a, b in pairs:
        here, there = (f"@{cluster.devices[peer].region}" for peer in (a, b))
        for line in ((a, b), (b, a), (here, there), (there, here)):
            if (link := lines.get(line)) is not None and link.bandwidth_bytes_per_s < least:
                lines[line] = replace(link, bandwidth_bytes_per_s=least)
    found = Cluster(
        devices,
        inside_latency_s=cluster.inside_latency_s,
        between={(a[1:], b[1:]): link for (a, b), link in lines.items() if a[0] == b[0] == "@"},
        measured={(a, b): link for (a, b), link in lines.items() if a in names and b in names},
        areas=cluster.areas,
    )
    found.feeds |= {peer: link for peer, link in cluster.feeds.items() if peer in names}
    return found


def _faster(cluster: Cluster, pairs: Sequence[tuple[str, str]], least: float) -> Cluster:
    """Nothing on the way between these devices, either way, is slower than `least`."""
    ends = {peer for pair in pairs for peer in pair}
    devices = [
        replace(d, port_bytes_per_s=max(d.port_bytes_per_s, least)) if d.name in ends else d
        for d in cluster.devices.values()
    ]
    return _changed(cluster, devices, pairs, least)


def _with_another(asked: Question, of: Device, region: str) -> tuple[Question, str]:
    """With one more device like `of` in this region, and its name."""
    cluster, runs = asked.cluster, asked.runs
    there = cluster.regions[region]
    port = of.port_bytes_per_s if of.region == region else max(cluster.devices[p].port_bytes_per_s for p in there)
    new = replace(of, name=f"{of.name} (new)", region=region, port_bytes_per_s=port, host="", load=0.0)
    if runs.classes is not None:
        runs = replace(runs, classes={**runs.classes, new.name: runs.classes[of.name]})
    if runs.alike is not None:
        runs = replace(runs, alike={**runs.alike, new.name: runs.alike[of.name] if of.region == region else new.name})
    if (codec := runs.codec) is not None:

        def coded(a: Sequence[str], b: Sequence[str]) -> str:
            return codec(*([there[0] if p == new.name else p for p in peers] for peers in (a, b)))

        runs = replace(runs, codec=coded)
    # the first of its class, so that it is the first that a search takes
    changed = _changed(cluster, [new, *cluster.devices.values()])
    if (
        cluster.feeds
    ):  # like the one that it is like, where that one is, else like the slowest there: nobody is fed for nothing
        feeds = [link for peer, link in cluster.feeds.items() if peer in there] or [*cluster.feeds.values()]
        own = cluster.feeds.get(of.name) if of.region == region else None
        changed.feeds[new.name] = own or min(feeds, key=lambda link: link.bandwidth_bytes_per_s)
    return replace(asked, cluster=changed, runs=runs), new.name
