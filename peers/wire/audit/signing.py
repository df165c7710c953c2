"""Who signs the frames of an audited step: a peer, or a key that speaks for it in a process where its identity must not be.

The idea: the peer signs until when the key speaks for it, and each signature carries the key and that word. It holds for audited
steps alone, so who takes such a process over makes no record and no certificate, and nothing at all some hours later.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dht import verify
from meshcee.errors import ProtocolError

__all__ = ["SPEAKS_S", "Delegate", "signed_by"]

SPEAKS = b"meshcee: until then this key signs audited steps for the peer that signs this "
SPEAKS_S = 24 * 3600.0  # that a key does; a process has another one after a quarter of this
KEY_BYTES, SIGNATURE_BYTES = 32, 64
END = struct.Struct(">d")  # the wall clock
PACKED_BYTES = KEY_BYTES + END.size + SIGNATURE_BYTES


@dataclass(frozen=True)
class Delegate:
    """The key. `word` is when it ends, packed, and the peer's signature over both."""

    secret: bytes = field(repr=False)
    word: bytes

    @classmethod
    def of(cls, sign: Callable[[bytes], bytes], now: float) -> Delegate:
        """A new key, for which the peer that signs speaks for SPEAKS_S from now on, by its wall clock."""
        key, end = Ed25519PrivateKey.generate(), END.pack(now + SPEAKS_S)
        return cls(key.private_bytes_raw(), end + sign(SPEAKS + key.public_key().public_bytes_raw() + end))

    @classmethod
    def after(cls, before: bytes, sign: Callable[[bytes], bytes], now: float) -> bytes:
        """Packed: the key that was packed before, in the first quarter of its time, and then a new one."""
        if before and END.unpack_from(before, KEY_BYTES)[0] - now > SPEAKS_S * 3 / 4:
            return before
        return cls.of(sign, now).pack()

    def pack(self) -> bytes:
        return self.secret + self.word

    @classmethod
    def read(cls, data: bytes) -> Delegate:
        """What `pack` gave; ProtocolError for another length."""
        if len(data) != PACKED_BYTES:
            raise ProtocolError(f"a key that signs for a peer comes in {PACKED_BYTES} bytes")
        return cls(data[:KEY_BYTES], data[KEY_BYTES:])

    @functools.cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    def sign(self, data: bytes) -> bytes:
        """168 bytes: the signature, the public key, the peer's word for it."""
        return self._key.sign(data) + self._key.public_key().public_bytes_raw() + self.word


def signed_by(peer_id: str, data: bytes, signature: bytes, clock: Callable[[], float] = time.time) -> bool:
    """Whether this peer has signed these bytes of an audited step, or a key has that speaks for it by this wall clock."""
    own, public = signature[:SIGNATURE_BYTES], signature[SIGNATURE_BYTES : SIGNATURE_BYTES + KEY_BYTES]
    if not public:
        return verify(peer_id, data, own)
    word = signature[SIGNATURE_BYTES + KEY_BYTES :]
    if len(word) != END.size + SIGNATURE_BYTES or not _speaks(peer_id, public, word):
        return False
    if not END.unpack_from(word)[0] > clock():
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(own, data)
    except InvalidSignature:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _speaks(peer_id: str, public: bytes, word: bytes) -> bool:
    return verify(peer_id, SPEAKS + public + word[: END.size], word[END.size :])
