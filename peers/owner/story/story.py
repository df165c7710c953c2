"""Three files in a run's folder, for `meshcee ui` and `meshcee report`: events.jsonl, mesh.json and seen.json.

The idea: a run must not wait for its story. Events are noted in memory as they come; a task writes them every few seconds, with the
newest look at what members do. What stands behind a plan is simulated in a thread once the plan runs.

events.jsonl  one line for what happened: `at`, `kind`, `text`, `step`, and `gain` where a plan was changed
mesh.json     the mesh when the plan began (`status`), and what stands behind the plan (`account`)
seen.json     of one of the last steps what each member did (`members`), how fast links were (`rates`), what waited (`depths`)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import structlog

from meshcee.callbacks import Callback, Control
from meshcee.errors import MeshceeError
from meshcee.figures import Observed
from meshcee.files import disk, dumps
from meshcee.files.home import Home
from meshcee.plan import Plan
from peers.mesh_view import MeshView, named

if TYPE_CHECKING:
    from peers.owner.answers import Report
    from peers.owner.job_run import Training

__all__ = ["Story", "seen_of"]

log = structlog.get_logger()

EVERY_S = 2.0  # between two times that the files are written
MOST_LINES = 1000  # that wait for a disk


class Story(Callback):
    """Of one training: `run` in a task, `hear` with every report. Its methods as a callback come from other threads."""

    waits: ClassVar[str] = "never"

    def __init__(self, agent: MeshView, home: Home, *, clock: Any = time.time) -> None:
        self._agent = agent
        self._home = home
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=MOST_LINES)
        self._training: Training | None = None
        self._plan: Plan | None = None
        self._is_new = asyncio.Event()  # a plan's first step is done: one may look at what stands behind it
        self._is_seen = False
        self._lost: tuple[str, ...] = ()  # since the last plan
        self._changes = 0  # of plans by the adapter, that were told of
        self._measured = 0  # of them, whose gain was measured
        self._report: Report | None = None  # the newest that is not written

    # -- as a callback -------------------------------------------------------------------------------------------------

    def on_plan(self, run: Control, plan: Any) -> None:
        self._begin(plan)
        self._tell("planned", f"the first plan: {_words(plan, self._names)}", run.next_step)

    def on_change(self, run: Control, plan: Any) -> None:
        before, names = self._plan, self._names
        self._begin(plan)
        words, changes = _words(plan, names), self._training.result.changes if self._training is not None else []
        if self._lost:
            self._tell("recovered", f"the run goes on without {_and(self._lost)}: {words}", run.next_step)
            self._lost = ()
            self._changes = self._measured = len(changes)
        elif len(changes) > self._changes:
            change, self._changes = changes[-1], len(changes)
            self._tell("replanned", f"{_and(change.cause)}: {words}", run.next_step, gain=round(change.gain, 3))
        else:
            gone = sorted(set(before.peers) - set(plan.peers)) if before is not None else []
            why = f"{_and([names.get(p, p) for p in gone])} may leave: " if gone else ""
            self._tell("drained" if gone else "replanned", why + words, run.next_step)

    def on_loss(self, run: Control, error: str, peers: Sequence[str]) -> None:
        self._lost = (*self._lost, *peers)
        who = _and(peers) or "a member"
        self._tell(
            "lost",
            f"{who} {'was' if len(peers) < 2 else 'were'} lost: {named(error, self._names)}",
            run.next_step,
        )

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        self._tell("resumed", f"goes on with a run that had told of {len(reports)} steps", run.next_step)

    def on_end(self, run: Control, result: Any, error: str | None) -> None:
        text = f"the run ended early: {named(error, self._names)}" if error else "the run is over"
        self._tell("ended", text, max(len(result.losses) - 1, 0))
        self._write()

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def hear(self, report: Report) -> None:
        """Of a step."""
        self._report = report
        if not self._is_seen:
            self._is_seen = True
            self._is_new.set()
        changes = self._training.result.changes if self._training is not None else []
        if len(changes) > self._measured and changes[-1].after_s:
            self._measured = len(changes)
            gain = round(changes[-1].before_s / changes[-1].after_s, 3)
            self._tell("gain", "the plan's gain, as measured", report.step, gain=gain)

    async def run(self, training: Training) -> None:
        """Until it is cancelled. Lines that come before the run has a folder wait for it. What fails here never ends a run."""
        self._training = training
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._is_new.wait()
            try:
                if self._is_new.is_set():
                    self._is_new.clear()
                    await self._look(training)
                if self._lines or self._report is not None:
                    await asyncio.to_thread(self._write)
            except Exception as error:
                log.exception("the run's story lacks something; please report this", error=repr(error))

    async def _look(self, training: Training) -> None:
        """At the mesh, and at what stands behind the plan."""
        plan, request = self._plan, training.request
        found: dict[str, Any] = {"status": self._agent.known()}
        if plan is not None:
            measured = self._agent.measured(plan.peers)
            measured = replace(measured, times=request.times, feeds=request.feeds)
            job, names = replace(request.job, micro_batch=plan.micro_batch, threads=plan.threads), self._agent.names()

            def account() -> None:
                from meshcee.picture import account_of
                from meshcee.planner import situation

                with contextlib.suppress(MeshceeError):  # a plan that was given may use what nobody measures
                    found["account"] = account_of(plan, *situation(measured, job), names).to_json()

            await asyncio.to_thread(account)
        if (folder := self._folder()) is not None:
            await asyncio.to_thread(_replace, folder / "mesh.json", {"at": self._clock(), **found})

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def _names(self) -> Mapping[str, str]:
        """Of the peers, as the plan found them."""
        return self._training.result.names if self._training is not None else {}

    def _begin(self, plan: Plan) -> None:
        self._plan, self._is_seen, self._report = plan, False, None

    def _folder(self) -> Path | None:
        run = self._training.result.run if self._training is not None else None
        return self._home.folder / "runs" / run if run is not None else None

    def _tell(self, kind: str, text: str, step: int, **more: Any) -> None:
        line = {"at": self._clock(), "kind": kind, "step": step, "text": text, **more}
        with self._lock:
            self._lines.append(dumps(line).encode() + b"\n")

    def _write(self) -> None:
        """What waits. Called in threads."""
        if (folder := self._folder()) is None:
            return
        report, self._report = self._report, None
        if report is not None:
            _replace(folder / "seen.json", {"at": self._clock(), "step": report.step, **seen_of(report.observed)})
        with self._lock:
            lines, file = b"".join(self._lines), folder / "events.jsonl"
            try:
                if lines:
                    disk.append(file, b"\n" + lines if disk.is_torn(file) else lines)
            except OSError as error:
                log.debug("events of the run wait for the disk", error=str(error))
            else:
                self._lines.clear()


def seen_of(observed: Observed) -> dict[str, Any]:
    """What a step showed, as JSON."""
    members = {
        peer: {
            "compute": round(sum(seconds.get(kind, 0.0) for kind in ("f", "b", "w")), 6),
            "code": round(sum(seconds.get(kind, 0.0) for kind in ("encode", "decode")), 6),
            **{kind: round(seconds.get(kind, 0.0), 6) for kind in ("wait", "apply", "total")},
        }
        for peer, seconds in observed.seconds.items()
    }
    rates = [[a, b, round(rate)] for (a, b), rate in observed.rates.items()]
    depths = [[a, b, round(depth)] for (a, b), depth in observed.depths.items()]
    for peer, (size, rate) in observed.fed.items():
        members[peer]["data"] = round(size / rate, 6)
    for peer, taken in observed.memory_bytes.items():
        members[peer]["memory"] = taken
    return {"members": members, "rates": rates, "depths": depths}


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    """Readers see the old or the new. A power cut may take both: nothing waits for the disk."""
    new = path.with_name(f"{path.name}.new")
    try:
        file = disk.File(new, 0o600)
        try:
            file.write(dumps(value).encode())
        finally:
            file.abort()
        disk.move(new, path)
    except OSError as error:
        log.debug("left out of the run's story", file=path.name, error=str(error))


def _words(plan: Plan, names: Mapping[str, str]) -> str:
    count = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    expected = f", {plan.predicted.step_s:.3g} s a step expected" if plan.predicted is not None else ""
    shown = [names.get(peer, peer[-8:]) for peer in plan.peers]
    more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return f"{count} stage{'s' * (count != 1)} on {', '.join(shown[:6])}{more}{expected}"


def _and(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""
