"""The first frames of every stream: who is there, which version, and proof of the mesh key from both sides.

The idea: HELLO and ANSWER carry a fresh nonce each. The proofs are HMACs, under the mesh key, of everything that was
said and of the role. So neither can be replayed, reflected or moved to another pair of peers or purpose. The key
itself is never sent. Whoever refuses says why in words that the other side can print.

    dialer    hello   {version, software, peer, to, purpose, nonce}
    acceptor  answer  {version, software, peer, nonce, proof}            or  refused {code, reason, version, software}
    dialer    proof   {proof}                                            or  refused
The dialer may send at once after `proof`: it has seen the acceptor's proof, so both hold the same key. Where both can leave
libp2p for connections of their own, each of the three has a field `direct` as well (direct.py).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgpack

import meshcee
from meshcee.errors import JoinError, NotPermittedError, ProtocolError
from peers.transport.base import Frame, Stream
from peers.transport.direct import Path
from peers.transport.stream import short

__all__ = ["PROTOCOL_VERSION", "accept", "dial"]

# Raised by one whenever peers of the old and of the new version would misunderstand each other. The names and types of
# `version` and `software` in these frames never change.
PROTOCOL_VERSION = 3

NONCE_BYTES = 32
_TEXT_CHARS = 512
WRONG_KEY = "the token belongs to another mesh: ask for a new one with `meshcee token` on a peer of the mesh to join"


def _field(header: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    value = header.get(name)
    if type(value) is not kind:
        raise ProtocolError(f"{what} has no valid {name!r}")
    if isinstance(value, str) and not 0 < len(value) <= _TEXT_CHARS:
        raise ProtocolError(f"{what}: {name!r} must have 1 to {_TEXT_CHARS} characters")
    return value


def _nonce(header: Mapping[str, Any], what: str) -> bytes:
    nonce: bytes = _field(header, "nonce", bytes, what)
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"{what}: the nonce must have {NONCE_BYTES} bytes")
    return nonce


def prove(key: bytes, role: str, hello: Mapping[str, Any], answer: Mapping[str, Any]) -> bytes:
    """HMAC-SHA256 over the role and the whole transcript; msgpack lengths make the encoding unambiguous."""
    said = [
        "meshcee handshake",
        role,
        [hello[name] for name in ("version", "peer", "to", "purpose", "nonce")],
        [answer[name] for name in ("version", "peer", "nonce")],
        *([hello["direct"], answer["direct"]] if "direct" in hello and "direct" in answer else ()),
    ]
    return hmac.digest(key, msgpack.packb(said), hashlib.sha256)


def _versions_differ(ours: int, theirs: int, their_software: str, peer_id: str) -> JoinError:
    older = "this peer" if ours < theirs else f"peer {short(peer_id)}"
    return JoinError(
        f"peer {short(peer_id)} speaks protocol version {theirs} (meshcee {their_software}), this peer speaks {ours} "
        f"(meshcee {meshcee.__version__}): upgrade {older} with `pip install -U meshcee`"
    )


async def _refuse(stream: Stream, code: str, reason: str, version: int) -> None:
    software = meshcee.__version__
    header = {"code": code, "reason": reason[:_TEXT_CHARS], "version": version, "software": software}
    await stream.send(Frame("refused", header))


def _refused(frame: Frame, peer_id: str, version: int) -> NoReturn:
    """The other side refused: raise what it means here."""
    code = _field(frame.header, "code", str, "the refusal")
    reason = _field(frame.header, "reason", str, "the refusal")
    if code == "version":
        theirs = _field(frame.header, "version", int, "the refusal")
        raise _versions_differ(version, theirs, _field(frame.header, "software", str, "the refusal"), peer_id)
    if code in ("key", "identity"):
        raise NotPermittedError(f"peer {short(peer_id)} refused this peer: {reason}")
    raise JoinError(f"peer {short(peer_id)} refused the stream: {reason}")


async def dial(
    stream: Stream,
    peer_id: str,
    purpose: str,
    key: bytes,
    *,
    path: Path | None = None,
    version: int = PROTOCOL_VERSION,
) -> str:
    """Our side of a stream that we opened; `stream.peer_id` is whom we meant, `peer_id` ourselves. Returns the purpose.

    With `path`, what comes of it is known when we return.
    """
    hello: dict[str, Any] = {
        "version": version,
        "software": meshcee.__version__,
        "peer": peer_id,
        "to": stream.peer_id,
        "purpose": purpose,
        "nonce": secrets.token_bytes(NONCE_BYTES),
    }
    if path is not None:
        hello["direct"] = path.key
    await stream.send(Frame("hello", hello))
    reply = await stream.recv()
    if reply.kind == "refused":
        _refused(reply, stream.peer_id, version)
    if reply.kind != "answer":
        raise ProtocolError(f"expected the answer of a handshake, got {reply.kind!r}")
    answer = reply.header
    if (theirs := _field(answer, "version", int, "the answer")) != version:
        raise _versions_differ(version, theirs, _field(answer, "software", str, "the answer"), stream.peer_id)
    who = _field(answer, "peer", str, "the answer")
    _nonce(answer, "the answer")
    if who != stream.peer_id:
        reason = f"it says that it is {short(who)}, but {short(stream.peer_id)} was dialled"
        await _refuse(stream, "identity", reason, version)
        raise NotPermittedError(f"the peer at the other end is not the one that was dialled: {reason}")
    if not hmac.compare_digest(_field(answer, "proof", bytes, "the answer"), prove(key, "acceptor", hello, answer)):
        await _refuse(stream, "key", WRONG_KEY, version)
        raise NotPermittedError(f"peer {short(stream.peer_id)} does not know our mesh key: {WRONG_KEY}")
    proof: dict[str, Any] = {"proof": prove(key, "dialer", hello, answer)}
    if path is not None and "direct" in answer:
        proof["direct"] = await path.dial(answer["direct"], prove(key, "direct", hello, answer))
    await stream.send(Frame("proof", proof))
    return purpose


async def accept(
    stream: Stream,
    peer_id: str,
    key: bytes,
    *,
    refusal: Callable[[str], str | None] = lambda purpose: None,
    path: Path | None = None,
    version: int = PROTOCOL_VERSION,
) -> str:
    """The other side's stream; returns its purpose. `refusal(purpose)` says in words why none is taken; `path` as in `dial`."""
    frame = await stream.recv()
    if frame.kind != "hello":
        raise ProtocolError(f"expected the hello of a handshake, got {frame.kind!r}")
    hello = frame.header
    if (theirs := _field(hello, "version", int, "the hello")) != version:
        error = _versions_differ(version, theirs, _field(hello, "software", str, "the hello"), stream.peer_id)
        await _refuse(stream, "version", "another protocol version", version)
        raise error
    who = _field(hello, "peer", str, "the hello")
    meant = _field(hello, "to", str, "the hello")
    purpose: str = _field(hello, "purpose", str, "the hello")
    _nonce(hello, "the hello")
    if who != stream.peer_id or meant != peer_id:
        named = f"{short(who)} to {short(meant)}"
        reason = f"the hello is from {named}, the stream from {short(stream.peer_id)} to {short(peer_id)}"
        await _refuse(stream, "identity", reason, version)
        raise NotPermittedError(f"a stream under a false name: {reason}")
    answer: dict[str, Any] = {
        "version": version,
        "software": meshcee.__version__,
        "peer": peer_id,
        "nonce": secrets.token_bytes(NONCE_BYTES),
    }
    why_not = refusal(purpose)
    if why_not is not None:
        await _refuse(stream, "purpose", why_not, version)
        raise JoinError(f"refused a stream {purpose!r} of peer {short(who)}: {why_not}")
    offered = path if "direct" in hello else None
    if offered is not None:
        answer["direct"] = offered.offer()
        offered.expect(hello["direct"], prove(key, "direct", hello, answer))
    await stream.send(Frame("answer", {**answer, "proof": prove(key, "acceptor", hello, answer)}))
    frame = await stream.recv()
    if frame.kind == "refused":
        _refused(frame, stream.peer_id, version)
    if frame.kind != "proof":
        raise ProtocolError(f"expected the proof of a handshake, got {frame.kind!r}")
    if not hmac.compare_digest(_field(frame.header, "proof", bytes, "the proof"), prove(key, "dialer", hello, answer)):
        await _refuse(stream, "key", WRONG_KEY, version)
        raise NotPermittedError(f"peer {short(who)} does not know the mesh key: its token belongs to another mesh")
    if offered is not None:
        offered.choose(frame.header.get("direct", []))
    return purpose
