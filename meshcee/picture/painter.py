"""The painter hears what happens in a mesh and in a run, in any order, and gives the picture of it at any time.

The idea: every source is optional. Records of the directory give the mesh and, of another machine's run, its step and loss. The
folder of a run gives all of its reports and events. What both say, the folder says better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshcee.errors import PlanError, ProtocolError
from meshcee.figures import LinkProfile
from meshcee.files.home import is_retraction
from meshcee.picture.account import Account, plan_view
from meshcee.picture.gantt import gantt_of
from meshcee.picture.layout import places
from meshcee.picture.series import Series, figure
from meshcee.picture.values import (
    FIGURES,
    Curves,
    Gantt,
    Help,
    Link,
    Mesh,
    Moment,
    Peer,
    Picture,
    PlanView,
    RunView,
    Waiting,
)
from meshcee.plan import Plan

__all__ = ["Painter"]

MOST_MOMENTS = 300
MOST_TEXT = 400  # letters of a sentence
OVER = ("done", "stopped", "failed", "aborted", "died")


class Painter:
    """Of one mesh, or one run, or both. Everything that it is given is plain data, as JSON has it."""

    def __init__(self) -> None:
        self.series = Series()
        self._mesh: Mesh | None = None
        self._run: RunView | None = None
        self._of_folder = False  # whether a run's own folder tells of it; records then say less
        self._plan: Mapping[str, Any] | None = None  # as JSON
        self._view: PlanView | None = None
        self._names: dict[str, str] = {}
        self._limit = ""
        self._helps: tuple[Help, ...] = ()
        self._moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self._gantt: Gantt | None = None
        self._seen: Mapping[str, Any] = {}

    # -- what it hears -------------------------------------------------------------------------------------------------

    def look(self, status: Mapping[str, Any], at: float) -> None:
        """The mesh as `MeshView.status` has it, now. What has changed since the last look becomes moments."""
        before, now = self._mesh, _mesh(status, at)
        self._mesh = now
        self._names |= {peer.peer: peer.name for peer in now.peers}
        if before is not None:
            for moment in _changes(before, now):
                self.add(moment)
        runs = [run for run in status.get("runs", ()) if isinstance(run, Mapping)]
        main = next((run for run in runs if run.get("state") == "running"), None)
        own = self._run.name if self._of_folder and self._run is not None else None
        others = [run for run in runs if run.get("job") != own and (run is not main or self._of_folder)]
        jobs = tuple(
            Waiting(str(r.get("job")), self._name(str(r.get("owner"))), str(r.get("state")), int(r.get("step") or 0))
            for r in others
        )
        self._mesh = replace(now, jobs=jobs)
        if not self._of_folder:
            self._follow(main, at)

    def _follow(self, record: Mapping[str, Any] | None, at: float) -> None:
        """A run that only its owner's record tells of."""
        if record is None:
            if self._run is not None and self._run.state not in OVER:
                self._run = replace(self._run, state="done", ended_at=at, eta_s=None)
                self.add(Moment(at, "ended", f"the run {self._run.name} is over", max(self._run.step - 1, 0)))
            return
        owner, name = self._name(str(record.get("owner"))), str(record.get("job"))
        key = f"{record.get('owner')} {name} {(record.get('epoch') or [0])[0]}"
        if self._run is None or self._run.id != key or self._run.state in OVER:
            self.series, self._view, self._plan = Series(), None, None
            self._run = RunView(name, key, owner, started_at=at)
        step, loss = int(record.get("step") or 0), figure(record.get("loss"))
        if isinstance(plan := record.get("plan"), Mapping):
            self.plan(plan, self._names, at, step)
        if loss is not None:  # of a finished step; where the plan is too long for a record, the record has none
            self.series.hear({"step": step, "loss": loss})
        self._run = replace(self._run, step=step + 1 if loss is not None else 0, loss=loss)

    def begin(self, run: str, info: Mapping[str, Any]) -> None:
        """A run of this machine, from its folder: run.json."""
        if not self._of_folder:
            self.series = Series()  # records have told of some of its steps only
        self._of_folder = True
        self._names |= {str(k): str(v) for k, v in (info.get("names") or {}).items()}
        steps = info.get("steps")
        before = self._run if self._run is not None and self._run.id == run else RunView("", run)
        self._run = replace(
            before,
            name=str(info.get("name") or run),
            steps=steps if isinstance(steps, int) else before.steps,
            started_at=figure(info.get("started")),
        )
        if isinstance(plan := info.get("plan"), Mapping):
            self.plan(plan, self._names)

    def plan(self, plan: Mapping[str, Any], names: Mapping[str, str], at: float | None = None, step: int = 0) -> None:
        """The plan that runs from now on, as JSON. With `at` another one than before becomes a moment."""
        if plan == self._plan:
            return
        try:
            made = Plan.from_json(plan)
        except PlanError:
            return
        was, self._plan = self._view, plan
        self._view, self._seen, self._helps = plan_view(made, {**self._names, **names}), {}, ()
        if at is not None:
            text = f"{_stages(self._view)}, {_seconds(self._view.step_s)} a step expected"
            self.add(Moment(at, "planned" if was is None else "replanned", f"the plan: {text}", step))

    def hear(self, report: Mapping[str, Any]) -> None:
        """A report of a step, as `Report.to_json` or a line of reports.jsonl has it."""
        self.hear_all([report])

    def hear_all(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Many of them, in order, at the price of the curves."""
        for report in reports:
            self.series.hear(report)
        if told := [one for one in reports if not is_retraction(one)]:
            newest = next((one["metrics"] for one in reversed(told) if one.get("metrics")), None)
            self._reach({**told[-1], "metrics": newest})

    def _reach(self, report: Mapping[str, Any]) -> None:
        step, steps = report.get("step"), report.get("steps")
        if self._run is None or not isinstance(step, int):
            return
        metrics = report.get("metrics")
        figures: dict[str, Any] = {name: figure(report.get(name)) for name in FIGURES}
        self._run = replace(
            self._run,
            step=step + 1,
            steps=steps if isinstance(steps, int) else self._run.steps,
            metrics={str(k): figure(v) for k, v in metrics.items()} if metrics else self._run.metrics,
            **figures,
        )
        self._limit = str(report.get("limit") or "")[:MOST_TEXT]

    def tell(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl: `kind`, `at`, `text`, and what belongs to it. One that is none is passed over."""
        at, kind, text = figure(event.get("at")), event.get("kind"), event.get("text")
        if at is None or not isinstance(kind, str) or not isinstance(text, str):
            return
        step = event.get("step")
        if kind == "gain":  # of the newest change of plan, as measured since
            for k in reversed(range(len(self._moments))):
                if self._moments[k].kind == "replanned":
                    self._moments[k] = replace(self._moments[k], gain_measured=figure(event.get("gain")))
                    return
            return
        gain = figure(event.get("gain"))
        self.add(Moment(at, kind[:32], text[:MOST_TEXT], step if isinstance(step, int) else None, gain))

    def add(self, moment: Moment) -> None:
        """It happened."""
        self._moments.append(moment)

    def account(self, account: Mapping[str, Any]) -> None:
        """What stands behind the plan, as `Account.to_json` has it; of another plan it counts for nothing."""
        try:
            found = Account.from_json(account)
        except ProtocolError:
            return
        view = self._view
        if view is not None and [(s.peer, s.first, s.end) for s in view.seats] == [
            (s.peer, s.first, s.end) for s in found.plan.seats
        ]:
            self._view, self._helps = found.plan, found.helps
            self._limit = self._limit or found.limit

    def seen(self, seen: Mapping[str, Any]) -> None:
        """What the last steps took each member and link, as `seen_of` has it: `members`, `rates`, `depths`."""
        self._seen = seen

    def trace(self, events: Sequence[Mapping[str, Any]]) -> None:
        """The events of a trace."""
        self._gantt = gantt_of(events) or self._gantt

    def end(self, state: str, result: Mapping[str, Any] | None = None) -> None:
        """The run is over, or goes on: its state, and result.json if there is one."""
        if self._run is not None:
            error = (result or {}).get("error")
            self._run = replace(
                self._run,
                state=state,
                ended_at=figure((result or {}).get("ended")),
                error=str(error)[:2000] if error else None,
                eta_s=None if state in OVER else self._run.eta_s,
            )

    # -- what it gives -------------------------------------------------------------------------------------------------

    def picture(self, at: float, *, curves: bool = True) -> Picture:
        """All of it; the curves can be left out by who takes them from `series`."""
        return Picture(
            at=at,
            mesh=self._mesh,
            run=self._run,
            plan=_with_seen(self._view, self._seen) if self._view is not None else None,
            limit=self._limit,
            helps=self._helps,
            curves=self.series.curves() if curves else Curves(),
            moments=tuple(self._moments),
            gantt=self._gantt,
        )

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or "…" + peer[-8:]


def _mesh(status: Mapping[str, Any], at: float) -> Mesh:
    """As `MeshView.status` has it; what it says was checked where it was read from the network."""
    links = tuple(
        Link(
            link["from"],
            link["to"],
            link["latency_s"],
            link["bandwidth_bytes_per_s"],
            max(link["bandwidth_bytes_per_s"], (link.get("bandwidth_range_bytes_per_s") or (0, 0))[1]),
            link.get("measured_at", 0.0),
        )
        for link in status.get("links", ())
    )
    hints = {p["peer"]: p["region"] for p in status["peers"] if p.get("region")}
    profiles = {(x.source, x.target): LinkProfile(x.latency_s, x.bandwidth_bytes_per_s) for x in links}
    at_place = places([p["peer"] for p in status["peers"]], profiles, hints)
    peers = []
    for p in status["peers"]:
        device = p.get("device") or {}
        x, y, area = at_place[p["peer"]]
        peers.append(
            Peer(
                p["peer"], p["name"], p["state"], p.get("region"), area, x, y, _device(device),
                device.get("memory_bytes"), device.get("speed_flops_per_s"), p.get("kernels"), p.get("software") or "",
                p.get("outside"),
            )
        )  # fmt: skip
    lease = status.get("coordinator")
    return Mesh(at, tuple(peers), links, lease["peer"] if lease else None, lease["term"] if lease else None)


def _device(device: Mapping[str, Any]) -> str:
    if not device:
        return ""
    threads = device.get("threads") or 1
    of = f", {threads} thread{'s' * (threads != 1)}" if device["kind"] == "cpu" else ""
    return f"{device['kind']}: {device['name']}{of}"


def _changes(before: Mesh, now: Mesh) -> list[Moment]:
    """Who came, went, or is about to, and who coordinates, in sentences."""
    was, here = {p.peer: p for p in before.peers}, {p.peer: p for p in now.peers}
    found = [Moment(now.at, "joined", f"{here[p].name} joined") for p in here if p not in was]
    found += [Moment(now.at, "left", f"{was[p].name} is gone") for p in was if p not in here]
    found += [
        Moment(now.at, "leaving", f"{peer.name} is leaving")
        for p, peer in here.items()
        if peer.state == "leaving" and p in was and was[p].state != "leaving"
    ]
    if now.coordinator is not None and now.coordinator != before.coordinator and before.coordinator is not None:
        name = here[now.coordinator].name if now.coordinator in here else "…" + now.coordinator[-8:]
        found.append(Moment(now.at, "coordinator", f"{name} coordinates, term {now.term}"))
    return found


def _with_seen(view: PlanView, seen: Mapping[str, Any]) -> PlanView:
    """The plan with what its last steps took."""
    members = seen.get("members")
    rates, depths = _pairs(seen.get("rates")), _pairs(seen.get("depths"))
    if isinstance(members, Mapping):
        seats = []
        for seat in view.seats:
            took = members.get(seat.peer)
            if isinstance(took, Mapping):
                names: dict[str, Any] = {
                    f"{k}_s": figure(took.get(k)) for k in ("compute", "wait", "code", "apply", "data", "total")
                }
                seat = replace(seat, **names, held_bytes=figure(took.get("memory")))
            seats.append(seat)
        view = replace(view, seats=tuple(seats))
    of: dict[tuple[int, int], list[str]] = {}
    for seat in view.seats:
        of.setdefault((seat.pipeline, seat.stage), []).append(seat.peer)
    edges = []
    for edge in view.boundaries:
        here, there = of.get((edge.pipeline, edge.after), []), of.get((edge.pipeline, edge.after + 1), [])
        pairs = [pair for a in here for b in there for pair in ((a, b), (b, a))]
        rate = min((rates[pair] for pair in pairs if pair in rates), default=None)
        depth = max((depths[pair] for pair in pairs if pair in depths), default=None)
        edges.append(replace(edge, rate_bytes_per_s=rate, queued_bytes=depth))
    return replace(view, boundaries=tuple(edges))


def _pairs(rows: Any) -> dict[tuple[str, str], float]:
    """Rows of [from, to, figure]."""
    return {
        (str(row[0]), str(row[1])): value
        for row in (rows if isinstance(rows, list | tuple) else ())
        if isinstance(row, list | tuple) and len(row) == 3 and (value := figure(row[2])) is not None
    }


def _stages(view: PlanView) -> str:
    of = {(seat.pipeline, seat.stage) for seat in view.seats}
    pipelines = len(view.micros)
    stages = f"{len(of)} stage{'s' * (len(of) != 1)} on {', '.join(seat.name for seat in view.seats[:6])}"
    more = f" and {len(view.seats) - 6} more" * (len(view.seats) > 6)
    return stages + more + f", {pipelines} pipelines" * (pipelines > 1)


def _seconds(seconds: float | None) -> str:
    return "unknown time" if seconds is None else f"{seconds:.3g} s"
