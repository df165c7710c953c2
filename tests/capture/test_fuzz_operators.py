"""benchmarks/fuzz_operators.py sees what it is there to see: reads beyond a tensor, memory that nobody wrote, calls without end."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.fuzz_operators import Fuzzer, Memory, Spec
from meshcee.capture.graph.operators import ALLOWED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made by Linux")
ROOT = Path(__file__).parents[2]
NUMBERS = Spec((40,), torch.float32, (0,))


@pytest.mark.cases(2)
@pytest.mark.parametrize(("low", "place"), [(False, 40), (True, -1)], ids=["behind", "before"])
def test_a_read_beyond_an_input_ends_the_process(low: bool, place: int) -> None:
    script = f"""
import ctypes, torch
from benchmarks.fuzz_operators import Memory
tensor = Memory().take(40, torch.uint8, low={low})
print(ctypes.string_at(tensor.data_ptr(), 40) == bytes(40), flush=True)
ctypes.string_at(tensor.data_ptr() + {place}, 1)
print("read")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["True"]
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("call", "answer"),
    [(torch.relu, "value"), (lambda x: torch.empty(40), "unwritten"), (lambda x: x[torch.tensor(99)], "error")],
    ids=["relu", "empty", "index"],
)
def test_memory_that_nobody_wrote_is_another_answer(call: Callable[[torch.Tensor], torch.Tensor], answer: str) -> None:
    fuzzer = Fuzzer("aten.relu.default", 1)
    fuzzer.operator = dataclasses.replace(fuzzer.operator, call=call)
    assert fuzzer.call([NUMBERS], 3, Memory()) == answer


def test_most_of_what_is_drawn_for_a_sum_passes_and_nothing_that_a_peer_refuses() -> None:
    fuzzer = Fuzzer("aten.add.Tensor", 1)
    drawn = [fuzzer.draw() for _ in range(200)]
    assert sum(map(fuzzer.passes, drawn)) > 40
    assert not Fuzzer("aten.diff.default", 1).passes([NUMBERS, 10**8, -1, None, None])


@pytest.mark.slow
def test_nothing_but_values_and_errors_comes_of_a_short_fuzz(tmp_path: Path) -> None:
    """A few seconds of all that the list has; docs/extend.md says how to run it for longer."""
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/fuzz_operators.py", "--minutes", "0.3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    found = json.loads(out.read_text())
    assert found["calls"].keys() == ALLOWED["overloads"].keys()
    assert sum(count for calls in found["calls"].values() for count in calls.values()) > 100
