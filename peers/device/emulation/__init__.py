"""The devices and links of a testbed on one machine: paced compute (pace), links with latency and bandwidth (shape)."""

from peers.device.emulation.pace import device_names, emulate, paced
from peers.device.emulation.shape import Shape, ShapedTransport

__all__ = ["Shape", "ShapedTransport", "device_names", "emulate", "paced"]
