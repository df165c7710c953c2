"""A peer as a service: what is written, by values; no line stands on a command line; nothing is written where nothing can run."""

from __future__ import annotations

import errno
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from dht import Grant, Identity, Token
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, UsageError
from meshcee.files.home import Home
from peers.cli.joining import service as joining_service
from peers.cli.joining.lines import line_file
from peers.cli.joining.notice import find
from peers.cli.joining.service import (
    Service,
    System,
    install,
    launchd_plist,
    logs,
    service_of,
    system_of,
    systemd_unit,
    uninstall,
)
from peers.cli.main import app, main
from peers.device import resolve_device
from peers.node.founding import Founding

GOLDEN = Path(__file__).with_name("service.golden")
SERVICE = Service(
    Path("/home/anna/.meshcee"), "/opt/meshcee/bin/python", ("--name", "anna's 50% box", "--memory", "8GiB"), True, "8GiB",
    path="/usr/bin:/bin",
)  # fmt: skip


def line() -> str:
    root = Identity.generate()
    grant = Grant(root.peer_id, root.peer_id, root.peer_id, "one", "own", None, time.time() + 3600)
    return Token.sign(root, [f"/ip4/192.0.2.1/tcp/4001/p2p/{root.peer_id}"], grant).encode()


def test_the_unit_is_what_was_reviewed() -> None:
    """After a change that is meant: write the text into the file, and read it there."""
    assert systemd_unit(SERVICE) == GOLDEN.read_text()


def test_nothing_is_taken_away_that_a_peer_needs() -> None:
    """Namespaces and landlock for what checks graphs, memory that is written and run for torch, GPUs, p2pd's sockets."""
    unit = systemd_unit(SERVICE)
    for needed in (
        "RestrictNamespaces",
        "MemoryDenyWriteExecute",
        "PrivateDevices",
        "PrivateNetwork",
        "SystemCallFilter",
    ):
        assert f"{needed}=" not in unit
    for family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"):
        assert family in unit
    assert "KillMode=mixed" in unit, "p2pd must live while the peer leaves"
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > 30


def test_what_a_user_has_typed_is_quoted() -> None:
    unit = systemd_unit(replace(SERVICE, flags=("--name", 'a "b" $HOME %h \\ c')))
    assert '"a \\"b\\" $$HOME %%h \\\\ c"' in unit
    assert 'Environment="PATH=/a b:/c$d%%e"' in systemd_unit(replace(SERVICE, path="/a b:/c$d%e"))
    with pytest.raises(UsageError, match="line end"):
        systemd_unit(replace(SERVICE, flags=("--name", "a\nExecStartPre=/bin/x")))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "meshcee-peer.service"
    (tmp_path / "home").mkdir()
    service = replace(SERVICE, python=os.path.realpath("/bin/sh"), home=tmp_path / "home")
    file.write_text(systemd_unit(service))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(file)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    said = [
        text
        for text in done.stderr.splitlines()
        if "meshcee-peer" in text and not re.search("Restart(Steps|Max)", text)
    ]
    assert done.returncode == 0, done.stderr
    assert said == [], "older releases know no back-off; nothing else may be unknown"


def test_the_agent_of_macos_says_the_same() -> None:
    told = plistlib.loads(launchd_plist(SERVICE))
    assert told["ProgramArguments"] == SERVICE.command
    assert told["KeepAlive"] == {"SuccessfulExit": False}, "a peer that was drained stays away"
    assert told["EnvironmentVariables"]["MESHCEE_HOME"] == "/home/anna/.meshcee"
    assert told["Umask"] == 0o077
    assert system_of("darwin").file.suffix == ".plist"


def test_flags_become_those_of_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(
        {"--name": "a", "--memory": "2GiB", "--threads": None, "--yield-to-owner": True, "--when": None}
    )
    assert service.flags == ("--name", "a", "--memory", "2GiB", "--yield-to-owner")
    monkeypatch.chdir(tmp_path)
    Path("scans.py").touch()
    service = service_of({"--dataset": ["a=scans.py:make", "b=scans.py:make"], "--region": None})
    assert service.flags == ("--dataset", f"a={tmp_path}/scans.py:make", "--dataset", f"b={tmp_path}/scans.py:make")
    for wrong in ({"--dataset": ["a=none.py:make"]}, {"--when": "noon"}, {"--memory": "much"}):
        with pytest.raises(UsageError):
            systemd_unit(service_of(wrong))
    assert "--identity" not in service.command, "who founds a mesh has its identity"
    assert "--join" not in service.command
    known = {option for p in peer_options() for option in p.opts + p.secondary_opts}
    assert {word for word in SERVICE.command if word.startswith("--")} <= known


def peer_options() -> list[object]:
    import typer

    return list(typer.main.get_command(app).commands["peer"].params)  # type: ignore[attr-defined]


class Tool:
    """Plays systemctl and journalctl; `fails` is how what fails begins, and `journal` what the service has said."""

    def __init__(self, fails: str = "nothing", journal: str = "") -> None:
        self.calls: list[str] = []
        self._fails, self._journal = fails, journal

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(shlex.join(command))
        failed = self.calls[-1].startswith(self._fails)
        if command[0] == "journalctl":
            return subprocess.CompletedProcess(list(command), 0, self._journal, "")
        return subprocess.CompletedProcess(list(command), int(failed), "", "no bus" if failed else "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Service, System]:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    monkeypatch.setattr(joining_service, "LOOK_S", 0.0)
    system = system_of("linux", {"XDG_CONFIG_HOME": str(tmp_path / "config")})
    return replace(SERVICE, home=tmp_path / "home"), system


def test_it_is_written_started_and_removed_again(here: tuple[Service, System]) -> None:
    (service, system), invite, tool = here, line(), Tool()
    install(service, invite, only_print=False, system=system, call=tool)
    assert "systemctl --user enable meshcee-peer.service" in tool.calls
    assert any(call.startswith("loginctl enable-linger") for call in tool.calls), "it starts with the machine"
    assert service.line_file.read_text().strip() == invite
    assert service.line_file.stat().st_mode & 0o077 == 0
    assert invite not in system.file.read_text() + "".join(tool.calls)
    assert f"@{service.line_file}" in system.file.read_text()
    assert line_file(Home(service.home)).read_text().strip() == invite, (
        "a plain `meshcee peer` beside it joins the same mesh"
    )

    uninstall(service, system=system, call=tool)
    assert "systemctl --user disable --now meshcee-peer.service" in tool.calls
    assert not system.file.exists()
    assert not service.line_file.exists()
    with pytest.raises(UsageError, match="no service"):
        uninstall(service, system=system, call=tool)


def test_nothing_is_written_that_could_not_run(here: tuple[Service, System]) -> None:
    service, system = here
    for call, match in ((Tool("systemctl --user show-environment"), "own login"),):
        with pytest.raises(UsageError, match=match):
            install(service, line(), only_print=False, system=system, call=call)
    with pytest.raises((UsageError, NotPermittedError)):
        install(service, "meshcee2.nonsense", only_print=False, system=system, call=Tool())
    with pytest.raises(UsageError, match="--print"):
        install(service, line(), only_print=False, system=replace(system, tool="no-such-tool"), call=Tool())
    assert not system.file.exists()
    assert not service.line_file.exists()
    with pytest.raises(JoinError, match="no bus"):
        install(service, line(), only_print=False, system=system, call=Tool("systemctl --user restart"))


@pytest.mark.parametrize(
    ("journal", "told"),
    [
        (
            "loading\nmeshcee: the first peer runs already:\n\n  meshcee peer --join X\n",
            "the first peer runs already.*--join X",
        ),
        ("loading\nKilled\n", r"\): Killed"),
        ("", "said nothing"),
    ],
)
def test_a_service_that_has_ended_does_not_run(here: tuple[Service, System], journal: str, told: str) -> None:
    (service, system), tool = here, Tool("systemctl --user is-active", journal)
    with pytest.raises(JoinError, match=f"(?s)does not run.*{told}"):
        install(service, line(), only_print=False, system=system, call=tool)
    assert any(call.startswith("loginctl enable-linger") for call in tool.calls), "it may run later"


def full(home: Path) -> None:
    with Home(home).writable():
        raise OSError(errno.ENOSPC, "No space left on device", str(home))


def another_runs(home: Path) -> None:
    with Founding.of(Home(home), None, is_open=False), Founding.of(Home(home), None, is_open=False):
        raise AssertionError("two peers are the first one")


def no_driver(home: Path) -> None:
    with mock.patch("torch.zeros", side_effect=RuntimeError("No CUDA GPUs are available")):
        resolve_device("cuda:0")


def silent_cloud(home: Path) -> None:
    find("gcp", {"GCE_METADATA_HOST": "127.0.0.1:9"})


@pytest.mark.parametrize("state", [full, another_runs, no_driver, silent_cloud])
def test_a_state_that_passes_has_a_service_tried_again(state: Callable[[Path], None], tmp_path: Path) -> None:
    never = {int(code) for code in re.findall(r"RestartPreventExitStatus=(.*)", systemd_unit(SERVICE))[0].split()}
    with pytest.raises(MeshceeError) as raised:
        state(tmp_path)
    assert raised.value.exit_code not in never
    with pytest.raises(MeshceeError) as wrong:
        resolve_device("no-such-device")
    assert wrong.value.exit_code in never


def test_a_service_has_its_time_to_leave_and_one_that_takes_longer_is_a_sentence(
    here: tuple[Service, System], monkeypatch: pytest.MonkeyPatch
) -> None:
    (service, system), waited = here, list[float]()
    service = replace(service, leave_s=600)

    def hangs(command: Sequence[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        waited.append(timeout)
        if not {"restart", "disable"} & set(command):
            return subprocess.CompletedProcess(list(command), 0, "", "")
        raise subprocess.TimeoutExpired(list(command), timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(JoinError, match=r"restart meshcee-peer.service has not ended .* type your own command again"):
        install(service, None, only_print=False, system=system)
    for text in (systemd_unit(service), launchd_plist(service).decode()):
        system.file.write_text(text)
        with pytest.raises(JoinError, match=r"disable .* has not ended"):
            uninstall(replace(service, leave_s=30), system=system)
        assert system.file.exists(), "it can be typed again"
    assert min(waited) > service.stop_s


def test_print_shows_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    invite = line()
    done = CliRunner().invoke(
        app, ["peer", "install", "--print", "--join", invite, "--memory", "8GiB"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "--memory 8GiB" in done.output
    assert invite not in done.output
    assert list(tmp_path.iterdir()) == []


def test_what_a_service_shall_do_stands_behind_the_word() -> None:
    with pytest.raises(UsageError, match="meshcee peer install"):
        CliRunner().invoke(app, ["peer", "--name", "x", "install", "--print"], catch_exceptions=False)


def test_its_logs_are_the_systems() -> None:
    assert logs(SERVICE, follow=False, platform="linux")[:2] == ["journalctl", "--user"]
    assert logs(SERVICE, follow=True, platform="darwin")[-1] == str(SERVICE.log_file)


def test_only_what_the_service_does_not_read_itself_is_written_and_the_file_of_settings_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHCEE_CONFIG", str(tmp_path / "own.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    its_own = {"memory": "8GiB", "threads": 2}  # [peer.install], where [peer] has the same memory
    done = CliRunner().invoke(
        app,
        ["peer", "install", "--print", "--name", "a"],
        default_map={"peer": {"memory": "8GiB", "install": its_own}},
    )
    assert done.exit_code == 0, done.output
    assert "peer --no-lan --name a --threads 2\n" in done.output
    assert f"Environment=MESHCEE_CONFIG={tmp_path}/own.toml" in done.output
    assert f"Environment=XDG_CONFIG_HOME={tmp_path}/config\n" in done.output
    monkeypatch.delenv("MESHCEE_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert [name for name, _ in service_of().settings] == []


def test_the_system_leaves_a_service_what_the_file_of_settings_gives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[peer]\nleave_within = 300\nmemory = "8GiB"\n')
    monkeypatch.setenv("MESHCEE_CONFIG", str(file))
    for typed, stop_s in (((), 320), (("--leave-within", "40"), 60)):
        with pytest.raises(SystemExit):
            main(["peer", "install", "--print", *typed])
        told = capsys.readouterr().out
        assert f"TimeoutStopSec={stop_s}\n" in told
        assert f"MemoryMax={(10 << 30) + (3 << 30)}\n" in told
        assert "--memory" not in told, "the service reads the file itself"


def test_a_line_on_standard_input_is_for_the_word_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_JOIN", "-")
    done = CliRunner().invoke(app, ["peer", "install", "--print"], input=f"{line()}\n")
    assert done.exit_code == 0, done.output
    assert "mode 0600" in done.output
