"""Four peers in terminals of one machine, by the README's words, beside `meshcee demo`.

The idea: nothing is told to a peer but where to join. Each turn starts four `meshcee peer`, trains examples/gpt.py on them with
`meshcee train`, ends them, and runs the demo; both report their steps, and the plan says what a step was to take.

    python -m benchmarks.one_host [--turns 3] [--peers 4] [--together] [--out docs/one_host.json]

--together starts the three that join at the same moment; else each waits for the one before, as at a keyboard.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, row

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples" / "gpt.py"
WARM_UP = 2  # steps: the first fills the pipeline and warms kernels up
END_S = 60.0


def environment(folder: Path) -> dict[str, str]:
    """A user's: nothing is set of OpenMP or of meshcee, but where it keeps its files."""
    told = ("MESHCEE_", "OMP_", "GOMP_", "KMP_", "MKL_")
    found = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    return {**found, "MESHCEE_HOME": str(folder / "home")}


def meshcee(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "meshcee", *arguments, "--json"]


@contextlib.contextmanager
def terminals(count: int, folder: Path, *, together: bool, more: Sequence[str] = ()) -> Iterator[str]:
    """So many peers with `more` options; yields the line to join with."""
    started: list[subprocess.Popen[str]] = []
    token = ""

    def start() -> None:
        joining = ["--join", token] if token else []
        with (folder / "peers.log").open("a") as log:
            command = meshcee("peer", *joining, *more)
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
            started.append(subprocess.Popen(command, env=environment(folder), **options))

    def is_up(peer: subprocess.Popen[str]) -> str:
        assert peer.stdout is not None
        line = peer.stdout.readline()
        if '"token"' not in line:
            raise SystemExit(f"a peer did not start:\n{(folder / 'peers.log').read_text()[-2000:]}")
        return str(json.loads(line)["token"])

    try:
        start()
        token = is_up(started[0])
        for _ in range(count - 1):
            start()
            if not together:
                is_up(started[-1])
        for peer in started[1:] if together else ():
            is_up(peer)
        yield token
    finally:
        for peer in started:
            peer.terminate()
        for peer in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.wait(END_S)
            peer.kill()
            peer.wait()


def lines_of(command: list[str], folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        command, env=environment(folder), stdout=subprocess.PIPE, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:5])} ended with {done.returncode}: {done.stdout[-1000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a run: its plan, what a step was to take, and the median of what it took."""
    plan = next(line["plan"] for line in lines if "plan" in line)
    taken_s = [line["report"]["step_s"] for line in lines if "report" in line][WARM_UP:]
    stages = [[stage["blocks"], len(stage["members"])] for stage in plan["pipelines"][0]["stages"]]
    measured_s, expected_s = statistics.median(taken_s), plan["predicted"]["step_s"]
    return {
        "stages": stages,
        "expected_s": expected_s,
        "measured_s": measured_s,
        "measured_over_expected": measured_s / expected_s,
        "losses": [line["report"]["loss"] for line in lines if "report" in line],
        "notes": [line["note"] for line in lines if "note" in line],
    }


def turn(count: int, *, together: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshcee-one-host-") as name:
        folder = Path(name)
        with terminals(count, folder, together=together) as token:
            devices = [p["device"] for p in lines_of(meshcee("status", "--join", token), folder)[0]["peers"]]
            ours = figures(lines_of(meshcee("train", str(JOB), "--join", token), folder))
        demo = figures(lines_of(meshcee("demo", "-n", str(count)), folder))
    same = ours.pop("losses") == demo.pop("losses")
    claims = [round(d["speed_flops_per_s"] / 1e9, 1) for d in devices if d is not None]
    memory = [round(d["memory_bytes"] / 2**30, 2) for d in devices if d is not None]
    ratio = ours["measured_s"] / demo["measured_s"]
    told = {"gflops": claims, "memory_gib": memory}
    return {"ratio": ratio, "same_losses": same, "told": told, "terminals": ours, "demo": demo}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--together", action="store_true", help="start those that join at the same moment")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "peers": options.peers, "together": options.together, "turns": []}
    print(
        row(
            "turn",
            "terminals, s a step",
            "expected",
            "measured / expected",
            "demo, s a step",
            "terminals / demo",
            "told GFLOP/s",
        )
    )
    for number in range(options.turns):
        one = turn(options.peers, together=options.together)
        found["turns"].append(one)
        ours, demo = one["terminals"], one["demo"]
        seconds = (
            ours["measured_s"],
            ours["expected_s"],
            ours["measured_over_expected"],
            demo["measured_s"],
            one["ratio"],
        )
        print(row(number, *(f"{x:.3f}" for x in seconds), one["told"]["gflops"]), flush=True)
        print(
            f"  same losses: {one['same_losses']}; stages {ours['stages']}; demo expected {demo['expected_s']:.3f}",
            file=sys.stderr,
        )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
