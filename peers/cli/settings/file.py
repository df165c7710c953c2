"""The file of settings: options of commands that a user need not type, in TOML.

The idea: a table is a command, and a key in it the long name of one of its options. A key before any table holds for every command
that has such an option. The file gives defaults, so a flag wins over it, and the environment too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from meshcee.errors import UsageError
from meshcee.files.home import under

__all__ = ["config_file", "defaults_of", "is_there", "subcommands"]


NOWHERE = Path("~/.config/meshcee/config.toml")  # as it is written, where ~ means nothing


def config_file(environment: Mapping[str, str]) -> Path:
    """MESHCEE_CONFIG names another file than `meshcee/config.toml` in XDG_CONFIG_HOME, by default ~/.config."""
    if said := environment.get("MESHCEE_CONFIG"):
        return Path(said).expanduser()
    try:
        return under("XDG_CONFIG_HOME", "~/.config", environment) / "meshcee" / "config.toml"
    except UsageError:  # a user without a home folder
        return NOWHERE


def is_there(path: Path) -> bool:
    """Whether it is a file that this user may see; in the home of another user it is none."""
    try:
        return path != NOWHERE and path.is_file()
    except OSError:
        return False


def subcommands(app: typer.Typer) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that is shown: its words, and what parses it. A group may be a command as well."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while pending:
        words, command = pending.pop(0)
        inner = getattr(command, "commands", {})
        if words and (not inner or command.invoke_without_command):
            yield words, command
        pending[:0] = [((*words, name), one) for name, one in inner.items() if not one.hidden]


def defaults_of(app: typer.Typer, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the file says, as click takes it: a mapping for each command. UsageError where it says what nothing reads."""
    path = config_file(environment)
    if "_MESHCEE_COMPLETE" in environment or not is_there(path):
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no file of settings: {error}; it is TOML, see docs/join-machines.md") from error
    everywhere = {_key(name): value for name, value in data.items() if not isinstance(value, dict)}
    tables = dict(_tables(data))
    found: dict[str, Any] = {}
    used: set[str] = set()
    for words, command in subcommands(app):
        known = {_key(opt): p.name for p in command.params for opt in p.opts if opt.startswith("--")}
        own = {_key(name): value for name, value in tables.pop(words, {}).items()}
        if unknown := sorted(own.keys() - known.keys()):
            what = f"`meshcee {' '.join(words)}` has no option --{unknown[0].replace('_', '-')}"
            raise UsageError(f"{path}: {what}; `meshcee {' '.join(words)} --help` shows those that it has")
        used |= everywhere.keys() & known.keys()
        place = found
        for word in words:
            place = place.setdefault(word, {})
        place |= {known[name]: value for name, value in {**everywhere, **own}.items() if name in known}
    for name in (*sorted(everywhere.keys() - used), *(" ".join(words) for words in tables)):
        raise UsageError(f"{path}: no command has a setting {name!r:.60}; `meshcee config` shows those that there are")
    return found


def _tables(
    data: Mapping[str, Any], words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    for name, value in data.items():
        if isinstance(value, dict):
            inner = {key: one for key, one in value.items() if not isinstance(one, dict)}
            if inner or not value:
                yield (*words, name), inner
            yield from _tables(value, (*words, name))


def _key(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
