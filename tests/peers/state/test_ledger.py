"""A run whose owner has died goes on where its peers are, as long as they are there. On virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.virtual_chaos import STEPS, captured_job, expected, job_of, quick_planning, stormy
from dht.signing import Identity
from meshcee.files.home import Home
from peers.node.mesh import Mesh
from peers.owner.result import Result
from peers.state.checkpoint import Checkpoint
from peers.state.journal import noted
from peers.state.manifest import CopySet
from peers.state.shelf import COPIES
from tests.rig.virtual_time import quiet, run

DURABLE, DIES_AT = 4, 6  # between them a copy is complete


@pytest.mark.slow
@pytest.mark.parametrize("bereft", [False, True])
def test_the_next_owner_begins_with_what_peers_hold_or_with_the_disk(tmp_path: Path, bereft: bool) -> None:
    """Bereft: a stage's holder and its keeper have died with the owner."""
    identity, home = Identity.generate(), Home(tmp_path / "home")
    job = replace(job_of(), checkpoint_every=DURABLE)
    began: list[object] = []
    told: list[int] = []

    async def story() -> Result:
        async with stormy(0, tmp_path) as storm, asyncio.TaskGroup() as group, asyncio.timeout(600):

            async def own(dies: bool, resume: str | None = None) -> Result:
                mesh = Mesh(await storm.here.start("chief", lends=False, identity=identity), group, home)
                training = mesh.train(job, captured=captured_job(), stages=None if resume else 3, resume=resume)
                async with contextlib.aclosing(training):
                    async for report in training:
                        told.append(report.step)
                        assert mesh.training is not None
                        began.append(mesh.training.base)
                        if dies and report.step == DIES_AT:
                            storm.mesh = mesh
                            victims = {storm.members()[1], storm.keeper_of(storm.members()[1])} if bereft else set()
                            for name in (*victims, "chief"):
                                storm.here.crash(name)
                            break
                return mesh.result

            await own(dies=True)
            await asyncio.sleep(10)  # until everybody knows who is gone
            return await own(dies=False, resume="last")

    with quiet(), quick_planning():
        result = run(story())
    base = began[-1]
    assert isinstance(base, Checkpoint if bereft else CopySet)
    assert bereft or base.next_step > DURABLE
    losses, state = expected()
    assert (result.losses, told) == (losses, [*range(STEPS)])
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"run": "mine", "copies": [{"next_step": 7, "stages": [[{"w": "ab"}, {}, ["p"]]]}]}', [7]),
        ('{"run": "mine", "copies": [{"next_step": 4, "stages": []}, {"next_step": 9, "stages": []}]}', []),
        ('{"run": "another", "copies": [{"next_step": 7, "stages": []}]}', []),
        ('{"run": "mine", "copies": [{"stages": 1}]}', []),
        ("[]", []),
        ("{", []),
    ],
)
def test_only_what_can_be_gone_on_from_is_read(tmp_path: Path, text: str, found: list[int]) -> None:
    assert noted(tmp_path, "mine", 4, 8) == []
    (tmp_path / COPIES).write_text(text)
    assert [copied.next_step for copied in noted(tmp_path, "mine", 4, 8)] == found
