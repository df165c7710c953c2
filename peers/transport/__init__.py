"""Frames over ordered, authenticated streams between two peers, whatever carries the bytes.

`base` is what others may rely on; `frame` believes nothing; `memory` is the network inside one process.
"""

from peers.transport.base import Buffer, Frame, Stream, StreamClosed, Transport
from peers.transport.handshake import PROTOCOL_VERSION
from peers.transport.memory import MemoryNetwork

__all__ = ["PROTOCOL_VERSION", "Buffer", "Frame", "MemoryNetwork", "Stream", "StreamClosed", "Transport"]
