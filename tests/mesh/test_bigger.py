"""A model whose parameters no peer could hold, on real peers; its owner holds a small part of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_larger_than_any_peer_trains_and_its_owner_stays_under_a_quarter_of_it() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bigger.py"), "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=1700)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameter_bytes"] > 1 << 30  # what each of the peers offers
    assert found["equal"]
    assert found["steps"] == 2
    assert found["owner_growth_bytes"] < found["parameter_bytes"] / 4
