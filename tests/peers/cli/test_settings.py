"""Where a setting comes from: flags win over the environment, that over the file, and that over the defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshcee.errors import UsageError
from meshcee.files import loads
from meshcee.files.home import Home, under
from peers.cli.main import app, main
from peers.cli.settings import config_file, defaults_of

FILE = """
threads = 2
[peer]
memory = "8GiB"
leave-within = 5.0
[run.list]
json = true
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and a file of settings."""
    for name in [name for name in os.environ if name.startswith(("MESHCEE_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config" / "meshcee" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(FILE)
    return path


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main(["config", "--json", *arguments])
    assert ended.value.code == 0
    lines = [loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: line for line in sorted(lines, key=lambda line: bool(line["source"] == "file"))}


def test_each_source_wins_over_the_next(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCEE_MEMORY", "4GiB")
    found = listed(capsys, "peer", "--region", "lab")
    told = {name: (found[name]["value"], found[name]["source"]) for name in found}
    assert told["--region"] == ("lab", "flag")
    assert told["--memory"] == ("4GiB", "environment")
    assert told["--threads"] == (2, "file")
    assert told["--device"] == ("auto", "default")
    assert (listed(capsys, "peer", "--memory", "1GiB")["--memory"])["source"] == "flag"


def test_all_settings_are_listed_with_folders_time_outs_and_limits(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys)
    assert found["config"]["value"] == str(file)
    assert found["home"]["value"] == str(Home().folder)
    assert found["--memory"]["commands"] == ["peer"]
    assert found["--leave-within"]["value"] == 5.0
    assert found["--json"]["commands"] == ["run list"]
    assert found["Timeouts.lease_ttl_s"]["source"] == "default"
    assert {"--join", "--device", "Limits.record_bytes"} < found.keys()


def test_a_command_runs_with_what_the_file_says(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Home().new_run("gpt")
    with pytest.raises(SystemExit):
        main(["run", "list"])
    assert loads(capsys.readouterr().out)["steps"] == 0


def test_an_invite_is_not_printed_for_others_to_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCEE_JOIN", "meshcee2." + "s" * 300)
    for arguments in (["config"], ["config", "--json"], ["config", "peer"]):
        with pytest.raises(SystemExit):
            main(arguments)
        out = capsys.readouterr().out
        assert "meshcee2.sss" in out
        assert "s" * 40 not in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("thread = 1", "no command has a setting 'thread'"),
        ("[peer]\nmemry = 1", "`meshcee peer` has no option --memry"),
        ("[pier]\n", "no command has a setting 'pier'"),
        ("[peer", "no file of settings"),
    ],
)
def test_what_nothing_reads_is_one_sentence(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=told):
        defaults_of(app, os.environ)


def test_a_command_that_is_not_there_is_told(file: Path) -> None:
    for arguments in (["config", "pear"], ["config", "peer", "anna"], ["config", "peer", "--memry", "1"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_folders_are_those_of_xdg_and_an_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHCEE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Home().folder == tmp_path / ".local" / "share" / "meshcee"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert Home().folder == tmp_path / "data" / "meshcee"
    (tmp_path / ".meshcee").mkdir()
    assert Home().folder == tmp_path / ".meshcee"
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "own"))
    assert Home().folder == tmp_path / "own"
    assert config_file({"MESHCEE_CONFIG": "/a/b.toml"}) == Path("/a/b.toml")
    assert under("XDG_CONFIG_HOME", "/x", {"XDG_CONFIG_HOME": "relative"}) == Path("/x"), (
        "the rules of XDG: it is ignored"
    )


@pytest.mark.parametrize("arguments", [["config"], ["--version"], ["--help"], ["train", "--help"]])
def test_a_wrong_file_does_not_lock_out_what_helps_to_mend_it(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    file.write_text("thread = 1")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "'thread'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["run", "list"])
    assert ended.value.code == 2


def test_a_user_without_a_home_needs_meshcee_home_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("no home")

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", refused)
        patched.setattr(Path, "is_dir", refused)
        assert defaults_of(app, os.environ) == {}
        with pytest.raises(UsageError, match="MESHCEE_HOME"):
            Home()
    monkeypatch.setattr(Path, "expanduser", unknown)
    assert defaults_of(app, os.environ) == {}
    with pytest.raises(UsageError, match="MESHCEE_HOME"):
        Home()


def test_a_run_that_is_typed_wins_over_a_mesh_that_is_set(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr("peers.cli.ui.command.run_ui", lambda run, token, port, **rest: asked.append((run, token)))
    monkeypatch.setenv("MESHCEE_JOIN", "meshcee2.x")
    for arguments in (["ui", "last"], ["ui"], ["ui", "last", "--join", "meshcee2.y"]):
        with pytest.raises(SystemExit):
            main(arguments)
    assert asked == [("last", None), (None, "meshcee2.x"), ("last", "meshcee2.y")]
