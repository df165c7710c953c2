"""One thread per device is the only door to it (`Compute`); copies of a GPU, the machine around a peer, emulated devices."""

from peers.device.compute import Compute, Pace, one_thread
from peers.device.emulation import device_names, emulate, paced
from peers.device.this_host import capability, cores, host_id, quiet, versions

__all__ = [
    "Compute",
    "Pace",
    "capability",
    "cores",
    "device_names",
    "emulate",
    "host_id",
    "one_thread",
    "paced",
    "quiet",
    "versions",
]
