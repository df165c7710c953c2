"""What a run notes of a model of Hugging Face's is enough for a folder that loads it back, or the export says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from meshcee.errors import NotNowError, UsageError
from meshcee.files.hugging_face import described, write
from meshcee.nn import quantize_frozen
from tests.hf.tiny import noted

transformers = pytest.importorskip("transformers", reason="the examples' extra is not installed")


def tiny() -> Any:
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def test_a_whole_model_is_written_by_the_library_and_loads_back(tmp_path: Path) -> None:
    manifest, state, changed = noted(tiny())
    assert write(tmp_path / "hf", manifest, state, changed) == ("GPT2LMHeadModel", len(state))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items() if name in state)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write(tmp_path, *noted(tiny()))
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("library", ["Python", "Rust"])
def test_a_full_disk_is_told_as_one_whoever_writes(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "Error while serializing: I/O error: No space left on device (os error 28)"

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device") if library == "Python" else RuntimeError(told)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", refuse)
    with pytest.raises(NotNowError, match=r"hf cannot be written: No space left on device; make room"):
        write(tmp_path / "hf", *noted(tiny()))
    assert not [*tmp_path.iterdir()]


class _Wrapped(nn.Module):
    """Has the config of the model that it wraps, and other names: `from_pretrained` would find none of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()
        self.config = self.inner.config


class _Own(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
    """A class that transformers does not have."""


def test_what_would_load_as_something_else_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wrapped = noted(_Wrapped())
    wrapped[0]["config"]["architectures"] = ["GPT2LMHeadModel"]
    with pytest.raises(UsageError, match=r"has other tensors.*--out FILE"):
        write(tmp_path / "hf", *wrapped)
    with pytest.raises(UsageError, match=r"no class _Own.*--out FILE"):
        write(tmp_path / "hf", *noted(_Own(tiny().config)))
    with pytest.raises(UsageError, match="is not one of Hugging Face's"):
        write(tmp_path / "hf", *noted(nn.Linear(2, 2)))
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_reads_other_values_than_it_was_given_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = transformers.GPT2LMHeadModel
    monkeypatch.setattr(kind, "from_pretrained", lambda folder, **options: tiny())  # random weights, no error
    with pytest.raises(UsageError, match=r"does not give back 'transformer.wte.weight'"):
        write(tmp_path / "hf", *noted(tiny()))
    assert list(tmp_path.iterdir()) == []


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.fixture(name="peft")
def _peft() -> Any:
    return pytest.importorskip("peft", reason="the examples' extra is not installed")


def adapted(peft: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(tiny(), peft.LoraConfig(**options), adapter_name="mine")


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning")
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"modules_to_save": ["ln_f"]}, {"task_type": None}], ids=str
)
def test_an_adapter_loads_onto_its_base_model(peft: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    model = adapted(peft, **options)
    manifest, state, changed = noted(model)
    kind, count = write(tmp_path / "hf", manifest, state, changed)
    assert (kind, count) == ("PeftModel", len(changed))
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = tiny()
    base.load_state_dict(model.get_base_model().state_dict(), strict=False)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "hf", adapter_name="mine").state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in changed)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning")
def test_what_an_adapters_folder_cannot_hold_is_refused(peft: Any, tmp_path: Path) -> None:
    model = adapted(peft)
    model.base_model.model.transformer.ln_f.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"has also trained '.*ln_f.weight' \(1 in all\)"):
        write(tmp_path / "hf", *noted(model))
    few = peft.VBLoRAConfig(
        r=2, num_vectors=4, vector_length=4, topk=2, target_modules=["c_attn"], save_only_topk_weights=True
    )
    with pytest.raises(UsageError, match=r"computes '.*_topk_indices' when it saves"):
        write(tmp_path / "hf", *noted(peft.get_peft_model(tiny(), few)))
    assert list(tmp_path.iterdir()) == []


PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt tuning": ("PromptTuningConfig", {}),
    "beside a head": ("PromptTuningConfig", {"task_type": "SEQ_CLS"}),
    "p-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 8}),
    "p-tuning, LSTM": (
        "PromptEncoderConfig",
        {"encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM", "encoder_dropout": 0.5},
    ),
    "prefixes": ("PrefixTuningConfig", {}),
    "prefixes, projected": ("PrefixTuningConfig", {"prefix_projection": True, "encoder_hidden_size": 8}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_written_as_save_pretrained_computes_it(peft: Any, tmp_path: Path, name: str) -> None:
    kind, options = PROMPTS[name]
    options = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM", **options}
    heads = {"CAUSAL_LM": transformers.GPT2LMHeadModel, "SEQ_CLS": transformers.GPT2ForSequenceClassification}

    def base() -> Any:
        torch.manual_seed(0)
        return heads[options["task_type"]](tiny().config)

    torch.manual_seed(1)
    model = peft.get_peft_model(base(), getattr(peft, kind)(**options), adapter_name="mine")
    manifest, state, changed = noted(model)
    _, count = write(tmp_path / "hf", manifest, state, changed)

    model.load_state_dict(state, strict=False)
    model.eval().save_pretrained(tmp_path / "theirs")
    ours, theirs = (safetensors.torch.load_file(file) for file in sorted(tmp_path.rglob("*.safetensors")))
    assert ours.keys() == theirs.keys()
    assert len(ours) == count == (1 if options["task_type"] == "CAUSAL_LM" else 2)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "hf")
    loaded.base_model.load_state_dict(model.base_model.state_dict(), strict=False)
    ids = torch.arange(8)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_prompt_that_began_as_a_text_needs_no_tokenizer_again(peft: Any, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    manifest, state, changed = noted(peft.get_peft_model(tiny(), config))
    began = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "a b", "tokenizer_name_or_path": "/nowhere"}
    manifest["adapter"]["config"] |= began
    write(tmp_path / "hf", manifest, state, changed)
    written = json.loads((tmp_path / "hf" / "adapter_config.json").read_text())
    assert {name: written[name] for name in began} == began


def llama() -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes)).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_an_adapter_on_few_bits_loads_onto_its_base_model(peft: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """QLoRA: onto the model in full precision, and in the same few bits onto what was trained, bit for bit."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    trained = quantize_frozen(peft.get_peft_model(llama(), config).eval(), bits=4)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    state = {name: tensor.detach() for name, tensor in trained.state_dict().items()}
    changed = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    kind, count = write(tmp_path / "hf", {**described(trained), "aliases": {}}, state, changed)
    assert (kind, count) == ("PeftModel", len(changed))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "hf")
    assert all(torch.equal(loaded.state_dict()[name], state[name]) for name in changed)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected, full = trained(input_ids=ids).logits, loaded(input_ids=ids).logits
        assert not torch.equal(full, expected)
        assert torch.equal(quantize_frozen(loaded, bits=4)(input_ids=ids).logits, expected)


def test_a_model_in_few_bits_without_an_adapter_is_refused(tmp_path: Path) -> None:
    """No class of transformers reads its codes."""
    model = llama().requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    quantize_frozen(model)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM of this config has other tensors.*--out FILE"):
        write(tmp_path / "hf", *noted(model))
    assert list(tmp_path.iterdir()) == []
