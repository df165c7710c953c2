"""`python -m benchmarks.astray FILE ARGUMENTS...`: meshcee on a machine whose wall clock is off by the seconds that FILE says now.

The idea: `time.time` alone is another one, before anything of ours is imported. Monotonic clocks, the times of files, those in
logs, and whatever processes this one starts are right. Who strikes writes to the file, which both have in memory.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["SECONDS", "set_clock", "wrong_clock"]

SECONDS = struct.Struct("=d")


def set_clock(file: Path, off_s: float) -> None:
    """From now on the clock of whoever runs with this file is so far off."""
    with file.open("r+b" if file.exists() else "wb") as writer:
        writer.write(SECONDS.pack(off_s))


def wrong_clock(file: Path) -> Callable[[], float]:
    """The time of day, off by what the file says whenever it is asked."""
    right = time.time
    with file.open("rb") as reader:
        off = mmap.mmap(reader.fileno(), SECONDS.size, access=mmap.ACCESS_READ)
    return lambda: float(right() + SECONDS.unpack_from(off)[0])


def main() -> None:
    file, *arguments = sys.argv[1:]
    clock = time.time = wrong_clock(Path(file))
    time.time_ns = lambda: int(clock() * 1e9)
    sys.argv = ["meshcee", *arguments]
    runpy.run_module("meshcee", run_name="__main__")


if __name__ == "__main__":
    main()
