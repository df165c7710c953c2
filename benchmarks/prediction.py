"""The step that the planner expects against the step that the mesh takes, on five emulated clusters.

The idea: `meshcee local --shape` runs real peer processes with paced devices and shaped links; they measure themselves and
one another as on any mesh and know nothing of the shape. The plan says what a step will take, `meshcee train` what it took:
the median of the steps after the first two. Takes about a minute a shape.

    python benchmarks/prediction.py [--json] [--only NAME] [--steps 14] [--codec auto] [--groups]

--groups asks for stages on groups, of a model for which they pay: most of its work is in one block.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import machine, row

HERE = Path(__file__).parent
SHAPES = HERE / "shapes.json"
WARM_UP = 2  # steps: the first fills the pipeline and warms kernels up

JOB = """
import meshcee, torch
from meshcee._demo_job import GPT, Characters, loss, standard_library

torch.manual_seed(0)
job = meshcee.Job(
    name="prediction",
    model=GPT(width=64, heads=4, layers=8, dropout={dropout}),
    loss=loss,
    data=Characters(standard_library(60_000)),
    optimizer=meshcee.Optimizer("AdamW", lr=1e-3),
    batch_size=16,
    micro_batch_size=2,
    steps={steps},
    codec="{codec}",
)
"""
SHARED = """
import meshcee, torch
from torch import nn

class Lopsided(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.heavy = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(512, 64))

    def forward(self, x):
        h = self.first(x)
        return self.last((h + self.heavy(h)).mean(1))

torch.manual_seed(0)
job = meshcee.Job(
    name="prediction",
    model=Lopsided(),
    loss=nn.functional.cross_entropy,
    data=[(torch.randn(64, 64), i % 8) for i in range(64)],
    optimizer=meshcee.Optimizer("AdamW", lr=1e-3),
    batch_size=64,
    micro_batch_size=16,
    steps={steps},
    codec="{codec}",
    cuts=("first", "heavy"),
    groups=True,
)
"""


def shape(name: str, job_text: str) -> dict[str, Any]:
    """One shape, planned, trained and compared."""
    with tempfile.TemporaryDirectory(prefix="meshcee-prediction-") as folder:
        job = Path(folder) / "job.py"
        job.write_text(job_text)
        command = [sys.executable, "-m", "meshcee", "local", "--shape", f"{SHAPES}:{name}", "--job", str(job), "--json"]
        environment = {**os.environ, "MESHCEE_HOME": str(Path(folder) / "home"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        raise SystemExit(f"{name}: `meshcee local` ended with {done.returncode}: {done.stdout[-500:]}")
    plan = next(line["plan"] for line in lines if "plan" in line)
    names = next(line["names"] for line in lines if "names" in line)
    notes = [line["note"] for line in lines if "note" in line]
    taken_s = [line["report"]["step_s"] for line in lines if "report" in line][WARM_UP:]
    measured_s, expected_s = statistics.median(taken_s), plan["predicted"]["step_s"]
    stages = plan["pipelines"][0]["stages"]
    return {
        "shape": name,
        "stages": [
            [
                " + ".join(names[m["peer"]] + f" x{m['samples']}" * (len(s["members"]) > 1) for m in s["members"]),
                *s["blocks"],
            ]
            for s in stages
        ],
        "codecs": [s["codec_out"] for s in stages[:-1]],
        "windows": [s["window"] for s in stages],
        "left_out": {names.get(x["peer"], x["peer"]): x["why"] for x in plan["left_out"]},
        "expected_s": expected_s,
        "measured_s": measured_s,
        "measured_over_expected": measured_s / expected_s,
        "fastest_s": min(taken_s),
        "slowest_s": max(taken_s),
        "notes": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one shape")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--dropout", type=float, default=0.0, help="more than 0: the generator's state travels too")
    parser.add_argument("--codec", default="none", help="of the job; auto: 16 bits between regions")
    parser.add_argument(
        "--groups", action="store_true", help="a job whose stages may be shared, and for which that pays"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of table rows")
    options = parser.parse_args()
    known = [entry["name"] for entry in json.loads(SHAPES.read_text())["testbeds"]]
    report: dict[str, Any] = {"machine": machine(), "shapes": []}
    for name in [options.only] if options.only else known:
        text = SHARED if options.groups else JOB
        found = shape(name, text.format(steps=options.steps, dropout=options.dropout, codec=options.codec))
        report["shapes"].append(found)
        if not options.json:
            cut = ", ".join(f"{peer} {first}..{end - 1}" for peer, first, end in found["stages"])
            figures = (f"{found[k]:.3f}" for k in ("expected_s", "measured_s", "measured_over_expected"))
            print(row(name, cut, *figures, f"{found['fastest_s']:.3f} to {found['slowest_s']:.3f}"), flush=True)
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
