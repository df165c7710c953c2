"""Devices of one host: shares of cores and memory, the run's number of threads, and what a shared core costs a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshcee.figures.hosts import as_run, shares, threads_of
from meshcee.figures.measured import JobCosts, Measured
from meshcee.figures.profile import BlockCost, DeviceProfile, LinkProfile
from meshcee.figures.timing import BlockTimes
from meshcee.planner.live import choose
from meshcee.simulator import bound_s, build, period_s
from tests.rig.small import cluster, pipeline, plan, workload


def cpu(host: str, cores: int, *, threads: int = 0, said: bool = False, memory_said: bool = False) -> DeviceProfile:
    own = threads or cores
    return DeviceProfile(
        "cpu", "x", 8 << 30, 1e10 * own, own, "AMD AVX2", None, host, cores, threads_said=said, memory_said=memory_said
    )


GPU = DeviceProfile("cuda", "H200", 1 << 37, 1e14, 2, host="h", cores=2)


def named(*devices: DeviceProfile) -> dict[str, DeviceProfile]:
    return {f"p{i}": device for i, device in enumerate(devices)}


def test_a_lone_peer_has_all_cores_and_four_on_two_cores_have_one_each() -> None:
    assert shares(named(cpu("h", 2))) == {"p0": 2}
    assert shares(named(*[cpu("h", 2)] * 4)) == {f"p{i}": 1 for i in range(4)}
    assert shares(named(cpu("h", 8), cpu("h", 8), cpu("g", 4))) == {"p0": 4, "p1": 4, "p2": 4}
    assert shares(named(GPU, cpu("h", 2))) == {"p1": 2}  # a GPU's peer takes no share of the cores


def test_what_a_user_has_said_stays_and_leaves_less_to_others() -> None:
    assert shares(named(cpu("h", 8, threads=6, said=True), cpu("h", 8), cpu("h", 8))) == {"p0": 6, "p1": 1, "p2": 1}
    assert shares(named(cpu("", 2, threads=2), cpu("", 2, threads=2))) == {"p0": 2, "p1": 2}  # nobody knows of a host


@pytest.mark.parametrize(
    ("devices", "threads"),
    [
        ([cpu("h", 2)], 2),
        ([cpu("h", 2)] * 4, 1),
        ([cpu("a", 8), cpu("b", 8)], 8),
        ([cpu("a", 64), cpu("b", 2)], 64),  # the small one would keep 62 cores idle
        ([cpu("a", 8), cpu("b", 4)], 4),  # all the same: the number with which both take part
        ([cpu("a", 8), cpu("b", 4), cpu("c", 4)], 4),
        ([GPU], 0),
        ([], 0),
    ],
)
def test_a_run_has_one_number_of_threads(devices: list[DeviceProfile], threads: int) -> None:
    assert threads_of(named(*devices)) == threads


def test_memory_is_divided_unless_the_user_has_said_and_a_host_has_one_speed() -> None:
    slow = replace(cpu("h", 2), speed_flops_per_s=1e8)  # measured while another one started
    given = replace(cpu("h", 2, memory_said=True), memory_bytes=2 << 30)
    found = as_run(named(cpu("h", 2), slow, given, cpu("g", 2)), 1)
    assert [d.memory_bytes >> 30 for d in found.values()] == [3, 3, 2, 8], "what was given to one is no other one's"
    assert [d.speed_flops_per_s for d in found.values()] == [1e10] * 4
    assert {d.threads for d in found.values()} == {1}


def test_of_a_host_whose_memory_was_given_away_nothing_is_left_and_hosts_that_nobody_knows_share_nothing() -> None:
    given = cpu("h", 2, memory_said=True)
    found = as_run(named(cpu("h", 2), given, cpu("", 2), replace(given, host="")), 1)
    assert [d.memory_bytes for d in found.values()] == [1, 8 << 30, 8 << 30, 8 << 30]


def test_nodes_of_one_host_that_compute_at_once_slow_each_other_down() -> None:
    work = workload(2, 8)
    row = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=8, window=8, cap=8))
    apart = cluster({"x": ["a", "b"]})
    together = cluster({"x": ["a", "b"]})
    for name, device in together.devices.items():
        together.devices[name] = replace(device, host="h", load=1.0)  # one core, a thread each
    alone_s, shared_s = period_s(row, apart, work), period_s(row, together, work)
    assert alone_s == pytest.approx(24, rel=0.2)
    assert shared_s == pytest.approx(48, rel=0.1)  # all work of both, one after the other
    assert bound_s(build(row, together, work)) == pytest.approx(48, rel=0.01)
    for name, device in together.devices.items():
        together.devices[name] = replace(device, load=0.5)  # two cores
    assert period_s(row, together, work) == pytest.approx(alone_s, rel=0.01)


def live(host: str, cores: int) -> Measured:
    """Four peers whose links are as fast as memory."""
    devices = {f"p{i}": replace(cpu(host, cores), threads_said=True, threads=1) for i in range(4)}
    links = {(a, b): LinkProfile(1e-5, 1e10, 1.0) for a in devices for b in devices if a != b}
    row = (((1e-2, 1e-2, 1e-2),),)
    times = BlockTimes((0,), (4,), (row, row, row), (1e-4,))
    return Measured(devices, links, dict.fromkeys(devices, times), {})


def test_a_plan_does_not_promise_cores_that_are_not_there() -> None:
    costs = [BlockCost(f"h.{i}", 1e7, 10**4, 10**4, 10**4, 10**4, 10**4) for i in range(8)]
    job = JobCosts(costs, 32, 4, alike=(0,) * 8, threads=1)
    of_four, of_two = (choose(live("h", cores), job)[0].best for cores in (4, 2))
    assert of_four.predicted is not None
    assert of_two.predicted is not None
    work_s = 8 * 8 * 3 * 1e-2
    assert of_four.predicted.step_s < work_s / 2.5
    assert of_two.predicted.step_s > 0.95 * work_s / 2
    assert of_two.threads == 1
