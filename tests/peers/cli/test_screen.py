"""What others send is shown as it is: no markup, no escape sequence, no HTML; and a token need not be an argument."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from rich.table import Table
from typer.testing import CliRunner

from meshcee.errors import UsageError
from meshcee.files import loads
from meshcee.files.token_file import read_token
from meshcee.plan import Plan
from meshcee.planner import plans
from peers.cli import live_plan, plan, status
from peers.cli.live_plan import LivePlan
from peers.cli.main import app, main
from peers.cli.plan import read_scenario
from peers.cli.session import Screen, configure_logging, printable
from peers.cli.settings.file import subcommands
from peers.cli.view import LineView, RichView

HOSTILE = [
    "[/x]",
    "[bold",
    ":smile:",
    "[link=file:///etc/passwd]a[/link]",
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "a\u202eb",
    "\x9b31m",
]
TESTBED = "cee-small"
PAGE = "<script>alert(1)</script>\"'&"


def screen() -> tuple[Screen, io.StringIO]:
    shown, out = Screen(), io.StringIO()
    shown.file = out
    shown.width = 2000
    return shown, out


def a_plan() -> tuple[Plan, Any]:
    scenario = read_scenario(TESTBED, None)
    return plans(scenario.cluster, scenario.workload).best, scenario


@pytest.mark.parametrize("name", HOSTILE)
def test_a_screen_shows_a_text_and_does_not_obey_it(name: str) -> None:
    shown, out = screen()
    shown.print(name)
    shown.print(f"{name} has gone")
    assert printable(name) in out.getvalue()
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", [LineView, RichView])
def test_names_and_limits_of_others_pass_through_the_views_of_a_run(kind: type[LineView], name: str) -> None:
    best, _ = a_plan()
    shown, out = screen()
    report = SimpleNamespace(
        step=0,
        steps=2,
        loss=1.0,
        samples_per_s=1.0,
        tokens_per_s=None,
        eta_s=1.0,
        limit=f"link to {name}",
        metrics={name: 1.0},
        terms={name: 0.5},
    )
    with kind(shown) as view:
        view.plan(best, dict.fromkeys(best.peers, name))
        view.note(name)
        view.wait(name)
        view.report(report)  # type: ignore[arg-type]
    assert printable(name) in out.getvalue()
    assert not {c for c in out.getvalue() if not c.isprintable()} - {"\n"}


@pytest.mark.parametrize("name", HOSTILE)
def test_status_shows_names_kernels_and_addresses_of_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = {
        "peer": "p" * 52,
        "name": name,
        "device": None,
        "kernels": name,
        "state": name,
        "addresses": [name],
        "outside": name,
        "guards": [name],
    }
    run = {"job": name, "state": "waiting", "owner": "p" * 52, "plan": None}
    link = {"from": "p" * 52, "to": "p" * 52, "latency_s": 1.0, "bandwidth_bytes_per_s": 1.0}
    told = {"peers": [peer], "coordinator": {"peer": "p" * 52, "term": 1}, "links": [link], "runs": [run]}
    status.show(told)
    out = capsys.readouterr().out
    assert printable(name)[:6] in out
    assert not {c for c in out if not c.isprintable()} - {"\n"}


UNASKED: Any = (None, None, None)  # what only --compare reads


def test_a_page_of_a_plan_holds_no_markup_from_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, scenario = a_plan()
    names = dict.fromkeys(scenario.cluster.devices, PAGE)
    live = LivePlan(PAGE, best, (), scenario.cluster, scenario.workload, names, None, *UNASKED)
    monkeypatch.setattr(live_plan, "plan_live", lambda *_, **__: live)
    page = tmp_path / "plan.html"
    plan.run_plan(Path("job.py"), "x", html=page, as_json=False)
    text = page.read_text()
    assert "<script>alert" not in text
    assert text.count("\\u003cscript\\u003ealert(1)") > len(best.peers)  # in the data, which ends no element


def test_a_name_that_is_another_peers_id_is_not_replaced_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best, scenario = a_plan()
    first, second = best.peers[:2]
    live = LivePlan(
        "job", best, (), scenario.cluster, scenario.workload, {first: second, second: "[three]"}, None, *UNASKED
    )
    monkeypatch.setattr(live_plan, "plan_live", lambda *_, **__: live)
    plan.run_plan(Path("job.py"), "x", as_json=False)
    stages = [line for line in capsys.readouterr().out.splitlines() if " blocks " in line]
    assert any(line.endswith(f" on {second}") for line in stages)
    assert any(line.endswith(" on [three]") for line in stages)


def test_a_log_line_spells_out_what_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        configure_logging(as_json=False)
        structlog.get_logger().warning("a member was lost", error="\x1b[2J gone", gone="a\u202eb")
    finally:
        structlog.configure(**before)
    said = capsys.readouterr().err
    assert "\\x1b[2J gone" in said
    assert "\x1b[2J" not in said
    assert "\u202e" not in said


@pytest.mark.slow
def test_the_last_word_of_a_command_is_printable(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import meshcee\nraise meshcee.MeshceeError('\\x1b[2J' + 'over')\n")
    done = _meshcee("check", str(tmp_path / "job.py"))
    assert done.returncode == 1
    assert "\\x1b[2Jover" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_token_comes_from_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("  meshcee1.abc \nanother line\n")
    assert read_token(None) is None
    assert read_token("meshcee1.abc") == "meshcee1.abc"
    assert read_token(f"@{file}") == "meshcee1.abc"
    monkeypatch.setattr(sys, "stdin", io.StringIO("meshcee1.def\n"))
    assert read_token("-") == "meshcee1.def"


@pytest.mark.parametrize("line", ["\ufeffmeshcee2.abc\n", "  meshcee peer --join meshcee2.abc\n", "meshcee2.abc\r\n"])
def test_a_file_holds_the_line_as_it_was_printed_or_as_an_editor_saved_it(tmp_path: Path, line: str) -> None:
    file = tmp_path / "token"
    file.write_text(line, encoding="utf-8")
    assert read_token(f"@{file}") == "meshcee2.abc"


def test_every_command_refuses_an_empty_line() -> None:
    """Of a variable that a script has not set: `peer` founded a mesh, and `status` showed an empty one."""
    with pytest.raises(UsageError, match="--join is empty"):
        CliRunner().invoke(app, ["peer", "--join", ""], catch_exceptions=False)
    joining = [(w, c) for w, c in subcommands(app) if w != ("peer",) and any(p.name == "join" for p in c.params)]
    assert len(joining) > 10
    for words, command in joining:
        needed = ["x" for p in command.params if p.required]
        with pytest.raises(UsageError, match="--join is empty"):
            command.make_context(words[-1], ["--join", "", *needed])


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe", b"\x00" * 40])
def test_a_file_without_a_token_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"--join @{file}"):
        read_token(f"@{file}")


@pytest.mark.slow
def test_every_command_that_joins_reads_a_token_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("no token at all\n")
    for command in (
        ("peer",),
        ("status",),
        ("doctor",),
        ("token",),
        ("drain", "x"),
        ("plan", "job.py"),
        ("simulate", "job.py"),
    ):
        done = _meshcee(*command, "--join", f"@{tmp_path}/none")
        assert (command, done.returncode) == (command, 2)
        assert "none: the file cannot be read" in done.stderr
    done = _meshcee("status", "--join", f"@{file}")
    assert done.returncode == 2
    assert "'no token at all' is neither an invite token" in done.stderr


BAD = [
    "[" * 100_000,
    '{"a": NaN}',
    '{"a": Infinity}',
    '{"a": 1e999}',
    '{"a": ' * 50_000,
    "3\n4",
    "null",
    "[]",
    '"x"',
    "\x00",
]


@pytest.mark.parametrize("text", BAD)
def test_json_that_is_deep_or_infinite_is_one_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    for arguments in (
        ("plan", "--testbed", f"{file}:x"),
        ("plan", "--testbed", TESTBED, "--start", str(file)),
        ("simulate", str(file), "--testbed", TESTBED),
    ):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr().err
        assert (ended.value.code in (2, 5), said[:9], said.count("\n")) == (True, "meshcee: ", 1)


def test_what_is_json_is_read() -> None:
    assert loads(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}
    assert loads(json.dumps([[[[]]]])) == [[[[]]]]
    for bad in ("NaN", "-Infinity", "1e999", "[" * 100_000):
        with pytest.raises(ValueError, match=r"no number|too large|nested"):
            loads(bad)


def _meshcee(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "MESHCEE_JOIN"}
    command = [sys.executable, "-m", "meshcee", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_a_machine_without_memory_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise MemoryError("Unable to allocate internal buffer.")

    monkeypatch.setattr("peers.cli.main.app", full)
    with pytest.raises(SystemExit) as ended:
        main(["peer"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "no memory is left on this machine (Unable to allocate internal buffer.); free some" in said
    assert "bug" not in said
    assert "Traceback" not in said


def test_in_a_file_a_sentence_is_one_line_and_a_table_is_as_wide_as_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sentence, name = "a sentence " * 30, "n" * 120
    LineView(Screen()).note(sentence)
    table = Table("peer")
    table.add_row(name)
    Screen().print(table)
    out = capsys.readouterr().out
    assert sentence in out
    assert name in out
