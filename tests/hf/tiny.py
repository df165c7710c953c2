"""A model, samples and arguments, as small as they can be with everything that makes the mapping hard."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshcee.files.hugging_face import described

WORDS, LENGTH = 48, 12


def llama(layers: int = 2) -> Any:
    """The same weights every time."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_hidden_layers=layers, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def noted(model: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor], set[str]]:
    """As a checkpoint's manifest has it: the model, every tensor of it once, the names that training changes."""
    first: dict[int, str] = {}
    aliases, state = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)], state[name] = name, tensor.detach() + 1  # trained: other values than the module's
    changed = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**described(model), "aliases": aliases}, state, changed


def texts(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Of which each has another number of labels that count, and every fifth none at all."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        ids = [draw.randrange(WORDS) for _ in range(LENGTH)]
        spared = LENGTH if i % 5 == 3 else draw.randrange(LENGTH - 2)
        labels = [-100] * spared + ids[spared:]
        found.append({"input_ids": ids, "attention_mask": [1] * LENGTH, "labels": labels, "note": "not an input"})
    return found


def ragged(count: int) -> list[dict[str, Any]]:
    """Likewise, and each has a length of its own; a collator pads them."""
    found = texts(count)
    for i, text in enumerate(found):
        for name in ("input_ids", "attention_mask", "labels"):
            text[name] = text[name][: LENGTH - i % 7]
    return found


def tokenizer_of_words() -> Any:
    """Its words are w0, w1, ...; with what collators ask for."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", mask_token="w1")


def arguments(folder: Path, **options: Any) -> Any:
    import transformers

    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(output_dir=str(folder / "out"), **{**usual, **options})
