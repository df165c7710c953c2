"""Who signs the frames of an audited step: a peer, or a key that speaks for it in a process where its identity must not be.

The idea: the peer signs once that the key speaks for it, and each signature carries the key and that word. It holds for audited
steps alone, so who takes such a process over makes no record and no certificate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dht import verify
from meshcee.errors import ProtocolError

__all__ = ["Delegate", "signed_by"]

SPEAKS = b"meshcee: this key signs audited steps for the peer that signs this "
KEY_BYTES, SIGNATURE_BYTES = 32, 64


@dataclass(frozen=True)
class Delegate:
    """The key. `word` is the peer's signature over it."""

    secret: bytes = field(repr=False)
    word: bytes

    @classmethod
    def of(cls, sign: Callable[[bytes], bytes]) -> Delegate:
        """A new key, which the peer that signs speaks for."""
        key = Ed25519PrivateKey.generate()
        return cls(key.private_bytes_raw(), sign(SPEAKS + key.public_key().public_bytes_raw()))

    def pack(self) -> bytes:
        return self.secret + self.word

    @classmethod
    def read(cls, data: bytes) -> Delegate:
        """What `pack` gave; ProtocolError for another length."""
        if len(data) != KEY_BYTES + SIGNATURE_BYTES:
            raise ProtocolError(f"a key that signs for a peer comes in {KEY_BYTES + SIGNATURE_BYTES} bytes")
        return cls(data[:KEY_BYTES], data[KEY_BYTES:])

    @functools.cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    def sign(self, data: bytes) -> bytes:
        """160 bytes: the signature, the public key, the peer's word for it."""
        return self._key.sign(data) + self._key.public_key().public_bytes_raw() + self.word


def signed_by(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether this peer has signed these bytes of an audited step, or a key that speaks for it has."""
    own, public = signature[:SIGNATURE_BYTES], signature[SIGNATURE_BYTES : SIGNATURE_BYTES + KEY_BYTES]
    if not public:
        return verify(peer_id, data, own)
    word = signature[SIGNATURE_BYTES + KEY_BYTES :]
    if len(word) != SIGNATURE_BYTES or not _speaks(peer_id, public, word):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(own, data)
    except InvalidSignature:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _speaks(peer_id: str, public: bytes, word: bytes) -> bool:
    return verify(peer_id, SPEAKS + public, word)
