"""What may be changed from a page: a run is stopped, its state saved now, a peer asked to leave.

The idea: the role of the member that runs the page decides what it offers. Each act is one that a command has already, so the
page has no right and no way of its own. Refusals are sentences, as everywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dht import ROLES, Role, Token
from meshcee.errors import JoinError, NotPermittedError, UsageError
from meshcee.files.home import Home, Run
from peers.cli.ui.wishes import Wishes, ask_to_stop, wish_checkpoint
from peers.node import Mesh
from peers.node.agent import Agent
from peers.node.authority import authority_of
from peers.node.departure import ask_to_leave, find_peer

__all__ = ["NEEDS", "Act", "Acts", "drains", "of_folder", "of_training", "role_in"]

Act = Literal["stop", "checkpoint", "drain"]
NEEDS: Mapping[Act, Role] = {"stop": "own", "checkpoint": "own", "drain": "admin"}
MAY_NOT: Mapping[Act, str] = {"stop": "stops no run", "checkpoint": "saves no run", "drain": "asks no peer to leave"}
ELSEWHERE: Mapping[Act, str] = {
    "stop": "this page shows no run of this machine: `meshcee ui last` does, on the machine that owns it",
    "checkpoint": "this page shows no run of this machine: `meshcee ui last` does, on the machine that owns it",
    "drain": "this page shows no mesh of several machines: `meshcee ui --join LINE` does",
}

SAVES = "the run saves its state before its next step"

Doing = Callable[[str], Awaitable[str]]  # of a peer's id, or of nothing; what came of it, in a sentence


@dataclass(frozen=True)
class Acts:
    """Of one page: the role of who runs it, and what there is to do with what it shows. Nothing, by default."""

    role: Role = "compute"
    ways: Mapping[Act, Doing] = field(default_factory=dict)

    @property
    def may(self) -> list[Act]:
        """What is offered."""
        return [act for act in self.ways if self._suffices(act)]

    async def do(self, act: Act, peer: str) -> str:
        """UsageError where there is nothing to do it with; NotPermittedError where the role does not allow it."""
        if (way := self.ways.get(act)) is None:
            raise UsageError(ELSEWHERE[act])
        if not self._suffices(act):
            raise NotPermittedError(
                f"this machine came by an invite to {self.role} and {MAY_NOT[act]} from a page: that takes the role "
                f"{NEEDS[act]} (`meshcee invite --role {NEEDS[act]}`)"
            )
        return await way(peer)

    def _suffices(self, act: Act) -> bool:
        return ROLES.index(self.role) >= ROLES.index(NEEDS[act])


def role_in(agent: Agent, home: Home, token: str | None) -> Role:
    """What this machine is in a mesh: admin too where an admin's key lies on it. In an open mesh everybody is everything."""
    root, own = agent.members.root, agent.members.own
    key = authority_of(home, Token.parse(token)) if token is not None else None
    if not root or (key is not None and key.membership.root == root):
        return "admin"
    return own.role if own is not None else "compute"


def drains(agent: Agent) -> Doing:
    """As `meshcee drain` does."""

    async def drain(peer: str) -> str:
        found = find_peer(agent.directory.peers, peer)
        try:
            in_time = await ask_to_leave(agent, found.peer_id, lambda within_s, supplies: None)
        except ConnectionError as error:
            raise JoinError(f"{found.name} cannot be asked to leave: {error}; see whether it is up") from error
        if in_time:
            return f"{found.name} has gone; its job goes on without it"
        return f"{found.name} has gone before its job could go on without it: the owner goes on from its newest copies"

    return drain


def of_training(mesh: Mesh, wishes: Wishes, role: Role, drain: Doing | None) -> Acts:
    """Of the run that trains in this process."""

    async def stop(_: str) -> str:
        if not mesh.stop():
            raise UsageError("nothing trains here yet: Ctrl-C at its terminal ends it before its first plan")
        return "the run finishes its step, saves, and ends"

    async def checkpoint(_: str) -> str:
        wishes.checkpoint()
        return SAVES

    found: dict[Act, Doing] = {"stop": stop, "checkpoint": checkpoint}
    return Acts(role, found if drain is None else {**found, "drain": drain})


def of_folder(run: Run) -> Acts:
    """Of a run of this machine that another process owns: whoever may write its folder has the right."""

    async def stop(_: str) -> str:
        ask_to_stop(run)
        return "the run finishes its step, saves, and ends"

    async def checkpoint(_: str) -> str:
        wish_checkpoint(run)
        return SAVES

    return Acts("own", {"stop": stop, "checkpoint": checkpoint})
