"""Prints which versions are installed, runs every example and the tests of libraries, and says of each whether it ran.

The idea: an example is run as its reader runs it, in a process and a folder of its own; one that defines a job takes fewer steps.
What is added to examples/ is tried without a line here. Called by scripts/newest.sh; `newest.py FILE` runs one example briefly.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshcee

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    *("torch", "transformers", "peft", "accelerate", "trl", "datasets", "torchdata"),
    *("tensorboard", "wandb", "mlflow", "trackio"),
)
TESTS = ("tests/hf", "tests/peers/owner/test_real_sets.py", "tests/callbacks/test_real_loggers.py")
STEPS = 10
LIMIT_S = 1800


def briefly(example: str) -> None:
    """Runs the file as the main program, whose `meshcee.train` takes a few steps of its job."""
    train = meshcee.train

    def few_steps(job: meshcee.Job, **options: Any) -> Any:
        return train(replace(job, steps=STEPS), **options)

    meshcee.train = few_steps
    sys.argv = [example]
    runpy.run_path(example, run_name="__main__")


def command_of(example: Path) -> list[str]:
    """How it is run here. The scripts of other libraries' trainers are short as they are."""
    if example.suffix == ".ipynb":
        return [sys.executable, "-m", "jupyter", "execute", "--kernel_name=python3", str(example)]
    return [sys.executable, __file__, str(example)]


def ran(name: str, command: list[str], folder: str) -> bool:
    """Whether it ended well; one line that says so, and what it had written where it did not."""
    began_s = time.monotonic()
    environment = {**os.environ, "MESHCEE_HOME": str(Path(folder) / "home"), "OMP_NUM_THREADS": "1"}
    with (Path(folder) / "output").open("w+") as output:
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        output.seek(0)
        lines = output.read().splitlines()
    print(
        f"{name:28} {'failed' if code else 'ok':8} {time.monotonic() - began_s:4.0f} s  {lines[-1] if lines else ''}",
        flush=True,
    )
    if code:
        print("\n".join(f"    {line}" for line in lines[-40:]), flush=True)
    return not code


def main() -> int:
    for library in LIBRARIES:
        print(f"{library:28} {importlib.metadata.version(library)}")
    print(f"{'python':28} {sys.version.split()[0]}", flush=True)
    examples = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb"))
    commands = {f"examples/{path.name}": command_of(path) for path in examples}
    tests = [str(ROOT / test) for test in TESTS]
    commands["tests"] = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    failed = 0
    for name, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            failed += not ran(name, command, folder)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(briefly(sys.argv[1]) if sys.argv[1:] else main())
