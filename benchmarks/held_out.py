"""Models and losses that no test has seen, trained on 1, 2, 3 and 5 stages and compared with a plain loop, bit for bit.

The idea: the draw (benchmarks/held/draw.py) was made from the libraries' own registries before anything was mended, and
nothing is taken out of it. There are four outcomes, and only two are good: equal; refused with a sentence; failed with
somebody else's error; silently unequal. What this harness cannot build, or plain torch cannot train, is listed and not counted.

    python benchmarks/held_out.py [--only NAME] [--jobs N] [--redo-unequal | --redo-all] [--table]

Results are kept in docs/held_out.json after every model, so a run that was interrupted goes on. The libraries:
`pip install --target FOLDER --no-deps -r benchmarks/held_out_requirements.txt`, then PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import gc
import importlib.metadata
import io
import json
import math
import os
import resource
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.held.libraries import load
from benchmarks.held.made import Made, NotBuilt
from benchmarks.measure import machine, row
from meshcee.capture import Capture, capture, decode_program, encode_program, stack
from meshcee.errors import MeshceeError
from meshcee.job import Job, seeded
from meshcee.optim import Optimizer
from tests.rig.chain import Chain

STAGES = (1, 2, 3, 5)
STEPS = 2
LIMIT_S = 150.0  # of processor time for one model: the machine may be shared
WALL_S = 1200.0
MEMORY_BYTES = 12 << 30  # of address space
RESULT = Path(__file__).resolve().parent.parent / "docs" / "held_out.json"
LIBRARIES = ("torch", "transformers", "timm", "torchvision", "diffusers", "peft", "torch_geometric")


def job_of(made: Made) -> Job:
    return Job(
        model=made.model, loss=made.loss, data=made.data, optimizer=Optimizer("AdamW", lr=1e-3, weight_decay=0.01),
        batch_size=sum(made.sizes), steps=STEPS, clip_norm=1.0, seed=3, codec="none",
    )  # fmt: skip


def batches(made: Made, step: int) -> Iterator[tuple[list[tuple[Any, Any]], float]]:
    """The samples of the step's micro-batches, and their shares in its loss."""
    at = step * sum(made.sizes)
    for size in made.sizes:
        yield [made.data[(at + i) % len(made.data)] for i in range(size)], size / sum(made.sizes)
        at += size


def collated(items: Sequence[Any]) -> Any:
    """Samples as a batch, in the plain loop's own words."""
    first = items[0]
    if isinstance(first, dict):
        return {k: collated([item[k] for item in items]) for k in first}
    if isinstance(first, tuple):
        return tuple(collated(column) for column in zip(*items))
    return None if first is None else torch.stack([torch.as_tensor(item) for item in items])


def copied(model: torch.nn.Module) -> torch.nn.Module:
    if not isinstance(model, torch.jit.ScriptModule):
        return copy.deepcopy(model)
    file = io.BytesIO()  # a copy of a scripted module has no leaves
    torch.jit.save(model, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.jit.load(file)
    return loaded


def plain(made: Made) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The loop that a user would write, on a copy of the model."""
    job, model = job_of(made), copied(made.model)
    if not model.training:  # as every loop begins; what is in eval mode inside of a model in train mode stays so
        model.train()
    live = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss_module = copy.deepcopy(made.loss) if isinstance(made.loss, torch.nn.Module) else made.loss
    if isinstance(loss_module, torch.nn.Module):
        live |= {f"loss.{n}": p for n, p in loss_module.named_parameters()}
    optimizer = job.optimizer.build(live)
    losses = []
    for step in range(STEPS):
        for micro, (samples, share) in enumerate(batches(made, step)):
            x, y = collated(samples)
            with seeded(job.seed, step, micro):
                output = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
                loss = loss_module(output, y)
            (loss * share).backward()
            losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(live.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: t.detach() for n, t in model.state_dict().items()}


def piped(made: Made, captured: Capture, stages: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The same through stages: all F, all B, then all W."""
    chain = Chain(job_of(made), captured, stages)
    losses = []
    for step in range(STEPS):
        for runner in chain.runners:
            runner.begin(step)
        parts = list(batches(made, step))
        for micro, (samples, _) in enumerate(parts):
            losses.append(chain.forward(step, micro, stack(samples)).clone())
        for micro, (_, share) in enumerate(parts):
            chain.backward_input(micro, share)
        for micro in range(len(parts)):
            chain.backward_weight(step, micro)
        chain.finish()
    return losses, dict(chain.state())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())
    )


def difference(want: Any, got: Any) -> str:
    """The first tensor that differs, or ""."""
    for i, (a, b) in enumerate(zip(want[0], got[0], strict=True)):
        if not same(a, b):
            return f"loss {i}: {float(a):.9g} plain, {float(b):.9g} in stages"
    for name, tensor in want[1].items():
        if name not in got[1]:
            return f"{name} is missing"
        if not same(tensor, got[1][name].reshape(tensor.shape)):
            return f"{name} differs by {float((tensor.double() - got[1][name].double()).abs().max()):.3g}"
    return ""


def words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    for folder in sorted({str(Path(__file__).resolve().parent.parent), *filter(None, sys.path)}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")  # where this machine keeps its files says nothing
    return f"{type(error).__name__}: {text}"[:600]


def judged(name: str, tell: Callable[[dict[str, Any]], None] = lambda entry: None) -> dict[str, Any]:
    """One row: the outcome, what was said, how many blocks and seconds. `tell` hears when plain torch has trained it."""
    from benchmarks.held.draw import make

    found: dict[str, Any] = {"name": name}
    began = time.perf_counter()
    try:
        torch.manual_seed(7)
        made = make(name)
        try:
            want = plain(made)
        except ValueError:  # batch norm wants more than one value per channel
            made.sizes = (3, 2)
            want = plain(made)
        if not all(x.isfinite() for x in want[0]):
            raise NotBuilt("its loss is not finite in plain torch")
        again = plain(made)
        if difference(want, again):
            raise NotBuilt(f"two plain runs differ: {difference(want, again)}")
    except Exception as error:
        return found | {"outcome": "not built", "said": words(error)}
    found["sizes"] = list(made.sizes)
    tell({"trains": name})
    try:
        began = time.perf_counter()
        captured = capture(job_of(made))
        captured = copy.copy(captured)
        object.__setattr__(captured, "train", decode_program(encode_program(captured.train)))
        found |= {"blocks": captured.train.num_blocks, "capture_s": round(time.perf_counter() - began, 1)}
    except MeshceeError as error:
        return found | {"outcome": "refused", "said": words(error)}
    except Exception as error:
        return found | {"outcome": "failed", "said": words(error), "at": traceback.format_exc().splitlines()[-4:]}
    told = []
    ran = list(dict.fromkeys(min(s, captured.train.num_blocks) for s in STAGES))
    for stages in ran:
        try:
            if said := difference(want, piped(made, captured, stages)):
                told.append(f"{stages} stages: {said}")
        except MeshceeError as error:
            return found | {"outcome": "refused", "said": f"at {stages} stages: {words(error)}"}
        except Exception as error:
            return found | {
                "outcome": "failed",
                "said": f"at {stages} stages: {words(error)}",
                "at": traceback.format_exc().splitlines()[-4:],
            }
    return found | {"stages": ran, "outcome": "unequal" if told else "equal", "said": "; ".join(told)}


def serve() -> None:
    """A worker: names in, rows out, one JSON a line."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what models print does not come between
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    load()
    for line in sys.stdin:
        found = judged(line.strip(), lambda entry: print(json.dumps(entry), file=out, flush=True))
        print(json.dumps(found), file=out, flush=True)
        gc.collect()


class Worker:
    """A process that is given names one by one, and ended when one takes too long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, name: str) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n".encode())
        began, used_s, trains, text = time.monotonic(), self._used_s(), False, b""
        while True:
            ready, _, _ = select.select([self._process.stdout], [], [], 1.0)
            late = self._used_s() - used_s > LIMIT_S or time.monotonic() - began > WALL_S
            if not ready and not late:
                continue
            piece = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            text += piece
            while b"\n" in text:
                line, _, text = text.partition(b"\n")
                found: dict[str, Any] = json.loads(line)
                if "outcome" in found:
                    if found["outcome"] in ("failed", "unequal"):
                        self.close()  # what it left behind touches no other model
                    return found
                trains = True
            if not piece:
                why = "ended (memory?)" if ready else f"took more than {LIMIT_S:.0f} s"
                self.close()
                return {"name": name, "outcome": "failed" if trains else "not built", "said": f"the process {why}"}

    def _used_s(self) -> float:
        """Seconds of processor time of the process so far."""
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(self._process.pid).cpu_times() if self._process else None
            return float(used.user + used.system) if used else 0.0
        return 0.0

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None


def stored(path: Path) -> dict[str, dict[str, Any]]:
    return {r["name"]: r for r in json.loads(path.read_text())["models"]} if path.exists() else {}


def run(names: Sequence[str], jobs: int, path: Path, known: dict[str, dict[str, Any]], keep: Sequence[str]) -> None:
    workers, lock = threading.local(), threading.Lock()
    made: list[Worker] = []

    def one(name: str) -> None:
        if not hasattr(workers, "mine"):
            workers.mine = Worker()
            made.append(workers.mine)
        found = workers.mine.ask(name)
        with lock:
            known[name] = found
            write(path, [known[n] for n in keep if n in known])
            print(f"{found['outcome']:10}{name}  {found.get('said', '')[:150]}", flush=True)

    with contextlib.ExitStack() as stack_of, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        stack_of.callback(lambda: [w.close() for w in made])
        list(pool.map(one, names))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    before = json.loads(path.read_text()).get("before") if path.exists() else None  # anything was mended for this draw
    content = {"machine": machine(), "libraries": versions, "before": before, "counts": counts(rows), "models": rows}
    path.with_suffix(".part").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".part").replace(path)


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By family, and all together, which outcomes there were."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for r in rows:
        for family in (r["name"].partition(":")[0], "all"):
            found[family][r["outcome"]] += 1
    return {family: dict(sorted(c.items())) for family, c in sorted(found.items())}


def table(rows: Sequence[dict[str, Any]]) -> str:
    outcomes = ("equal", "refused", "failed", "unequal", "not built")
    lines = [row("family", *outcomes, "equal of those that train, %"), row(*["---"] * 7)]
    for family, found in counts(rows).items():
        trains = sum(v for k, v in found.items() if k != "not built")
        share = math.floor(1000 * found.get("equal", 0) / trains) / 10 if trains else "-"
        lines.append(row(family, *(found.get(o, 0) for o in outcomes), share))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names that contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--redo-unequal", action="store_true", help="again what was not equal")
    parser.add_argument("--redo-all", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print what is stored")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve()
        return
    known = stored(options.out)
    if not options.table:
        load()
        from benchmarks.held.draw import names as drawn

        keep = drawn()
        again = {
            n
            for n, r in known.items()
            if options.redo_all or options.only or (options.redo_unequal and r["outcome"] != "equal")
        }
        todo = [n for n in keep if (n not in known or n in again) and (options.only or "") in n]
        run(todo, options.jobs, options.out, known, keep)
    rows = list(known.values())
    print(table(rows))
    if any(r["outcome"] in ("unequal", "failed") for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
