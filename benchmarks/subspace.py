"""What a thin residual stream costs in loss, and what it saves: examples/subspace.py beside the transformer of examples/gpt.py.

The idea: one job (text, optimizer, seeds), and the model alone differs. Each is trained by the plain loop, which every exact run
equals, and validated on text that it does not train on. Then the planner puts it on four peers with a line of their own each. The
seconds of a step are those of its simulator, so rows differ by what crosses and by nothing else.

    python benchmarks/subspace.py [--steps 150] [--mbit 80 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from typing import Any

import torch
from codec_quality import Part
from measure import machine, row
from subspace_job import module_of

import meshcee
from meshcee.capture import capture
from meshcee.codec import codec_of
from meshcee.figures import DeviceProfile, LinkProfile, Measured
from meshcee.job import Job
from meshcee.planner.live import choose
from meshcee.simulator import period_s
from peers.planning.job_costs import costs_of

RANKS = (8, 32)
VALIDATION = 128  # windows of text
PEERS, MEMORY_BYTES, SPEED_FLOPS_PER_S, LATENCY_S = 4, 4 << 30, 5e10, 0.01
CODECS = {"plain": ("none", "bf16", "int8"), **{f"subspace, {rank}": ("none",) for rank in RANKS}}


def jobs(steps: int) -> dict[str, Job]:
    """The same job with each of the models."""
    gpt, subspace = module_of("gpt"), module_of("subspace")
    found = {"plain": gpt.build()}
    for rank in RANKS:
        subspace.RANK = rank
        found[f"subspace, {rank}"] = subspace.build()
    data = Part(gpt.job.data, 0, len(gpt.job.data) - VALIDATION)
    return {name: replace(gpt.job, model=model, data=data, steps=steps) for name, model in found.items()}


def validated(job: Job, state: dict[str, torch.Tensor]) -> float:
    """The loss over text behind the one that was trained on."""
    model: Any = job.model
    model.load_state_dict(state)
    whole = job.data.data
    rows = [whole[i] for i in range(job.data.end, len(whole))]
    x, y = (torch.stack(column) for column in zip(*rows))
    with torch.no_grad():
        return float(job.loss(model.eval()(x), y))


def planned(job: Job, codec: str, mbit: float) -> tuple[float, float]:
    """Seconds of a step on peers with such a line each, and the bytes that cross a cut meanwhile, there and back."""
    job = replace(job, codec=codec)
    captured = capture(job)
    devices = {f"peer-{i}": DeviceProfile("cpu", "small", MEMORY_BYTES, SPEED_FLOPS_PER_S) for i in range(PEERS)}
    link = LinkProfile(LATENCY_S, mbit * 1e6 / 8)
    links = {(a, b): link for a in devices for b in devices if a != b}
    choice, cluster, workload = choose(Measured(devices, links, {}, {}), costs_of(job, captured), PEERS)
    (pipeline,) = choice.best.pipelines
    numbers = [captured.costs[stage.end - 1].boundary_bytes * job.batch_size // 4 for stage in pipeline.stages[:-1]]
    wire = [2 * codec_of(codec).wire_bytes(torch.float32, count) for count in numbers]
    return period_s(choice.best, cluster, workload), sum(wire) / len(wire)


def measure(name: str, job: Job, speeds: list[float]) -> list[dict[str, Any]]:
    begun_s = time.process_time()
    result = meshcee.plain(job)
    took_s = time.process_time() - begun_s
    model: Any = job.model
    found = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": sum(result.losses[-10:]) / len(result.losses[-10:]),
        "validation_loss": validated(job, result.state_dict),
        "training_s": round(took_s, 1),
    }
    rows = []
    for codec in CODECS[name]:
        steps = {f"{mbit:g}": planned(job, codec, mbit) for mbit in speeds}
        rows.append(
            {
                **found,
                "codec": codec,
                "bytes_a_step": steps[f"{speeds[0]:g}"][1],
                "step_s": {mbit: seconds for mbit, (seconds, _) in steps.items()},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of training, for each model")
    parser.add_argument("--mbit", type=float, nargs="+", default=[80, 8], help="of each peer's line, in Mbit/s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    rows = [one for name, job in jobs(options.steps).items() for one in measure(name, job, options.mbit)]
    if options.json:
        print(json.dumps({"machine": about, "steps": options.steps, "rows": rows}, indent=1))
        return
    print(row("model", "codec", "parameters", "validation loss", "KiB a step", *(f"s at {m:g}" for m in options.mbit)))
    for one in rows:
        print(
            row(
                one["model"],
                one["codec"],
                one["parameters"],
                f"{one['validation_loss']:.4f} ({math.exp(one['validation_loss']):.2f})",
                f"{one['bytes_a_step'] / 1024:.1f}",
                *(f"{one['step_s'][f'{m:g}']:.4f}" for m in options.mbit),
            )
        )


if __name__ == "__main__":
    main()
