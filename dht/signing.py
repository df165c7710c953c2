"""Who signs: a peer's identity, the mesh's shared key, and the invite that is exchanged for both a certificate and that key.

The idea: the identity is an Ed25519 key in the very file that libp2p reads, so a peer has one name everywhere. Its peer
id IS its public key in another spelling, hence any record can be checked with nothing but the name it claims.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from dht.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES, checked, peer_of
from meshcee.errors import NotPermittedError, ProtocolError, UsageError
from meshcee.fields import Finite, ShortText, read, unpack
from meshcee.files import disk

__all__ = ["ROLES", "Grant", "Identity", "MeshKey", "Role", "Token", "invite_key", "public_key_of", "verify", "when"]

# libp2p's crypto.proto, written out: field 1 (type) = 1 (Ed25519), field 2 (data) of 64 or 32 bytes.
_PRIVATE_PREFIX = bytes([0x08, 1, 0x12, 64])  # seed and public key
_PUBLIC_PREFIX = bytes([0x08, 1, 0x12, 32])
_ID_PREFIX = bytes([0, len(_PUBLIC_PREFIX) + 32])  # the "identity" multihash: the key itself, not a digest of it

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_TOKEN, _OLD_TOKEN = "meshcee2.", "meshcee1."
CHECK_BYTES = 4


def _base58(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def _from_base58(text: str) -> bytes:
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)
    leading = len(text) - len(text.lstrip("1"))
    return b"\0" * leading + number.to_bytes((number.bit_length() + 7) // 8, "big")


def _peer_id(public_key: Ed25519PublicKey) -> str:
    return _base58(_ID_PREFIX + _PUBLIC_PREFIX + public_key.public_bytes_raw())


@functools.lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> Ed25519PublicKey:
    """The key that a peer id spells; ProtocolError when it spells none."""
    try:
        data = _from_base58(peer_id) if len(peer_id) <= 64 else b""
    except ValueError:
        data = b""
    prefix = _ID_PREFIX + _PUBLIC_PREFIX
    if len(data) != len(prefix) + 32 or not data.startswith(prefix):
        raise ProtocolError(f"{peer_id[:64]!r} is not the id of a meshcee peer: those begin with 12D3KooW")
    return Ed25519PublicKey.from_public_bytes(data[len(prefix) :])


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether the peer of this id has signed these bytes; ProtocolError when the id is none."""
    try:
        public_key_of(peer_id).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _read_or_create(path: Path, data: bytes, what: str) -> bytes:
    """A secret's file is made whole, or not at all; if another process was faster, its file counts."""
    try:
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                disk.write_once(path, data)
                return data
        return path.read_bytes()
    except OSError as error:
        remedy = disk.remedy(error, "set MESHCEE_HOME to another folder")
        raise disk.kind_of(error)(f"{what} cannot be used ({disk.refusal(error, len(data))}): {remedy}") from error


class Identity:
    """An Ed25519 key. `path` is its file, which p2pd reads too; None when it lives in memory only."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self._key = key
        self.path = path
        self.peer_id = _peer_id(key.public_key())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id}, path={self.path})"

    @classmethod
    def generate(cls) -> Identity:
        """A fresh identity in memory."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in the file, or a new one in a new file of mode 0600. A damaged file is never replaced."""
        fresh = Ed25519PrivateKey.generate()
        whole = _PRIVATE_PREFIX + fresh.private_bytes_raw() + fresh.public_key().public_bytes_raw()
        data = _read_or_create(path, whole, "the identity file")
        seed, public = data[len(_PRIVATE_PREFIX) :][:32], data[len(_PRIVATE_PREFIX) + 32 :]
        if len(data) == len(whole) and data.startswith(_PRIVATE_PREFIX):
            key = Ed25519PrivateKey.from_private_bytes(seed)
            if key.public_key().public_bytes_raw() == public:
                return cls(key, path)
        raise UsageError(
            f"the identity file {path} is damaged or of another kind ({len(data)} bytes): restore it from a backup, "
            "or move it away and a new identity is made"
        )

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


@dataclass(frozen=True)
class MeshKey:
    """The secret that every peer of a mesh holds; an open mesh has the empty one, which is no secret."""

    secret: bytes = b""

    def __post_init__(self) -> None:
        if len(self.secret) not in (0, 32):
            raise UsageError(f"a mesh key has 32 bytes, or none for an open mesh; this one has {len(self.secret)}")

    def __repr__(self) -> str:
        return f"MeshKey({'open' if self.is_open else self.fingerprint})"

    @classmethod
    def generate(cls) -> MeshKey:
        return cls(secrets.token_bytes(32))

    @classmethod
    def load_or_create(cls, path: Path) -> MeshKey:
        """The key of the mesh that this machine started, so that its tokens outlive a restart."""
        data = _read_or_create(path, cls.generate().secret, "the mesh key")
        if len(data) != 32:
            raise UsageError(f"the mesh key {path} is damaged: restore it, or move it away and a new mesh is made")
        return cls(data)

    @property
    def is_open(self) -> bool:
        return not self.secret

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the mesh without telling its key: eight hex digits."""
        return self.mac(b"meshcee fingerprint").hex()[:8]

    def mac(self, data: bytes) -> bytes:
        return hmac.digest(self.secret, data, hashlib.sha256)

    def proves(self, data: bytes, mac: bytes) -> bool:
        return hmac.compare_digest(self.mac(data), mac)


def when(seconds: float) -> str:
    """A date for people."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"the date {seconds:g}"


Role = Literal["compute", "own", "admin"]
ROLES: tuple[Role, ...] = ("compute", "own", "admin")  # each may do what those before it may

Uses = Annotated[int, Meta(ge=1, le=1 << 31)]
MAX_GRANT_BYTES = 512


class Grant(NamedTuple):
    """What an invite says. All of it is signed, its date too."""

    root: ShortText  # the mesh
    issuer: ShortText  # whose key has signed it: the root's or another admin's
    at: ShortText  # the peer with that key: there it is exchanged
    id: ShortText
    role: Role
    uses: Uses | None  # peers that it lets in; None: any number
    expires_at: Finite

    def pack(self) -> bytes:
        return bytes(msgpack.packb(["meshcee invite 1", *self]))

    @classmethod
    def unpack(cls, data: bytes) -> Grant:
        """ProtocolError when it is none."""
        what = "an invite"
        head, *rest = read(unpack(data, MAX_GRANT_BYTES, what), list[Any], what) or [None]
        if head != "meshcee invite 1":
            raise ProtocolError(f"{what} of another kind: {str(head)[:40]!r}")
        return read(rest, cls, what)


def invite_key(signature: bytes) -> bytes:
    """What the holder of an invite proves, and the admin who has signed it: nobody else can know the signature."""
    return hashlib.sha256(b"meshcee invite key" + signature).digest()


@dataclass(frozen=True)
class Token:
    """An invite: where to dial, what it grants, and the admin's signature of that, which is also its secret.

    A signature of Ed25519 is the same each time, so the admin need not remember it. A plain multiaddress stands for an open mesh.
    """

    addresses: Sequence[str]
    grant: Grant | None = None
    signature: bytes = field(default=b"", repr=False)

    @classmethod
    def sign(cls, by: Identity, addresses: Sequence[str], grant: Grant) -> Token:
        return cls(tuple(addresses), grant, by.sign(grant.pack()))

    @property
    def key(self) -> bytes:
        return invite_key(self.signature)

    def encode(self) -> str:
        body = msgpack.packb([list(self.addresses), self.grant.pack() if self.grant else b"", self.signature])
        check = hashlib.sha256(body).digest()[:CHECK_BYTES]
        return _TOKEN + base64.urlsafe_b64encode(check + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        """UsageError for what is no token or address, NotPermittedError for one that is not what an admin has signed."""
        text = text.strip()
        if text.startswith("/"):
            return cls(tuple(_seed(address) for address in text.split(",")))
        if text.startswith(_OLD_TOKEN):
            raise NotPermittedError(
                "this token is of an older meshcee, which let everybody in who held the mesh's key: upgrade the first machine, "
                "start `meshcee peer` there again, and take the line that it prints"
            )
        if not text.startswith(_TOKEN):
            raise UsageError(
                f"{text[:40]!r} is neither an invite token ({_TOKEN}...) nor a multiaddress "
                "(/ip4/.../tcp/.../p2p/...): paste the line that `meshcee peer` or `meshcee invite` printed"
            )
        body = _token_body(text)
        addresses = tuple(_seed(address) for address in body.addresses)
        if not body.grant:
            return cls(addresses)
        try:
            grant = Grant.unpack(body.grant)
            if not verify(grant.issuer, body.grant, body.signature):
                raise NotPermittedError(
                    "the invite was changed since an admin of the mesh has signed it: ask for a new one (`meshcee invite`)"
                )
            public_key_of(grant.at)
            public_key_of(grant.root)
        except ProtocolError as error:
            raise _damaged() from error
        return cls(addresses, grant, body.signature)

    def check_date(self, now: float) -> None:
        """NotPermittedError when its time is over."""
        if self.grant is not None and self.grant.expires_at <= now:
            raise NotPermittedError(
                f"the invite token expired on {when(self.grant.expires_at)}: ask for a new one "
                "(`meshcee invite` on an admin's machine)"
            )


def _seed(address: str) -> str:
    try:
        address = checked(address.strip())
        if (peer := peer_of(address)) is None:
            raise UsageError(
                f"this address cannot be joined: {address} does not say whose it is; put /p2p/ID of its peer behind it"
            )
        public_key_of(peer)
    except ProtocolError as error:
        raise UsageError(f"this address cannot be joined: {error}") from error
    return address


MAX_TOKEN_BYTES = 2 * MAX_ADDRESSES * MAX_ADDRESS_CHARS + MAX_GRANT_BYTES
_Addresses = Annotated[list[str], Meta(min_length=1, max_length=MAX_ADDRESSES)]


class _Body(NamedTuple):
    """What a token says."""

    addresses: _Addresses
    grant: bytes
    signature: bytes


def _damaged() -> UsageError:
    return UsageError("the invite token is damaged: copy the whole line that `meshcee peer` printed")


def _token_body(text: str) -> _Body:
    encoded = text.removeprefix(_TOKEN)
    if len(encoded) > 2 * MAX_TOKEN_BYTES:
        raise _damaged()
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _damaged() from error
    check, body = data[:CHECK_BYTES], data[CHECK_BYTES:]
    if hashlib.sha256(body).digest()[:CHECK_BYTES] != check:
        raise _damaged()
    try:
        return read(unpack(body, MAX_TOKEN_BYTES, "the token"), _Body, "the token")
    except ProtocolError as error:
        raise _damaged() from error
