"""A page that is left open for a whole run keeps no memory of what it has shown: a real browser, many thousands of steps.

The run is made up and comes as fast as the page takes it; its server and the browser are real. Every part of the page is drawn
again with each update, and every list that has a bound is full before the first look. The garbage of the browser is collected
before each look. To show that the looks would see a leak, the test plants two at its end.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshcee.picture import Painter
from meshcee.picture.painter import MOST_MOMENTS
from tests.picture.test_picture import plan, report, status

pytest.importorskip("aiohttp", reason="the ui extra is not installed")

from peers.cli.ui import server
from peers.cli.ui.server import Site, serving
from tests.rig.browser import BROWSER, WHY_NOT, Page, a_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)]

BEFORE = 100_000  # steps that the run has had when the page is opened
AN_UPDATE, UPDATES, LOOKS = 40, 60, 6  # steps that come at once; updates between two looks; looks
STEPS = 2 * BEFORE
NAMES = ("ann", "ben", "cleo", "dora", "emil", "fred")


class MadeUp:
    """A run of which so many steps come with each look, until `allowed` of them have come."""

    def __init__(self) -> None:
        self.painter = Painter()
        of = plan(*NAMES).to_json()
        self.painter.begin("run", {"name": "long", "steps": STEPS, "started": 1.0, "plan": of, "names": {}})
        self.painter.hear_all([a_report(step) for step in range(BEFORE)])
        for _ in range(MOST_MOMENTS):
            self.painter.tell({"at": 1.0, "kind": "joined", "text": "somebody joined", "step": 0})
        self.allowed = self.steps = BEFORE

    async def refresh(self) -> bool:
        if self.steps < self.allowed:
            self._more()
        return False

    def _more(self) -> None:
        painter, step, here = self.painter, self.steps, NAMES[: 5 + self.steps // AN_UPDATE % 2]
        painter.hear_all([a_report(k) for k in range(step, step + AN_UPDATE)])
        self.steps += AN_UPDATE
        links = [(a, b, 0.001 * (1 + self.steps % 7)) for a, b in itertools.permutations(here, 2)]
        painter.look(status(*here, links=links), float(self.steps))
        for kind in ("lost", "replanned"):
            painter.tell({"at": float(step), "kind": kind, "text": f"{kind} in step {step + 1}", "step": step})
        took = {
            "compute": 0.04 + step % 9 / 1000,
            "wait": 0.03,
            "apply": 0.01,
            "code": 0.01,
            "data": 0.01,
            "total": 0.1,
        }
        rates = [[a, b, 1e6 + step] for a, b in itertools.pairwise(NAMES)]
        painter.seen({"members": {name: dict(took) for name in NAMES}, "rates": rates})
        painter.trace(traced(step))


def a_report(step: int) -> dict[str, Any]:
    metrics = {"accuracy": 0.5} if step % 1000 == 0 else {}
    return report(step, steps=STEPS, loss=2 + math.sin(step), norm=1.0, metrics=metrics)


def traced(step: int) -> list[dict[str, Any]]:
    """Some spans of each member, in a step."""
    found: list[dict[str, Any]] = []
    for pid, (name, which) in enumerate(itertools.product(NAMES, ("measured", "predicted"))):
        found.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"stage {name}: {which}"}})
        for micro, kind in itertools.product(range(8), "FBW"):
            args, start = {"step": step, "micro": micro}, 1e3 * (micro + pid)
            found.append({"name": kind, "cat": kind, "ph": "X", "pid": pid, "ts": start, "dur": 900.0, "args": args})
    return found


INTERPRETED = "--js-flags=--jitless"  # compiled code is part of the heap, and grows for long
CARDS = "[...document.querySelectorAll('.card')].filter((card) => !card.hidden).map((card) => card.id)"
# Two leaks.
KEEPS_MESSAGES = """{ const parse = JSON.parse, kept = [];
JSON.parse = (text) => { const value = parse(text); kept.push(value); return value; }; } 0"""
KEEPS_NODES = """window.kept = [];
new MutationObserver((all) => kept.push(all)).observe(document, { childList: true, subtree: true }); 0"""


@dataclass(frozen=True)
class Look:
    """What the page holds once its garbage is collected."""

    heap_bytes: int
    nodes: int  # of the document and of no document
    listeners: int


async def look(page: Page) -> Look:
    for _ in range(2):  # what the first one finds may hold more
        await page.call("HeapProfiler.collectGarbage")
    heap, counts = await page.call("Runtime.getHeapUsage"), await page.call("Memory.getDOMCounters")
    return Look(heap["usedSize"], counts["nodes"], counts["jsEventListeners"])


async def go_on(page: Page, source: MadeUp, updates: int) -> None:
    """Until the page shows so many updates more."""
    source.allowed += updates * AN_UPDATE
    await page.until(f"document.getElementById('tiles').innerText.includes('{source.allowed} / ')", within_s=120)


def leaks(before: list[Look], after: list[Look]) -> str:
    """Which of it has grown by more than 5 %; "" for nothing. The least counts: what is garbage next time comes and goes."""

    def least(looks: list[Look], name: str) -> int:
        return min(getattr(look, name) for look in looks)

    names = ("heap_bytes", "nodes", "listeners")
    return " ".join(name for name in names if least(after, name) > 1.05 * least(before, name))


async def test_a_page_left_open_for_a_whole_run_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "EVERY_S", 0.01)  # a second between two updates would take an hour
    source = MadeUp()
    clock = lambda: float(source.steps)  # noqa: E731
    async with a_page(tmp_path, INTERPRETED) as page, serving(Site(source, clock=clock)) as site:
        await page.open(site.address)
        looks: list[Look] = []
        for _ in range(LOOKS):
            await go_on(page, source, UPDATES)
            looks.append(await look(page))
        print(f"{source.steps - BEFORE} steps", *looks, sep="\n", flush=True)
        shown = await page.value(CARDS)
        assert set(shown) >= {
            f"card-{name}" for name in ("loss", "plan", "moments", "metrics", "map", "links", "gantt", "peers")
        }
        half = LOOKS // 2
        assert leaks(looks[:half], looks[half:]) == "", looks
        await page.value(KEEPS_MESSAGES)
        await go_on(page, source, UPDATES)
        with_messages = [await look(page)]
        assert leaks(looks[half:], with_messages) == "heap_bytes"
        await page.value(KEEPS_NODES)
        await go_on(page, source, UPDATES)
        with_nodes = [await look(page)]
        assert "nodes" in leaks(with_messages, with_nodes)
        print(*with_messages, *with_nodes, sep="\n", flush=True)
        assert page.errors == []
