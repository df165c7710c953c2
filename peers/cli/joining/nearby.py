"""Short codes at the terminal: the first machine shows one, a newcomer without a line is asked for it.

The idea: people are asked only where a terminal is, and only on a machine that knows no mesh. A script founds a mesh as ever. What
a code led to is written down (lines.py), so that a later `meshcee peer`, and commands beside it, need no code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from dht import Identity
from meshcee.errors import JoinError, NotPermittedError, UsageError
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from peers.cli.joining.lines import line_file, write_line
from peers.cli.session import Screen, run_async
from peers.node.founding import founders, founds_again
from peers.node.nearby import Code, CodeWindow, Door, Ending, Found, announced, ask, browse, fresh_label

__all__ = ["CODE_ADDRESSES", "CODE_USES", "line_by_code", "run_code", "show_code", "show_codes"]

log = structlog.get_logger()

BROWSE_S = 2.0  # two questions of multicast DNS, of which radio may lose one
CODE_USES = 8  # identities that a code's invite lets in: a machine's peer, and commands beside it
CODE_ADDRESSES = 8  # in that invite: all of it is one small message
TRIES = 3
MORE = "meshcee invite --code"


def typed(question: str) -> str:
    """A line from the keyboard; nothing at its end."""
    try:
        return input(question)
    except EOFError:
        return ""


def line_by_code(
    home: Home,
    identity: Path | None,
    *,
    look: Callable[[], list[Found]] = lambda: run_async(browse(BROWSE_S)),
    answer: Callable[[str], str] = typed,
) -> str | None:
    """The line to join with, from the person at the terminal; None where this machine shall found a mesh.

    NotPermittedError after too many wrong codes.
    """
    console, kept = Screen(), line_file(home)
    before = kept.read_text(errors="replace").strip() if kept.exists() else ""
    if founds_again(home, identity):
        if before:
            console.print(
                f"This machine founds its own mesh; to join the other: meshcee peer --join @{kept}", soft_wrap=True
            )
        return None
    if before:
        console.print(
            f"Joining the mesh of the last time ({kept}); to found one here: meshcee peer --no-lan", soft_wrap=True
        )
        return before
    console.print("Looking for a mesh on this network ...")
    shown = look()
    if not shown:
        console.print("None shows a code here: this machine founds one.")
        return None
    found = _chosen(shown, console, answer)
    if found is None:
        return None
    line = _exchanged(found, home, identity, console, answer)
    if line is not None:
        write_line(home, line)
        console.print(
            f"The code was right. For commands on this machine: meshcee status --join @{kept}", soft_wrap=True
        )
    return line


def _chosen(shown: list[Found], console: Screen, answer: Callable[[str], str]) -> Found | None:
    if len(shown) == 1:
        console.print(f"A mesh is here: {shown[0].label}. Its first machine shows a code.")
        return shown[0]
    for i, one in enumerate(shown, 1):
        console.print(f"  {i}  {one.label}  at {one.addresses[0]}")
    while text := answer("Which of these? The first machine shows its name beside the code. Enter: none. ").strip():
        if text.isdecimal() and 1 <= int(text) <= len(shown):
            return shown[int(text) - 1]
        if matching := [one for one in shown if one.label == text]:
            return matching[0]
        console.print(f"Type a number from 1 to {len(shown)}.")
    return None


def _exchanged(
    found: Found, home: Home, identity: Path | None, console: Screen, answer: Callable[[str], str]
) -> str | None:
    """One guess for each code that is typed; the last refusal is raised."""
    for attempt in range(TRIES):
        code = None
        while code is None:
            text = answer("Code (Enter: found a mesh here instead): ").strip()
            if not text:
                return None
            try:
                code = Code.parse(text)
            except UsageError as error:
                console.print(f"{error}.")
        try:
            with home.identity_file(identity, founders(home)) as file:
                me = Identity.load_or_create(file).peer_id
                return run_async(ask(found.addresses, found.port, found.label, code, me))
        except NotPermittedError as error:
            if attempt == TRIES - 1:
                raise
            console.print(f"{error}.", soft_wrap=True)
    raise AssertionError("the last try raises")


async def show_code(
    peer_id: str,
    invite: Callable[[], str],
    shown: Callable[[Code, str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Ending | None:
    """Show a fresh code until it has ended; None where this network cannot be told of it."""
    code, label = Code.fresh(), fresh_label()
    try:
        async with (
            Door(code, label, peer_id, invite, CodeWindow(clock)) as door,
            announced(label, door.port) as told,
        ):
            if not told:
                return None
            shown(code, label)
            return await door.wait()
    except OSError as error:  # it is a convenience, and no reason for a peer to end
        log.warning("no code is shown any more", why=str(error))
        return None


def run_code(peer_id: str, line: Callable[[int], str], *, as_json: bool) -> None:
    """`meshcee invite --code`. NotPermittedError where nobody has come by it."""

    def shown(code: Code, label: str) -> None:
        if as_json:
            write_fact({"code": str(code), "mesh": label})
        else:
            print(
                f"On the other machine, on this network: meshcee peer\nThe code that it asks for: {code}  (mesh {label})",
                flush=True,
            )

    ending = run_async(show_code(peer_id, lambda: line(CODE_ADDRESSES), shown))
    if ending is None:
        raise JoinError(
            "this network cannot be told of a code (multicast DNS): send a line, as `meshcee invite` prints it"
        )
    if ending is not Ending.USED:
        raise NotPermittedError(ENDED[ending])
    if as_json:
        write_fact({"used": True})
    else:
        print("A machine has come by the code.", flush=True)


ENDED = {
    Ending.EXPIRED: f"The code has ended. Another: {MORE}",
    Ending.GUESSED: f"The code has ended after three wrong guesses: somebody on this network may be guessing. Another: {MORE}",
}


async def show_codes(peer_id: str, invite: Callable[[], str]) -> None:
    """At the first machine's terminal: one code after the other, while machines come by them."""
    console, more = Screen(), False

    def shown(code: Code, label: str) -> None:
        lead = (
            "A machine has come by the code. The next one"
            if more
            else "Or type `meshcee peer` there, on this network, and"
        )
        console.print(f"{lead}: {code}  (mesh {label}, ten minutes)\n", soft_wrap=True)

    while (ending := await show_code(peer_id, invite, shown)) is Ending.USED:
        more = True
        await asyncio.sleep(0)
    if ending is not None:
        console.print(ENDED[ending])
