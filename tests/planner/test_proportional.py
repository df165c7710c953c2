"""The first planner against exhaustive enumeration, and what it says when nothing fits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcee.errors import PlanError
from meshcee.planner.memory import stage_bytes
from meshcee.planner.proportional import proportional
from meshcee.profile import BlockCost, DeviceProfile


def block(flops: float, parameters: int = 100, activation: int = 10) -> BlockCost:
    return BlockCost("b", flops, parameters, parameters, activation, 4, 4)


def device(speed: float, memory: int = 10**9) -> DeviceProfile:
    return DeviceProfile("cpu", "test", memory, speed)


@given(
    st.lists(st.floats(1, 100), min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(1, 50), st.integers(1, 1000)), min_size=1, max_size=7),
    st.integers(400, 12_000),
)
def test_no_enumerated_cut_is_faster(speeds: list[float], blocks: list[tuple[float, int]], memory: int) -> None:
    devices = {f"p{i}": device(s, memory) for i, s in enumerate(speeds)}
    costs = [block(f, p) for f, p in blocks]
    order = sorted(devices, key=lambda p: (-devices[p].speed_flops_per_s, p))[: len(costs)]

    def slowest(bounds: tuple[int, ...]) -> float:
        parts = [costs[a:b] for a, b in itertools.pairwise(bounds)]
        if any(stage_bytes(part, 2, 1) > memory for part in parts):
            return float("inf")
        return max(sum(c.flops for c in part) / devices[p].speed_flops_per_s for part, p in zip(parts, order))

    cuts = itertools.combinations(range(1, len(costs)), len(order) - 1)
    best = min(slowest((0, *cut, len(costs))) for cut in cuts)
    try:
        plan = proportional(devices, costs, 8, 2)
    except PlanError:
        assert best == float("inf")
        return
    stages = plan.pipelines[0].stages
    assert [s.peers[0] for s in stages] == order
    assert slowest((0, *(s.end for s in stages))) == pytest.approx(best)
    for stage in stages:
        assert stage_bytes(costs[stage.first : stage.end], 2, stage.live_cap) <= memory


def test_more_peers_than_blocks_leaves_some_out_with_a_reason() -> None:
    plan = proportional({f"p{i}": device(1 + i) for i in range(4)}, [block(1), block(1)], 4)
    assert len(plan.pipelines[0].stages) == 2
    assert {x.peer for x in plan.left_out} == {"p0", "p1"}
    assert all("2 blocks" in x.why for x in plan.left_out)


@pytest.mark.parametrize(
    ("memory", "says"),
    [(399, "block 'b' needs"), (420 + 5, "bytes are missing; join more peers")],
)
def test_a_shortage_names_the_missing_bytes(memory: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        proportional({"a": device(1, memory), "b": device(1, memory)}, [block(1)] * 5, 4, 2)
