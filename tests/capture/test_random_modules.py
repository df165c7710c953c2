"""Random modules with random cuts train what the plain loop trains, or are refused; none trains anything else.

`MODULES=2000 pytest tests/capture/test_random_modules.py` runs as many examples as it says.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from meshcee.errors import CaptureError
from tests.capture.exactness import difference, job_of
from tests.capture.random_modules import Module, Step, modules
from tests.rig.reference import reference

EXAMPLES = int(os.environ.get("MODULES", "12"))


WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # which would take minutes


@settings(max_examples=EXAMPLES, deadline=None, phases=WITHOUT_SHRINKING, suppress_health_check=list(HealthCheck))
@given(
    modules(),
    st.sampled_from(["fused", "split", "late"]),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["fp32", "bf16-mixed"]),
)
def test_no_module_trains_anything_else(steps: tuple[Step, ...], order: str, cuts: int, precision: str) -> None:
    torch.manual_seed(1)
    job = job_of(Module(steps), precision=precision)
    try:
        reference(job, 1)
    except RuntimeError as error:  # of operands of two types, where autocast is on
        assert precision != "fp32"
        event(f"torch itself: {error}"[:120])
        return
    try:
        found = difference(job, (order,), cuts)
    except CaptureError as refusal:
        event(f"refused: {refusal}"[:120])
        return
    event("equal" if not found else "unequal")
    assert found == ""
