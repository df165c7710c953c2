"""`meshcee local`: a whole mesh on this machine, each peer a real process, devices and links emulated on request."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from pathlib import Path

from meshcee.errors import PeerLostError, UsageError
from meshcee.files.steady import write_fact
from peers.cli.children import Children
from peers.cli.session import Screen, configure_logging, run_async
from peers.device.emulation import device_names

__all__ = ["run_local"]

PEERS = 4  # of no testbed


def run_local(
    count: int | None, shape: str | None, jitter_ms: float | None, job: Path | None, threads: int, *, as_json: bool
) -> None:
    if shape and count is not None:
        raise UsageError("--shape says how many peers there are: leave out -n")
    if not shape and jitter_ms is not None:
        raise UsageError("--jitter-ms is for emulated links: say --shape NAME too")
    configure_logging(as_json=as_json, level="warning")
    names = device_names(shape) if shape else [f"peer-{i}" for i in range(count or PEERS)]
    emulation = ("--shape", shape, "--jitter-ms", str(jitter_ms or 0.0)) if shape else ()
    run_async(_local(names, emulation, job, threads, as_json=as_json))


async def _local(
    names: list[str], emulation: tuple[str, ...], job: Path | None, threads: int, *, as_json: bool
) -> None:
    console = Screen(stderr=as_json)
    console.print(f"starting {len(names)} peers: torch is loaded first")
    with tempfile.TemporaryDirectory(prefix="meshcee-local-") as folder:
        async with Children(Path(folder)) as children:
            token = await children.start_peers(len(names), threads=threads, names=names, emulation=emulation)
            if as_json:
                write_fact({"token": token, "pids": {n: p.pid for n, p in children.processes.items()}})
            else:
                console.print(f"{len(names)} peers are up: {', '.join(names)}")
                console.print(f"\n  meshcee train JOB.py --join {token}", soft_wrap=True)
                console.print(f"  meshcee status --join {token}\n\nCtrl-C ends them.", soft_wrap=True)
            async with asyncio.TaskGroup() as group:
                watches = [group.create_task(_watch(name, children, console)) for name in names]
                if job is not None:
                    await children.run(["train", str(job), "--join", token] + (["--json"] if as_json else []))
                    for watch in watches:
                        watch.cancel()
            if job is None:
                raise PeerLostError("all peers have gone")


async def _watch(name: str, children: Children, console: Screen) -> None:
    code = await children.processes[name].wait()
    left = sum(process.returncode is None for process in children.processes.values())
    console.print(
        f"{name} has gone ({signal.Signals(-code).name if code < 0 else f'exit code {code}'}): {left} are left"
    )
