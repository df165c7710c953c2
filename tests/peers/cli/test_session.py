"""A job file is run by itself: what it reads of its surroundings, and what is said where that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

import meshcee
from meshcee.errors import UsageError
from meshcee.files import disk
from meshcee.files.home import Home
from meshcee.user_code import JOB_FILE
from peers.cli.main import app, main
from peers.cli.session import configure_logging, load_job, not_loaded, run_async, short_ids, waiting
from peers.cli.settings.file import subcommands
from peers.cli.train import TrainOptions, again_with, run_train
from peers.cli.ui.wishes import mark_stop
from peers.cli.view import JsonView
from peers.node import JoinOptions, Mesh
from peers.owner import Report

JOB = """import torch, meshcee
job = meshcee.Job(
    model=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, data=[(torch.ones(2), torch.ones(1))] * 4,
    optimizer=meshcee.Optimizer("SGD", lr=LR), batch_size=2, steps=1,
)
"""
PARSER = 'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--lr", type=float, {})\n'


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder, and a command with arguments of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["meshcee", "train", "job.py", "--local", "2"])
    monkeypatch.setitem(sys.modules, JOB_FILE, meshcee)  # whatever a test loads is put back


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_job(path)
    assert sys.argv[1:] == ["train", "job.py", "--local", "2"]
    return str(caught.value)


def test_an_error_has_its_line_however_the_file_is_named(tmp_path: Path) -> None:
    Path("job.py").write_text("import torch\n\nx = undefined_name\n")
    for path in (Path("job.py"), tmp_path / "job.py", Path("..", tmp_path.name, "job.py")):
        assert refusal(path) == f"{path}, line 3: NameError: name 'undefined_name' is not defined"


def test_a_file_that_parses_arguments_is_given_none(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(PARSER.format("default=0.5") + "LR = parser.parse_args().lr\n" + JOB)
    assert load_job(file).optimizer.options["lr"] == 0.5
    assert sys.argv[1:] == ["train", "job.py", "--local", "2"]


@pytest.mark.parametrize(
    ("line", "status"),
    [("parser.parse_args()", 2), ("raise SystemExit", 0), ("raise SystemExit('no data')", "no data")],
)
def test_a_file_that_ends_by_itself_is_one_sentence(tmp_path: Path, line: str, status: object) -> None:
    file = tmp_path / "job.py"
    file.write_text(PARSER.format("required=True") + line + "\n" + JOB)
    said = refusal(file)
    assert said.startswith(
        f"{file}, line 4: the file ended by itself (status {status}); a job file is given no arguments"
    )


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        ("mine/job.py", "from .models.net import LR"),
        ("mine/jobs/job.py", "from ..models.net import (\n    LR,\n)"),
        ("mine/job.py", "from models.net import LR"),  # which has a relative import of its own
    ],
)
@pytest.mark.parametrize("marked", [True, False])
def test_a_relative_import_is_told_what_to_write_and_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, statement: str, marked: bool
) -> None:
    for name in ("models", "models.net", "mine", "mine.models", "mine.models.net", "mine.sizes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    file = tmp_path / place
    for folder in (tmp_path / "mine" / "models", file.parent):
        folder.mkdir(exist_ok=True, parents=True)
        for package in (folder, tmp_path / "mine"):
            if marked:
                (package / "__init__.py").touch()
    Path("mine/sizes.py").write_text("LR = 0.25\n")
    Path("mine/models/net.py").write_text("from ..sizes import LR\n")
    file.write_text(f"{statement}\n{JOB}")
    said = refusal(file)
    assert said.startswith(f"{file}, line 1: ImportError: attempted relative import ")
    assert "; a job file is run by itself: write `from mine.models.net import ...`" in said
    assert said.endswith(f" and keep the file beside the package, in {tmp_path}")
    beside = tmp_path / "job.py"
    beside.write_text(f"from mine.models.net import LR\n{JOB}")
    assert load_job(beside).optimizer.options["lr"] == 0.25


@pytest.mark.parametrize(
    "statement", ["from lonely.net import LR", "import lonely", "import lonely.net", "import lonely_sizes"]
)
@pytest.mark.parametrize("place", ["lonely/job.py", "other/job.py", "lonely/jobs/deep/job.py"])
def test_a_module_above_the_file_is_told_where_to_import_it_from_and_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, statement: str
) -> None:
    for name in ("lonely", "lonely.net", "lonely_sizes"):  # of the case before
        sys.modules.pop(name, None)
    file, top = tmp_path / "my work" / place, tmp_path / "my work"
    for folder in (file.parent, top / "lonely"):
        folder.mkdir(exist_ok=True, parents=True)
    (top / "lonely" / "net.py").write_text("LR = 0.25\n")
    (top / "lonely_sizes.py").write_text("LR = 0.25\n")
    file.write_text(f"{statement}\n{JOB.replace('LR', '0.25')}")
    said = refusal(file)
    assert said.startswith(
        f"{file}, line 1: ModuleNotFoundError: No module named '{statement.split()[1].split('.')[0]}'; it lies in"
    )
    assert said.endswith(f"keep the file there, or say PYTHONPATH='{top}' before the command")
    monkeypatch.syspath_prepend(top)
    assert load_job(file).optimizer.options["lr"] == 0.25


@pytest.mark.parametrize("statement", ["import nowhere_to_be_found", "import kept.nothing"])
def test_a_module_that_is_nowhere_above_the_file_gets_no_advice(tmp_path: Path, statement: str) -> None:
    file = tmp_path / "work" / "job.py"
    (file.parent / "kept").mkdir(parents=True)
    file.write_text(statement)
    assert refusal(file).endswith(f"No module named '{statement.split()[1]}'")


def test_a_folder_that_can_be_no_package_is_not_named(tmp_path: Path) -> None:
    file = tmp_path / "my-job" / "job.py"
    file.parent.mkdir()
    file.write_text("from . import net\n")
    assert "write `from <package> import ...`" in refusal(file)


ID = "12D3KooWKBYcMUH4m6WWaGMtWRFZcjrPEP3aXxqLccVETm2SDGwH"


def test_people_read_the_ends_of_ids_and_programs_whole_ones(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        for as_json in (False, True):
            configure_logging(as_json=as_json, level="info")
            structlog.get_logger().info("lost", by=ID, others=(ID, 3), links={ID: [ID]})
            try:
                raise ValueError(ID)
            except ValueError:
                structlog.get_logger().exception("failed")
    finally:
        structlog.configure(**before)
    lines = capsys.readouterr().err.splitlines()
    programs = [line for line in lines if line.startswith("{")]
    assert ID not in lines[0]
    assert lines[0].count("…Tm2SDGwH") == 4
    assert any(line.startswith("ValueError") for line in lines), "an error is shown as it was raised"
    assert [line.count(ID) >= 1 for line in programs] == [True, True]
    assert programs[0].count(ID) == 4


def test_an_address_to_join_at_keeps_its_id() -> None:
    assert short_ids(f"/ip4/192.0.2.1/tcp/4001/p2p/{ID} is {ID}.") == f"/ip4/192.0.2.1/tcp/4001/p2p/{ID} is …Tm2SDGwH."
    assert short_ids(f"{ID}x {ID[:-1]} 12D3KooW") == f"{ID}x {ID[:-1]} 12D3KooW"


@pytest.mark.parametrize(
    ("as_json", "terminal", "moves"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_a_terminal_shows_that_a_command_is_at_work(
    as_json: bool, terminal: bool, moves: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    with waiting("joining the mesh", as_json=as_json):
        pass
    said = capsys.readouterr()
    assert said.out == ""
    assert ("joining the mesh" in said.err) is moves


def test_the_command_that_goes_on_says_what_was_said_of_the_numbers() -> None:
    """It went on with other bits: with rounded numbers, with groups, or without an audit."""
    base = {**dict.fromkeys(("join", "stages", "threads", "out", "local")), "dry_run": False, "device": "auto"}
    few = TrainOptions(job=Path("job.py"), **{**base, "local": 2, "compute": False})  # type: ignore[arg-type]
    assert again_with(few) == "job.py --local 2"
    said: dict[str, Any] = {
        "join": "meshcee2.secret", "compute": True, "device": "cpu", "codec": "lossless", "mix": "devices", "groups": False,
        "audit": 0.1, "out": Path("w.safetensors"), "log": ("csv:a b.csv", "wandb"), "checkpoint_every": 0, "workers": 2,
        "steps": 40,
    }  # fmt: skip
    words = again_with(TrainOptions(job=Path("my job.py"), **{**base, **said}))
    assert "secret" not in words
    typed = ["train", *shlex.split(words), "--resume", "last"]
    command: Any = dict(subcommands(app))["train",]
    with command.make_context("train", typed[1:]) as context:
        read = context.params
    assert read["job"] == Path("my job.py")
    assert {name: read[name] for name in said} == {**said, "join": "TOKEN", "log": list(said["log"])}


def test_a_trace_that_cannot_be_written_costs_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ended there, before what it had trained for was on the disk."""
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("peers.cli.train.configure_logging", lambda **options: None)
    Path("job.py").write_text("import pathlib\npathlib.Path('trace').mkdir()\nLR = 0.1\n" + JOB)
    given = {**dict.fromkeys(("join", "stages", "threads")), "dry_run": False, "compute": True, "device": "cpu"}
    options = TrainOptions(job=Path("job.py"), local=2, out=Path("w.safetensors"), trace=Path("trace"), **given)  # type: ignore[arg-type]
    run_train(options, as_json=True)
    assert Path("w.safetensors").exists()
    assert (
        "there is no trace: cannot write trace: Is a directory; name a file in a folder where this user may write"
        in capsys.readouterr().out
    )


LONG = "x" * 300


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"out": Path("none/w.safetensors")}, "--out: there is no folder none"),
        ({"out": Path("folder.safetensors")}, "--out: cannot write folder.safetensors: Is a directory"),
        ({"out": Path(f"{LONG}.safetensors")}, "--out: .* too long; give it a shorter name"),
        ({"out": Path("/proc/w.safetensors")}, "--out: .* name a file in a folder where this user may write"),
        ({"trace": Path("/")}, "--trace: cannot write /"),
        ({"trace": Path(LONG)}, "--trace: .* too long"),
        ({"log": ("csv:/proc/x.csv",)}, "csv:FILE: cannot write /proc/x.csv"),
        ({"log": (f"csv:{LONG}",)}, "csv:FILE: .* too long"),
        ({"log": ("csv:folder.safetensors",)}, "csv:FILE: .* Is a directory"),
        ({"home": "/proc/home"}, "set MESHCEE_HOME to another folder"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_told_of_before_the_job_is_read(
    said: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of training ended with it."""
    monkeypatch.setenv("MESHCEE_HOME", said.pop("home", str(tmp_path / "home")))
    monkeypatch.setattr("peers.cli.train.configure_logging", lambda **options: None)
    Path("folder.safetensors").mkdir()
    given = {**dict.fromkeys(("join", "stages", "threads", "out")), "dry_run": False, "compute": True, "device": "cpu"}
    with pytest.raises(UsageError, match=why):
        run_train(TrainOptions(job=Path("none.py"), local=2, **{**given, **said}), as_json=True)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


def test_a_trial_of_a_place_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("before")
    for name in ("w", "v"):
        disk.check_place(tmp_path / name, "--out")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"w": "before"}


class Interrupting(JsonView):
    """Somebody who presses Ctrl-C at the first step, and again for every further press once the run says that it ends."""

    def __init__(self, presses: int, notes: list[str]) -> None:
        self.presses = presses
        self.asks_first: list[bool] = []
        self.notes = notes

    def press(self) -> None:
        if self.presses:
            self.presses -= 1
            os.kill(os.getpid(), signal.SIGINT)

    def report(self, report: Report) -> None:
        if not self.notes[-1].startswith("the run ends"):
            self.press()

    def note(self, text: str) -> None:
        self.notes.append(text)
        if text.startswith("the run ends"):
            self.asks_first.append(mark_stop(Home().run("last"), os.getpid()))
            self.press()


class Late(Interrupting):
    """Somebody who presses Ctrl-C behind the last step."""

    def report(self, report: Report) -> None:
        if report.step + 1 == report.steps:
            self.press()

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_ctrl_c_while_the_model_is_captured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(job: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("peers.cli.train.capture", pressed)
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, monkeypatch, 0, notes=notes)
    assert notes == ["interrupted while the model was captured: no run has begun"]


def interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    presses: int,
    notes: list[str] | None = None,
    *,
    who: type[Interrupting] = Interrupting,
    steps: int = 2000,
    **said: Any,
) -> Interrupting:
    view = who(presses, notes if notes is not None else [])
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("peers.cli.train.configure_logging", lambda **options: None)
    monkeypatch.setattr("peers.cli.train.view_for", lambda **options: view)
    monkeypatch.setattr("peers.cli.train.JoinOptions", partial(JoinOptions, measures=False))  # two seconds less
    monkeypatch.setattr("peers.cli.session.end_anyway", lambda: None)  # it would end the tests
    job = JOB.replace("steps=1,", f'steps={steps}, name="org/x", adapt=False, verify=False,')
    Path("job.py").write_text("LR = 0.1\n" + job)
    given = {**dict.fromkeys(("join", "out", "threads")), "dry_run": False, "compute": True, "device": "cpu", **said}
    run_train(TrainOptions(job=Path("job.py"), local=1, stages=1, **given), as_json=False)  # type: ignore[arg-type]
    return view


def test_ctrl_c_at_the_owner_is_the_one_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`meshcee run stop` behind it was the second, which threw away what the run was saving."""
    notes: list[str] = []
    view = interrupted(tmp_path, monkeypatch, 1, notes=notes)
    assert view.asks_first == [False]
    assert any("ends after this step, once its weights" in note for note in notes), "it has nothing to evaluate"
    assert "Stopped: " in (said := capsys.readouterr().out)
    assert "; weights in org-x-stopped.safetensors\n" in said, "the job's name is no path"
    assert Path("org-x-stopped.safetensors").exists()
    run = Home().run("last").id
    assert f"run {run} goes on with `meshcee train job.py --local 1 --device cpu --compute --resume {run}`" in said


@pytest.mark.parametrize("collects", [True, False], ids=["its weights are still collected", "they are here"])
def test_ctrl_c_behind_the_last_step_leaves_a_run_that_is_done(
    collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not collects:
        monkeypatch.setattr(Mesh, "stop", lambda mesh: False)
    view = interrupted(tmp_path, monkeypatch, 1, who=Late, steps=3, out=Path("w.safetensors"))
    assert view.presses == 0
    assert "Done: 3 steps" in capsys.readouterr().out
    assert Home().run("last").state == "done"
    assert Path("w.safetensors").exists()


def test_the_second_ctrl_c_says_how_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it looked at was cleared before."""
    notes: list[str] = []
    with pytest.raises(SystemExit) as ended:
        interrupted(tmp_path, monkeypatch, 2, notes=notes)
    assert ended.value.code == 130
    assert notes[-1].startswith(
        "ended at once; it goes on from its newest checkpoint, if there is one: `meshcee train job.py --local 1 "
    )
    assert notes[-1].endswith(f"--resume {Home().run('last').id}`")


@pytest.mark.parametrize("out", [None, Path("w.safetensors")])
def test_weights_that_a_folder_refuses_hide_no_run(
    out: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command failed before it said how the run had ended, and which it was."""

    class Hindering(Interrupting):
        def report(self, report: Report) -> None:
            for name in ("org-x-stopped.safetensors", "w.safetensors"):
                Path(name).mkdir(exist_ok=True)
            super().report(report)

    with (
        pytest.raises(UsageError, match=r"cannot write w\.safetensors") if out is not None else contextlib.nullcontext()
    ):
        interrupted(tmp_path, monkeypatch, 1, who=Hindering, out=out)
    said = capsys.readouterr().out
    assert "Stopped: " in said
    assert f"weights in run {Home().run('last').id} (`meshcee checkpoint export`)" in said


def test_a_terminal_that_is_closed_ends_a_command_in_order_and_signals_are_as_before() -> None:
    asked = asyncio.Event()

    def polite() -> bool:
        asked.set()
        return True

    async def closes() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(asked.wait(), 10)

    began = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have begun them with nohup
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        run_async(closes(), polite)
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        signal.signal(signal.SIGHUP, began)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_nohup_is_heeded_and_a_shell_that_keeps_ctrl_c_from_what_is_behind_it_is_not(number: signal.Signals) -> None:
    asked: list[bool] = []

    async def closes() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.1)

    before = signal.signal(number, signal.SIG_IGN)
    try:
        run_async(closes(), lambda: not asked.append(True))
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert asked == [True] * (number == signal.SIGINT)


def test_what_a_job_file_prints_is_not_among_the_facts_and_its_thread_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loud.py"
    thread = "import threading\nover = threading.Event()\nthreading.Thread(target=lambda: over.wait()).start()\nprint('hello')\n"
    path.write_text(thread + JOB.replace("LR", "0.1"))
    try:
        with pytest.raises(SystemExit, match="0"):
            main(["capture", str(path), "--json"])
        out, err = capsys.readouterr()
        assert [set(json.loads(line)) >= {"blocks"} for line in out.splitlines()] == [True]
        assert "hello" in err
        assert f"a thread of yours at {path}:3" in err
    finally:
        sys.modules[JOB_FILE].over.set()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["local", "-n", "3", "--shape", "cee-small"], "--shape says how many peers there are"),
        (["local", "-n", "1", "--jitter-ms", "5"], "--jitter-ms is for emulated links"),
        (["plan", "job.py", "--testbed", "cee-small"], "--testbed excludes JOB.py"),
        (["plan", "job.py", "--join", "x", "--testbed", "cee-small"], "--testbed excludes --join"),
        (["plan", "job.py"], "no mesh is named"),
        (["simulate", "plan.json", "--testbed", "cee-small", "--stages", "2"], "--stages is for a job"),
        (["simulate", "job.py", "--testbed", "cee-small"], "job.py is a job: say --join"),
        (["peer", "--valid", "0"], "--valid '0' is no duration"),
        (["peer", "--valid", "99999999999d"], "no duration of up to ten years"),
        (["peer", "--device", "tpu"], "device 'tpu' is not usable"),
        (["train", "job.py", "--local", "99999"], "--local"),
        (["check", "job.py", "--threads", "999999999999"], "--threads"),
        (["train", ".", "--local", "1"], ". is a folder"),
    ],
)
def test_a_wrong_option_is_one_sentence_that_names_it(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(JOB.replace("LR", "0.1"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_job_of_another_name_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "named.py"
    path.write_text(JOB.replace("LR", "0.1").replace("job = ", "training = "))
    with pytest.raises(UsageError, match="it has one of the name training"):
        load_job(path)


def test_a_library_that_a_limit_of_memory_keeps_out_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("LR", "0.1"))
    limited = f'ulimit -v 400000; exec "{sys.executable}" -m meshcee train job.py --local 1'
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        ["bash", "-c", limited],
        cwd=tmp_path,
        env={**os.environ, "MESHCEE_HOME": str(tmp_path / "home"), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert "`ulimit -v` shows one" in done.stderr


def test_what_else_could_not_be_loaded_is_no_lack_of_memory() -> None:
    said = "libx.so: failed to map segment from shared object"
    assert not_loaded(ImportError(f"{said}: Operation not permitted")) is None, "a folder from which nothing is run"
    assert not_loaded(ValueError(said)) is None
    wrapped = ImportError("please read this")
    wrapped.__cause__ = ImportError(f"{said}\n")
    assert said in str(not_loaded(wrapped))
