"""The plain eager loop of a job: what one machine without meshcee would run, for users to compare with.

`python -m meshcee.eager JOB.py STEPS MICRO_BATCH FOLDER` trains in this process, writes FOLDER/eager.safetensors and
prints {"losses": [...], "seconds": s}. It is written against torch and `meshcee.seeded` alone, not against the mesh.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from meshcee.errors import UsageError
from meshcee.job import Job, seeded
from meshcee.sampling import draw
from meshcee.tensor_files import Checkpoint

__all__ = ["eager"]


def _collate(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, dict):
        return {key: _collate([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_collate(list(column)) for column in zip(*items))
    return torch.stack([torch.as_tensor(item) for item in items])


def _call(model: torch.nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _weights(job: Job, targets: list[Any]) -> list[float]:
    """What the loss of each micro-batch is multiplied by."""
    if job.reduction == "sum":
        return [1.0] * len(targets)
    if job.weight is None:
        return [job.batch_size // len(targets) / job.batch_size] * len(targets)
    own = [float(job.weight(y)) for y in targets]
    return [w / sum(own) for w in own]


def _built(job: Job) -> torch.nn.Module:
    """A model of our own, with the values that training starts from."""
    if isinstance(job.model, torch.nn.Module):
        model = copy.deepcopy(job.model)
    else:
        torch.manual_seed(job.seed)
        model = job.model()
    if job.weights is not None:
        # Not strict: of tied weights a checkpoint holds one name. Whether it fits is for capture to say.
        model.load_state_dict(dict(Checkpoint.at(job.weights)), strict=False)
    return model


def eager(job: Job, steps: int, micro_batch: int) -> tuple[list[float], torch.nn.Module]:
    """Train `steps` steps; returns each step's loss and the model. fp32; micro-batches in ascending order."""
    if job.precision != "fp32":
        raise UsageError(f"the eager loop knows no precision {job.precision!r}; compare a job in fp32")
    model = _built(job)
    model.train()
    optimizer = job.optimizer.build(dict(model.named_parameters()))
    schedule = job.schedule.build(optimizer) if job.schedule else None
    losses = []
    for step in range(steps):
        indices = draw(job.seed, len(job.data), job.batch_size, step)
        total = 0.0
        batches = []
        for start in range(0, job.batch_size, micro_batch):
            samples = [job.data[i] for i in indices[start : start + micro_batch]]
            batches.append((_collate([s[0] for s in samples]), _collate([s[1] for s in samples])))
        for micro, ((x, y), weight) in enumerate(zip(batches, _weights(job, [y for _, y in batches]))):
            with seeded(job.seed, step, micro):
                loss = job.loss(_call(model, x), y)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += loss.item() * weight
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(total)
    return losses, model


def _main(arguments: list[str]) -> None:
    import importlib.util

    import safetensors.torch

    path, steps, micro_batch, folder = Path(arguments[0]), int(arguments[1]), int(arguments[2]), Path(arguments[3])
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("job_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["job_file"] = module
    spec.loader.exec_module(module)
    start_s = time.perf_counter()
    losses, model = eager(module.job, steps, micro_batch)
    seconds = time.perf_counter() - start_s
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, folder / "eager.safetensors")
    print(json.dumps({"losses": losses, "seconds": seconds}))


if __name__ == "__main__":
    _main(sys.argv[1:])
