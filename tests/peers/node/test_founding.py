"""A first machine that comes back is the same mesh; a second one beside it learns how to join; runs are found by their ids."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dht import Identity
from meshcee.errors import NotNowError, UsageError
from meshcee.files.home import Home
from peers.node.founding import Founding, down, founders
from peers.transport.p2p import reserve


def started(
    home: Home, token: str = "TOKEN", identity: Path | None = None, *, is_open: bool = False
) -> tuple[object, ...]:
    """Key, identity and listening address of a first peer that is started, and ends."""
    with Founding.of(home, identity, is_open=is_open) as founding, home.identity_file(founding.identity) as file:
        listen = founding.listen("127.0.0.1:0")
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = 0 if listen.endswith(":0") else int(listen.rpartition("/")[2])
            bound.bind(("127.0.0.1", port))
            listening = f"/ip4/127.0.0.1/tcp/{bound.getsockname()[1]}"
        founding.note("127.0.0.1:0", listening, file, token)
        return founding.key, file, listening


def test_it_comes_back_as_it_was_whoever_holds_the_first_identity_meanwhile(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.identity_file():  # a member of another mesh was there first
        first = started(home)
    assert started(home) == first
    with home.identity_file(), home.identity_file():
        pass
    assert (tmp_path / "mesh.founded.json").stat().st_mode & 0o077 == 0, "it holds the key"


@pytest.mark.parametrize("is_open", [False, True])
def test_who_joins_leaves_the_first_peers_identity_to_it(tmp_path: Path, is_open: bool) -> None:
    home = Home(tmp_path)
    _, first, _ = started(home, is_open=is_open)
    assert (founders(home), down(home)) == ([first], []), "it has never been up"
    me = Identity.load_or_create(Path(str(first))).peer_id
    with home.identity_file(None, founders(home)) as joined, home.identity_file(None, founders(home)) as another:
        assert len({first, joined, another}) == 3
        assert down(home) == [me]
        assert started(home, is_open=is_open)[1] == first
    with home.identity_file(Path(str(first)), founders(home)) as chosen:
        assert (chosen, down(home)) == (first, [])
        with pytest.raises(NotNowError, match=r"(?s)runs with .*0\.key.* join beside it:.* --join TOKEN$"):
            started(home, is_open=is_open)


def test_each_identity_that_is_chosen_and_an_open_mesh_are_meshes_of_their_own(tmp_path: Path) -> None:
    home = Home(tmp_path)
    own, other, without_key = started(home), started(home, identity=tmp_path / "mine.key"), started(home, is_open=True)
    assert len({own[0], other[0], without_key[0]}) == 3
    assert started(home, identity=tmp_path / "mine.key") == other


def test_a_second_one_beside_it_is_told_how_to_join(tmp_path: Path) -> None:
    home = Home(tmp_path)
    started(home, "meshcee1.ABC")
    with (
        Founding.of(home, None, is_open=False) as founding,
        pytest.raises(NotNowError, match=rf"(?s)mesh {founding.key.fingerprint} runs .* --join meshcee1.ABC\n"),
        Founding.of(home, None, is_open=False),
    ):
        pass


def test_a_port_that_somebody_else_has_taken_is_given_up(tmp_path: Path) -> None:
    home = Home(tmp_path)
    _, _, listening = started(home)
    with socket.create_server(("127.0.0.1", int(str(listening).rpartition("/")[2]))):
        assert started(home)[2] != listening


def test_a_peer_that_listened_on_several_addresses_does_so_on_the_same_ports_again(tmp_path: Path) -> None:
    home, where = Home(tmp_path), "127.0.0.1:0,127.0.0.2:0"
    with Founding.of(home, None, is_open=False) as founding, home.identity_file() as file:
        assert founding.listen(where) == where
        listening, keepers = reserve([where])
        for keeper in keepers:
            keeper.close()
        founding.note(where, ",".join(listening), file, "TOKEN")
    with Founding.of(home, None, is_open=False) as founding:
        assert founding.listen(where).split(",") == list(listening)


def test_a_damaged_record_is_no_reason_to_found_another_mesh(tmp_path: Path) -> None:
    started(Home(tmp_path))
    (tmp_path / "mesh.founded.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        started(Home(tmp_path))


def test_a_run_whose_id_begins_anothers_is_found(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in ("20260101-000000-job", "20260101-000000-job-1", "20260102-000000-job"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert home.run("20260101-000000-job").id == "20260101-000000-job"
    assert home.run("20260102").id == "20260102-000000-job"
    with pytest.raises(UsageError, match="2 runs match"):
        home.run("20260101")
