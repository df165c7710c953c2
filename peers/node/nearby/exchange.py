"""The exchange of a short code for an invite, without a network: messages in, messages out, each side an object.

The idea: SPAKE2 of the library `spake2` makes a key that both sides have if, and only if, both know the code. Who joins proves
first that it has it, so the other side learns of each guess before it tells anything. The invite comes back sealed under that
key. Key and proofs cover the whole conversation: the mesh's label and both peer ids. A message is capped before it is read.

    joiner -> door    label, peer id, SPAKE2 message A
    door -> joiner    label, peer id, SPAKE2 message B
    joiner -> door    proof that it has the key
    door -> joiner    the invite, sealed
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgpack
import spake2
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from dht import Token, public_key_of
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError
from meshcee.fields import ShortText, read, unpack
from peers.node.nearby.code import Code

__all__ = ["MAX_MESSAGE_BYTES", "WRONG", "DoorSide", "JoinerSide", "refusal"]

MAX_MESSAGE_BYTES = 2048
VERSION: Literal["meshcee code 1"] = "meshcee code 1"
WRONG = "wrong code"
NONCE = bytes(12)  # each key seals one message

T = TypeVar("T")


class _Hello(NamedTuple):
    """The first message of either side."""

    version: Literal["meshcee code 1"]
    label: Annotated[str, Meta(min_length=4, max_length=32)]
    peer_id: ShortText
    spake: Annotated[bytes, Meta(min_length=33, max_length=33)]


class _Proof(NamedTuple):
    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]


class _Sealed(NamedTuple):
    invite: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class _Refused(NamedTuple):
    refused: Annotated[str, Meta(max_length=32)]
    left: Annotated[int, Meta(ge=0, le=99)]
    why: Annotated[str, Meta(max_length=300)]


def _packed(message: tuple[Any, ...]) -> bytes:
    data = bytes(msgpack.packb(list(message)))
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is too long for this exchange")
    return data


def _read(data: bytes, kind: type[T]) -> T:
    what = "a message about a short code"
    return read(unpack(data, MAX_MESSAGE_BYTES, what), kind, what)


def refusal(why: str, guesses_left: int = 0, *, wrong: bool = False) -> bytes:
    """What the door answers in place of an invite."""
    return _packed(_Refused(WRONG if wrong else "refused", guesses_left, why[:300]))


class _Keys:
    """What both sides have once SPAKE2 is done: the joiner's proof, and what seals the invite."""

    def __init__(self, shared: bytes, joiner: _Hello, door: _Hello) -> None:
        self.covered = hashlib.sha256(_packed(joiner) + _packed(door)).digest()
        made = HKDF(SHA256(), 64, self.covered, b"meshcee code 1 keys").derive(shared)
        self.proof = hmac.digest(made[:32], b"meshcee code 1 joiner" + self.covered, hashlib.sha256)
        self._seal = AESGCM(made[32:])

    def seal(self, text: str) -> bytes:
        return self._seal.encrypt(NONCE, text.encode(), self.covered)

    def open(self, data: bytes) -> str:
        return self._seal.decrypt(NONCE, data, self.covered).decode()


def _id(peer_id: str, label: str) -> bytes:
    return f"{label} {peer_id}".encode()


def _keys(side: Any, theirs: bytes, joiner: _Hello, door: _Hello) -> _Keys:
    try:
        return _Keys(side.finish(theirs), joiner, door)
    except Exception as error:  # no point of the curve, or our own message back: the library has no one class for them
        raise ProtocolError(f"the other side's part of the exchange is none: {error!r}") from error


class JoinerSide:
    """Who has typed the code. `hello`, then `prove`, then `open`."""

    def __init__(self, code: Code, label: str, peer_id: str) -> None:
        self._code, self._label, self._peer_id = code, label, peer_id
        self._at = ""

    def hello(self) -> bytes:
        # The library wants both names at the start: the door's peer id comes later, and the keys cover it.
        self._side = spake2.SPAKE2_A(self._code.secret, _id(self._peer_id, self._label), _id("door", self._label))
        self._hello = _Hello(VERSION, self._label, self._peer_id, self._side.start())
        return _packed(self._hello)

    def prove(self, data: bytes) -> bytes:
        """After the door's hello. NotPermittedError when it refuses."""
        _check_refusal(data)
        door = _read(data, _Hello)
        public_key_of(door.peer_id)
        if door.label != self._label:
            raise ProtocolError(f"the mesh {self._label} answers as another one")
        self._at = door.peer_id
        self._keys = _keys(self._side, door.spake, self._hello, door)
        return _packed(_Proof(self._keys.proof))

    def open(self, data: bytes) -> str:
        """The invite, which was made by the very peer that answered."""
        _check_refusal(data)
        try:
            line = self._keys.open(_read(data, _Sealed).invite)
        except (InvalidTag, UnicodeDecodeError) as error:
            raise NotPermittedError(
                "the machine that answered does not know the code: it is not the one that shows it; type nothing more, and use "
                "the line that `meshcee peer` printed there"
            ) from error
        grant = Token.parse(line).grant
        if grant is None or grant.at != self._at:
            raise ProtocolError("the invite that came for the code is another peer's")
        return line


class DoorSide:
    """Who shows the code, for one that tries it. `answer`, then `knows`, then `sealed`."""

    def __init__(self, code: Code, label: str, peer_id: str) -> None:
        self._code, self._label, self._peer_id = code, label, peer_id

    def answer(self, data: bytes) -> bytes:
        """To the joiner's hello; a slow computation."""
        joiner = _read(data, _Hello)
        public_key_of(joiner.peer_id)
        if joiner.label != self._label:
            raise ProtocolError("the code of another mesh is asked for here")
        self.joiner = joiner.peer_id
        side = spake2.SPAKE2_B(self._code.secret, _id(joiner.peer_id, self._label), _id("door", self._label))
        door = _Hello(VERSION, self._label, self._peer_id, side.start())
        self._keys = _keys(side, joiner.spake, joiner, door)
        return _packed(door)

    def knows(self, data: bytes) -> bool:
        """Whether the joiner's proof is one: it has typed the code."""
        return hmac.compare_digest(_read(data, _Proof).proof, self._keys.proof)

    def sealed(self, invite: str) -> bytes:
        return _packed(_Sealed(self._keys.seal(invite)))


def _check_refusal(data: bytes) -> None:
    try:
        found = _read(data, _Refused)
    except MeshceeError:
        return
    if found.refused == WRONG:
        left = (
            f"{found.left} more can be tried"
            if found.left
            else "the first machine shows another by `meshcee invite --code`"
        )
        raise NotPermittedError(f"that is not the code that the first machine shows: {left}")
    raise NotPermittedError(f"the first machine lets nobody in by this code: {found.why}")
