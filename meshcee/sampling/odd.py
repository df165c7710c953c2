"""Of the samples that are looked at before the first step: how they are called, and the one that is unlike all others."""

from __future__ import annotations

import contextlib
from collections import Counter

from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.sampling.source import inputs_of_one, probes

__all__ = ["names_of_probes", "odd_one"]

LEAST = 3  # samples: of two, either may be the odd one


def names_of_probes(job: Job, count: int) -> list[str]:
    """How the samples that `probes` reads are called in errors."""
    if job.streams:
        return [f"sample {i + 1} of data" for i in range(count)]
    return [f"data[{i * len(job.data) // count}]" for i in range(count)]


def odd_one(job: Job, count: int) -> str:
    """The sample that has another type or shape than all others have, in words; "" where there is none. With a `collate` shapes may
    differ."""
    forms: dict[str, frozenset[str]] = {}
    with contextlib.suppress(MeshceeError):
        for name, (sample, _) in zip(names_of_probes(job, count), probes(job, count)):
            inputs = inputs_of_one(job, sample)
            shapes = {n: "" if job.collate else f" {list(t.shape[1:])}" for n, t in inputs.items()}
            forms[name] = frozenset(f"{n} {str(t.dtype)[6:]}{shapes[n]}" for n, t in inputs.items())
    if len(forms) < LEAST or len(counted := Counter(forms.values()).most_common()) != 2 or counted[1][1] > 1:
        return ""
    (usual, _), (odd, _) = counted
    name = next(name for name, form in forms.items() if form == odd)
    has, have = (", ".join(sorted(a - b)) or "less" for a, b in ((odd, usual), (usual, odd)))
    return f"{name} is unlike all other samples that were looked at: it has {has}, and they have {have}"
