"""A script of Hugging Face's Trainer over real peers: the numbers of `local=`, stopped and resumed by another Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshcee.files.home import Home
from meshcee.hf import Trainer
from tests.hf.tiny import arguments, llama, texts
from tests.mesh.harness import Peers

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """After two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def script(folder: Path, *callbacks: Any, **where: Any) -> Trainer:
    args = arguments(folder, weight_decay=0.1, max_steps=3)
    return Trainer(llama(layers=1), args, train_dataset=texts(12), callbacks=[*callbacks], **where)


def told(trainer: Trainer) -> list[dict[str, Any]]:
    """Of each step; no seconds."""
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_a_trainer_over_a_mesh_has_the_numbers_of_local_and_goes_on(
    five_peers: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    alone = script(tmp_path / "local", local=2)
    alone.train()
    first = script(tmp_path / "mesh", Stops(), join=five_peers.token)
    first.train()
    assert told(first) == told(alone)[:2]
    second = script(tmp_path / "mesh", join=five_peers.token)
    second.train(resume_from_checkpoint=True)
    assert told(second) == told(alone)
    assert len(told(second)) == 3
    expected = alone.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.model.state_dict().items())
    assert len(Home().runs()) == 2
