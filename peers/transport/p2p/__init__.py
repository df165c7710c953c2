"""The transport over hivemind's libp2p daemon: started, watched, and never left behind."""

from peers.transport.direct import Direct
from peers.transport.p2p.interfaces import has_ipv6_alone, reserve
from peers.transport.p2p.libp2p import Libp2pTransport, RelayedTransport
from peers.transport.p2p.p2pd import P2PDaemon

__all__ = ["Direct", "Libp2pTransport", "P2PDaemon", "RelayedTransport", "has_ipv6_alone", "reserve"]
