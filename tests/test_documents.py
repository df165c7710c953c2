"""What must hold of the documents: commands and links that exist, a reference that the code would write, short sentences.

The idea: a page that nobody checks ages; what a machine can hold against the code is held against it here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
PROSE = [path for path in PAGES if path.parent.name != "reference"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


ROOT_OPTIONS = tuple(f"meshcee --{option}" for option in ("help", "install-completion", "show-completion"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_script", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_gives() -> None:
    stale = [name(path) for path, text in reference().pages().items() if path.read_text() != text]
    assert stale == [], "run `make reference`"
    assert set((DOCS / "reference").glob("*.md")) == set(reference().pages())


def anchors(page: Path) -> set[str]:
    """As the site makes them of headings: small letters, words joined by hyphens."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if "://" not in target and (not there.exists() or (anchor and anchor not in anchors(there))):
            broken.append(target)
        if page.is_relative_to(DOCS) and "://" not in target and not there.resolve().is_relative_to(DOCS):
            broken.append(f"{target} is not in the site")
    assert broken == []


def test_the_site_is_built_strictly() -> None:
    """mkdocs counts no warning that --quiet has kept from it."""
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs" in line)
    assert "--strict" in line
    assert "-q" not in line


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    linked = {
        str((page.parent / target).resolve().relative_to(DOCS))
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"\]\(([\w/.-]+\.md)", page.read_text())
    }
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - listed - linked == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_in_a_page_exists(page: Path) -> None:
    """Each `meshcee ...` in a page: its command, and its options."""
    known = dict(reference().commands())
    text = re.sub(r"\\\n", " ", page.read_text())
    found = [line for kind, block in FENCE.findall(text) if kind == "sh" for line in block.splitlines()]
    found += re.findall(r"`(meshcee [^`]*)`", FENCE.sub("", text))
    for line in (line.partition("#")[0].strip() for line in found):
        if not line.startswith("meshcee ") or "COMMAND" in line or line in ROOT_OPTIONS:
            continue
        line = line.replace("meshcee config ", "meshcee ", 1)  # it is given another command
        words = line.split()
        command = next((known[x] for x in (" ".join(words[:3]), " ".join(words[:2])) if x in known), None)
        assert command is not None, line
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)) - options == set(), line


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_no_sentence_has_more_than_thirty_words(page: Path) -> None:
    text = FENCE.sub(".", re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL))
    text = re.sub(r"^\|.*\|$|^#.*$", ".", text, flags=re.MULTILINE)  # tables and headings
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", ". ", re.sub(r"\n\n+", " . ", text), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    sentences = re.split(r"[.!?](?=[\s)\"*]|$)", text)
    assert [s.strip() for s in sentences if len(re.findall(r"[\w`'$=./-]*\w[\w`'$=./-]*", s)) > 30] == []


def test_an_item_of_the_changelog_is_one_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(" ") or (line.startswith("- ") and len(line) > 132)] == []


def test_the_readme_is_short_and_begins_with_what_a_newcomer_types() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert {"make demo", "make test"} <= {line.partition("#")[0].strip() for line in lines[:45]}


def test_the_tree_in_the_readme_has_every_room_and_no_other() -> None:
    (tree,) = (text for _, text in FENCE.findall((ROOT / "README.md").read_text()) if text.startswith("the spine"))
    found = set()
    for line in tree.splitlines():
        top = ""
        for path in re.match(r" *((?:[\w./]+(?:/|\.py)(?:  |$))*)", line)[1].split():  # type: ignore[index]
            top = path[: path.index("/") + 1] if "/" in path[:-1] else top
            found.add(path if path.startswith(top) else top + path)
    assert [path for path in sorted(found) if not (ROOT / path).exists()] == []
    rooms = {f"{path.parent.relative_to(ROOT)}/" for top in ("meshcee", "peers") for path in ROOT.glob(f"{top}/*/*.py")}
    assert sorted({"dht/", *rooms} - found) == []


def in_the_readme() -> list[str]:
    return [text for kind, text in FENCE.findall((ROOT / "README.md").read_text()) if kind == "python"]


def test_the_job_in_the_readme_trains() -> None:
    from dataclasses import replace

    import meshcee

    block = in_the_readme()[0]
    assert len(block.split("Job(")[1].splitlines()) <= 10
    space: dict[str, meshcee.Job] = {}
    exec(compile(block, "README.md", "exec"), space)
    result = meshcee.train(replace(space["job"], steps=3), local=2)
    assert len(result.losses) == 3


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_fine_tuning_in_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very lines, with fewer steps and peers in this process; `base` and the text are made here."""
    for library in ("transformers", "peft", "accelerate", "tokenizers"):
        pytest.importorskip(library, reason="the hf extra is not installed")
    import peft
    import torch

    from tests.hf.tiny import llama, tokenizer_of_words

    block = in_the_readme()[1]
    assert len(block.splitlines()) <= 15
    assert len(in_the_readme()) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    llama().save_pretrained("base")
    tokenizer_of_words().save_pretrained("base")
    Path("lines.txt").write_text("".join(f"w{i} w{i + 1} w{i + 2}{' w9' * (i % 4)}\n" for i in range(40)))
    for there, here in (("max_steps=100", "max_steps=2"), ('join="<printed line>"', "local=2")):
        assert there in block
        block = block.replace(there, here)
    space: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), space)
    model = space["trainer"].model
    loaded = peft.PeftModel.from_pretrained(llama(), "adapter").state_dict()
    adapter = {name: tensor for name, tensor in model.state_dict().items() if "lora_B" in name}
    assert any(tensor.any() for tensor in adapter.values())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in adapter.items())


def walks() -> dict[str, list[tuple[str, str]]]:
    """Of docs/architecture.md: what walks, and its stops as file and function."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Three walks")[1].split("\n## ")[0]
    parts = re.split(r"^\*\*([^*]+)\*\*", section, flags=re.MULTILINE)[1:]
    stop = re.compile(r"^\d+\. `([\w/.]+)` `([\w.]+)`", flags=re.MULTILINE)
    return {name: stop.findall(text) for name, text in zip(parts[::2], parts[1::2])}


@pytest.mark.parametrize(("name", "most"), [("A micro-batch", 14), ("A change of bandwidth", 10), ("A death", 12)])
def test_a_walk_is_short_and_every_stop_is_there(name: str, most: int) -> None:
    stops = walks()[name]
    assert 5 < len(stops) <= most
    for path, where in stops:
        scope: ast.AST = ast.parse((ROOT / path).read_text())
        for part in where.split("."):
            found = [n for n in ast.iter_child_nodes(scope) if getattr(n, "name", None) == part]
            assert found, f"{path} has no {where}"
            scope = found[0]


def test_every_habit_has_its_test() -> None:
    rows = [line for line in (ROOT / "docs" / "habits.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert {len(row) for row in cells} == {4}
    assert len({row[0] for row in cells}) == len(rows), "a habit stands there once"
    for row in cells:
        file, _, test = row[-1].partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}, row


def test_the_architecture_is_one_sitting() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) <= 3000
