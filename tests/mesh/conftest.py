"""What tests with real processes share: five peers for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mesh.harness import Peers, peers


@pytest.fixture(scope="session")
def five_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """For jobs that leave the peers as they were; a test that kills or sabotages a peer starts its own."""
    with peers(tmp_path_factory.mktemp("five-peers"), 5) as found:
        yield found
