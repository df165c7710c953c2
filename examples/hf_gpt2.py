"""Hugging Face's GPT-2, built from a small configuration and trained, unchanged, on the text of `gpt.py`.

The idea: the module comes from the transformers library as it is, its embedding and head share one weight, and
nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import meshcee
from meshcee._demo_job import CONTEXT, VOCABULARY, Characters, standard_library

STEPS = 60


def build(seed: int = 0) -> GPT2LMHeadModel:
    """The same weights in every process, whatever was drawn before."""
    config = GPT2Config(
        vocab_size=len(VOCABULARY),
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def loss(output: CausalLMOutputWithCrossAttentions, target: Tensor) -> Tensor:
    assert output.logits is not None
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


job = meshcee.Job(
    name="hf-gpt2",
    model=build(),
    loss=loss,
    data=Characters(standard_library()),
    optimizer=meshcee.Optimizer("AdamW", lr=2e-3, betas=(0.9, 0.95)),
    clip_norm=1.0,
    batch_size=16,
    micro_batch_size=4,
    steps=STEPS,
)


if __name__ == "__main__":
    result = meshcee.train(job)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps")
