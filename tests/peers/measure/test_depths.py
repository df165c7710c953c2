"""How much waits for a link: measured where it is put, told with the step, and what it makes of a link's rate."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from meshcee.adapt.senses import LASTING_STEPS, Carries, Senses, Shift
from meshcee.errors import ProtocolError
from meshcee.figures.observed import Observed
from meshcee.figures.rate import LEAST_BYTES
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from peers.owner.answers import Answers
from peers.owner.feed import Portion
from peers.transport.base import Frame
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire.messages import Round
from peers.wire.neighbour_link import Crossed
from peers.wire.outbox import Outbox
from tests.peers.transport.harness import KEY, pair
from tests.rig.mesh_fixture import Trained, even_plan, train
from tests.rig.virtual_time import run, virtual_time

KB, MICRO, MICROS = 1000, 8, 4
PAIR = ("a", "b")


def about(times: float) -> Any:
    """As the text of a shift says it."""
    return pytest.approx(times, abs=0.005)


def heard(senses: Senses, rate: float, depth: float | None, steps: int = LASTING_STEPS) -> list[Shift]:
    depths = {} if depth is None else {PAIR: depth}
    return [told for _ in range(steps) for told in senses.hear(Observed({}, {PAIR: rate}, depths))]


def warmed() -> Senses:
    senses = Senses({PAIR: 1e6})
    senses.hear(Observed())
    return senses


@pytest.mark.parametrize("depth", [None, 1e5])
def test_the_rate_of_a_link_with_a_queue_is_its_bandwidth(depth: float | None) -> None:
    senses = warmed()
    assert heard(senses, 3e5, depth) == [Carries(("a", "b"), about(0.30))]


def test_a_link_that_was_idle_has_at_least_what_it_shows() -> None:
    senses = warmed()
    assert heard(senses, 3e5, 100, 3 * LASTING_STEPS) == [], "each frame begins slowly"
    assert senses.rates == {}
    senses = warmed()
    assert heard(senses, 2e6, 0, 3 * LASTING_STEPS) == [Carries(("a", "b"), about(2.00))]
    assert senses.rates == {PAIR: 2e6}


def test_a_link_that_sags_and_then_has_a_queue_is_noticed_as_soon_as_one_that_had_one_before() -> None:
    for depth in (0, 1e5):
        senses = warmed()
        assert heard(senses, 1e6, depth, 2 * LASTING_STEPS) == []
        assert heard(senses, 2.5e5, 1e5, LASTING_STEPS // 2) == [], "it may pass"
        assert heard(senses, 2.5e5, 1e5, 1) == [Carries(("a", "b"), about(0.25))]


def test_an_idle_link_that_sags_shows_it_by_its_own_usual_rate() -> None:
    senses = warmed()
    assert heard(senses, 3e5, 0) == []
    assert heard(senses, 1e5, 0, 3 * LASTING_STEPS) == [Carries(("a", "b"), about(0.33))]
    assert senses.rates[PAIR] == pytest.approx(1e6 / 3)
    assert heard(senses, 3e5, 0, 3 * LASTING_STEPS) == [Carries(("a", "b"), about(3.00))]
    senses.restart()
    senses.hear(Observed())
    assert heard(senses, 1e5, 0, 3 * LASTING_STEPS) == [], "another plan sends other frames"


def test_what_a_queue_has_shown_is_not_counted_again_when_the_link_is_idle() -> None:
    senses = warmed()
    assert heard(senses, 3e5, 0) == []
    assert heard(senses, 2e5, 1e5) == [Carries(("a", "b"), about(0.20))]
    assert heard(senses, 6e4, 0, 3 * LASTING_STEPS) == [], "neither what it was before nor how it has changed counts"
    assert senses.rates == {PAIR: 2e5}


def test_an_idle_link_that_nobody_had_measured_is_known_by_what_it_shows() -> None:
    senses = Senses({})
    senses.hear(Observed())
    assert heard(senses, 1e6, 0, 2 * LASTING_STEPS) == []
    assert heard(senses, 1e5, 1e5) == [Carries(("a", "b"), about(0.10))]


@virtual_time
async def test_what_is_on_its_way_is_counted_when_more_comes() -> None:
    network = MemoryNetwork(impairment=Impairment(bandwidth_bytes_per_s=1e6))
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b, asyncio.TaskGroup() as group:
        near, far = await pair(a, b)
        box = Outbox(near)
        sending = group.create_task(box.run())
        large, small = Frame("x", {}, [bytes(100 * KB)]), Frame("y", {}, [bytes(KB)])

        async def arrive(count: int) -> None:
            for _ in range(count):
                await far.recv()
            await asyncio.sleep(1.0)

        assert box.depth_bytes() is None
        for _ in range(3):
            await box.put(large)
        assert box.depth_bytes() == pytest.approx(200 * KB, rel=0.001)
        assert box.depth_bytes() is None, "it counts from the last call on"
        await arrive(3)
        for _ in range(2):
            await box.put(large)
            await arrive(1)
        assert box.depth_bytes() == 0, "each came when the one before had gone"
        for _ in range(3):
            await box.put(small)
        assert box.depth_bytes() is None
        await arrive(3)
        encoded: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        await box.put(encoded)
        await box.put(large)
        assert box.depth_bytes() == 0, "what is being encoded does not wait for the link"
        encoded.set_result(large)
        await asyncio.sleep(0.01)
        await box.put(large)
        assert box.depth_bytes() >= 200 * KB
        await arrive(3)
        await box.put(large)
        assert box.depth_bytes() == 0, "nothing is left over"
        await arrive(1)
        sending.cancel()


def answers_of(links: dict[str, Any], peers: int = 2, **more: Any) -> tuple[Answers, Plan]:
    """A step whose first member tells this of its links, and more; all waited for most of it."""
    plan = even_plan(4, peers, MICRO * MICROS, MICRO)
    answers = Answers(Round(0, 0, (1.0,)), peers, ())
    for i in range(peers):
        place = cast(Any, SimpleNamespace(plan=plan, pipeline=0, index=i, peer=f"p{i}"))
        seconds = {"f": 1.0, "wait": 6.0 + i, "total": 10.0}
        told = {"codecs": {}, "seconds": seconds, "links": {}}
        answers.apply(place, told | {"links": links, **more} if i == 0 else told)
    return answers, plan


def test_a_steps_loss_is_added_as_the_plain_loop_does() -> None:
    weights = (1.0, 1.0, 1.0)
    answers = Answers(Round(0, 0, weights), 1, [Portion(Round(0, 0, weights), (weights,))])
    answers.losses |= {(0, 0): [1e16], (1, 0): [1.0], (2, 0): [-1e16]}
    assert answers.sums() == [1e16 + 1.0 - 1e16] == [0.0], "sum() gives 1.0 from Python 3.12 on"
    answers.losses = {where: [1.0, of] for where, [of] in answers.losses.items()}
    assert answers.sums() == [3.0, 0.0], "and so are terms"


def test_a_step_tells_of_its_links_and_who_is_held_up_by_which() -> None:
    answers, plan = answers_of({"p1": [None, 2e6, 1_500_000], "stranger": [1.0, 1.0, 1]})
    seen = replace(answers.observed(), seconds={})
    assert seen == Observed({"p0": 1.0, "p1": 1.0}, {("p1", "p0"): 2e6}, {("p0", "p1"): 1_500_000})
    waits = "links: the busiest stage, 0 on ann, waits 60%"
    assert answers.limit(plan, {"p0": "ann", "p1": "ben"}, 10.0) == f"{waits}; up to 1.5 MB queue from ann to ben"
    for few in ({"p1": [None, None, 50_000]}, {"p1": [3e6, None, None]}):
        answers, plan = answers_of(few)
        assert answers.limit(plan, {"p0": "ann"}, 10.0) == waits
    answers, plan = answers_of({}, peers=1)
    alone = "the owner and the link to it: ann, which has the whole model, waits 60%"
    assert answers.limit(plan, {"p0": "ann"}, 10.0) == alone, "no stage waits for another's link"


@pytest.mark.parametrize(
    "seen",
    [
        None,
        5,
        [],
        [1.0, 1.0],
        [1.0, 1.0, 1, 1],
        ["1", None, None],
        [None, None, -1],
        [None, None, math.inf],
        [[], 1.0, 1],
    ],
)
def test_figures_of_links_that_make_no_sense_are_refused(seen: Any) -> None:
    with pytest.raises(ProtocolError):
        answers_of({"p1": seen})


@pytest.mark.parametrize(
    "more",
    [
        {"links": []},
        {"seconds": None},
        {"seconds": {"f": -1.0}},
        {"seconds": {"f": math.nan}},
        {"seconds": {"f": "1"}},
        {"codecs": 1},
        {"codecs": {"f": 1}},
        {"codecs": {"b": {"codec": "int8"}}},
        {"codecs": {"f": {"codec": "none", "error": 0.0, "raw_bytes": 8, "wire_bytes": -8}}},
        {"norm": "1"},
        {"norm": [1.0]},
    ],
)
def test_what_a_member_tells_of_a_step_is_checked(more: dict[str, Any]) -> None:
    answers_of({}, norm=1.0)
    with pytest.raises(ProtocolError):
        answers_of(**{"links": {}, **more})


class Wide(nn.Module):
    """128 KiB a micro-batch at every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide_job(micros: int, steps: int) -> Job:
    x = torch.randn(40, 64, 64, generator=torch.Generator().manual_seed(0))
    return Job(
        model=Wide(),
        loss=nn.functional.mse_loss,
        data=list(zip(x, x)) * (1 + MICRO * micros // len(x)),
        optimizer=Optimizer("SGD", lr=1e-2),
        batch_size=MICRO * micros,
        micro_batch_size=MICRO,
        steps=steps,
        codec="none",
    )


def with_window(window: int, plan: Plan) -> Plan:
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, window=window, live_cap=window) for stage in pipeline.stages)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def trained(window: int, crossed: Callable[[str], Crossed]) -> Trained:
    """Two stages that compute in no time, over links of 1 MB/s: 131 ms for what crosses with each micro-batch."""
    job, narrow = wide_job(MICROS, 3), partial(with_window, window)
    network = MemoryNetwork(impairment=Impairment(bandwidth_bytes_per_s=1e6))
    return run(train(job, 2, MICRO, network=network, adapt=narrow, crossed=crossed))


@pytest.mark.parametrize(("window", "idle"), [(1, True), (3, False)])
def test_a_window_of_one_leaves_its_links_idle_and_a_wide_one_fills_them(window: int, idle: bool) -> None:
    told: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
    reports = trained(window, lambda me: lambda rates, depths: told[me].append((rates, depths))).reports
    for report in reports[1:]:
        seen = report.observed
        assert seen.rates["p0", "p1"] == pytest.approx(1e6, rel=0.1)
        assert (seen.depths["p0", "p1"] < LEAST_BYTES) == idle
    for me, to in (("p0", "p1"), ("p1", "p0")):
        rates, depths = told[me][-1]
        assert rates[to] == pytest.approx(1e6, rel=0.1), "its receiver has said so"
        assert (depths[to] < LEAST_BYTES) == idle or me == "p1"


@virtual_time
async def test_a_stage_that_a_full_queue_holds_up_is_not_busy() -> None:
    """With a wide window it works until the queue to a slow link is full. That was told as 80 % of compute."""
    network = MemoryNetwork()
    network.impair("p0", "p1", Impairment(bandwidth_bytes_per_s=1e6))
    with mock.patch.object(time, "perf_counter", asyncio.get_running_loop().time):
        found = await train(wide_job(96, 2), 2, MICRO, network=network, adapt=partial(with_window, 32))
    for report in found.reports:
        assert re.fullmatch(r"links: .*; up to [12]\.\d MB queue from p0 to p1", report.limit), report.limit
