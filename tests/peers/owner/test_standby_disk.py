"""The disk of a machine that stands by is full, or cannot be written, for a while: it follows on, catches up and takes over."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from structlog.testing import capture_logs

from benchmarks import virtual_chaos
from benchmarks.virtual_chaos import STEPS
from meshcee.files import Trouble, disk
from peers.device.compute import Pace
from peers.owner.epoch import Report
from peers.owner.standby import WHAT
from peers.state.journal import noted
from peers.transport.endpoint import Endpoint
from tests.peers.owner.test_standby import DIES_AT, Story, assert_exact, killed
from tests.rig.disks import RefusingDisk
from tests.rig.virtual_time import run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

BREAKS, MENDED = 1, 4  # steps of the owner's


class Refused(Story):
    """The standby's disk refuses between two of the owner's steps; the owner dies later."""

    def __init__(self, folder: Path, error: int) -> None:
        super().__init__(folder, killed)
        self.disk = RefusingDisk(self.homes["heir"].folder)
        self.error = error
        self.ledger: list[int] = []  # the newest copies that the owner and the standby know of when the owner dies
        self.followed = 0  # streams between the two then

    async def until_struck(self, training: AsyncIterator[Report]) -> AsyncIterator[Report]:
        async with aclosing(super().until_struck(training)) as reports:
            async for report in reports:
                if report.step in (BREAKS, MENDED):
                    self.disk.error = self.error if report.step == BREAKS else None
                if report.step == DIES_AT:
                    for home in self.homes.values():
                        (found,) = home.runs()
                        copies = noted(found.folder, found.about.key or "", 0, STEPS)
                        self.ledger.append(max((copied.next_step for copied in copies), default=0))
                    owner, heir = (self.storm.here.agents[name] for name in ("chief", "heir"))
                    streams = cast(Endpoint, owner.transport).streams
                    self.followed = sum(s.peer_id == heir.peer_id and s.purpose == "follow" for s in streams)
                yield report


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_standby_outlives_its_disk_and_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    story = Refused(tmp_path, error)
    monkeypatch.setattr(virtual_chaos, "PACE", Pace(4e3))  # some looks of the standby in each step
    spied = mock.patch.object(Trouble, "over", autospec=True, side_effect=Trouble.over)
    with capture_logs() as logged, disk.using(story.disk), spied as over:
        result = run(story.play())
    assert_exact(result)
    assert story.disk.refused > 2
    assert story.heir == list(range(story.heir[0], STEPS))
    assert story.heir[0] > MENDED
    assert story.followed == 1
    owners, standbys = story.ledger
    assert owners >= standbys > MENDED
    (kept,) = story.homes["heir"].runs()
    assert [line["step"] for line in kept.reports()] == list(range(STEPS))
    assert [path.name for path in kept.folder.rglob("*.part")] == []
    assert sum("disk" in entry for entry in logged) == 1
    assert mock.call(mock.ANY, WHAT) in over.mock_calls
    assert len(story.told) == len(set(story.told)), "no line for every try"
