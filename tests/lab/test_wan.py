"""The comparison's own arithmetic: cuts, shares, pace, bounds, and what is kept of a run."""

import asyncio
import io
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.lab import Lab
from benchmarks.lab.network import Network
from benchmarks.rivals import launch
from benchmarks.rivals.data_parallel import shares
from benchmarks.rivals.launch import Bed, Run, Site, System
from benchmarks.rivals.pace import PacedDevice, paced
from benchmarks.rivals.pipeline import cuts
from benchmarks.rivals.rows import counted_steps
from benchmarks.rivals.worker import Order, serve
from benchmarks.wan import NETWORKS, bed_of, bounds, figures, is_wanted, systems_of
from benchmarks.wan_table import table
from meshcee.plan import Member, Pipeline, Plan, Stage

FLOPS = [0.0, *[13e6] * 16, 17e6]


def test_cuts_are_contiguous_and_suit_the_devices() -> None:
    layers = cuts(FLOPS, [4.0, 4.0, 2.0, 1.0], 1)
    assert [k for part in layers for k in part] == list(range(18))
    slowest = max(sum(FLOPS[k] for k in part) / speed for part, speed in zip(layers, [4.0, 4.0, 2.0, 1.0]))
    assert slowest == pytest.approx(7 * 13e6 / 4)  # 7, 6 and 3 blocks, and the head
    twice = cuts(FLOPS, [4.0, 1.0, 1.0], 2)
    assert [k for part in twice for k in part] == list(range(18))
    assert [len(twice[i]) + len(twice[i + 3]) for i in range(3)] == [12, 3, 3]


def test_shares_are_by_speed_and_leave_nothing_out() -> None:
    assert shares(36, [2.0, 2.0, 1.0, 1.0]) == [slice(0, 12), slice(12, 24), slice(24, 30), slice(30, 36)]


def test_a_paced_model_computes_the_same_in_the_time_of_the_device() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    x, flops = torch.tensor([[1, 2, 6]]), [0.0, 2e6, 1e6, 2e6]
    plain(x).square().sum().backward()
    wanted = [p.grad for p in plain.parameters()]
    plain.zero_grad()
    device = PacedDevice(1e9)
    start_s = time.perf_counter()
    paced(plain, flops, device)(x).square().sum().backward()
    assert time.perf_counter() - start_s >= 0.014
    # The embedding's input has no gradient: its backward is not seen, and has no FLOPs.
    assert device.busy_s == pytest.approx(3 * sum(flops) / 1e9)
    for parameter, gradient in zip(plain.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_in_slow_motion_all_that_takes_time_takes_as_much_longer() -> None:
    network = Network.of(bed_of("sag", FLOPS).scenario)
    slow = network.slower(4)
    for link, same in zip(network.links, slow.links, strict=True):
        sizes = [1e6 / (x.bandwidth_bytes_per_s or math.inf) + x.latency_s for x in (link, same)]
        assert sizes[1] == pytest.approx(4 * sizes[0])
        assert slow.queue_bytes(same.bandwidth_bytes_per_s or 1) == network.queue_bytes(link.bandwidth_bytes_per_s or 4)
    assert slow.changes[0].at_s == 4 * network.changes[0].at_s
    run = Run(expected=1, slower=4)
    run.hear({"step": 0, "at_s": 100.0, "loss": 2.0, "samples": 1})
    assert run.ends_s == [25.0]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_bounds_and_every_system_a_place(name: str) -> None:
    bed = bed_of(name, FLOPS)
    Network.of(bed.scenario)
    found = bounds(bed, 65536.0, 36)
    assert 1.5 < found["bare"] <= found["filled"] < 4.0
    # With many micro-batches weight gradients hide fill and drain, with few they cannot.
    assert bounds(bed, 65536.0, 72)["filled"] / 72 <= found["filled"] / 36 < bounds(bed, 65536.0, 2)["filled"] / 2
    systems = {system.label: system for system in systems_of(bed, ["int8:--codec int8"])}
    assert systems["meshcee int8"].flags == ("--codec", "int8")
    best = max(bed.speeds_flops_per_s.values())
    assert bed.speeds_flops_per_s[systems["best single device"].hosts[0]] == best
    fits = next(s for label, s in systems.items() if "DDP" in label).hosts
    assert not any("2080" in host for host in fits)
    assert best < 2 * bed.speeds_flops_per_s[fits[0]]
    pipelines = [s.hosts for label, s in systems.items() if "GPipe" in label]
    assert set(pipelines) == {fits, tuple(bed.hosts)}
    assert len(pipelines) == len(set(pipelines))


def test_a_run_is_judged_by_its_last_worker_and_by_the_plain_losses() -> None:
    bed, run = bed_of("sag", FLOPS), Run(expected=2)
    for step in range(6):
        run.hear({"step": step, "at_s": 100.0 + 5 * step, "loss": 2.0, "samples": 12})
        run.hear({"step": step, "at_s": 101.0 + 5 * step, "loss": 1.0, "samples": 24})
    run.trace_s = 106.0
    stages = tuple(Stage(9 * i, 9 * i + 9, (Member(f"id{i}", 1),), window=2, live_cap=3) for i in range(2))
    run.plan, run.names = Plan(1, (Pipeline(36, stages),)).to_json(), {"id0": "cloud-a100-40-0"}
    run.lines = {"cloud>edge": 15.625e6 / 8 * 10}  # ten of twenty seconds
    found = figures(bed, run, [4 / 3] * 5 + [1.0])
    assert found["step_s"] == 5.0
    assert found["stages"] == ["cloud-a100-40-0: 0..8, none, window 2", "id1: 9..17, none, window 2"]
    assert found["loss_difference"] == pytest.approx(1 / 3)
    assert (found["busiest_line"], found["busiest_line_share"]) == ("cloud>edge", pytest.approx(0.5))
    assert found["step_before_s"] == found["step_after_s"] == 5.0
    data = {
        "bounds": {"sag": {"bare": 2.0, "filled": 2.5, "filled_16_bit": 2.2}},
        "rows": {"sag / meshcee": [found], "sag / x": [{"why": "no"}]},
    }
    drawn = table(data)
    assert "| meshcee | 5.00 | 5.00 to 5.00 (1) | 0.50 (0.40) | 1.00 | cloud>edge 50 % busy; 5.00 s before" in drawn
    assert "LOSSES DIFFER by 3.3e-01" in drawn
    assert "| x | - | - | - | - | no |" in drawn
    assert "CORES" not in drawn
    data["rows"]["sag / y"] = [{**found, "step_s": 10.0, "cores_busy": 0.9}]
    data["rows"]["sag / meshcee 16-bit"] = [{**found, "step_s": 4.0}]
    drawn = table(data)
    assert "| y | 10.00 | 10.00 to 10.00 (1) | 0.25 (0.20) | 2.00 (2.50) |" in drawn
    assert "CORES 90 % BUSY" in drawn


def made_up(*step_s: float, **more: Any) -> list[dict[str, Any]]:
    """Repetitions of one row."""
    line = {"busiest_line": "cloud>edge", "busiest_line_share": 0.5, "loss_difference": 0.0}
    return [{"step_s": s, **line, **more} for s in step_s]


def test_below_the_table_stands_how_meshcee_compares_with_the_best_of_the_rest() -> None:
    rows = {
        "meshcee": made_up(2.5, 2.6, 2.4, predicted_s=2.45, limit="links: stage 1 waits 31%"),
        "best single device": made_up(7.0, 7.5, 7.0),
        "torch DDP, 2 that fit": made_up(8.0, 7.0, 9.0),
        "torch GPipe, all 6": made_up(10.0),
        "torch 1F1B, all 6": made_up(1.0, loss_difference=0.1),
        "hivemind optimizer": [{"why": "not done in 400 s"}],
        "torch DDP, 6": [],
    }
    data = {
        "bounds": {"cee-small": {"bare": 2.2, "filled": 2.4, "filled_16_bit": 2.3}},
        "rows": {f"cee-small / {label}": found for label, found in rows.items()},
    }
    drawn = table(data)
    assert "2.40 s a step with fill and drain (2.30 s where packed 16 bits cross links), 2.20 s without" in drawn
    assert "3.20 times as fast as torch DDP, 2 that fit (2.69 to 3.75; aim 2.8)" in drawn
    assert "2.80 times as fast as best single device (2.69 to 3.12; aim 2.4)" in drawn
    assert "0.96 of the bound with fill and drain (aim 0.92); 0.88 of the bound without; +2 % beside predicted" in drawn
    assert "SHORT" not in drawn
    assert drawn.endswith(
        "Not counted: torch 1F1B, all 6 (losses differ), hivemind optimizer (failed), torch DDP, 6 (not measured)."
    )

    data["rows"]["cee-small / meshcee"] = made_up(3.0, predicted_s=2.45, limit="links: stage 1 waits 31%")
    data["rows"]["cee-small / meshcee"][0]["busiest_line_share"] = 0.9
    *_, line = table(data).splitlines()
    assert (
        "SHORT: 2.67 of 2.8 against torch DDP, 2 that fit; 2.33 of 2.4 against best single device; 0.80 of 0.92" in line
    )
    assert "+22 % beside predicted. Limited by cloud>edge 90 % busy, full; 2.45 s predicted; reports say: links" in line
    data["rows"]["cee-small / meshcee"] = made_up(3.0, predicted_s=2.45, step_before_s=2.5, step_after_s=4.0)
    assert "+2 % beside predicted" in table(data), "the plan is for the network as it was before it changed"


def test_on_every_network_no_baseline_may_be_faster_and_none_may_be_forgotten() -> None:
    rows = {"three-cities / meshcee": made_up(2.5), "three-cities / torch DDP, 2 that fit": made_up(2.0)}
    drawn = table({"bounds": {"three-cities": {"bare": 2.4, "filled": 2.4, "filled_16_bit": 2.4}}, "rows": rows})
    assert "SHORT: 0.80 of 1.0 against torch DDP, 2 that fit. Limited by" in drawn
    assert drawn.endswith("Not counted: one device (not measured).")


def test_losses_of_a_plan_that_rounds_are_told_and_no_fault() -> None:
    stages = ["a: 0..8, bf16, window 4", "b: 9..17, none, window 2"]
    rows = {"sag / meshcee 16-bit": made_up(2.5, loss_difference=3e-3, stages=stages)}
    drawn = table({"bounds": {"sag": {"bare": 2.2, "filled": 2.4, "filled_16_bit": 2.3}}, "rows": rows})
    assert "0.92 (0.88)" in drawn  # 2.3 of 2.5: fewer bytes, a lower bound
    assert "losses off by 3.0e-03, as it rounds" in drawn
    assert "DIFFER" not in drawn


def test_long_steps_are_few_and_a_trace_is_watched_to_its_end() -> None:
    assert [counted_steps(s, 0.0) for s in (0.5, 2.5, 5.0, 40.0)] == [6, 5, 3, 2]
    assert [counted_steps(s, 24.0) for s in (2.0, 5.0, 40.0)] == [12, 5, 2]


def test_a_row_is_repeated_until_it_has_been_measured_as_often_as_asked_or_has_failed() -> None:
    good, bad = {"step_s": 1.0}, {"why": "no"}
    assert [is_wanted(kept, 1) for kept in ([], [good], [good, good], [bad])] == [True, True, False, False]


def test_a_worker_trains_row_after_row_as_many_steps_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story: list[str] = []

    @contextmanager
    def trainer(order: Order) -> Iterator[Callable[[int], tuple[float | None, int]]]:
        story.append(f"begin {order.system}")
        yield lambda step: (float(step), 4)
        story.append(f"end {order.system}")

    orders = [{"order": asdict(Order(name, 0, ["a"], [1.0], [], 1, 2000))} for name in ("x", "y")]
    requests = [orders[0], {"go": 1}, {"go": 2}, {"end": True}, orders[1], {"go": 1}, {"end": True}]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(r) + "\n" for r in requests)))
    threads = torch.get_num_threads()
    serve({"x": trainer, "y": trainer})
    torch.set_num_threads(threads)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e.get("step", next(iter(e))) for e in said] == ["ready", 0, 1, 2, "over", "ready", 0, "over"]
    assert story == ["begin x", "end x", "begin y", "end y"]


async def test_rows_that_share_a_start_end_with_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def site(bed: Bed, mtu: int) -> AsyncIterator[Site]:
        yield Site(bed, Lab(Network.of(bed.scenario)), tmp_path)

    async def start(place: Site) -> str:
        (place.folder / "a.log").write_text("first\nthe last word\n")
        return "started"

    async def measure(place: Site, started: str, system: System) -> Run:
        assert started == "started"
        if system.label == "slow":
            await asyncio.sleep(60)
        return Run(expected=1)

    monkeypatch.setattr(launch, "site", site)
    told: list[tuple[str, Run | Exception]] = []
    systems = [System(label, "ddp", ()) for label in ("good", "slow", "never")]
    bed = bed_of("last-mile", FLOPS)
    await launch.in_turn(bed, systems, lambda s, r: told.append((s.label, r)), 0.05, 4000, start, measure)
    assert [label for label, _ in told] == ["good", "slow"]
    assert isinstance(told[0][1], Run)
    assert str(told[1][1]) == f"not done in 0 s; logs are in {tmp_path}; a: the last word"
