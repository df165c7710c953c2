"""Joining, staying, being sent away: an invite lets in as many as it says and no longer, roles hold, revocations spread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dht import (
    CERTIFICATE_S,
    ENROL,
    Grant,
    Identity,
    Members,
    MeshKey,
    PeerRecord,
    RevokedRecord,
    Role,
    Token,
    certify,
    learn_list,
    seal,
)
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, UsageError
from meshcee.files.home import Home
from peers.node import admission
from peers.node.admission import Admin, Membership, enrol, is_more
from peers.node.agent import Agent
from peers.node.authority import Authority, authority_of
from peers.node.departure import Departure, ask_to_leave
from peers.node.early import JoinOptions
from peers.node.founding import Founding, founded, founds_again
from peers.node.in_process import InProcess
from peers.transport import Frame, MemoryNetwork, Stream, StreamClosed, Transport
from tests.mutation import breaks, changed

SHORT = Timeouts(dial_s=2.0, handshake_s=2.0, shutdown_s=1.0)
KEY = MeshKey.generate()
LONG_S = 20 * 365 * 86400.0  # longer than what peers inside one process begin with


@dataclass
class Office:
    """An admin that serves in a network of this process, and newcomers."""

    network: MemoryNetwork
    root: Identity
    admin: Admin
    members: Members
    transport: Transport
    first: Identity
    clock: list[float] = field(default_factory=lambda: [time.time()])

    @property
    def at(self) -> str:
        return self.first.peer_id

    def invite(self, role: Role = "compute", uses: int | None = 1, for_s: float = 3600.0) -> Token:
        return self.admin.invite((f"/ip4/192.0.2.1/tcp/1/p2p/{self.at}",), role, uses, for_s)

    async def let_in(self, token: Token, peer: Identity | None = None) -> Membership:
        peer = peer or Identity.generate()
        assert token.grant is not None
        shown = Members(self.root.peer_id, token.grant.pack())
        async with self.network.transport(peer.peer_id, token.key, timeouts=SHORT, members=shown) as door:
            return await enrol(door, token)


@asynccontextmanager
async def office(
    ledger: Path | None = None, root: Identity | None = None, at: Identity | None = None
) -> AsyncIterator[Office]:
    root, first, network, clock = root or Identity.generate(), at or Identity.generate(), MemoryNetwork(), [time.time()]
    admin = Admin(root, root.peer_id, bytes, first.peer_id, ledger, lambda: clock[0])
    members = Members(root.peer_id, admin.certify(first.peer_id, "admin"), clock=lambda: clock[0])
    async with network.transport(first.peer_id, KEY.secret, timeouts=SHORT, members=members) as transport:
        admin.serve(transport, members, KEY, SHORT)
        yield Office(network, root, admin, members, transport, first, clock)


async def test_an_invite_is_exchanged_for_a_certificate_and_the_meshs_key() -> None:
    async with office() as here:
        peer = Identity.generate()
        kept = await here.let_in(here.invite("own"), peer)
        assert kept.key == KEY
        assert here.members.admit(peer.peer_id, kept.certificate, "job") is None
        token = here.invite("own")
        assert KEY.secret.hex() not in token.encode()
        assert token.grant is not None
        assert here.members.own is not None


async def test_an_invite_lets_in_as_many_as_it_says_and_who_came_by_it_again(tmp_path: Path) -> None:
    ledger, first = tmp_path / "invites.json", Identity.generate()
    async with office(ledger) as here:
        token = here.invite(uses=2)
        await here.let_in(token, first)
        await here.let_in(token)
        await here.let_in(token, first)
        with pytest.raises(NotPermittedError, match="has let in 2 peers, as many as it was made for"):
            await here.let_in(token)
        for _ in range(3):
            await here.let_in(here.invite(uses=None))
        again = Admin(here.root, here.root.peer_id, bytes, here.at, ledger, time.time)
        assert token.grant is not None
        assert again.invites_of(first.peer_id) == {token.grant.id}


async def test_of_many_who_come_at_once_no_more_are_let_in(tmp_path: Path) -> None:
    async with office(tmp_path / "invites.json") as here:
        token = here.invite(uses=3)
        done = await asyncio.gather(*(here.let_in(token) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(one, Membership) for one in done) == 3
    assert sum(isinstance(one, NotPermittedError) for one in done) == 5


async def test_an_expired_invite_is_refused_by_the_admins_clock_whatever_the_newcomer_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with office() as here:
        token = here.invite(for_s=60.0)
        here.clock[0] += 61.0
        with pytest.raises(NotPermittedError, match="the invite token expired"):
            await here.let_in(token)


@pytest.mark.parametrize("changes", [{"expires_at": 1e12}, {"role": "admin"}, {"uses": None}])
async def test_an_edited_invite_proves_nothing(changes: dict[str, object]) -> None:
    """Its holder leaves out every check of its own: what stands between is the admin's signature."""
    async with office() as here:
        token = here.invite(for_s=-60.0 if "expires_at" in changes else 60.0)
        assert token.grant is not None
        edited = replace(token, grant=Grant(**{**token.grant._asdict(), **changes}))
        with pytest.raises(NotPermittedError):
            await here.let_in(edited)


async def test_who_proves_one_invite_cannot_name_a_better_one() -> None:
    """Two streams at once, each with its own invite: what is granted is what this very stream has proven."""
    async with office() as here:
        mine, better, peer = here.invite("compute"), here.invite("admin"), Identity.generate()
        assert mine.grant is not None
        assert better.grant is not None
        shown = Members(here.root.peer_id, mine.grant.pack())
        async with here.network.transport(peer.peer_id, mine.key, timeouts=SHORT, members=shown) as door:
            stream = await door.open(here.at, ENROL)
            proof = admission.proven(mine.key, peer.peer_id)
            await stream.send(Frame("enrol", {"invite": better.grant.pack(), "proof": proof}))
            reply = await stream.recv()
        assert reply.kind == "refused"
        assert "does not know its signature" in reply.header["message"]


async def test_a_member_cannot_be_reached_with_an_invite_alone() -> None:
    async with office() as here:
        token = here.invite("own")
        assert token.grant is not None
        shown = Members(here.root.peer_id, token.grant.pack())
        async with here.network.transport(
            Identity.generate().peer_id, token.key, timeouts=SHORT, members=shown
        ) as door:
            with pytest.raises(NotPermittedError):
                await door.open(here.at, "join")


async def test_what_a_member_was_given_is_kept_and_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    async with office() as here:
        peer = Identity.load_or_create(tmp_path / "0.key")
        kept = await here.let_in(here.invite(), peer)
        file = Membership.place(tmp_path / "0.key", here.root.peer_id)
        replace(kept, file=file, addresses=("/x",)).save()
        assert file.stat().st_mode & 0o077 == 0, "it holds the mesh's key"
        again = Membership.load(tmp_path / "0.key", here.root.peer_id)
        assert again is not None
        assert (again.key, again.certificate, again.addresses) == (kept.key, kept.certificate, ("/x",))
        assert again.holds(peer.peer_id, time.time())
        assert again.holds(peer.peer_id, time.time() + 2 * CERTIFICATE_S) is None
        assert Membership.load(tmp_path / "0.key", peer.peer_id) is None
        file.write_text("{")
        assert Membership.load(tmp_path / "0.key", here.root.peer_id) is None


def founded_by(home: Home, identity: Path | None, **kept: Any) -> tuple[Identity, str]:
    """The first peer of a mesh that was started, and is down; and the mesh's root."""
    with Founding.of(home, identity, is_open=False) as founding, home.identity_file(founding.identity) as file:
        assert founding.root is not None
        root, first = founding.root.peer_id, Identity.load_or_create(file)
        admin = Admin(founding.root, root, bytes, first.peer_id, None, time.time)
        certificate, place = admin.certify(first.peer_id, "admin"), Membership.place(file, root)
        Membership(root, founding.key, certificate, file=place, addresses=(address(1, first),), **kept).save()
        founding.note("127.0.0.1:0", "/ip4/127.0.0.1/tcp/1", file, "TOKEN")
        return first, root


def address(port: int, peer: Identity) -> str:
    return f"/ip4/192.0.2.1/tcp/{port}/p2p/{peer.peer_id}"


@pytest.mark.parametrize("where", [None, "elsewhere/own.key", "home/identities/own.key"])
def test_who_has_founded_a_mesh_has_its_authority_and_nobody_else_has(tmp_path: Path, where: str | None) -> None:
    def story(folder: Path) -> None:
        home, identity = Home(folder / "home"), folder / where if where else None
        assert authority_of(home, None) is None
        first, root = founded_by(home, identity)
        grant = Grant(root, first.peer_id, first.peer_id, "x", "own", 1, 1e12)
        for token in (None, Token.sign(first, (), grant)):
            found = authority_of(home, token)
            assert found is not None
            assert (found.admin.key.peer_id, found.admin.root, found.admin.at) == (root, root, first.peer_id)
            assert found.addresses == (address(1, first),)
        other = Token.sign(first, (), grant._replace(root=first.peer_id))
        assert authority_of(home, other) is None, "a token of another mesh"
        assert founds_again(home, identity)
        assert founds_again(home, None) == (identity is None)

    story(tmp_path / "1")
    line = {None: '(home.folder / "mesh", ', "elsewhere/own.key": ", *home.identities_elsewhere()"}.get(
        where, "*bases, "
    )
    with changed(founded, line, "(" if where is None else ""):
        assert breaks(lambda: story(tmp_path / "2"))


def test_another_admins_authority_lies_where_its_identity_does(tmp_path: Path) -> None:
    home, own = Home(tmp_path / "home"), tmp_path / "elsewhere" / "own.key"
    own.parent.mkdir()
    with home.identity_file(own) as file:
        admin, root = Identity.load_or_create(file), Identity.generate()
        shown = certify(root, b"", root.peer_id, admin.peer_id, "admin", "", time.time())
        Membership(root.peer_id, KEY, shown, file=Membership.place(file, root.peer_id)).save()
    found = authority_of(home, None)
    assert found is not None
    assert (found.admin.at, found.membership.identity) == (admin.peer_id, own)


def test_a_command_of_an_admins_machine_dials_others_too_and_comes_as_another_peer(tmp_path: Path) -> None:
    home, (seen, invited) = Home(tmp_path), (Identity.generate() for _ in range(2))
    first, root = founded_by(home, None, others=(address(2, seen),))
    joined = Token.sign(first, (address(3, invited),), Grant(root, first.peer_id, first.peer_id, "x", "own", 1, 0.0))
    found = authority_of(home, joined)
    assert found is not None
    here, there, line = address(1, first), address(2, seen), address(3, invited)
    assert Token.parse(found.way_in()).addresses == (here, there)
    assert Token.parse(found.way_in(joined)).addresses == (here, line, there)

    with home.identity_file() as file:
        assert Identity.load_or_create(file).peer_id == first.peer_id, "who leaves nothing out comes as the peer itself"
    with home.identity_file(None, [found.membership.identity]) as file:
        assert Identity.load_or_create(file).peer_id != first.peer_id


# -- in a mesh


@asynccontextmanager
async def a_mesh(*roles: Role, second: Identity | None = None) -> AsyncIterator[tuple[InProcess, list[Agent]]]:
    """`second` is the identity of the second peer."""
    async with InProcess(JoinOptions(local=0, measures=False)) as here, AsyncExitStack():
        agents = [
            await here.start(f"p{i}", lends=i == 0, role=role, identity=second if i == 1 else None)
            for i, role in enumerate(roles)
        ]
        for agent in agents:
            async with asyncio.timeout(10):
                await agent.directory.wait_for(lambda agent=agent: len(agent.directory.peers) == len(roles))
        yield here, agents


async def test_a_member_that_only_computes_offers_no_job_and_drains_nobody() -> None:
    async with a_mesh("compute", "compute", "own") as (_, (lender, member, owner)):
        departure = Departure(lender)
        for purpose in ("job", "plan", "leave"):
            with pytest.raises(NotPermittedError, match=f"opens no stream '{purpose}': that takes the role own"):
                await member.transport.open(lender.peer_id, purpose)
        with pytest.raises(NotPermittedError):
            await ask_to_leave(member, lender.peer_id, lambda *_: None)
        asked = asyncio.create_task(ask_to_leave(owner, lender.peer_id, lambda *_: None))
        async with asyncio.timeout(10):
            assert await departure.run()
        asked.cancel()
        await asyncio.wait([asked])


async def test_a_peer_without_a_certificate_is_nobody() -> None:
    async with a_mesh("own") as (here, (agent,)):
        async with here.network.transport("stranger", b"", timeouts=SHORT) as stranger:
            with pytest.raises(NotPermittedError, match="shows no certificate"):
                await stranger.open(agent.peer_id, "join")
        ended = here.members_for("late", clock=time.time)
        ended.shown = b""
        async with here.network.transport("late", b"", timeouts=SHORT, members=ended) as late:
            with pytest.raises(NotPermittedError):
                await late.open(agent.peer_id, "join")


def authority_in(here: InProcess) -> Authority:
    admin = Admin(here.root, here.root.peer_id, bytes, "", None, time.time)
    return Authority(admin, Membership(here.root.peer_id, MeshKey(), b""))


async def test_who_is_revoked_is_gone_everywhere_within_seconds_streams_and_all() -> None:
    async with a_mesh("own", "own", "own", "own", "own") as (here, agents):
        admin, lost, *others = agents
        others[0].transport.serve("held", _held)
        stream = await lost.transport.open(others[0].peer_id, "held")
        start_s = time.monotonic()
        told = await authority_in(here).revoke(admin, "p1")
        assert (told["heard"], told["peers"]) == (3, 3)
        async with asyncio.timeout(10):
            for agent in (admin, *others):
                await agent.directory.wait_for(lambda agent=agent: lost.peer_id not in agent.directory.peers)
            with pytest.raises(StreamClosed):
                await stream.recv()
        assert time.monotonic() - start_s < 10
        for agent in others:
            with pytest.raises(NotPermittedError, match="an admin has revoked"):
                await lost.transport.open(agent.peer_id, "join")
            await agent.directory.refresh()
            assert lost.peer_id not in agent.directory.peers
            assert lost.peer_id not in await agent.directory.read(PeerRecord)
        with pytest.raises(UsageError, match="no peer of this mesh is called 'nobody'"):
            await authority_in(here).revoke(admin, "nobody")
        await authority_in(here).revoke(admin, others[0].peer_id)
        assert sorted(admin.members.revoked()) == sorted([lost.peer_id, others[0].peer_id])


async def test_one_command_revokes_all_who_came_by_an_invite() -> None:
    async with a_mesh("own", "own", "own") as (here, (admin, *others)):
        admin.transport.serve("held", _held)
        authority, root = authority_in(here), here.root.peer_id
        with pytest.raises(UsageError, match="by which invite p1 came"):
            await authority.revoke(admin, "p1", everybody=True)
        for peer in others:
            peer.members.shown = certify(here.root, b"", root, peer.peer_id, "own", "ab12", time.time(), LONG_S)
            await peer.transport.open(admin.peer_id, "held")
        told = await authority.revoke(admin, "p1", everybody=True)
        assert told["invites"] == ["ab12"]
        for peer in others:
            with pytest.raises(NotPermittedError, match="an admin has revoked"):
                await peer.transport.open(admin.peer_id, "held")
        assert admin.members.revoked() == sorted([others[0].peer_id, "invite ab12"])


async def _held(stream: Stream) -> None:
    await stream.recv()


async def test_of_two_admins_commands_at_once_both_are_heard(tmp_path: Path) -> None:
    """As two terminals of the admin's machine: each has joined by itself, and knows nothing of the other."""
    async with a_mesh("own", "own", "own", "own", "own") as (here, agents):
        admins = [
            Admin(here.root, here.root.peer_id, bytes, "", tmp_path / "invites.json", time.time) for _ in range(2)
        ]
        kept = Membership(here.root.peer_id, MeshKey(), b"")
        gone = sorted(agent.peer_id for agent in agents[2:4])
        await asyncio.gather(*(Authority(a, kept).revoke(agents[i], gone[i]) for i, a in enumerate(admins)))
        async with asyncio.timeout(10):
            for agent in (agents[0], agents[1], agents[4]):
                await agent.directory.wait_for(lambda agent=agent: agent.members.revoked() == gone)


async def test_who_was_away_learns_of_it_from_the_store_before_it_serves_anybody() -> None:
    async with a_mesh("own", "own", "own") as (here, (admin, lost, _)):
        await authority_in(here).revoke(admin, lost.peer_id)
        late = await here.start("late", lends=False)
        async with asyncio.timeout(10):
            await late.directory.wait_for(lambda: late.members.is_revoked(lost.peer_id))
        with pytest.raises(NotPermittedError, match="revoked"):
            await lost.transport.open(late.peer_id, "join")


async def test_a_certificate_is_renewed_by_an_admin_who_is_there_and_kept() -> None:
    async with a_mesh("admin", "own") as (here, (first, member)):
        admin = Admin(here.root, here.root.peer_id, bytes, first.peer_id, None, time.time)
        admin.serve(first.transport, first.members, KEY)
        old = admin.certify(member.peer_id, "own", "ab12", life_s=100.0)
        kept = Membership(here.root.peer_id, KEY, old)
        member.members.shown = old
        given = await admission.renewed(member, kept, first.peer_id)
        known = given.holds(member.peer_id, time.time() + CERTIFICATE_S / 2)
        assert known is not None
        assert known.role == "own", "no other role than it had"
        member.members.shown = old = admin.certify(member.peer_id, "own", life_s=-3600.0)
        with pytest.raises(MeshceeError, match="has ended"):
            await admission.renewed(member, replace(kept, certificate=old), first.peer_id)


async def test_a_renewal_keeps_the_role_of_the_newer_certificate_though_that_one_ends_first() -> None:
    async with a_mesh("admin", "own") as (here, (first, member)):
        other, root, now = Identity.generate(), here.root.peer_id, time.time()
        Admin(here.root, root, bytes, first.peer_id, None, time.time).serve(first.transport, first.members, KEY)
        assert first.members.known[member.peer_id].role == "own"
        above = certify(here.root, b"", root, other.peer_id, "admin", "", now - 3600.0)
        member.members.shown = certify(other, above, root, member.peer_id, "admin", "", now)
        given = await admission.renewed(member, Membership(root, KEY, member.members.shown), first.peer_id)
        found = given.holds(member.peer_id, now)
        assert found is not None
        assert (found.role, found.let_in_by) == ("admin", (other.peer_id,))


def sealed_list(by: Identity, *peers: Identity) -> bytes:
    """The founder's list."""
    now, own = time.time(), certify(by, b"", by.peer_id, by.peer_id, "admin", "", time.time())
    record = RevokedRecord(by.peer_id, now, tuple(peer.peer_id for peer in peers))
    return seal(record, by, KEY, now + CERTIFICATE_S, certificate=own)


async def coming_back() -> None:
    """A member that goes with the admin that has let it in comes back by another one's invite."""
    async with office() as here:
        admin, member, root = Identity.generate(), Identity.generate(), here.root.peer_id
        above = here.admin.certify(admin.peer_id, "admin")
        old = Admin(admin, root, lambda: above, admin.peer_id, None, time.time).certify(member.peer_id, "own")
        here.members.admit(member.peer_id, old)
        kept = Membership(root, KEY, old)
        assert kept.holds(member.peer_id, time.time())
        news = sealed_list(here.root, admin)
        assert learn_list(news, KEY, Limits(), here.members, time.time())
        assert replace(kept, lists=(news,)).holds(member.peer_id, time.time()) is None, "so it is exchanged anew"
        again = await here.let_in(here.invite(), member)
        assert again.holds(member.peer_id, time.time())
        assert here.members.admit(member.peer_id, again.certificate) is None
        with pytest.raises(NotPermittedError, match="an admin has revoked this invite, or peer"):
            await here.let_in(here.invite(), admin)


def test_who_goes_with_an_admin_comes_back_by_another_ones_invite() -> None:
    asyncio.run(coming_back())
    for place, line, instead in (
        (Admin, "is_named(peer_id)", "is_revoked(peer_id)"),
        (Membership.vouch, "self.members(lambda: now).vouch", "Members(self.root).vouch"),
    ):
        with changed(place, line, instead):
            assert breaks(lambda: asyncio.run(coming_back()))


async def renewals() -> None:
    """M was let in by the founder, N by an admin: that admin renews N's certificate alone, and the founder both."""
    key = Identity.generate()
    async with a_mesh("admin", "admin", "own", "own", second=key) as (here, (first, other, m, n)):
        root = here.root.peer_id
        above = certify(here.root, b"", root, other.peer_id, "admin", "", time.time(), LONG_S)
        founder = Admin(here.root, root, bytes, first.peer_id, None, time.time)
        admin = Admin(key, root, lambda: above, other.peer_id, None, time.time)
        founder.serve(first.transport, first.members, KEY)
        admin.serve(other.transport, other.members, KEY)
        n.members.shown = admin.certify(n.peer_id, "own", life_s=LONG_S)
        kept_m, kept_n = (Membership(root, KEY, one.members.shown) for one in (m, n))
        for by, renewing, kept in ((first, m, kept_m), (first, n, kept_n), (other, n, kept_n)):
            given = await admission.renewed(renewing, kept, by.peer_id)
            found = given.holds(renewing.peer_id, time.time())
            assert found is not None
            assert found.let_in_by == (() if renewing is m else (other.peer_id,))
        with pytest.raises(NotPermittedError, match="another admin has let this peer in"):
            await admission.renewed(m, kept_m, other.peer_id)


def test_who_has_let_a_peer_in_or_the_founder_renews_its_certificate_and_nobody_else() -> None:
    asyncio.run(renewals())
    with changed(Admin, "if self.key.peer_id not in (self.root, *known.let_in_by):", "if False:"):
        assert breaks(lambda: asyncio.run(renewals()))
    with changed(Admin, "known.invite, let_in_by=known.let_in_by", "known.invite"):
        assert breaks(lambda: asyncio.run(renewals()))


async def test_an_admin_below_two_others_lets_nobody_in_and_says_so_before_it_counts(tmp_path: Path) -> None:
    """What it signed was too far below the founder for anybody to believe."""
    (root, first, second, third), network = (Identity.generate() for _ in range(4)), MemoryNetwork()
    above, name, ledger = b"", root.peer_id, tmp_path / "invites.json"
    for by, peer in ((root, first), (first, second), (second, third)):
        admin = Admin(by, name, partial(bytes, above), by.peer_id, None, time.time)
        assert admin.invite((), "admin", 1, 60.0).grant
        above = admin.certify(peer.peer_id, "admin")
    lowest = Admin(third, name, lambda: above, third.peer_id, ledger, time.time)
    with pytest.raises(NotPermittedError, match="ask the founder"):
        lowest.invite((), "compute", 1, 60.0)
    members, grant = Members(name, above), Grant(name, third.peer_id, third.peer_id, "older", "own", 1, 1e12)
    line = Token.sign(third, (address(1, third),), grant)
    async with network.transport(third.peer_id, KEY.secret, timeouts=SHORT, members=members) as transport:
        lowest.serve(transport, members, KEY, SHORT)
        with pytest.raises(NotPermittedError, match="ask the founder"):
            await Office(network, root, lowest, members, transport, third).let_in(line)
    assert not ledger.exists()
    authority = Authority(lowest, Membership(name, KEY, above, addresses=(address(1, third),)))
    with pytest.raises(NotPermittedError, match="ask the founder"):
        authority.way_in()
    assert authority.way_in(line) == line.encode(), "by another's line its commands still join"
    known = members.own
    assert known is not None
    assert not is_more(grant._replace(role="admin", issuer=second.peer_id), known), "it came by that one"
    assert is_more(grant._replace(role="admin", issuer=name), known)
    assert not is_more(grant._replace(role="own", issuer=name), known)


async def test_without_its_admin_an_invite_lets_nobody_in_and_says_what_to_do() -> None:
    async with office() as here:
        token = here.invite()
    with pytest.raises(JoinError, match="the machine that has made this invite does not answer"):
        await here.let_in(token)
