"""A script of transformers, with `meshcee.hf.Trainer` in the place of its own: LoRA by PEFT on a small Llama.

The idea: only the import and `local=2` (or `join=LINE`) are meshcee's. The model is made here and nothing is downloaded; with
`AutoModelForCausalLM.from_pretrained(...)` it is any other. The adapter that was trained is saved, loaded back and compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from meshcee.hf import Trainer

WINDOW = 48
QUESTIONS = [f"what is {a} plus {b}? {a + b}" for a in range(12) for b in range(12)]


def build() -> LlamaForCausalLM:
    """The same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
    )
    return LlamaForCausalLM(config)


def encode(line: str) -> dict[str, Any]:
    """One letter, one token; padded to one length, and only the answer is learned: other labels are -100."""
    ids = [ord(letter) for letter in line] + [0]
    padding = [0] * (WINDOW - len(ids))
    asked = line.index("?") + 1
    return {
        "input_ids": ids + padding,
        "attention_mask": [1] * len(ids) + padding,
        "labels": [-100] * asked + ids[asked:] + [-100] * len(padding),
    }


def main(output_dir: str, **where: Any) -> Trainer:
    model = get_peft_model(build(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    samples = [encode(line) for line in QUESTIONS]
    args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=16,
        learning_rate=2e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=4,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=samples, **where)
    trainer.train()
    trainer.save_model()

    loaded = PeftModel.from_pretrained(build(), output_dir).state_dict()
    adapter = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    assert adapter
    assert all(torch.equal(loaded[name], tensor) for name, tensor in adapter.items())
    print(f"{len(adapter)} tensors of the adapter, and PeftModel.from_pretrained gives them back")
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(str(Path(folder) / "adapter"), **({"join": sys.argv[1]} if sys.argv[1:] else {"local": 2}))
