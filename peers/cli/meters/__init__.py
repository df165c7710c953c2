"""What machines read of a peer and of a run: `/metrics` for Prometheus, and `/health`.

Everything is read when it is asked for, on the event loop, so nothing of a run waits for it. `prometheus-client` is wanted by
`mesh` and `run` alone, which are imported when it is there.
"""

from peers.cli.meters.address import address_of
from peers.cli.meters.meters import Meters, metered

__all__ = ["Meters", "address_of", "metered"]
