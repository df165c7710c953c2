"""A peer that speaks the next protocol version."""

from peers.cli import main as cli
from peers.transport import handshake

if __name__ == "__main__":
    for side in (handshake.dial, handshake.accept):
        side.__kwdefaults__["version"] = handshake.PROTOCOL_VERSION + 1
    cli.main()
