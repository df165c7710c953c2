"""Jobs whose micro-batches take 20 to 200 ms on one thread: Hugging Face's GPT-2, ViT and ResNet, small.

The idea: between the demo's models and real ones, so that kernels and not our own work decide, and a benchmark takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig.zoo import class_loss, flat_cross_entropy

__all__ = ["LARGE", "SIZED"]

MICRO_BATCHES = 4


def _job(
    name: str, model: torch.nn.Module, loss: Any, data: list[tuple[Any, Any]], micro_batch: int, precision: str = "fp32"
) -> Job:
    return Job(
        model=model,
        loss=loss,
        optimizer=Optimizer("AdamW", lr=1e-3),
        data=data,
        batch_size=MICRO_BATCHES * micro_batch,
        micro_batch_size=micro_batch,
        steps=1000,
        clip_norm=1.0,
        precision=precision,
        name=name,
    )


def _images(size: int) -> list[tuple[Any, Any]]:
    return [(torch.randn(3, size, size), i % 10) for i in range(64)]


def gpt2() -> Job:
    """4 layers, width 256, 64 tokens; dropout as the configuration has it."""
    import transformers as hf

    sizes = {"n_positions": 64, "n_embd": 256, "n_layer": 4, "n_head": 4}
    return _gpt2("gpt2", hf.GPT2Config(vocab_size=2048, bos_token_id=0, eos_token_id=0, **sizes), 2)


def gpt2_medium() -> Job:
    """24 layers, width 1024, 512 tokens, in bf16: for a GPU."""
    import transformers as hf

    return _gpt2("gpt2-medium", hf.GPT2Config(n_positions=512, n_embd=1024, n_layer=24, n_head=16), 8, "bf16")


def _gpt2(name: str, config: Any, micro_batch: int, precision: str = "fp32") -> Job:
    import transformers as hf

    torch.manual_seed(0)
    rows = torch.randint(0, config.vocab_size, (64, config.n_positions + 1))
    data = [(row[:-1], row[1:]) for row in rows]
    return _job(name, hf.GPT2LMHeadModel(config), flat_cross_entropy, data, micro_batch, precision)


def vit() -> Job:
    """4 layers, width 192, 65 tokens."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
    config = hf.ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10)
    return _job("vit", hf.ViTForImageClassification(config), class_loss, _images(64), 4)


def resnet() -> Job:
    """ResNet-18 on 64 pixels."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    config = hf.ResNetConfig(**sizes, layer_type="basic", num_labels=10)
    return _job("resnet", hf.ResNetForImageClassification(config), class_loss, _images(64), 4)


SIZED: dict[str, Callable[[], Job]] = {"gpt2": gpt2, "vit": vit, "resnet": resnet}
LARGE: dict[str, Callable[[], Job]] = {"gpt2-medium": gpt2_medium}
