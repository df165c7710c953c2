"""Which models meshcee captures, and whether a pipeline of their blocks computes what the eager loop computes.

The idea: the small models of the test zoo are captured, encoded, decoded, cut into 1, 2, 3 and 5 stages and trained with all
F before all B before all W; every loss and every final tensor is compared with `torch.equal` to a plain loop in eager
mode. Models of real size are only captured, for the seconds and the bytes. Prints the tables of docs/models.md.

    python benchmarks/models.py [--json] [--only NAME] [--real]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine

sys.path.insert(0, str(Path(__file__).parent.parent))

from meshcee.capture import Capture, capture, decode_program, encode_program, prepare
from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig import zoo
from tests.rig.chain import Chain
from tests.rig.reference import reference

STAGES = (1, 2, 3, 5)
TITLES = {
    "char_gpt": ("character GPT, tied head, dropout", 4),
    "cnn": ("CNN with batch norm, in-place activations", 4),
    "gpt2": ("Hugging Face GPT-2", 3),
    "shared_layer": ("one layer used four times", 4),
    "unet": ("U-Net with long skips", 9),
    "llama": ("Hugging Face Llama, grouped keys, SDPA", 3),
    "llama_eager": ("Hugging Face Llama, explicit attention", 3),
    "mixtral": ("Hugging Face Mixtral, batched experts", 3),
    "bert": ("Hugging Face BERT classifier, padding mask", 3),
    "albert": ("Hugging Face ALBERT classifier", 3),
    "t5": ("Hugging Face T5, ignored tokens", 4),
    "vit": ("Hugging Face ViT", 3),
    "resnet": ("ResNet with strides and shortcuts", 4),
    "lstm": ("LSTM, dropout between layers", 3),
    "gru": ("GRU", 3),
    "moe": ("mixture of experts, dense dispatch (einsum)", 3),
    "many": ("three inputs, two outputs, two losses, masks", 3),
    "lengths": ("character GPT, sentences of different lengths", 4),
    "sizes": ("ResNet, images of different sizes", 4),
    "lora": ("frozen weights with adapters, rotary, RMSNorm, label smoothing", 3),
}


def small(name: str) -> dict[str, Any]:
    """One row of the first table."""
    title, layers = TITLES[name]
    row: dict[str, Any] = {"model": title, "layers": layers}
    job = zoo.make(name)
    began = time.perf_counter()
    try:
        captured = capture(job)
    except MeshceeError as error:
        return {**row, "parity": f"not captured: {error}"}
    row |= described(captured, time.perf_counter() - began)
    if captured.train.num_blocks < layers:
        return {**row, "parity": "fewer blocks than layers: find out why, and cut it"}
    want = reference(job)
    unequal = []
    for stages in dict.fromkeys(min(s, captured.train.num_blocks) for s in STAGES):
        chain = Chain(job, captured, stages, "late")
        losses = chain.run(job.steps)
        state = chain.state()
        same = all(torch.equal(a, b) for got, to in zip(losses, want.losses) for a, b in zip(got, to))
        if not same or any(not torch.equal(state[n], want.state[n]) for n in want.state):
            unequal.append(stages)
    return {**row, "parity": "equal" if not unequal else f"differs on {unequal} stages"}


def described(captured: Capture, capture_s: float) -> dict[str, Any]:
    encoded = encode_program(captured.train)
    began = time.perf_counter()
    decode_program(encoded)
    return {
        "blocks": captured.train.num_blocks,
        "nodes": len(captured.train.nodes),
        "boundary_bytes": max(c.boundary_bytes for c in captured.costs),
        "capture_s": round(capture_s, 1),
        "graph_bytes": len(encoded),
        "decode_s": round(time.perf_counter() - began, 2),
    }


def _tokens(vocabulary: int, length: int) -> list[tuple[Any, Any]]:
    return [tuple(torch.randint(0, vocabulary, (2, length))) for _ in range(4)]  # type: ignore[misc]


def real_sizes() -> dict[str, Callable[[], Job]]:
    import transformers as hf

    def job(model: torch.nn.Module, loss: Any, data: list[tuple[Any, Any]]) -> Job:
        return Job(model=model, loss=loss, optimizer=Optimizer("SGD", lr=0.1), data=data, batch_size=4, steps=1)

    images = [(torch.randn(3, 224, 224), i % 10) for i in range(4)]
    masked = [({"input_ids": x, "attention_mask": torch.ones_like(x)}, 0) for x, _ in _tokens(30000, 512)]
    pairs = [({"input_ids": x, "labels": y}, y) for x, y in _tokens(32000, 128)]
    llama = {"vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    flat, classes, own = zoo.flat_cross_entropy, zoo.class_loss, zoo.own_loss
    return {
        "GPT-2, 12 layers, 1024 tokens": lambda: job(hf.GPT2LMHeadModel(hf.GPT2Config()), flat, _tokens(50257, 1024)),
        "GPT-2, 24 layers, 1024 tokens": lambda: job(
            hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=24, n_embd=1024, n_head=16)), flat, _tokens(50257, 1024)
        ),
        "BERT base, 512 tokens": lambda: job(hf.BertForSequenceClassification(hf.BertConfig()), classes, masked),
        "Llama, 12 layers, 512 tokens": lambda: job(
            hf.LlamaForCausalLM(hf.LlamaConfig(**llama, intermediate_size=2048)), flat, _tokens(32000, 512)
        ),
        "T5 small, 128 tokens": lambda: job(
            hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0)), own, pairs
        ),
        "ViT base, 224 pixels": lambda: job(hf.ViTForImageClassification(hf.ViTConfig(num_labels=10)), classes, images),
        "ResNet-50, 224 pixels": lambda: job(
            hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)), classes, images
        ),
    }


def real(title: str, build: Callable[[], Job]) -> dict[str, Any]:
    job = build()
    began = time.perf_counter()
    captured = capture(job)
    row = described(captured, time.perf_counter() - began)
    parameters = sum(math.prod(captured.layout[n][1]) for n in captured.param_order)
    flops = sum(c.flops for c in captured.costs)
    return {"model": title, "parameters_millions": round(parameters / 1e6, 1), "gflops": round(flops / 1e9, 1), **row}


def table(rows: list[dict[str, Any]]) -> str:
    keys = list(dict.fromkeys(k for row in rows for k in row))
    lines = [keys, ["---"] * len(keys), *([str(row.get(k, "")) for k in keys] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="one model of the first table")
    parser.add_argument("--real", action="store_true", help="models of real size too (needs 8 GiB)")
    options = parser.parse_args()
    prepare()  # as a peer does before any graph comes
    torch.set_num_threads(1)
    first = [small(name) for name in ([options.only] if options.only else TITLES)]
    second = [real(title, build) for title, build in real_sizes().items()] if options.real else []
    if options.json:
        print(json.dumps({"machine": machine(), "models": first, "real": second}))
        return
    print(table(first))
    if second:
        print()
        print(table(second))
    if any(row["parity"] != "equal" for row in first):
        sys.exit(1)


if __name__ == "__main__":
    main()
