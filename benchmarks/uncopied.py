"""`meshcee`, but whoever owns a job asks for no copies of its state while it trains: what replication costs is the difference."""

from peers.cli.main import main
from peers.state.policy import Cadence


def never(cadence: Cadence, next_step: int, now_s: float) -> bool:
    return False


if __name__ == "__main__":
    Cadence.is_due = never  # type: ignore[method-assign]
    main()
