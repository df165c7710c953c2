"""TRL's SFTTrainer prepares, and `meshcee.hf.Trainer` trains: questions and answers, of which the answers alone are learned.

The idea: SFTTrainer makes tokens and labels of a dataset, an adapter of a `peft_config`, and has a collator that pads. It is never
asked to train. The model and its tokenizer are made here and nothing is downloaded. Wants `pip install 'meshcee[sft]'`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

from meshcee.hf import Trainer

ROWS = [{"prompt": f"what is {a} plus {b}?", "completion": f" {a + b}"} for a in range(12) for b in range(12)]


def letters() -> PreTrainedTokenizerFast:
    """One letter, one token."""
    found = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token=chr(0), eos_token=chr(1))


def build() -> LlamaForCausalLM:
    """The same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=48,
    )
    return LlamaForCausalLM(config)


def main(output_dir: str, steps: int = 12, **where: Any) -> Trainer:
    prepared = SFTTrainer(
        build(),
        SFTConfig(output_dir, max_length=48, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none"),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=letters(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=2e-2,
        logging_steps=2,
        disable_tqdm=True,
        remove_unused_columns=False,  # TRL's collator knows which columns it wants
    )
    data = {"data_collator": prepared.data_collator, "train_dataset": prepared.train_dataset}
    trainer = Trainer(prepared.model, args, **data, processing_class=prepared.processing_class, **where)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(str(Path(folder) / "adapter"), **({"join": sys.argv[1]} if sys.argv[1:] else {"local": 2}))
