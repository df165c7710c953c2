"""What the page costs: a run of 100,000 steps on 50 peers, opened in a real browser, and left open while steps go on.

python -m benchmarks.ui [--steps N] [--peers N] [--seconds S]

The idea: the run's folder and the mesh's records are made up, the page, its server and the browser are real. The process that
serves does nothing else, so its CPU seconds are what a page costs an owner. The garbage of the browser is collected before its heap
is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.measure import machine
from meshcee.files import dumps
from meshcee.files.home import Home, Run
from meshcee.plan import Member, Pipeline, Plan, Predicted, Stage
from peers.cli.ui.page import FILES, read_file
from peers.cli.ui.server import Site, serving
from peers.cli.ui.sources import MeshSource
from peers.mesh_view import MeshView
from tests.rig.browser import Page, a_page

EVERY_S = 0.1  # a step, while the page is open
READY = "document.querySelector('#loss canvas') !== null && document.querySelectorAll('#peers tr').length > 1"


class Mesh:
    """Records of so many peers, whose links are measured again all the time."""

    def __init__(self, peers: int) -> None:
        self._names = [f"peer-{k}" for k in range(peers)]
        self._random = random.Random(0)

    def known(self) -> dict[str, Any]:
        device = {
            "kind": "cpu",
            "name": "a processor",
            "memory_bytes": 8 << 30,
            "speed_flops_per_s": 1e11,
            "threads": 4,
        }
        about = {"addresses": [], "region": None, "device": device, "kernels": "cpu", "outside": None, "software": "0"}
        where = {name: k % 5 for k, name in enumerate(self._names)}
        return {
            "peers": [{"peer": name, "name": name, "state": "busy", "guards": None, **about} for name in self._names],
            "coordinator": {"peer": self._names[0], "term": 1},
            "links": [
                {
                    "from": a,
                    "to": b,
                    "latency_s": (0.0002 if where[a] == where[b] else 0.03) * self._random.uniform(0.9, 1.1),
                    "bandwidth_bytes_per_s": 1e8 * self._random.uniform(0.5, 1.0),
                    "bandwidth_range_bytes_per_s": (5e7, 1e8),
                    "measured_at": time.time() - self._random.uniform(0, 600),
                }
                for a in self._names
                for b in self._names
                if a != b
            ],
            "runs": [],
        }


def line(step: int, steps: int) -> str:
    loss = 4 * math.exp(-step / 20_000) + random.random() / 10
    figures = {"step_s": 0.1, "samples_per_s": 640.0, "eta_s": 1.0, "limit": "compute of peer-0 (stage 0, 90% busy)"}
    told = {
        "step": step,
        "steps": steps,
        "loss": loss,
        "lr": 1e-3,
        "norm": 1 + random.random(),
        "metrics": {},
        **figures,
    }
    return dumps({**told, "codecs": {}}) + "\n"


def a_run(home: Home, steps: int, peers: int) -> Run:
    run = home.new_run("long")
    stages = tuple(Stage(k, k + 1, (Member(f"peer-{k}", 8),), peers - k, peers - k) for k in range(peers))
    plan = Plan(8, (Pipeline(64, stages),), Predicted(0.1, 640.0, 0.08))
    (run.folder / "run.json").write_text(
        dumps({"name": "long", "steps": 2 * steps, "plan": plan.to_json(), "names": {}})
    )
    with run.report_file.open("w") as file:
        file.writelines(line(step, 2 * steps) for step in range(steps))
    return run


async def heap_bytes(page: Page) -> int:
    await page.call("HeapProfiler.collectGarbage")
    found = await page.call("Runtime.getHeapUsage")
    return int(found["usedSize"])


async def measured(steps: int, peers: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = a_run(Home(Path(folder) / "home"), steps, peers)
        async with a_page(Path(folder)) as page:
            source = MeshSource(cast(MeshView, Mesh(peers)), lambda: run, listens=True)
            async with serving(Site(source, clock=time.time)) as site:
                began_s = time.perf_counter()
                await page.open(site.address)
                shell_s = time.perf_counter() - began_s
                await page.until(READY)
                ready_s = time.perf_counter() - began_s
                await page.until(f"document.getElementById('tiles').innerText.includes('{steps} / ')")
                whole_s = time.perf_counter() - began_s
                paint = await page.value("performance.getEntriesByName('first-contentful-paint')[0]?.startTime / 1000")
                await asyncio.sleep(5)
                heap, cpu_s, began_s = await heap_bytes(page), time.process_time(), time.perf_counter()
                step = steps
                with run.report_file.open("a") as file:
                    while time.perf_counter() - began_s < seconds:
                        file.write(line(step, 2 * steps))
                        file.flush()
                        step += 1
                        await asyncio.sleep(EVERY_S)
                share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
                grown = await heap_bytes(page) - heap
                elements = await page.value("document.querySelectorAll('*').length")
        reports_bytes = run.report_file.stat().st_size
    return {
        "machine": machine(),
        "steps": steps,
        "peers": peers,
        "reports_bytes": reports_bytes,
        "page_bytes": sum(len(read_file(name).encode()) for name in FILES),
        "first_paint_s": round(paint, 3) if paint else None,
        "loaded_s": round(shell_s, 3),
        "first_figures_s": round(ready_s, 3),
        "all_steps_s": round(whole_s, 3),
        "open_s": seconds,
        "server_cpu_share": round(share, 4),
        "server_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "browser_heap_bytes": heap,
        "browser_heap_growth_bytes": grown,
        "elements": elements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--peers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measured(options.steps, options.peers, options.seconds)), indent=1))


if __name__ == "__main__":
    main()
