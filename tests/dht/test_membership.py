"""Who may do what: whoever was not let in is nobody, no role does more than its own, and the order of news changes no verdict."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.membership import (
    CERTIFICATE_S,
    CLOCK_SKEW_S,
    ENROL,
    MAX_CERTIFICATE_BYTES,
    MAX_CHAIN,
    OPENS,
    WRITES,
    Members,
    RevokedList,
    by_invite,
    certify,
    opened,
)
from dht.records import (
    LeaseRecord,
    PeerRecord,
    Record,
    RevokedRecord,
    RunRecord,
    learn_list,
    open_sealed,
    place,
    seal,
)
from dht.signing import ROLES, Identity, MeshKey, Role
from meshcee.config import Limits
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError
from peers.transport.handshake import SHOWN_BYTES
from tests.mutation import breaks, changed
from tests.rig.mutations import check_every_field

NOW = 1e9
ROOT, ADMIN, OTHER_ADMIN, ME, YOU = (Identity.generate() for _ in range(5))
KEY = MeshKey.generate()


def by_root(peer: Identity, role: Role, now: float = NOW) -> bytes:
    return certify(ROOT, b"", ROOT.peer_id, peer.peer_id, role, "", now)


def by_admin(peer: Identity, role: Role, admin: Identity = ADMIN, now: float = NOW) -> bytes:
    return certify(admin, by_root(admin, "admin"), ROOT.peer_id, peer.peer_id, role, "", now)


def members(now: float = NOW) -> Members:
    return Members(ROOT.peer_id, clock=lambda: now)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("made", [by_root, by_admin])
def test_a_role_opens_and_writes_what_it_may_and_no_more(role: Role, made: Any) -> None:
    shown, here = made(ME, role), members()
    for purpose in (*OPENS, "join", "gossip", "stage", "copies", "renew", "anything"):
        needs = OPENS.get(purpose, "compute")
        if ROLES.index(role) >= ROLES.index(needs):
            assert here.admit(ME.peer_id, shown, purpose) is None
        else:
            with pytest.raises(NotPermittedError, match=f"opens no stream '{purpose}': that takes the role {needs}"):
                here.admit(ME.peer_id, shown, purpose)
    for kind in ("peers", "links", "lease", "runs", "revoked"):
        if ROLES.index(role) >= ROLES.index(WRITES.get(kind, "compute")):
            here.may_write(ME.peer_id, shown, kind, None)
        else:
            with pytest.raises(NotPermittedError, match="takes the role"):
                here.may_write(ME.peer_id, shown, kind, None)


def test_only_owners_offer_jobs_and_drain_and_only_admins_revoke() -> None:
    assert {purpose for purpose, role in OPENS.items() if role == "own"} >= {"job", "plan", "profile", "leave"}
    assert WRITES == {"runs": "own", "revoked": "admin"}


def test_who_shows_nothing_or_what_is_anothers_is_nobody() -> None:
    stranger = Identity.generate()
    forged = certify(stranger, b"", stranger.peer_id, stranger.peer_id, "admin", "", NOW)
    chained = certify(
        ME, by_root(ME, "own"), ROOT.peer_id, stranger.peer_id, "own", "", NOW
    )  # by a member that is no admin
    for shown, why in (
        (b"", "shows no certificate"),
        (by_root(ME, "own"), "shows the certificate of another"),
        (forged, "does not lead to the founder"),
        (chained, "signed by a peer that is no admin"),
    ):
        with pytest.raises(NotPermittedError, match=why):
            members().admit(stranger.peer_id, shown)
    assert Members().admit(stranger.peer_id, b"") is None, "an open mesh lets everybody in"


def test_a_certificate_ends_with_the_earliest_above_it_and_the_skew_of_clocks() -> None:
    for shown in (by_root(ME, "own"), by_admin(ME, "own", now=NOW + CERTIFICATE_S / 2)):
        assert members(NOW + CERTIFICATE_S + CLOCK_SKEW_S - 1).admit(ME.peer_id, shown) is None
        with pytest.raises(NotPermittedError, match=r"has ended on .*: join again with a new invite"):
            members(NOW + CERTIFICATE_S + CLOCK_SKEW_S).admit(ME.peer_id, shown)
    members(0.0).admit(ME.peer_id, by_root(ME, "own"))  # a clock that is behind shuts nobody out


def test_a_chain_is_bounded_and_fits_into_a_hello() -> None:
    chain, shown = [Identity.generate() for _ in range(MAX_CHAIN + 1)], b""
    for above, peer in zip([ROOT, *chain], chain, strict=False):
        shown = certify(above, shown, ROOT.peer_id, peer.peer_id, "admin", "f" * 64, NOW)
        if peer is chain[MAX_CHAIN - 1]:
            assert members().admit(peer.peer_id, shown) is None
            assert len(shown) <= MAX_CERTIFICATE_BYTES <= SHOWN_BYTES
    with pytest.raises((NotPermittedError, ProtocolError)):
        members().admit(chain[-1].peer_id, shown)


@given(st.data())
def test_one_changed_byte_of_a_certificate_is_noticed(data: st.DataObject) -> None:
    shown = bytearray(by_admin(ME, "compute"))
    shown[data.draw(st.integers(0, len(shown) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((NotPermittedError, ProtocolError)):
        members().admit(ME.peer_id, bytes(shown))


def test_each_field_of_a_certificate_is_checked() -> None:
    check_every_field(
        msgpack.unpackb(by_root(ME, "own")),
        lambda changed: opened(msgpack.packb(changed), ROOT.peer_id),
        refusals=(ProtocolError, NotPermittedError),
    )


def test_without_an_admin_here_no_invite_is_exchanged() -> None:
    with pytest.raises(NotPermittedError, match="this peer is no admin"):
        members().admit(ME.peer_id, b"anything", ENROL)


# -- who is revoked


def told(issuer: Identity, *peers: Identity, at: float = NOW) -> RevokedList:
    return RevokedList(issuer.peer_id, at, frozenset(p.peer_id for p in peers))


def test_whoever_is_revoked_is_refused_and_with_an_admin_all_whom_it_let_in() -> None:
    here = members()
    here.admit(ME.peer_id, by_root(ME, "own"))
    here.admit(YOU.peer_id, by_admin(YOU, "compute"))
    assert here.learn(told(ROOT, ME))
    assert not here.learn(told(ROOT, YOU, at=NOW - 1)), "an older list is no news"
    with pytest.raises(NotPermittedError, match="an admin has revoked peer"):
        here.admit(ME.peer_id, by_root(ME, "own", NOW + 100))  # a later certificate does not help
    assert (here.is_revoked(ME.peer_id), here.is_revoked(YOU.peer_id)) == (True, False)
    here.learn(told(ROOT, ADMIN, at=NOW + 1))
    assert (here.is_revoked(ME.peer_id), here.is_revoked(YOU.peer_id)) == (False, True)
    with pytest.raises(NotPermittedError, match="revoked"):
        here.admit(YOU.peer_id, by_admin(YOU, "compute"))


def test_an_admin_is_revoked_by_the_founder_only_and_the_founder_by_nobody() -> None:
    here, shown = members(), by_root(OTHER_ADMIN, "admin")
    here.learn(told(ADMIN, OTHER_ADMIN, ROOT))
    assert here.admit(OTHER_ADMIN.peer_id, shown) is None
    assert here.admit(ROOT.peer_id, by_root(ROOT, "admin")) is None
    here.learn(told(ROOT, OTHER_ADMIN))
    with pytest.raises(NotPermittedError, match="revoked"):
        here.admit(OTHER_ADMIN.peer_id, shown)


def renewed(shown: bytes, by: Identity, above: bytes = b"") -> bytes:
    """As who is asked to renew it does."""
    before = opened(shown, ROOT.peer_id)
    told = before.peer_id, before.role, before.invite
    return certify(by, above, ROOT.peer_id, *told, NOW + 100, let_in_by=before.let_in_by)


def renewing() -> None:
    """N came by an admin's invite, M by the founder's: whoever has renewed their certificates, N goes with that admin, M stays."""
    here, n, m = members(), by_admin(YOU, "own"), by_root(ME, "own")
    of_n = [n, renewed(n, ROOT), renewed(renewed(n, ROOT), ADMIN, by_root(ADMIN, "admin"))]
    of_m = [m, renewed(m, ROOT)]
    here.learn(told(ROOT, ADMIN))
    for shown in of_m:
        assert here.admit(ME.peer_id, shown) is None
    for shown in of_n:
        assert opened(shown, ROOT.peer_id).let_in_by == (ADMIN.peer_id,)
        with pytest.raises(NotPermittedError, match="revoked"):
            here.admit(YOU.peer_id, shown)


def test_whoever_renews_a_certificate_who_has_let_the_peer_in_stays_the_same() -> None:
    renewing()
    with changed(certify, "    if by.peer_id != root:", "    let_in_by = ()\n    if by.peer_id != root:"):
        assert breaks(renewing)


def test_whom_a_lower_admin_has_let_in_goes_with_each_above_it() -> None:
    admin = by_admin(OTHER_ADMIN, "admin")
    shown = certify(OTHER_ADMIN, admin, ROOT.peer_id, ME.peer_id, "own", "", NOW)
    for one in (shown, renewed(shown, ADMIN, by_root(ADMIN, "admin")), renewed(shown, ROOT)):
        assert opened(one, ROOT.peer_id).let_in_by == (OTHER_ADMIN.peer_id, ADMIN.peer_id)
        for gone in (OTHER_ADMIN, ADMIN):
            here = members()
            here.learn(told(ROOT, gone))
            with pytest.raises(NotPermittedError, match="revoked"):
                here.admit(ME.peer_id, one)
    moved = certify(OTHER_ADMIN, by_root(OTHER_ADMIN, "admin"), ROOT.peer_id, ME.peer_id, "own", "", NOW)
    assert opened(moved, ROOT.peer_id).let_in_by == (OTHER_ADMIN.peer_id,)
    back = renewed(moved, OTHER_ADMIN, admin)  # an admin who has come again, by another's invite
    assert opened(back, ROOT.peer_id).let_in_by == (OTHER_ADMIN.peer_id, ADMIN.peer_id)


HOUR_S = 3600.0


def by_older(peer: Identity, role: Role, now: float, admin: Identity = ADMIN) -> bytes:
    """By an admin whose own certificate ends 20 hours before one that the founder has signed at NOW."""
    return certify(admin, by_root(admin, "admin", NOW - 20 * HOUR_S), ROOT.peer_id, peer.peer_id, role, "", now)


def test_of_two_certificates_the_newer_counts_though_it_ends_first() -> None:
    here, old, new = members(), by_root(ME, "compute"), by_older(ME, "own", NOW + HOUR_S)
    assert opened(new, ROOT.peer_id).until < opened(old, ROOT.peer_id).until
    for shown in (old, new, old):  # who shows the old one again changes nothing
        here.admit(ME.peer_id, shown)
    assert here.known[ME.peer_id].role == "own"
    here.admit(ME.peer_id, by_root(ME, "compute", NOW + 2 * HOUR_S))
    assert here.known[ME.peer_id].role == "compute", "a renewal"


@pytest.mark.parametrize("later_s", [HOUR_S, -CLOCK_SKEW_S / 2])
def test_who_comes_back_by_another_admin_is_a_member_where_the_revoked_certificate_was_known(later_s: float) -> None:
    here = members()
    here.admit(ME.peer_id, by_admin(ME, "own"))
    here.learn(told(ROOT, ADMIN))
    assert here.is_revoked(ME.peer_id)
    here.admit(ME.peer_id, by_older(ME, "own", NOW + later_s, OTHER_ADMIN))  # two admins' clocks may differ
    assert not here.is_revoked(ME.peer_id)


def by_hand(by: Identity, above: bytes, let_in_by: tuple[str, ...] | None) -> bytes:
    told = (ME.peer_id, "own", NOW, NOW + 60, "", by.peer_id)
    version, more = (1, ()) if let_in_by is None else (2, (let_in_by,))
    covered = msgpack.packb([f"meshcee certificate {version}", ROOT.peer_id, *told, *more])
    return bytes(msgpack.packb([*told, above, by.sign(covered), *more]))


def test_no_admin_signs_for_whom_others_have_let_in() -> None:
    """Else one that is revoked could let in whom it likes, in another one's name."""
    above = by_root(ADMIN, "admin")
    assert members().admit(ME.peer_id, by_hand(ADMIN, above, (ADMIN.peer_id,))) is None
    for let_in_by in ((), (OTHER_ADMIN.peer_id,)):
        with pytest.raises(NotPermittedError, match="signed by an admin that has not let it in"):
            members().admit(ME.peer_id, by_hand(ADMIN, above, let_in_by))


def test_who_has_signed_a_certificate_of_an_older_meshcee_has_let_the_peer_in() -> None:
    assert opened(by_hand(ROOT, b"", None), ROOT.peer_id).let_in_by == ()
    shown = by_hand(ADMIN, by_root(ADMIN, "admin"), None)
    assert opened(shown, ROOT.peer_id).let_in_by == (ADMIN.peer_id,)
    with pytest.raises(NotPermittedError, match="was not signed"):
        opened(bytes(msgpack.packb([*msgpack.unpackb(shown), (ADMIN.peer_id,)])), ROOT.peer_id)
    new = by_hand(ADMIN, by_root(ADMIN, "admin"), (ADMIN.peer_id, OTHER_ADMIN.peer_id))
    with pytest.raises(NotPermittedError, match="was not signed"):
        opened(bytes(msgpack.packb(msgpack.unpackb(new)[:-1])), ROOT.peer_id)


people = [ROOT, ADMIN, OTHER_ADMIN, ME, YOU]


@given(
    st.lists(st.tuples(st.sampled_from(people[:3]), st.sets(st.sampled_from(people)), st.integers(0, 3)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_in_whatever_order_lists_come_the_verdicts_are_the_same(
    lists: list[tuple[Identity, set[Identity], int]], chance: random.Random
) -> None:
    newest: dict[tuple[str, int], RevokedList] = {}
    for issuer, peers, at in lists:  # an admin dates each of its lists otherwise
        newest.setdefault((issuer.peer_id, at), told(issuer, *peers, at=NOW + at))
    shuffled = list(newest.values())
    chance.shuffle(shuffled)
    verdicts = []
    for order in (newest.values(), shuffled, itertools.chain(shuffled, shuffled)):
        here = members()
        for peer, role in zip(people, ("admin", "admin", "admin", "own", "compute"), strict=True):
            here.admit(peer.peer_id, (by_admin if peer is YOU else by_root)(peer, role))  # type: ignore[arg-type]
        for one in order:
            here.learn(one)
        verdicts.append([here.is_revoked(peer.peer_id) for peer in people])
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert not verdicts[0][0], "the founder"


# -- records


def sealed(record: Record, by: Identity, shown: bytes) -> bytes:
    return seal(record, by, KEY, record.sent_at + 60, certificate=shown)


@pytest.mark.parametrize(
    ("record", "role"),
    [
        (PeerRecord(ME.peer_id, NOW, "anna"), "compute"),
        (LeaseRecord(ME.peer_id, NOW, 7), "compute"),
        (RunRecord(ME.peer_id, NOW, "gpt"), "own"),
        (RevokedRecord(ME.peer_id, NOW, (YOU.peer_id,)), "admin"),
    ],
)
def test_a_record_holds_with_its_writers_certificate_and_role(record: Record, role: Role) -> None:
    def refused(data: bytes, here: Members) -> None:
        assert place(data, KEY, members=here) is None
        with pytest.raises(NotPermittedError):
            open_sealed(type(record), ME.peer_id, data, KEY, now=NOW, members=here)

    good = sealed(record, ME, by_root(ME, role))
    assert place(good, KEY, members=members()) is not None
    assert open_sealed(type(record), ME.peer_id, good, KEY, now=NOW, members=members()) == record
    for below in ROLES[: ROLES.index(role)]:
        refused(sealed(record, ME, by_root(ME, below)), members())
    refused(sealed(record, ME, b""), members())
    refused(sealed(record, ME, by_root(YOU, "admin")), members())
    here = members()
    here.learn(told(ROOT, ME))
    refused(good, here)
    late = members()
    with pytest.raises(MeshceeError):  # ended
        open_sealed(type(record), ME.peer_id, good, KEY, now=NOW + CERTIFICATE_S + CLOCK_SKEW_S, members=late)


def test_a_list_is_believed_from_whoever_has_it_while_its_admin_is_one() -> None:
    record = RevokedRecord(ADMIN.peer_id, NOW, (ME.peer_id,), ("ab12",))
    data = seal(record, ADMIN, KEY, NOW + CERTIFICATE_S, certificate=by_root(ADMIN, "admin"))
    here = members()
    assert learn_list(data, KEY, Limits(), here, NOW + 3600)
    assert not learn_list(data, KEY, Limits(), here, NOW + 3600), "no news"
    assert here.is_revoked(ME.peer_id)
    assert here.is_cancelled("ab12")
    assert here.revoked() == [ME.peer_id]
    own = seal(RevokedRecord(ME.peer_id, NOW, (YOU.peer_id,)), ME, KEY, NOW + 60, certificate=by_root(ME, "own"))
    assert not learn_list(own, KEY, Limits(), members(), NOW)
    assert not learn_list(b"nonsense", KEY, Limits(), members(), NOW)


def test_an_admin_whose_certificate_has_ended_revokes_nobody_more() -> None:
    """Whatever date it writes into its list. What it had revoked before stays, and others still hear of that."""
    shown, ended = by_root(ADMIN, "admin"), NOW + CERTIFICATE_S + CLOCK_SKEW_S

    def of(at: float, *peers: Identity) -> bytes:
        record = RevokedRecord(ADMIN.peer_id, at, tuple(peer.peer_id for peer in peers))
        return seal(record, ADMIN, KEY, at + CERTIFICATE_S + 60, certificate=shown)

    before, again, back_dated, taken_back = of(NOW + 50, ME), of(NOW + 60, ME), of(NOW + 70, ME, YOU), of(NOW + 80)
    here = members(ended)
    assert not learn_list(before, KEY, Limits(), here, ended), "nobody knows when it was written"
    assert learn_list(before, KEY, Limits(), here, ended, kept=True)
    for data in (back_dated, taken_back):
        assert not learn_list(data, KEY, Limits(), here, ended)
    assert learn_list(again, KEY, Limits(), here, ended)
    assert here.revoked() == [ME.peer_id]
    assert learn_list(back_dated, KEY, Limits(), here, ended - 1), "while it is an admin"


def test_one_entry_revokes_all_who_came_by_an_invite_and_nobody_else() -> None:
    here = members()
    peers = {invite: Identity.generate() for invite in ("ab12", "cd34", "")}
    by = {invite: certify(ROOT, b"", ROOT.peer_id, peers[invite].peer_id, "own", invite, NOW) for invite in peers}
    here.learn(RevokedList(ADMIN.peer_id, NOW, frozenset([by_invite("ab12"), by_invite("")])))
    for invite in ("cd34", ""):
        assert here.admit(peers[invite].peer_id, by[invite]) is None
    with pytest.raises(NotPermittedError, match="revoked"):
        here.admit(peers["ab12"].peer_id, by["ab12"])
    admin = certify(ROOT, b"", ROOT.peer_id, OTHER_ADMIN.peer_id, "admin", "ab12", NOW)
    assert here.admit(OTHER_ADMIN.peer_id, admin) is None, "the founder alone revokes an admin"
    here.learn(RevokedList(ROOT.peer_id, NOW, frozenset([by_invite("ab12")])))
    with pytest.raises(NotPermittedError, match="revoked"):
        here.admit(OTHER_ADMIN.peer_id, admin)
