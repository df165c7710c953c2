"""One thread per device is the only door to it (`Compute`); copies of a GPU, the machine around a peer, what a device can do."""

from peers.device.compute import Compute, Pace, one_thread
from peers.device.graphs import Graphs
from peers.device.kernels import fingerprints
from peers.device.profile import kernel_class, measure_device, resolve_device
from peers.device.this_host import alters_kernels, capability, cores, host_id, own_python, quiet, take_threads, versions

__all__ = [
    "Compute",
    "Graphs",
    "Pace",
    "alters_kernels",
    "capability",
    "cores",
    "fingerprints",
    "host_id",
    "kernel_class",
    "measure_device",
    "one_thread",
    "own_python",
    "quiet",
    "resolve_device",
    "take_threads",
    "versions",
]
