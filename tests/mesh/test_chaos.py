"""Real peers are killed, paused, cut off and replaced by a seed's schedule, and the losses are those of the plain loop."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import blow_times, chaos, disks
from benchmarks.arena import Arena
from benchmarks.astray import set_clock, wrong_clock
from benchmarks.chaos import one
from benchmarks.wires import BANDWIDTH, Wires

OLD = (*chaos.ANYWHERE, "cut", "partition", "halve", *disks.KINDS)
ALL = (*chaos.BLOWS, *chaos.ON_LINKS, *disks.KINDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_step_is_lost_or_told_of_twice(seed: int) -> None:
    result = await one(seed, steps=40, blows=4)
    assert result["outcome"] == "equal", result


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*chaos.AIMED, chaos.MEMORY, chaos.CLOCK, chaos.SLOW_LORIS, chaos.WATCHED_SLEEP])
async def test_a_run_under_blows_of_one_kind(kind: str) -> None:
    result = await one(1, steps=60, blows=2, kinds=[kind])
    assert result["outcome"] == "equal", result
    assert any(kind in blow["kind"] for blow in result["times"]), result


def test_a_seed_says_what_happens_also_among_kinds_that_were_there_before() -> None:
    """Seed 15 of docs/benchmarks.md."""
    drawn = chaos.draw_kinds(random.Random(15), OLD, 5)
    assert drawn == ["read-only disk", "kill a member", "cut", "kill a keeper", "read-only disk"]
    assert all(
        chaos.draw_kinds(random.Random(s), ALL, 9) == chaos.draw_kinds(random.Random(s), ALL, 9) for s in range(9)
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_first_offer_comes_first_and_once_and_an_owner_dies_once(seed: int) -> None:
    drawn = chaos.draw_kinds(random.Random(seed), (chaos.OFFER, chaos.OWNER_DIES, "pause"), 9)
    assert chaos.OFFER not in drawn[1:]
    assert drawn.count(chaos.OWNER_DIES) <= 1


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (chaos.MEMORY, "fill"),
        (chaos.CLOCK, "step_clock"),
        (chaos.SLOW_LORIS, "trickle"),
        (chaos.SLEEP, "suspend_owner"),
        (chaos.WATCHED_SLEEP, "suspend_owner"),
    ],
)
async def test_a_blow_does_what_it_says_and_kills_nobody(kind: str, does: str) -> None:
    arena = mock.MagicMock(spec=Arena, living=["a", "b", "c", "d"], steps=9, can_lose_the_owner=True)
    arena.members.return_value = ["a", "b", "c"]
    name, _ = await chaos.strike(arena, random.Random(0), kind, 0)
    assert name == kind
    assert getattr(arena, does).call_count == 1
    assert not arena.kill.called
    assert not arena.join.called


@pytest.mark.parametrize("kind", [chaos.CLOCK, chaos.WATCHED_SLEEP, "kill a member"])
async def test_what_would_end_a_run_before_its_first_step_does_not_befall_it(kind: str) -> None:
    """Clocks that are apart refuse the job, nobody stands by yet, and as many peers as stages are needed."""
    arena = mock.MagicMock(spec=Arena, living=["a", "b", "c", "d"], steps=0, can_lose_the_owner=False)
    arena.members.return_value = ["a", "b", "c", "d"]
    arena.copies.return_value = []
    assert (await chaos.strike(arena, random.Random(0), kind, 7))[0] == "join"
    arena.join.assert_called_once_with("new-7")


def test_a_clock_is_off_as_the_file_says_at_the_moment(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    set_clock(file, 0.0)
    with mock.patch("time.time", return_value=1000.0):
        clock = wrong_clock(file)
    assert clock() == 1000.0
    set_clock(file, -30.5)
    assert clock() == 969.5


def test_a_process_of_ours_can_be_astray(tmp_path: Path) -> None:
    """Whoever takes `time.time` while it is imported has the wrong one."""
    file = tmp_path / "clock"
    set_clock(file, 1e9)
    program = (
        "import sys, time, runpy; right = time.time(); sys.argv = ['astray', sys.argv[1]];"
        "runpy.run_module = lambda *a, **k: print(time.time() - right, time.time_ns() / 1e9 - right, sys.argv);"
        "from benchmarks import astray; astray.main()"
    )
    command = [sys.executable, "-c", program, str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    off_s, also_s, rest = out.split(maxsplit=2)
    assert float(off_s) == pytest.approx(1e9, abs=60)
    assert float(also_s) == pytest.approx(1e9, abs=60)
    assert rest.strip() == "['meshcee']"


async def test_only_what_a_slow_loris_sends_trickles() -> None:
    lab = mock.AsyncMock()
    wires = Wires(lab)
    await wires.halve([("a", "b")])
    await wires.trickle("b", ["a", "c"], 2e3)
    assert wires.link("b", "a").bandwidth_bytes_per_s == wires.link("b", "c").bandwidth_bytes_per_s == 2e3
    assert wires.link("a", "b").bandwidth_bytes_per_s == BANDWIDTH / 2
    await wires.trickle("b", ["a", "c"], None)
    assert wires.link("b", "a").bandwidth_bytes_per_s == BANDWIDTH / 2
    assert wires.link("b", "c").bandwidth_bytes_per_s == BANDWIDTH
    assert lab.set.call_count == 2 + 2 + 2


def test_times_are_told_for_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        {"times": [{"kind": "pause", "detected_s": 10.0, "back_s": [1.0, 3.0]}]},
        {"times": [{"kind": "pause", "detected_s": 12.0, "back_s": [2.5]}, blow_times.Blow("join").to_json()]},
        {"outcome": "TimeoutError: "},
    ]
    lines = tmp_path / "results"
    lines.write_text("\n".join(map(json.dumps, results)) + "\n" + blow_times.table(results))
    with mock.patch("sys.argv", ["blow_times", str(lines)]):
        blow_times.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [
        "| join | 1 | 0 | – | – | 0 | – | – |",
        "| pause | 2 | 2 | 11.00 | 12.00 | 3 | 2.50 | 3.00 |",
        "| all | 3 | 2 | 11.00 | 12.00 | 3 | 2.50 | 3.00 |",
    ]


def test_a_recovery_belongs_to_the_blow_before_it() -> None:
    arena = mock.MagicMock(spec=Arena)
    arena.recovered_s.return_value = [(110.0, 4.0), (130.5, 1.0), (131.0, 2.0)]
    arena.noticed_s.side_effect = lambda after_s: min(at for at, _ in arena.recovered_s() if at >= after_s)
    blows = chaos.timed(arena, [chaos.Blow("pause"), chaos.Blow("join"), chaos.Blow("kill a member")], [100, 120, 130])
    assert [(blow.detected_s, blow.back_s) for blow in blows] == [(10.0, [4.0]), (None, []), (0.5, [1.0, 2.0])]
