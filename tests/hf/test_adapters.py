"""Adapters of PEFT: trained as in the plain loop, written under the names of `save_pretrained`, and loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import meshcee
from meshcee.hf import Trainer
from peers.cli.main import app
from tests.hf.tiny import WORDS, arguments, llama, texts

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
peft = pytest.importorskip("peft", reason="the hf extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LAYER = "base_model.model.model.layers.0"
DORA = {
    f"{LAYER}.{module}.{part}"
    for module in ("self_attn.q_proj", "mlp.down_proj")
    for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
}
ADAPTERS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}, DORA),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}, {"prompt_embeddings"}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}, {"prompt_embeddings"}),
    "prefix tuning": (
        "PrefixTuningConfig",
        {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8},
        {"prompt_embeddings"},
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_trains_as_in_the_plain_loop_and_loads_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `meshcee checkpoint export --hf` writes the tensors that `save_model` writes."""
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    kind, options, names = ADAPTERS[name]
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(layers=1), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(model, arguments(tmp_path, max_steps=3), train_dataset=texts(12), local=2)
    assert trainer.job is not None
    plain = meshcee.plain(trainer.job)
    trainer.train()
    state = trainer.model.state_dict()
    assert [line["loss"] for line in trainer.state.log_history if "loss" in line] == plain.losses
    assert state.keys() == plain.state_dict.keys()
    assert all(torch.equal(tensor, plain.state_dict[n]) for n, tensor in state.items())
    assert all(p.requires_grad != torch.equal(p, before[n]) for n, p in model.named_parameters())

    model.eval()
    trainer.save_model(tmp_path / "saved")
    told = CliRunner().invoke(app, ["checkpoint", "export", "last", "--hf", str(tmp_path / "exported")])
    assert f"exported: {len(names)} tensors, as they were after 3 steps, for PeftModel.from_pretrained" in told.output
    saved, exported = (
        safetensors.torch.load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("saved", "exported")
    )
    assert saved.keys() == exported.keys() == names
    assert all(torch.equal(tensor, exported[n]) for n, tensor in saved.items())
    ids = torch.arange(WORDS)[None, :8]
    for folder in ("saved", "exported"):
        loaded = peft.PeftModel.from_pretrained(llama(layers=1), tmp_path / folder).eval()
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
