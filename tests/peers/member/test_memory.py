"""A member that is offered another epoch has let go of the last one: two stages at once are not what a plan counts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcee.files.home import Home
from meshcee.stage.runner import StageRunner
from tests.peers.owner.test_recovery import a_mesh, stage_of, train


@pytest.mark.slow
async def test_a_recovery_leaves_nothing_of_the_epoch_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    at_once: list[int] = []

    class Watched(StageRunner):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(next(iter(self.weights.parameters.values()))))
            at_once.append(sum(one() is not None for one in made))

    monkeypatch.setattr("peers.wire.offer.StageRunner", Watched)
    gc.disable()
    try:
        async with a_mesh(Home(tmp_path), 3) as (here, mesh):

            def hear(report: Any) -> None:
                if report.step == 10:
                    here.crash(stage_of(here, mesh, 1))

            await train(mesh, hear)
    finally:
        gc.enable()
    assert len(made) == 5
    assert at_once[:3] == [1, 2, 3]
    assert max(at_once) <= 3  # the killed one's, whose process is this one here, and the two new
