"""Streams of a peer that end in another process of its machine, which has no network and no keys.

`Passing` is the side with the network; `Bridged` is the transport of the other one. Between them are a `Channel` for small
messages and a pair of sockets for each stream.
"""

from peers.transport.bridge.bridged import GIVES, Bridged
from peers.transport.bridge.channel import Channel, pair
from peers.transport.bridge.passing import TAKES, Passing

__all__ = ["GIVES", "TAKES", "Bridged", "Channel", "Passing", "pair"]
