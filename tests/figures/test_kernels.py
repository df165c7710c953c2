"""Kernel classes: what computes the same bits, what a plan may put together, and what is said of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from meshcee.errors import PlanError
from meshcee.figures.kernels import (
    KernelClass,
    check_alike,
    class_of,
    fitting,
    remark,
    with_classes,
    without_threads,
)
from meshcee.figures.measured import JobCosts, Measured
from meshcee.figures.profile import BlockCost, DeviceProfile
from meshcee.figures.versions import PYTHON_FROM, TORCH_BELOW, TORCH_FROM, Versions
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.live import choose

OURS = Versions("0.2.0", "2.13.0+cpu", "3.11.7")
CPU = DeviceProfile("cpu", "a processor", 1 << 33, 1e10, 2, "AMD AVX2", OURS, "h", 2)
OTHER = replace(CPU, capability="Intel AVX512", host="g", speed_flops_per_s=5e10)
GPU = replace(CPU, kind="cuda", name="H200", capability="", versions=replace(OURS, torch="2.13.0+cu130"))
OLD = replace(CPU, versions=replace(OURS, torch="2.12.1+cpu"))
ANCIENT = replace(CPU, versions=replace(OURS, torch="2.4.0"))


def row(*peers: str) -> Plan:
    stages = tuple(Stage(i, i + 1, (Member(p, 2),), 1, 1) for i, p in enumerate(peers))
    return Plan(2, (Pipeline(2, stages),))


def test_a_class_is_all_that_decides_bits() -> None:
    assert str(class_of(CPU, 1)) == "cpu AMD AVX2, torch 2.13.0+cpu, 1 thread"
    assert str(class_of(CPU)) == "cpu AMD AVX2, torch 2.13.0+cpu, 2 threads"
    assert str(class_of(GPU, 1)) == "cuda H200, torch 2.13.0+cu130"  # whose kernels no CPU's threads change
    assert class_of(CPU, 1) == class_of(replace(CPU, host="g", cores=64, name="its twin"), 1)
    assert len({class_of(d, n) for d in (CPU, OTHER, GPU, OLD) for n in (1, 2)}) == 7


def beside(*rows: tuple[tuple[str, int], ...]) -> Plan:
    """A pipeline for each row: peers, and the blocks that each has."""
    pipelines = []
    for members in rows:
        ends = list(accumulate(blocks for _, blocks in members))
        stages = (Stage(e - n, e, (Member(p, 2),), 1, 1) for (p, n), e in zip(members, ends, strict=True))
        pipelines.append(Pipeline(2, tuple(stages)))
    return Plan(2, tuple(pipelines), threads=1)


@pytest.mark.parametrize(
    ("unlike", "what"),
    [
        (OTHER, r"Intel AVX512, torch 2\.13\.0\+cpu, 1 thread\), unlike in model,"),
        (OLD, "in torch,"),
        (GPU, "in kind and model and torch and threads,"),
    ],
)
def test_pipelines_have_a_block_on_devices_of_one_class(unlike: DeviceProfile, what: str) -> None:
    devices = {"a": CPU, "b": unlike, "c": replace(CPU, host="c", name="its twin"), "d": unlike}
    names = {peer: f"the {peer}" for peer in devices}
    check_alike(beside((("a", 4),), (("c", 4),)), devices, names)
    check_alike(beside((("a", 1), ("b", 3)), (("c", 1), ("d", 3))), devices, names)
    check_alike(beside((("a", 1), ("b", 3))), devices, names)  # one pipeline may mix
    with pytest.raises(PlanError, match=rf"block 0 on the a \(.* and the b \(.*{what}.* one kernel class"):
        check_alike(beside((("a", 4),), (("b", 4),)), devices, names)
    with pytest.raises(PlanError, match=r"block 1 on the b \(.* and the c \(.* one kernel class"):
        check_alike(beside((("a", 1), ("b", 3)), (("c", 2), ("d", 2))), devices, names)


def test_threads_of_their_own_make_two_classes() -> None:
    plan, devices = replace(beside((("a", 4),), (("b", 4),)), threads=0), {"a": CPU, "b": replace(CPU, threads=4)}
    with pytest.raises(PlanError, match="unlike in threads,"):
        check_alike(plan, devices, {})
    check_alike(replace(plan, threads=1), devices, {})


def test_by_default_devices_may_be_unlike_and_versions_not() -> None:
    devices = {"a": CPU, "b": OTHER, "c": GPU, "d": OLD, "e": ANCIENT}
    kept, left = fitting(devices, "devices", 2, OURS)
    assert list(kept) == ["a", "b", "c"]
    assert {x.peer: x.why for x in left} == {
        "d": 'it runs torch 2.12.1, and the owner has 2.13.0; Job(mix="versions") allows it',
        "e": 'it runs torch 2.4.0, and meshcee 0.2.0 supports 2.11 up to below 2.14; Job(mix="versions") allows it',
    }
    assert list(fitting(devices, "versions", 2, OURS)[0]) == list(devices)


def test_one_class_only_is_that_with_the_most_speed() -> None:
    kept, left = fitting({"a": CPU, "b": OTHER, "c": CPU}, "none", 2, OURS)
    assert list(kept) == ["b"]
    assert {x.peer for x in left} == {"a", "c"}
    assert "cpu AMD AVX2" in left[0].why


def test_a_run_keeps_to_the_class_that_it_has_begun_on_however_fast_others_are() -> None:
    devices = {"a": CPU, "b": OTHER, "c": OTHER}
    begun = JobCosts([BlockCost("h", 1e7, 10, 10, 10, 10, 10)], 4, mix="none", versions=OURS, threads=2)
    assert list(begun.fitting(devices)[0]) == ["b", "c"]
    begun = begun.begun_on([class_of(CPU, 2)])
    kept, left = begun.fitting(devices)
    assert list(kept) == ["a"]
    assert {x.peer for x in left} == {"b", "c"}
    with pytest.raises(
        PlanError,
        match=r"the run has begun on cpu AMD AVX2, torch 2.13.0\+cpu.*join such a device, or go on with --mix",
    ):
        choose(Measured({"b": OTHER}, {}, {}, {}), begun)
    assert replace(begun, mix="devices").begun_on([class_of(CPU, 2)]).keeps == ""


def test_what_libraries_compute_is_part_of_a_class() -> None:
    """Variables as MKL_CBWR choose it."""
    one, other = (replace(CPU, capability=f"AMD AVX2/{digits}") for digits in ("1a2b", "ffff"))
    said = remark(with_classes(row("a", "b"), {"a": one, "b": other}, 1), {"a": one, "b": other})
    assert said is not None
    assert "AVX2/1a2b" in said
    assert "by variables as MKL_CBWR" in said
    begun = JobCosts([BlockCost("h", 1e7, 10, 10, 10, 10, 10)], 4, mix="none", versions=OURS, threads=2)
    assert list(begun.begun_on([class_of(other, 2)]).fitting({"a": one, "b": other})[0]) == ["b"]
    before = begun.begun_on([class_of(CPU, 2)])  # a run that began when classes did not say it
    assert before.fitting({"a": one})[0]


def test_a_run_that_draws_keeps_to_its_kind_of_device() -> None:
    draws = JobCosts([BlockCost("h", 1e7, 10, 10, 10, 10, 10)], 4, draws=True, versions=OURS, threads=2)
    mesh = Measured({"a": CPU, "b": replace(GPU, speed_flops_per_s=1e12)}, {}, {}, {})
    assert choose(mesh, draws)[0].best.peers == ("b",)
    begun = draws.begun_on([class_of(CPU, 2), class_of(OTHER, 2)])
    assert choose(mesh, begun)[0].best.peers == ("a",)
    with pytest.raises(PlanError, match=r"it is a cuda H200.*has begun on cpu.*join such a device$"):
        choose(replace(mesh, devices={"b": GPU}), begun)
    mixed = replace(draws, mix="none").begun_on([class_of(CPU, 2), class_of(OTHER, 2)])
    assert mixed.keeps == "cpu"  # it has no class any more


def test_a_class_is_read_from_a_runs_description() -> None:
    for device in (CPU, GPU, replace(CPU, versions=None)):
        of = class_of(device, 2)
        assert KernelClass.of_run(of.kind, f"{of.model}, torch {of.torch}", of.threads) == of


def test_a_device_without_the_threads_is_left_out() -> None:
    said = replace(CPU, threads=1, threads_said=True)
    kept, left = fitting({"a": CPU, "b": said}, "devices", 2, OURS)
    assert list(kept) == ["a"]
    assert left[0].why == "it computes with 1 threads at most, and the run with 2"


def test_what_is_said_of_a_plan() -> None:
    devices = {"a": CPU, "b": CPU, "c": GPU}
    alike = with_classes(row("a", "b"), devices, 1)
    assert alike.threads == 1
    assert alike.kernels == ("cpu AMD AVX2, torch 2.13.0+cpu, 1 thread",)
    told = remark(alike, devices)
    assert told == "equals the plain loop with torch.set_num_threads(1) on cpu AMD AVX2, torch 2.13.0+cpu"
    mixed = remark(with_classes(row("a", "c"), devices, 1), devices)
    assert mixed is not None
    assert "mixes (cpu AMD AVX2, torch 2.13.0+cpu, 1 thread) and (cuda H200, torch 2.13.0+cu130)" in mixed
    assert "no single machine's loop has its bits" in mixed
    assert remark(alike, devices, mixed=True) == told
    on_gpus = remark(with_classes(row("c"), devices, 1), devices, mixed=True)
    assert on_gpus is not None
    assert "for GPUs it has other lists" in on_gpus


def test_threads_are_part_of_what_members_acknowledge() -> None:
    plan = row("a", "b")
    assert replace(plan, threads=1).hash() != replace(plan, threads=2).hash()
    assert Plan.from_json(with_classes(plan, {"a": CPU, "b": CPU}, 2).to_json()).threads == 2
    with pytest.raises(PlanError, match="threads"):
        replace(plan, threads=-1)


def test_who_is_left_out_is_in_the_plan_with_the_reason_and_nobody_left_is_an_error() -> None:
    job = JobCosts([BlockCost("h", 1e7, 10, 10, 10, 10, 10)], 4, 4, versions=OURS, threads=2)
    best = choose(Measured({"a": CPU, "d": OLD}, {}, {}, {}), job)[0].best
    assert best.peers == ("a",)
    assert "torch 2.12.1" in next(x.why for x in best.left_out if x.peer == "d")
    with pytest.raises(
        PlanError, match="no device of the mesh can take part in this job: d cannot, as it runs torch 2"
    ):
        choose(Measured({"d": OLD}, {}, {}, {}), job)


def test_the_supported_range_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={PYTHON_FROM[0]}.{PYTHON_FROM[1]}"
    assert "torch>={}.{},<{}.{}".format(*TORCH_FROM, *TORCH_BELOW) in project["dependencies"]
    assert OURS.outside() is None
    assert "Python 3.10.2" in str(replace(OURS, python="3.10.2").outside())
    assert "torch nightly" in str(replace(OURS, torch="nightly").outside())


def test_an_audited_job_has_devices_whose_steps_its_owner_can_compute_again() -> None:
    devices = {"a": CPU, "b": OTHER, "c": GPU, "d": replace(CPU, threads=1)}
    kept, left = fitting(devices, "devices", 1, OURS, judge=without_threads(CPU))
    assert list(kept) == ["a", "d"]  # how many threads a CPU has by itself is not how many a run has
    assert {x.peer for x in left if "cannot compute its steps again" in x.why} == {"b", "c"}
