"""A key that signs audited steps for a peer: what it signs is the peer's word for a step, and nothing else anywhere."""

from __future__ import annotations

import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from dht import Identity, verify
from meshcee.errors import ProtocolError
from peers.wire.audit import Delegate, signed_by
from peers.wire.audit.signing import SPEAKS_S


def test_a_key_speaks_for_its_own_peer_and_for_steps_alone() -> None:
    peer, other = Identity.generate(), Identity.generate()
    delegate = Delegate.of(peer.sign, time.time())
    signature = Delegate.read(delegate.pack()).sign(b"text")
    assert signed_by(peer.peer_id, b"text", signature)
    assert signed_by(peer.peer_id, b"text", peer.sign(b"text")), "the peer itself may sign"
    assert not signed_by(peer.peer_id, b"another text", signature)
    assert not signed_by(other.peer_id, b"text", signature)
    assert not signed_by(peer.peer_id, b"text", Delegate(delegate.secret, other.sign(b"")).sign(b"text"))
    assert not verify(peer.peer_id, b"text", signature), "nor is it the peer's own signature of anything"
    assert repr(delegate.secret) not in repr(delegate)


def test_a_key_speaks_for_a_day_and_another_one_follows_in_time() -> None:
    peer, now = Identity.generate(), 1e9
    key = Delegate.after(b"", peer.sign, now)
    signature = Delegate.read(key).sign(b"text")
    assert signed_by(peer.peer_id, b"text", signature, lambda: now + SPEAKS_S - 1)
    assert not signed_by(peer.peer_id, b"text", signature, lambda: now + SPEAKS_S)
    assert Delegate.after(key, peer.sign, now + SPEAKS_S / 5) == key
    later = Delegate.after(key, peer.sign, now + SPEAKS_S / 4)
    assert later != key
    assert signed_by(peer.peer_id, b"text", Delegate.read(later).sign(b"text"), lambda: now + SPEAKS_S)
    delegate = Delegate.read(key)
    longer = Delegate(delegate.secret, Delegate.read(later).word[:8] + delegate.word[8:])
    assert not signed_by(peer.peer_id, b"text", longer.sign(b"text"), lambda: now), "its end is signed too"


@pytest.mark.parametrize("size", [0, 96, 103, 105])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="104 bytes"):
        Delegate.read(bytes(size))


@given(st.data())
def test_no_damaged_signature_of_such_a_key_passes(data: st.DataObject) -> None:
    peer = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    signature = bytearray(Delegate.of(peer.sign, time.time()).sign(b"text"))
    at = data.draw(st.integers(0, len(signature) - 1))
    if data.draw(st.booleans()):
        signature[at] ^= data.draw(st.integers(1, 255))
    else:
        del signature[at:]
    assert not signed_by(peer.peer_id, b"text", bytes(signature))
