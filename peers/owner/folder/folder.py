"""What a run leaves behind, in its folder and on other machines, so that it goes on when its process or machine is gone.

The idea: run.json says what the run is. A line for each step says what came of it. Checkpoints hold the weights, and copies.json
says with whom copies of newer ones are. The journal brings the small files to a few members.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from meshcee.capture import Capture
from meshcee.errors import UsageError
from meshcee.files import Trouble, disk, number
from meshcee.files.home import Home, Run
from meshcee.job import Job
from meshcee.sampling.again import FED, check_samples
from meshcee.sampling.fed import Fed
from peers.mesh_view import MeshView
from peers.owner.feed import Steering
from peers.owner.folder.diary import Diary
from peers.owner.numbers import Entry, Resumed, Unwritten, next_incarnation, same_threads
from peers.state import CopySet
from peers.state.checkpoint import (
    Checkpoint,
    CheckpointStore,
    check_same,
    check_weights,
    description,
    first_weights,
    made_by_code,
)
from peers.state.journal import Journal, Ledger, noted

__all__ = ["Folder"]


class Folder(Unwritten):
    """Of one run, which this process owns from `find`, or else from `begin` on, until `close`."""

    def __init__(self, agent: MeshView, home: Home, trouble: Trouble, steering: Steering) -> None:
        self._home, self._trouble, self._steering = home, trouble, steering
        self._journal = Journal(agent)
        self._ledger = Ledger(agent, trouble, self._journal)
        self._diary: Diary | None = None
        self._check_weights: Callable[..., None] = partial(check_weights, {}, {})  # as the run that goes on began with
        self._last = 0  # the incarnation of the run's owner before this one
        self._begins = 0  # with which step this process began
        self._is_audited = False

    @property
    def id(self) -> str | None:  # type: ignore[override]
        return self._diary.run.id if self._diary is not None else None

    # -- going on with a run -------------------------------------------------------------------------------------------

    def find(self, wanted: str, job: Job, captured: Capture) -> Resumed:
        run_id, _, step = wanted.partition("@")
        run = self._home.run(run_id)
        self._diary, store, about = Diary(run, self._trouble), CheckpointStore.found(run), run.about
        base: Checkpoint | None = None
        if step or store.complete() or about.job is None:
            base, kinds, job, goes_on = _from_disk(store.find(step, run.id), run, job, captured)
            check_weights(made_by_code(captured), about.weights, again=False)
        else:  # its owner died before the first checkpoint, or elsewhere: the copies are all that there is, or its first step
            check_same(job, captured, about.job, about.micro_batch)
            threads = same_threads(job, about.devices, run.id)
            job, goes_on = replace(job, micro_batch_size=about.micro_batch, threads=threads), captured
            kinds = about.devices
            self._check_weights = partial(check_weights, first_weights(captured), about.weights)
            self._check_weights(again=False)
        self.durable, self._last = base, about.incarnation
        begins = base.next_step if base is not None else 0
        reports = run.reports(begins)
        steps = {line["step"] for line in reports if not math.isnan(number(line["loss"]))}
        told = next(s for s in itertools.count(begins) if s not in steps)
        copies = noted(run.folder, about.key, begins, told) if about.key and not step else []
        return Resumed(job, goes_on, base, kinds, about, reports, copies, run.is_over)

    def incarnation(self) -> int:
        return next_incarnation(self._home, self._last)

    def check_samples(self, found: Mapping[str, str]) -> None:
        if self._diary is not None:
            check_samples(found, self._diary.run.about.samples)

    def check_weights(self, *, again: bool) -> None:
        self._check_weights(again=again)

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, entry: Entry) -> None:
        """The run's folder, made or taken over by this process, and a place for checkpoints."""
        job, numbers = entry.job, entry.numbers
        devices = sorted(numbers.kinds)
        info = {
            "steps": job.steps,
            "plan": entry.plan.to_json(),
            "names": dict(entry.names),
            "rounds": (numbers.shares, numbers.coded),
            "key": entry.key,
            "incarnation": entry.incarnation,
            "job": description(job, entry.captured),
            "micro_batch": entry.plan.micro_batch,
            "devices": devices,
            "failed": sorted(entry.failed),
        }
        try:
            if self._diary is None:
                info |= {"weights": first_weights(entry.captured), "samples": entry.samples or {}}
                self._diary = Diary(self._home.new_run(job.name), self._trouble)
            diary, run, begins = self._diary, self._diary.run, not self._diary.is_begun
            if begins:
                diary.begin(name=job.name, **info)
            else:
                diary.note(**info)
            self._ledger.run, self._ledger.folder, self._ledger.rely = entry.key, run.folder, diary.sync
            micro_batch = entry.plan.micro_batch
            self.store = store = CheckpointStore.of(
                run.checkpoints, job, entry.captured, micro_batch, devices, self.store, diary.sync
            )
            store.spares, store.place = self._steering.control.spares, self._steering.source.state
            self._begins, self._is_audited = numbers.begins, bool(job.audit)
            store.pinned = self._begins if self._is_audited else 0
            if begins:
                store.forget_after(entry.first_step)
        except OSError as error:
            told = f"{disk.refusal(error)}): {disk.remedy(error, 'set MESHCEE_HOME to another folder')}"
            raise disk.kind_of(error)(f"the run's folder cannot be written ({told}") from error
        if self.fed is None and (entry.samples is None or (run.folder / FED).exists()):
            self.fed = Fed(run.folder / FED, numbers.losses.__contains__, self._floor)

    def follow(self, entry: Entry) -> None:
        assert self._diary is not None
        run, resumed = self._diary.run, entry.resumed
        self._journal.begin(entry.job.name, run, entry.incarnation, entry.plan, resumed=resumed)

    def _floor(self) -> int:
        """The first step that training could still go back to."""
        oldest = self.store.oldest() if self.store is not None and not self._is_audited else None
        return oldest.next_step if oldest is not None else self._begins

    def note(self, found: Sequence[CopySet]) -> None:
        self._ledger.note(found)

    def has_told(self, copied: CopySet) -> bool:
        return self._ledger.has_told(copied)

    def report(self, line: Mapping[str, Any]) -> None:
        if self._diary is not None:
            self._diary.report(line)

    def saved(self) -> list[Checkpoint]:
        return [*self.store.made] if self.store is not None else []

    def find_saved(self) -> list[Checkpoint]:
        return self.store.complete() if self.store is not None else []

    def look(self) -> None:
        if self.store is not None:
            self.durable = self.store.newest(self.durable)

    def take_back(self, step: int, told: Iterable[int]) -> None:
        if self._diary is not None:
            self._diary.take_back(told)
        if self.store is not None:
            self.store.take_back(step)

    def end(self, state: str, **more: Any) -> None:
        if self._diary is not None and self._diary.is_begun:
            self._diary.end(state, **more)

    async def close(self) -> None:
        if self._diary is not None:
            self._diary.close()
        await self._journal.end()


def _from_disk(
    base: Checkpoint, run: Run, job: Job, captured: Capture
) -> tuple[Checkpoint, Sequence[Any], Job, Capture]:
    """This checkpoint, the kinds of devices that have computed the run, and the job and the capture as they go on."""
    base.check(job, captured)
    kinds = base.manifest["devices"]
    threads = same_threads(job, kinds, run.id)
    if base.next_step >= job.steps:
        raise UsageError(
            f"run {run.id} has done {base.next_step} steps and the job has {job.steps}: raise `steps` to go on, or use "
            f"`meshcee checkpoint export {run.id}`"
        )
    base.verify()
    job = replace(job, micro_batch_size=base.micro_batch, threads=threads)
    return base, kinds, job, captured.over(base.weights(captured.state))
