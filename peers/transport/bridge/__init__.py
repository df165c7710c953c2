"""Streams of a peer that end in another process of its machine, which has no network and no keys.

`Passing` is the side with the network; `Bridged` is the transport of the other one. Between them are a `Channel` for small
messages and a pair of sockets for each stream.
"""

from peers.transport.bridge.bridged import Bridged
from peers.transport.bridge.channel import Channel
from peers.transport.bridge.passing import Passing

__all__ = ["Bridged", "Channel", "Passing"]
