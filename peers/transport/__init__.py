"""Frames over ordered, authenticated streams between two peers, whatever carries the bytes.

`base` is what others may rely on; `frame` believes nothing; `memory` is the network inside one process, `shape` an emulated one.
"""

from peers.transport.base import Buffer, Frame, Stream, StreamClosed, Transport
from peers.transport.direct import Direct
from peers.transport.handshake import PROTOCOL_VERSION
from peers.transport.memory import MemoryNetwork
from peers.transport.shape import Shape, ShapedTransport

__all__ = [
    "PROTOCOL_VERSION",
    "Buffer",
    "Direct",
    "Frame",
    "MemoryNetwork",
    "Shape",
    "ShapedTransport",
    "Stream",
    "StreamClosed",
    "Transport",
]
