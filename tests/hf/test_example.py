"""Examples are scripts as people write them: one trains an adapter, saves it, loads it back and compares; one begins with TRL."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcee

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_trains_an_adapter_that_loads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("transformers", "peft", "accelerate"):
        pytest.importorskip(library, reason="the hf extra is not installed")
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    trainer = example("finetune_llama_lora").main(str(tmp_path / "adapter"), local=2)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    assert isinstance(trainer.job, meshcee.Job)
    assert "12 tensors of the adapter" in capsys.readouterr().out


def test_what_trl_has_prepared_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the plain loop. Its labels count in answers alone; its collator pads each micro-batch."""
    for library in ("transformers", "peft", "accelerate", "trl"):
        pytest.importorskip(library, reason="the sft extra is not installed")
    from meshcee.hf import Trainer

    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    train, expected = Trainer.train, []

    def after_the_plain_loop(self: Trainer) -> Any:
        assert self.job is not None
        expected.append(meshcee.plain(self.job))
        return train(self)

    monkeypatch.setattr(Trainer, "train", after_the_plain_loop)
    trainer = example("sft_trl").main(str(tmp_path / "adapter"), steps=2, local=2)
    state = trainer.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected[0].state_dict.items())
    lengths = set()
    for i in (0, 25, 140):
        x, y = trainer.job.collate([trainer.job.data[i]])
        answer = "".join(chr(label) for label in x["labels"][0] if label != -100)
        assert answer.strip("\1") == f" {i // 12 + i % 12}"
        assert y["items"].item() == len(answer)
        lengths.add(x["input_ids"].shape[1])
    assert len(lengths) > 1
