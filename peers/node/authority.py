"""What an admin's machine can do beside its running peer: sign invites, and say who is no member any more.

The idea: the key on the disk is the right. A command signs with it and tells the mesh as any peer does, by a record and by gossip;
the admin's own peer hears it like all others. It then waits until everybody who is there has been told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dht import MAX_ADDRESSES, Identity, Token, by_invite, learn_list, public_key_of
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError, UsageError
from meshcee.files.home import Home
from peers.node.admission import Admin, Membership, ledger_of
from peers.node.agent import Agent
from peers.node.departure import matching
from peers.node.founding import founded

__all__ = ["Authority", "authority_of"]

TOLD_AT_ONCE = 16
OWN_ADDRESSES = 8  # of the addresses that a command dials
MINUTES_S = 600.0  # that this machine's own way in holds


@dataclass(frozen=True)
class Authority:
    """An admin's key on this machine, and where its peer is (or was when it was last up)."""

    admin: Admin
    membership: Membership
    others: tuple[Membership, ...] = ()  # what else this machine knows of the mesh

    def let_in(self, identity: Identity) -> Membership:
        """Another peer of this machine: nobody need be asked."""
        assert identity.path is not None
        certificate = self.admin.certify(identity.peer_id, "own")
        file = Membership.place(identity.path, self.membership.root)
        return Membership(self.membership.root, self.membership.key, certificate, self.membership.lists, file)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.membership.addresses

    def way_in(self, joined: Token | None = None) -> str:
        """An invite for a command of this machine: what was printed may have ended. Where this machine's own peer is down, others
        answer, as far as the machine knows where they are, or `joined` says so. An admin that lets nobody in has `joined` alone,
        or NotPermittedError."""
        if joined is not None and not self.admin.lets_in:
            return joined.encode()
        known = (self.membership, *self.others)
        others = [*(joined.addresses if joined else ()), *(a for one in known for a in one.others)]
        addresses = tuple(dict.fromkeys([*self.addresses[:OWN_ADDRESSES], *others]))
        return self.admin.invite(addresses[:MAX_ADDRESSES], "own", 1, MINUTES_S).encode()

    async def revoke(self, agent: Agent, wanted: str, *, everybody: bool = False) -> dict[str, Any]:
        """Sign that this peer is no member any more, tell everybody, and say how many have heard it.

        `everybody`: nor is who came by the same invite; UsageError where that is not known.
        """
        key, members = self.admin.key, agent.members
        for kept in (self.membership, *self.others):
            for data in kept.lists:
                learn_list(data, agent.mesh_key, agent.limits, members, agent.clock(), kept=True)
        await agent.directory.refresh()
        peer, name = _whom(agent, wanted)
        if peer in (self.membership.root, self.admin.at, key.peer_id):
            raise NotPermittedError("an admin does not revoke itself: ask another admin, or found a new mesh")
        if (known := members.known.get(peer)) and known.role == "admin" and key.peer_id != self.membership.root:
            raise NotPermittedError(f"{name} is an admin: only the machine that has started the mesh can revoke one")
        invites = {known.invite} if known and known.invite else set()
        invites |= self.admin.invites_of(peer)
        peers = [peer]
        if everybody:
            if not invites:
                raise UsageError(
                    f"this machine does not know by which invite {name} came: revoke each peer by its name"
                )
            admins = members.admins(agent.directory.peers)  # whom they have let in goes with them
            peers += [*map(by_invite, invites), *(p for p in admins if members.known[p].invite in invites)]
        data = await asyncio.to_thread(
            self.admin.sealed_list, members, agent.mesh_key, agent.limits, peers, sorted(invites)
        )
        to = [p for p in agent.directory.peers if p not in (agent.peer_id, peer)]
        await agent.directory.revoke(data)
        heard = await self._tell(agent, to, data)
        return {"peer": peer, "name": name, "heard": heard, "peers": len(to), "invites": sorted(invites)}

    async def _tell(self, agent: Agent, to: Iterable[str], data: bytes) -> int:
        """Gossip tells the others too; so a few who do not answer cost nothing but time."""
        at_once = asyncio.Semaphore(TOLD_AT_ONCE)

        async def one(peer: str) -> bool:
            async with at_once:
                try:
                    await agent.gossip.send(peer, [data])
                except MeshceeError:
                    return False
                return True

        async with asyncio.TaskGroup() as group:
            telling = [group.create_task(one(peer)) for peer in to]
        return sum(task.result() for task in telling)


def _whom(agent: Agent, wanted: str) -> tuple[str, str]:
    """Peer id and name; a whole id need not be here."""
    found = matching(agent.directory.peers, wanted)
    if len(found) == 1:
        return found[0].peer_id, found[0].name
    if len(found) > 1:
        which = ", ".join(sorted(f"{r.name} ({r.peer_id})" for r in found))
        raise UsageError(f"{wanted!r} means {len(found)} peers: {which}; give a whole id")
    try:
        public_key_of(wanted)
    except ProtocolError:
        names = ", ".join(sorted(r.name for r in agent.directory.peers.values())) or "nobody"
        raise UsageError(
            f"no peer of this mesh is called {wanted!r}; there are {names}. Give the whole id of one that is not here"
        ) from None
    return wanted, wanted


def authority_of(home: Home, token: Token | None) -> Authority | None:
    """Of this machine in the token's mesh; without a token, in the mesh that it has founded, or the one where it is an admin."""
    root = token.grant.root if token is not None and token.grant is not None else None
    kept = [one for file in Membership.files(home) if (one := Membership.read(file)) is not None]
    if (mine := founded(home, root)) is not None:
        key, identity = mine
        first = Membership.load(identity, key.peer_id)
        if first is not None:
            at = Identity.load_or_create(identity).peer_id
            admin = Admin(key, key.peer_id, bytes, at, ledger_of(identity, key.peer_id), time.time)
            return Authority(admin, first, tuple(one for one in kept if one.root == key.peer_id))
    for one in kept:
        identity = one.identity
        if root not in (None, one.root) or not identity.exists():
            continue
        key = Identity.load_or_create(identity)
        known = one.holds(key.peer_id, time.time())
        if known is not None and known.role == "admin":
            above = partial(bytes, one.certificate)
            admin = Admin(key, one.root, above, key.peer_id, ledger_of(identity, one.root), time.time)
            return Authority(admin, one, tuple(other for other in kept if other.root == one.root))
    return None
