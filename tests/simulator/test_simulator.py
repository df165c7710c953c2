"""The simulator's rules, pinned by timelines worked out by hand; its decisions are those of the local rule."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcee.errors import PlanError
from meshcee.figures.profile import Cluster, LinkProfile
from meshcee.figures.scenario import LinkChange
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.schedule import Kind, StageView, choose
from meshcee.show.words import limit
from meshcee.simulator import Timeline, bound_s, period_s, quick_period_s, simulate
from meshcee.simulator.engine import run
from meshcee.simulator.instance import build
from tests.rig.small import cluster, pipeline, plan, workload


def work_of(timeline: Timeline, peer: str, step: int = 0) -> str:
    """ "F0 0-1, B0 1-3": what a device did in a step, with times."""
    found = [
        s
        for s in timeline.outcome.spans
        if s.kind in "FBWO" and s.step == step and timeline.instance.nodes[s.node].peer == peer
    ]
    return ", ".join(f"{s.kind}{s.micro} {s.start_s:g}-{s.end_s:g}" for s in sorted(found, key=lambda s: s.start_s))


def messages(timeline: Timeline, kind: str) -> list[tuple[float, float]]:
    """(stored, arrived) of every message of this kind in the first step, in order of arrival."""
    found = [(s.start_s, s.end_s) for s in timeline.outcome.spans if s.kind == kind and s.step == 0]
    return sorted(found, key=lambda x: x[1])


def simulated(what: Plan, where: Cluster, work: Workload, **options: object) -> Timeline:
    return simulate(what, where, work, record=True, **options)  # type: ignore[arg-type]


def test_one_device_runs_b_first_then_f_then_w_then_the_optimizer() -> None:
    work = workload(batch=2, f=1, b=2, w=3, optimizer=0.5)
    timeline = simulated(plan(pipeline((0, 1, "a"), micros=2)), cluster({"r": ["a"]}), work)
    assert work_of(timeline, "a") == "F0 0-1, B0 1-3, F1 3-4, B1 4-6, W0 6-9, W1 9-12, O0 12-12.5"
    assert timeline.outcome.applied_s == [12.5, 25, 37.5]
    assert timeline.period_s == 12.5
    assert timeline.utilisation() == {"a": 1.0}


def test_a_live_cap_counts_from_f_to_w() -> None:
    work = workload(batch=2, f=1, b=2, w=3)
    timeline = simulated(plan(pipeline((0, 1, "a"), micros=2, window=1, cap=1)), cluster({"r": ["a"]}), work)
    assert work_of(timeline, "a") == "F0 0-1, B0 1-3, W0 3-6, F1 6-7, B1 7-9, W1 9-12, O0 12-12"
    assert timeline.outcome.max_live == [1]


def test_a_message_takes_latency_and_bytes_over_bandwidth_and_a_stage_applies_after_the_commit() -> None:
    # f = b = w = 1; a boundary is one byte at two bytes a second, half a second of latency: one second each way
    work = workload(2, 1)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=2, latency_s=0.5)
    timeline = simulated(plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=1)), where, work)
    assert work_of(timeline, "a") == "F0 0-1, B0 5-6, W0 6-7, O0 7-7"
    # b has run its W at 5, but learns at 6.5 that a's last B is done
    assert work_of(timeline, "b") == "F0 2-3, B0 3-4, W0 4-5, O0 6.5-6.5"
    assert timeline.outcome.begun_s == [0, 7, 14]  # no barrier: a goes on when a has applied
    assert timeline.period_s == 7


def test_a_line_is_a_queue_in_the_order_of_storing_and_latency_is_pipelined() -> None:
    # F's end at 1, 2, 3; each holds the line for 2 s and travels 10 s more
    work = workload(2, 3)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=0.5, latency_s=10)
    timeline = simulated(plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=3)), where, work)
    assert messages(timeline, "out") == [(1, 13), (2, 15), (3, 17)]


def test_a_window_counts_from_f_to_b() -> None:
    # b is far away: with a window of two, a's third F waits for its first B, and fills the time with W's only then
    work = workload(2, 3)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=1e9, latency_s=4)
    timeline = simulated(plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=3, window=2)), where, work)
    rounded = work_of(timeline, "a").split(", ")
    assert [x.split()[0] for x in rounded] == ["F0", "F1", "B0", "F2", "B1", "W0", "W1", "B2", "W2", "O0"]
    # F0 ends at 1, reaches b at 5, B0 of b ends at 7 and is back at 11
    starts = {x.split()[0]: float(x.split()[1].split("-")[0]) for x in rounded}
    assert starts["B0"] == pytest.approx(11, abs=1e-6)
    assert starts["F2"] == pytest.approx(12, abs=1e-6)


def test_links_are_full_duplex() -> None:
    # a's second activation and b's first gradient cross each other: neither waits
    work = workload(2, 2)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=0.5)
    timeline = simulated(plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=2)), where, work)
    assert messages(timeline, "out") == [(1, 3), (2, 5)]
    assert messages(timeline, "back")[0] == (5, 7)


def test_what_crosses_between_two_regions_shares_one_line() -> None:
    # two pipelines, four devices: both first activations are stored at 1 and need one second of the same line
    work = workload(2, 2)
    where = cluster({"x": ["a", "c"], "y": ["b", "d"]})
    both = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=1), pipeline((0, 1, "c"), (1, 2, "d"), micros=1))
    assert messages(simulated(both, where, work), "out") == [(1, 2), (1, 3)]


def test_a_port_is_shared_by_all_that_a_device_sends() -> None:
    # b in the middle: its activation (stored at 3) and, later, its gradient leave through one port; a second each
    work = workload(3, 2)
    where = cluster({"r": ["a", "b", "c"]}, port=1)
    timeline = simulated(plan(pipeline((0, 1, "a"), (1, 2, "b"), (2, 3, "c"), micros=2)), where, work)
    sent = sorted(
        (s.start_s, s.end_s, s.kind)
        for s in timeline.outcome.spans
        if s.kind in ("out", "back") and s.node == 1 and s.step == 0
    )
    # F0 2-3 and F1 3-4 at b, so out at 3 and 4; c: F0 4-5, B0 5-6, F1 6-7, B1 7-8; gradients reach b at 7 and 9
    assert sent == [(3, 4, "out"), (4, 5, "out"), (8, 9, "back"), (10, 11, "back")]


def test_a_group_reduces_each_block_in_a_ring_from_its_last_w_on() -> None:
    # two blocks of four bytes; 2 (n-1)/n of them over a port of two bytes a second: 2 s each, and 2 latencies of 0.25 s
    work = workload(2, 2, gradient=4, optimizer=0.5)
    where = cluster({"r": ["a", "b"]}, port=2, inside_s=0.25)
    timeline = simulated(plan(pipeline((0, 2, {"a": 1, "b": 1}), micros=1), micro_batch=2), where, work)
    # F 0-2, B 2-4, W 4-6: block 1's W ends at 5, block 0's at 6; the ring of block 0 queues behind the other's until 7
    rings = [(s.micro, s.start_s, s.end_s) for s in timeline.outcome.spans if s.kind == "ring" and s.step == 0]
    assert rings == [(1, 5, 7.5), (0, 6, 9.5)]
    assert work_of(timeline, "a") == "F0 0-2, B0 2-4, W0 4-6, O0 9.5-10.5"


def test_a_group_sums_as_the_executor_does_when_told_so() -> None:
    # all eight bytes in one piece behind the last W, at 6: each member sends 8 over a port of two bytes a second, and two
    # latencies; b's vote takes a third to a, who commits; the news takes a fourth to b
    work = replace(workload(2, 2, gradient=4, optimizer=0.5), group_sum="streams")
    where = cluster({"r": ["a", "b"]}, port=2, inside_s=0.25)
    timeline = simulated(plan(pipeline((0, 2, {"a": 1, "b": 1}), micros=1), micro_batch=2), where, work)
    rings = [(s.micro, s.start_s, s.end_s) for s in timeline.outcome.spans if s.kind == "ring" and s.step == 0]
    assert rings == [(0, 6, 10.5)]
    assert work_of(timeline, "a") == "F0 0-2, B0 2-4, W0 4-6, O0 10.75-11.75"
    assert work_of(timeline, "b") == "F0 0-2, B0 2-4, W0 4-6, O0 11-12"


def test_pipelines_sum_as_the_executor_does_when_told_so() -> None:
    # all eight bytes to b and back, 4.25 s each; cut differently, a pair sums each block when both have run its W's
    work = replace(workload(2, 2, gradient=4, optimizer=0.5), group_sum="streams")
    where = cluster({"r": ["a", "b", "c"]}, port=2, inside_s=0.25)
    timeline = simulated(plan(pipeline((0, 2, "a"), micros=1), pipeline((0, 2, "b"), micros=1)), where, work)
    rings = [(s.micro, s.start_s, s.end_s) for s in timeline.outcome.spans if s.kind == "ring" and s.step == 0]
    assert rings == [(0, 10.25, 14.5)]
    assert work_of(timeline, "a") == "F0 0-2, B0 2-4, W0 4-6, O0 14.5-15.5"
    assert work_of(timeline, "b") == "F0 0-2, B0 2-4, W0 4-6, O0 14.75-15.75"
    cut = pipeline((0, 1, "b"), (1, 2, "c"), micros=1)
    instance = build(plan(pipeline((0, 2, "a"), micros=1), cut), where, replace(work, group_sum="process group"))
    assert [(ring.block, ring.nodes) for ring in instance.rings] == [(0, (0, 1)), (1, (0, 2))]
    assert instance.heads == [0]
    assert [(node.above, node.below) for node in instance.nodes] == [(None, 1), ((0, 0.25), 1), ((1, 0.25), 0)]


@pytest.mark.parametrize(("how", "ends_s"), [("ring", 6), ("streams", 5.5), ("process group", 8.25)])
def test_what_a_sum_of_three_takes(how: str, ends_s: float) -> None:
    """Four bytes through each port in any case, twice that in 32 bits instead of 16, and 4, 2 or 5 latencies of 0.25 s."""
    work = replace(workload(1, 3, gradient=3), group_sum=how, element_bytes=2)
    where = cluster({"r": ["a", "b", "c"]}, port=2, inside_s=0.25)
    timeline = simulated(plan(pipeline((0, 1, {"a": 1, "b": 1, "c": 1}), micros=1), micro_batch=3), where, work)
    (ring,) = [s for s in timeline.outcome.spans if s.kind == "ring" and s.step == 0]
    assert (ring.start_s, ring.end_s) == (3, ends_s)


def test_a_job_that_clips_commits_when_all_norms_are_known() -> None:
    # b's W ends at 26; a, done at 18, hears of it at 26.5 and commits, which b knows at 27
    work = replace(workload(3, 1, w=10), clips=True)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=2, latency_s=0.5)
    timeline = simulated(plan(pipeline((0, 1, "a"), (1, 3, "b"), micros=1)), where, work)
    assert work_of(timeline, "a") == "F0 0-1, B0 7-8, W0 8-18, O0 26.5-26.5"
    assert work_of(timeline, "b") == "F0 2-4, B0 4-6, W0 6-26, O0 27-27"


def test_members_of_unequal_shares_send_what_overlaps() -> None:
    # a has samples 0 and 1, b sample 2; c takes 0, d takes 1 and 2: a -> c, a -> d, b -> d, a byte a sample
    work = workload(2, 3)
    where = cluster({"r": ["a", "b", "c", "d"]}, port=1)
    both = plan(pipeline((0, 1, {"a": 2, "b": 1}), (1, 2, {"c": 1, "d": 2}), micros=1), micro_batch=3)
    timeline = simulated(both, where, work)
    # b is done at 1: d has it at 2. a is done at 2: c has its sample at 3, d at 4
    assert messages(timeline, "out") == [(1, 2), (2, 3), (2, 4)]
    # d's gradients leave at 9 and 10; a then runs B for two samples until 11, b for one until 11: the commit
    assert work_of(timeline, "c") == "F0 3-4, B0 4-5, W0 5-6, O0 11-11"
    assert work_of(timeline, "d").startswith("F0 4-6, B0 6-8, W0 8-10")


def test_a_trace_changes_a_line_under_a_message() -> None:
    # ten bytes at one a second from 1 on: at 6 five are left, and half the bandwidth makes them ten seconds
    work = workload(2, 1, boundary=10)
    where = cluster({"x": ["a"], "y": ["b"]})
    one = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=1))
    change = LinkChange(6, ("x", "y"), bandwidth_bytes_per_s=0.5)
    assert messages(simulated(one, where, work, trace=[change]), "out") == [(1, 16)]
    later = LinkChange(6, ("x", "y"), extra_latency_s=3)
    assert messages(simulated(one, where, work, trace=[later]), "out") == [(1, 14)]


def test_a_dead_device_stalls_the_step() -> None:
    work = workload(2, 1)
    where = cluster({"r": ["a", "b"]})
    one = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=1))
    whole = simulated(one, where, work, steps=3)
    assert whole.outcome.applied_s == [5, 10, 15]
    cut = simulated(one, where, work, steps=3, failures={"b": 6.5})
    assert cut.outcome.applied_s == [5]
    with pytest.raises(PlanError, match="never ends"):
        _ = simulated(one, where, work, failures={"a": 0.5}).period_s


def test_1f1b_sends_the_gradient_after_both_halves_of_the_backward() -> None:
    # window 2 at a, 1 at b; b: F0 1-2, BW0 2-4, F1 4-5, BW1 5-7
    work = workload(2, 2)
    where = cluster({"r": ["a", "b"]})
    stages = pipeline((0, 1, "a"), (1, 2, "b"), micros=2).stages
    one = plan(
        replace(
            pipeline((0, 1, "a"), micros=2),
            stages=(replace(stages[0], window=2, fused=True), replace(stages[1], window=1, fused=True)),
        )
    )
    timeline = simulated(one, where, work)
    assert [x for x in work_of(timeline, "a").split(", ") if x[0] in "FB"] == ["F0 0-1", "F1 1-2", "B0 4-6", "B1 7-9"]


def test_gpipe_runs_all_f_before_any_b() -> None:
    work = workload(1, 3)
    timeline = simulated(plan(pipeline((0, 1, "a"), micros=3)), cluster({"r": ["a"]}), work, forward_first=True)
    assert [x.split()[0] for x in work_of(timeline, "a").split(", ") if x[0] in "FB"] == [
        "F0",
        "F1",
        "F2",
        "B0",
        "B1",
        "B2",
    ]


def test_sizes_beyond_the_largest_profiled_one_are_refused() -> None:
    work = workload(1, 9, largest=8)
    with pytest.raises(PlanError, match="9 samples"):
        simulate(plan(pipeline((0, 1, "a"), micros=1, samples=9), micro_batch=9), cluster({"r": ["a"]}), work)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_decision_is_the_local_rules(data: st.DataObject) -> None:
    """Replay of random pipelines: whatever a device began, `choose` would have begun, and waited when it waited."""
    count, micros = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    names = [f"d{i}" for i in range(count)]
    second = st.sampled_from([0.5, 1.0, 1.7, 2.3])
    work = workload(count, micros, f=data.draw(second), b=data.draw(second), w=data.draw(second))
    where = cluster(
        {"r": names},
        port=data.draw(st.sampled_from([0.7, 1.3, 50.0])),
        inside_s=data.draw(st.sampled_from([0.01, 3.1])),
    )
    window = data.draw(st.integers(1, 5))
    cap = window + data.draw(st.integers(0, 3))
    one = plan(pipeline(*((i, i + 1, n) for i, n in enumerate(names)), micros=micros, window=window, cap=cap))
    timeline = simulated(one, where, work, steps=2)
    spans = timeline.outcome.spans
    for n in range(count):
        arrived = {k: sorted(s.end_s for s in spans if s.kind == k and s.target == n) for k in ("out", "back")}
        own = sorted((s for s in spans if s.node == n and s.kind in "FBW"), key=lambda s: s.start_s)
        done = dict.fromkeys("FBW", 0)
        for span in own:
            now, step = span.start_s, span.step
            f, b, w = (done[k] - step * micros for k in "FBW")
            inputs = 10**6 if n == 0 else sum(t <= now for t in arrived["out"])
            grads = done["F"] if n == count - 1 else sum(t <= now for t in arrived["back"])
            view = StageView(
                micros, f, b, w,
                input_here=f < micros and done["F"] < inputs,
                gradient_here=b < f and done["B"] < grads,
                weight_here=w < b, window=window, live_cap=cap,
            )  # fmt: skip
            assert choose(view) is Kind(span.kind), (n, span, view)
            done[span.kind] += 1
    assert len(spans) == len({(s.node, s.kind, s.step, s.micro, s.target) for s in spans})


def test_all_that_is_begun_is_finished_and_no_device_does_two_things_at_once() -> None:
    work = workload(4, 8, gradient=3, optimizer=0.1)
    where = cluster({"x": ["a", "b"], "y": ["c", "d"]}, port=5, latency_s=0.3, inside_s=0.1)
    one = plan(pipeline((0, 2, {"a": 1, "b": 1}), (2, 4, {"c": 1, "d": 1}), micros=4, window=3, cap=5), micro_batch=2)
    timeline = simulated(one, where, work)
    for n in range(4):
        own = sorted((s for s in timeline.outcome.spans if s.node == n and s.kind in "FBWO"), key=lambda s: s.start_s)
        assert len(own) == 3 * (3 * 4 + 1)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(own))


def test_64_stages_and_512_micro_batches_take_less_than_two_seconds() -> None:
    names = [f"d{i}" for i in range(64)]
    work = workload(64, 512, f=0.01, b=0.01, w=0.01, boundary=10**6)
    where = cluster({"r": names}, port=1e9, inside_s=0.001)
    one = plan(pipeline(*((i, i + 1, n) for i, n in enumerate(names)), micros=512, window=130, cap=200))
    instance = build(one, where, work)
    begun_s = time.process_time()
    outcome = run(instance, 1)
    assert time.process_time() - begun_s < 2
    # no less than one device's work; no more than that after filling and before draining the whole pipeline
    assert 512 * 0.03 < outcome.applied_s[0] < 512 * 0.03 + 64 * 0.02 + 63 * 2 * 0.002 + 0.03


def test_the_period_is_that_of_consecutive_steps_not_of_the_first() -> None:
    work = workload(2, 4, optimizer=0.3)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=3, latency_s=0.2)
    one = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=4))
    timeline = simulate(one, where, work, steps=6)
    assert timeline.step_s[1:] == pytest.approx([timeline.period_s] * 5)
    assert period_s(one, where, work) == pytest.approx(timeline.period_s)


def test_a_step_that_must_repeat_the_first_is_simulated_once() -> None:
    work = workload(3, 8, f=0.5, b=0.5, w=1.0, optimizer=0.3)
    where = cluster({"x": ["a"], "y": ["b"]}, bandwidth=3, latency_s=0.2)
    ends = []
    for at, window, cap in [(2, 1, 1), (2, 2, 3), (2, 8, 8), (1, 8, 8)]:  # the last with most work behind the head
        one = plan(pipeline((0, at, "a"), (at, 3, "b"), micros=8, window=window, cap=cap))
        instance = build(one, where, work)
        whole, short = run(instance, 6), run(instance, 6, steady=True)
        ends.append(short.steps)
        if short.period_s is not None:
            assert [b - a for a, b in pairwise(whole.applied_s)] == pytest.approx([short.period_s] * 5)
        else:
            assert short.applied_s == whole.applied_s
        head_s = run(instance, 1, steady=True, limit_s=0.1).period_s
        assert head_s is not None
        assert 0.1 < head_s <= period_s(one, where, work) + 1e-9
    assert {1, 6} == set(ends)


def test_the_owner_feeds_ahead_so_its_lines_and_data_bound_the_period_and_add_nothing_to_it() -> None:
    # Two micro-batches of f = b = w = 1 on two stages; a sample has 3 bytes for the first block and 1 for the last.
    work = workload(blocks=2, batch=2, boundary=0)
    fed = replace(work, feeds=((3, (0,)), (1, (1,))))
    what, where = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=2)), cluster({"r": ["a", "b"]})
    alone_s = period_s(what, where, work)
    assert period_s(what, where, fed) == alone_s, "nobody has measured the owner's links"
    for to_a, to_b, expected_s in (
        (100.0, 100.0, alone_s),
        (0.25, 100.0, 6 / 0.25),  # the link to a
        (100.0, 0.01, 2 / 0.01),  # the link to b
        (0.5, 0.5, 8 / 0.5),  # the port that both share
    ):
        where.feeds = {"a": LinkProfile(0.1, to_a), "b": LinkProfile(0.1, to_b)}
        assert period_s(what, where, fed) == expected_s
        assert simulate(what, where, fed).period_s == expected_s
        assert quick_period_s(build(what, where, fed), 8)[0] == expected_s
        assert bound_s(build(what, where, fed)) <= expected_s
    where.feeds = {}
    assert period_s(what, where, replace(fed, data_s=30.0)) == 60.0


def test_members_that_wait_for_the_owner_compute_for_a_part_of_the_time_and_the_owner_is_the_limit() -> None:
    work = workload(batch=2)  # 6 s of work a step
    what, where = plan(pipeline((0, 1, "a"), micros=2)), cluster({"r": ["a"]})
    alone, slow = (simulate(what, where, replace(work, data_s=data_s)) for data_s in (1.0, 30.0))
    assert (alone.step_s, alone.utilisation()) == ([6.0] * 3, {"a": 1.0})
    assert limit(what, where, work, alone) == "a computes 100% of the time"
    assert (slow.step_s, slow.utilisation()) == ([60.0] * 3, {"a": pytest.approx(0.1)})
    assert limit(what, where, work, slow) == (
        "the owner reads or sends a step's samples for 60 s; the busiest device, a, computes 10% of that time"
    )


def test_a_codec_that_nobody_knows_is_refused_in_words() -> None:
    work, where = workload(blocks=2), cluster({"x": ["a"], "y": ["b"]})
    (line,) = plan(pipeline((0, 1, "a"), (1, 2, "b"), micros=1)).pipelines
    coded = plan(replace(line, stages=(replace(line.stages[0], codec_out="mp3"), line.stages[1])))
    with pytest.raises(PlanError, match="codec 'mp3'; known are none, bf16"):
        period_s(coded, where, work)


def test_a_raw_input_goes_to_a_stage_once_and_to_every_stage_that_reads_it() -> None:
    work = replace(workload(blocks=3), feeds=((5, (0, 1)), (7, (2,))))
    assert [work.fed_bytes(*cut) for cut in ((0, 3), (0, 2), (0, 1), (1, 2), (1, 3), (2, 3))] == [12, 5, 5, 5, 12, 7]
