"""Writes that search for no nodes: whom they reach, and when they reach nobody else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dht.records import topic
from tests.dht.test_store import KEY, TTL_S, one_peer, over_p2pd


async def test_a_quick_write_goes_where_the_last_one_went_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_p2pd(tmp_path, 3) as (a, b, c):
        asked, peers, node = list[str](), topic("peers", KEY), a.store.node  # type: ignore[attr-defined]
        for name, call in (("call_find", node.protocol.call_find), ("call_store", node.protocol.call_store)):

            def counted(*args: Any, name: str = name, call: Any = call, **more: Any) -> Any:
                asked.append(name)
                return call(*args, **more)

            monkeypatch.setattr(node.protocol, name, counted)

        async def put(expires_at: float, *, quick: bool = True) -> tuple[int, int]:
            """How often it searches, and writes elsewhere."""
            asked.clear()
            assert await a.store.put(peers, a.identity.peer_id, a.sealed("a", expires_at), expires_at, quick=quick)
            return asked.count("call_find"), asked.count("call_store")

        now = time.time() + TTL_S
        assert (await put(now))[0] > 0, "there was no last one"
        assert await put(now + 1) == (0, 2)
        async with one_peer(tmp_path, "new", [a.address]) as (new, _, _):
            assert await put(now + 2) == (0, 3), "who was met since is as near"
            for reader in (b, c, new):
                found = await reader.store.get(peers, quick=True)
                assert found[a.identity.peer_id][1] == now + 2
            assert (await put(now + 3, quick=False))[0] > 0
        assert await put(now + 4) == (0, 3), "nobody has missed it yet"
        assert await put(now + 5) == (0, 2)
