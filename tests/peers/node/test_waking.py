"""A peer that was suspended wakes: all that broke meanwhile breaks at once, and is one line of each kind."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from benchmarks.virtual_chaos import now, stormy, train
from meshcee.events import Event
from peers.owner.epoch import Report
from tests.rig.virtual_time import Still, run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STRUCK, ASLEEP_S = 4, 15.0


class Log:
    """What each peer of a storm says, but for what a log leaves out by default."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float, dict[str, Any]]] = []  # whose, when, what
        structlog.configure(
            processors=[self._note], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING)
        )

    def _note(self, logger: Any, method: str, line: MutableMapping[str, Any]) -> str:
        self.lines.append((Still.who(), now(), dict(line)))
        raise structlog.DropEvent


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_what_breaks_around_a_sleeper_is_a_line_of_each_kind_for_each_peer(seed: int, tmp_path: Path) -> None:
    log, slept = Log(), list[tuple[str, float]]()

    async def story() -> str:
        async with stormy(seed, tmp_path) as storm, asyncio.timeout(1800):

            def hear(report: Report) -> None:
                if report.step == STRUCK and not slept:
                    victim = storm.members()[1]
                    storm.blows.suspend(victim, ASLEEP_S)
                    slept.append((victim, now()))

            outcome = await train(storm, hear)
            await asyncio.sleep(ASLEEP_S)
            return outcome

    assert run(story(), inline=True) == "equal"
    ((victim, since_s),) = slept
    said = [(who, line) for who, at_s, line in log.lines if at_s >= since_s]
    assert not [line for _, line in said if "exc_info" in line]
    told = Counter((who, line["event"]) for who, line in said)
    assert Event.MEMBER_LOST in {event for _, event in told}
    assert set(told.values()) == {1}
    woken = {event for who, event in told if who.startswith(f"{victim},")}
    assert woken <= {Event.STREAM_REFUSED, Event.HANDLER_FAILED, "job failed"}
