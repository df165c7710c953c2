"""What must hold of the words in the code: sentences that a reader can keep in mind, and one word for one thing.

The idea: the tables of docs/architecture.md and the docstrings are read as a person reads them, and what a person would
stumble over is named with its file and line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("meshcee", "dht", "peers")
MOST_WORDS = 30
ROW = re.compile(r"[-*] |\d+[.)] |\S+( \S+)? {2,}\S")  # of a list, or of a table of names

# TEMPORARY: long runs measure these rooms as they are, so nothing in them is touched. A file leaves when it is mended.
FROZEN = (
    "meshcee/capture/",
    "meshcee/equality/",
    "meshcee/stage/",
    "meshcee/codec/",
    "meshcee/sampling",
    "meshcee/eager.py",
    "meshcee/user_code.py",
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def sentences(text: str) -> Iterator[str]:
    """Of a docstring: rows of tables and lists, and blocks that are indented, are sentences of their own."""
    found: list[str] = []
    for line in text.splitlines():
        if not line.strip() or ROW.match(line.strip()) or line.startswith("    "):
            found.append("")
        if line.strip():
            found = [*found[:-1], f"{found[-1]} {line.strip()}".strip()] if found else [line.strip()]
    for block in found:
        yield from re.split(r"(?<=[.!?])[\"')`]*\s+", block)


def long_ones(text: str) -> list[str]:
    return [one for one in sentences(text) if sum(bool(re.search(r"\w", word)) for word in one.split()) > MOST_WORDS]


def test_no_docstring_has_a_long_sentence() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    long = [
        f"{name}:{getattr(node, 'lineno', 1)}: {sentence}"
        for name, tree in sources()
        if not name.startswith(FROZEN)
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for sentence in long_ones(ast.get_docstring(node) or "")
    ]
    assert long == []


def test_a_long_sentence_is_found() -> None:
    row = "of it " * 12
    assert long_ones(f"Short.\n\nname   {row}\nother  {row}\n\n- {row}\n- {row}\n") == []
    for text in (f"{row}\n{row} {row}", f"Short. {row};\n{row} {row}. Short.", f"name   {row}\n  {row} {row}"):
        assert len(long_ones(text)) == 1
