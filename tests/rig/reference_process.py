"""The eager reference as a process of its own, which knows nothing of capture or mesh: cases in, results out, line by line.

The idea: whatever the test's process has imported or set, the numbers that it compares with come from a process that has
torch, the models and `meshcee.seeded`, and says at its end of each case which other parts of the product it has loaded.

    in   {"case": {...}, "out": FILE.safetensors}
    out  {"losses": [[...], ...], "loaded": [...]}      one loss a micro-batch; the final state lies in FILE
"""

from __future__ import annotations

import json
import sys

import safetensors.torch
import torch

from tests.rig.matrix import job_of
from tests.rig.reference import reference

ALLOWED = {"meshcee", "meshcee._demo_job"}
ALLOWED |= {f"meshcee.{name}" for name in ("errors", "events", "fields", "job", "plan", "user_code")}
# The order of samples, and what a Job names.
ROOMS = ("meshcee.sampling", "meshcee.reach", "meshcee.figures", "meshcee.files", "meshcee.optim")


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        found = reference(job_of(asked["case"]))
        state = {name: tensor.clone().contiguous() for name, tensor in found.state.items()}
        safetensors.torch.save_file(state, asked["out"])
        ours = {name for name in sys.modules if name.split(".")[0] in ("meshcee", "dht", "peers")}
        losses = [[float(loss) for loss in step] for step in found.losses]
        print(
            json.dumps({"losses": losses, "loaded": sorted(m for m in ours - ALLOWED if not m.startswith(ROOMS))}),
            flush=True,
        )


if __name__ == "__main__":
    main()
