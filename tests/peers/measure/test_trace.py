"""A trace holds every F, B and W of its steps, measured and predicted, on clocks that agree; lies are refused."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
from typer.testing import CliRunner

import meshcee
from meshcee.errors import PlanError, ProtocolError
from meshcee.plan import Member, Pipeline, Plan, Stage
from peers.cli.main import app
from peers.measure.trace import COUNT, FIRST, Clock, Trace
from peers.wire.messages import Round
from peers.wire.spans import MAX_SPANS, Span, Spans, read_spans
from tests.peers.member.test_coding import MICROS, STAGES, make_job

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `meshcee train --trace FILE --codec int8 --local 3` leaves, read back."""
    trace = Trace()

    async def run() -> int:
        async with meshcee.join(local=STAGES) as mesh:
            return len([r async for r in mesh.train(make_job(steps=6, codec="int8"), stages=STAGES, trace=trace)])

    assert asyncio.run(run()) == 6
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.write(path)
    assert trace.notes == []
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def of_kind(written: dict[str, Any], what: str) -> dict[int, Events]:
    """Events of each process whose label says so."""
    events = written["traceEvents"]
    labels = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    pids = [pid for pid, label in labels.items() if label.endswith(what)]
    assert len(pids) == STAGES
    return {pid: [e for e in events if e["pid"] == pid and e["ph"] != "M"] for pid in pids}


def test_the_file_is_a_list_of_chrome_events(written: dict[str, Any]) -> None:
    assert written["displayTimeUnit"] == "ms"
    for event in written["traceEvents"]:
        assert event["ph"] in "MXibe"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert math.isfinite(event["ts"])
        assert event.get("dur", 0.0) >= 0.0
    opened = Counter((e["pid"], e["id"]) for e in written["traceEvents"] if e["ph"] == "b")
    closed = Counter((e["pid"], e["id"]) for e in written["traceEvents"] if e["ph"] == "e")
    assert opened == closed
    assert set(opened.values()) == {1}


@pytest.mark.parametrize("what", ["measured", "predicted"])
def test_every_f_b_and_w_is_there_once_and_none_overlap(written: dict[str, Any], what: str) -> None:
    wanted = {
        (step, micro, letter): 1 for step in range(FIRST, FIRST + COUNT) for micro in range(MICROS) for letter in "FBW"
    }
    for events in of_kind(written, what).values():
        spans = sorted((e for e in events if e["ph"] == "X" and e["tid"] == 0), key=lambda e: e["ts"])
        work = [e for e in spans if e["cat"] not in ("wait", "apply")]
        found = Counter((e["args"]["step"], e["args"]["micro"], letter) for e in work for letter in e["cat"])
        assert found == wanted
        assert [e["args"]["step"] for e in spans if e["cat"] == "apply"] == list(range(FIRST, FIRST + COUNT))
        for a, b in pairwise(spans):
            assert a["ts"] + a["dur"] <= b["ts"] + 0.01  # microseconds, as floats


def test_messages_and_coding_are_there(written: dict[str, Any]) -> None:
    first, middle, last = of_kind(written, "measured").values()
    for sender, receiver, kind in (
        (first, middle, "f"),
        (middle, last, "f"),
        (last, middle, "b"),
        (middle, first, "b"),
    ):
        for micro in range(MICROS):
            names = Counter(e["name"] for e in sender if e["ph"] in "Xb")
            assert names[f"send {kind} {micro}"] >= COUNT - 1  # a frame may leave after its step's spans were told
            assert names[f"encode {kind} {micro}"] >= COUNT - 1
            names = Counter(e["name"] for e in receiver if e["ph"] in "Xi")
            assert names[f"receive {kind} {micro}"] >= COUNT - 1
            assert names[f"decode {kind} {micro}"] >= COUNT - 1
    assert any(e["cat"] == "wait" for e in last)
    assert all(0 <= c["round_trip_s"] < 60 for c in written["otherData"]["clocks"].values())
    assert len(written["otherData"]["clocks"]) == STAGES


def test_clocks_are_aligned_by_the_shortest_round_trip() -> None:
    clock = Clock()
    clock.hear(10.0, 1015.0, 14.0)  # slow, and off by 3 s
    clock.hear(20.0, 1020.1, 20.2)
    clock.hear(30.0, 1039.0, 36.0)
    assert clock.offset_s == pytest.approx(1000.0)
    assert clock.round_trip_s == pytest.approx(0.2)
    stages = tuple(Stage(i, i + 1, (Member(f"p{i}", 1),), window=1, live_cap=1) for i in range(2))
    trace = Trace()
    trace.begin(Plan(1, (Pipeline(1, stages),)), {}, 0, 10)
    trace.clocks["p1"] = clock
    for peer, ahead_s in (("p0", 0.0), ("p1", 1000.0)):
        spans = Spans()
        spans.start(True)
        spans.add("F", 0, 50.0 + ahead_s, 51.0 + ahead_s)
        trace.hear(peer, FIRST, spans.take())
    starts = [e["ts"] for e in trace.events() if e["ph"] == "X"]
    assert starts == pytest.approx([0.0, 0.0], abs=1.0)


def test_only_of_the_plan_that_is_traced_is_it_said_that_it_has_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **more: Any) -> Any:
        raise PlanError("it needs more memory")

    monkeypatch.setattr("peers.measure.trace.situation", lambda *given: ())
    monkeypatch.setattr("peers.measure.trace.simulate", fails)
    plan = Plan(1, (Pipeline(1, (Stage(0, 1, (Member("p", 1),), window=1, live_cap=1),)),))
    trace = Trace()
    for first in (0, 20):  # the plan changes
        trace.begin(plan, {}, first, 100)
        trace.predict(plan, cast(Any, None), cast(Any, None))
    assert trace.notes == ["the trace has no prediction: it needs more memory"]


async def test_the_last_steps_of_a_short_job_are_traced() -> None:
    stage = Stage(0, 1, (Member("p", 1),), window=1, live_cap=1)
    for first, steps, wanted in ((0, 100, [2, 3, 4]), (0, 4, [1, 2, 3]), (0, 2, [0, 1]), (50, 100, [52, 53, 54])):
        trace = Trace()
        trace.begin(Plan(1, (Pipeline(1, (stage,)),)), {}, first, steps)
        asked = [await trace.ask(Round(s, s, (1.0,)), []) for s in range(first, steps)]
        assert [s.step for s in asked if s.trace] == wanted


def test_spans_cost_nothing_when_nobody_asks_and_are_bounded() -> None:
    spans = Spans()
    spans.add("F", 0, 0.0, 1.0)
    assert spans.take() == []
    spans.start(True)
    for i in range(MAX_SPANS + 10):
        spans.add("F", i, 0.0, 1.0)
    found = read_spans(spans.take())
    assert len(found) == MAX_SPANS
    assert found[7] == Span("F", 7, 0.0, 1.0)


@pytest.mark.parametrize(
    "payloads",
    [
        [],
        [b"", b""],
        [b"\xc1"],
        [bytes(1 << 20)],
        [msgpack.packb(5)],
        [msgpack.packb([["F", 0, 1.0]])],
        [msgpack.packb([["F", 0, 1.0, 0.5]])],
        [msgpack.packb([["F", 0, 1.0, math.inf]])],
        [msgpack.packb([["F", 0, math.nan, 1.0]])],
        [msgpack.packb([["F", True, 0.0, 1.0]])],
        [msgpack.packb([[5, 0, 0.0, 1.0]])],
        [msgpack.packb([["F" * 33, 0, 0.0, 1.0]])],
        [msgpack.packb([["F", 0, 0.0, 1.0]] * (MAX_SPANS + 1))],
    ],
)
def test_hostile_spans_are_refused(payloads: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        read_spans(payloads)


def test_the_command_line_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "job.py", "--local", "1", "--trace", str(tmp_path / "no" / "t.json")])
    assert "there is no folder" in str(result.exception)
