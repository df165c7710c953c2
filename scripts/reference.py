"""Writes docs/reference/*.md from the code: commands, settings, exit codes, Python API. `make reference` calls it.

The idea: what the code says of itself (options, fields, docstrings) is the only source, and tests/test_documents.py
compares the pages with what this file would write now.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import meshcee
from meshcee import config, errors, hf, sampling
from peers.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
HEAD = "<!-- Written by scripts/reference.py from the code; `make reference` renews it. -->\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command as a user types it, with its click object."""
    pending = [("meshcee", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        if getattr(command, "invoke_without_command", False):  # a group that is a command as well
            yield name, command
        if hasattr(command, "commands"):
            pending[:0] = [(f"{name} {key}", found) for key, found in command.commands.items() if not found.hidden]
        else:
            yield name, command


def _table(head: str, rows: list[list[str]]) -> str:
    """A table whose cells are one line each."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    columns = [cell.strip() for cell in head.split(",")]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *lines]) + "\n"


def _option(p: Any) -> list[str]:
    label = p.name.upper() if p.param_type_name == "argument" else " / ".join([*p.opts, *p.secondary_opts])
    value = f"`{p.default}`" if type(p.default) in (str, int, float) and p.default != "" else ""
    return [f"`{label}`", "required" if p.required else value, getattr(p, "help", None) or ""]


def commands_page() -> list[str]:
    lines = [
        "# Commands\n",
        "`meshcee COMMAND --help` prints the same. [Exit codes](exit-codes.md) say how it ended.\n",
    ]
    for name, command in commands():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = [name, *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments), "[OPTIONS]"]
        lines += [f"## {name}\n", f"```text\n{' '.join(usage)}\n```\n", inspect.cleandoc(command.help or "") + "\n"]
        options = [_option(p) for p in command.params if p.name != "help"]
        lines.append(_table("argument or option, default, meaning", options))
        if command.epilog:
            lines.append(f"```sh\n{command.epilog.removeprefix('Example: ')}\n```\n")
    return lines


def _told(name: str) -> str:
    """The first sentence about this variable in a docstring of a file that reads it."""
    files = sorted(path for package in ("meshcee", "dht", "peers") for path in (ROOT / package).rglob("*.py"))
    texts = [text for path in files if f'"{name}"' in (text := path.read_text())]
    docstrings = [x for text in texts for x in re.findall(r'"""(.*?)"""', text, flags=re.DOTALL)]
    return next(x for x in re.split(r"(?<=\.)\s+", " ".join(docstrings)) if name in x)


def _fields(kind: type) -> list[list[str]]:
    """A row for each field of a dataclass, with the comment beside it."""
    found = re.findall(r"^    (\w+): \w+ = (.*?)(?:  # (.*))?$", inspect.getsource(kind), flags=re.MULTILINE)
    return [[f"`{name}`", f"`{value}`", comment] for name, value, comment in found]


def settings_page() -> list[str]:
    options: dict[str, dict[str, str]] = {}
    for name, command in commands():
        for p in command.params:
            if getattr(p, "envvar", None):
                options.setdefault(p.envvar, {})[f"`{name} {p.opts[0]}`"] = p.help or ""
    rows = [[f"`{n}`", ", ".join(uses), " ".join(dict.fromkeys(uses.values()))] for n, uses in sorted(options.items())]
    rows += [[f"`{name}`", "", _told(name)] for name in ("MESHCEE_CONFIG", "MESHCEE_HOME", "MESHCEE_LOG")]
    lines = ["# Settings\n", "## Environment variables\n"]
    lines.append("An option on the command line wins over its variable, and that over the file of settings.")
    lines.append("`meshcee config` shows all of them, each with where it comes from.\n")
    lines += [_table("variable, option, meaning", rows), "## Time-outs and limits\n", (config.__doc__ or "")]
    for kind in (config.Timeouts, config.Limits):
        lines += [f"### {kind.__name__}\n", f"{kind.__doc__}\n", _table("field, default, meaning", _fields(kind))]
    return lines


def exit_codes_page() -> list[str]:
    rows = [
        ["0", "", "The command did what was asked."],
        ["130", "", "Interrupted."],
        ["141", "", "What it prints is not read any more, as where `head` has ended."],
    ]
    for kind in (getattr(errors, name) for name in errors.__all__):
        rows.append([str(kind.exit_code), f"`{kind.__name__}`", kind.__doc__ or ""])
    lines = [
        "# Exit codes and errors\n",
        "A command ends with the code of its error. Any other error is a bug, code 1.",
    ]
    lines += ["In Python the same classes are raised. Their base is `meshcee.MeshceeError`.\n"]
    return [*lines, _table("code, error, meaning", sorted(rows, key=lambda row: int(row[0])))]


def _named_types() -> Iterator[tuple[str, Any]]:
    """The classes that the front door names in its signatures without importing them."""
    block = inspect.getsource(importlib.import_module("meshcee.run")).partition("if TYPE_CHECKING:\n")[2]
    for module, names in re.findall(r"^    from (\S+) import (.*)$", block.partition("\n\n")[0], flags=re.MULTILINE):
        for name in names.split(", "):
            yield name, getattr(importlib.import_module(module), name)


def _entry(heading: str, name: str, thing: Any) -> list[str]:
    """A heading, the signature without the quotes of annotations, and the docstring as it is in the code."""
    try:
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing))).removesuffix(" -> None")
    except (TypeError, ValueError):  # a class that is called as its base in C is
        signature = ""
    signature = re.sub(r"<[^<>]*(<\w*>[^<>]*)?>", "...", signature)  # a function's name has an address in it
    if len(signature) > 90:
        signature = re.sub(r"^\((?=\w)|, (?=\w+: |\*)", lambda found: f"{found[0].strip()}\n    ", signature)
    text = inspect.getdoc(thing) or ""
    told = [] if text.startswith(f"{name}(") else [f"```text\n{text}\n```\n"]  # a dataclass's may be its signature
    return [f"{heading} {name}\n", f"```python\n{name}{signature}\n```\n", *told]


WITH_METHODS = {"Mesh": "mesh", "meshcee.hf.Trainer": "trainer"}


def api_page() -> list[str]:
    lines = ["# Python API\n", "What `dir(meshcee)` lists, then the classes that these functions take and return.\n"]
    entries = [(f"meshcee.{n}", getattr(x, n, x)) for n in dir(meshcee) if callable(x := getattr(meshcee, n))]
    entries += [(f"meshcee.sampling.{thing.__name__}", thing) for thing in (sampling.draw, sampling.read)]
    entries += [("meshcee.hf.Trainer", hf.Trainer)]
    for name, thing in [*entries, *_named_types()]:
        lines += _entry("##", name, thing)
        for key, value in vars(thing).items() if name in WITH_METHODS else ():
            if inspect.isfunction(value) and not key.startswith("_"):
                lines += _entry("###", f"{WITH_METHODS[name]}.{key}", value)
    return lines


PAGES = {"commands": commands_page, "settings": settings_page, "exit-codes": exit_codes_page, "python": api_page}


def pages() -> dict[Path, str]:
    """Each page and its text."""
    return {ROOT / "docs" / "reference" / f"{name}.md": "\n".join([HEAD, *page()]) for name, page in PAGES.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
