"""`meshcee demo`: real peer processes on loopback train a character GPT, beside the plain eager loop in its own process.

The idea: what the README promises, run in front of the user. It shows the plan, live progress, losses, speed, generated
text, and whether every loss and every weight equals plain PyTorch, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.text import Text

import meshcee
from meshcee.capture import capture
from meshcee.errors import MeshceeError
from meshcee.files import loads
from meshcee.files.home import Home
from meshcee.files.steady import write_fact
from meshcee.job import Job
from peers.cli.children import Children
from peers.cli.session import Screen, configure_logging, load_job, run_async
from peers.cli.ui.watching import needs_ui, page_of
from peers.cli.view import View, view_for
from peers.node import JoinOptions, Mesh, Result, join

__all__ = ["run_demo"]


def _job_file() -> Path:
    return Path(meshcee.__file__).with_name("_demo_job.py")


def run_demo(peers: int, steps: int | None, *, ui: bool = False, as_json: bool) -> None:
    if ui:
        needs_ui()
    configure_logging(as_json=as_json, level="warning")
    torch.set_num_threads(1)
    console = Screen(stderr=as_json)
    module_job = load_job(_job_file())
    job = module_job if steps is None else Job(**{**vars(module_job), "steps": steps})
    current: list[Mesh] = []
    pages: list[asyncio.Event] = []  # that are left open until Ctrl-C

    def polite() -> bool:
        for page in pages:
            page.set()
        return bool(pages) or any(mesh.stop() for mesh in current)

    with tempfile.TemporaryDirectory(prefix="meshcee-demo-") as folder:
        view = view_for(as_json=as_json, console=console)
        ok = run_async(
            _demo(job, peers, Path(folder), console, view, current, pages if ui else None, as_json=as_json), polite
        )
    if not ok:
        raise MeshceeError("the mesh and the plain eager loop disagree; please report the lines above")


async def _demo(
    job: Job,
    count: int,
    folder: Path,
    console: Screen,
    view: View,
    current: list[Mesh],
    pages: list[asyncio.Event] | None,
    *,
    as_json: bool,
) -> bool:
    console.print(f"meshcee demo: {count} peer processes on this machine train a character GPT on the Python")
    console.print("standard library's source text; the owner feeds samples and computes nothing.\n")
    training_s = 0.0
    async with Children(folder / "home") as children:
        captured, token = await asyncio.gather(asyncio.to_thread(capture, job), children.start_peers(count, threads=1))
        home = Home(folder / "home")
        async with (
            join(JoinOptions(token=token, name="owner"), home) as mesh,
            page_of(mesh, home, view.note, wanted=pages is not None, token=token) as page,
        ):
            await mesh.agent.wait_for_devices(count)
            current.append(mesh)
            try:
                with view:
                    training = mesh.train(
                        job,
                        captured=captured,
                        stages=count,
                        on_plan=view.plan,
                        trace=page.trace,
                        callbacks=[page.wishes],
                    )
                    async for report in training:
                        training_s += report.step_s
                        view.report(report)
                        await page.hear(report.step, page.trace)
            finally:
                current.clear()
            same = await _compared(job, count, folder, console, mesh.result, training_s, as_json=as_json)
            if pages is not None and console.is_terminal and len(mesh.result.losses) == job.steps:
                console.print("\nThe page stays until Ctrl-C.")
                pages.append(asyncio.Event())
                await pages[0].wait()
    return same


async def _compared(
    job: Job, count: int, folder: Path, console: Screen, result: Result, training_s: float, *, as_json: bool
) -> bool:
    """Whether the plain loop has the same losses and weights, told as well."""
    done = len(result.losses)
    if not done:
        return True
    speed = job.batch_size * done / training_s
    console.print(f"\nloss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in {done} steps, {speed:.1f} samples/s")
    console.print("\nA sample of what it writes now:", style="bold")
    console.print(_sample(result.state_dict), soft_wrap=True)
    console.print("\nChecking against the plain eager PyTorch loop in a process of its own ...")
    eager = await _eager(job, done, result.micro_batch_size, folder)
    reference = safetensors.torch.load_file(folder / "eager.safetensors")
    same_losses = eager["losses"] == result.losses
    worst = [name for name, tensor in result.state_dict.items() if not torch.equal(tensor, reference[name])]
    for label, good in (("losses", same_losses), ("weights", not worst)):
        told = ("equal, bit for bit", "green") if good else ("different", "red")
        console.print(Text.assemble(f"  {label:<8} ", told))
    console.print(
        f"  the mesh trained in {training_s:.1f} s, the plain loop in {eager['seconds']:.1f} s: "
        f"{count} peers share the {os.cpu_count()} cores of this machine"
    )
    if as_json:
        summary = {"losses": result.losses, "seconds": training_s, "equal": same_losses and not worst, "eager": eager}
        write_fact({"result": summary})
    return same_losses and not worst


def _sample(state: dict[str, torch.Tensor]) -> str:
    module: Any = sys.modules["job_file"]
    return str(module.sample(state, "def ", 240))


async def _eager(job: Job, steps: int, micro_batch: int, folder: Path) -> dict[str, Any]:
    """The plain loop, in a fresh interpreter that knows torch and `meshcee.seeded` only."""
    arguments = [str(_job_file()), str(steps), str(micro_batch), str(folder)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshcee.eager",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise MeshceeError(f"the eager loop failed: {err.decode()[-2000:]}")
    data: dict[str, Any] = loads(out.decode().splitlines()[-1])
    return data
