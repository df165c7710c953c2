"""Who goes on with a run without a checkpoint begins with the run's own weights: copies hold only what training changes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.virtual_chaos import captured_job
from meshcee.capture import Capture, capture
from meshcee.capture.initial_state import InitialState
from meshcee.eager import plain
from meshcee.errors import UsageError
from meshcee.files import disk, dumps
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.owner import offering
from peers.state.checkpoint import check_weights, first_weights
from tests.peers.owner.test_standby import Story, killed
from tests.rig.reference import reference
from tests.rig.virtual_time import quiet, run

STEPS, MICRO, CUT_AT = 4, 2, 1
OTHER = "the model starts from other weights here than the run did: seed it, or give the same base model"


def adapters(base: int = 0, own: int = 0) -> nn.Module:
    """A frozen layer of a base model between two that are trained; each of its seed."""
    torch.manual_seed(base)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    torch.manual_seed(own)
    return nn.Sequential(nn.Linear(4, 4), frozen, nn.Linear(4, 1))


def job_of(model: Any) -> Job:
    torch.manual_seed(1)
    data = [(row, row.sum(0, keepdim=True)) for row in torch.randn(8, 4)]
    optimizer, loss = Optimizer("SGD", lr=0.1), nn.functional.mse_loss
    job = Job(model, loss, data, optimizer, batch_size=4, micro_batch_size=MICRO, steps=STEPS)
    return replace(job, adapt=False, checkpoint_every=1000)


async def trained(job: Job, home: Home, *, until: int | None = None, resume: str | None = None) -> list[float]:
    async with join(JoinOptions(local=2), home) as mesh:
        async with contextlib.aclosing(mesh.train(job, resume=resume)) as training:
            async for report in training:
                if report.step == until:
                    break
        return list(mesh.result.losses)


def test_digests_are_of_what_training_changes_and_of_what_it_does_not() -> None:
    run, same, based, seeded = (
        first_weights(capture(job_of(adapters(*seeds)))) for seeds in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert run == same
    assert [run[kind] == based[kind] for kind in ("changed", "frozen")] == [True, False]
    assert [run[kind] == seeded[kind] for kind in ("changed", "frozen")] == [False, True]
    for again in (False, True):
        check_weights(same, run, again=again)
        check_weights(based, {}, again=again)  # a run of an earlier release
        with pytest.raises(UsageError, match=OTHER):
            check_weights(based, run, again=again)
    check_weights(seeded, run, again=False)  # copies hold these
    with pytest.raises(UsageError, match=OTHER):
        check_weights(seeded, run, again=True)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = adapters()
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x) * self.scale
        return y


async def test_a_buffer_that_no_state_dict_has_is_the_one_that_the_run_began_with(tmp_path: Path) -> None:
    """A plain loop that goes on would compute with the new one, and every checkpoint has the old one."""
    home, often = Home(tmp_path), {"checkpoint_every": 1}
    await trained(replace(job_of(Scaled(1.0)), **often), home, until=CUT_AT)  # type: ignore[arg-type]
    assert home.run("last").about.weights.keys() == {"changed", "frozen", "code"}
    with pytest.raises(ExceptionGroup) as refused:
        await trained(replace(job_of(Scaled(2.0)), **often), home, resume="last")  # type: ignore[arg-type]
    assert refused.group_contains(UsageError, match="no state_dict has")
    job = replace(job_of(Scaled(1.0)), **often)  # type: ignore[arg-type]
    assert await trained(job, home, resume="last") == plain(job_of(Scaled(1.0)), STEPS, MICRO)[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("until", [None, CUT_AT])
async def test_frozen_weights_of_a_job_in_bf16_travel_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: int | None
) -> None:
    """A stage rounds them anyway. What is trained has its master in full."""
    sent: dict[str, torch.dtype] = {}

    class Sender(offering.StateSender):
        def frames(self, names: Any, **options: Any) -> Any:
            sent.update({name: self.state[name].dtype for name in names})
            return super().frames(names, **options)

        def __init__(self, state: Any, *more: Any) -> None:
            self.state = state
            super().__init__(state, *more)

    monkeypatch.setattr(offering, "StateSender", Sender)
    job = replace(job_of(adapters()), precision="bf16", checkpoint_every=1)
    losses = await trained(job, Home(tmp_path), until=until)
    if until is not None:
        sent.clear()
        losses = await trained(job, Home(tmp_path), resume="last")
    assert {sent[f"1.{name}"] for name in ("weight", "bias")} == {torch.bfloat16}
    assert {sent[f"{layer}.weight"] for layer in (0, 2)} == {torch.float32}
    assert losses == [sum(float(loss) / 2 for loss in step) for step in reference(job).losses]


def test_no_weights_are_made_to_know_those_of_which_there_are_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(std: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 40_000), nn.Linear(40_000, 1))
        nn.init.normal_(model[0].weight, std=std)
        return model

    captured, other = (capture(job_of(lambda std=std: large(std))) for std in (0.02, 0.03))
    again = capture(job_of(lambda: large(0.02)))
    assert isinstance(captured.state, InitialState)
    made: list[str] = []
    get = InitialState.__getitem__
    monkeypatch.setattr(InitialState, "__getitem__", lambda state, name: made.append(name) or get(state, name))
    assert first_weights(captured) == first_weights(again) != first_weights(other)
    assert not {"0.weight", "1.weight"} & {*made}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("seeds", [(0, 0), (1, 0), (0, 1)], ids=["the same", "another base", "other adapters"])
async def test_without_a_checkpoint_a_run_goes_on_with_its_own_first_weights_only(
    tmp_path: Path, seeds: tuple[int, int]
) -> None:
    home = Home(tmp_path)
    await trained(job_of(adapters()), home, until=CUT_AT)
    assert home.run("last").about.weights.keys() == {"changed", "frozen", "code"}
    if seeds == (0, 0):
        found = await trained(job_of(adapters()), home, resume="last")
        assert found == plain(job_of(adapters()), STEPS, MICRO)[0]
        return
    told = len(home.run("last").reports())
    with pytest.raises(ExceptionGroup) as refused:
        await trained(job_of(adapters(*seeds)), home, resume="last")
    assert refused.group_contains(UsageError, match=OTHER)
    assert len(home.run("last").reports()) == told


@pytest.mark.slow
async def test_a_run_of_an_earlier_release_goes_on_as_before(tmp_path: Path) -> None:
    home = Home(tmp_path)
    await trained(job_of(adapters()), home, until=CUT_AT)
    cut = home.run("last")
    old = {name: value for name, value in cut.info.items() if name != "weights"}
    disk.write_whole(cut.folder / "run.json", dumps(old).encode())
    assert await trained(job_of(adapters()), home, resume="last") == plain(job_of(adapters()), STEPS, MICRO)[0]


class WithOtherWeights(Story):
    async def _stand_by(self, mesh: Any) -> Any:
        captured = captured_job()
        name = next(iter(captured.layout))
        other: Capture = replace(captured, state={**captured.state, name: captured.state[name] + 1})
        return await mesh.stand_by(self.job, other, tell=self.told.append)


@pytest.mark.slow
def test_a_standby_whose_model_starts_from_other_weights_is_refused_before_it_follows(tmp_path: Path) -> None:
    story = WithOtherWeights(tmp_path, killed)
    with quiet(), pytest.raises(BaseExceptionGroup) as refused:
        run(story.play())
    assert refused.group_contains(UsageError, match=OTHER)
    assert not story.heir
