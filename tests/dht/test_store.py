"""One suite for every Store: in one process's memory, and over real p2pd processes on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from dht.control import P2PDaemonError, PeerID, at_once
from dht.directory import Directory
from dht.kademlia import BELIEVED, MAX_KEYS, MAX_WRONG, KademliaStore, node_id_of
from dht.membership import Members, RevokedList, certify
from dht.records import PeerRecord, place, seal, topic
from dht.signing import Identity, MeshKey
from dht.store import MemoryStore, SharedMemory, Store
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError
from peers.transport.p2p.p2pd import P2PDaemon
from tests.rig.virtual_time import virtual_time

KEY = MeshKey.generate()
QUICK = Timeouts(dial_s=3.0, join_s=6.0, shutdown_s=1.0)
TTL_S = 30.0


class Node:
    """A peer of the suite's mesh: it can seal records, and has a store."""

    def __init__(self, identity: Identity, store: Store, address: str = "") -> None:
        self.identity = identity
        self.store = store
        self.address = address or f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"

    async def put(self, name: str, expires_at: float, key: MeshKey = KEY) -> bool:
        return await self.put_bytes(self.sealed(name, expires_at, key), expires_at)

    def sealed(self, name: str, expires_at: float, key: MeshKey = KEY) -> bytes:
        record = PeerRecord(self.identity.peer_id, expires_at - TTL_S, name)
        return seal(record, self.identity, key, expires_at)

    async def put_bytes(self, data: bytes, expires_at: float, subkey: str | None = None, kind: str = "peers") -> bool:
        return await self.store.put(topic(kind, KEY), subkey or self.identity.peer_id, data, expires_at)

    async def get(self, kind: str = "peers") -> dict[str, tuple[bytes, float]]:
        return dict(await self.store.get(topic(kind, KEY)))


@asynccontextmanager
async def in_memory(folder: Path, count: int) -> AsyncIterator[list[Node]]:
    shared = SharedMemory()
    yield [Node(Identity.generate(), MemoryStore(shared)) for _ in range(count)]


@asynccontextmanager
async def one_peer(
    folder: Path,
    name: str,
    seeds: Sequence[str] = (),
    *,
    key: MeshKey = KEY,
    client_mode: bool = False,
    clock: Callable[[], float] = time.time,
    others: Sequence[str] = (),
    members: Members | None = None,
) -> AsyncIterator[tuple[Node, P2PDaemon, KademliaStore]]:
    identity, joined = Identity.load_or_create(folder / f"{name}.key"), (*seeds, *others) if seeds else ()
    said: Any = {"identity": identity, "mesh_key": key, "client_mode": client_mode, "timeouts": QUICK}
    said |= {"clock": clock, "others": others, "members": members}
    async with (
        P2PDaemon(identity, listen=["127.0.0.1:0"], seeds=joined, timeouts=QUICK) as daemon,
        KademliaStore(daemon.p2p, seeds, **said) as store,
    ):
        daemon.on_restart(store.rebind)
        yield Node(identity, store, daemon.addresses[0]), daemon, store


@asynccontextmanager
async def over_p2pd(folder: Path, count: int) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for i in range(count):
            seeds = [nodes[0].address] if nodes else []
            nodes.append((await stack.enter_async_context(one_peer(folder, str(i), seeds)))[0])
        yield nodes


@pytest.fixture(params=[in_memory, over_p2pd])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Node]]:
    async with request.param(tmp_path, 3) as found:
        yield found


async def test_entries_of_many_peers_lie_side_by_side_and_are_seen_by_all(nodes: list[Node]) -> None:
    expires_at = time.time() + TTL_S
    assert await nodes[0].get() == {}
    for node in nodes:
        assert await node.put("first", expires_at)
    wanted = {n.identity.peer_id: (n.sealed("first", expires_at), expires_at) for n in nodes}
    for node in nodes:
        assert await node.get() == wanted
        assert await node.get("lease") == {}


async def test_the_value_that_expires_later_wins_whenever_it_arrives(nodes: list[Node]) -> None:
    a, b, _ = nodes
    late, early = time.time() + TTL_S, time.time() + TTL_S / 2
    assert await a.put("late", late)
    assert not await a.put("early", early)
    assert (await b.get())[a.identity.peer_id] == (a.sealed("late", late), late)
    assert await a.put("later", late + 1)
    assert (await b.get())[a.identity.peer_id] == (a.sealed("later", late + 1), late + 1)


async def test_an_entry_dated_ahead_hides_none_that_is_not(nodes: list[Node]) -> None:
    """Its writer's clock ran ahead, and is right again."""
    a, b, c = nodes
    right = time.time() + TTL_S
    for node in nodes:
        await node.put("ahead", right + 1000)
    for node in (a, b):
        assert await node.put("right", right)
        assert (await c.get())[node.identity.peer_id] == (node.sealed("right", right), right)


async def test_an_entry_is_gone_when_its_time_is_over(nodes: list[Node]) -> None:
    a, b, _ = nodes
    assert not await a.put("past", time.time() - 1)
    soon = time.time() + 1.0
    assert await a.put("short", soon)
    assert a.identity.peer_id in await b.get()
    async with asyncio.timeout(10):
        while await b.get():  # noqa: ASYNC110 - the store's clock is the wall's: there is nothing to wait for but time
            await asyncio.sleep(0.05)
    assert time.time() >= soon


async def test_meeting_names_those_who_answer(nodes: list[Node]) -> None:
    a, b, c = nodes
    assert await a.store.meet([b.address, c.address]) == {b.identity.peer_id, c.identity.peer_id}
    assert await a.store.meet([]) == frozenset()


# -- what only a network shows


async def test_what_is_not_in_its_one_right_place_is_refused_everywhere(tmp_path: Path) -> None:
    async with over_p2pd(tmp_path, 2) as (a, b):
        expires_at = time.time() + TTL_S
        good, me = a.sealed("a", expires_at), a.identity.peer_id
        assert await b.put("b", expires_at)
        assert not await a.put_bytes(good, expires_at, subkey=b.identity.peer_id)  # in another's name
        assert not await a.put_bytes(good, expires_at, kind="lease")  # under another key
        assert not await a.put_bytes(good, expires_at + 60)  # to live longer than it was signed for
        assert not await a.put_bytes(a.sealed("a", expires_at, MeshKey.generate()), expires_at)  # of another mesh
        assert not await a.put_bytes(good[:-1] + bytes([good[-1] ^ 1]), expires_at)
        assert not await a.put_bytes(b"x" * 100_000, expires_at)
        assert list(await b.get()) == [b.identity.peer_id]
        assert await a.put_bytes(good, expires_at)
        assert set(await b.get()) == {me, b.identity.peer_id}


async def test_an_entry_that_does_not_hold_hides_none_that_does(tmp_path: Path) -> None:
    """As what one has written who is no member any more, and whose node goes on to hold it."""
    async with (
        one_peer(tmp_path, "a") as (node, _, store),
        one_peer(tmp_path, "b", [node.address], client_mode=True) as (looker, _, _),
    ):
        until = time.time() + TTL_S
        assert await node.put("a", until)
        held = store.node.protocol.storage
        (key,) = held.data
        assert held.store_subkey(key, "nobody", msgpack.packb(b"no record"), until)
        assert (await looker.get()).keys() == {node.identity.peer_id}


async def test_a_plain_value_cannot_hide_the_entries_of_all(tmp_path: Path) -> None:
    """hivemind lets a value without subkey replace a whole dictionary; ours must not."""
    async with one_peer(tmp_path, "a") as (a, _, store):
        now = time.time()
        assert await a.put("a", now + TTL_S)
        assert not await store.node.store(topic("peers", KEY), value=b"hidden", expiration_time=now + 99)
        assert not await store.node.store("other", subkey="x", value=b"unknown key", expiration_time=now + 99)
        assert list(await a.get()) == [a.identity.peer_id]


async def test_a_quick_read_asks_nobody_where_this_peer_is_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        over_p2pd(tmp_path, 2) as (a, b),
        one_peer(tmp_path, "looker", [a.address], client_mode=True) as (_, _, looker),
    ):
        expires_at = time.time() + TTL_S
        assert await a.put("a", expires_at)
        assert await b.put("b", expires_at)
        everybody = await b.get()
        assert set(everybody) == {a.identity.peer_id, b.identity.peer_id}
        asked: list[str] = []
        for name, store in (("b", b.store), ("looker", looker)):
            find = store.node._call_find_with_blacklist  # type: ignore[attr-defined]

            def counted(*args: Any, name: str = name, find: Any = find) -> Any:
                asked.append(name)
                return find(*args)

            monkeypatch.setattr(store.node, "_call_find_with_blacklist", counted)  # type: ignore[attr-defined]
        peers = topic("peers", KEY)
        assert await b.store.get(peers, quick=True) == everybody
        assert asked == []
        assert await looker.get(peers, quick=True) == everybody
        assert asked[0] == "looker"  # it keeps nothing itself
        assert await b.store.get(peers) == everybody
        assert "b" in asked


async def test_who_only_looks_and_has_written_still_reads_what_others_write_later(tmp_path: Path) -> None:
    """It kept its own entry, and quick reads ended there: an owner in line did not see that the job before had ended."""
    async with (
        one_peer(tmp_path, "a") as (a, _, _),
        one_peer(tmp_path, "b", [a.address], client_mode=True) as (b, _, _),
    ):
        until, peers = time.time() + TTL_S, topic("peers", KEY)
        for later_s in (0, 1):
            assert await a.put("a", until + later_s)
            found = await b.store.get(peers, quick=True)
            assert found[a.identity.peer_id][1] == until + later_s
            assert await b.put("b", until + later_s)
            assert (await a.get()).keys() == {a.identity.peer_id, b.identity.peer_id}


async def test_what_a_node_holds_for_others_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.kademlia.MAX_RECORDS", 3)
    async with one_peer(tmp_path, "a") as (a, _, _):
        now = time.time()
        others = [Node(Identity.generate(), a.store) for _ in range(5)]
        assert await others[0].put("ahead", now + 1e9)
        record = PeerRecord(others[0].identity.peer_id, now, "for ever")
        assert not await others[0].put_bytes(seal(record, others[0].identity, KEY, now + 1e9), now + 1e9)
        for i, other in enumerate(others[1:]):
            assert await other.put("x", now + TTL_S + i)
        assert await a.put("a", now + TTL_S)
        assert await a.put("a", now + TTL_S + 0.5)  # what came last is swept with the next
        assert set(await a.get()) == {a.identity.peer_id, *(o.identity.peer_id for o in others[1:3])}


async def test_a_stranger_neither_reads_nor_routes(tmp_path: Path) -> None:
    async with one_peer(tmp_path, "a") as (a, _, store), one_peer(tmp_path, "b", key=MeshKey.generate()) as (b, _, _):
        assert await a.put("a", time.time() + TTL_S)
        assert await b.store.meet([a.address]) == frozenset()
        assert await a.store.meet([b.address]) == frozenset()
        assert await b.get() == {}
        assert not store.node.protocol.routing_table.peer_id_to_uid
        with pytest.raises(
            JoinError, match=r"leads to a peer that keeps the mesh's records.* own network only.*--announce"
        ):
            async with KademliaStore(
                b.store.p2p,  # type: ignore[attr-defined]
                [a.address],
                identity=b.identity,
                mesh_key=MeshKey.generate(),
                client_mode=True,
                timeouts=Timeouts(join_s=1.0, dial_s=1.0),
            ):
                pytest.fail("joined")


def belonging(folder: Path, name: str, root: Identity, for_s: float = 60.0) -> Members:
    """What a peer of this name knows of the mesh, its own certificate first."""
    peer = Identity.load_or_create(folder / f"{name}.key").peer_id
    return Members(root.peer_id, certify(root, b"", root.peer_id, peer, "compute", "", time.time(), for_s))


async def asked(who: KademliaStore, whom: Node) -> Any:
    """What one node answers when it is asked for who is there; None: nothing."""
    from hivemind.dht.routing import DHTID  # once dht.kademlia has imported it: it warns

    return await who.node.protocol.call_find(
        PeerID.from_base58(whom.identity.peer_id), [DHTID.generate(topic("peers", KEY))]
    )


@pytest.mark.parametrize("why", ["never a member", "revoked", "its certificate has ended"])
async def test_who_has_the_mesh_key_alone_neither_reads_nor_routes(tmp_path: Path, why: str) -> None:
    """A former member knows the key for good. So the key opens nothing without a certificate that holds."""
    root = Identity.generate()
    known = {name: belonging(tmp_path, name, root) for name in ("a", "b")}
    known["x"] = Members() if why == "never a member" else belonging(tmp_path, "x", root)
    async with (
        one_peer(tmp_path, "a", members=known["a"]) as (a, _, at_a),
        one_peer(tmp_path, "b", [a.address], members=known["b"]) as (_, _, at_b),
        one_peer(tmp_path, "x", members=known["x"]) as (x, _, at_x),
    ):
        if why != "never a member":
            assert await x.store.meet([a.address]) == {a.identity.peer_id}
            assert await asked(at_x, a) is not None
            assert await asked(at_a, x) is not None
        if why == "revoked":
            for name in ("a", "b"):
                known[name].learn(RevokedList(root.peer_id, time.time(), frozenset([x.identity.peer_id])))
        elif why == "its certificate has ended":
            known["x"].shown = belonging(tmp_path, "x", root, -60.0).shown
        assert await x.store.meet([a.address]) == frozenset()
        assert await a.store.meet([x.address]) == frozenset()
        assert await asked(at_x, a) is None
        assert await asked(at_a, x) is None
        await asyncio.sleep(0)  # a's node then forgets that one
        assert set(at_a.node.protocol.routing_table.uid_to_peer_id) == {at_b.node.node_id}
        assert await asked(at_b, a) is not None


async def test_a_node_cannot_ask_others_by_what_it_was_asked(tmp_path: Path) -> None:
    """A former member may still be asked by who has not heard that it is one."""
    from hivemind.p2p import P2PHandlerError

    async with (
        one_peer(tmp_path, "a") as (a, _, _),
        one_peer(tmp_path, "b", [a.address]) as (b, _, at_b),
        one_peer(tmp_path, "c", [a.address, b.address]) as (_, _, at_c),
    ):
        call, sent = at_c.p2p.call_protobuf_handler, []

        async def noted(peer: Any, name: str, message: Any, answer: Any) -> Any:
            sent.append((name, type(message).FromString(message.SerializeToString()), answer))
            return await call(peer, name, message, answer)

        at_c.p2p.call_protobuf_handler = noted
        assert await asked(at_c, b) is not None
        at_c.p2p.call_protobuf_handler = call
        name, message, answer = sent[-1]
        again = at_b.p2p.call_protobuf_handler
        async with asyncio.timeout(10):
            with pytest.raises(P2PHandlerError):
                await again(PeerID.from_base58(a.identity.peer_id), name, message, answer)
            heard = await call(PeerID.from_base58(b.identity.peer_id), name, message, answer)
        assert heard.results  # the one for whom it was


async def test_a_node_has_one_place_which_its_peer_does_not_choose(tmp_path: Path) -> None:
    """A member that were many nodes, all beside one key, would be every replica of it, and answer what it likes."""
    from hivemind.dht.routing import DHTID  # once dht.kademlia has imported it: it warns
    from hivemind.proto import dht_pb2

    async with (
        one_peer(tmp_path, "a") as (a, _, store),
        one_peer(tmp_path, "b", [a.address]) as (b, _, hostile),
        one_peer(tmp_path, "c", [a.address, b.address]) as (_, _, other),
    ):
        assert await a.put("a", time.time() + TTL_S)
        near = int(DHTID.generate(source=topic("peers", KEY)))
        to_a = hostile.node.protocol.get_stub(PeerID.from_base58(a.identity.peer_id))
        for i in range(30):
            claimed = DHTID(near ^ i)
            await to_a.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=claimed.to_bytes())), timeout=3.0)
        places = set(store.node.protocol.routing_table.uid_to_peer_id)
        assert places == {hostile.node.node_id, other.node.node_id}
        # Nor does anybody believe what it says of the places of others.
        table = hostile.node.protocol.routing_table
        strange = [(DHTID(near ^ i), PeerID.from_base58(b.identity.peer_id)) for i in range(9)]
        table.get_nearest_neighbors = lambda *args, **more: strange
        answer = await other.node.protocol.call_find(PeerID.from_base58(b.identity.peer_id), [DHTID(near)])
        assert [neighbours for _, neighbours in answer.values()] == [{}]


async def test_an_address_that_libp2p_does_not_read_is_not_met(tmp_path: Path) -> None:
    async with one_peer(tmp_path, "a") as (_, _, store):
        for where in ("/ip4/1.2.3.4/udp/1/quic-v1/webtransport", "/dnsaddr/x:y/tcp/1", "/ip6/fe80::1%eth0/tcp/1"):
            assert not await store.meet([f"{where}/p2p/{Identity.generate().peer_id}", f"{where}/p2p/{'z' * 46}"])


async def test_what_one_node_tells_neither_ends_nor_misleads_a_search(tmp_path: Path) -> None:
    """It says that its entries, or none, hold for ever, and names peers beside the key that do not exist."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration

    key = DHTID.generate(source=topic("peers", KEY))
    made_up = sorted((PeerID.from_base58(Identity.generate().peer_id) for _ in range(60)), key=_distance(key))[:20]
    async with (
        one_peer(tmp_path, "a") as (a, _, store),
        one_peer(tmp_path, "b", [a.address]) as (b, _, hostile),
        one_peer(tmp_path, "c", [a.address, b.address]) as (c, _, other),
    ):
        table = hostile.node.protocol.routing_table
        table.get_nearest_neighbors = lambda *args, **more: [(node_id_of(p), p) for p in made_up]
        _, told = (await other.node.protocol.call_find(PeerID.from_base58(b.identity.peer_id), [key]))[key]
        assert set(told) == {node_id_of(p) for p in made_up[:BELIEVED]}
        assert await a.put("a", time.time() + TTL_S)
        assert await c.put("c", time.time() + TTL_S)
        assert set(await a.get()) == set(await c.get()) == {a.identity.peer_id, c.identity.peer_id}
        assert set(store.node.protocol.storage.get(key).value.data) == {a.identity.peer_id, c.identity.peer_id}

        held = DictionaryDHTValue()
        held.latest_expiration_time = float("inf")
        hostile.node.protocol.storage.get = lambda _: ValueWithExpiration(held, float("inf"))
        value, _ = (await other.node.protocol.call_find(PeerID.from_base58(b.identity.peer_id), [key]))[key]
        assert value is None
        until = time.time() + TTL_S
        held.store(b.identity.peer_id, msgpack.packb(b.sealed("b", until)), until)
        held.latest_expiration_time = float("inf")
        value, _ = (await other.node.protocol.call_find(PeerID.from_base58(b.identity.peer_id), [key]))[key]
        assert value.expiration_time == until


def _distance(key: Any) -> Callable[[PeerID], int]:
    return lambda peer: key.xor_distance(node_id_of(peer))


async def test_nobodys_entries_go_into_a_nodes_cache(tmp_path: Path) -> None:
    """They would be its answer in place of all that it stores, for as long as they hold."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2PHandlerError
    from hivemind.proto import dht_pb2

    async with (
        one_peer(tmp_path, "a") as (a, _, _),
        one_peer(tmp_path, "b", [a.address]) as (b, _, hostile),
        one_peer(tmp_path, "o", [a.address], client_mode=True) as (o, _, _),
    ):
        assert await a.put("a", time.time() + TTL_S)
        until = time.time() + 100 * TTL_S
        protocol, key = hostile.node.protocol, DHTID.generate(source=topic("peers", KEY)).to_bytes()
        request = dht_pb2.StoreRequest(
            keys=[key],
            subkeys=[msgpack.packb(b.identity.peer_id)],
            values=[msgpack.packb(b.sealed("b", until))],
            expiration_time=[until],
            in_cache=[True],
            peer=protocol.node_info,
        )
        with pytest.raises(P2PHandlerError):
            await protocol.get_stub(PeerID.from_base58(a.identity.peer_id)).rpc_store(request, timeout=3.0)
        assert a.identity.peer_id in await o.get()


async def test_what_is_told_again_and_again_takes_no_memory(tmp_path: Path) -> None:
    """Lists of the revoked hold for a week, and each peer stores each of them every 40 s."""
    async with one_peer(tmp_path, "a") as (a, _, store):
        assert await a.put("a", until := time.time() + TTL_S)
        for _ in range(50):
            assert not await a.put("a", until)
        (held,) = store.node.protocol.storage.data.values()
        assert len(held.value.expiration_heap) == 1


async def test_one_request_is_for_few_keys_and_few_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key of a request has an answer of its own, and each record a signature that takes time to check."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.p2p import P2PHandlerError
    from hivemind.proto import dht_pb2

    async with one_peer(tmp_path, "a") as (a, _, _), one_peer(tmp_path, "b", [a.address]) as (b, _, hostile):
        expires_at = time.time() + TTL_S
        assert await a.put("a", expires_at)
        protocol, key = hostile.node.protocol, DHTID.generate(source=topic("peers", KEY)).to_bytes()
        to_a = protocol.get_stub(PeerID.from_base58(a.identity.peer_id))

        def find(count: int) -> Any:
            return to_a.rpc_find(dht_pb2.FindRequest(keys=[key] * count, peer=protocol.node_info), timeout=3.0)

        assert len((await find(MAX_KEYS)).results) == MAX_KEYS
        with pytest.raises(P2PHandlerError):
            await find(MAX_KEYS + 1)
        with pytest.raises(P2PHandlerError):  # a list that nobody needs costs time alone
            await to_a.rpc_store(
                dht_pb2.StoreRequest(in_cache=[False] * (MAX_KEYS + 1), peer=protocol.node_info), timeout=3.0
            )

        forged, (kind, _, until, body, signature, shown, _) = (
            DictionaryDHTValue(),
            msgpack.unpackb(b.sealed("b", expires_at)),
        )
        for i in range(3 * MAX_WRONG):
            body_i = body + bytes([i % 256, i // 256])
            covered = msgpack.packb(["meshcee record 2", kind, b.identity.peer_id, until, body_i])
            mac = KEY.mac(covered + signature + shown)
            data = msgpack.packb([kind, b.identity.peer_id, until, body_i, signature, shown, mac])
            forged.store(f"{i}", msgpack.packb(data), expires_at)
        asked: list[bytes] = []
        monkeypatch.setattr("dht.records.verify", lambda peer, data, signature: bool(asked.append(data)))
        request = dht_pb2.StoreRequest(
            keys=[key],
            subkeys=[protocol.IS_DICTIONARY],
            values=[protocol.serializer.dumps(forged)],
            expiration_time=[expires_at],
            in_cache=[False],
            peer=protocol.node_info,
        )
        await to_a.rpc_store(request, timeout=3.0)
        assert 0 < len(asked) <= MAX_WRONG + 1


async def test_two_meshes_become_one_when_a_peer_of_each_meets(tmp_path: Path) -> None:
    """hivemind #624. The two halves have two peers each, and only two of the four meet."""
    async with (
        one_peer(tmp_path, "a") as (a, _, _),
        one_peer(tmp_path, "b", [a.address]) as (b, _, _),
        one_peer(tmp_path, "c") as (c, _, _),
        one_peer(tmp_path, "d", [c.address]) as (d, _, _),
    ):
        expires_at = time.time() + TTL_S
        assert await a.put("a", expires_at)
        assert await d.put("d", expires_at)
        assert set(await b.get()) == {a.identity.peer_id}
        assert set(await c.get()) == {d.identity.peer_id}
        assert await b.store.meet([c.address]) == {c.identity.peer_id}
        both = {a.identity.peer_id, d.identity.peer_id}
        for node in (a, b, c, d):
            await node.put("again", expires_at + 1)
        for node in (a, b, c, d):
            async with asyncio.timeout(10):
                while not both <= set(await node.get()):  # noqa: ASYNC110 - neighbours learn of each other from requests
                    await asyncio.sleep(0.05)


async def test_a_mesh_that_fell_apart_is_put_together_by_its_directories(tmp_path: Path) -> None:
    times = replace(QUICK, record_ttl_s=2.0, announce_every_s=0.5, directory_poll_s=0.2)
    async with one_peer(tmp_path, "a") as (a, _, store), one_peer(tmp_path, "b", [a.address]) as (b, _, other):
        ours, theirs = (Directory(n.store, n.identity, KEY, timeouts=times, limits=Limits()) for n in (a, b))
        async with asyncio.TaskGroup() as group, asyncio.timeout(40):
            for node, directory in ((a, ours), (b, theirs)):
                await directory.publish(PeerRecord(node.identity.peer_id, 0.0, "x", (node.address,)))
            tasks = [group.create_task(d.announce_forever()) for d in (ours, theirs)]
            tasks += [group.create_task(d.poll_forever()) for d in (ours, theirs)]
            for directory in (ours, theirs):
                await directory.wait_for(lambda d=directory: len(d.peers) == 2)  # type: ignore[misc]
            # Each forgets the other, as one that did not answer, records and all.
            for kademlia, peer in ((store, b), (other, a)):
                peer_id = PeerID.from_base58(peer.identity.peer_id)
                await kademlia.node.protocol.update_routing_table(node_id_of(peer_id), peer_id, responded=False)
                kademlia.node.protocol.storage.clear()
            fallen = [group.create_task(d.wait_for(lambda d=d: len(d.peers) == 1)) for d in (ours, theirs)]
            await asyncio.wait(fallen, return_when=asyncio.FIRST_COMPLETED)  # who sees it first mends it for both
            for directory in (ours, theirs):
                await directory.wait_for(lambda d=directory: len(d.peers) == 2)  # type: ignore[misc]
            for task in (*tasks, *fallen):
                task.cancel()


async def test_one_who_only_looks_reads_and_is_not_asked(tmp_path: Path) -> None:
    async with one_peer(tmp_path, "a") as (a, _, store):
        assert await a.put("a", time.time() + TTL_S)
        async with one_peer(tmp_path, "o", [a.address], client_mode=True) as (o, _, _):
            assert list(await o.get()) == [a.identity.peer_id]
            assert not store.node.protocol.routing_table.peer_id_to_uid
            assert await o.put("o", time.time() + TTL_S)
            assert set(await a.get()) == {a.identity.peer_id, o.identity.peer_id}


@pytest.mark.alone
async def test_records_survive_a_killed_p2pd_and_the_node_goes_on(tmp_path: Path) -> None:
    async with one_peer(tmp_path, "a") as (a, daemon, _), one_peer(tmp_path, "b", [a.address]) as (b, _, _):
        restarted = asyncio.Event()

        async def note(p2p: object) -> None:
            restarted.set()

        daemon.on_restart(note)
        expires_at = time.time() + TTL_S + 2
        assert await a.put("a", expires_at)
        assert a.identity.peer_id in await b.get()
        (child,) = psutil.Process(daemon.pid).children()
        child.kill()
        began_s = time.monotonic()
        await a.get()
        await a.put("meanwhile", expires_at + 1)
        assert time.monotonic() - began_s < 2 * QUICK.dial_s + 1  # bounded, whatever came of it
        async with asyncio.timeout(30):
            await restarted.wait()
            both = {a.identity.peer_id, b.identity.peer_id}
            while set(await a.get()) & set(await b.get()) != both:
                await a.put("back", time.time() + TTL_S + 3)
                await b.put("b", time.time() + TTL_S)
                await asyncio.sleep(0.1)
            assert await a.put("last", last := time.time() + TTL_S + 6)
            assert (await b.get())[a.identity.peer_id][1] == last
        child = psutil.Process(daemon.pid).children()[0]
        child.suspend()  # leaving must be bounded, too, when p2pd says nothing any more
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 12


async def test_others_that_were_known_help_to_join_and_are_not_needed(tmp_path: Path) -> None:
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    async with one_peer(tmp_path, "a", others=[dead]) as (a, _, _):
        expires_at = time.time() + TTL_S
        assert await a.put("here", expires_at)
        async with one_peer(tmp_path, "b", [dead], others=[a.address]) as (b, _, store):
            assert (await b.get())[a.identity.peer_id] == (a.sealed("here", expires_at), expires_at)
            assert store.seeds == (dead,)


@virtual_time
async def test_once_somebody_has_answered_the_others_have_a_moment_more() -> None:
    over: list[float] = []

    async def call(after_s: float, answer: bool) -> bool:
        await asyncio.sleep(after_s)
        over.append(after_s)
        return answer

    loop = asyncio.get_running_loop()
    for enough_s, heard in ((None, [1.0, 2.0, 2.25, 60.0]), (0.5, [1.0, 2.0, 2.25])):
        began_s = loop.time()
        await at_once([call(60.0, True), call(1.0, False), call(2.0, True), call(2.25, True)], enough_s)
        assert over == heard
        assert loop.time() - began_s == pytest.approx(2.5 if enough_s else 60.0)
        over.clear()


async def test_a_clock_that_is_off_is_named_when_joining(tmp_path: Path) -> None:
    async with one_peer(tmp_path, "a") as (a, _, _):
        identity = Identity.load_or_create(tmp_path / "b.key")
        async with P2PDaemon(identity, listen=["127.0.0.1:0"], seeds=[a.address], timeouts=QUICK) as daemon:
            with pytest.raises(JoinError, match="clock is 60 s ahead"):
                async with KademliaStore(
                    daemon.p2p,
                    [a.address],
                    identity=identity,
                    mesh_key=KEY,
                    timeouts=QUICK,
                    clock=lambda: time.time() + 60,
                ):
                    pytest.fail("joined")


async def test_a_node_whose_clock_runs_ahead_hides_nobody(
    tmp_path: Path,
) -> None:
    """It keeps what it was given while it did, another's record as well as its own, and shows it to all who ask."""
    ahead = {"a": 0.0, "b": 0.0}
    clock = {name: lambda name=name: time.time() + ahead[name] for name in ahead}
    async with (
        one_peer(tmp_path, "a", clock=clock["a"]) as (a, _, _),
        one_peer(tmp_path, "b", [a.address], clock=clock["b"]) as (b, _, _),
        one_peer(tmp_path, "c", [a.address]) as (c, _, _),
    ):
        ahead |= {"a": 1000.0, "b": 1000.0}
        for node in (a, b):
            assert await node.put("ahead", time.time() + 1000 + TTL_S)
        assert await c.get() == {}
        for name, node in (("a", a), ("b", b)):  # b holds what is dated ahead, as long as its own clock is
            ahead[name] = 0.0
            right = time.time() + TTL_S
            assert await node.put("right", right)
            assert (await c.get())[node.identity.peer_id] == (node.sealed("right", right), right)
            assert (await node.get())[node.identity.peer_id][1] == right


def test_the_place_of_a_value_needs_no_clock() -> None:
    identity = Identity.generate()
    data = seal(PeerRecord(identity.peer_id, 5.0, "x"), identity, KEY, 9.0)
    assert place(data, KEY) == (topic("peers", KEY), identity.peer_id, 9.0)
    assert place(data, MeshKey()) is None
    assert place(b"", KEY) is None


async def test_a_store_goes_on_though_p2pd_answers_too_late(tmp_path: Path) -> None:
    """What is asked of it arrives nevertheless: hivemind and p2pd may each have noted handlers of a try that failed."""
    times = replace(QUICK, dial_s=0.3)
    identity = Identity.load_or_create(tmp_path / "b.key")
    async with (
        one_peer(tmp_path, "a") as (a, _, _),
        P2PDaemon(identity, listen=["127.0.0.1:0"], timeouts=QUICK) as daemon,
        KademliaStore(daemon.p2p, [a.address], identity=identity, mesh_key=KEY, timeouts=times) as store,
    ):
        assert await a.put("a", time.time() + TTL_S)
        (child,) = psutil.Process(daemon.pid).children()
        child.suspend()
        while child.status() != psutil.STATUS_STOPPED:  # a thread of its may still be at work  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _ in range(2):
            with pytest.raises(JoinError, match="does not answer"):
                await store.rebind(daemon.p2p)
        child.resume()
        while True:  # as P2PDaemon does; what was asked before may be done in any order
            try:
                await store.rebind(daemon.p2p)
                break
            except P2PDaemonError:
                await asyncio.sleep(0.1)
        assert a.identity.peer_id in await store.get(topic("peers", KEY))
