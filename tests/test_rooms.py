"""The house keeps its measure: each room has at most a dozen modules, one door, and a budget of lines and names.

The idea: a room that grows must be looked at, so its budget in tests/rooms.toml is raised by hand and with a reason, or the room
gives something up. `python -m tests.test_rooms` prints what stands today.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("meshcee", "dht", "peers")
MOST_MODULES = 12
MOST_ROOMS_OF_PEERS = 11
DOOR_LINES = 6  # of a room's docstring
BUDGETS: dict[str, dict[str, int]] = tomllib.loads((ROOT / "tests" / "rooms.toml").read_text())


def rooms() -> dict[str, Path]:
    """Every folder of the product that has Python files, by its dotted name."""
    folders = {path.parent for top in PRODUCT for path in (ROOT / top).rglob("*.py")}
    return {".".join(folder.relative_to(ROOT).parts): folder for folder in sorted(folders)}


def standing(folder: Path) -> dict[str, int]:
    """What a room takes today: modules, lines of code and words, names that its door gives out."""
    files = [path for path in folder.glob("*.py") if not path.is_symlink()]
    door = ast.parse((folder / "__init__.py").read_text())
    names = [
        len(ast.literal_eval(node.value))
        for node in door.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    return {
        "modules": sum(path.name != "__init__.py" for path in files),
        "lines": sum(len(path.read_text().splitlines()) for path in files),
        "names": sum(names),
    }


def test_each_room_has_a_budget_and_no_other_has() -> None:
    assert set(BUDGETS) == set(rooms())


@pytest.mark.parametrize("room", rooms())
def test_a_room_keeps_to_its_budget(room: str) -> None:
    found = standing(rooms()[room])
    assert found["modules"] <= MOST_MODULES
    over = {
        what: f"{count}, budget {BUDGETS[room][what]}" for what, count in found.items() if count > BUDGETS[room][what]
    }
    assert over == {}, "raise the budget in tests/rooms.toml with a reason, or give something up"


@pytest.mark.parametrize("room", rooms())
def test_a_budget_is_not_far_above_what_stands(room: str) -> None:
    """Else it would limit nothing."""
    assert BUDGETS[room]["lines"] <= 1.15 * standing(rooms()[room])["lines"] + 40


@pytest.mark.parametrize("room", [room for room in rooms() if room not in ("peers", "meshcee.figures.testbeds")])
def test_a_door_says_what_the_room_is_for(room: str) -> None:
    text = ast.get_docstring(ast.parse((rooms()[room] / "__init__.py").read_text()))
    assert text
    assert room in ("meshcee", "meshcee.capture", "meshcee.codec") or len(text.splitlines()) <= DOOR_LINES


@pytest.mark.parametrize("room", [room for room in rooms() if room != "meshcee.capture"])
def test_a_door_gives_out_no_name_of_a_file(room: str) -> None:
    """Else `room.name` is the file or the function, by what was imported last. meshcee.capture is a package that can be called."""
    door = ast.parse((rooms()[room] / "__init__.py").read_text())
    inside = [
        node for node in door.body if isinstance(node, ast.ImportFrom) and node.module != room
    ]  # a file as itself is one
    names = {alias.asname or alias.name for node in inside for alias in node.names}
    assert {name for name in names if (rooms()[room] / f"{name}.py").exists()} == set()


def test_peers_has_eleven_rooms_at_most() -> None:
    assert len([room for room in rooms() if room.count(".") == 1 and room.startswith("peers.")]) <= MOST_ROOMS_OF_PEERS


if __name__ == "__main__":
    for name, folder in rooms().items():
        taken = standing(folder)
        print(f'["{name}"]\nmodules = {taken["modules"]}\nlines = {taken["lines"]}\nnames = {taken["names"]}\n')
