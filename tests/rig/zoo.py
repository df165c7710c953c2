"""Small models of many kinds, each as a Job: what captures and parity tests run on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshcee.job import Job
from meshcee.optim import Optimizer

__all__ = ["ALL", "PHASE_ONE", "class_loss", "flat_cross_entropy", "make", "own_loss"]

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


def flat_cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _hf(build: str) -> Callable[[], nn.Module]:
    """Tiny Hugging Face models, from configurations."""

    def make_model() -> nn.Module:
        import transformers as hf

        small: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": LENGTH,
        }
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        made: nn.Module
        if build.startswith("llama"):
            how = build.partition("-")[2]
            made = hf.LlamaForCausalLM(hf.LlamaConfig(**small, **ids, num_key_value_heads=1, attn_implementation=how))
        elif build == "mixtral":
            config = hf.MixtralConfig(**small, **ids, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
            config._experts_implementation = "batched_mm"  # the loop over experts depends on data
            made = hf.MixtralForCausalLM(config)
        elif build == "bert":
            made = hf.BertForSequenceClassification(hf.BertConfig(**small, num_labels=4))
        elif build == "albert":
            made = hf.AlbertForSequenceClassification(hf.AlbertConfig(**small, embedding_size=8, num_labels=4))
        elif build == "t5":
            made = hf.T5ForConditionalGeneration(
                hf.T5Config(
                    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=0,
                    eos_token_id=1, decoder_start_token_id=0,
                )
            )  # fmt: skip
        else:
            small["image_size"], small["patch_size"], small["num_channels"] = 8, 4, 1
            made = hf.ViTForImageClassification(hf.ViTConfig(**small, num_labels=10))
        return made

    return make_model


class Expand(nn.Module):
    """A ResNet block that may halve the image."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.act = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.act(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(
            Expand(width, width, 1), Expand(width, 2 * width, 2), Expand(2 * width, 2 * width, 1),
            Expand(2 * width, 4 * width, 2),
        )  # fmt: skip
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.pool(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.first = kind(width, width, batch_first=True, dropout=0.1, num_layers=2)
        self.second = kind(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.first(self.tokens(x))
        h, _ = self.second(h)
        return self.head(h)


class Mixture(nn.Module):
    """Every expert sees every token; the gate weighs the two best."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores = self.gate(h).softmax(-1)
        best = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        inner = F.silu(torch.einsum("btd,edf->betf", h, self.up))
        return x + torch.einsum("betf,efd,bte->btd", inner, self.down, weights)


class MoE(nn.Module):
    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Mixture(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Many(nn.Module):
    """Several inputs (one boolean, one of floats), several outputs; the targets are a dict."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens, self.extra = nn.Embedding(VOCABULARY, width), nn.Linear(3, width)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(width, 2, 24, 0.1, batch_first=True) for _ in range(3)])
        self.classes, self.amount = nn.Linear(width, 5), nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor, extra: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.tokens(tokens) + self.extra(extra).unsqueeze(1)
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=~keep)
        pooled = (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
        return {"classes": self.classes(pooled), "amount": self.amount(pooled).squeeze(-1)}


class Rotary(nn.Module):
    """RMSNorm, rotary positions kept in a buffer, a gated MLP; frozen weights with low-rank adapters."""

    def __init__(self, layers: int = 3, width: int = 16, rank: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width).requires_grad_(False)
        self.layers = nn.ModuleList([RotaryLayer(width, rank) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Adapted(nn.Module):
    def __init__(self, before: int, after: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(before, after, bias=False).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, before) * 0.1), nn.Parameter(torch.randn(after, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2.0


class RotaryLayer(nn.Module):
    angles: torch.Tensor

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = Adapted(width, 3 * width, rank), Adapted(width, width, rank)
        self.gate, self.up, self.down = (Adapted(width, width, rank) for _ in range(3))
        self.register_buffer("angles", torch.outer(torch.arange(LENGTH), 1.0 / 10 ** torch.arange(4)), persistent=False)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        angles = self.angles[: x.shape[-2]]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (h.view(b, t, 2, d // 2).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class FNO(nn.Module):
    """A Fourier neural operator: the low frequencies are written into a spectrum of zeros."""

    def __init__(self, layers: int = 3, width: int = 6, modes: int = 3) -> None:
        super().__init__()
        self.up, self.down, self.modes = nn.Linear(1, width), nn.Linear(width, 1), modes
        spectral = [torch.randn(width, width, modes, dtype=torch.cfloat) * 0.2 for _ in range(layers)]
        self.spectral = nn.ParameterList([nn.Parameter(s) for s in spectral])
        self.local = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x.unsqueeze(-1)).transpose(1, 2)
        for weight, local in zip(self.spectral, self.local):
            spectrum = torch.fft.rfft(h)
            out = torch.zeros_like(spectrum)
            out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], weight)
            h = F.gelu(torch.fft.irfft(out, n=h.shape[-1]) + local(h))
        return self.down(h.transpose(1, 2)).squeeze(-1)


def _waves(n: int) -> list[tuple[Any, Any]]:
    g = torch.Generator().manual_seed(6)
    rows = torch.randn(n, LENGTH, generator=g)
    return [(r, r.roll(1)) for r in rows]


def _lengths(n: int) -> list[tuple[Any, Any]]:
    """Sentences of their own lengths: one to a micro-batch."""
    return [(x[: 4 + i % 9], y[: 4 + i % 9]) for i, (x, y) in enumerate(_tokens(n))]


def _sizes(n: int) -> list[tuple[Any, Any]]:
    return [(x[:, : 20 + i % 5, : 24 - i % 3], y) for i, (x, y) in enumerate(_images(n, 24))]


def _masked(n: int) -> list[tuple[Any, Any]]:
    g = torch.Generator().manual_seed(4)
    rows = torch.randint(1, VOCABULARY, (n, LENGTH), generator=g)
    kept = [int(k) for k in torch.randint(3, LENGTH + 1, (n,), generator=g)]
    return [({"input_ids": r, "attention_mask": (torch.arange(LENGTH) < k).long()}, k % 4) for r, k in zip(rows, kept)]


def _pairs(n: int) -> list[tuple[Any, Any]]:
    """Sequence to sequence; targets end in ignored tokens."""
    out = []
    for (x, y), (_, k) in zip(_tokens(n), _masked(n)):
        keep = torch.arange(LENGTH) < LENGTH - k
        labels = torch.where(keep, y, -100)
        out.append(({"input_ids": x, "attention_mask": torch.ones_like(x), "labels": labels}, labels))
    return out


def _many(n: int) -> list[tuple[Any, Any]]:
    g = torch.Generator().manual_seed(5)
    return [
        (
            (x, torch.arange(LENGTH) < 3 + i % 9, torch.randn(3, generator=g)),
            {"class": i % 5, "amount": torch.randn((), generator=g)},
        )
        for i, (x, _) in enumerate(_tokens(n))
    ]


def class_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, target)


def own_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _smoothed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    ignored = torch.where(target % 7 == 0, -100, target)
    return F.cross_entropy(output.flatten(0, 1), ignored.flatten(), label_smoothing=0.1, ignore_index=-100)


def _two_losses(output: Any, target: Any) -> torch.Tensor:
    return F.cross_entropy(output["classes"], target["class"]) + 0.5 * F.l1_loss(output["amount"], target["amount"])


def _unet_data(n: int) -> list[tuple[Any, Any]]:
    return [(x, torch.roll(x, 1, -1)) for x, _ in _images(n, 16)]


_Made = tuple[Callable[[], nn.Module], Callable[[Any, Any], torch.Tensor], Callable[[int], list[tuple[Any, Any]]]]
_MODELS: dict[str, _Made] = {
    "char_gpt": (CharGPT, flat_cross_entropy, _tokens),
    "cnn": (CNN, F.cross_entropy, _images),
    "gpt2": (_gpt2, flat_cross_entropy, _tokens),
    "shared_layer": (lambda: CharGPT(shared=True), flat_cross_entropy, _tokens),
    "unet": (UNet, F.mse_loss, _unet_data),
}
_MODELS |= {
    "llama": (_hf("llama-sdpa"), flat_cross_entropy, _tokens),
    "llama_eager": (_hf("llama-eager"), flat_cross_entropy, _tokens),
    "mixtral": (_hf("mixtral"), flat_cross_entropy, _tokens),
    "bert": (_hf("bert"), class_loss, _masked),
    "albert": (_hf("albert"), class_loss, _masked),
    "t5": (_hf("t5"), own_loss, _pairs),
    "vit": (_hf("vit"), class_loss, _images),
    "resnet": (ResNet, F.cross_entropy, lambda n: _images(n, 16)),
    "lstm": (lambda: Recurrent(nn.LSTM), flat_cross_entropy, _tokens),
    "gru": (lambda: Recurrent(nn.GRU), flat_cross_entropy, _tokens),
    "moe": (MoE, flat_cross_entropy, _tokens),
    "many": (Many, _two_losses, _many),
    "lora": (Rotary, _smoothed, _tokens),
    "fno": (FNO, F.mse_loss, _waves),
    "lengths": (CharGPT, flat_cross_entropy, _lengths),
    "sizes": (ResNet, F.cross_entropy, _sizes),
}
_SETTINGS = {"lengths": {"batch_size": 4, "micro_batch_size": 1}, "sizes": {"batch_size": 4, "micro_batch_size": 1}}
ALL = tuple(_MODELS)
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
    settings |= {"codec": "none"} | _SETTINGS.get(name, {}) | options
    return Job(model=build(), loss=loss, optimizer=OPTIMIZERS[optimizer](), data=data(samples), name=name, **settings)
