"""What else could be had: each row is a plan that the simulator prices so, and what was asked of it holds."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from meshcee.errors import PlanError
from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import Workload
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.chain import layout_of
from meshcee.planner.compare import COMPARED, Comparison, Row, comparison, sent_bytes
from meshcee.planner.live import plan_job, question_of, situation
from meshcee.planner.rules import Runs, Shortage, needs, shortages
from meshcee.planner.search import Effort, Question, plans
from meshcee.show.comparison import comparison_text
from meshcee.simulator import period_s
from peers.cli.main import app
from tests.planner.oracle import random_case, random_wide_case
from tests.planner.test_layouts import far_apart
from tests.planner.test_live import JOB, measured
from tests.planner.test_regions import DEVICES, LINKS

QUICK = Effort(events=60_000, rows=3_000_000)


def questions(cluster: Cluster, workload: Workload, runs: Runs | None = None) -> dict[str, Question]:
    own = Question(cluster, workload, ("bf16",), runs or Runs())
    return {"bf16": own, **{name: replace(own, codecs=(name,)) for name in COMPARED if name != "bf16"}}


@cache
def compared(seed: int) -> tuple[Cluster, Workload, Plan, Comparison]:
    """Below zero: few devices and light gradients, so that several pipelines pay. PlanError where nothing fits."""
    cluster, workload = random_wide_case(-seed) if seed < 0 else random_case(seed, devices=4)
    plan = plans(cluster, workload, effort=QUICK).best
    return cluster, workload, plan, comparison(plan, questions(cluster, workload))


def found(row: Row) -> Plan:
    assert row.found is not None, row
    return row.found.plan


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(min_value=-200, max_value=200))
def test_every_row_is_a_plan_that_fits_is_priced_by_the_simulator_and_is_what_it_says(seed: int) -> None:
    try:
        cluster, workload, plan, all_of_it = compared(seed)
    except PlanError:
        assume(False)
    taken = all_of_it.chosen
    assert (taken.plan, taken.step_s) == (plan, pytest.approx(period_s(plan, cluster, workload)))
    for row in all_of_it.rows:
        if row.found is None:
            assert (row.short is None) != (row.why == "")
            continue
        assert shortages(row.found.plan, cluster, workload) == []
        assert row.found.step_s == pytest.approx(period_s(row.found.plan, cluster, workload))
        held = needs(row.found.plan, cluster, workload)[row.found.fullest]
        assert (row.found.needed_bytes, row.found.memory_bytes) == (
            held,
            cluster.devices[row.found.fullest].memory_bytes,
        )
        assert layout_of(row.found.plan) != layout_of(plan)
        could_be = row.kind in ("pipelines", "without", "with")
        assert all_of_it.is_faster(row) == (could_be and row.found.step_s < taken.step_s * (1 - 1e-9))
        used = row.found.plan.peers
        assert row.several is None or row.several == (len(row.found.plan.pipelines) > 1)
        assert row.kind != "without" or row.peers[0] not in used
        assert row.kind != "with" or row.peers[0] in used
        boundaries = {c for chain in layout_of(row.found.plan) for b in chain.codecs for c in (b.out, b.back)}
        assert boundaries <= {row.codec or "bf16"}
        bits = {"lossless": None, "": 16, "bf16": 16, "int8": 8, "int4": 4}[row.codec]
        assert row.found.rounded_to == (bits if boundaries else None)
    about = {kind: {p for r in all_of_it.rows if r.kind == kind for p in r.peers} for kind in ("without", "with")}
    assert about == {"without": set(plan.peers), "with": set(cluster.devices) - set(plan.peers)}


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(min_value=-200, max_value=200))
def test_more_hardware_never_makes_a_step_slower_and_its_gain_is_not_the_longer_search(seed: int) -> None:
    try:
        cluster, workload, plan, all_of_it = compared(seed)
    except PlanError:
        assume(False)
    assert all_of_it.best_s <= all_of_it.chosen.step_s
    assert {row.kind for row in all_of_it.buys} >= {"device", "memory"}
    for row in all_of_it.buys:
        if row.found is None:
            assert row.why == "gains nothing"
            continue
        bought = row.found.plan
        assert row.found.step_s < all_of_it.best_s <= period_s(plan, cluster, workload)
        if all(peer in cluster.devices for peer in bought.peers) and not shortages(bought, cluster, workload):
            assert period_s(bought, cluster, workload) >= all_of_it.best_s
        if row.kind == "device":
            assert [peer for peer in bought.peers if peer not in cluster.devices] == [f"{row.peers[0]} (new)"]
            assert row.place[0] in cluster.regions


def test_the_json_has_the_documented_keys_and_its_plans_can_be_simulated() -> None:
    cluster, workload, plan, all_of_it = compared(9)
    data = json.loads(json.dumps(all_of_it.to_json()))
    assert data.keys() == {"chosen", "rows", "buys", "best_s"}
    keys = {"kind", "peers", "codec", "several", "place", "amount", "found", "short", "why"}
    assert all(row.keys() == keys | {"faster"} for row in data["rows"])
    assert all(row.keys() == keys for row in data["buys"])
    figures = {"step_s", "sent_bytes", "fullest", "rounded_to", "sums_reordered", "kernel_classes", "stages", "plan"}
    for one in [data["chosen"], *(row["found"] for row in data["rows"] if row["found"])]:
        assert one.keys() == figures
        again = Plan.from_json(one["plan"])
        assert one["step_s"] == pytest.approx(period_s(again, cluster, workload))
        assert one["stages"] == [len(pipeline.stages) for pipeline in again.pipelines]
    assert Plan.from_json(data["chosen"]["plan"]) == plan


def test_bytes_on_links_are_boundaries_and_sums() -> None:
    cluster, work = far_apart(2)
    work = replace(
        work, boundary_bytes=(1000,) * 7 + (0,), boundary_back_bytes=(500,) * 7 + (0,), gradient_bytes=(64,) * 8
    )
    a, b = (Member(peer, 1) for peer in cluster.devices)
    row = (Stage(0, 3, (a,), 2, 2, "bf16", "bf16"), Stage(3, 8, (b,), 2, 2, "bf16", "int8"))
    count = work.global_batch
    expected = count * (1000 + 500 * 8.25 / 16)
    assert sent_bytes(Plan(1, (Pipeline(count, row),)), cluster, work) == pytest.approx(expected)
    alone = tuple(Pipeline(count // 2, (Stage(0, 8, (one,), 1, 1),)) for one in (a, b))
    assert sent_bytes(Plan(1, alone), cluster, work) == pytest.approx(2 * 8 * 64)


def test_where_several_pipelines_are_best_the_row_has_one() -> None:
    where, work = far_apart(2)
    runs = Runs(group=1)
    plan = plans(where, work, effort=QUICK, runs=runs).best
    assert len(plan.pipelines) == 2
    rows = comparison(plan, questions(where, work, runs)).rows
    (one,) = (row for row in rows if row.kind == "pipelines")
    assert (one.several, len(found(one).pipelines)) == (False, 1)
    assert not [row for row in rows if row.kind == "codec"], "neither plan has a boundary"


def tight(count: int) -> tuple[Cluster, Workload, Plan]:
    """So many devices that hold a model together, and not with one less."""
    _, work = random_case(2)
    work = replace(work, micro_batch=1)
    kind = sorted(work.times)[0]
    room = int(1.3 * work.stage_bytes(0, work.num_blocks, 1, 1) / count)
    devices = [Device(f"d{i}", kind, "r", room, 1e9) for i in range(count)]
    cluster = Cluster(devices, inside_latency_s={"r": 1e-4}, between={})
    return cluster, work, plans(cluster, work, effort=QUICK).best


def test_what_does_not_fit_says_what_it_needs_and_who_has_less() -> None:
    cluster, work, plan = tight(2)
    all_of_it = comparison(plan, questions(cluster, work))
    short = {row.kind: row.short for row in all_of_it.rows if row.found is None}
    assert short.keys() == {"pipelines", "without"}
    needed = work.stage_bytes(0, work.num_blocks, 1, 1)
    assert short["without"] == Shortage("", needed, cluster.devices["d0"].memory_bytes)
    assert short["pipelines"] == Shortage("", 2 * needed, 2 * cluster.devices["d0"].memory_bytes)
    lines = comparison_text(all_of_it, {"d0": "ann", "d1": "ben"}).splitlines()
    (line,) = (line for line in lines if line.startswith("without"))
    assert line.split("  ")[0] == "without ben (or ann)"
    assert line.endswith("does not fit: needs 1.281 GiB, all devices together have 852.8 MiB")


def test_one_device_has_no_alternative_and_nothing_is_repeated() -> None:
    cluster, work = random_case(2)
    first = next(iter(cluster.devices.values()))
    room = 10 * work.stage_bytes(0, work.num_blocks, 4, 4)
    alone = Cluster([replace(first, memory_bytes=room)], inside_latency_s=cluster.inside_latency_s, between={})
    plan = plans(alone, work, effort=QUICK).best
    all_of_it = comparison(plan, questions(alone, work))
    assert [(row.kind, row.why) for row in all_of_it.rows if row.short is None] == [
        ("pipelines", "no such plan was found"),
        ("without", "no other device is there"),
    ]
    assert [row.kind for row in all_of_it.buys] == ["device", "memory"]


def test_a_device_like_one_that_is_left_out_costs_nothing() -> None:
    cluster, work = far_apart(3, memory=10.0)
    near = Cluster(
        [replace(d, region="r0") for d in cluster.devices.values()], inside_latency_s={"r0": 1e-4}, between={}
    )
    plan = Plan(1, (Pipeline(work.global_batch, (Stage(0, 8, (Member("d0", 1),), 1, 1, "bf16", "bf16"),)),))
    rows = comparison(plan, questions(near, work)).rows
    (without,) = (row for row in rows if row.kind == "without")
    assert without.why == "d1, which is like it, takes its place"
    assert found(without).peers == ("d1",)
    assert without.found is not None
    assert without.found.step_s == pytest.approx(period_s(plan, near, work))


@pytest.mark.slow
def test_a_live_mesh_is_compared_with_every_codec_and_only_within_what_its_members_run() -> None:
    mesh = measured()
    job = replace(JOB, codec="auto", pipelines=True)
    plan, _ = plan_job(mesh, job, None, QUICK)
    asked = {c: question_of(plan, mesh, replace(job, codec=c)) for c in ("auto", *COMPARED)}
    _, workload = situation(mesh, job)
    all_of_it = comparison(plan, asked, plain=workload, kernels=dict.fromkeys(mesh.devices, "cpu"))
    assert {row.codec for row in all_of_it.rows if row.kind == "codec"} == set(COMPARED)
    for row in (*all_of_it.rows, *all_of_it.buys):
        if row.found is not None:
            assert all(len(stage.members) == 1 for p in row.found.plan.pipelines for stage in p.stages)
            assert row.found.kernel_classes == 1 or row.kind == "device"
    exact = [row for row in all_of_it.rows if row.codec == "lossless" and row.found is not None]
    assert exact
    assert all(row.found is not None and row.found.plan.codecs == frozenset() for row in exact)
    names = {peer: f"peer-{peer}" for peer in mesh.devices}
    text = comparison_text(all_of_it, names)
    assert "codec lossless (exact)" in text
    assert "peer-a" in text


def test_where_copies_leave_no_room_a_row_says_so() -> None:
    """Three of these devices have room for copies beside the stages, two have not."""
    cluster, work, _ = tight(3)
    plan = plans(cluster, work, effort=QUICK).best
    roomy = replace(work, state_bytes=tuple(int(1.25 * size) for size in work.state_bytes))
    asked = Question(cluster, roomy, ("bf16",), Runs(group=1))
    larger = [replace(d, memory_bytes=int(1.2 * d.memory_bytes)) for d in cluster.devices.values()]
    asked = replace(asked, cluster=Cluster(larger, inside_latency_s={"r": 1e-4}, between={}))
    rows = comparison(plan, {"bf16": asked}, plain=work).rows
    (without,) = (row for row in rows if row.kind == "without")
    assert found(without)
    assert without.why == "leaves no room for copies of the state"


def test_a_faster_link_reaches_from_end_to_end() -> None:
    """The line between two regions is as fast as the ports at its ends: twice as fast alone it would carry no more."""
    where, work = far_apart(2, memory=0.4)
    devices = [replace(d, port_bytes_per_s=4e6) for d in where.devices.values()]
    line = LinkProfile(0.02, 4e6)
    thin = Cluster(devices, inside_latency_s=where.inside_latency_s, between={("r0", "r1"): line, ("r1", "r0"): line})
    runs = Runs(group=1, pipelines=1)
    plan = plans(thin, work, effort=QUICK, runs=runs).best
    assert len(plan.peers) == 2
    all_of_it = comparison(plan, questions(thin, work, runs))
    (link,) = (row for row in all_of_it.buys if row.kind == "link")
    assert link.amount == 8e6
    assert link.found is not None
    assert link.found.step_s < 0.7 * all_of_it.best_s


def test_a_link_twice_as_fast_has_twice_the_measured_bandwidth() -> None:
    """Steps have a share of a link, and nobody buys a share."""
    devices = {p: DEVICES[p] for p in "ab"}
    pairs = {k: LinkProfile(0.02, 1e7) for k in LINKS if {*k} == {"a", "b"}}
    mesh = measured(devices, pairs)
    plan, _ = plan_job(mesh, JOB, 2, QUICK)
    buys = comparison(plan, {"none": question_of(plan, mesh, JOB, 2)}, plain=situation(mesh, JOB)[1]).buys
    assert [row.amount for row in buys if row.kind == "link"] == [pytest.approx(2e7)]


def test_one_more_device_is_fed_like_the_others() -> None:
    """The owner's uplink sets the step, and a new device would be behind that uplink as well."""
    devices = {p: DEVICES[p] for p in "ab"}
    mesh = measured(devices, {k: v for k, v in LINKS.items() if {*k} == {"a", "b"}})
    mesh = replace(mesh, feeds=dict.fromkeys(devices, LinkProfile(0.001, 1e6)))
    job = replace(JOB, feeds=((10**6, (0,)),))
    plan, _ = plan_job(mesh, job, None, QUICK)
    all_of_it = comparison(plan, {"none": question_of(plan, mesh, job)}, plain=situation(mesh, job)[1])
    assert all_of_it.best_s == pytest.approx(16.0, rel=0.01)
    assert {row.why for row in all_of_it.buys if row.kind == "device"} == {"gains nothing"}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_the_command_prints_a_table_and_data() -> None:
    quick = ("plan", "--testbed", "cee-small", "--effort", "0.1", "--compare")
    lines = run(*quick).splitlines()
    (head,) = (line for line in lines if "crosses links" in line)
    end = head.index("step") + len("step")
    (taken,) = (line for line in lines if line.startswith("the plan"))
    assert taken[:end].endswith(" s")
    assert any(line.startswith("codec int8 (8 bits)") for line in lines)
    assert any(line.startswith("  one more device like cloud-a100-40-0, in ") for line in lines)
    data = json.loads(run(*quick, "--json"))
    Plan.from_json(data)
    assert data["comparison"]["chosen"]["step_s"] == pytest.approx(data["predicted"]["step_s"])
    assert math.isfinite(data["comparison"]["best_s"])
    (slow,) = (row for row in data["comparison"]["rows"] if row["kind"] == "with")
    assert slow["peers"] == ["end-rtx-2080-0", "end-rtx-2080-1"]
    assert "end-rtx-2080-0" in Plan.from_json(slow["found"]["plan"]).peers
    assert slow["found"]["step_s"] > 1.2 * data["comparison"]["chosen"]["step_s"]
