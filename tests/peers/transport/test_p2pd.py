"""The supervised p2pd: it starts, says why when it does not, comes back as itself, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from dht.addresses import MAX_ADDRESSES
from dht.signing import Identity
from meshcee.config import Timeouts
from meshcee.errors import JoinError, UsageError
from meshcee.events import Event
from peers.transport.p2p import p2pd as module
from peers.transport.p2p.interfaces import announced, multiaddress, reserve
from peers.transport.p2p.launcher import remove
from peers.transport.p2p.p2pd import P2PDaemon

QUICK = Timeouts(dial_s=2.0, join_s=3.0, shutdown_s=3.0)
HERE = ("127.0.0.1:0",)


def identity(folder: Path, name: str = "a") -> Identity:
    return Identity.load_or_create(folder / f"{name}.key")


def daemon(folder: Path, name: str = "a", **options: Any) -> P2PDaemon:
    return P2PDaemon(identity(folder, name), listen=options.pop("listen", HERE), timeouts=QUICK, **options)


def p2pd_of(found: P2PDaemon) -> psutil.Process:
    (child,) = psutil.Process(found.pid).children()
    return child


async def eventually(what: str, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll a state of the operating system, which has no event to wait for."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


async def test_it_is_the_peer_of_its_identity_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with daemon(tmp_path) as a:
        child, folder = p2pd_of(a), Path(a.folder)
        assert a.p2p.peer_id.to_base58() == a.peer_id == identity(tmp_path).peer_id
        assert a.addresses[0].endswith(f"/p2p/{a.peer_id}")
        assert [str(m) for m in await a.p2p.get_visible_maddrs()] == list(a.addresses)
        assert sorted(os.listdir(folder)) == ["p2pd.sock"]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    assert not child.is_running()
    with pytest.raises(UsageError, match="not running"):
        _ = a.p2p


@pytest.mark.slow
async def test_a_killed_p2pd_comes_back_as_the_same_peer_on_the_same_port(tmp_path: Path) -> None:
    restarted: asyncio.Queue[str] = asyncio.Queue()

    async def fails(p2p: Any) -> None:
        raise RuntimeError("a callback that fails must not stop the others")

    async def notes(p2p: Any) -> None:
        restarted.put_nowait(p2p.peer_id.to_base58())

    async with daemon(tmp_path) as a, daemon(tmp_path, "b", seeds=a.addresses) as b:
        assert b.reached == {a.peer_id}
        a.on_restart(fails)
        a.on_restart(notes)
        old, addresses, folder = p2pd_of(a), a.addresses, Path(a.folder)
        old.kill()
        async with asyncio.timeout(20):
            assert await restarted.get() == a.peer_id
        assert a.addresses == addresses
        assert p2pd_of(a).pid != old.pid
        assert not folder.exists()
        async with asyncio.timeout(20):  # libp2p backs off for some seconds from an address that has just failed
            while (await b.connect(addresses))[a.peer_id]:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        psutil.Process(a.pid).kill()  # the launcher: the kernel then kills p2pd
        async with asyncio.timeout(20):
            assert await restarted.get() == a.peer_id


async def test_who_fails_to_go_on_over_the_new_p2pd_tries_again(tmp_path: Path) -> None:
    """A machine that has just lost its p2pd is busy, and a transport that does not listen is deaf for good."""
    tries: list[str] = []
    done = asyncio.Event()

    async def slow(p2p: Any) -> None:
        tries.append("slow")
        if tries.count("slow") < 3:
            raise JoinError("this peer's own p2pd does not answer")
        done.set()

    async def quick(p2p: Any) -> None:
        tries.append("quick")

    async with daemon(tmp_path) as a:
        a.on_restart(slow)
        a.on_restart(quick)
        p2pd_of(a).kill()
        async with asyncio.timeout(20):
            await done.wait()
        assert tries == ["slow", "quick", "slow", "slow"]


async def test_a_machine_in_another_network_tells_its_new_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.2)
    ips = ["192.168.1.5"]
    monkeypatch.setattr("peers.transport.p2p.interfaces._machine_ips", lambda: list(ips))
    moves: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    async with daemon(tmp_path, listen=("0.0.0.0:0",)) as a:
        fails = [JoinError("too late")]

        async def note() -> None:
            moves.put_nowait(a.addresses)
            if fails:
                raise fails.pop()

        a.on_move(note)
        assert "/192.168.1.5/" in a.addresses[0]
        ips[:] = []  # between two networks: whoever knows the old ones may be back in a moment
        await asyncio.sleep(1.0)
        assert moves.empty()
        ips[:] = ["10.0.0.7"]
        async with asyncio.timeout(20):
            (moved,) = await moves.get()
            assert (moved,) == await moves.get(), "who failed hears of it again"
        assert moved.startswith("/ip4/10.0.0.7/tcp/")
        assert moved.endswith(a.peer_id)
        pid = p2pd_of(a).pid
        await asyncio.sleep(1.0)
        assert (moves.empty(), p2pd_of(a).pid) == (True, pid)


async def test_a_p2pd_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.3)
    restarted = asyncio.Event()

    async def notes(p2p: Any) -> None:
        restarted.set()

    async with daemon(tmp_path) as a:
        a.on_restart(notes)
        p2pd_of(a).suspend()
        async with asyncio.timeout(20):
            await restarted.wait()


async def test_a_dial_leaves_from_a_port_of_its_own(tmp_path: Path) -> None:
    """Two that dial each other at once from the ports on which they listen would meet in one connection, each as its dialer. That
    fails, in one of 25 tries here, and libp2p tries neither address again for five seconds."""
    async with daemon(tmp_path) as a, daemon(tmp_path, "b", seeds=a.addresses) as b:
        (seen,) = await a.p2p.list_peers()
        assert seen.peer_id.to_base58() == b.peer_id
        (of_dial,) = [str(address) for address in seen.addrs]
        assert of_dial.startswith("/ip4/127.0.0.1/tcp/")
        assert of_dial not in {address.removesuffix(f"/p2p/{b.peer_id}") for address in b.addresses}


async def test_giving_up_says_what_p2pd_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTARTS", 2)
    a = daemon(tmp_path)

    async def damaged() -> None:
        async with a:
            (tmp_path / "a.key").write_bytes(b"no key")
            p2pd_of(a).kill()
            await asyncio.Event().wait()

    with pytest.raises(JoinError, match=r"does not start; its last lines: .*proto"):
        await damaged()
    assert not Path(a.folder).exists()


async def test_one_dead_seed_does_not_matter(tmp_path: Path) -> None:
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    async with daemon(tmp_path) as a, daemon(tmp_path, "b", seeds=[dead, *a.addresses]) as b:
        assert b.reached == {a.peer_id}


async def test_a_seed_that_says_nothing_is_not_waited_for_once_another_has_answered(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel takes connections, and nobody speaks on them
        where = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}"
        silent, other = (f"{where}/p2p/{Identity.generate().peer_id}" for _ in range(2))
        async with daemon(tmp_path) as a, daemon(tmp_path, "b", seeds=[silent, *a.addresses]) as b:
            assert b.reached == {a.peer_id}
            assert await b.connect([other, *a.addresses], 0.1) == {a.peer_id: ""}


async def test_when_all_seeds_are_dead_each_is_named_with_its_reason(tmp_path: Path) -> None:
    dead = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}" for port in (9, 11)]
    with pytest.raises(JoinError, match="no peer of the mesh answered within 3 s") as caught, capture_logs() as told:
        async with daemon(tmp_path, seeds=dead):
            pytest.fail("joined")
    (line,) = (line for line in told if line["event"] == Event.NO_ANSWER_YET)
    assert (line["at"], line["and_others"], line["until_s"]) == (dead[0], 1, 3.0), "who waits hears for what"
    for seed in dead:
        assert f"{seed}: dial tcp4" in str(caught.value)
    assert str(caught.value).count("connection refused") == 2


async def test_another_peer_at_the_seeds_address_is_a_reason(tmp_path: Path) -> None:
    async with daemon(tmp_path) as a:
        wrong = a.addresses[0].replace(a.peer_id, Identity.generate().peer_id)
        with pytest.raises(JoinError, match="peer id mismatch"):
            async with daemon(tmp_path, "b", seeds=[wrong]):
                pytest.fail("joined")


async def test_a_second_peer_with_the_same_identity_is_refused(tmp_path: Path) -> None:
    async with daemon(tmp_path) as a:
        with pytest.raises(JoinError, match=f"already is peer {a.peer_id}"):
            async with daemon(tmp_path):
                pytest.fail("started")
    with pytest.raises(JoinError, match="two peers with one identity"):
        async with daemon(tmp_path, seeds=a.addresses):
            pytest.fail("joined itself")
    async with daemon(tmp_path):
        pass  # and once the other is gone, the identity is free


async def test_a_port_that_is_taken_is_an_error_and_no_shared_port(tmp_path: Path) -> None:
    async with daemon(tmp_path) as a:
        port = a.addresses[0].split("/")[4]
        with pytest.raises(JoinError, match=f"port {port}"):
            async with daemon(tmp_path, "b", listen=[f"127.0.0.1:{port}"]):
                pytest.fail("started")
    async with daemon(tmp_path, "b", listen=[f"127.0.0.1:{port}"]) as b:
        assert f"/tcp/{port}/" in b.addresses[0]


SCRIPT = """
import asyncio, os, sys, time
from pathlib import Path
import structlog
from dht.signing import Identity
from peers.transport.p2p.p2pd import P2PDaemon

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main():
    async with P2PDaemon(Identity.load_or_create(Path(sys.argv[1])), listen=["127.0.0.1:0"]) as daemon:
        await daemon.p2p.add_binary_stream_handler("x", lambda *_: None)
        print(daemon.pid, daemon.folder, flush=True)
        if sys.argv[2] == "fork" and os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.cases(1)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG and /proc")
@pytest.mark.parametrize("way", ["plain", "fork", "launcher too"])
async def test_nothing_is_left_after_kill_9(tmp_path: Path, way: str) -> None:
    """Also when a forked child of the killed process still holds the pipe, and when the launcher dies as well."""
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "x.key"), way], stdout=subprocess.PIPE, text=True
    )
    forked: list[psutil.Process] = []
    folder = tmp_path
    try:
        assert process.stdout is not None
        words = (await asyncio.to_thread(process.stdout.readline)).split()
        watcher, folder = psutil.Process(int(words[0])), Path(words[1])
        (child,) = watcher.children()
        forked = [p for p in psutil.Process(process.pid).children() if p != watcher]
        assert sorted(p.name for p in folder.iterdir())[-1] == "p2pd.sock"
        os.kill(process.pid, signal.SIGKILL)
        if way == "launcher too":
            watcher.kill()
        await eventually("p2pd ends", lambda: not child.is_running(), 5)
        if way != "launcher too":  # then nobody is left to remove the folder
            await eventually("the folder goes", lambda: not folder.exists(), 5)
            await eventually("the launcher ends", lambda: not watcher.is_running(), 5)
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
        for other in forked:
            other.kill()
        if way == "launcher too":
            remove(str(folder))


def test_ports_are_reserved_and_addresses_told() -> None:
    listening, keepers = reserve(["0.0.0.0:0", "/ip4/127.0.0.1/udp/0/quic-v1"])
    try:
        port, other = (int(a.split("/")[4]) for a in listening)
        assert listening == (f"/ip4/0.0.0.0/tcp/{port}", f"/ip4/127.0.0.1/udp/{other}/quic-v1")
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind(("0.0.0.0", port))
    finally:
        for keeper in keepers:
            keeper.close()
    told = announced(listening[:1])
    assert all("0.0.0.0" not in a and a.endswith(f"/tcp/{port}") for a in told)
    assert announced(("/ip4/127.0.0.1/tcp/5",)) == ("/ip4/127.0.0.1/tcp/5",)
    assert announced(listening, ["vm.example.org", "192.0.2.9:7"])[:2] == (
        f"/dns/vm.example.org/tcp/{port}",
        "/ip4/192.0.2.9/tcp/7",
    )
    with pytest.raises(UsageError, match="nobody can dial port 0"):
        announced(listening, ["192.0.2.9:0"])


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_both_versions_of_ip_have_one_port_where_it_is_free_on_both() -> None:
    (four, six), keepers = reserve(["127.0.0.1:0,[::1]:0"])
    for keeper in keepers:
        keeper.close()
    port = int(four.split("/")[4])
    assert (four, six) == (f"/ip4/127.0.0.1/tcp/{port}", f"/ip6/::1/tcp/{port}")
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        (four, other), keepers = reserve([f"127.0.0.1:{port},[::1]:0"])
        for keeper in keepers:
            keeper.close()
    assert four == f"/ip4/127.0.0.1/tcp/{port}"
    assert other.startswith("/ip6/::1/tcp/")
    assert other != six


def test_only_addresses_of_a_machine_that_others_can_dial_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def interfaces(**found: str) -> None:
        rows = {n: [SimpleNamespace(family=socket.AF_INET, address=ip)] for n, ip in found.items()}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)
        monkeypatch.setattr(psutil, "net_if_stats", dict)

    interfaces(lo="127.0.0.1", docker0="172.17.0.1", eth0="192.168.1.5", wlan0="169.254.3.3")
    assert announced(("/ip4/0.0.0.0/tcp/5",)) == ("/ip4/192.168.1.5/tcp/5",)
    interfaces(lo="127.0.0.1", docker0="172.17.0.1")
    assert announced(("/ip4/0.0.0.0/tcp/5",)) == ("/ip4/172.17.0.1/tcp/5",)
    interfaces(lo="127.0.0.1")
    assert announced(("/ip4/0.0.0.0/tcp/5",)) == ("/ip4/127.0.0.1/tcp/5",)
    interfaces()
    assert announced(("/ip4/0.0.0.0/tcp/5",)) == ("/ip4/127.0.0.1/tcp/5",)
    interfaces(**{f"eth{i}": f"192.168.1.{i}" for i in range(1, 30)}, ppp0="8.8.8.8")
    told = announced(("/ip4/0.0.0.0/tcp/5",))
    assert (len(told), told[0]) == (MAX_ADDRESSES, "/ip4/8.8.8.8/tcp/5"), "a record with more is refused"
    assert len(announced(("/ip4/0.0.0.0/tcp/5",), ["vm.example.org"])) == MAX_ADDRESSES


def test_a_public_address_that_is_announced_does_not_hide_a_machine_from_its_own_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many routers let nobody in who comes from inside. Who names one of several private networks means that one."""
    rows = {"eth0": [SimpleNamespace(family=socket.AF_INET, address="192.168.1.5")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)
    own = "/ip4/192.168.1.5/tcp/5"
    assert announced(("/ip4/0.0.0.0/tcp/5",), ["8.8.8.8:7"]) == ("/ip4/8.8.8.8/tcp/7", own)
    assert announced(("/ip4/0.0.0.0/tcp/5",), ["example.org"]) == ("/dns/example.org/tcp/5", own)
    assert announced(("/ip4/127.0.0.1/tcp/5",), ["8.8.8.8:7"]) == ("/ip4/8.8.8.8/tcp/7",), (
        "behind a proxy of this machine"
    )
    assert announced(("/ip4/0.0.0.0/tcp/5",), ["10.8.0.2:5"]) == ("/ip4/10.8.0.2/tcp/5",)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8", "/ip4/127.0.0.1/tcp/8"),
        ("127.0.0.1", "/ip4/127.0.0.1/tcp/3"),
        ("[::1]:8", "/ip6/::1/tcp/8"),
        ("::1", "/ip6/::1/tcp/3"),
        ("example.org:8", "/dns/example.org/tcp/8"),
        ("/ip4/1.2.3.4/udp/1/quic-v1", "/ip4/1.2.3.4/udp/1/quic-v1"),
    ],
)
def test_an_address_may_be_written_as_people_do(text: str, address: str) -> None:
    assert multiaddress(text, 3) == address


@pytest.mark.parametrize("text", ["", "a b:1", "1.2.3.4:x", "1.2.3.4:70000", "/ip4/1.2.3/tcp/1", "example.org:0:0:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        multiaddress(text)


def test_a_system_without_ipv6_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def without(family: int, *arguments: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *arguments)

    monkeypatch.setattr(socket, "socket", without)
    for listen in ("[::]:0", "127.0.0.1:0,[::]:0"):
        with pytest.raises(JoinError, match=r"cannot listen on :: .*family not supported"):
            reserve([listen])


def test_names_cannot_be_listened_on() -> None:
    with pytest.raises(UsageError, match="give an IP address"):
        reserve(["example.org:0"])
