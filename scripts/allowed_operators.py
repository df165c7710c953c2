"""Counts which operators the models of a corpus use, in meshcee/capture/graph/allowed.toml, and names what they lack.

The idea: the corpus is what benchmarks/held_out.py found equal. A count of 0 stands at a sibling that people added. What the list
lacks is printed and not added: a person reads what the kernel does first, and runs benchmarks/fuzz_operators.py.

    python scripts/allowed_operators.py KEPT [--jobs N]    # KEPT: a file of one JSON for each model, so a run goes on
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from meshcee.capture import capture
from meshcee.errors import MeshceeError

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "meshcee" / "capture" / "graph" / "allowed.toml"
CORPUS = ROOT / "docs" / "held_out.json"
_ENTRY = re.compile(r'^"(aten\.[^"]+)" = \d+$', re.MULTILINE)


def begin() -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what models print
    sys.path.insert(0, str(ROOT))
    from benchmarks.held.libraries import load

    load()


def used(name: str) -> dict[str, Any]:
    """The operators that the graph of this model holds, or why there is none."""
    from benchmarks.held.draw import make
    from benchmarks.held_out import job_of, plain

    torch.manual_seed(7)
    made = make(name)
    try:  # some libraries keep what their first forward pass finds
        plain(made)
    except ValueError:  # batch norm wants more than one value per channel
        made.sizes = (3, 2)
        plain(made)
    try:
        captured = capture(job_of(made))
    except MeshceeError as error:
        return {"name": name, "refused": str(error)}
    return {"name": name, "operators": sorted({node.operator.name for node in captured.train.nodes})}


def counted(text: str, counts: collections.Counter[str]) -> str:
    """The list with these counts."""
    return _ENTRY.sub(lambda entry: f'"{entry[1]}" = {counts[entry[1]]}', text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    corpus = [entry["name"] for entry in json.loads(CORPUS.read_text())["models"] if entry["outcome"] == "equal"]
    kept = options.kept.read_text().splitlines() if options.kept.exists() else []
    known = {entry["name"]: entry for entry in map(json.loads, kept)}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, context, begin, max_tasks_per_child=20
    ) as pool, options.kept.open("a") as file:  # fmt: skip
        for found in pool.map(used, [name for name in corpus if name not in known]):
            known[found["name"]] = found
            print(json.dumps(found), file=file, flush=True)
    refused = {name: known[name]["refused"] for name in corpus if "refused" in known[name]}
    counts = collections.Counter(operator for name in corpus for operator in known[name].get("operators", ()))
    LIST.write_text(counted(LIST.read_text(), counts))
    print(f"{len(corpus)} models, {sum(name.startswith('aten.') for name in counts)} operators")
    for name, why in refused.items():
        print(f"refused: {name}: {why}")
    if refused:
        sys.exit(1)


if __name__ == "__main__":
    main()
