"""Which models are held out: drawn by one seed from the registries of libraries, before anything is known of them.

The idea: `names()` is the same list on every machine with the same versions, and `make(name)` builds one. The snippets at its
end are not drawn: they are what users reported.
"""

from __future__ import annotations

import random

from benchmarks.held import hugging, plain, snippets, vision
from benchmarks.held.made import Made

__all__ = ["SEED", "make", "names"]

SEED = 18
_COUNTS = {
    "timm": 56,
    "torchvision": 24,
    "diffusers": len(vision.DIFFUSERS),
    "peft": 26,
    "pyg": 28,
    "nn": 36,
    "loss": 16,
}


def names() -> list[str]:
    """The draw. One model type of transformers appears once, whatever it can do."""
    rng = random.Random(SEED)
    chosen: list[str] = []
    seen: set[str] = set()
    for kind, entries in hugging.hf_names().items():
        fresh = [n for n in entries if n.split(":")[2] not in seen]
        taken = rng.sample(fresh, min(hugging.KINDS[kind], len(fresh)))
        seen |= {n.split(":")[2] for n in taken}
        chosen += taken
    registries = {
        "timm": vision.timm_names(),
        "torchvision": vision.torchvision_names(),
        "diffusers": sorted(f"diffusers:{n}" for n in vision.DIFFUSERS),
        "peft": hugging.peft_names(),
        "pyg": plain.graph_names(),
        "nn": plain.module_names(),
        "loss": plain.loss_names(),
    }
    for family, entries in registries.items():
        chosen += rng.sample(entries, min(_COUNTS[family], len(entries)))
    return chosen + sorted(f"snippet:{n}" for n in snippets.ALL)


def make(name: str) -> Made:
    """Raises what a library raises, or NotBuilt."""
    family = name.partition(":")[0]
    makers = {
        "hf": hugging.make_hf, "timm": vision.make_timm, "torchvision": vision.make_torchvision,
        "diffusers": vision.make_diffusers, "peft": hugging.make_peft, "pyg": plain.make_graph, "nn": plain.make_module,
        "loss": plain.make_loss, "snippet": snippets.make,
    }  # fmt: skip
    return makers[family](name)
