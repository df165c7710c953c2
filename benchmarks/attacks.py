"""The attacks of benchmarks/hostile.py, one small function each: an attempt, and how the target answered.

The idea: a function is called again and again for some seconds, by several tasks at once. It raises Fault where it has got what it
must not get. The table at the end says who attacks and how many bytes an answer may have.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgpack
import safetensors.torch
import torch
import xxhash
from hivemind.dht.routing import DHTID
from hivemind.proto import dht_pb2
from torch import nn

import meshcee
from benchmarks.attackers import ANSWER_S, Attacker, Fault, Ground, Target
from dht import Members, PeerRecord, Token, certify
from dht.control import PeerID
from dht.kademlia import KademliaStore
from dht.membership import CERTIFICATE_S
from dht.records import LeaseRecord, Record, RunRecord, seal, topic
from meshcee.capture import Capture, capture, encode_program
from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Epoch, Member, Pipeline, Plan, Stage
from peers.transport import Frame, StreamClosed, handshake
from peers.transport.frame import CHUNK, CREDIT, DATA, FRAME_VERSION, GOODBYE, MAGIC, RETRACT
from peers.wire import messages
from peers.wire.offer import Offer, Terms
from peers.wire.weights import StateSender
from tests.rig import hostile_work
from tests.rig.mutations import mutated
from tests.rig.targets import planning

__all__ = ["ATTACKS", "Attack"]

Attempt = Callable[[Ground], Awaitable[str]]
SEALED_S = 10.0  # that a forged record would be valid
OFFER_S = 20.0  # that a good offer may take, whose graph a worker checks
HELLO_KINDS = "hello", "proof", "answer", "refused"
PURPOSES = (
    *("join", "probe", "sound", "gossip", "profile", "leave", "plan", "job", "follow", "journal", "shelf", "copies"),
    *("stage", "renew", "enrol"),
)


def head(kind: int, size: int, body: bytes = b"") -> bytes:
    """A record's prelude with a right sum, and its body."""
    word = int.from_bytes(MAGIC + bytes([FRAME_VERSION, kind]), "big") << 32 | size
    return struct.pack("!QQ", word, xxhash.xxh3_64_intdigest(body, word)) + body


def data(value: Any) -> bytes:
    """A frame of any msgpack in place of [kind, header, sizes]."""
    body = value if isinstance(value, bytes) else bytes(msgpack.packb(value))
    return head(DATA, len(body), body)


def hello(ground: Ground, who: Attacker, target: Target, **other: Any) -> dict[str, Any]:
    told = {"version": handshake.PROTOCOL_VERSION, "software": meshcee.__version__, "peer": who.peer_id}
    told |= {"to": target.peer_id, "purpose": ground.draw.choice(PURPOSES), "nonce": b"n" * 32, "shown": b""}
    return {**told, **other}


def refused(said: str) -> str:
    """Fault for an answer that means that the other side has let us in."""
    if said.split(" ")[0] in ("answer", "enrolled", "offer", "ready", "part", "plan", "profiled", "leaving"):
        raise Fault(f"it was let in: {said[:200]}")
    return said


# -- strangers


async def connects(ground: Ground, port: int, say: bytes) -> str:
    """TCP, past libp2p."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(say)
                await writer.drain()
                came = await reader.read(65536)
                ground.stranger.heard_bytes = max(ground.stranger.heard_bytes, len(came))
                return "hung up" if not came else "libp2p's own greeting" if b"/multistream/" in came else "bytes"
            finally:
                writer.transport.abort()
    except TimeoutError:
        return "silence"
    except OSError as error:
        return type(error).__name__


async def garbage_on_ports(ground: Ground) -> str:
    port = ground.draw.choice(ground.memory["ports"])
    say = ground.draw.choice((b"GET / HTTP/1.1\r\n\r\n", ground.draw.randbytes(3000), b"", b"\0" * 49))
    return await connects(ground, port, say)


async def garbage_hellos(ground: Ground) -> str:
    draw, who, target = ground.draw, ground.stranger, ground.draw.choice(ground.targets)
    told = hello(ground, who, target)
    bombs = (b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x80" * 2000)
    say = draw.choice(
        (
            draw.randbytes(draw.randrange(1, 4000)),
            data(draw.choice(bombs)),
            data([draw.choice(HELLO_KINDS), {"a": [[]] * 2000}, []]),
            data(["hello", mutated(told, draw), []]),
            head(DATA, (1 << 32) - 1),
            head(DATA, 60_000),
            data(["hello", told, [1 << 40]]),
            data(["hello", told, [0] * 2000]),
            *(head(kind, draw.choice((0, 1, (1 << 32) - 1))) for kind in (CHUNK, CREDIT, RETRACT, GOODBYE, 9)),
        )
    )
    return refused(await who.says(target, say))


async def hellos_without_certificate(ground: Ground) -> str:
    """Well-formed, with another's certificate, an edited one, or none."""
    who, target, shown = ground.stranger, ground.draw.choice(ground.targets), ground.member.members.shown
    edited = bytearray(shown)
    edited[ground.draw.randrange(len(edited))] ^= 1
    own = certify(who.identity, b"", who.peer_id, who.peer_id, "admin", "", time.time())
    said = hello(ground, who, target, shown=ground.draw.choice((b"", shown, bytes(edited), own)))
    claimed = ground.draw.choice((who.peer_id, ground.member.peer_id, target.peer_id))
    return refused(await who.says(target, data(["hello", {**said, "peer": claimed}, []])))


async def replayed_handshakes(ground: Ground) -> str:
    """A member's own bytes of a good handshake, from it and from a stranger, to the same peer and to another."""
    spoken: dict[str, bytes] = ground.memory.setdefault("spoken", {})
    if ground.busy.peer_id not in spoken:
        stream = await ground.member.raw(ground.busy)
        wrote, write = list[bytes](), stream.write_bytes

        def writing(part: bytes | memoryview) -> None:
            wrote.append(bytes(part))
            write(part)

        stream.write_bytes = writing  # type: ignore[method-assign, assignment]
        await handshake.dial(
            stream, ground.member.peer_id, "gossip", ground.member.key.secret, members=ground.member.members
        )
        stream.abort()
        spoken[ground.busy.peer_id] = b"".join(wrote)
    who = ground.draw.choice((ground.stranger, ground.member))
    stream = await who.raw(ground.draw.choice(ground.targets))
    if stream.transport is not None:
        stream.write_bytes(spoken[ground.busy.peer_id])
    said = await who.answer(stream)
    if who is ground.stranger:
        return refused(said)
    return "its hello was answered, its proof was not taken" if said.startswith("answer") else said


async def slow_hellos(ground: Ground) -> str:
    """Streams that say nothing, or half a hello, are kept open: as many as places. Meanwhile a member comes in."""
    who, target = ground.stranger, ground.busy
    with suppress(MeshceeError, TimeoutError):
        stream = await who.raw(target)
        stream.write_bytes(
            data(["hello", hello(ground, who, target), []])[: ground.draw.choice((0, 1, 20, 100))] or b""
        )
        who.held.append(stream)
    while len(who.held) > 300:
        who.held.pop(0).abort()
    if ground.draw.random() < 0.1:
        return "a member came in: " + await comes_in(ground, target)
    return "held"


async def comes_in(ground: Ground, target: Target) -> str:
    try:
        (await ground.member.opened(target, "join")).abort()
    except (MeshceeError, StreamClosed, TimeoutError) as error:
        raise Fault(f"a member was kept out: {error!r}") from error
    return "yes"


async def stranger_dht(ground: Ground) -> str:
    """Requests to a node of the DHT under another key, up to 2 MB."""
    draw, store, target = ground.draw, ground.stranger.store, ground.draw.choice(ground.targets)
    keys = [draw.randbytes(20) for _ in range(draw.choice((1, 50_000)))]
    request = draw.choice(
        (
            dht_pb2.FindRequest(keys=keys, peer=store.node.protocol.node_info),
            dht_pb2.StoreRequest(
                keys=keys, subkeys=keys, values=keys, expiration_time=[1e12] * len(keys), in_cache=[False] * len(keys)
            ),
            dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=b"\xff" * draw.choice((0, 20, 100_000)))),
        )
    )
    return await call(ground.stranger, target, request)


async def former_dht(ground: Ground) -> str:
    """What a former member, who knows the mesh's key, asks a node of the DHT: who is there, and to be a node as well."""
    who, target = ground.former, ground.draw.choice(ground.targets)
    node = who.store.node.protocol.node_info
    place = DHTID.generate(source=topic("peers", who.key)).to_bytes()
    said = await call(
        who,
        target,
        ground.draw.choice((dht_pb2.FindRequest(keys=[place], peer=node), dht_pb2.PingRequest(peer=node))),
    )
    if said == "answered":
        raise Fault(f"{target.name} has answered a former member")
    return said


async def call(who: Attacker, target: Target, request: Any) -> str:
    """One request to a node of the DHT, as `who` proves it."""
    name = {"FindRequest": "rpc_find", "StoreRequest": "rpc_store", "PingRequest": "rpc_ping"}[type(request).__name__]
    if problem := (await who.daemon.connect(target.addresses)).get(target.peer_id):
        return f"not reached: {problem}"
    try:
        async with asyncio.timeout(3 * ANSWER_S):
            stub = who.store.node.protocol.get_stub(PeerID.from_base58(target.peer_id))
            found = await getattr(stub, name)(request, timeout=3 * ANSWER_S)
    except TimeoutError:
        return "silence"
    except Exception as error:  # whatever hivemind raises
        return f"an error of {type(error).__name__}"
    if found is None:
        return "an answer without the mesh's proof"
    who.heard_bytes = max(who.heard_bytes, found.ByteSize())
    return "answered"


async def edited_invites(ground: Ground) -> str:
    """Expired, changed, made by nobody; over the exchange itself."""
    who, draw, token = ground.stranger, ground.draw, Token.parse(ground.invite)
    assert token.grant is not None
    expired = ground.authority.admin.invite(ground.founder.addresses, "own", 1, -1.0)
    assert expired.grant is not None
    own = Token.sign(who.identity, ground.founder.addresses, token.grant._replace(issuer=who.peer_id))
    assert own.grant is not None
    shown, key = draw.choice(
        (
            (expired.grant.pack(), expired.key),
            (token.grant._replace(role="admin").pack(), token.key),
            (own.grant.pack(), own.key),
            (mutated(token.grant.pack(), draw), token.key),
            (token.grant.pack(), b"\0" * 32),
        )
    )
    stream = await who.raw(ground.founder)
    told = Members(token.grant.root, shown if isinstance(shown, bytes) else b"")
    try:
        async with asyncio.timeout(5):
            await handshake.dial(stream, who.peer_id, "enrol", key, members=told)
    except (MeshceeError, StreamClosed, TimeoutError) as error:
        who.heard_bytes = max(who.heard_bytes, stream.received_bytes)
        stream.abort()
        return f"no stream: {error}"
    stream.establish("enrol")
    await stream.send(Frame("enrol", {"invite": token.grant.pack(), "proof": b"x" * 32}))
    return refused(await who.answer(stream))


# -- members that only compute


async def without_right(ground: Ground) -> str:
    """What takes the role own, or another certificate."""
    who, draw, target = ground.member, ground.draw, ground.draw.choice(ground.targets)
    ended = certify_for(ground, "own", -CERTIFICATE_S)
    edited = bytearray(who.members.shown)
    edited[draw.randrange(len(edited))] ^= 1
    shown = draw.choice((who.members.shown, who.members.shown, ended, bytes(edited), ground.owner.members.shown))
    purpose = draw.choice(("job", "plan", "profile", "sound", "follow", "journal", "shelf", "leave"))
    return refused(await who.tries(target, purpose, Frame("leave"), members=Members(who.members.root, shown)))


def certify_for(ground: Ground, role: Any, life_s: float) -> bytes:
    return ground.authority.admin.certify(ground.member.peer_id, role, "", life_s)


async def forged_records(ground: Ground) -> str:
    """In another's name, edited, malformed, too large, of kinds that take a right; by gossip, many at a time."""
    who, draw = ground.member, ground.draw
    records = [envelope(ground, draw) for _ in range(draw.choice((1, 32, 33, 200)))]
    said = await who.tries(draw.choice(ground.targets), "gossip", Frame(messages.NEWS, {}, records))
    return f"gossip: {said}"


def envelope(ground: Ground, draw: Any) -> bytes:
    """One that is not to be believed."""
    who, until = ground.member, time.time() + SEALED_S
    other = draw.choice(ground.targets).peer_id
    kind = draw.choice(("peers", "links", "lease", "runs", "revoked", "x" * 100))
    wires = {"name": f"{draw.choice(NAMES)}", "addresses": ["/ip4/127.0.0.1/tcp/1"], "sent_at": time.time()}
    wires |= {
        "counter": 1 << draw.choice((11, 40, 52, 62)),
        "confirmed": True,
        "released": False,
        "links": [],
        "peers": [other],
    }
    body = bytes(msgpack.packb(draw.choice((mutated(wires, draw), wires))))
    signer = draw.choice((who.peer_id, other))
    told = bytes(msgpack.packb(["meshcee record 2", kind, signer, until, body]))
    signature, shown = who.identity.sign(told), who.members.shown
    sealed = [kind, signer, until, body, signature, shown, who.key.mac(told + signature + shown)]
    padding: bytes = b"\0" * draw.choice((0, 0, 0, 20_000))
    return bytes(msgpack.packb(sealed)) + padding


NAMES = (
    "\x1b]0;owned\x07",
    "\u202egnp.exe",
    "[bold red]admin[/]",
    "<script>alert(1)</script>",
    "12D3KooWowner",
    "a" * 5000,
    "",
    "../../etc/passwd",
    "peer-0",
    "=cmd|'/c calc'!A0",
)


async def published(who: Attacker, record: Record) -> str:
    """In the member's own name, as every record is."""
    expires = time.time() + SEALED_S
    sealed = seal(record, who.identity, who.key, expires, certificate=who.members.shown)
    stored = await who.store.put(topic(record.kind, who.key), who.peer_id, sealed, expires)
    return "stored" if stored else "not stored"


async def names(ground: Ground) -> str:
    """The member's own record, with a name that a screen or another program might obey; the mesh is shown it."""
    who = ground.member
    name = ground.draw.choice(NAMES[2:4] + NAMES[7:])
    said = await published(who, PeerRecord(who.peer_id, time.time(), name, ("/ip4/127.0.0.1/tcp/1",)))
    if said == "stored" and "looked" not in ground.memory:
        ground.memory["looked"] = True
        return await shown(ground)
    return said


async def shown(ground: Ground) -> str:
    """What `meshcee status` prints meanwhile: no character that a screen would obey."""
    text = await status(ground)
    if not text.replace("\n", "").isprintable():
        raise Fault(f"`meshcee status` printed {text[:200]!r}")
    return f"`meshcee status` shows {text.count('[bold red]') + text.count('<script>')} such names as text"


async def status(ground: Ground, *flags: str) -> str:
    """What a newcomer is shown of the mesh."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "MESHCEE_HOME": home, "MESHCEE_JOIN": ground.invite}
        command = [sys.executable, "-m", "meshcee", "status", *flags]
        asked = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        told, _ = await asked.communicate()
    if asked.returncode:
        raise Fault(f"`meshcee status` ended with {asked.returncode}")
    return told.decode()


async def lease_leaps(ground: Ground) -> str:
    """A claim far beyond every election that there was."""
    who = ground.member
    counter = 1 << ground.draw.choice((20, 40, 52))
    said = await published(who, LeaseRecord(who.peer_id, time.time(), counter, True))
    if said == "stored" and "looked" not in ground.memory:
        ground.memory["looked"] = True
        coordinator = json.loads(await status(ground, "--json"))["coordinator"]
        if coordinator is None or coordinator["peer"] == who.peer_id:
            raise Fault(f"the mesh follows the leap: {coordinator}")
        return "the mesh keeps its coordinator"
    return said


async def others_places(ground: Ground) -> str:
    """Records in places that are not the member's, in the DHT; a value that would hide everybody's."""
    who, draw = ground.member, ground.draw
    request = dht_pb2.StoreRequest(peer=who.store.node.protocol.node_info)
    for _ in range(draw.choice((1, 20, 2000))):
        kind = draw.choice(("peers", "lease", "runs", "revoked"))
        request.keys.append(DHTID.generate(source=topic(kind, who.key)).to_bytes())
        request.subkeys.append(draw.choice((b"", msgpack.packb(ground.busy.peer_id), msgpack.packb(who.peer_id))))
        request.values.append(msgpack.packb(envelope(ground, draw)))
        request.expiration_time.append(time.time() + SEALED_S)
        request.in_cache.append(draw.random() < 0.5)
    return await call(who, draw.choice(ground.targets), request)


async def greedy_finds(ground: Ground) -> str:
    """The same key, thousands of times in one request: the answer would have a thousand times its records."""
    who = ground.member
    key = DHTID.generate(source=topic("peers", who.key)).to_bytes()
    request = dht_pb2.FindRequest(keys=[key] * 50_000, peer=who.store.node.protocol.node_info)
    return await call(who, ground.busy, request)


async def many_nodes(ground: Ground) -> str:
    """One member as thousands of nodes of the DHT, around the place of the mesh's records; whoever comes must see everybody."""
    who = ground.member
    place = DHTID.generate(source=topic("peers", who.key))
    for _ in range(40):
        near = (int(place) ^ ground.draw.getrandbits(150)).to_bytes(20, "big")
        for target in ground.targets:
            await call(who, target, dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=near)))
    seen = await seen_by_a_newcomer(ground)
    if missing := [target.name for target in ground.targets if target.peer_id not in seen]:
        raise Fault(f"a newcomer does not see {', '.join(missing)}")
    return "everybody is seen"


async def seen_by_a_newcomer(ground: Ground) -> set[str]:
    """By who reads the DHT for the first time, over the owner's p2pd."""
    owner = ground.owner
    async with KademliaStore(
        owner.daemon.p2p,
        ground.founder.addresses,
        identity=owner.identity,
        mesh_key=owner.key,
        client_mode=True,
        members=owner.members,
    ) as fresh:
        return set(await fresh.get(topic("peers", owner.key)))


async def strange_streams(ground: Ground) -> str:
    """Of a job that the member has no part in; frames that have no meaning; sizes and orders that are wrong."""
    who, draw, target = ground.member, ground.draw, ground.draw.choice(ground.targets)
    digests = draw.randbytes(32 * draw.choice((1, 2000)))
    epoch = {"epoch": [draw.randrange(5), draw.randrange(3)], "run": "demo", "owner": ground.owner.peer_id}
    purpose, frames = draw.choice(
        (
            ("stage", [Frame("attach", epoch)]),
            ("stage", [Frame("f", {"round": 0, "micro": 0, "tensors": []})]),
            ("copies", [Frame("seek", {"run": "demo"}, [digests]), Frame("pull", {"ranges": [[0, 0, 1 << 20]]})]),
            ("copies", [Frame("seek", {"run": "demo"}, [digests[:31]])]),
            ("copies", [Frame("pull", {"ranges": [[1 << 62, 1 << 62, 1 << 62]] * 100})]),
            ("probe", [Frame("pong", {"bytes": -1})]),
            ("probe", [Frame("ping", {}, [bytes(5 << 20)])]),
            ("gossip", [Frame("news", {}, [b"x"] * 40)]),
            ("gossip", [Frame("news", {}, [bytes(16384)] * 32)]),
            ("join", [Frame("offer", {}, [b"x"])]),
            ("renew", [Frame("enrolled", {}, [b"x"])]),
            ("no such purpose", [Frame("hello")]),
        )
    )
    return f"{purpose}: {await who.tries(target, purpose, *frames)}"


async def broken_frames(ground: Ground) -> str:
    """On a stream whose hands were shaken: sizes, sums and orders that no encoder makes."""
    who, draw = ground.member, ground.draw
    try:
        stream = await who.opened(draw.choice(ground.targets), draw.choice(("copies", "probe", "gossip")))
    except (MeshceeError, StreamClosed, TimeoutError) as error:
        return f"no stream: {error}"
    seek = data(["seek", {"run": "r"}, [1 << 20]])
    if stream.transport is not None:
        stream.write_bytes(
            draw.choice(
                (
                    head(DATA, 1 << 31),
                    data([1, 2, 3]),
                    data(["ping", {}, [1 << 62]]),
                    data(["ping", {}, [0] * 1024]) * 20,
                    seek + seek,
                    seek + head(CHUNK, 4 << 20),
                    head(CREDIT, (1 << 32) - 1) * 1000,
                    head(RETRACT, 0),
                    seek + head(GOODBYE, 0),
                    data(b"\x91" * 60_000),
                    data(["x" * 65, {}, []]),
                    seek[:-5],
                )
            )
        )
    return await who.answer(stream)


async def unread_answers(ground: Ground) -> str:
    """Many streams that ask and never read, and streams on which nothing is asked: all are kept open."""
    who, draw = ground.member, ground.draw
    try:
        stream = await who.opened(ground.busy, draw.choice(("probe", "copies", "gossip")))
    except (MeshceeError, StreamClosed, TimeoutError) as error:
        return f"no stream: {error}"
    who.held.append(stream)
    with suppress(MeshceeError, StreamClosed, TimeoutError):
        async with asyncio.timeout(1.0):
            for _ in range(200):
                await stream.send(Frame("ping", {"more": [{}] * 4000} if stream.purpose != "probe" else {}, []))
    while len(who.held) > 60:
        who.held.pop(0).abort()
    return "held"


# -- owners


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@cache
def captured() -> tuple[Job, Capture]:
    rows = [(torch.zeros(8), torch.zeros(8))] * 8
    job = Job(
        model=Net(), loss=nn.functional.mse_loss, data=rows, optimizer=Optimizer("SGD", lr=0.1), batch_size=4, steps=9
    )
    return job, capture(job)


def offer_to(ground: Ground, target: Target) -> Frame:
    """A good one, of an epoch that is new."""
    job, found = captured()
    count = ground.memory["offers"] = ground.memory.get("offers", time.time_ns() // 1_000_000) + 1
    plan = Plan(4, (Pipeline(1, (Stage(0, found.train.num_blocks, (Member(target.peer_id, 4),), 1, 1),)),))
    terms, epoch, me = Terms.of(job, found, 1.0), Epoch(count, 1), ground.owner.peer_id
    return Offer(terms, plan, epoch, ground.term, target.peer_id, found.train, None, {}, run="attack", owner=me).frame()


async def hostile_offers(ground: Ground) -> str:
    """Graphs, plans and terms changed at random; graphs that end the process that checks them, keep it busy, or grow."""
    draw, target = ground.draw, ground.idle
    frame = offer_to(ground, target)
    body, graph = frame.payloads[0], bytes(frame.payloads[1])
    what = draw.random()
    if what < 0.4:
        graph = mutated(graph, draw)
    elif what < 0.7:
        body = mutated(bytes(body), draw)
    elif what < 0.9:
        graph = draw.choice(list(hostile_work.DEEDS))
    else:
        graph = draw.choice((b"", draw.randbytes(2 << 20), bytes(17 << 20), b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"))
    payloads = [part if isinstance(part, bytes) else b"" for part in (body, graph)]
    return await ground.owner.tries(target, "job", Frame(frame.kind, frame.header, payloads), limit_s=OFFER_S)


async def hostile_weights(ground: Ground) -> str:
    """After a good offer: weights of other names and sizes, no safetensors at all, recipes of nothing, a wrong hash."""
    draw, target = ground.draw, ground.idle
    good = list(StateSender(captured()[1].state).frames(captured()[1].state))
    huge = {"layers.0.weight": torch.zeros(1 << 20)}
    wrong = draw.choice(
        (
            [Frame("state", {}, [safetensors.torch.save({"x": torch.zeros(2)})])],
            [Frame("state", {}, [safetensors.torch.save(huge)])],
            [Frame("state", {}, [mutated(bytes(good[0].payloads[0]), draw)])],
            [Frame("state", {}, [draw.randbytes(1000)])],
            [Frame("recipes", {}, [msgpack.packb({"layers.0.weight": [b"\xff" * 100, "0" * 64]})])],
            [*good[:-1], Frame("state_end", {"hash": "0" * 64})],
            [Frame("state_end", {"hash": ""})],
            [Frame("state", {}, [b""] * 900)],
        )
    )
    frames = [f for f in wrong if all(isinstance(part, bytes | bytearray) for part in f.payloads)]
    return await ground.owner.tries(target, "job", offer_to(ground, target), *frames, limit_s=OFFER_S)


async def swollen_inputs(ground: Ground) -> str:
    """A job that begins as it should; then samples of 64 MiB each for steps to come."""
    target, state, phase = ground.idle, captured()[1].state, "offered"
    try:
        stream = await ground.owner.opened(target, "job")
    except (MeshceeError, StreamClosed, TimeoutError) as error:
        return f"no stream: {error}"
    payload = bytes(64 << 20)
    try:
        async with asyncio.timeout(OFFER_S):
            for frame in (offer_to(ground, target), *StateSender(state).frames(state)):
                await stream.send(frame)
            while (reply := await stream.recv()).kind == messages.PONG:
                pass
            phase = reply.kind
            for micro in range(12):
                header = {"round": 1, "micro": micro, "names": ["x"], "tensors": [["uint8", [len(payload)]]]}
                await stream.send(Frame(messages.INPUT, header, [payload]))
        raise Fault("768 MiB of inputs were taken")
    except (StreamClosed, TimeoutError) as error:
        return f"{phase}, then ended: {type(error).__name__}"
    finally:
        stream.abort()


async def hostile_requests(ground: Ground) -> str:
    """To the coordinator, to profilers, to shelves: requests changed at random, and more than they may hold."""
    draw, target = ground.draw, ground.draw.choice(ground.targets)
    graph = encode_program(captured()[1].train)
    purpose, frames = draw.choice(
        (
            ("plan", [Frame(messages.PLAN_REQUEST, {}, [draw.randbytes(1 << 20)])]),
            ("plan", [Frame(messages.PLAN_REQUEST, {}, [b"\x91" * 100_000])]),
            ("plan", [Frame(messages.PLAN_REQUEST, {}, [mutated(bytes(msgpack.packb(planning()[0][0])), draw)])]),
            ("profile", [Frame(messages.PROFILE, {"graph": "0" * 64}, [draw.randbytes(500)])]),
            (
                "profile",
                [Frame(messages.PROFILE, {"graph": 7}, [b"\x80"]), Frame(messages.GRAPH, {}, [mutated(graph, draw)])],
            ),
            ("journal", [Frame(messages.FILE, {"run": "a-1", "name": "run.json", "at": 0, "size": 1 << 40}, [b"x"])]),
            ("journal", [Frame(messages.FILE, {"run": "../x", "name": "reports.jsonl", "at": 0, "size": 9}, [b"{}"])]),
            ("journal", [Frame(messages.SEALED, {}, [draw.randbytes(900)])]),
            ("shelf", [Frame(messages.SEEK, {"job": "\x1b[2J"}), Frame(messages.PULL, {"run": "../../x"})]),
            ("sound", [Frame(messages.SOUND, {"peer": draw.choice((7, "x" * 60_000, ground.member.peer_id))})]),
            ("follow", [Frame(messages.FOLLOW, {"job": ["x"] * 9000})]),
        )
    )
    frames = [f for f in frames if all(isinstance(part, bytes) for part in f.payloads)]
    return f"{purpose}: {await ground.owner.tries(target, purpose, *frames)}"


async def run_records(ground: Ground) -> str:
    """A run of the owner's with a name and a plan that whoever looks is shown."""
    who = ground.owner
    record = RunRecord(who.peer_id, time.time(), "[red]" + "x" * 90, (1 << 53, 0), since=-1e308)
    return await published(who, record)


@dataclass(frozen=True)
class Attack:
    """`who` has which right; `at_once` tasks make attempts; an answer has at most so many bytes."""

    who: str
    attempt: Attempt
    at_once: int = 8
    answer_bytes: int = 4096


CONTROL = "no attack, computing alone"  # what the job loses to a process beside it, not to what is done to it


async def computing(ground: Ground) -> str:
    sum(range(100_000))
    return "computed"


ATTACKS: Mapping[str, Attack] = {
    CONTROL: Attack("stranger", computing, 1),
    "garbage on its ports": Attack("stranger", garbage_on_ports),
    "garbage hellos": Attack("stranger", garbage_hellos),
    "hellos without a certificate": Attack("stranger", hellos_without_certificate),
    "replayed handshakes": Attack("stranger", replayed_handshakes),
    "hellos that never end": Attack("stranger", slow_hellos),
    "requests to the DHT without the key": Attack("stranger", stranger_dht, 2),
    "requests to the DHT by a former member": Attack("former", former_dht, 2),
    "edited and expired invites": Attack("stranger", edited_invites),
    "what takes another role": Attack("member", without_right),
    "forged records": Attack("member", forged_records),
    "names that screens might obey": Attack("member", names, 1),
    "lease counters that leap": Attack("member", lease_leaps, 1),
    "records in others' places": Attack("member", others_places, 2, 64 << 10),
    "one key asked for thousands of times": Attack("member", greedy_finds, 1, 64 << 10),
    "one member as many nodes": Attack("member", many_nodes, 1, 64 << 10),
    "streams of others' jobs": Attack("member", strange_streams, 8, 8192),
    "broken frames": Attack("member", broken_frames),
    "answers that are never read": Attack("member", unread_answers),
    "hostile graphs and offers": Attack("owner", hostile_offers, 2, 16384),
    "hostile weights": Attack("owner", hostile_weights, 1, 16384),
    "inputs that swell": Attack("owner", swollen_inputs, 1, 16384),
    "hostile requests": Attack("owner", hostile_requests, 4, 64 << 10),
    "records of runs": Attack("owner", run_records, 1),
}
