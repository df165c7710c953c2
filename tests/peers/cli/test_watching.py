"""`status --watch` tells what has changed and ends when it is asked to; a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import io
import math
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from meshcee.errors import PlanError
from peers.cli.session import Screen, configure_logging
from peers.cli.status import brief, show, telling, watch
from peers.cli.view import GONE, LineView, RichView, called, naming, view_for
from tests.rig.virtual_time import run

ANNA, BEN, CARL = ("12D3KooW" + letter * 44 for letter in "abc")


def mesh(**more: Any) -> dict[str, Any]:
    """What `agent.status()` gives of two peers of one name."""
    peer = {"addresses": ["/ip4/192.0.2.2/tcp/1/p2p/" + ANNA], "kernels": "cpu", "outside": None, "guards": None}
    device = {"memory_bytes": 3 << 30, "speed_flops_per_s": 1e9}
    peers = [{**peer, "peer": p, "name": "lab", "device": device, "state": "idle"} for p in (ANNA, BEN)]
    link = {"from": ANNA, "to": CARL, "latency_s": 0.001, "bandwidth_bytes_per_s": 1e8}
    run = {"job": "gpt", "owner": CARL, "state": "running", "step": 3, "loss": 2.0, "plan": None}
    return {"peers": peers, "coordinator": {"peer": ANNA, "term": 1}, "links": [link], "runs": [run], **more}


def test_a_change_is_told_once_and_nothing_is_told_of_nothing() -> None:
    seen = [mesh(), mesh(), mesh(runs=[]), mesh(runs=[]), mesh()]
    told: list[dict[str, Any]] = []
    over = asyncio.Event()

    async def look() -> dict[str, Any]:
        data = seen.pop(0)
        if not seen:
            over.set()
        return data

    run(watch(look, told.append, over))
    assert told == [mesh(), mesh(runs=[]), mesh()]


def test_it_ends_at_once_when_it_is_asked_to() -> None:
    async def main() -> float:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        begun_s = loop.time()

        async def look() -> dict[str, Any]:
            return mesh()

        async with asyncio.TaskGroup() as group:
            group.create_task(watch(look, lambda data: None, over))
            await asyncio.sleep(2.5)
            over.set()
        return loop.time() - begun_s

    assert run(main()) == pytest.approx(2.5, abs=1e-3)


def test_peers_have_names_and_no_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of one name are told apart by how their ids end; a peer that has left has no name any more."""
    console = Screen()
    console.width = 200
    show(mesh(), console)
    out = capsys.readouterr().out
    assert f"lab (…{ANNA[-8:]}) *" in out
    assert f"lab (…{BEN[-8:]})" in out
    assert f"owner {GONE}" in out
    assert "12D3" not in out
    assert called({ANNA: "anna", BEN: "ben"}) == {ANNA: "anna", BEN: "ben"}


def test_a_pipe_gets_a_line_for_a_step_and_all_when_more_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    console = Screen()
    console.width = 200
    tell = brief(console)
    run = {**mesh()["runs"][0], "state": "waiting", "loss": math.nan}
    tell(mesh(runs=[run]))
    assert "2 peers" in capsys.readouterr().out
    tell(mesh(runs=[{**run, "step": run["step"] + 1}]))
    assert capsys.readouterr().out.splitlines() == [f"run {run['job']}: waiting, owner {GONE}"]
    tell(mesh(runs=[]))
    assert "2 peers" in capsys.readouterr().out


def test_a_run_without_a_plan_in_its_record_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of a large mesh is too long for a record."""
    console = Screen()
    console.width = 200
    show(mesh(), console)
    assert f"run gpt: step 4, loss 2.0000, owner {GONE}" in capsys.readouterr().out


def test_a_narrow_terminal_shows_names_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    console = Screen()
    console.width = 60
    show(mesh(), console)
    lines = capsys.readouterr().out
    assert f"lab (…{BEN[-8:]})" in lines
    assert all(peer["state"] in lines for peer in mesh()["peers"])


async def test_an_error_names_peers() -> None:
    async def failing() -> AsyncIterator[None]:
        async with naming(lambda: {ANNA: "anna"}):
            raise PlanError(f"the largest device, {ANNA}, has too little")
        yield

    with pytest.raises(PlanError, match=r"^the largest device, anna, has too little$"):
        async for _ in failing():
            pass


def reports(count: int) -> list[Any]:
    figures = {"loss": 2.5, "samples_per_s": 10.0, "eta_s": 61.0, "limit": "compute of anna", "metrics": {}}
    return [
        SimpleNamespace(step=step, steps=count, tokens_per_s=512.4 if step else None, terms={}, **figures)
        for step in range(count)
    ]


def test_a_terminal_has_a_bar_and_a_pipe_has_lines() -> None:
    out = io.StringIO()
    terminal = Screen()
    terminal.file, terminal.width = out, 120
    lines = LineView(terminal)
    with lines:
        for report in reports(4):
            lines.report(report)
    assert out.getvalue().splitlines()[0] == (
        "step     1/4  loss 2.5000      10.0 samples/s  ETA 1:01  limit: compute of anna"
    )
    assert "10.0 samples/s  512 tokens/s  ETA 1:01" in out.getvalue().splitlines()[1]
    bar = RichView(terminal)
    begun = out.tell()
    with bar:
        bar.note("captured gpt")
        for report in reports(4):
            bar.report(report)
    shown = out.getvalue()[begun:]
    assert "captured gpt\n" in shown
    assert "4/4" in shown
    assert "loss 2.5000  10.0 samples/s  512 tokens/s  ETA 1:01" in shown
    assert isinstance(view_for(as_json=False, console=terminal), LineView)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "variables", "is_live"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_only_a_terminal_that_can_be_drawn_anew_is(
    file: type[io.StringIO], variables: dict[str, str], is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dumb terminal showed no step of `train`, and nothing of `status --watch`."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = file()
    monkeypatch.setattr(sys, "stdout", out)
    console = Screen()
    console.width = 120
    assert isinstance(view_for(as_json=False, console=console), RichView) is is_live
    with telling(console) as tell:
        tell(mesh())
        assert "run gpt: step 4" in out.getvalue()
        assert ("\x1b[?1049h" in out.getvalue()) is is_live  # the screen that is put back afterwards


@pytest.mark.parametrize(
    ("name", "value", "has_colours"), [("TERM", "xterm", True), ("TERM", "dumb", False), ("NO_COLOR", "1", False)]
)
def test_logs_have_colours_where_they_are_welcome(
    name: str, value: str, has_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    out, before = Terminal(), structlog.get_config()
    monkeypatch.setattr(sys, "stderr", out)
    try:
        configure_logging(as_json=False, level="warning")
        structlog.get_logger().warning("a member was lost")
    finally:
        structlog.configure(**before)
    assert ("\x1b[" in out.getvalue()) is has_colours


def test_a_plan_that_is_only_looked_at_leaves_no_bar() -> None:
    out = io.StringIO()
    terminal = Screen()
    terminal.file, terminal.width = out, 120
    with RichView(terminal) as bar:
        bar.note("anna needs 3 GiB of 8 GiB")
    assert "training" not in out.getvalue()
