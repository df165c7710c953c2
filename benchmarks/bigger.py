"""A model larger than any of its peers, and what its owner holds of it.

The idea: real peers on this machine, each told to offer less memory than the parameters take; `meshcee train` with a
callable model in a process that has imported everything, and whose peak of resident memory is then set back. What it
grows by from there on, capture, offer, training, checkpoint and `--out` included, is held against the bytes of the
parameters. The owner is told that its machine has as much free memory as a peer lends, or it would build the whole model to
compare it with what was captured. The p2pd child of the owner is another process and is not counted. With --check the plain
eager loop runs afterwards, in a process of its own, and every loss and weight must be equal.

    python benchmarks/bigger.py [--layers 22] [--width 1024] [--peers 5] [--memory 1GiB] [--check] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import machine, row

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from meshcee.files.tensor_files import Checkpoint  # noqa: E402

STEPS = 2
FREE_BYTES = 1 << 30  # of the owner's machine, as it is told
JOB = """
import meshcee
from meshcee._demo_job import GPT, Characters, loss, standard_library

job = meshcee.Job(
    name="bigger",
    model=lambda: GPT(width={width}, heads={width} // 64, layers={layers}),
    loss=loss,
    data=Characters(standard_library(20_000)),
    optimizer=meshcee.Optimizer("SGD", lr=0.01),
    batch_size=4,
    micro_batch_size=1,
    steps={steps},
    seed=5,
    codec="none",
)
"""


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def run_owner(arguments: list[str], report: Path) -> None:
    """`meshcee` with these arguments, in this process, measured from the moment when all imports are done."""
    from meshcee._demo_job import GPT, Characters, loss, standard_library
    from meshcee.capture import capture, decode_program, encode_program
    from meshcee.job import Job
    from meshcee.optim import Optimizer
    from peers.cli.main import main

    small = Job(
        model=lambda: GPT(width=16, heads=2, layers=1),
        loss=loss,
        data=Characters(standard_library(20_000)),
        optimizer=Optimizer("SGD", lr=0.1),
        batch_size=4,
        steps=1,
    )
    decode_program(encode_program(capture(small).train))  # torch.export imports much of torch when it is first called
    memory = psutil.virtual_memory
    psutil.virtual_memory = lambda: memory()._replace(available=FREE_BYTES)
    baseline = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    try:
        main(arguments)
    finally:
        report.write_text(json.dumps({"baseline_bytes": baseline, "peak_bytes": resident("VmHWM")}))


def start_peer(home: Path, name: str, memory: str, token: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "meshcee", "peer", "--json", "--name", name, "--listen", "127.0.0.1:0"]
    command += ["--device", "cpu", "--threads", "1", "--memory", memory, *(["--join", token] if token else [])]
    log = (home / f"{name}.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(home))
    assert process.stdout is not None
    line = process.stdout.readline()
    if '"token"' not in line:
        process.kill()
        raise SystemExit(f"{name} did not start:\n{(home / f'{name}.log').read_text()[-2000:]}")
    return process, json.loads(line)["token"]


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "MESHCEE_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def measure(layers: int, width: int, count: int, memory: str, check: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshcee-bigger-") as folder:
        home = Path(folder)
        job, out, report = home / "job.py", home / "out.safetensors", home / "owner.json"
        job.write_text(JOB.format(layers=layers, width=width, steps=STEPS))
        processes: list[subprocess.Popen[str]] = []
        token = ""
        try:
            for i in range(count):
                process, line = start_peer(home, f"peer-{i}", memory, token)
                processes.append(process)
                token = token or line
            arguments = ["train", str(job), "--join", token, "--out", str(out), "--json"]
            began_s = time.perf_counter()
            done = subprocess.run(
                [sys.executable, __file__, "--owner", str(report), *arguments],
                env=environment(home),
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - began_s
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
        if done.returncode:
            raise SystemExit(f"training failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
        losses = [
            event["report"]["loss"] for line in done.stdout.splitlines() if "report" in (event := json.loads(line))
        ]
        trained = Checkpoint.at(out)
        parameters = sum(t.numel() * t.element_size() for t in map(trained.__getitem__, trained))
        owner = json.loads(report.read_text())
        grown = owner["peak_bytes"] - owner["baseline_bytes"]
        found = {
            "parameter_bytes": parameters,
            "peers": count,
            "peer_memory": memory,
            "owner_baseline_bytes": owner["baseline_bytes"],
            "owner_peak_bytes": owner["peak_bytes"],
            "owner_growth_bytes": grown,
            "growth_over_parameters": round(grown / parameters, 3),
            "steps": len(losses),
            "losses": losses,
            "seconds": round(seconds, 1),
        }
        if check:
            found["equal"] = is_equal(job, losses, trained, home)
        return found


def is_equal(job: Path, losses: list[float], trained: Checkpoint, home: Path) -> bool:
    """Whether the plain loop has the same losses and weights."""
    plain = home / "plain"
    plain.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "meshcee.eager", str(job), str(STEPS), "1", str(plain)],
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = Checkpoint.at(plain / "eager.safetensors")
    same = losses == json.loads(ended.stdout.splitlines()[-1])["losses"] and trained.keys() == wanted.keys()
    return same and all(torch.equal(trained[name], wanted[name]) for name in wanted)


def main() -> None:
    if sys.argv[1:2] == ["--owner"]:
        run_owner(sys.argv[3:], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--memory", default="1GiB", help="that each peer offers")
    parser.add_argument("--check", action="store_true", help="train the same model eagerly and compare")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.layers, options.width, options.peers, options.memory, options.check)
    if options.json:
        print(json.dumps({"machine": machine(), **found}))
        return
    about = machine()
    mib = 1 << 20
    print(
        row(
            f"{about['processor']}, {about['cores']} cores, {about['date']}",
            f"{found['parameter_bytes'] / mib:.0f}",
            f"{found['peers']} x {found['peer_memory']}",
            f"{found['owner_baseline_bytes'] / mib:.0f}",
            f"{found['owner_growth_bytes'] / mib:.0f}",
            f"{found['growth_over_parameters']:.0%}",
            {True: "equal", False: "DIFFERENT", None: "not compared"}[found.get("equal")],
        )
    )


if __name__ == "__main__":
    main()
