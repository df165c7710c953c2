"""The line that lets others in: where it is of use, and where a machine keeps the one that it came by.

The idea: a newcomer dials the machine that has made the invite, and no other member can do that for it. So an address that leads
there from everywhere is what a line is worth elsewhere, and who prints a line without one says so at once.
"""

from __future__ import annotations

from pathlib import Path

from dht import Token, dialable, is_public, peer_of
from meshcee.files import disk
from meshcee.files.home import Home
from peers.cli.joining.ports import opened
from peers.node.founding import founded, founds_again

__all__ = ["keep_line", "limits", "line_file", "write_line"]


def limits(line: str) -> str | None:
    """From where nobody can join by this line, and what helps; None where everybody may."""
    token = Token.parse(line)
    where = [one for one in token.addresses if token.grant is None or peer_of(one) == token.grant.at]
    if any(map(is_public, where)):
        return None
    if not dialable(where):
        from peers.transport.p2p import has_ipv6_alone

        if has_ipv6_alone():
            return "(This machine has IPv6 alone, so nobody else can join by this line: start this peer with --listen '[::]:4001'.)"
        return "(This peer listens on loopback only: the line works on this machine.)"
    ports, options = opened()
    return (
        f"(This line works on this network only; for machines elsewhere let {ports} in at the router, and start this peer with "
        f"{options})"
    )


def line_file(home: Home) -> Path:
    """The invite by which a person at this machine has joined last."""
    return home.folder / "joined.line"


def write_line(home: Home, line: str) -> None:
    """For the next time, and for commands beside the peer. UsageError where the disk refuses."""
    with home.writable():
        disk.make_folder(home.folder)
        disk.write_whole(line_file(home), f"{line}\n".encode())  # mode 0600


def keep_line(home: Home, line: str, identity: Path | None) -> str | None:
    """Of a peer that has joined by it; what to say of that. None where it was kept, or is of a mesh that this machine founded."""
    kept, grant = line_file(home), Token.parse(line).grant
    if grant is not None and founded(home, grant.root) is not None:
        return None
    if kept.exists() and kept.read_text(errors="replace").strip() == line:
        return None
    write_line(home, line)
    if founds_again(home, identity):
        return f"Alone, `meshcee peer` founds this machine's own mesh; to join this one: meshcee peer --join @{kept}"
    return f"From now on `meshcee peer` alone joins this mesh. For commands: meshcee status --join @{kept}"
