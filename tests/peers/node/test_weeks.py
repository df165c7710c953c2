"""A mesh over weeks: who is a member stays one while an admin is there, and who is revoked never comes back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dht import (
    CERTIFICATE_S,
    Identity,
    Members,
    MemoryStore,
    PeerRecord,
    SharedMemory,
    certify,
    learn_list,
)
from dht.records import open_sealed
from meshcee.config import Limits
from meshcee.errors import NotPermittedError, UsageError
from meshcee.events import Event
from meshcee.files import disk
from peers.mesh_view import MeshView
from peers.node.admission import Admin, Membership, stay_member
from peers.node.revoked import Revoked
from peers.transport import MemoryNetwork
from tests.mutation import breaks, changed
from tests.peers.node.test_members import KEY, SHORT, Office, office
from tests.rig.virtual_time import run

DAY_S = 86400.0
ROOT = Identity.generate()


class Peer(MeshView):
    """What `stay_member` sees of one; who else is there, a test says."""

    async def judge(self, *case: Any) -> Any:
        raise NotImplementedError

    def meets(self, *peers: str) -> None:
        self.directory.peers = {peer: PeerRecord(peer, self.clock(), "somebody") for peer in peers}


def now_s() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def a_peer(network: MemoryNetwork, identity: Identity, shown: bytes) -> AsyncIterator[Peer]:
    members = Members(ROOT.peer_id, shown, clock=now_s)
    async with network.transport(identity.peer_id, KEY.secret, timeouts=SHORT, members=members) as transport:
        store = MemoryStore(SharedMemory(now_s))
        yield Peer(
            identity,
            KEY,
            transport,
            store,
            may_coordinate=False,
            timeouts=SHORT,
            limits=Limits(),
            clock=now_s,
            members=members,
        )


@asynccontextmanager
async def staying(peer: Peer, admin: Admin | None = None, file: Path | None = None) -> AsyncIterator[None]:
    kept = Membership(ROOT.peer_id, KEY, peer.members.shown, file=file)
    task = asyncio.create_task(stay_member(peer, kept, admin))
    yield
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def by_root(peer: Identity, role: Any = "admin") -> bytes:
    return certify(ROOT, b"", ROOT.peer_id, peer.peer_id, role, "", now_s())


async def renewed_in_time() -> None:
    """An admin's own certificate ends on day 7. So does one that it signs on day 6.4, however young that one is."""
    key, own, network = Identity.generate(), Identity.generate(), MemoryNetwork()
    above = [by_root(key)]
    admin = Admin(key, ROOT.peer_id, lambda: above[0], key.peer_id, None, now_s)
    async with a_peer(network, key, above[0]) as at:
        admin.serve(at.transport, at.members, KEY, SHORT)
        await asyncio.sleep(6.4 * DAY_S)
        async with a_peer(network, own, admin.certify(own.peer_id, "own")) as member:
            member.members.admit(key.peer_id, above[0])
            member.meets(key.peer_id)
            async with staying(member):
                await asyncio.sleep(0.2 * DAY_S)
                above[0] = at.members.shown = by_root(key)
                await asyncio.sleep(0.9 * DAY_S)
                assert at.members.admit(own.peer_id, member.members.shown) is None


def test_a_young_certificate_that_ends_soon_is_renewed_in_time() -> None:
    run(renewed_in_time())
    with changed(stay_member, "or own.until - now < CERTIFICATE_S - RENEWED_AFTER_S", ""):
        assert breaks(lambda: run(renewed_in_time()))


async def later_alone() -> None:
    """An admin whose own ends soon renews to an earlier end than the certificate has: that one is kept, and others are asked."""
    key, own, network = Identity.generate(), Identity.generate(), MemoryNetwork()
    above = by_root(key)
    admin = Admin(key, ROOT.peer_id, lambda: above, key.peer_id, None, now_s)
    async with a_peer(network, key, above) as at:
        admin.serve(at.transport, at.members, KEY, SHORT)
        await asyncio.sleep(5 * DAY_S)
        shown = certify(
            ROOT, b"", ROOT.peer_id, own.peer_id, "own", "", now_s() - 1.5 * DAY_S, let_in_by=(key.peer_id,)
        )
        async with a_peer(network, own, shown) as member:
            member.members.admit(key.peer_id, above)
            member.meets(key.peer_id)
            async with staying(member):
                await asyncio.sleep(3600)
            assert member.members.shown == shown


def test_a_certificate_that_would_end_earlier_is_none_to_keep() -> None:
    run(later_alone())
    with changed(stay_member.__globals__["_renew"], "(own is None or found.until > own.until)", "True"):
        assert breaks(lambda: run(later_alone()))


async def told_once() -> None:
    own = Identity.generate()
    async with a_peer(MemoryNetwork(), own, by_root(own, "own")) as member:
        with capture_logs() as logs:
            async with staying(member):
                await asyncio.sleep(CERTIFICATE_S)
                assert [line for line in logs if line["event"] == Event.MEMBERSHIP_OVER] == []
                await asyncio.sleep(DAY_S)
        (told,) = [line for line in logs if line["event"] == Event.MEMBERSHIP_OVER]
        assert "has ended on" in told["why"]


def test_who_is_no_member_any_more_is_told_once() -> None:
    run(told_once())
    with changed(stay_member, "if not was_told:", "if True:"):
        assert breaks(lambda: run(told_once()))


async def notes_others(folder: Path) -> None:
    own, other = Identity.generate(), Identity.generate()
    async with a_peer(MemoryNetwork(), own, by_root(own, "own")) as member, staying(member, file=folder / "member"):
        record = PeerRecord(other.peer_id, now_s(), "other", (f"/ip4/192.0.2.1/tcp/1/p2p/{other.peer_id}",))
        member.directory.peers = {other.peer_id: record}
        await asyncio.sleep(60)
        member.meets()  # nobody: where they were stays known
        await asyncio.sleep(DAY_S)
    kept = Membership.read(folder / "member")
    assert kept is not None
    assert kept.others == record.addresses


def test_where_others_are_is_kept_for_commands_while_the_peer_is_down(tmp_path: Path) -> None:
    run(notes_others(tmp_path / "1"))
    with changed(stay_member, "kept.others = _seen(agent) or kept.others", ""):
        assert breaks(lambda: run(notes_others(tmp_path / "2")))


# -- who is revoked


async def lists_last(folder: Path) -> None:
    """Whoever comes after ten days learns it from an admin's peer that has run all the time."""
    first, gone = Identity.generate(), Identity.generate()
    admin = Admin(ROOT, ROOT.peer_id, bytes, first.peer_id, folder / "invites.json", asyncio.get_running_loop().time)
    async with a_peer(MemoryNetwork(), first, by_root(first)) as peer:
        assert await peer.directory.revoke(admin.sealed_list(peer.members, KEY, peer.limits, [gone.peer_id]))
        async with staying(peer, admin):
            await asyncio.sleep(10 * DAY_S)
        (told,) = peer.members.lists.values()
        late = Members(ROOT.peer_id, clock=now_s)
        assert learn_list(told.data, KEY, Limits(), late, now_s())
        assert late.revoked() == [gone.peer_id]


def test_an_admins_peer_tells_its_list_again_before_it_ends(tmp_path: Path) -> None:
    run(lists_last(tmp_path / "1"))
    with changed(stay_member, "if admin is not None and admin.is_list_due(members):", "if False:"):
        assert breaks(lambda: run(lists_last(tmp_path / "2")))


def test_a_list_holds_for_longer_than_the_certificates_that_it_ends() -> None:
    now, members = time.time(), Members(ROOT.peer_id)
    data = Admin(ROOT, ROOT.peer_id, bytes, "", None, lambda: now).sealed_list(members, KEY, Limits(), [ROOT.peer_id])
    late = now + CERTIFICATE_S + 20.0  # of clocks that differ, one before and one behind

    def holds() -> None:
        assert learn_list(data, KEY, Limits(), Members(ROOT.peer_id), late)

    holds()
    with changed(open_sealed, "min(now, record.sent_at)", "now"):
        assert breaks(holds)


async def weeks_later(folder: Path) -> None:
    """By an invite for 30 days; the admin's peer was down for a week, so that its list has ended meanwhile."""
    ledger, gone = folder / "invites.json", Identity.generate()
    async with office(ledger, ROOT) as here:
        token = here.invite(uses=3, for_s=30 * DAY_S)
        await here.let_in(token, gone)
        here.admin.sealed_list(here.members, KEY, Limits(), [gone.peer_id], sorted(here.admin.invites_of(gone.peer_id)))
    async with office(ledger, ROOT, at=here.first) as later:
        assert later.members.lists == {}
        await refused(later, token, gone)
        await refused(later, token, Identity.generate())
        await refused(later, later.invite(), gone)
        await later.let_in(later.invite())


async def refused(here: Office, token: Any, peer: Identity) -> None:
    with pytest.raises(NotPermittedError, match="an admin has revoked this invite, or peer"):
        await here.let_in(token, peer)


def test_who_was_revoked_never_comes_back_by_the_same_line(tmp_path: Path) -> None:
    asyncio.run(weeks_later(tmp_path / "1"))
    with changed(Admin, "or grant.id in self._revoked.invites", ""):
        assert breaks(lambda: asyncio.run(weeks_later(tmp_path / "2")))
    with changed(Admin, "or peer_id in self._revoked.peers", ""):
        assert breaks(lambda: asyncio.run(weeks_later(tmp_path / "3")))


def test_a_damaged_list_is_one_sentence(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"peers": 3}'):
        (tmp_path / "invites.revoked.json").write_text(text)
        with pytest.raises(UsageError, match="which says whom this admin has revoked, cannot be read"):
            Admin(ROOT, ROOT.peer_id, bytes, "", tmp_path / "invites.json", time.time)


class Slow(disk.Disk):
    """Whoever writes waits for another one who does, as long as that may come."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)

    def rename(self, old: Path, new: Path) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.3)
        super().rename(old, new)


def two_at_once(folder: Path) -> None:
    def revoke(peer: Identity) -> None:
        admin = Admin(ROOT, ROOT.peer_id, bytes, "", folder / "invites.json", time.time)
        admin.sealed_list(Members(ROOT.peer_id), KEY, Limits(), [peer.peer_id])

    gone = [Identity.generate() for _ in range(2)]
    with disk.using(Slow()):
        threads = [threading.Thread(target=revoke, args=(peer,)) for peer in gone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    members = Members(ROOT.peer_id)
    data = Admin(ROOT, ROOT.peer_id, bytes, "", folder / "invites.json", time.time).sealed_list(members, KEY, Limits())
    assert learn_list(data, KEY, Limits(), members, None)
    assert members.revoked() == sorted(peer.peer_id for peer in gone)


def test_of_two_commands_that_revoke_at_once_both_count(tmp_path: Path) -> None:
    two_at_once(tmp_path / "1")
    with changed(Revoked, "with disk.locked(self._file) if self._file is not None else nullcontext():", "if True:"):
        assert breaks(lambda: two_at_once(tmp_path / "2"))
    with changed(Revoked, "here = self._read()", "here = self._record"):
        assert breaks(lambda: two_at_once(tmp_path / "3"))
