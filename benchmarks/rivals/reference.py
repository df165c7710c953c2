"""The plain loop, not paced: the losses that every system must reproduce. `python -m benchmarks.rivals.reference STEPS`"""

from __future__ import annotations

import json
import sys

from benchmarks.rivals.job import build, job, loss
from benchmarks.rivals.worker import samples_of


def losses(steps: int) -> list[float]:
    """The mean loss of each step's samples, before its update."""
    model = build()
    optimizer = job.optimizer.build(dict(model.named_parameters()))
    found = []
    for step in range(steps):
        x, y = samples_of(step)
        value = loss(model(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


if __name__ == "__main__":
    print(json.dumps(losses(int(sys.argv[1]))))
