"""The picture: what a painter makes of records, reports, events, an account and a trace; bounded, and in and out of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshcee.errors import ProtocolError, UsageError
from meshcee.figures import LinkProfile
from meshcee.files import dumps, loads
from meshcee.picture import Painter, Picture, Series, account_of, gantt_of, places
from meshcee.plan import Member, Pipeline, Plan, Predicted, Stage
from tests.rig.small import cluster, workload


def plan(*peers: str) -> Plan:
    """Two blocks a stage, a stage a peer."""
    count = len(peers)
    stages = tuple(
        Stage(2 * j, 2 * j + 2, (Member(peer, 2),), window=count - j, live_cap=count - j)
        for j, peer in enumerate(peers)
    )
    return Plan(2, (Pipeline(4, stages),), Predicted(0.5, 16.0, 0.4))


def status(*peers: str, runs: Any = (), links: Any = (), leaving: str = "") -> dict[str, Any]:
    """As `meshcee status --json` prints it."""
    device = {"kind": "cpu", "name": "a processor", "memory_bytes": 1 << 30, "speed_flops_per_s": 1e9, "threads": 2}
    return {
        "peers": [
            {
                "peer": peer, "name": f"name of {peer}", "addresses": [], "region": None, "device": device,
                "kernels": "cpu", "outside": None, "state": "leaving" if peer == leaving else "idle", "software": "1",
                "guards": None,
            }
            for peer in peers
        ],
        "coordinator": {"peer": peers[0], "term": 3} if peers else None,
        "links": [
            {"from": a, "to": b, "latency_s": s, "bandwidth_bytes_per_s": 1e6, "measured_at": 5.0,
             "bandwidth_range_bytes_per_s": (5e5, 2e6)}
            for a, b, s in links
        ],
        "runs": list(runs),
    }  # fmt: skip


def report(step: int, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    figures = {"step_s": 0.1, "samples_per_s": 80.0, "eta_s": 9.0, "limit": "compute of a", "lr": 0.1, "norm": None}
    return {"step": step, "steps": 100, "loss": loss, "metrics": {}, **figures, **more}


def test_a_picture_is_the_same_after_json() -> None:
    painter = Painter()
    painter.look(status("a", "b", links=[("a", "b", 0.001)]), 10.0)
    painter.begin("run-1", {"name": "gpt", "steps": 100, "started": 9.0, "plan": plan("a", "b").to_json()})
    painter.hear(report(0, metrics={"loss": 2.0}))
    painter.tell({"at": 11.0, "kind": "lost", "text": "b was lost", "step": 0})
    took = {"compute": 0.05, "wait": 0.01, "total": 0.1, "memory": 5_000_000}
    painter.seen({"members": {"a": took}, "rates": [["a", "b", 1e6]]})
    found = painter.picture(12.0)
    assert found.plan is not None
    assert found.plan.seats[0].compute_s == 0.05
    assert [seat.held_bytes for seat in found.plan.seats] == [5_000_000, None]
    assert found.plan.boundaries[0].rate_bytes_per_s == 1e6
    assert found.mesh is not None
    assert found.mesh.links[0].best_bytes_per_s == 2e6
    assert Picture.from_json(loads(dumps(found.to_json()))) == found


def test_a_newer_picture_and_one_that_is_none_are_refused() -> None:
    data = Painter().picture(0.0).to_json()
    with pytest.raises(UsageError, match="upgrade"):
        Picture.from_json({**data, "version": 2})
    with pytest.raises(ProtocolError, match="mesh"):
        Picture.from_json({**data, "mesh": 3})


def test_what_changes_in_a_mesh_is_told_in_sentences() -> None:
    painter = Painter()
    painter.look(status("a", "b"), 1.0)
    assert painter.picture(1.0).moments == ()
    painter.look(status("a", "c", leaving="a"), 2.0)
    assert [(m.kind, m.text) for m in painter.picture(2.0).moments] == [
        ("joined", "name of c joined"),
        ("left", "name of b is gone"),
        ("leaving", "name of a is leaving"),
    ]


def test_a_run_of_another_machine_is_drawn_from_its_record() -> None:
    def run(step: int, made: Plan, number: int = 1) -> dict[str, Any]:
        told = {"owner": "o", "job": "gpt", "state": "running", "epoch": [7, number]}
        return {**told, "step": step, "loss": 3.0 - step / 10, "plan": made.to_json()}

    painter = Painter()
    for at, step in enumerate((0, 3, 8)):
        painter.look(status("a", "b", "c", runs=[run(step, plan("a", "b"))]), float(at))
    painter.look(status("a", "c", runs=[run(9, plan("a", "c"), 2)]), 3.0)
    found = painter.picture(3.0)
    assert found.run is not None
    assert (found.run.name, found.run.step, found.run.state) == ("gpt", 10, "running")
    assert found.curves.steps == (0, 3, 8, 9)
    assert [m.kind for m in found.moments] == ["planned", "left", "replanned"]
    assert found.plan is not None
    assert [seat.name for seat in found.plan.seats] == ["name of a", "name of c"]
    painter.look(status("a", "c"), 4.0)
    over = painter.picture(4.0)
    assert over.run is not None
    assert over.run.state == "done"
    assert over.moments[-1].kind == "ended"


def test_a_run_whose_plan_is_too_long_for_its_record_has_steps_and_a_curve() -> None:
    painter = Painter()
    record = {"owner": "o", "job": "gpt", "state": "running", "epoch": [7, 1], "plan": None}
    for at, (step, loss) in enumerate(((0, None), (0, 3.0), (6, 2.0))):
        painter.look(status("a", "b", runs=[{**record, "step": step, "loss": loss}]), float(at))
        found = painter.picture(float(at))
        assert found.run is not None
        assert (found.run.step, found.run.loss) == (0 if loss is None else step + 1, loss)
    assert found.plan is None
    assert (found.curves.steps, found.curves.loss) == ((0, 6), (3.0, 2.0))


def test_a_folder_says_better_what_a_record_says_too() -> None:
    painter = Painter()
    painter.begin("run-1", {"name": "gpt", "steps": 100, "plan": plan("a", "b").to_json()})
    painter.hear(report(41))
    record = {"owner": "a", "job": "other", "state": "running", "epoch": [1, 1], "step": 3, "loss": 9.0, "plan": None}
    painter.look(status("a", "b", runs=[record]), 5.0)
    found = painter.picture(5.0)
    assert found.run is not None
    assert (found.run.name, found.run.step) == ("gpt", 42)
    assert found.mesh is not None
    assert [job.job for job in found.mesh.jobs] == ["other"]


def test_the_curves_of_a_long_run_are_few_and_keep_the_spikes() -> None:
    series = Series()
    for step in range(100_000):
        series.hear({"step": step, "loss": 50.0 if step == 77_777 else 1.0, "step_s": 0.1})
    series.hear({"step": 5, "loss": 99.0})  # computed again: it was told before
    curves = series.curves()
    assert 512 <= len(curves.steps) <= 1024
    assert curves.stride == 128
    assert max(x for x in curves.loss_high if x is not None) == 50.0
    assert set(curves.loss_low) == {1.0}
    assert list(curves.steps) == sorted(set(curves.steps))
    assert len(json.dumps(Painter().picture(0.0).to_json())) < 1000


def test_figures_that_are_none_leave_gaps() -> None:
    series = Series()
    for step, loss in enumerate((1.0, None, float("nan"), "x", 2.0)):
        series.hear({"step": step, "loss": loss, "metrics": {"loss": loss}})
    assert series.curves().loss == (1.0, None, None, None, 2.0)
    assert series.curves().metrics["loss"] == ((0, 1.0), (1, None), (2, None), (3, None), (4, 2.0))


def test_points_of_steps_that_are_taken_back_are_told_again() -> None:
    series = Series()
    for step in range(4):
        series.hear({"step": step, "loss": float(step)})
    for step in (2, 3):
        series.hear({"step": step, "loss": None})
    series.hear({"step": 2, "loss": 9.0})
    assert series.curves().loss == (0.0, 1.0, 9.0)


def test_moments_are_the_newest_and_a_gain_is_measured_later() -> None:
    painter = Painter()
    for k in range(1000):
        painter.tell({"at": float(k), "kind": "joined", "text": f"peer {k} joined"})
    painter.tell({"at": 1000.0, "kind": "replanned", "text": "a faster plan", "gain": 1.5, "step": 3})
    painter.tell({"at": 1001.0, "kind": "gain", "text": "", "gain": 1.4})
    for nothing in ({}, {"at": 1.0}, {"at": "x", "kind": "lost", "text": "y"}, {"at": 1.0, "kind": 2, "text": "y"}):
        painter.tell(nothing)
    moments = painter.picture(0.0).moments
    assert len(moments) == 300
    assert (moments[-1].gain, moments[-1].gain_measured) == (1.5, 1.4)


def test_an_account_has_memory_seconds_limit_and_helps_and_belongs_to_its_plan() -> None:
    made = plan("p", "q")
    where = cluster({"one": ["p"], "two": ["q"]}, bandwidth=2.0, latency_s=0.1)
    account = account_of(made, where, workload(4, 8, state=10, activation=5), {"p": "ann"})
    assert account.plan.seats[0].name == "ann"
    assert all(s.needed_bytes and s.memory_bytes and s.f_s for s in account.plan.seats)
    assert "computes" in account.limit
    assert [h.gain for h in account.helps] == sorted((h.gain for h in account.helps), reverse=True)
    assert all(h.gain > 1 and h.step_s > 0 for h in account.helps)
    assert account.helps
    painter = Painter()
    painter.begin("run-1", {"name": "x", "plan": made.to_json()})
    painter.account(loads(dumps(account.to_json())))
    found = painter.picture(0.0)
    assert found.plan == account.plan
    assert found.helps == account.helps
    other = Painter()
    other.begin("run-1", {"name": "x", "plan": plan("p", "r").to_json()})
    other.account(account.to_json())
    other.account({"plan": "nothing"})
    assert other.picture(0.0).helps == ()


def test_a_trace_becomes_lanes_with_both_kinds_of_spans() -> None:
    def of(pid: int, name: str, start_us: float, step: int = 3) -> list[dict[str, Any]]:
        span = {"cat": "F", "ph": "X", "pid": pid, "args": {"step": step, "micro": 0}, "ts": start_us, "dur": 1000.0}
        return [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}, span, {"pid": "x"}, {}]

    events = of(0, "stage 0, ann: measured", 5000.0) + of(1, "stage 0, ann: predicted", 100.0)
    found = gantt_of(events)
    assert found is not None
    (lane,) = found.lanes
    assert lane.label == "stage 0, ann"
    assert lane.measured == (("F", 0, 0.0, 0.001),)
    assert lane.expected == (("F", 0, 0.0, 0.001),)
    assert gantt_of([]) is None
    assert gantt_of([{"ph": "X", "cat": "F", "pid": 0, "ts": "x", "args": {}}]) is None


def test_places_are_the_same_every_time_and_within_the_map() -> None:
    links = {
        (a, b): LinkProfile(0.0002 if a[0] == b[0] else 0.04, 1e8)
        for a in ("a1", "a2", "b1")
        for b in ("a1", "a2", "b1")
        if a != b
    }
    found = places(["b1", "a2", "a1"], links)
    assert found == places(["a1", "a2", "b1"], links)
    assert found["a1"][2] == found["a2"][2] != found["b1"][2]
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y, _ in found.values())
    apart = {name: sum((u - v) ** 2 for u, v in zip(found["a1"], found[name][:2])) for name in ("a2", "b1")}
    assert apart["a2"] < apart["b1"]
    assert places(["a"], {}) == {"a": (0.5, 0.5, 0)}
    assert places([], {}) == {}
    assert places(["a"], links)["a"][2] == -1  # of links between others: nobody knows where it is
    assert len({place[:2] for place in places([f"p{k}" for k in range(50)], {}).values()}) == 50
