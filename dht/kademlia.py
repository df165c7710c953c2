"""The Store over hivemind's Kademlia node, in our own event loop, on a p2pd that somebody else owns.

The idea: hivemind routes and replicates; we decide what may enter. Every request and answer between nodes carries a MAC
under the mesh key and its peer's certificate, and every value must be a sealed record in its one right place. So neither
a stranger nor a former member can read, write or route. Each call is bounded in time; reads come from the replicas, never
from a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import random
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgpack
import structlog

from dht.addresses import peer_of, told_private
from dht.control import ENOUGH_S, P2P, PeerID, at_once, dial
from dht.membership import Members
from dht.records import CLOCK_SKEW_S, check, is_ahead, place, told_ahead
from dht.roster import MAX_RECORDS
from dht.signing import Identity, MeshKey, verify
from meshcee.config import Limits, Timeouts
from meshcee.errors import ClockError, JoinError, MeshceeError, NotPermittedError, ProtocolError
from meshcee.events import Event

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hivemind.dht.node
    import hivemind.dht.routing
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.proto import dht_pb2
    from hivemind.utils.auth import AuthorizerBase

__all__ = ["KademliaStore"]

log = structlog.get_logger(__name__)

# It must not draw from the generator that `random` shares, which a user's dataset may be drawing from on another thread.
hivemind.dht.node.random = hivemind.dht.routing.random = random.Random()

REPLICAS = 6  # nodes that hold each key
BEAM = 8  # nodes that a search visits: the replicas and a few beside them
BUCKET = 20  # neighbours that a node knows at each distance; a mesh of so many is known whole
BELIEVED = 4  # neighbours that one answer may name beyond those that we know: half a search, if none of them exists
RPC_S = 3.0  # one request to one node: a connection over 300 ms takes 1.2 s
QUICK_WORKERS = 2  # nodes that a search asks at once, where the first answer ends it: one may not answer
FORGIVEN_AFTER_S = 5.0  # a node that did not answer is passed over for so long (hivemind would double it each time)
MAX_TOLD = 1024  # warnings
MAX_MET = 64  # addresses kept for the next p2pd
MAX_KEYS = 16  # in one request: nodes ask for one key, and hand a new node one for each kind of record
REQUEST = b"meshcee dht request\0"  # what a request's signature begins with
MAX_WRONG = (
    256  # entries that do not hold, of one message: a signature takes 0.1 ms to check, and more are not looked at
)


class KademliaStore:
    """Lifetime is `async with`; entering raises JoinError when seeds are given and nobody holds a DHT node there or at `others`.

    `client_mode` is for peers that only look: they keep no records of others and are not asked.
    """

    def __init__(
        self,
        p2p: P2P,
        seeds: Sequence[str] = (),
        *,
        identity: Identity,
        mesh_key: MeshKey,
        client_mode: bool = False,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
        members: Members | None = None,
        others: Sequence[str] = (),
    ) -> None:
        self.seeds = tuple(seeds)
        self.others = tuple(others)
        self.skew_s: dict[str, float] = {}  # peers' clocks minus ours, as of the last meeting
        self.p2p = p2p
        self._client_mode = client_mode
        self._timeouts = timeouts or Timeouts()
        self._limits = limits or Limits()
        self._clock = clock
        self._mesh_key = mesh_key
        self._authorizer = _MeshAuthorizer(identity, mesh_key, members or Members(clock=clock), clock)
        where = lambda value: place(value, mesh_key, self._limits, members)  # noqa: E731
        self._validator = _Validator(where, self._limits.record_bytes)
        self.node: Any = None
        self._told: set[str] = set()  # peers whose clocks run ahead
        self._met: dict[str, tuple[str, ...]] = {}
        # The nearest nodes of a key, as the last search before a write has found them, and as far as they have answered since.
        self._found: dict[DHTID, dict[DHTID, PeerID]] = {}

    # -- lifetime ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._make_node()
        try:
            await self._first_meeting()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        node, self.node = self.node, None
        if node is None:
            return
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await node.shutdown()  # never ends when p2pd was killed
        except TimeoutError:
            log.debug("dht.shutdown_timed_out")

    async def rebind(self, p2p: P2P) -> None:
        """Go on over a new p2pd: the same node id, the records that it held, the peers that it had met.

        After a failure, or half-way, it may be called again.
        """
        self.p2p = p2p
        handlers = p2p._client.control.unary_handlers
        with contextlib.suppress(Exception):  # a try before this one may have come so far, and its answer not
            async with asyncio.timeout(self._timeouts.dial_s):
                await asyncio.gather(*map(p2p._client.control.remove_unary_handler, handlers), return_exceptions=True)
        handlers.clear()
        await self._make_node()
        await self.meet([*self.seeds, *(address for found in self._met.values() for address in found)])

    async def _make_node(self) -> None:
        old = self.node
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                node = await DHTNode.create(
                    p2p=self.p2p,
                    node_id=node_id_of(self.p2p.peer_id),
                    client_mode=self._client_mode,
                    num_replicas=REPLICAS,
                    bucket_size=BUCKET,
                    wait_timeout=RPC_S,
                    cache_locally=False,  # a cached answer would hide who has left
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                    reuse_get_requests=False,
                    blacklist_time=FORGIVEN_AFTER_S,
                    backoff_rate=1.0,
                    record_validator=self._validator,
                    authorizer=self._authorizer,
                )
        except TimeoutError as error:
            raise JoinError("this peer's own p2pd does not answer: start the peer again") from error
        node.protocol.storage = old.protocol.storage if old is not None else _Storage(self._drop_ahead)
        self._found.clear()
        search, call_store, call_find, meet_node, stub_of = (
            node.find_nearest_nodes,
            node.protocol.call_store,
            node.protocol.call_find,
            node.protocol.update_routing_table,
            node.protocol.get_stub,
        )

        def validated(key: bytes, found: Any) -> bool:
            """Of what another node has: what does not hold is left out, and hides nothing of the others."""
            wrong = 0
            for subkey, entry in list(found.data.items()):
                record = DHTRecord(key, node.protocol.serializer.dumps(subkey), entry.value, entry.expiration_time)
                if wrong > MAX_WRONG or not self._validator.validate(record):
                    del found[subkey]
                    wrong += 1
            self._drop_ahead(found, list(found.data))
            return True

        async def met(node_id: DHTID | None, peer: PeerID, responded: bool = True) -> None:
            if not responded:
                for nodes in self._found.values():
                    nodes.pop(node_id_of(peer), None)
            if node_id is None or node_id == node_id_of(peer):
                await meet_node(node_id, peer, responded=responded)

        async def found(peer: PeerID, keys: Any) -> Any:
            """What a node answers, as far as it holds: entries for as long as they do themselves, and neighbours where they are."""
            answer = await call_find(peer, keys)
            return answer and {key: (_lasting(value), near(key, told)) for key, (value, told) in answer.items()}

        def near(key: DHTID, told: Mapping[DHTID, PeerID]) -> dict[DHTID, PeerID]:
            """Anybody can make up peers beside a key. The search is over when these do not answer, so one node names few."""
            table = node.protocol.routing_table
            right = {n: p for n, p in told.items() if n == node_id_of(p)}
            new = sorted((n for n in right if n not in table and n != node.node_id), key=key.xor_distance)
            return {n: p for n, p in right.items() if n not in new[BELIEVED:]}

        def stub(peer: PeerID) -> Any:
            """Its requests say for whom they are, which the authorizer is not told else."""
            made = stub_of(peer)
            made._service_public_key = peer
            return made

        async def stored(*args: Any, **more: Any) -> list[bool] | None:
            """A node that refuses is no replica, and what others have taken is stored."""
            answer = await call_store(*args, **more)
            return answer if answer and any(answer) else None

        async def nearest(queries: Any, *, quick: bool = False, **more: Any) -> Any:
            """The search before a write of a key, or none: then those whom the last one found, and who was met since."""
            write, nodes = more.get("found_callback"), more.get("node_to_peer_id")
            if write is None or nodes is None:
                return await search(queries, **more)

            async def found_all(key: DHTID, those: list[DHTID], visited: set[DHTID]) -> None:
                self._found[key] = {node_id: nodes[node_id] for node_id in those}
                await write(key, those, visited)

            (key,) = queries
            if not quick or key not in self._found:
                return await search(queries, **{**more, "found_callback": found_all})
            nodes.update(self._found[key])
            await write(key, sorted(nodes, key=key.xor_distance)[:BEAM], set())

        node.protocol._validate_dictionary, node.protocol.call_store = validated, stored
        node.protocol.update_routing_table, node.protocol.call_find = met, found
        node.protocol.get_stub, node.find_nearest_nodes = stub, nearest
        self.node = node

    async def _first_meeting(self) -> None:
        if not self.seeds:
            return
        where = (*self.seeds, *self.others)
        try:
            async with asyncio.timeout(self._timeouts.join_s):
                while not (met := await self.meet(where, ENOUGH_S)):  # noqa: ASYNC110 - nobody tells us when a peer is up
                    await asyncio.sleep(0.5)
        except TimeoutError as error:
            raise JoinError(
                f"none of the {len(where)} addresses to join leads to a peer that keeps the mesh's records "
                f"(tried for {self._timeouts.join_s:g} s): take a token that `meshcee peer` has printed"
                + told_private(where)
            ) from error
        worst = max((self.skew_s[peer] for peer in met), key=abs)
        if abs(worst) > CLOCK_SKEW_S:
            raise ClockError(
                f"this machine's clock is {abs(worst):.0f} s {'behind' if worst > 0 else 'ahead of'} the mesh's: "
                "set it by a time server (NTP)"
            )

    # -- Store ---------------------------------------------------------------------------------------------------------

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float, *, quick: bool = False) -> bool:
        self._sweep()
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                stored = await self.node.store(
                    key,
                    subkey=subkey,
                    value=value,
                    expiration_time=expires_at,
                    beam_size=BEAM,
                    await_all_replicas=False,
                    exclude_self=self._client_mode,  # nobody writes to who looks: its quick reads would end at its own record
                    quick=quick,
                )
        except Exception as error:  # whatever hivemind raises, it was not stored
            log.debug("dht.put_failed", key=key, error=repr(error))
            return False
        return bool(stored)

    async def get(self, key: str, *, quick: bool = False) -> Mapping[str, tuple[bytes, float]]:
        held = self.node.protocol.storage.data.get(DHTID.generate(source=key))
        if held is not None:
            self._drop_ahead(held.value, list(held.value.data))
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                enough = self._clock() if quick else float("inf")  # the expiration of what ends the search
                workers = QUICK_WORKERS if quick else None
                found = (await self.node.get_many([key], enough, beam_size=BEAM, num_workers=workers))[key]
        except Exception as error:
            log.debug("dht.get_failed", key=key, error=repr(error))
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        now = self._clock()
        return {
            subkey: (entry.value, entry.expiration_time)
            for subkey, entry in found.value.items()
            if type(subkey) is str and type(entry.value) is bytes and entry.expiration_time > now
        }

    def _sweep(self) -> None:
        """What this node holds for others is bounded, also in an open mesh where strangers may mint identities."""
        for held in list(self.node.protocol.storage.data.values()):
            self._drop_ahead(held.value, list(held.value.data))
            entries = sorted((entry.expiration_time, subkey) for subkey, entry in held.value.data.items())
            for _, subkey in entries[MAX_RECORDS:]:
                del held.value[subkey]

    def _drop_ahead(self, entries: Any, subkeys: Iterable[Any]) -> None:
        """What is dated ahead of our clock would hide what its writer says once that one's clock is set right."""
        now = self._clock()
        for subkey in subkeys:
            entry = entries.data[subkey]
            with contextlib.suppress(ValueError, MeshceeError):  # what is no record, the validator refuses
                envelope = check(msgpack.unpackb(entry.value), self._mesh_key, self._limits)
                if is_ahead(envelope.sent_at, now):
                    del entries[subkey]
                    if envelope.signer not in self._told and len(self._told) < MAX_TOLD:
                        self._told.add(envelope.signer)
                        log.warning(Event.RECORD_SET_ASIDE, error=told_ahead(envelope.signer, envelope.sent_at, now))

    async def meet(self, addresses: Iterable[str], enough_s: float | None = None) -> frozenset[str]:
        """As in `Store`; once one has answered, the others have `enough_s` seconds more, if that is said."""
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            peer_id = peer_of(address)
            if peer_id is not None and peer_id != self.p2p.peer_id.to_base58():
                by_peer.setdefault(peer_id, []).append(address.removesuffix(f"/p2p/{peer_id}"))
        before = set(self.node.protocol.routing_table.peer_id_to_uid)
        met: set[str] = set()

        async def one(peer_id: str, where: list[str]) -> bool:
            if found := await self._meet_one(peer_id, where):
                met.add(peer_id)
            return found

        await at_once(itertools.starmap(one, by_peer.items()), enough_s)
        for peer_id in met:
            self._met.pop(peer_id, None)
            self._met[peer_id] = tuple(f"{where}/p2p/{peer_id}" for where in by_peer[peer_id])
        while len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]
        if any(PeerID.from_base58(peer_id) not in before for peer_id in met):
            self._found.clear()
            await self._explore()
        return frozenset(met)

    async def _meet_one(self, peer_id: str, where: Sequence[str]) -> bool:
        problem = await dial(self.p2p, peer_id, where, self._timeouts.dial_s)
        if problem:
            log.debug("dht.meet_failed", peer=peer_id, error=problem)
            return False
        protocol, peer = self.node.protocol, PeerID.from_base58(peer_id)
        sent_at = self._clock()
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                request = dht_pb2.PingRequest(peer=protocol.node_info)
                answer = await protocol.get_stub(peer).rpc_ping(request, timeout=RPC_S)
                if (
                    answer is None or answer.peer.node_id != node_id_of(peer).to_bytes()
                ):  # of no mesh of ours, or it looks
                    return False
                await protocol.update_routing_table(node_id_of(peer), peer, responded=True)
        except Exception as error:
            log.debug("dht.meet_failed", peer=peer_id, error=repr(error))
            return False
        self.skew_s[peer_id] = answer.dht_time - (sent_at + self._clock()) / 2
        return True

    async def _explore(self) -> None:
        """Look for our own neighbours, so that we know them and they us."""
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                await self.node.find_nearest_nodes([self.node.node_id], exclude_self=True)
        except Exception as error:
            log.debug("dht.explore_failed", error=repr(error))


@functools.lru_cache(maxsize=4096)
def node_id_of(peer: PeerID) -> DHTID:
    """Where a peer's node is in the DHT: no peer has several places. One beside a key is a matter of some hundred identities."""
    return DHTID.generate(source=peer.to_bytes())


def _lasting(value: Any) -> Any:
    """A node's entries, and until when the last of them holds. What the node says of that would end the search of others."""
    last = max((entry.expiration_time for entry in value.value.data.values()), default=None) if value else None
    return None if last is None else type(value)(value.value, last)


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """What this node holds for others: an entry dated ahead of our clock makes way for any other."""

    def __init__(self, drop_ahead: Callable[[Any, Iterable[Any]], None]) -> None:
        super().__init__()
        self._drop_ahead = drop_ahead

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        held = self.data.get(key)
        if held is not None and subkey in held.value.data:
            self._drop_ahead(held.value, [subkey])
            there = held.value.data.get(subkey)
            if there is not None and there.expiration_time >= expiration_time:
                return False  # hivemind would remember the try until it expires
        return bool(super().store_subkey(key, subkey, value, expiration_time))


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """Asked by hivemind for every value that a node is given, holds or finds. Needs no clock: see dht/records.py."""

    def __init__(self, where: Callable[[bytes], tuple[str, str, float] | None], max_bytes: int) -> None:
        self._where = where
        self._max_bytes = max_bytes

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > self._max_bytes + 16 or len(record.subkey) > 256:
            return False
        try:
            subkey, value = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
        except ValueError:
            return False
        if type(subkey) is not str or type(value) is not bytes:  # no subkey: a plain value would hide everybody's
            return False
        where = self._where(value)
        if where is None:
            return False
        key, right_subkey, expires_at = where
        placed = (DHTID.generate(source=key).to_bytes(), right_subkey, expires_at)
        return placed == (record.key, subkey, record.expiration_time)


class _MeshAuthorizer(AuthorizerBase):  # type: ignore[misc]
    """Who asks, and who answers: a MAC keeps other meshes apart, a certificate says that the peer is a member.

    A request is signed and names its receiver, who could else ask others in the sender's name. Of an answer libp2p has
    proven the sender; it is bound to its request by the nonce.
    """

    def __init__(self, identity: Identity, mesh_key: MeshKey, members: Members, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._mesh_key = mesh_key
        self._members = members
        self._clock = clock

    def _mac(self, message: Any, role: bytes) -> bytes:
        return self._mesh_key.mac(b"meshcee dht " + role + b"\0" + _digest(message))

    def _proven(self, message: Any, role: bytes) -> bool:
        claimed, message.auth.signature = message.auth.signature, b""
        return secrets.compare_digest(self._mac(message, role), claimed)

    def _is_member(self, peer_id: str, certificate: bytes) -> bool:
        try:
            self._members.vouch(peer_id, certificate, "compute", self._clock(), "asks no node of the directory")
        except (NotPermittedError, ProtocolError):
            return False
        return True

    async def sign_request(self, request: Any, service_public_key: PeerID) -> None:
        auth, me = request.auth, request.auth.client_access_token
        auth.nonce, auth.service_public_key = secrets.token_bytes(16), service_public_key.to_bytes()
        me.username, me.public_key = self._identity.peer_id, self._members.shown
        me.signature = self._identity.sign(REQUEST + _digest(request))
        auth.signature = self._mac(request, b"request")

    async def validate_request(self, request: Any) -> bool:
        """An answer has all that is known of each key, so one request for many would be an answer of any size.

        Nobody's entries go into a node's cache: they would be its whole answer, and hide those that it stores.
        """
        keys, in_cache = getattr(request, "keys", ()), getattr(request, "in_cache", ())
        if max(len(keys), len(in_cache)) > MAX_KEYS or not self._proven(request, b"request") or any(in_cache):
            return False
        auth, peer = request.auth, request.auth.client_access_token
        if auth.service_public_key != PeerID.from_base58(self._identity.peer_id).to_bytes():
            return False
        signature, peer.signature = peer.signature, b""
        try:
            signed = verify(peer.username, REQUEST + _digest(request), signature)
        except ProtocolError:
            return False
        return signed and self._is_member(peer.username, peer.public_key)

    async def sign_response(self, response: Any, request: Any) -> None:
        response.auth.nonce = request.auth.nonce
        response.auth.service_access_token.public_key = self._members.shown
        response.auth.signature = self._mac(response, b"response")

    async def validate_response(self, response: Any, request: Any) -> bool:
        auth = response.auth
        if auth.nonce != request.auth.nonce or not self._proven(response, b"response"):
            return False
        return self._is_member(
            PeerID(request.auth.service_public_key).to_base58(), auth.service_access_token.public_key
        )


def _digest(message: Any) -> bytes:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
