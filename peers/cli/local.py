"""`meshcee local`: a whole mesh on this machine, each peer a real process, devices and links emulated on request."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from meshcee.files import dumps
from peers.cli.children import Children
from peers.cli.session import Screen, configure_logging, run_async
from peers.device.emulation import device_names

__all__ = ["run_local"]


def run_local(
    count: int, shape: str | None, jitter_ms: float, job: Path | None, threads: int, *, as_json: bool
) -> None:
    configure_logging(as_json=as_json, level="warning")
    names = device_names(shape) if shape else [f"peer-{i}" for i in range(count)]
    emulation = ("--shape", shape, "--jitter-ms", str(jitter_ms)) if shape else ()
    run_async(_local(names, emulation, job, threads, as_json=as_json))


async def _local(
    names: list[str], emulation: tuple[str, ...], job: Path | None, threads: int, *, as_json: bool
) -> None:
    console = Screen(stderr=as_json)
    console.print(f"starting {len(names)} peers: each loads torch first")
    with tempfile.TemporaryDirectory(prefix="meshcee-local-") as folder:
        async with Children(Path(folder)) as children:
            token = await children.start_peers(len(names), threads=threads, names=names, emulation=emulation)
            if as_json:
                print(dumps({"token": token, "pids": {n: p.pid for n, p in children.processes.items()}}), flush=True)
            else:
                console.print(f"{len(names)} peers are up: {', '.join(names)}")
                console.print(f"\n  meshcee train JOB.py --join {token}", soft_wrap=True)
                console.print(f"  meshcee status --join {token}\n\nCtrl-C ends them.", soft_wrap=True)
            if job is None:
                await asyncio.Event().wait()
            else:
                command = ["train", str(job), "--join", token] + (["--json"] if as_json else [])
                await children.run(command)
