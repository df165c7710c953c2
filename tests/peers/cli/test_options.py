"""What the commands of a user say: each option once, each file of a plan by one reader, one name for each command."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcee._demo_job import job
from meshcee.capture import capture
from meshcee.errors import PlanError, UsageError
from peers.cli.main import app, main
from peers.cli.peer import has_own_process
from peers.cli.plan import read_plan
from peers.cli.session import parse_bytes
from peers.cli.settings.file import subcommands
from peers.cli.train import TrainOptions, run_train
from tests.rig.mesh_fixture import even_plan, grouped

ROOM = Path(__file__).resolve().parents[3] / "peers" / "cli"
NAMES = {"id-a": "p0", "id-b": "p1", "id-c": "p2"}
BAD = object()
PLAN = grouped(even_plan(3, 2, 6, 6), ((4, 2), (6,)))


def test_an_option_is_declared_once_and_in_one_file() -> None:
    """Two commands that mean the same share its declaration: else their words drift apart."""
    helps: Counter[str] = Counter()
    files = set()
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Option", "typer.Argument"):
                files.add(path.name)
                helps.update(ast.unparse(word.value) for word in node.keywords if word.arg == "help")
    assert files == {"main.py"}
    assert [text for text, count in helps.items() if count > 1] == []


@pytest.mark.parametrize("said", ["nan", "inf", "1e309"])
def test_no_number_is_endless_or_none(said: str) -> None:
    """`plan --effort inf` was a bug's traceback, and `train --regroup inf` ended a run in the words of another peer."""
    found = set()
    for words, command in subcommands(app):
        needed = ["x" for p in command.params if p.required]
        for parameter in command.params:
            option = max(parameter.opts, key=len)
            if code_of(command, f"{option}=0.5", *needed, name=parameter.name) == 0.5:
                found.add(option)
                assert code_of(command, f"{option}={said}", *needed, name=parameter.name) is BAD, (words, option)
    assert found == {"--audit", "--effort", "--jitter-ms", "--leave-within", "--pace-gflops", "--regroup"}


def code_of(command: Any, *arguments: str, name: str) -> Any:
    """What this parameter becomes, or BAD."""
    try:
        return command.make_context("it", list(arguments)).params[name]
    except Exception:  # click's own, by whatever name this version of typer has it
        return BAD


LONG = "x" * 300


@pytest.mark.parametrize(
    "typed",
    [
        ["invite", "--uses", "99999999999999999999"],
        ["peer", "--identity", "/"],
        ["peer", "--identity", LONG],
        ["peer", "--identity", "/proc/x"],
        ["peer", "--dataset", f"x={LONG}.py:make"],
        ["plan", "--testbed", "cee-small", "--html", "/"],
        ["check", f"{LONG}.py"],
        ["init", "text", f"{LONG}.py"],
        ["init", "text", "/proc/job.py"],
        ["run", "list"],
    ],
)
def test_what_is_no_name_of_a_file_is_no_bug_of_ours(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", LONG if typed == ["run", "list"] else str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "bug" not in said
    assert "Traceback" not in said


def test_a_duration_that_is_none_names_its_own_option() -> None:
    for typed in (["invite", "--for"], ["token", "--valid"]):
        with pytest.raises(UsageError, match=f"{typed[1]} '٨d' is no duration"):
            CliRunner().invoke(app, [*typed, "٨d"], catch_exceptions=False)
    with pytest.raises(UsageError, match="--memory"):
        parse_bytes("٨GiB")


def test_the_demo_takes_as_many_peers_as_its_model_has_blocks() -> None:
    """More were refused when all of them ran, with an option that it has not."""
    command: Any = dict(subcommands(app))["demo",]
    most = len(capture(job).costs)
    with command.make_context("demo", ["--peers", str(most)]) as context:
        assert context.params["peers"] == most
    assert CliRunner().invoke(app, ["demo", "--peers", str(most + 1)]).exit_code == 2


@pytest.mark.parametrize(
    ("said", "why"), [({"groups": False}, "--no-groups and --plan contradict"), ({"threads": 3}, "say --threads 2")]
)
def test_a_flag_that_a_given_plan_contradicts_is_refused(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    """The plan was followed without a word."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(replace(PLAN, threads=2).to_json()))
    flags = dict.fromkeys(("join", "out", "stages", "threads")) | said
    with pytest.raises(UsageError, match=why):
        run_train(
            TrainOptions(Path("job.py"), local=2, dry_run=True, compute=False, device="cpu", plan=path, **flags),  # type: ignore[arg-type]
            as_json=False,
        )


def test_the_old_name_of_a_command_says_the_new_one() -> None:
    for arguments in (["runs"], ["runs", "--json"]):
        with pytest.raises(UsageError, match="`meshcee run list`"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("emulated", [["--pace-gflops", "1"], ["--shape", "a.toml:x", "--shape-device", "y"]])
def test_an_emulated_device_has_no_process_of_its_own(emulated: list[str]) -> None:
    with pytest.raises(UsageError, match="leave out --device-process"):
        CliRunner().invoke(app, ["peer", "--device-process", *emulated], catch_exceptions=False)


@pytest.mark.parametrize("said", ["nan", "inf", "-1", "86401"])
def test_the_time_to_leave_is_what_others_wait_for(said: str) -> None:
    """A peer took any, and `meshcee drain` called its answer a violation of the protocol."""
    told = CliRunner().invoke(app, ["peer", "install", "--print", f"--leave-within={said}"])
    assert told.exit_code == 2
    assert "0 to 86400 s" in told.output


@pytest.mark.skipif(sys.platform != "linux", reason="a process for the device needs Linux")
@pytest.mark.parametrize("emulated", [False, True])
def test_a_device_has_a_process_of_its_own_where_it_can(emulated: bool) -> None:
    assert has_own_process(None, emulated=emulated) != emulated
    assert not has_own_process(False, emulated=emulated)


@pytest.mark.parametrize("under", [False, True])
def test_a_plan_is_read_as_the_commands_print_it(tmp_path: Path, under: bool) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"plan": PLAN.to_json(), "names": NAMES} if under else PLAN.to_json()))
    assert read_plan(path) == PLAN


def test_a_plan_is_read_from_the_lines_of_a_command(tmp_path: Path) -> None:
    """`meshcee train --dry-run --json` prints one object a line, notes among them."""
    path = tmp_path / "plan.json"
    lines = {"note": "captured"}, {"plan": PLAN.to_json(), "names": NAMES}, {"note": "each stage fits"}
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_plan(path) == PLAN
    path.write_text(json.dumps(lines[1], indent=1))
    assert read_plan(path) == PLAN


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"micro_batch": 1, "pipelines": []}', '{"pipelines": 3}'])
def test_what_is_no_plan_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises((UsageError, PlanError)):
        read_plan(path)
