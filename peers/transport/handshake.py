"""The first frames of every stream: who is there, which version, proof of the mesh key and of membership from both sides.

The idea: HELLO and ANSWER carry a fresh nonce each. The proofs are HMACs, under the mesh key, of everything that was
said and of the role. So neither can be replayed, reflected or moved to another pair of peers or purpose. The key
itself is never sent. Whoever refuses says why in words that the other side can print. What each shows is its certificate
(dht/membership.py); who has none yet shows an invite, and proves that one's key instead of the mesh's.

    dialer    hello   {version, software, peer, to, purpose, nonce, shown}
    acceptor  answer  {version, software, peer, nonce, shown, proof}     or  refused {code, reason, version, software}
    dialer    proof   {proof}                                            or  refused
The dialer may send at once after `proof`: it has seen the acceptor's proof, so both hold the same key. Where both can leave
libp2p for connections of their own, each of the three has a field `direct` as well (direct.py).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgpack
from msgspec import Meta

import meshcee
from dht import Members
from meshcee.errors import JoinError, NotPermittedError, ProtocolError
from meshcee.fields import Count, read
from peers.transport.base import Frame, Stream
from peers.transport.stream import short

if TYPE_CHECKING:
    from peers.transport.direct import Path

__all__ = ["PROTOCOL_VERSION", "accept", "dial"]

# Raised by one whenever peers of the old and of the new version would misunderstand each other. The names and types of
# `version` and `software` in these frames never change.
PROTOCOL_VERSION = 10

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
_TEXT_CHARS = 512
SHOWN_BYTES = 1400  # a hello has HELLO_BYTES
_Text = Annotated[str, Meta(min_length=1, max_length=_TEXT_CHARS)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Shown = Annotated[bytes, Meta(max_length=SHOWN_BYTES)]
_Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
WRONG_KEY = (
    "the token belongs to another mesh: ask for a new one (`meshcee invite` on an admin's machine of the mesh to join)"
)


@dataclass(frozen=True)
class Version:
    """All that is read of a peer whose version is another."""

    version: Count


@dataclass(frozen=True)
class Software:
    version: Count
    software: _Text


@dataclass(frozen=True)
class Hello:
    peer: _Text
    to: _Text
    purpose: _Text
    nonce: _Nonce
    shown: _Shown


@dataclass(frozen=True)
class Answer:
    peer: _Text
    nonce: _Nonce
    shown: _Shown
    proof: _Proof


@dataclass(frozen=True)
class Proof:
    """The proof: nothing else is in it that this file reads."""

    proof: _Proof


@dataclass(frozen=True)
class Refusal:
    code: _Text
    reason: _Text


def prove(key: bytes, role: str, hello: Mapping[str, Any], answer: Mapping[str, Any]) -> bytes:
    """HMAC-SHA256 over the role and the whole transcript; msgpack lengths make the encoding unambiguous."""
    said = [
        "meshcee handshake",
        role,
        [hello[name] for name in ("version", "peer", "to", "purpose", "nonce", "shown")],
        [answer[name] for name in ("version", "peer", "nonce", "shown")],
        *([hello["direct"], answer["direct"]] if "direct" in hello and "direct" in answer else ()),
    ]
    return hmac.digest(key, msgpack.packb(said), hashlib.sha256)


def _versions_differ(ours: int, theirs: Software, peer_id: str) -> JoinError:
    older = "this peer" if ours < theirs.version else f"peer {short(peer_id)}"
    return JoinError(
        f"peer {short(peer_id)} speaks protocol version {theirs.version} (meshcee {theirs.software}), this peer speaks {ours} "
        f"(meshcee {meshcee.__version__}): upgrade {older} with `pip install -U meshcee`"
    )


async def _refuse(stream: Stream, code: str, reason: str, version: int) -> None:
    software = meshcee.__version__
    header = {"code": code, "reason": reason[:_TEXT_CHARS], "version": version, "software": software}
    await stream.send(Frame("refused", header))


def _refused(frame: Frame, peer_id: str, version: int) -> NoReturn:
    """The other side refused: raise what it means here."""
    said = read(frame.header, Refusal, "the refusal")
    if said.code == "version":
        raise _versions_differ(version, read(frame.header, Software, "the refusal"), peer_id)
    if said.code in ("key", "identity", "member"):
        raise NotPermittedError(f"peer {short(peer_id)} refused this peer: {said.reason}")
    raise JoinError(f"peer {short(peer_id)} refused the stream: {said.reason}")


async def dial(
    stream: Stream,
    peer_id: str,
    purpose: str,
    key: bytes,
    *,
    members: Members | None = None,
    path: Path | None = None,
    version: int = PROTOCOL_VERSION,
) -> str:
    """Our side of a stream that we opened; `stream.peer_id` is whom we meant, `peer_id` ourselves. Returns the purpose.

    `members` judge what the other side shows; without them nobody shows anything.

    With `path`, what comes of it is known when we return.
    """
    members = members or Members()
    hello: dict[str, Any] = {
        "version": version,
        "software": meshcee.__version__,
        "peer": peer_id,
        "to": stream.peer_id,
        "purpose": purpose,
        "nonce": secrets.token_bytes(NONCE_BYTES),
        "shown": members.shown,
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
    if read(answer, Version, "the answer").version != version:
        raise _versions_differ(version, read(answer, Software, "the answer"), stream.peer_id)
    theirs = read(answer, Answer, "the answer")
    if theirs.peer != stream.peer_id:
        reason = f"it says that it is {short(theirs.peer)}, but {short(stream.peer_id)} was dialled"
        await _refuse(stream, "identity", reason, version)
        raise NotPermittedError(f"the peer at the other end is not the one that was dialled: {reason}")
    if not hmac.compare_digest(theirs.proof, prove(key, "acceptor", hello, answer)):
        await _refuse(stream, "key", WRONG_KEY, version)
        raise NotPermittedError(f"peer {short(stream.peer_id)} does not know our mesh key: {WRONG_KEY}")
    try:
        members.admit(stream.peer_id, theirs.shown)
    except (NotPermittedError, ProtocolError) as error:
        await _refuse(stream, "member", str(error), version)
        raise NotPermittedError(str(error)) from error
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
    members: Members | None = None,
    refusal: Callable[[str], str | None] = lambda purpose: None,
    path: Path | None = None,
    version: int = PROTOCOL_VERSION,
) -> str:
    """The other side's stream; returns its purpose. `refusal(purpose)` says in words why none is taken; `path` as in `dial`."""
    members = members or Members()
    frame = await stream.recv()
    if frame.kind != "hello":
        raise ProtocolError(f"expected the hello of a handshake, got {frame.kind!r}")
    hello = frame.header
    if read(hello, Version, "the hello").version != version:
        error = _versions_differ(version, read(hello, Software, "the hello"), stream.peer_id)
        await _refuse(stream, "version", "another protocol version", version)
        raise error
    theirs = read(hello, Hello, "the hello")
    if theirs.peer != stream.peer_id or theirs.to != peer_id:
        named = f"{short(theirs.peer)} to {short(theirs.to)}"
        reason = f"the hello is from {named}, the stream from {short(stream.peer_id)} to {short(peer_id)}"
        await _refuse(stream, "identity", reason, version)
        raise NotPermittedError(f"a stream under a false name: {reason}")
    answer: dict[str, Any] = {
        "version": version,
        "software": meshcee.__version__,
        "peer": peer_id,
        "nonce": secrets.token_bytes(NONCE_BYTES),
        "shown": members.shown,
    }
    try:
        key = members.admit(theirs.peer, theirs.shown, theirs.purpose) or key
    except (NotPermittedError, ProtocolError) as error:
        await _refuse(stream, "member", str(error), version)
        raise NotPermittedError(f"refused a stream {theirs.purpose!r}: {error}") from error
    why_not = refusal(theirs.purpose)
    if why_not is not None:
        await _refuse(stream, "purpose", why_not, version)
        raise JoinError(f"refused a stream {theirs.purpose!r} of peer {short(theirs.peer)}: {why_not}")
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
    if not hmac.compare_digest(read(frame.header, Proof, "the proof").proof, prove(key, "dialer", hello, answer)):
        await _refuse(stream, "key", WRONG_KEY, version)
        raise NotPermittedError(f"peer {short(theirs.peer)} does not know the mesh key: its token is of another mesh")
    if offered is not None:
        offered.choose(frame.header.get("direct", []))
    return theirs.purpose
