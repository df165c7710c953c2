"""What a person at a terminal is asked for a code, and what nobody is asked; as `meshcee invite --code` shows it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from dht import Grant, Identity, PeerRecord, Token
from meshcee.errors import NotPermittedError, UsageError
from meshcee.files.home import Home
from peers.cli.joining import nearby
from peers.cli.joining.joined import Joined
from peers.cli.joining.lines import limits
from peers.cli.joining.nearby import line_by_code
from peers.cli.main import app
from peers.cli.meters import Meters
from peers.cli.peer import PeerOptions, asks_people, lent_peer, somebody_sits_here
from peers.node import JoinOptions
from peers.node.founding import Founding
from peers.node.nearby import Code, Found

ROOT, ANNA, BEN = (Identity.generate() for _ in range(3))
NOW = 1_800_000_000.0
MESHES = [Found("abcd2345", ("192.0.2.1",), 4711), Found("bcde3456", ("192.0.2.2",), 4712)]


class Person:
    """Types these answers, and then no more."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def __call__(self, question: str) -> str:
        return self.answers.pop(0)


def never() -> list[Found]:
    raise AssertionError("nobody looks")


def by_code(
    home: Path, person: Person, meshes: list[Found], *, look: Callable[[], list[Found]] | None = None
) -> str | None:
    return line_by_code(Home(home), None, look=look or (lambda: meshes), answer=person)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was asked at which door; the right code is 4821-7733, that of the first mesh."""
    asked: list[tuple[str, str]] = []

    async def ask(addresses: object, port: int, label: str, code: Code, peer_id: str) -> str:
        asked.append((label, str(code)))
        if (label, str(code)) != ("abcd2345", "4821-7733"):
            raise NotPermittedError("that is not the code")
        return "meshcee2.LINE"

    monkeypatch.setattr(nearby, "ask", ask)
    return asked


class Stream:
    """Standard input or output that is a terminal, or none."""

    def __init__(self, terminal: bool) -> None:
        self.isatty = lambda: terminal


@pytest.mark.parametrize(
    ("arguments", "terminals", "asked", "sits"),
    [
        ([], (True, True), True, True),
        ([], (False, True), False, False),
        ([], (True, False), False, False),
        (["--json"], (True, True), False, False),
        (["--no-lan"], (True, True), False, False),
        (["--open"], (True, True), False, False),
        (["--join", "LINE"], (True, True), False, True),
        (["--join", "LINE"], (True, False), False, False),
    ],
)
def test_a_script_is_asked_nothing_and_its_line_is_not_kept(
    arguments: list[str], terminals: tuple[bool, bool], asked: bool, sits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[bool, bool]] = []

    def note(options: PeerOptions, *, as_json: bool) -> None:
        monkeypatch.setattr("sys.stdin", Stream(terminals[0]))
        monkeypatch.setattr("sys.stdout", Stream(terminals[1]))
        told.append((asks_people(options, as_json=as_json), somebody_sits_here(options, as_json=as_json)))
        monkeypatch.undo()

    monkeypatch.setattr("peers.cli.peer.run_peer", note)
    monkeypatch.delenv("MESHCEE_JOIN", raising=False)
    CliRunner().invoke(app, ["peer", *arguments], catch_exceptions=False)
    assert told == [(asked, sits)]


@pytest.mark.slow
def test_a_script_does_not_even_load_what_looks_at_a_network() -> None:
    code = "import sys, peers.cli.peer; print(sorted({'zeroconf', 'spake2', 'segno'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_a_machine_that_has_founded_a_mesh_founds_it_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with Founding.of(home, None, is_open=False) as founding, home.identity_file() as file:
        founding.note("127.0.0.1:0", "/ip4/127.0.0.1/tcp/1", file, "LINE")
    assert by_code(tmp_path, Person(), [], look=never) is None


def test_where_nobody_shows_a_code_or_nothing_is_typed_a_mesh_is_founded(
    tmp_path: Path, doors: list[tuple[str, str]]
) -> None:
    assert by_code(tmp_path, Person(), []) is None
    assert by_code(tmp_path, Person(""), MESHES[:1]) is None
    assert by_code(tmp_path, Person("9", "x", ""), MESHES) is None
    assert doors == []


def test_the_code_gives_the_line_which_is_kept_for_the_next_time(tmp_path: Path, doors: list[tuple[str, str]]) -> None:
    assert by_code(tmp_path, Person("4821", "48217734", "4821-7733"), MESHES[:1]) == "meshcee2.LINE"
    assert doors == [("abcd2345", "4821-7734"), ("abcd2345", "4821-7733")], "what is no code costs no guess"
    assert (tmp_path / "joined.line").stat().st_mode & 0o077 == 0
    assert by_code(tmp_path, Person(), [], look=never) == "meshcee2.LINE"


def test_of_several_meshes_one_is_chosen_and_no_other_is_asked(tmp_path: Path, doors: list[tuple[str, str]]) -> None:
    assert by_code(tmp_path, Person("abcd2345", "48217733"), MESHES) == "meshcee2.LINE"
    with pytest.raises(NotPermittedError):
        by_code(tmp_path / "other", Person("2", "1" * 8, "2" * 8, "3" * 8), MESHES)
    assert [label for label, _ in doors] == ["abcd2345", *["bcde3456"] * 3]


def founded_at(home: Home, host: str) -> None:
    """A mesh that this machine has founded, and whose peer was there."""
    with Founding.of(home, None, is_open=False) as founding, home.identity_file() as file:
        from peers.node.admission import Membership

        identity, root = Identity.load_or_create(file), founding.root
        assert root is not None
        addresses = (f"/ip4/{host}/tcp/4001/p2p/{identity.peer_id}",)
        place = Membership.place(file, root.peer_id)
        Membership(root.peer_id, founding.key, b"", (), place, addresses).save()
        founding.note("127.0.0.1:0", "/ip4/127.0.0.1/tcp/1", file, "LINE")


def test_a_qr_code_holds_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    founded_at(Home(tmp_path), "192.0.2.1")
    plain = CliRunner().invoke(app, ["token"], catch_exceptions=False).stdout
    drawn = CliRunner().invoke(app, ["token", "--qr"], catch_exceptions=False).stdout
    assert plain.startswith("meshcee2.")
    assert len(plain.splitlines()) == 1
    assert len(drawn.splitlines()) > 20
    assert "█" in drawn or "▄" in drawn
    with pytest.raises(UsageError, match="leave out one"):
        CliRunner().invoke(app, ["invite", "--code", "--qr"], catch_exceptions=False)


def test_no_code_is_shown_where_nobody_could_join_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    founded_at(Home(tmp_path), "127.0.0.1")
    with pytest.raises(UsageError, match="loopback only"):
        CliRunner().invoke(app, ["invite", "--code"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["invite"], catch_exceptions=False).output.startswith("meshcee2.")


def at(host: str, who: Identity = ANNA) -> str:
    return f"/ip4/{host}/tcp/4001/p2p/{who.peer_id}"


def an_invite(*addresses: str, uses: int | None = None, until: float = NOW + 60) -> Token:
    """Of anna's mesh."""
    return Token.sign(ROOT, addresses, Grant(ROOT.peer_id, ROOT.peer_id, ANNA.peer_id, "0" * 16, "own", uses, until))


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ([at("8.8.8.8"), at("192.168.1.5")], None),
        ([f"/dns/anna.example.org/tcp/4001/p2p/{ANNA.peer_id}"], None),
        (
            [at("192.168.1.5")],
            "on this network only; for machines elsewhere let TCP ports 4001 and 4002 in at the router",
        ),
        ([at("192.168.1.5"), at("8.8.8.8", BEN)], "--announce PUBLIC-ADDRESS:4001"),  # ben cannot let anybody in
        ([at("127.0.0.1")], "loopback only"),
    ],
)
def test_a_line_says_where_nobody_can_join_by_it(addresses: list[str], said: str | None) -> None:
    assert (said or "None") in str(limits(an_invite(*addresses).encode()))


def test_a_machine_with_ipv6_alone_is_told_how_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    line = an_invite(at("127.0.0.1")).encode()
    rows = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "2001:db8::5"), (socket.AF_INET6, "fe80::5%eth0")]
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {"eth0": [SimpleNamespace(family=f, address=a) for f, a in rows]}
    )
    assert "--listen '[::]:4001'" in str(limits(line))
    rows.append((socket.AF_INET, "192.168.1.5"))
    assert "loopback only" in str(limits(line))


def test_an_invite_says_beside_the_line_where_it_is_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    founded_at(Home(tmp_path), "192.168.1.5")
    done = CliRunner().invoke(app, ["invite"], catch_exceptions=False)
    assert len(done.stdout.splitlines()) == 1, "a script takes all of it for the line"
    assert "works on this network only" in done.stderr


def a_node(
    reachable: bool, spawn: Callable[[Coroutine[None, None, None]], None], joined_by: object, *, admits: bool = True
) -> SimpleNamespace:
    """A peer that is up, as far as what is said of it goes."""

    async def refresh() -> None:
        pass

    return SimpleNamespace(
        peer_id="me",
        options=SimpleNamespace(name="anna"),
        directory=SimpleNamespace(refresh=refresh, peers={ANNA.peer_id: PeerRecord(ANNA.peer_id, 1.0, name="anna")}),
        clock=lambda: NOW,
        lent=dict,
        transport=SimpleNamespace(addresses=("/ip4/192.0.2.1/tcp/1",), serve=lambda purpose, serve: None),
        mesh_key=SimpleNamespace(is_open=True, fingerprint="4f3a9911"),
        invite=lambda valid_s: Token((at("192.0.2.1" if reachable else "127.0.0.1"),)).encode(),
        reachable_from_elsewhere=reachable,
        admin=SimpleNamespace() if admits else None,
        spawn=spawn,
        joined_by=joined_by,
    )


def is_up(node: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next peer that is lent."""

    @asynccontextmanager
    async def a_peer(where: JoinOptions, home: Home) -> AsyncIterator[SimpleNamespace]:
        yield node

    monkeypatch.setattr("peers.cli.peer.a_peer", a_peer)


@pytest.mark.parametrize(
    ("asks", "reachable", "joined", "shown"),
    [
        (True, True, False, ["show_codes"]),
        (True, False, False, []),  # by a code that nobody could use
        (False, True, False, []),
        (True, True, True, ["_say_joined"]),  # its first machine shows codes
    ],
)
async def test_a_peer_at_a_terminal_shows_a_code_that_is_of_use(
    asks: bool, reachable: bool, joined: bool, shown: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found: list[Coroutine[None, None, None]] = []
    is_up(a_node(reachable, found.append, SimpleNamespace() if joined else None), monkeypatch)
    async with lent_peer(JoinOptions(), Meters(), shows_codes=asks, as_json=False):
        pass
    assert [work.__name__ for work in found] == shown
    for work in found:
        work.close()
    said = capsys.readouterr().out
    assert ("loopback only" in said, "this network only" in said) == (not reachable, reachable)


async def test_who_joins_an_open_mesh_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Coroutine[None, None, None]] = []
    is_up(a_node(True, said.append, SimpleNamespace(grant=None)), monkeypatch)

    async def look(me: object, at: str, fingerprint: str) -> Joined:
        return Joined(at or None, fingerprint, 0)

    monkeypatch.setattr("peers.cli.peer.look", look)
    async with lent_peer(JoinOptions(), Meters(), shows_codes=False, as_json=False):
        (words,) = said
        await words
    assert "joined an open mesh: no other peer lends a device there yet" in capsys.readouterr().out


def test_an_empty_line_that_was_kept_is_none(tmp_path: Path) -> None:
    (tmp_path / "joined.line").write_text("\n")
    assert by_code(tmp_path, Person(), []) is None


@pytest.mark.parametrize(
    ("uses", "until", "shown"), [(None, NOW + 60, True), (8, NOW + 60, False), (None, NOW - 1, False)]
)
async def test_who_came_by_an_invite_for_itself_shows_it_to_nobody(
    uses: int | None, until: float, shown: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    invite = an_invite(at("192.0.2.1"), uses=uses, until=until)
    is_up(a_node(True, lambda words: words.close(), invite, admits=False), monkeypatch)
    async with lent_peer(JoinOptions(), Meters(), shows_codes=False, as_json=False):
        pass
    said = capsys.readouterr().out
    assert ("meshcee peer --join" in said) == shown
    assert ("For another machine: `meshcee invite` on anna." in said) == (not shown)


async def joins(home: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal."""
    monkeypatch.setenv("MESHCEE_HOME", str(home))
    is_up(a_node(True, lambda words: words.close(), Token.parse(line)), monkeypatch)
    async with lent_peer(JoinOptions(token=line), Meters(), shows_codes=False, keeps=True, as_json=False):
        pass


async def test_who_has_joined_by_a_line_goes_on_in_that_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = an_invite(at("192.0.2.1")).encode(), an_invite(at("192.0.2.2")).encode()
    for line in (first, second, second):
        await joins(tmp_path, line, monkeypatch)
        assert by_code(tmp_path, Person(), [], look=never) == line
    assert (tmp_path / "joined.line").stat().st_mode & 0o077 == 0
    assert capsys.readouterr().out.count("From now on `meshcee peer` alone joins this mesh") == 2, "once for a line"


async def test_a_machine_that_has_founded_a_mesh_is_told_how_to_join_the_other_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    founded_at(Home(tmp_path), "192.0.2.1")
    own = CliRunner().invoke(app, ["token"], env={"MESHCEE_HOME": str(tmp_path)}, catch_exceptions=False).stdout.strip()
    await joins(tmp_path, own, monkeypatch)
    assert not (tmp_path / "joined.line").exists(), "another peer of its own mesh"
    await joins(tmp_path, an_invite(at("192.0.2.1")).encode(), monkeypatch)
    again = f"meshcee peer --join @{tmp_path / 'joined.line'}"
    assert again in capsys.readouterr().out
    assert by_code(tmp_path, Person(), [], look=never) is None
    assert again in capsys.readouterr().out
