"""Graphs that are read in the process of the peer itself."""

from __future__ import annotations

import pytest

from meshcee.config import Limits
from meshcee.errors import GraphError
from peers.device.graphs import Graphs
from tests.peers.device.test_worker import graph, lying


@pytest.mark.slow
async def test_a_graph_is_checked_once_for_all_peers_of_a_process_and_a_wrong_one_each_time() -> None:
    given = graph()
    [first], [second] = [await Graphs(Limits()).read([given]) for _ in range(2)]
    assert first is second
    for _ in range(2):
        with pytest.raises(GraphError):
            await Graphs(Limits()).read([lying(given)])
    with pytest.raises(GraphError, match="larger"):
        await Graphs(Limits(graph_bytes=100)).read([given])
