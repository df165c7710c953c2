"""What a device in a process of its own costs: two real peers with --device-process beside two without, step by step.

The idea: both meshes are up all the time and train the same job on the same plan in turns, so a machine that slows down slows
both. Nothing shapes the links: every byte costs a core of this machine, which is the worst case for streams that are passed on.

    python -m benchmarks.device_process [--turns 7] [--steps 60] [--job examples/gpt.py] [--out docs/device_process.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Turns, machine, row
from benchmarks.one_host import ROOT, figures, lines_of, meshcee, terminals

STAGES = 2
FORMS = {"in the peer": (), "in a process": ("--device-process",)}


def copy_of(job: Path, steps: int, folder: Path) -> Path:
    """The same job, of so many steps."""
    path = folder / "job.py"
    path.write_text(
        f"import runpy\nfrom dataclasses import replace\n"
        f"job = replace(runpy.run_path({str(job)!r})['job'], steps={steps}, threads=1)\n"
    )
    return path


def plans(tokens: dict[str, str], jobs: dict[str, Path]) -> dict[str, Path]:
    """One plan of two stages, with the peers of each mesh in it."""
    folders, peers = {form: job.parent for form, job in jobs.items()}, dict[str, list[str]]()
    for form, token in tokens.items():
        [status] = lines_of(meshcee("status", "--join", token), folders[form])
        peers[form] = sorted(peer["peer"] for peer in status["peers"])
    first = next(iter(tokens))
    [found] = lines_of(
        meshcee("plan", str(jobs[first]), "--join", tokens[first], "--stages", str(STAGES)), folders[first]
    )
    for form, folder in folders.items():
        text = json.dumps(found)
        for theirs, ours in zip(peers[first], peers[form]):
            text = text.replace(theirs, ours)
        (folder / "plan.json").write_text(text)
    return {form: folder / "plan.json" for form, folder in folders.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "gpt.py")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "job": options.job.name, "stages": STAGES, "turns": []}
    with ExitStack() as stack:
        folders = {
            form: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshcee-device-process-")))
            for form in FORMS
        }
        tokens = {
            form: stack.enter_context(terminals(STAGES, folders[form], together=False, more=more))
            for form, more in FORMS.items()
        }
        jobs = {form: copy_of(options.job, options.steps, folder) for form, folder in folders.items()}
        given = plans(tokens, jobs)
        print(row("turn", *(f"{form}, s a step" for form in FORMS), "ratio", "same losses"))
        seconds: dict[str, list[float]] = {form: [] for form in FORMS}
        for number in range(options.turns):
            losses = []
            for form in list(FORMS)[:: 1 if number % 2 else -1]:
                command = meshcee("train", str(jobs[form]), "--join", tokens[form], "--plan", str(given[form]))
                one = figures(lines_of(command, folders[form]))
                losses.append(one.pop("losses"))
                seconds[form].append(one["measured_s"])
                found["turns"].append({"form": form, **one})
            before, after = (seconds[form][-1] for form in FORMS)
            print(
                row(number, f"{before:.4f}", f"{after:.4f}", f"{after / before:.3f}", losses[0] == losses[1]),
                flush=True,
            )
    before, after = seconds.values()
    found["process_over_peer"] = Turns(after, before).to_json()
    print(
        f"a step takes {found['process_over_peer']['ratio']:.3f} times as long with the device in a process of its own"
    )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
