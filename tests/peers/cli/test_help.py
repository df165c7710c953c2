"""Every command shows an example that parses, and the shell completes words without waiting for torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.cli.main import app
from peers.cli.settings.file import subcommands

COMMANDS = dict(subcommands(app))
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_commands_help_has_an_example_that_parses(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the parser of the command itself: a flag that is gone, or a value that is none, fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "invite.txt").write_text("meshcee2.abc\n")
    command: Any = COMMANDS[words]
    kind, _, example = (command.epilog or "").partition(": ")
    typed = tuple(shlex.split(example))
    assert (kind, *typed[: 1 + len(words)]) == ("Example", "meshcee", *words)
    takes = bool(command.params)
    assert (len(typed) > 1 + len(words)) is takes, "it shows an argument or an option"
    with command.make_context(words[-1], list(typed[1 + len(words) :])) as context:
        assert bool(context.params) is takes


COMPLETE = """
import sys
from peers.cli.main import main
sys.argv[0] = "meshcee"
try:
    main()
finally:
    assert not {"torch", "hivemind", "numpy"} & sys.modules.keys(), "a shell would wait for them"
"""


def completed(home: Path, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    environment = {
        **os.environ,
        "_MESHCEE_COMPLETE": "complete_bash",
        "MESHCEE_HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }
    environment |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "20260101-000000-gpt").mkdir(parents=True)
    assert completed(tmp_path, "meshcee", "ca") == ["capture"]
    assert completed(tmp_path, "meshcee", "train", "--resu") == ["--resume"]
    assert completed(tmp_path, "meshcee", "run", "logs", "2026") == ["20260101-000000-gpt"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_terminal_shows_a_commands_help_as_it_was_written(words: tuple[str, ...]) -> None:
    """Rich takes a word in square brackets for markup, and leaves it out."""
    command: Any = COMMANDS[words]
    texts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
    assert not [text for text in texts if re.search(r"\[[a-z]", text)]


@pytest.mark.slow
def test_a_command_that_looks_at_a_mesh_loads_no_solver_and_no_algebra() -> None:
    """Half a second of each command, and 70 MiB. What hivemind wants of scipy is there when somebody calls it."""
    code = """
import sys
import dht.kademlia, peers.cli.peer, peers.cli.status, peers.transport.p2p
print(sorted({"sympy", "scipy.optimize"} & set(sys.modules)))
from hivemind.averaging import load_balancing
print(load_balancing.optimize_parts_lp.__name__, load_balancing.scipy.optimize.linprog.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "optimize_parts_lp linprog"]
