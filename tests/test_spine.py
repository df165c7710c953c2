"""The spine trains when every wing is absent, and hivemind with them; what it trains equals the plain loop.

The idea: a newcomer reads the spine first, so nothing in it may need a wing. Which rooms are wings is written once, in the
contract of pyproject.toml, which looks at imports; here they are really absent. `python -m tests.test_spine` prints how many
lines of which room took part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
WINGS: list[str] = next(c for c in CONTRACTS if c["name"].startswith("the spine trains"))["forbidden_modules"]
MOST_LINES = 33_766

TRAIN = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == wing or name.startswith(wing + ".") for wing in WINGS):
            raise ModuleNotFoundError(f"{name} is a wing", name=name)

WINGS = sys.argv[1:]
sys.meta_path.insert(0, Absent())
import torch
import meshcee
from meshcee.plan import Member, Pipeline, Plan, Stage

torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.randn(64, 8)
linear, tanh = torch.nn.Linear, torch.nn.Tanh
layers = [linear(8, 16), tanh(), torch.nn.Dropout(0.1), linear(16, 16), tanh(), linear(16, 1)]
job = meshcee.Job(
    model=torch.nn.Sequential(*layers), loss=torch.nn.functional.mse_loss, data=[(row, row.sum(0, keepdim=True)) for row in rows],
    optimizer=meshcee.Optimizer("AdamW", lr=0.01), batch_size=16, micro_batch_size=4, steps=5, adapt=False, verify=False,
)
blocks = meshcee.capture(job).train.num_blocks
stages = tuple(
    Stage(first, end, (Member(f"local-{k}", 4),), window=3 - k, live_cap=3 - k)
    for k, (first, end) in enumerate(((0, 1), (1, 2), (2, blocks)))
)
result = meshcee.train(job, local=3, plan=Plan(4, (Pipeline(4, stages),)))
sys.meta_path.pop(0)  # the plain loop is a wing
files = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("meshcee", "dht", "peers") and m.__file__}
plain = meshcee.plain(job)
equal = all(torch.equal(plain.state_dict[name], tensor) for name, tensor in result.state_dict.items())
print(json.dumps({"losses": result.losses, "plain": plain.losses, "equal": equal, "files": files}))
"""


def trained() -> dict[str, object]:
    command = [sys.executable, "-c", TRAIN, *WINGS, "hivemind"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines_by_room(files: dict[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, file in files.items():
        found[".".join(name.split(".")[:2])] += len(Path(file).read_text().splitlines())
    return found


def test_the_spine_trains_without_its_wings_and_equals_the_plain_loop() -> None:
    found = trained()
    assert found["losses"] == found["plain"]
    assert len(found["losses"]) == 5  # type: ignore[arg-type]
    assert found["equal"] is True
    files = found["files"]
    assert isinstance(files, dict)
    assert not [name for name in files if any(name == wing or name.startswith(wing + ".") for wing in WINGS)]
    assert sum(lines_by_room(files).values()) <= MOST_LINES


def test_every_wing_is_there_to_be_left_out() -> None:
    for wing in WINGS:
        place = ROOT / wing.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").exists(), wing


if __name__ == "__main__":
    taken = trained()["files"]
    assert isinstance(taken, dict)
    rooms = lines_by_room(taken)
    print(
        "\n".join(f"{count:6} {room}" for room, count in rooms.most_common()),
        f"{sum(rooms.values()):6} the spine",
        sep="\n",
    )
