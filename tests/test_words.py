"""What must hold of the words in the code: sentences that a reader can keep in mind, and one word for one thing.

The idea: the tables of docs/architecture.md and the docstrings are read as a person reads them, and what a person would
stumble over is named with its file and line.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import meshcee

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("meshcee", "dht", "peers")
MOST_WORDS = 30
ROW = re.compile(r"[-*] |\d+[.)] |\S+( \S+)? {2,}\S")  # of a list, or of a table of names


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


def retired() -> tuple[set[str], set[str]]:
    """Of the table in docs/architecture.md: words that are no name, and words that stand in no name."""
    rows = (ROOT / "docs" / "architecture.md").read_text().split("| retired |")[1].split("\n\n")[0]
    alone, within = set[str](), set[str]()
    for words in re.findall(r"^\| ([a-z, ]+) \|", rows, flags=re.MULTILINE):
        found = set(words.split(", "))
        (within if "anywhere" in found else alone).update(found - {"anywhere"})
    return alone, within


def public_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Of a file: its classes, functions and values, their methods, fields and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for one in node.body:
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                for name in [getattr(one, "name", None), *(getattr(target, "id", None) for target in targets)]:
                    if name is not None:
                        yield one.lineno, name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def retired_in(name: str, alone: set[str], within: set[str]) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    text = " ".join(words)
    return text.removesuffix("s") in {word.removesuffix("s") for word in alone} or any(
        re.search(rf"\b{word}(s|es)?\b", text) for word in within
    )


def test_no_public_name_is_a_retired_word() -> None:
    alone, within = retired()
    assert {"buddy", "walk"} < within
    assert {"told", "part"} < alone
    found = []
    for path, tree in sources():
        names = [(1, Path(path).stem), *public_names(tree)]
        found += [f"{path}:{line}: {n}" for line, n in names if n[0] != "_" and retired_in(n, alone, within)]
    assert found == []


def test_a_retired_word_is_found() -> None:
    alone, within = retired()
    for name in ("Part", "parts", "told", "Walk", "count_walks", "own_links", "OwnLinks", "buddy_of"):
        assert retired_in(name, alone, within), name
    for name in ("parted", "departure", "toldable", "link_report", "is_whole", "sidewalk"):
        assert not retired_in(name, alone, within), name
    tree = ast.parse("class A:\n    told: int\n    def part(self): self.kept = 1\nwhole = 2\ndef f(held): image = held")
    assert {name for _, name in public_names(tree)} == {"A", "told", "part", "kept", "whole", "f"}


def unknown_calls(tree: ast.Module) -> list[str]:
    """Functions that docstrings name as `name(...)`, and that neither the file nor a user of meshcee knows."""
    known = {*dir(builtins), *meshcee.__all__}
    docs = []
    for node in ast.walk(tree):
        known |= {part for key in ("id", "attr", "name", "arg") for part in str(getattr(node, key, "")).split(".")}
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docs.append(ast.get_docstring(node) or "")
    return [called for doc in docs for called in re.findall(r"`(\w+)\(", doc) if called not in known]


def test_a_function_that_a_docstring_names_is_there() -> None:
    unknown = {name: found for name, tree in sources() if (found := unknown_calls(tree))}
    assert unknown == {}
    assert unknown_calls(
        ast.parse('"""`scaled(rtt_s)` derives longer ones, `dial(x)` dials."""\ndef dial(x): ...')
    ) == ["scaled"]
