"""`meshcee checkpoint export`: the weights of a run as one file of the model's names, or as Hugging Face loads them."""

from __future__ import annotations

from pathlib import Path

from meshcee.errors import UsageError
from meshcee.tensor_files import OnDemand, save
from peers.checkpoint import Checkpoint, CheckpointStore
from peers.home import Home, write_atomic
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
        config = manifest.get("config")
        if config is None:
            raise UsageError(
                "this model is not one of Hugging Face's, so it has no config.json; use --out FILE instead"
            )
        # Names that are tied are left out, as save_pretrained leaves them out: from_pretrained ties them again.
        hf.mkdir(parents=True, exist_ok=True)
        save(hf / "model.safetensors", state)
        write_atomic(hf / "config.json", dumps(config, indent=2).encode())
    else:
        assert out is not None
        names = {name: name for name in state}
        names |= {other: name for other, name in manifest["aliases"].items() if name in state}
        save(out, OnDemand(names, lambda name: state[names[name]]))
    place = str(hf or out)
    if as_json:
        print(dumps({"out": place, "next_step": checkpoint.next_step, "tensors": len(state)}))
    else:
        print(f"{place}: {len(state)} tensors, as they were after {checkpoint.next_step} steps")
