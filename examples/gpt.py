"""A small character-level GPT, trained on the source text of Python's own standard library.

The idea: an ordinary torch module and an ordinary dataset, with one `meshcee.Job` around them. Nothing here knows of
peers. So the same file runs alone (`python examples/gpt.py`), on a mesh (`meshcee train examples/gpt.py --join ...`).
It is also the model of `meshcee demo` (the package links to it as `meshcee/_demo_job.py`).

Shapes: N samples, T characters, C width, H heads, V vocabulary.
"""

from __future__ import annotations

import string
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshcee

CONTEXT = 64
STEPS = 100
TEXT_BYTES = 1_000_000
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
INDENT = "\t"  # stands for four spaces
# A fixed vocabulary: a Python version with other sources still gives the same model.
VOCABULARY = "\n " + INDENT + string.digits + string.ascii_letters + string.punctuation + UNKNOWN
CODE = {character: code for code, character in enumerate(VOCABULARY)}


def encode(text: str) -> Tensor:
    text = text.replace("    ", INDENT)
    return torch.tensor([CODE.get(character, CODE[UNKNOWN]) for character in text], dtype=torch.long)


def decode(codes: Tensor) -> str:
    return "".join(VOCABULARY[code] for code in codes.tolist()).replace(INDENT, "    ")


def standard_library(limit: int = TEXT_BYTES) -> str:
    """The first `limit` characters of the standard library's top-level modules, in the order of their names."""
    parts, length = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
        if length >= limit:
            break
    return "".join(parts)[:limit]


class Characters:
    """Map-style: sample i is the i-th window of CONTEXT characters, and the same window one character later."""

    def __init__(self, text: str) -> None:
        self.codes = encode(text)

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.codes[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (N, H, T, C/H)
        x = x + self.dropout(self.mix(seen.transpose(1, 2).reshape(n, t, c)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x


class GPT(nn.Module):
    """Characters (N, T) -> logits (N, T, V)."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(len(VOCABULARY), width)
        self.position = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # what is added to the residual stream starts smaller, as in GPT-2
                narrow = (2 * layers) ** 0.5 if name.endswith(("mix.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / narrow)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        x: Tensor = self.dropout(self.token(codes) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(seed: int = 0) -> GPT:
    """The same weights in every process, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def sample(state: dict[str, Tensor], prompt: str = "def ", n: int = 200, temperature: float = 0.7) -> str:
    """The prompt and n characters that a GPT with these weights writes after it; the same in every process."""
    model = GPT().eval()
    model.load_state_dict(state)
    dice = torch.Generator().manual_seed(0)
    codes = encode(prompt)
    for _ in range(n):
        logits = model(codes[None, -CONTEXT:])[0, -1]
        logits[CODE[UNKNOWN]] = -torch.inf
        codes = torch.cat([codes, torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=dice)])
    return decode(codes)


job = meshcee.Job(
    name="character-gpt",
    model=build(),
    loss=loss,
    data=Characters(standard_library()),
    optimizer=meshcee.Optimizer(
        "AdamW", lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}
    ),
    schedule=meshcee.Schedule("LinearLR", start_factor=0.1, total_iters=30),
    clip_norm=1.0,
    batch_size=16,
    micro_batch_size=4,
    steps=STEPS,
    codec="lossless",  # equal to the plain loop on any mesh; the default rounds to 16 bits between regions
)


if __name__ == "__main__":
    result = meshcee.train(job)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps")
    print(sample(result.state_dict))
