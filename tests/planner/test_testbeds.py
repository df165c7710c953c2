"""The testbeds: what a good search is known to reach, and how long planning takes."""

import time

import pytest

from meshcee.figures.scenario import load_scenario, packaged
from meshcee.planner.rules import shortages
from meshcee.planner.search import plans
from meshcee.simulator import period_s

KNOWN = {"cee-small": 14.1, "cee-medium": 27.5, "two-clusters": 17.6, "three-cities": 8.65, "eight-cities": 17.8}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KNOWN)
def test_a_testbed_reaches_what_is_known_to_be_reachable(name: str) -> None:
    scenario = load_scenario(packaged("testbeds.json"), name, packaged("gpu_profiles.json"))
    begun_s = time.process_time()
    choice = plans(scenario.cluster, scenario.workload)
    took_s = time.process_time() - begun_s
    plan = choice.best
    assert plan.predicted is not None
    assert plan.predicted.samples_per_s >= 0.98 * KNOWN[name]
    assert plan.predicted.step_s == pytest.approx(period_s(plan, scenario.cluster, scenario.workload))
    assert shortages(plan, scenario.cluster, scenario.workload) == []
    assert {s.codec_out for s in plan.pipelines[0].stages} == {"bf16"}
    assert {*plan.peers, *(x.peer for x in plan.left_out)} == set(scenario.cluster.devices)
    assert choice.single is None or plan.predicted.step_s < choice.single[1]
    assert took_s < 20  # less than one second on a quiet machine, many times that beside other work
