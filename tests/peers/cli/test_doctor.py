"""`meshcee doctor`: planted faults are named with what mends them, any facts can be judged, and the command itself runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dht import dialable
from meshcee import errors
from meshcee.figures import LinkProfile, Versions
from peers.cli.doctor import exactness, mesh, paths
from peers.cli.doctor.command import run_doctor, show
from peers.cli.doctor.facts import (
    Device,
    Door,
    Exactness,
    Facts,
    Folder,
    Guards,
    Invite,
    Kernels,
    Link,
    Memory,
    Mesh,
    Neighbour,
    Network,
    Package,
    Pass,
    Process,
    Refused,
    Shared,
    Unseen,
)
from peers.cli.doctor.finding import Finding
from peers.cli.doctor.judge import judge
from peers.cli.session import SETTINGS, Screen
from peers.device import fingerprints, kernel_class, kernels
from peers.node import JoinOptions
from peers.node.agent import Agent
from peers.node.in_process import InProcess
from peers.transport.p2p.interfaces import announced

GIB = 1 << 30
NOW = 1_800_000_000.0
ROOT = "12D3KooWroot"
OURS = Versions("0.1.0", "2.13.0+cpu", "3.11.7")
DEVICE = Device("cpu", "cpu AMD AVX512, torch 2.13.0+cpu, 2 threads", 2, 2, environment=SETTINGS)
CPU = Kernels("cpu", DEVICE.kernels, {"product": ("a3", "a3"), "softmax": ("8a", "8a")})
NETWORK = Network({"TCP": "", "UDP": ""}, {"0.0.0.0:0": ""}, "", "vm", "")
GUARDS = Guards(("one thread", "namespaces", "landlock", "seccomp"), (), (), "", 1000)
BEN = Neighbour("ben", False, OURS, ("/ip4/192.0.2.2/tcp/4001/p2p/x",), True)
ANNA = Neighbour("anna", True, OURS, ("/ip4/192.0.2.1/tcp/4001/p2p/y",), None, 1)
ALIKE = replace(BEN, kernels=CPU.of, prints={"product": "a3", "softmax": "8a"})
MESH = Mesh(ROOT, (ANNA, BEN))
GOOD = Facts(
    now=NOW,
    versions=OURS,
    packages=(Package("torch", "2.13.0"), Package("hivemind", "1.1.12"), Package("p2pd", "runs")),
    device=DEVICE,
    memory=Memory(24 * GIB, 20 * GIB),
    folders=(Folder("home", "/home/a/.meshcee", 80 * GIB), Folder("temporary files", "/tmp", 80 * GIB)),
    network=NETWORK,
    files=(20_000, 20_000),
    guards=GUARDS,
    passes=(Pass(ROOT, "own", NOW + 5 * 86400, "/home/a/.meshcee/identities/0.key.x.member"),),
    processes=(Process(7, "meshcee peer"), Process(8, "p2pd")),
    shared=Shared(2, 0.1, 24 * GIB, 3 * GIB, (("vim 9", 0.1),), (("browser 8", GIB),)),
    exactness=Exactness("", "", (CPU, replace(CPU, of="cpu AMD AVX512, torch 2.13.0+cpu, 1 thread"))),
    mesh=MESH,
)

FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {  # what is planted; level, what and words of the mend
    "wrong clock": ({"mesh": replace(MESH, off="the clock of ben is 62 s ahead")}, "bad", "clock", "NTP"),
    "clock that joins nowhere": ({"mesh": Refused("ClockError", "62 s apart")}, "bad", "clock", "NTP"),
    "closed port": (
        {"network": replace(NETWORK, ports={"0.0.0.0:4001": "cannot listen (Address already in use)"})},
        "bad",
        "port",
        "ss -ltnp",
    ),
    "no loopback": (
        {"network": replace(NETWORK, binds={"TCP": "", "UDP": "not permitted"})},
        "bad",
        "loopback",
        "lo up",
    ),
    "no host name": (
        {"network": replace(NETWORK, lookup="Name or service not known")},
        "warn",
        "host name",
        "/etc/hosts",
    ),
    "slow host name": ({"network": replace(NETWORK, lookup_s=3.0)}, "warn", "host name", "/etc/resolv.conf"),
    "full disk": ({"folders": (Folder("home", "/a", 1 << 20),)}, "bad", "home", "MESHCEE_HOME"),
    "filling disk": ({"folders": (Folder("home", "/a", GIB),)}, "warn", "home", "meshcee run list"),
    "read-only home": (
        {"folders": (Folder("home", "/a", GIB, "Read-only file system"),)},
        "bad",
        "home",
        "MESHCEE_HOME",
    ),
    "disk without inodes": (
        {"folders": (Folder("home", "/a", GIB, "No space", is_full=True),)},
        "bad",
        "home",
        "make room, or",
    ),
    "full /tmp": ({"folders": (Folder("temporary files", "/tmp", 0),)}, "bad", "temporary files", "TMPDIR"),
    "unsupported torch": ({"versions": replace(OURS, torch="2.5.1")}, "warn", "versions", "torch>=2.11"),
    "other torch": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, versions=replace(OURS, torch="2.12.1"))))},
        "warn",
        "versions",
        "torch==2.12.1",
    ),
    "no p2pd": ({"packages": (Package("p2pd", "", "does not start"),)}, "bad", "p2pd", "--force-reinstall"),
    "no hivemind": ({"packages": (Package("hivemind", "", "No module"),)}, "bad", "hivemind", "pip install"),
    "spinning threads": (
        {"device": replace(DEVICE, environment={"OMP_WAIT_POLICY": "ACTIVE"})},
        "warn",
        "waiting threads",
        "unset OMP_WAIT_POLICY",
    ),
    "spinning for long": (
        {"device": replace(DEVICE, environment={"GOMP_SPINCOUNT": "infinity"})},
        "warn",
        "waiting threads",
        "unset GOMP_SPINCOUNT",
    ),
    "pinned threads": (
        {"device": replace(DEVICE, environment={"OMP_PROC_BIND": "close"})},
        "warn",
        "pinned threads",
        "unset OMP_PROC_BIND",
    ),
    "limited threads": (
        {"device": replace(DEVICE, threads=1, environment={"OMP_NUM_THREADS": "1"})},
        "warn",
        "threads",
        "--threads 2",
    ),
    "more threads than cores": (
        {"device": replace(DEVICE, threads=8, cores=4)},
        "warn",
        "threads",
        "--threads 4",
    ),
    "card without driver": ({"device": replace(DEVICE, cards=1)}, "warn", "CUDA", "driver"),
    "torch without CUDA": ({"device": replace(DEVICE, cards=1, driver="580.1")}, "warn", "CUDA", "pytorch.org"),
    "old driver": (
        {"device": replace(DEVICE, cards=1, driver="470.1", cuda_build="13.0")},
        "warn",
        "CUDA",
        "nvidia-smi",
    ),
    "few files": ({"files": (256, 4096)}, "warn", "open files", "ulimit -n 4096"),
    "very few files": ({"files": (64, 64)}, "bad", "open files", "limits.conf"),
    "little memory": ({"memory": Memory(24 * GIB, GIB // 2)}, "bad", "memory", "ps aux"),
    "small container": ({"memory": Memory(64 * GIB, 60 * GIB, GIB, GIB // 2)}, "bad", "memory", "the container's"),
    "no landlock": (
        {"guards": replace(GUARDS, missing=("landlock: Operation not supported",))},
        "warn",
        "landlock",
        "5.13",
    ),
    "no user namespaces": (
        {"guards": replace(GUARDS, missing=("namespaces: Operation not permitted",))},
        "warn",
        "namespaces",
        "max_user_namespaces",
    ),
    "a worker that can still": ({"guards": replace(GUARDS, possible=("open files",))}, "warn", "worker", "trust"),
    "no worker": ({"guards": Guards((), (), (), "it was not ready within 60 s")}, "bad", "worker", "ulimit -u"),
    "expired certificate": (
        {"passes": (replace(GOOD.passes[0], until=NOW - 60),)},
        "bad",
        "mesh …KooWroot",
        "meshcee invite",
    ),
    "expired certificate of another mesh": (
        {"passes": (Pass("other-mesh", "own", NOW - 60, "/a/f"),)},
        "warn",
        "mesh …her-mesh",
        "remove /a/f",
    ),
    "certificate that ends soon": (
        {"passes": (replace(GOOD.passes[0], until=NOW + 60),)},
        "warn",
        "mesh …KooWroot",
        "renews",
    ),
    "invite that has ended": ({"invite": Invite("a", "own", NOW - 60)}, "warn", "invite", "meshcee invite"),
    "invite that ends soon": ({"invite": Invite("a", "own", NOW + 3600)}, "warn", "invite", "join with it before"),
    "damaged membership": (
        {"passes": (replace(GOOD.passes[0], problem="it holds no certificate"),)},
        "warn",
        "mesh …KooWroot",
        "meshcee invite",
    ),
    "orphan": (
        {"processes": (Process(41, "p2pd", True), Process(42, "graph checker", True))},
        "warn",
        "orphans",
        "kill 41 42",
    ),
    "unequal self-test": (
        {"exactness": Exactness("step 1: the loss", "", ())},
        "bad",
        "self-test",
        "reinstall torch",
    ),
    "uncaptured self-test": ({"exactness": Exactness("", "no export", ())}, "bad", "self-test", "torch"),
    "kernels that waver": (
        {"exactness": Exactness("", "", (replace(CPU, prints={"product": ("a", "b")}),))},
        "bad",
        "kernels",
        "memory",
    ),
    "other bits than a peer of the same class": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, kernels=CPU.of, prints={"product": "a3", "softmax": "ff"})))},
        "bad",
        "kernels",
        "--force-reinstall torch==2.13.0",
    ),
    "a peer with other bits than its class": (
        {"mesh": replace(MESH, peers=(ANNA, ALIKE, ALIKE, replace(ALIKE, name="carl", prints={"product": "ff"})))},
        "warn",
        "kernels",
        "meshcee drain carl",
    ),
    "a card that does not compute": (
        {"exactness": Exactness("", "", (CPU, Kernels("cuda:1", "cuda H100", {}, "CUDA error")))},
        "bad",
        "kernels of cuda:1",
        "nvidia-smi",
    ),
    "blocked direct path": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, answers=False)))},
        "warn",
        "direct path",
        "firewall",
    ),
    "a peer here that nobody reaches": (
        {"mesh": replace(MESH, peers=(replace(ANNA, measured_by=0), BEN))},
        "warn",
        "reach",
        "--announce",
    ),
    "a link that sags": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, link=Link((0.01, 1e6), (0.01, 12e6), 200.0))))},
        "warn",
        "link to ben",
        "ss -tip",
    ),
    "a link that is late": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, link=Link((0.2, 12e6), (0.01, 12e6), 200.0))))},
        "warn",
        "link to ben",
        "ss -tip",
    ),
    "small packets": ({"mesh": replace(MESH, peers=(ANNA, replace(BEN, mtu=1200)))}, "warn", "MTU", "mtu 1500"),
    "a router that nobody has told of": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, sees="198.51.100.7")))},
        "warn",
        "NAT",
        "let TCP ports 4001 and 4002 in at the router, with the same numbers",
    ),
    "a port that is closed from outside": (
        {"mesh": replace(MESH, doors=(Door(4001, "anna", "198.51.100.7", ("ben",)),))},
        "warn",
        "ports from outside",
        "--announce 198.51.100.7:4001",
    ),
    "a firewall before all ports": (
        {"mesh": replace(MESH, doors=(Door(40123, "", "2001:db8::7", ("ben",)),))},
        "warn",
        "ports from outside",
        "--listen '0.0.0.0:4001,[::]:4001' --announce [2001:db8::7]:4001 --direct-port 4002",
    ),
    "a port for tensors that is closed from outside": (
        {"mesh": replace(MESH, doors=(Door(4002, "anna, for tensors", "198.51.100.7", ("ben",)),))},
        "warn",
        "ports from outside",
        "start the peer here with --direct-port 4002",  # whose --listen is another port
    ),
    "blocked direct port": (
        {"mesh": replace(MESH, peers=(ANNA, replace(BEN, direct=False)))},
        "warn",
        "direct port",
        "--direct-port",
    ),
    "busy cores": (
        {"shared": replace(GOOD.shared, busy=1.5, by_cores=(("ffmpeg 77", 1.5),))},
        "warn",
        "shared cores",
        "--threads 1",
    ),
    "memory that others hold": (
        {"shared": replace(GOOD.shared, used=20 * GIB, by_bytes=(("browser 8", 15 * GIB),))},
        "warn",
        "shared memory",
        "ps aux",
    ),
    "another mesh": (
        {"processes": (Process(7, "meshcee peer"), Process(9, "meshcee peer"))},
        "warn",
        "other mesh",
        "kill 7 9",
    ),
    "a mesh that is gone": ({"mesh": Refused("JoinError", "no peer answered")}, "bad", "join", "meshcee token"),
    "an invite that has ended": (
        {"mesh": Refused("NotPermittedError", "it has ended")},
        "bad",
        "join",
        "meshcee invite",
    ),
}


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level in ("warn", "bad")]


def test_a_good_machine_has_no_problem() -> None:
    assert problems(GOOD) == []
    assert {f.level for f in judge(GOOD)} == {"ok"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_mend(fault: str) -> None:
    change, level, what, mend = FAULTS[fault]
    (found,) = problems(replace(GOOD, **change))
    assert (found.level, found.what) == (level, what)
    assert mend in found.mend
    assert (found.error is not None) == (level == "bad")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("wrong clock", 3),
        ("full disk", 3),
        ("read-only home", 2),
        ("expired certificate", 8),
        ("unequal self-test", 10),
        ("little memory", 5),
    ],
)
def test_what_is_bad_has_the_exit_code_of_commands_that_fail_by_it(fault: str, code: int) -> None:
    (found,) = problems(replace(GOOD, **FAULTS[fault][0]))
    assert found.error is not None
    assert found.error.exit_code == code


def test_what_could_not_be_looked_at_is_unknown_and_says_why() -> None:
    dark = Unseen("PermissionError: /proc")
    groups = ("device", "memory", "shared", "network", "guards", "passes", "processes", "exactness")
    facts = replace(GOOD, **dict.fromkeys(groups, dark), mesh=None)
    unknown = [f for f in judge(facts) if f.level == "unknown"]
    assert len(unknown) == 10
    assert sum("PermissionError" in f.detail for f in unknown) == 8
    assert sum("--join" in f.detail for f in unknown) == 2


def test_a_machine_that_founded_its_mesh_renews_its_own_certificate() -> None:
    assert problems(replace(GOOD, passes=(replace(GOOD.passes[0], until=0.0, founded=True),))) == []


@pytest.mark.parametrize(
    ("until", "said"),
    [
        (NOW + 5 * 86400, "ends in 5 days"),
        (NOW + 86400, "ends in 1 day"),
        (NOW + 86399, "ends in 23 hours"),
        (NOW + 60, "ends in 1 minute"),
        (NOW + 1, "ends in 0 minutes"),
        (NOW, "has ended 0 minutes ago"),
        (NOW - 7200, "has ended 2 hours ago"),
        (1e300, "ends in very long"),
    ],
)
def test_when_an_invite_ends_is_said_in_words(until: float, said: str) -> None:
    findings = judge(replace(GOOD, invite=Invite("another mesh", "own", until)))
    (told,) = (one.detail for one in findings if one.what == "invite")
    assert f"{said}, on " in told


@pytest.mark.parametrize(
    ("ben", "what", "said"),
    [
        ({"link": Link((0.01, 1e6))}, "link to ben", "8 Mbit/s and 10 ms now"),
        (
            {"link": Link((0.01, 9e6), (0.009, 12e6), 200.0)},
            "link to ben",
            "72 Mbit/s and 10 ms now; 96 Mbit/s and 9 ms by the record of a peer here, 3 minutes ago",
        ),
        ({"link": Link()}, "link to ben", "not measured now: that peer trains, and its steps need the line"),
        ({"mtu": 1500}, "MTU", "packets of 1500 bytes reach 1 peer of other machines whole"),
        (
            {"mtu": 1420},
            "MTU",
            "packets of 1420 bytes reach 1 peer of other machines whole: a tunnel is on the way, and TCP fits itself to it",
        ),
        ({"sees": "192.0.2.1"}, "NAT", "none: ben sees this machine at 192.0.2.1, its own address"),
        (
            {"sees": "198.51.100.1"},
            "NAT",
            "behind a router: ben sees this machine at 198.51.100.1, which is no address of its own",
        ),
    ],
)
def test_paths_are_told_and_no_fault_where_they_are_well(ben: dict[str, Any], what: str, said: str) -> None:
    anna = replace(ANNA, addresses=("/ip4/198.51.100.1/tcp/4001/p2p/y",))
    facts = replace(GOOD, mesh=Mesh(ROOT, (anna, replace(BEN, **ben)), "", ("127.0.0.1", "192.0.2.1")))
    assert [one.detail for one in judge(facts) if one.what == what] == [said]
    assert problems(facts) == []


def test_who_is_a_member_needs_its_invite_no_more() -> None:
    assert problems(replace(GOOD, invite=Invite(ROOT, "own", NOW - 60))) == []


@settings(max_examples=40, deadline=None)
@given(facts=st.from_type(Facts))
def test_any_facts_give_printable_sentences_and_a_mend_for_what_is_bad(facts: Facts) -> None:
    found = judge(facts)
    assert found
    for finding in found:
        for text in (finding.what, finding.detail, finding.mend):
            assert text.isprintable()
            assert ". " not in text
        assert finding.what
        assert finding.detail
        assert bool(finding.mend) == (finding.level in ("warn", "bad"))
        assert (finding.error is not None) == (finding.level == "bad")


@pytest.mark.parametrize("name", ["\x1b[2J", "[bold", "a\u202eb", "one\ntwo. three"])
def test_names_of_others_are_shown_and_not_obeyed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = replace(BEN, name=name, answers=False), replace(ANNA, name=name, measured_by=0)
    findings = judge(replace(GOOD, mesh=Mesh(ROOT, peers, name)))
    show(findings, 9.8, Screen())
    out = capsys.readouterr().out
    assert not {c for c in out if not c.isprintable()} - {"\n"}
    assert len([line for line in out.splitlines() if "-> " in line]) == 3
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen().is_terminal
    show(findings, 9.8, Screen())
    assert "\x1b[2J" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "all is well: 26 findings, in 9.8 s"),
        ({"mesh": None}, "all is well: 22 findings, and nobody could look at 2, in 9.8 s"),
        ({"folders": (Folder("home", "/a", 0),)}, "1 bad, 0 to look at, 24 well, 0 unknown, in 9.8 s"),
        ({"mesh": None, "files": (256, 4096)}, "0 bad, 1 to look at, 21 well, 2 unknown, in 9.8 s"),
    ],
)
def test_the_last_line_says_whether_all_is_well_and_what_it_took(
    change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(judge(replace(GOOD, **change)), 9.8, Screen())
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_kernels_that_waver_and_steps_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()

    class Others:
        """Each reading makes other samples."""

        reads = 0

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.reads += 1
            row = torch.full((16,), float(self.reads))
            return row, row

    job = replace(exactness.a_job(), data=Others())
    monkeypatch.setattr(exactness, "a_job", lambda: job)
    monkeypatch.setattr(kernels, "KERNELS", {"product": lambda draw: torch.full((1,), float(next(count)))})
    found = exactness.self_test(torch.get_num_threads(), 1)
    assert found.differs
    assert all(len(set(one.prints["product"])) == 2 for one in found.kernels)


def test_the_processor_is_fingerprinted_with_every_number_of_threads_that_a_peer_may_have() -> None:
    before = torch.get_num_threads()
    found = exactness.self_test(before, 2)
    assert torch.get_num_threads() == before
    ours = [str(kernel_class(torch.device("cpu"), threads)) for threads in dict.fromkeys((before, 1, 2))]
    assert [one.of for one in found.kernels if one.device == "cpu"] == ours
    assert all(first == again for one in found.kernels for first, again in one.prints.values())


def test_other_libraries_settings_are_told() -> None:
    ours, theirs = (f"cpu AMD AVX512/{digits}, torch 2.13.0+cpu, 2 threads" for digits in ("1a2b", "ffff"))
    kernels = tuple(replace(one, of=ours) for one in GOOD.exactness.kernels[:1])
    there = replace(ALIKE, kernels=theirs)
    given = replace(GOOD, exactness=replace(GOOD.exactness, kernels=kernels), mesh=replace(MESH, peers=(there,)))
    told = [one for one in judge(given) if one.what == "kernels" and one.level == "warn"]
    assert [one.detail for one in told] == [f"its libraries compute other bits: {ours} here, {theirs} on {there.name}"]
    assert "MKL_" in told[0].mend


def test_fingerprints_are_shown_beside_those_of_peers_of_the_same_class_only() -> None:
    other = replace(ALIKE, kernels="cpu Intel AVX2, torch 2.13.0+cpu, 2 threads", prints={"product": "ff"})
    silent = replace(ALIKE, prints={})  # an older peer
    findings = judge(replace(GOOD, mesh=replace(MESH, peers=(ALIKE, other, silent))))
    (told,) = (one.detail for one in findings if one.what == "kernels")
    assert told == f"product a3, softmax 8a, on {CPU.of}, as 1 peer of that class"


async def test_peers_of_other_machines_are_dialled_once_at_what_they_announce() -> None:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(accept, "0.0.0.0", 0) as server:
        port = server.sockets[0].getsockname()[1]
        outside = dialable(announced([f"/ip4/0.0.0.0/tcp/{port}"]))
        if not outside:
            pytest.skip("this machine has no address but loopback")
        peers = [replace(BEN, addresses=outside, answers=None), replace(BEN, addresses=("/ip4/127.0.0.1/tcp/9",)), ANNA]
        found = await mesh.dialled(peers)
    assert [peer.answers for peer in found] == [True, None, None]
    (closed,) = await mesh.dialled([replace(BEN, addresses=outside)])
    assert closed.answers is False


async def test_neighbours_are_the_peers_that_lend_a_device() -> None:
    async with InProcess(JoinOptions(local=2)) as here:
        for name in ("anna", "ben"):
            await here.start(name)
        observer = (await here.own("doctor", None)).agent
        found = list(mesh.neighbours(observer).values())
    assert [peer.name for peer in found] == ["anna", "ben"]
    assert all(peer.versions is not None and not peer.here for peer in found)
    ours = str(kernel_class(torch.device("cpu"), torch.get_num_threads())), dict(fingerprints(torch.device("cpu")))
    assert [(peer.kernels, peer.prints) for peer in found] == [ours] * 2


async def test_links_are_measured_beside_what_a_peer_of_this_machine_tells() -> None:
    async with InProcess(JoinOptions(local=3)) as here:
        for name in ("anna", "ben", "carl"):
            await here.start(name)
        observer = (await here.own("doctor", None)).agent
        anna, ben, carl = (here.agents[name].peer_id for name in ("anna", "ben", "carl"))
        await observer.directory.wait_for(lambda: any(to == ben for to, _ in known(observer, anna)))
        peers = mesh.neighbours(observer)
        peers[anna], peers[carl] = replace(peers[anna], here=True), replace(peers[carl], busy=True)
        found = dict(zip(peers, await paths.with_paths(observer, peers), strict=True))
    assert found[anna].link is None
    to_ben, to_carl = found[ben].link, found[carl].link
    assert to_ben is not None
    assert to_ben.now is not None
    assert to_ben.record == next((x.latency_s, x.bandwidth_bytes_per_s) for to, x in known(observer, anna) if to == ben)
    assert to_carl is not None
    assert to_carl.now is None


def known(observer: Agent, peer: str) -> tuple[tuple[str, LinkProfile], ...]:
    record = observer.directory.links.get(peer)
    return record.links if record is not None else ()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the MTU of a path")
def test_the_kernel_tells_the_largest_packet_of_a_path() -> None:
    most = int(Path("/sys/class/net/lo/mtu").read_text())
    assert paths.mtu_to("127.0.0.1", 9) == min(most, 65535)  # of which IPv4 can count the bytes
    assert paths.mtu_to("no address", 9) is None
    assert "127.0.0.1" in paths.interfaces()


def test_ports_to_be_dialled_are_those_of_peers_here_or_else_of_a_daemon_that_listens() -> None:
    own = ("/ip4/192.0.2.1/tcp/40123/p2p/z", "/ip4/127.0.0.1/tcp/9/p2p/z")
    assert paths.ports_here([], own) == {40123: ""}
    assert paths.ports_here([ANNA], own) == {4001: "anna"}
    assert paths.ports_here([replace(ANNA, tensors=4002)], own) == {4001: "anna", 4002: "anna, for tensors"}
    behind = replace(ANNA, addresses=("/ip4/8.8.8.8/tcp/5001", "/ip4/192.168.1.5/tcp/4001"))
    assert paths.ports_here([behind], own) == {5001: "anna"}, "as its router calls it"
    many = [replace(ANNA, addresses=(f"/ip4/192.0.2.1/tcp/{port}",)) for port in range(4001, 4021)]
    assert len(paths.ports_here(many, own)) == 4


def test_both_ports_of_a_peer_are_named_as_they_are() -> None:
    both = (Door(4001, "anna", "198.51.100.7", ("ben",)), Door(5000, "anna, for tensors", "198.51.100.7", ("ben",)))
    (first, second) = (one.mend for one in problems(replace(GOOD, mesh=replace(MESH, doors=both))))
    assert "TCP ports 4001 and 5000" in first
    assert first.endswith("--listen 0.0.0.0:4001 --announce 198.51.100.7:4001 --direct-port 5000")
    assert "--listen" not in second


# -- the command


def test_the_command_finds_this_machine_fit_for_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    run_doctor(None, as_json=True)
    *findings, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = {(one["finding"]["group"], one["finding"]["what"]): one["finding"] for one in findings}
    assert last["result"]["bad"] == 0
    assert last["result"]["seconds"] > 0
    assert told["exactness", "self-test"]["level"] == "ok"
    assert told["software", "p2pd"]["level"] == "ok"
    assert told["mesh", "clock"]["level"] == "unknown"
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_ends_the_command_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", "/proc/nowhere")
    with pytest.raises(errors.UsageError, match="home"):
        run_doctor(None, as_json=False)
    out = capsys.readouterr().out
    assert "x  home: /proc/nowhere cannot be written" in out
    assert "MESHCEE_HOME" in out


WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from peers.cli.main import main
main(["doctor", "--json"])
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("library", ["torch", "hivemind", "uvloop"])
def test_a_library_that_is_missing_is_named_by_the_command(library: str, tmp_path: Path) -> None:
    command, env = [sys.executable, "-c", WITHOUT, library], {**os.environ, "MESHCEE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)
    found = [json.loads(line).get("finding", {}) for line in done.stdout.splitlines()]
    (bad,) = (f for f in found if f.get("what") == library)
    assert (bad["level"], bad["exit_code"]) == ("bad", 3)
    assert f"pip install --force-reinstall {library}" in bad["mend"]
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_wrong_input_is_one_sentence() -> None:
    for arguments, said in ((["--join", "nonsense"], "neither an invite token"), (["--jion", "x"], "No such option")):
        command = [sys.executable, "-m", "meshcee", "doctor", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False, timeout=60)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
