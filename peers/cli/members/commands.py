"""The commands about members. Whoever has an admin's key on this machine invites and revokes; every member may look."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

from dht import MAX_ADDRESSES, ROLES, Role, Token, dialable
from meshcee.errors import NotPermittedError, UsageError
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from peers.cli.joining.lines import limits
from peers.cli.session import Screen, configure_logging, run_async, waiting
from peers.cli.view import called
from peers.node import JoinOptions, join
from peers.node.authority import Authority, authority_of

__all__ = ["run_invite", "run_members", "run_revoke"]


def run_invite(
    token: str | None,
    role: str,
    uses: int | None,
    for_s: float,
    *,
    code: bool = False,
    qr: bool = False,
    as_json: bool,
) -> None:
    """Print the line that lets others in, or show a code until one machine has come by it."""
    admin = _authority(token)
    if role not in ROLES:
        raise UsageError(f"--role {role!r} is none of {', '.join(ROLES)}")
    if code and qr:
        raise UsageError("--code shows no line that --qr could draw: leave out one of the two")
    if code and not dialable(admin.addresses):
        raise UsageError(
            "no other machine reaches the peer of this machine, which listens on loopback only, so none could join by a code: "
            "start it with --listen 0.0.0.0:0; `meshcee invite` prints a line for other terminals of this machine"
        )
    configure_logging(as_json=as_json, level="warning")
    found: Role = ROLES[ROLES.index(role)]

    def line(most: int = MAX_ADDRESSES) -> str:
        return admin.admin.invite(admin.addresses[:most], found, uses, for_s).encode()

    if code:
        from peers.cli.joining.nearby import run_code

        run_code(admin.admin.at, line, as_json=as_json)
    elif as_json:
        write_fact({"token": line(), "role": role, "uses": uses, "for_s": for_s})
    else:
        print(invite := line(), flush=True)
        if limited := limits(invite):
            Screen(stderr=True).print(limited, soft_wrap=True)
        if qr:
            import segno

            segno.make(invite, error="l").terminal(compact=True)


def run_members(token: str | None, *, as_json: bool) -> None:
    configure_logging(as_json=as_json, level="warning")
    home = Home()
    admin = authority_of(home, Token.parse(token) if token else None)
    if token is None and admin is None:
        raise UsageError("say which mesh: --join TOKEN, the line that `meshcee peer` printed (or set MESHCEE_JOIN)")
    with waiting("joining the mesh, to look at its members", as_json=as_json):
        options = JoinOptions(token=token, name="members", observes=True)
        data = run_async(_members(options if admin is None else _options(admin, token, "members")))
    if as_json:
        write_fact(data)
        return
    console = Screen()
    names = called({one["peer"]: one["name"] for one in data["members"]})
    table = Table(title=f"members that are here: {len(data['members'])}", title_justify="left")
    for column in ("name", "role", "certificate ends"):
        table.add_column(column)
    for one in data["members"]:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["until"])) if one["until"] else "-"
        table.add_row(names[one["peer"]], one["role"] or "open mesh", until)
    console.print(table)
    for peer in data["revoked"]:
        shown = f"all who came by the {peer}" if peer.startswith("invite ") else f"…{peer[-8:]}"
        console.print(f"revoked: {names.get(peer, shown)}")


async def _members(options: JoinOptions) -> dict[str, Any]:
    async with join(options, Home()) as mesh:
        directory, members = mesh.agent.directory, mesh.agent.members
        await directory.refresh()
        known = members.known
        found = [
            {
                "peer": peer,
                "name": record.name,
                "role": known[peer].role if peer in known else None,
                "until": known[peer].until if peer in known else None,
            }
            for peer, record in sorted(directory.peers.items(), key=lambda item: (item[1].name, item[0]))
        ]
        return {"members": found, "revoked": members.revoked()}


def run_revoke(wanted: str, token: str | None, *, everybody: bool = False, as_json: bool) -> None:
    """End a membership, and the invite that it came by; with `everybody` all memberships by that invite."""
    admin = _authority(token)
    configure_logging(as_json=as_json, level="warning")
    told = run_async(_revoke(wanted, admin, token, everybody=everybody))
    if as_json:
        write_fact(told)
        return
    who = f"{told['name']}, as all who came by the same invite," if everybody else told["name"]
    print(f"{who} is no member any more; {told['heard']} of {told['peers']} peers have heard it")
    if told["invites"]:
        print("The invite that it came by lets nobody in any more. For new machines: meshcee invite")


async def _revoke(wanted: str, admin: Authority, token: str | None, *, everybody: bool) -> dict[str, Any]:
    async with join(_options(admin, token, "revoke"), Home()) as mesh:
        return await admin.revoke(mesh.agent, wanted, everybody=everybody)


def _authority(token: str | None) -> Authority:
    found = authority_of(Home(), Token.parse(token) if token else None)
    if found is None:
        raise NotPermittedError(
            "this machine has no admin's key of this mesh: run the command on the machine that has started the mesh, or on one "
            "that came by `meshcee invite --role admin`"
        )
    return found


def _options(admin: Authority, token: str | None, name: str) -> JoinOptions:
    """Of a command on an admin's machine, whose peer may be down."""
    way_in = admin.way_in(Token.parse(token) if token else None)
    return JoinOptions(token=way_in, name=name, observes=True)
