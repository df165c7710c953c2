"""`meshcee checkpoint export`: the weights of a run as one file of the model's names, or as Hugging Face loads them."""

from __future__ import annotations

from pathlib import Path

from meshcee.errors import UsageError
from meshcee.tensor_files import OnDemand, save
from peers import hugging_face
from peers.checkpoint import Checkpoint, CheckpointStore
from peers.home import Home
from peers.strict_json import dumps

__all__ = ["export", "find"]


def find(wanted: str) -> Checkpoint:
    """RUN or RUN@STEP: the newest checkpoint of a run of this machine, or that one."""
    run_id, _, step = wanted.partition("@")
    run = Home().run(run_id)
    return CheckpointStore(run.checkpoints).find(step, run.id)


def export(wanted: str, hf: Path | None, out: Path | None, *, as_json: bool) -> None:
    if (hf is None) == (out is None):
        raise UsageError("say what to write: --out FILE.safetensors, or --hf DIR for Hugging Face's from_pretrained")
    if out is not None and out.suffix != ".safetensors":
        raise UsageError(f"--out writes safetensors; name it {out.with_suffix('.safetensors')}")
    checkpoint = find(wanted)
    checkpoint.verify()
    manifest = checkpoint.manifest
    state = checkpoint.weights(manifest["persistent"])
    if hf is not None:
        kind, count = hugging_face.write(hf, manifest, state, checkpoint.changed)
        how = f", for {kind}.from_pretrained"
    else:
        assert out is not None
        names = {name: name for name in state}
        names |= {other: name for other, name in manifest["aliases"].items() if name in state}
        save(out, OnDemand(names, lambda name: state[names[name]]))
        how, count = "", len(state)
    place = str(hf or out)
    if as_json:
        print(dumps({"out": place, "next_step": checkpoint.next_step, "tensors": count}))
    else:
        print(f"{place}: {count} tensors, as they were after {checkpoint.next_step} steps{how}")
