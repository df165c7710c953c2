"""What a device is and how fast: told to the mesh by whoever lends it.

The idea: measured, never advertised by hand. A device is timed on a small transformer-like mix of work.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from meshcee.errors import NotNowError, UsageError
from meshcee.figures import DeviceProfile
from meshcee.figures.kernels import KernelClass
from meshcee.files import limits
from peers.device.compute import Compute
from peers.device.kernels import fingerprints
from peers.device.this_host import capability, cores, quiet, versions

__all__ = ["kernel_class", "measure_device", "resolve_device"]

SIZES_OF_A_CPU, SIZES_OF_A_GPU, LONG_S = (256,), (1024, 2048, 4096), 0.005
MEMORY_SHARE = 0.5  # of what is free on a CPU: the rest is the machine's own


def resolve_device(wanted: str) -> str:
    """ "auto" becomes the best device at hand; a device that torch does not know is a UsageError.

    One whose driver is not ready is a NotNowError.
    """
    if wanted == "auto":
        if torch.cuda.is_available():
            return "cuda:0"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    device = None
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        never = device is None or isinstance(error, AssertionError | NotImplementedError)  # torch is built without it
        why = f": {str(error).splitlines()[0]}" if device is not None else ""
        raise (UsageError if never else NotNowError)(
            f"device {wanted!r} is not usable here{why}; a device is auto, cpu, cuda:N or mps, so try cpu"
        ) from error
    return str(device)


def _device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    return max(1, int(limits.free_bytes() * MEMORY_SHARE))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return device.type


def kernel_class(device: torch.device, threads: int) -> KernelClass:
    """Of a device of this machine, as `class_of` says it of its profile; `threads` of a CPU."""
    build = str(torch.__version__)
    if device.type == "cpu":
        return KernelClass("cpu", capability(), build, threads)
    return KernelClass(device.type, _device_name(device), build, 0)


def _timed_speed(device: torch.device) -> float:
    """FLOP/s of a product, an addition and a nonlinearity.

    A CPU is timed at a size that fits every one. A GPU's grows until its kernels take the time, and not their starts.
    """
    found = 0.0
    for size in SIZES_OF_A_CPU if device.type == "cpu" else SIZES_OF_A_GPU:
        found = max(found, speed := _speed_at(size, device))
        if 2 * size**3 / speed > LONG_S:
            break
    return found


def _speed_at(size: int, device: torch.device) -> float:
    """The most of several tries: whatever disturbs one makes it slower."""
    own = torch.Generator(device).manual_seed(0)  # members in this process may be drawing from the default one
    a = torch.randn(size, size, generator=own, device=device)
    b = torch.randn(size, size, generator=own, device=device)
    speeds = []
    for attempt in range(12):
        start_s = time.perf_counter()
        c = torch.nn.functional.gelu(a @ b) + a
        c.flatten()[0].item()  # waits for the device
        if attempt >= 2:  # warmed up
            speeds.append(2 * size**3 / (time.perf_counter() - start_s))
    return max(speeds)


async def measure_device(
    compute: Compute, memory_bytes: int | None = None, *, host: str = "", threads_said: bool = False
) -> DeviceProfile:
    """Profile this device, when no other peer of its host measures; an emulated one reports the speed that it is paced to."""
    async with quiet() if host else nullcontext():
        speed = await compute.run(_timed_speed, compute.device)
        told = await compute.run(fingerprints, compute.device)
        of_cpu = await compute.run(capability)  # where it computes
    if compute.pace is not None:
        speed = min(speed, compute.pace.claimed_flops_per_s or compute.pace.speed_flops_per_s)
    return DeviceProfile(
        kind=compute.device.type,
        name=_device_name(compute.device),
        memory_bytes=memory_bytes if memory_bytes is not None else _device_memory(compute.device),
        speed_flops_per_s=speed,
        threads=torch.get_num_threads(),
        capability=of_cpu if compute.device.type == "cpu" else "",
        versions=versions(),
        host=host,
        cores=cores(),
        threads_said=threads_said,
        memory_said=memory_bytes is not None,
        fingerprints=told,
    )
