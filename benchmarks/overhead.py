"""What meshcee costs: one stage through the executor against the plain loop, the ways to run a backward pass, and frames
against raw libp2p streams; and on a GPU, two stages on one device against one.

The idea: the executor with one stage does the same arithmetic as the plain loop, so the difference in time is all ours:
the graph instead of the module, the hops between event loop and compute thread, the queues. Samples are stacked before,
on both sides: that is the owner's work. A run whose losses differ from the plain loop's ends with an error.

    python benchmarks/overhead.py [--threads N] [--device cuda:0] [--turns N] [--json] [--only executor|backward|transport|stages]
    python benchmarks/overhead.py --device cuda:0 --only executor --job gpt2-medium        one stage of GPT-2 medium in bf16
    python benchmarks/overhead.py --device cuda:0 --only stages --job gpt2-medium          two stages on one device
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
import transport
import uvloop
from backward import three_ways
from measure import Turns, machine, row
from sized import LARGE, SIZED

from meshcee.capture import Capture, capture, stack
from meshcee.job import Job, seeded
from meshcee.optim import HyperSchedule
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.role import Place, StageFlops
from meshcee.sampling.order import draw, read
from meshcee.stage.runner import StageRunner
from peers.cli.session import load_job
from peers.device.compute import Compute
from peers.member.executor import Executor
from peers.member.inbox import Inbox
from peers.state.store import CopyStore
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.messages import Round
from peers.wire.outbox import Outbox
from tests.rig.mesh_fixture import train

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# The demo's model, and one whose blocks take less than 5 ms.
JOBS = {"gpt": 6, "digits": 30, "gpt2": 2, "vit": 2, "resnet": 2}  # steps in a turn
BUILT = SIZED | LARGE
AHEAD = 2  # steps that are fed before the first of them is applied, as the owner does

Batch = tuple[Any, Any]


def batches_of(job: Job, steps: int) -> list[list[Batch]]:
    """The stacked micro-batches of each step."""
    size = job.micro_batch_size or job.batch_size
    found = []
    for step in range(steps):
        drawn = draw(job.seed, len(job.data), job.batch_size, step)
        found.append([stack(read(job.data, drawn[k : k + size], job.seed, step)) for k in range(0, len(drawn), size)])
    return found


class PlainLoop:
    """The eager module in an ordinary loop: what a user would write. In bf16 with fp32 masters, as meshcee has them."""

    def __init__(self, job: Job, device: str) -> None:
        assert isinstance(job.model, torch.nn.Module)
        self.job, self.device = job, device
        self.model = copy.deepcopy(job.model).to(device).train()
        masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in self.model.named_parameters()}
        if job.precision == "bf16":
            self.model.bfloat16()
        live = dict(self.model.named_parameters())
        self.pairs = [(masters[n], p) for n, p in live.items()] if job.precision == "bf16" else []
        self.optimizer = job.optimizer.build(masters if self.pairs else live)
        self.schedule = job.schedule.build(self.optimizer) if job.schedule else None
        self.losses: list[float] = []

    def run(self, first: int, steps: Sequence[list[Batch]]) -> None:
        for step, batches in enumerate(steps, first):
            for micro, (x, y) in enumerate(batches):
                with seeded(self.job.seed, step, micro):
                    loss = self.job.loss(self.model(x.to(self.device)), y.to(self.device))
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                self.losses.append(loss.item())
            for master, parameter in self.pairs:
                master.grad = None if parameter.grad is None else parameter.grad.float()
            if self.job.clip_norm is not None:
                wide = [master for master, _ in self.pairs] or self.model.parameters()
                torch.nn.utils.clip_grad_norm_(wide, self.job.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.zero_grad()
            with torch.no_grad():
                for master, parameter in self.pairs:
                    parameter.copy_(master)
            if self.schedule is not None:
                self.schedule.step()


class Owner:
    """In place of the owner's stream: hears losses and applied steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.applied: asyncio.Queue[int] = asyncio.Queue()

    async def send(self, frame: Frame) -> None:
        if frame.kind == messages.LOSS:
            self.losses.append(frame.header["loss"])
        elif frame.kind == messages.APPLIED:
            self.applied.put_nowait(frame.header["step"])

    def rates(self) -> tuple[None, None]:
        return None, None


class OneStage:
    """All blocks of a job as one stage, walked by the executor."""

    def __init__(self, job: Job, captured: Capture, inbox: Inbox, owner: Owner) -> None:
        self.captured, self.inbox, self.owner = captured, inbox, owner
        self.hyper = HyperSchedule(job.optimizer, job.schedule)

    async def run(self, first: int, steps: Sequence[list[Batch]]) -> None:
        """Feed these steps, a few ahead; return when the last is applied."""
        fed = 0
        for done in range(len(steps)):
            while fed < min(len(steps), done + AHEAD):
                await self._feed(first + fed, steps[fed])
                fed += 1
            assert await self.owner.applied.get() == first + done

    async def _feed(self, step: int, batches: list[Batch]) -> None:
        weights = (1 / len(batches),) * len(batches)
        await self.inbox.rounds.put(Round(step, step, weights, self.hyper.at(step)))
        for micro, batch in enumerate(batches):
            self.inbox.put_raw(step, micro, self.captured.inputs_of(batch))


@asynccontextmanager
async def one_stage(job: Job, captured: Capture, device: str) -> AsyncIterator[OneStage]:
    blocks, micro_batch = captured.train.num_blocks, job.micro_batch_size or job.batch_size
    num_micro = job.batch_size // micro_batch
    spec = captured.train.slice(0, blocks)
    runner = StageRunner(
        spec,
        captured.state,
        job.optimizer,
        stages=[(0, blocks)],
        device=device,
        split=False,
    )
    stage = Stage(0, blocks, (Member("here", micro_batch),), window=2, live_cap=2)
    order = {name: i for i, name in enumerate(captured.param_order)}
    dtypes = tuple(captured.layout[name][0] for name in captured.param_order)
    plan = Plan(micro_batch, (Pipeline(num_micro, (stage,)),))
    place = Place("here", plan, (1, 1), job.seed, job.clip_norm, order, dtypes)
    inbox, owner = Inbox(limit=4 * num_micro + 16), Owner()
    async with Compute(device) as compute, asyncio.TaskGroup() as group:
        outbox = Outbox(owner)  # type: ignore[arg-type]
        tasks = [
            group.create_task(outbox.run()),
            group.create_task(Executor(runner, place, inbox, compute, outbox, StageFlops(), CopyStore()).run()),
        ]
        yield OneStage(job, captured, inbox, owner)
        for task in tasks:
            task.cancel()


async def executor_against_loop(name: str, turns: int, device: str) -> dict[str, Any]:
    """Median seconds a step of both, the ratio, and how long one micro-batch's F and B take in the plain loop."""
    job = BUILT[name]() if name in BUILT else load_job(EXAMPLES / f"{name}.py")
    per_turn = JOBS.get(name, 2)
    batches = batches_of(job, per_turn * (turns + 1))
    captured = capture(job)
    plain = PlainLoop(job, device)
    baseline_s, ours_s = [], []
    async with one_stage(job, captured, device) as ours:
        for turn in range(turns + 1):
            steps = batches[turn * per_turn : (turn + 1) * per_turn]
            start_s = time.perf_counter()
            plain.run(turn * per_turn, steps)
            middle_s = finished_s(device)
            await ours.run(turn * per_turn, steps)
            end_s = finished_s(device)
            if turn:  # the first turn warms caches and allocators up
                baseline_s.append((middle_s - start_s) / per_turn)
                ours_s.append((end_s - middle_s) / per_turn)
        # A GPU's kernels may add in another order each time, unless they are forbidden to, at the cost of speed.
        tolerance = 0.0 if device == "cpu" else 0.02
        pairs = zip(plain.losses, ours.owner.losses, strict=True)
        if any(abs(a - b) > tolerance * abs(a) for a, b in pairs):
            raise SystemExit(f"{name}: the losses of the executor differ from the plain loop's")
    result = Turns(baseline_s, ours_s).to_json()
    micro_s = result["baseline_s"] / len(batches[0])
    return {"job": name, "blocks": captured.train.num_blocks, "micro_s": micro_s, **result}


def finished_s(device: str) -> float:
    """The time, when the device has done what it was asked for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


async def two_stages_against_one(name: str, turns: int, device: str) -> dict[str, Any]:
    """Median seconds a step of a mesh of one and of two stages, all on one device and in one process: the second adds what
    crosses and a second executor, and no arithmetic."""
    job = BUILT[name]()
    micro = job.micro_batch_size or job.batch_size
    job = dataclasses.replace(job, steps=turns + 2)
    captured = capture(job)
    step_s = []
    for stages in (1, 2):
        trained = await train(job, stages, micro, device=device, captured=captured, memory_bytes=1 << 36)
        step_s.append(statistics.median(report.step_s for report in trained.reports[2:]))
    return {"job": name, "one_s": step_s[0], "two_s": step_s[1], "ratio": step_s[1] / step_s[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", choices=("executor", "backward", "transport", "stages"))
    parser.add_argument("--job", action="append", help="of the executor and of stages; default: all that suit a CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of table rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the figures
    report: dict[str, Any] = {"machine": machine(options.device)}
    if options.only in (None, "executor"):
        names = options.job or JOBS
        report["executor"] = [uvloop.run(executor_against_loop(name, options.turns, options.device)) for name in names]
    if options.only in (None, "backward"):
        report["backward"] = [three_ways(build(), options.turns, options.device) for build in SIZED.values()]
    if options.only in (None, "transport"):
        report["transport"] = uvloop.run(transport.frames_against_raw(options.turns))
    if options.only == "stages":
        names = options.job or SIZED
        report["stages"] = [uvloop.run(two_stages_against_one(n, options.turns, options.device)) for n in names]
    if options.json:
        print(json.dumps(report, indent=2))
        return
    here = report["machine"]
    where = f"{here['processor']}, {here['cores']} cores, {here['device']}, {here['threads']} threads, {here['date']}"
    for r in report.get("executor", ()):
        name = f"{r['job']} ({r['blocks']} blocks, {r['micro_s'] * 1e3:.1f} ms a micro-batch)"
        figures = f"{r['baseline_s'] * 1e3:.1f}", f"{r['ours_s'] * 1e3:.1f}", f"{r['ratio']:.3f}"
        print(row(where, name, *figures, f"{r['ratio_min']:.3f} to {r['ratio_max']:.3f}"))
    for r in report.get("backward", ()):
        kept, later = r["kept_f_to_b_bytes"], r["kept_b_to_w_bytes"]
        milliseconds = [f"{r['seconds'][way] * 1e3:.1f}" for way in ("fused", "split", "recompute")]
        ratios = f"{r['fused_over_split']:.2f}", f"{r['split_over_recompute']:.2f}"
        held = [f"{size / 1e6:.2f}" for size in (kept["fused"], kept["recompute"], later["split"])]
        print(row(where, f"{r['job']}, {r['blocks']} blocks", *milliseconds, *ratios, *held))
    for r in report.get("stages", ()):
        print(row(where, r["job"], f"{r['one_s'] * 1e3:.1f}", f"{r['two_s'] * 1e3:.1f}", f"{r['ratio']:.3f}"))
    for r in report.get("transport", ()):
        print(row(where, r["what"], r["raw"], r["frames"], f"{r['ratio']:.2f}"))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
