"""The example is a script as people write it: it trains an adapter, saves it, loads it back and compares."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import meshcee

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_the_example_trains_an_adapter_that_loads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("transformers", "peft", "accelerate"):
        pytest.importorskip(library, reason="the hf extra is not installed")
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "finetune_llama_lora.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trainer = module.main(str(tmp_path / "adapter"), local=2)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    assert isinstance(trainer.job, meshcee.Job)
    assert "12 tensors of the adapter" in capsys.readouterr().out
