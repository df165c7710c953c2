"""`python -m tests.lab.planted FAULTS COMMAND...`: `meshcee COMMAND` on a machine with these faults, for test_doctor.py.

FAULTS is JSON: what is broken, and how. Each is planted below the command, which knows nothing of it. What a device tells is
planted in the processes that the command starts, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path

CLONE_NEWUTS = 0x04000000
OF_DEVICES = ("torch", "kernel")


def plant(faults: dict[str, object]) -> None:
    if "cores" in faults:  # else every namespace of this machine were one host
        os.sched_setaffinity(0, faults["cores"])  # type: ignore[arg-type]
    if "host" in faults:  # a name that no file holds, and no server is reached from a namespace of the lab
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname(str(faults["host"]))
    if "memory" in faults:
        resource.setrlimit(resource.RLIMIT_AS, (int(str(faults["memory"])),) * 2)
    if "clock_s" in faults:
        right, off_s = time.time, float(str(faults["clock_s"]))
        time.time = lambda: right() + off_s
    if "torch" in faults:
        import torch

        torch.__version__ = str(faults["torch"])  # type: ignore[assignment]
    if "kernel" in faults:
        from peers.device import kernels

        kernels.KERNELS = {**kernels.KERNELS, str(faults["kernel"]): lambda draw: draw(8)}  # type: ignore[misc]
    if "probes_once" in faults:  # what its record says of a link stays as it was
        from peers.measure import measuring

        measuring.PROBE_EVERY_S = 1e9  # type: ignore[misc]


def plant_below(faults: dict[str, object]) -> None:
    """In each Python that this process starts from now on."""
    from peers.device import this_host

    root = str(Path(__file__).resolve().parents[2])
    lines = "import sys", f"sys.path.insert(1, {root!r})", "from tests.lab.planted import plant", f"plant({faults!r})"
    this_host.START = "\n".join(lines).replace("{", "{{").replace("}", "}}") + this_host.START  # type: ignore[misc]


if __name__ == "__main__":
    found = json.loads(sys.argv[1])
    plant(found)
    if of_devices := {name: fault for name, fault in found.items() if name in OF_DEVICES}:
        plant_below(of_devices)
    from peers.cli.main import main

    main(sys.argv[2:])
