"""Types that several threads read for the first time, at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshcee.errors import ProtocolError
from meshcee.fields import read, unpack

ROOT = Path(__file__).parents[1]

READERS = """
import sys
import threading
from dataclasses import make_dataclass

from meshcee.fields import Count, read

sys.setswitchinterval(1e-6)
one = {f"part{k}": k for k in range(8)}
middle = {"first": one, "more": [one], "named": {"it": one}}
whole = {"middle": middle, "others": [middle]}
for number in range(300):
    part = make_dataclass(f"Part{number}", [(name, Count) for name in one])
    fields = [("first", part), ("more", list[part]), ("named", dict[str, part])]
    some = make_dataclass(f"Some{number}", fields)
    all_ = make_dataclass(f"All{number}", [("middle", some), ("others", tuple[some, ...])])
    together = threading.Barrier(4)
    found = []

    def both():
        together.wait()
        found.append((read(whole, all_, "it").middle.first.part7, read(one, part, "it").part7))

    threads = [threading.Thread(target=both) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(7, 7)] * 4
print("read")
"""


def test_threads_that_meet_a_type_first_read_it_alike() -> None:
    """Without a lock msgspec ends the process there (SIGSEGV)."""
    ended = subprocess.run([sys.executable, "-c", READERS], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout) == (0, "read\n"), ended.stderr


@pytest.mark.parametrize("depth", [65, 700, 1200])
def test_what_is_nested_deep_is_refused_and_no_walk_runs_out_of_stack(depth: int) -> None:
    deep = b"\x91" * depth + b"\xc0"
    with pytest.raises(ProtocolError):
        unpack(deep, 2000, "it")
    nested: Any = None
    for _ in range(depth):
        nested = {"more": nested}
    if depth > 600:  # of JSON, which has no limit of ours
        with pytest.raises(ProtocolError):
            read(nested, dict[str, Any], "it")


def test_what_is_nested_as_deep_as_any_message_is_read() -> None:
    assert unpack(b"\x91" * 64 + b"\xc0", 2000, "it") is not None
