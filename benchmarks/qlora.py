"""A Llama of 7B in 4 bits: whether it fits on small peers, and what a peer holds of it, planned and measured.

The idea: the model is a function, and its weights are drawn as codes, so it never exists whole. The first part captures all 32
layers and asks the planner for four peers of 4 GiB; nothing is computed. The second part trains a few layers of the same width
for two steps on real peers of this machine, with --width a narrower one. It holds the growth of each peer's resident memory, from
idle to its peak, against what the plan says that its stage needs. The peak is that from the plan on: before, a peer may have
timed larger blocks.

    python benchmarks/qlora.py [--plan-layers 32] [--layers 2] [--peers 2] [--length 64] [--width 4096] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigger import environment, start_peer
from measure import machine, row

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from meshcee.capture import Capture, capture  # noqa: E402
from meshcee.figures import DeviceProfile, LinkProfile, Measured  # noqa: E402
from meshcee.job import Job  # noqa: E402
from meshcee.plan import Plan  # noqa: E402
from meshcee.planner.live import choose, situation  # noqa: E402
from meshcee.planner.rules import needs  # noqa: E402
from peers.planning.job_costs import costs_of  # noqa: E402

PEERS, MEMORY_BYTES = 4, 4 << 30
STEPS = 2
SPEED_FLOPS_PER_S = 5e10  # of a core or two
LINK = LinkProfile(0.001, 1e8)
# A codec matters nothing here; verify would build the model once more on the machine that also runs the peers.
JOB = """
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import meshcee
from meshcee.nn import QuantizedEmbedding, QuantizedLinear
from meshcee.nn.blocks import BLOCK, pairs

LAYERS, LENGTH, WIDTH = {layers}, {length}, {width}


def model():
    inner = WIDTH * 43 // 16  # 11008, where the width is 4096
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=inner, num_hidden_layers=LAYERS, num_attention_heads=32)
    with no_init_weights():
        llama = LlamaForCausalLM(config)
    llama = get_peft_model(llama, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    table = pairs()
    for name, module in list(llama.named_modules()):
        above, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.requires_grad:
            count = module.weight.numel()
            scales = torch.full((count // BLOCK,), 0.02).view(torch.int32)
            codes = dict(codes=torch.empty(count // 2, dtype=torch.uint8).random_(0, 256), scales=scales)
            kind = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedEmbedding
            setattr(llama.get_submodule(above), last, kind(module, codes, table))
        elif "norm" in last:
            module.weight = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)
    return llama.train()


def loss(output, y):
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), y.flatten())


ids = torch.randint(0, 32000, (4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
job = meshcee.Job(
    name="qlora",
    model=model,
    loss=loss,
    data=[(dict(input_ids=row[:-1]), row[1:]) for row in ids],
    optimizer=meshcee.Optimizer("AdamW", lr=1e-4),
    batch_size=2,
    micro_batch_size=1,
    steps={steps},
    codec="none",
    verify=False,
)
"""


def captured_job(source: str) -> tuple[Job, Capture]:
    found: dict[str, Any] = {}
    exec(source, found)
    job: Job = found["job"]
    return job, capture(job)


def mesh_of(peers: Sequence[str]) -> Measured:
    devices = {peer: DeviceProfile("cpu", "small", MEMORY_BYTES, SPEED_FLOPS_PER_S) for peer in peers}
    return Measured(devices, {(a, b): LINK for a in devices for b in devices if a != b}, {}, {})


def planned(source: str, layers: int) -> dict[str, Any]:
    """Seconds of the capture, bytes of the state, and of each stage what the planner counts."""
    job, captured = captured_job(source)
    began_s = time.perf_counter()
    costs = costs_of(job, captured)
    choice, cluster, workload = choose(mesh_of([f"peer-{i}" for i in range(PEERS)]), costs, PEERS)
    plan = choice.best
    return {
        "layers": layers,
        "capture_s": round(captured.took_s, 1),
        "plan_s": round(time.perf_counter() - began_s, 1),
        "state_bytes": captured.state_bytes,
        "blocks": captured.train.num_blocks,
        "stages": [[stage.first, stage.end] for stage in plan.pipelines[0].stages],
        "needed_bytes": needs(plan, cluster, workload),
        "memory_bytes": MEMORY_BYTES,
    }


def memory_of(pid: int, field: str) -> int:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measured(source: str, layers: int, count: int) -> dict[str, Any]:
    """The growth of each peer over two steps, beside what the plan of this run counts for its stage."""
    with tempfile.TemporaryDirectory(prefix="meshcee-qlora-") as folder:
        home = Path(folder)
        file = home / "job.py"
        file.write_text(source)
        processes: list[subprocess.Popen[str]] = []
        token = ""
        try:
            for i in range(count):
                process, line = start_peer(home, f"peer-{i}", "4GiB", token)
                processes.append(process)
                token = token or line
            idle = [memory_of(process.pid, "VmRSS") for process in processes]
            command = [
                sys.executable,
                "-m",
                "meshcee",
                "train",
                str(file),
                "--join",
                token,
                "--stages",
                str(count),
                "--json",
            ]
            began_s = time.perf_counter()
            lines = []
            with (
                (home / "errors").open("w+") as errors,
                subprocess.Popen(
                    command, env=environment(home), stdout=subprocess.PIPE, stderr=errors, text=True
                ) as done,
            ):
                assert done.stdout is not None
                for line in done.stdout:
                    lines.append(line)
                    if "plan" in json.loads(line):  # blocks have been profiled, and no stage is there yet
                        for process in processes:
                            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            said = (home / "errors").read_text()
            seconds = time.perf_counter() - began_s
            peaks = [memory_of(process.pid, "VmHWM") for process in processes]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
        if done.returncode:
            raise SystemExit(f"training failed with exit code {done.returncode}:\n{said[-3000:]}")
        events = [json.loads(line) for line in lines]
    told = next(event for event in events if "plan" in event)
    plan, names = Plan.from_json(told["plan"]), told["names"]
    cluster, workload = situation(mesh_of(plan.peers), costs_of(*captured_job(source)))
    growth = {f"peer-{i}": peak - before for i, (peak, before) in enumerate(zip(peaks, idle))}
    return {
        "layers": layers,
        "seconds": round(seconds, 1),
        "losses": [event["report"]["loss"] for event in events if "report" in event],
        "stages": [
            {
                "blocks": [workload.names[stage.first], workload.names[stage.end - 1]],
                "needed_bytes": needed,
                "growth_bytes": growth[names[peer]],
            }
            for peer, needed in needs(plan, cluster, workload).items()
            for stage in plan.pipelines[0].stages
            if peer in stage.peers
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan-layers", type=int, default=32, help="of the model that is planned; 0: none")
    parser.add_argument("--layers", type=int, default=2, help="of the model that is trained; 0: none")
    parser.add_argument("--peers", type=int, default=2, help="that train it")
    parser.add_argument("--length", type=int, default=64, help="of a sample, in tokens")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden states, a multiple of 64")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for what has another name now

    def source_of(layers: int) -> str:
        return JOB.format(layers=layers, length=options.length, steps=STEPS, width=options.width)

    found: dict[str, Any] = {"machine": machine()}
    if options.plan_layers:
        found["planned"] = planned(source_of(options.plan_layers), options.plan_layers)
    if options.layers:
        found["measured"] = measured(source_of(options.layers), options.layers, options.peers)
    if options.json:
        print(json.dumps(found))
        return
    mib = 1 << 20
    for name, part in found.items():
        print(row(name, *(f"{key} {value}" for key, value in part.items())))
    for stage in found.get("measured", {}).get("stages", ()):
        print(
            row(
                " to ".join(stage["blocks"]),
                *(f"{stage[key] / mib:.0f} MiB" for key in ("needed_bytes", "growth_bytes")),
            )
        )
    if "planned" in found:
        print(row(*(f"{peer}: {size / mib:.0f} MiB" for peer, size in found["planned"]["needed_bytes"].items())))


if __name__ == "__main__":
    main()
