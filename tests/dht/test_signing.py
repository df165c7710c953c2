"""Identities, mesh keys and tokens: what is made comes back, what is damaged is named, nothing is replaced silently."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.addresses import checked, dialable, is_loopback, peer_of
from dht.control import packed
from dht.signing import Grant, Identity, MeshKey, Token, public_key_of, verify
from meshcee.errors import NotPermittedError, ProtocolError, UsageError
from tests.rig.mutations import check_every_field
from tests.rig.targets import token_of

PEER = "12D3KooWPPvGbzEUWVSnDV6UZBERMxBqXJziik2YZWwSW2LvAfhV"
ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}"


def test_an_identity_is_made_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peer.key"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 68
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert first.peer_id.startswith("12D3KooW")
    assert os.listdir(path.parent) == ["peer.key"]
    assert Identity.generate().path is None


def test_of_many_who_make_the_same_identity_all_get_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = {x.peer_id for x in pool.map(Identity.load_or_create, [tmp_path / "peer.key"] * 32)}
    assert len(found) == 1
    assert os.listdir(tmp_path) == ["peer.key"]


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b + b"\0", lambda b: bytes(68)])
def test_a_damaged_identity_is_one_clear_error_and_is_kept(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"peer\.key is damaged or of another kind .* restore it from a backup"):
        Identity.load_or_create(path)
    assert path.read_bytes() == before


def test_one_changed_byte_of_an_identity_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path)
    data = bytearray(path.read_bytes())
    data[10] ^= 1  # in the seed: without the public key beside it, this would be another peer
    path.write_bytes(data)
    with pytest.raises(UsageError, match="damaged"):
        Identity.load_or_create(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be used .*: check its owner and permissions"):
        Identity.load_or_create(tmp_path)


def test_the_peer_id_is_libp2ps() -> None:
    """What p2pd printed for an identity file with this public key; tests/peers/transport/test_p2pd.py asks it anew."""
    known = "c9c064bbb8e46be434589a4ef5ecde2b8f13884d0bec75231e0e5fe8b1cbe6dc"
    assert public_key_of(PEER).public_bytes_raw().hex() == known
    ids = {Identity.generate().peer_id for _ in range(20)}
    assert len(ids) == 20
    assert all(len(i) == 52 for i in ids)


@given(st.binary(max_size=100))
def test_what_a_peer_signs_it_alone_has_signed(data: bytes) -> None:
    a, b = Identity.generate(), Identity.generate()
    signature = a.sign(data)
    assert verify(a.peer_id, data, signature)
    assert not verify(b.peer_id, data, signature)
    assert not verify(a.peer_id, data + b"\0", signature)
    assert not verify(a.peer_id, data, signature[:-1])


@given(st.text(max_size=80))
def test_what_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="12D3KooW"):
        public_key_of(text)


def test_mesh_keys(tmp_path: Path) -> None:
    a, b = MeshKey.generate(), MeshKey.generate()
    assert a.proves(b"x", a.mac(b"x"))
    assert not a.proves(b"y", a.mac(b"x"))
    assert not b.proves(b"x", a.mac(b"x"))
    assert a.fingerprint != b.fingerprint
    assert a.secret.hex() not in repr(a)
    assert MeshKey().is_open
    assert not a.is_open
    kept = MeshKey.load_or_create(tmp_path / "mesh.key")
    assert MeshKey.load_or_create(tmp_path / "mesh.key") == kept
    (tmp_path / "mesh.key").write_bytes(b"short")
    with pytest.raises(UsageError, match="damaged"):
        MeshKey.load_or_create(tmp_path / "mesh.key")
    with pytest.raises(UsageError, match="32 bytes"):
        MeshKey(b"x")


ADMIN = Identity.generate()
GRANT = Grant(ADMIN.peer_id, ADMIN.peer_id, PEER, "ab12", "compute", 3, 86400.0)


def test_a_token_comes_back() -> None:
    token = Token.sign(ADMIN, (ADDRESS, f"/dns/vm.example/udp/1/quic-v1/p2p/{PEER}"), GRANT)
    text = token.encode()
    assert text.startswith("meshcee2.")
    assert Token.parse(f"  {text}\n") == token
    assert Token.parse(Token((ADDRESS,)).encode()) == Token((ADDRESS,))
    assert Token.sign(ADMIN, (), GRANT).key == token.key, "the admin need not remember it"
    assert token.signature.hex() not in repr(token)


def test_an_expired_token_says_when() -> None:
    token = Token.parse(Token.sign(ADMIN, (ADDRESS,), GRANT).encode())
    token.check_date(86399.0)
    with pytest.raises(NotPermittedError, match=r"expired on 1970-01-02 00:00 UTC: ask for a new one"):
        token.check_date(86400.0)


@pytest.mark.parametrize(
    "changes",
    [{"expires_at": 1e12}, {"role": "admin"}, {"uses": None}, {"at": ADMIN.peer_id}, {"root": PEER}, {"id": "other"}],
)
def test_what_an_invite_says_cannot_be_edited(changes: dict[str, Any]) -> None:
    """The checksum of the line is anybody's to make again; the signature is the admin's."""
    token = Token.sign(ADMIN, (ADDRESS,), GRANT)
    edited = Token(token.addresses, GRANT._replace(**changes), token.signature)
    with pytest.raises(NotPermittedError, match="changed since an admin of the mesh has signed it"):
        Token.parse(edited.encode())
    assert Token.sign(ADMIN, (ADDRESS,), GRANT._replace(**changes)).key != token.key


def test_a_token_of_an_older_meshcee_says_what_to_do() -> None:
    with pytest.raises(NotPermittedError, match=r"upgrade the first machine, start `meshcee peer` there again"):
        Token.parse("meshcee1.vK4b1JOR2VEvaXA0LzE5Mi4wLjIuMi90Y3AvMzY2ODcv")


def test_plain_addresses_mean_an_open_mesh() -> None:
    assert Token.parse(ADDRESS) == Token((ADDRESS,))
    assert Token.parse(f"{ADDRESS}, {ADDRESS}").addresses == (ADDRESS, ADDRESS)
    for text in ("/ip4/192.0.2.1/tcp/4001", f"{ADDRESS},/x", "/ip4/1.2.3.4/tcp/1/p2p/" + "Q" * 46):
        with pytest.raises(UsageError, match="cannot be joined"):
            Token.parse(text)
    with pytest.raises(UsageError, match="put /p2p/ID of its peer behind it"):
        Token.parse("/ip6/::1/tcp/4001")


@given(st.data())
def test_a_damaged_token_is_noticed(data: st.DataObject) -> None:
    text = Token.sign(ADMIN, (ADDRESS,), GRANT).encode()
    at = data.draw(st.integers(len("meshcee2."), len(text) - 1))
    other = data.draw(st.sampled_from("abcXYZ019-_"))
    damaged = data.draw(st.sampled_from([text[:at], text[:at] + other + text[at + 1 :]]))
    if damaged == text:
        return
    if at == len(text) - 1:  # this one holds bits that base64 ignores
        return
    with pytest.raises(UsageError, match="copy the whole line"):
        Token.parse(damaged)


@given(st.text(max_size=50))
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Token.parse(text)
    with pytest.raises(UsageError):
        Token.parse("meshcee2." + text)


@pytest.mark.parametrize(
    "address",
    [
        ADDRESS,
        "/ip6/2001:db8::1/udp/5/quic-v1",
        "/dns4/example.org/tcp/5/ws",
        f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_addresses(address: str) -> None:
    assert checked(address) == address
    assert peer_of(address) == (PEER if address.endswith(PEER) else None)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "127.0.0.1:80",
        "/ip4/999.1.1.1/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/unix/tmp/x",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/x",
        "/ip4/1.2.3.4/tcp/1\n",
        "/dns/" + "a" * 300,
        "/dns/a b/tcp/1",
        "/ip4/1.2.3.4/udp/1/quic-v1/webtransport",
        "/ip6/fe80::1%eth0/tcp/1",
        "/dnsaddr/x:y/tcp/1",
        "/dns/a%%b/tcp/1",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ProtocolError):
        checked(address)


_PORT = st.integers(0, 65535)
_HOST = st.ip_addresses(v=4).map("/ip4/{}".format) | st.ip_addresses(v=6).map("/ip6/{}".format)
_NAME = st.from_regex(r"/(dns|dns4|dns6|dnsaddr)/[0-9A-Za-z._-]{1,60}", fullmatch=True)
_PATH = st.builds("/{}/{}".format, st.sampled_from(["tcp", "udp"]), _PORT) | st.just("")
_MORE = st.from_regex(r"(/(quic|quic-v1|ws|wss|tls)){0,3}", fullmatch=True)
_BEHIND = st.sampled_from(["", f"/p2p/{PEER}", f"/p2p/{PEER}/p2p-circuit", "/p2p/" + "z" * 46 + "/p2p-circuit"])
_WORD = st.sampled_from(["", "%eth0", "/webtransport", ":", "//", "/x", " "])


@given(st.tuples(_HOST | _NAME, _WORD, _PATH, _WORD, _MORE, _BEHIND).map("".join))
def test_an_address_that_holds_here_is_read_by_libp2p_or_left_out(address: str) -> None:
    """Another peer's record has it, so nothing may raise. Left out are those behind a relay that does not exist, and names with
    "_", which hivemind's library does not read."""
    with contextlib.suppress(ProtocolError):
        checked(address)
        assert len(packed([address])) == ("zzz" not in address and "_" not in address)
    assert packed(["/ip4/1.2.3.4/tcp/1", address])


def test_only_dialable_addresses_are_offered_public_ones_first() -> None:
    hosts = ["127.0.0.1", "192.168.1.2", "0.0.0.0", "8.8.8.8", "169.254.1.1"]
    addresses = [f"/ip4/{h}/tcp/1" for h in hosts] + ["/ip6/::1/tcp/1", "/ip6/fe80::1/tcp/1", "/dns/a.example/tcp/1"]
    assert dialable(addresses) == ("/ip4/8.8.8.8/tcp/1", "/dns/a.example/tcp/1", "/ip4/192.168.1.2/tcp/1")
    assert dialable(addresses[:1]) == ()
    assert is_loopback("/dns/localhost/tcp/1")


def test_each_field_of_a_token_is_checked() -> None:
    check_every_field(
        [[ADDRESS], list(GRANT)],
        lambda value: Token.parse(token_of(value, ADMIN)),
        refusals=(UsageError, NotPermittedError),
        free=(".1.5 = None",),
    )
