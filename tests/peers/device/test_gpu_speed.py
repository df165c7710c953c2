"""What stages cost on a GPU; the same programs are tried on the CPU, where they must only agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
NO_GPU = "torch finds no CUDA device here; on a machine with one this times GPT-2 medium in bf16 there"


def measured(what: str, job: str, device: str, turns: int) -> dict[str, Any]:
    """The benchmark ends with an error if losses differ from the plain loop's."""
    command = [sys.executable, str(ROOT / "benchmarks/overhead.py"), "--json", "--only", what, "--job", job]
    done = subprocess.run(
        [*command, "--device", device, "--turns", str(turns)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout)[what]
    return dict(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_one_stage_of_gpt2_medium_costs_no_more_than_3_percent() -> None:
    found = measured("executor", "gpt2-medium", "cuda:0", 8)
    assert found["ratio"] >= 1 / 1.03, found


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_two_stages_on_one_gpu_cost_no_more_than_10_percent_over_their_sum() -> None:
    found = measured("stages", "gpt2-medium", "cuda:0", 8)
    assert found["ratio"] <= 1.10, found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["executor", "stages"])
def test_the_same_programs_run_on_a_cpu(what: str) -> None:
    assert measured(what, "gpt2", "cpu", 1)["ratio"] > 0
