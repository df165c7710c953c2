"""A peer's device as a process of its own: it holds the stages and computes; the peer keeps identity, keys and network."""

from peers.node.device_process.process import DeviceProcess

__all__ = ["DeviceProcess"]
