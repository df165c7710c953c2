"""`meshcee config`: every setting, its value, and where that comes from.

The idea: click itself is asked where it would take a value from, so what is shown is what a command would do.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from meshcee.config import Limits, Timeouts
from meshcee.errors import UsageError
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from peers.cli.session import Screen
from peers.cli.settings.file import config_file, defaults_of, is_there, subcommands

__all__ = ["Setting", "run_config", "settings_of"]

SHOWN = 12  # characters of an invite, which is not for the eyes of others
FROM = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file", "DEFAULT": "default"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the list."""

    name: str
    value: Any
    source: str  # flag, environment, file or default
    variable: str | None = None
    commands: tuple[str, ...] = ()


def settings_of(command: Any, words: Sequence[str], arguments: Sequence[str], file: Mapping[str, Any]) -> list[Setting]:
    """What this command would run with, typed with these arguments."""
    defaults: Any = file
    for word in words:
        defaults = defaults.get(word, {})
    context = command.context_class(command, info_name=words[-1], default_map=defaults)
    given, rest, _ = command.make_parser(context).parse_args(list(arguments))
    if rest:
        raise UsageError(f"`meshcee {' '.join(words)}` takes no {rest[0]!r:.60}; `meshcee {' '.join(words)} --help`")
    found = []
    for param in command.params:
        value, source = param.consume_value(context, given)
        if param.name == "help" or (param.name == "as_json" and FROM[source.name] == "default"):
            continue
        if param.name == "join" and value is not None:
            value = f"{str(value)[:SHOWN]}..." if len(str(value)) > SHOWN else value
        name = param.opts[0] if param.param_type_name == "option" else param.name.upper()
        found.append(Setting(name, value, FROM[source.name], param.envvar, (" ".join(words),)))
    return found


def run_config(app: typer.Typer, arguments: Sequence[str], file: Mapping[str, Any], *, as_json: bool) -> None:
    commands = dict(subcommands(app))
    if arguments:
        words = next((w for w in (tuple(arguments[:n]) for n in (2, 1)) if w in commands), None)
        if words is None:
            raise UsageError(f"there is no command {arguments[0]!r:.40}; `meshcee --help` lists them")
        found = settings_of(commands[words], words, arguments[len(words) :], file)
    else:
        found = [*_general(), *_of_all(commands, file), *_fixed()]
    if as_json:
        for one in found:
            write_fact({**dataclasses.asdict(one), "value": _plain(one.value)})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "from", "commands"):
        table.add_column(column, no_wrap=column == "setting", overflow="fold")
    for one in found:
        source = f"{one.source} {one.variable}" if one.source == "environment" and one.variable else one.source
        table.add_row(
            one.name,
            "-" if one.value is None else str(one.value),
            source,
            ", ".join(one.commands) if not arguments else "",
        )
    Screen().print(table)
    if not arguments:
        path = config_file(os.environ)
        Screen().print(
            f'\nThe file {path} {_how(app, path)}. A line in it: [train] and below it codec = "lossless"',
            soft_wrap=True,
        )


def _how(app: typer.Typer, path: Path) -> str:
    """How the file of settings is taken, in words."""
    if not is_there(path):
        return "is not there"
    try:
        defaults_of(app, os.environ)
    except UsageError:
        return "is wrong, and is not read"
    return "is read"


def _general() -> list[Setting]:
    """What no option sets."""
    home, environment = Home(), os.environ
    said = {name: environment.get(name) for name in ("MESHCEE_HOME", "MESHCEE_CONFIG", "MESHCEE_LOG")}
    values = {
        "MESHCEE_HOME": str(home.folder),
        "MESHCEE_CONFIG": str(config_file(environment)),
        "MESHCEE_LOG": environment.get("MESHCEE_LOG", "info"),
    }
    return [
        Setting(name.removeprefix("MESHCEE_").lower(), value, "environment" if said[name] else "default", name)
        for name, value in values.items()
    ]


def _of_all(commands: Mapping[tuple[str, ...], Any], file: Mapping[str, Any]) -> list[Setting]:
    """Options that have a variable or that the file sets; commands that agree share a line."""
    lines: dict[tuple[str, str, str], Setting] = {}
    for words, command in commands.items():
        for one in settings_of(command, words, (), file):
            if one.variable is None and one.source == "default":
                continue
            key = (one.name, repr(one.value), one.source)
            before = lines[key].commands if key in lines else ()
            lines[key] = dataclasses.replace(one, commands=(*before, *one.commands))
    return sorted(lines.values(), key=lambda one: (one.name, one.commands))


def _fixed() -> list[Setting]:
    return [
        Setting(f"{kind.__name__}.{field.name}", field.default, "default")
        for kind in (Timeouts, Limits)
        for field in dataclasses.fields(kind)
    ]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
