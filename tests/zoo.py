"""Small models of many kinds, each as a Job: what captures and parity tests run on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshcee.job import Job, Optimizer

__all__ = ["PHASE_ONE", "make"]

VOCABULARY, LENGTH = 31, 12


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.p = heads, dropout
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.p if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.mlp(self.norm2(x)))


class CharGPT(nn.Module):
    """Tied embedding; `shared` uses one block for all layers, as ALBERT does."""

    def __init__(self, layers: int = 4, width: int = 16, dropout: float = 0.1, shared: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.drop = nn.Dropout(dropout)
        one = Block(width, 2, dropout)
        self.blocks = nn.ModuleList([one if shared else Block(width, 2, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x + self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class CNN(nn.Module):
    def __init__(self, layers: int = 4, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.Sequential(*[Residual(width) for _ in range(layers)])
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.layers(self.stem(x)).mean((2, 3))))


class UNet(nn.Module):
    """Skips from every level of the way down to its mate on the way up."""

    def __init__(self, width: int = 4, levels: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(levels + 1)]
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(sizes)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(sizes)])
        self.mix = nn.ModuleList([nn.Conv2d(2 * a, a, 3, padding=1) for a in sizes[:-1]])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.stem(x))
        skips = []
        for down in self.down:
            skips.append(x)
            x = F.gelu(down(x))
        for up, mix, skip in zip(reversed(self.up), reversed(self.mix), reversed(skips)):
            x = F.gelu(mix(torch.cat([up(x), skip], 1)))
        return self.head(x)


def _tokens(n: int, seed: int = 1) -> list[tuple[Any, Any]]:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (n, LENGTH + 1), generator=g)
    return [(r[:-1], r[1:]) for r in rows]


def _images(n: int, size: int = 8) -> list[tuple[Any, Any]]:
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(1, size, size, generator=g), i % 10) for i in range(n)]


def _flat_cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _unet_data(n: int) -> list[tuple[Any, Any]]:
    return [(x, torch.roll(x, 1, -1)) for x, _ in _images(n, 16)]


_Made = tuple[Callable[[], nn.Module], Callable[[Any, Any], torch.Tensor], Callable[[int], list[tuple[Any, Any]]]]
_MODELS: dict[str, _Made] = {
    "char_gpt": (CharGPT, _flat_cross_entropy, _tokens),
    "cnn": (CNN, F.cross_entropy, _images),
    "gpt2": (_gpt2, _flat_cross_entropy, _tokens),
    "shared_layer": (lambda: CharGPT(shared=True), _flat_cross_entropy, _tokens),
    "unet": (UNet, F.mse_loss, _unet_data),
}
PHASE_ONE = ("char_gpt", "cnn", "gpt2", "shared_layer", "unet")

OPTIMIZERS = {
    "adamw": lambda: Optimizer("AdamW", lr=3e-3, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}),
    "sgd": lambda: Optimizer("SGD", lr=0.05, momentum=0.9),
}


def make(name: str, optimizer: str = "adamw", samples: int = 40, **options: Any) -> Job:
    """The named model as a job of 4 micro-batches of 2 samples, clipped, on data of its kind."""
    build, loss, data = _MODELS[name]
    torch.manual_seed(7)
    settings: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 2, "steps": 5, "clip_norm": 0.5, "seed": 3}
    settings.update(options)
    return Job(model=build(), loss=loss, optimizer=OPTIMIZERS[optimizer](), data=data(samples), name=name, **settings)
