"""Checkpoints on the owner's disk: the model and its optimizer by name, and where the run stood, whatever the plan was.

The idea: a checkpoint is a folder of safetensors and a manifest with their hashes. It is written beside its place and
renamed there once everything has reached the disk, and renamed away before it is removed. So a folder with a manifest is
whole or damaged, never half, wherever its owner is killed. Two are kept: while one is written the one before stays.

    checkpoints/step-00000040/manifest.json     next_step, job, micro_batch, names, hashes
                              model-0.safetensors, optimizer-0.safetensors, ...   one pair for each stage that wrote it
                              frozen.safetensors     what training does not change
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import safetensors
import structlog
import torch
import xxhash
from msgspec import Meta

from meshcee.capture import Capture, encode_program
from meshcee.capture.initial_state import InitialState
from meshcee.errors import CheckpointError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.fields import Count, read
from meshcee.files import disk, dumps, loads
from meshcee.files.home import Run
from meshcee.files.tensor_files import Layout, OnDemand, byte_view, head_of
from meshcee.job import Job
from meshcee.optim.digests import rate_digests, some_rates
from meshcee.sampling import order_digest
from meshcee.stage import AVERAGE

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Draft",
    "check_same",
    "check_weights",
    "description",
    "first_weights",
    "made_by_code",
]

log = structlog.get_logger()

FORMAT = 1
MOST_COMPLETE = 2
MANIFEST = "manifest.json"
FROZEN = "frozen.safetensors"
BEFORE = ".before"  # of a checkpoint that is written once more


OTHER = {
    "model": "another model",
    "computation": "another computation: code of the model or of the loss has changed, or a number in it",
    "rates": "another schedule: its function gives other rates",
    "all_rates": "another schedule: its function gives other rates",
    "weight": "another Job.weight: with none, where there is one now, or the other way round",
}


def description(job: Job, captured: Capture) -> dict[str, Any]:
    """What a run must have in common with the checkpoint that it goes on from, by the words of a Job."""
    tensors = {name: [str(dtype), list(shape)] for name, (dtype, shape) in sorted(captured.layout.items())}
    inputs = tuple(replace(entry, offset=0) for entry in captured.train.inputs)  # which a machine may choose anew
    computed = encode_program(replace(captured.train, inputs=inputs, recomputed=frozenset()))  # which changes no number
    return {
        "model": hashlib.sha256(dumps(tensors).encode()).hexdigest(),
        "optimizer": job.optimizer.averaging(job.ema).to_json(),  # what is evaluated changes no step
        "schedule": None if job.schedule is None else [job.schedule.name, job.schedule.words],
        "batch_size": job.batch_size,
        "samples": None if job.streams else len(job.data),
        "sampler": order_digest(job),
        "seed": job.seed,
        "clip_norm": job.clip_norm,
        "reduction": job.reduction,
        "precision": f"{job.precision} but for {', '.join(job.keep_fp32)}" if job.keep_fp32 else job.precision,
        "computation": hashlib.sha256(computed).hexdigest(),
        "rates": some_rates(job.optimizer, job.schedule, job.steps),
        "all_rates": sorted(rate_digests(job.optimizer, job.schedule, job.steps).items()),
        "weight": job.weight is not None,
    }


def _in_words(value: Any) -> str:
    """An optimizer or a schedule of a description as its user wrote it."""
    match value:
        case {"name": name, "options": options}:
            more = {key: value[key] for key in ("groups", "ema") if value.get(key)}
            found = [(key, repr(option)) for key, option in {**options, **more}.items()]
        case [str(name), str(words)]:
            found = re.findall(r"\('(\w+)', (.*?)\)(?=, \('|\]$)", words)
        case _:
            return repr(value)
    return f"{name}({', '.join(f'{key}={option}' for key, option in found)})"


def check_same(job: Job, captured: Capture, run: Mapping[str, Any], micro_batch: int) -> None:
    """Raises UsageError naming what this job and a run with that `description` do not have in common."""
    own_rates = partial(rate_digests, job.optimizer, job.schedule, job.steps)
    for key, value in loads(dumps(description(job, captured))).items():
        said = run.get(key, value)  # a run of an older version says less
        rates = dict(run.get("all_rates", ())) if key == "schedule" and said != value else {}
        if rates and own_rates(*rates).items() >= rates.items():  # another name, and the rates that the run had
            continue
        if key == "rates":  # a run with fewer steps says fewer
            value, said = value[: len(said)], said[: len(value)]
        if key == "all_rates" and said != value:  # and of other ones
            own = own_rates(*(end for end, _ in said))
            said = [[end, digest] for end, digest in said if end in own]
            value = [[end, own[end]] for end, _ in said]
        if value != said:
            what = OTHER.get(key, f"{key} {_in_words(run.get(key))}, the job says {_in_words(value)}")
            raise UsageError(
                f"the run was made with {what}: resume it with the job that it was started with, or start a new run"
            )
    if job.micro_batch_size is not None and job.micro_batch_size != micro_batch:
        raise UsageError(
            f"the run has micro-batches of {micro_batch}, the job says {job.micro_batch_size}: "
            "leave micro_batch_size as it was"
        )


def first_weights(captured: Capture) -> dict[str, str]:
    """Digests of what a run begins with: of the tensors that training changes, of the frozen ones, which no copy holds, and of
    those that no state_dict has.

    A tensor counts by its recipe, if it has one, so no large model is made; else by its bytes, one at a time.
    """
    changes = {x.name for x in captured.train.inputs if x.trainable or x.mutated}
    kinds = {"changed": captured.layout.keys() & changes, "frozen": captured.layout.keys() - changes}
    return {kind: _digest(captured, names) for kind, names in kinds.items()} | made_by_code(captured)


def made_by_code(captured: Capture) -> dict[str, str]:
    """A digest of buffers that no state_dict has: a plain loop that goes on takes them from the model as it is built."""
    return {"code": _digest(captured, captured.layout.keys() - {*captured.persistent})}


def _digest(captured: Capture, names: Iterable[str]) -> str:
    state, found = captured.state, xxhash.xxh3_128()
    for name in sorted(names):
        found.update(name.encode())
        recipe = state.recipe(name) if isinstance(state, InitialState) else None
        found.update(byte_view(state[name].detach().cpu()) if recipe is None else recipe)
    return found.hexdigest()


def check_weights(own: Mapping[str, str], run: Mapping[str, Any], *, again: bool) -> None:
    """Raises UsageError where the run began with other frozen weights than these digests say; other ones count too if it may begin
    `again`. A run that was written before there were digests has none, and passes.
    """
    others = {kind for kind, digest in own.items() if run.get(kind, digest) != digest}
    if "code" in others:
        raise UsageError(
            "a buffer of the model that no state_dict has (persistent=False) holds other numbers than when the run began: build "
            "the model as it was then, or start a new run"
        )
    if "frozen" in others or (again and "changed" in others):
        raise UsageError(
            "the model starts from other weights here than the run did: seed it, or give the same base model"
        )


@dataclass(frozen=True)
class _Manifest:
    """What every manifest says. Its files lie beside it: none has a name that leads elsewhere."""

    format: int
    next_step: Count
    micro_batch: Count
    files: Mapping[Annotated[str, Meta(pattern=r"^[a-z][\w-]*\.safetensors$")], Mapping[str, Any]]
    job: Mapping[str, Any] = field(default_factory=dict)
    persistent: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[tuple[Any, ...], ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state before `next_step`."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            data: dict[str, Any] = loads(path.read_text())
            if (found := read(data, _Manifest, "it", defaults=True).format) != FORMAT:
                raise CheckpointError(f"{path} has format {found}: use the version of meshcee that wrote it")
            if (step := int(data["next_step"])) != self.next_step:
                raise ValueError(f"it is of the state after {step} steps")
        except (OSError, ValueError, ProtocolError) as error:
            raise self._damaged(f"its manifest cannot be read ({error})") from error
        return data

    @property
    def next_step(self) -> int:
        """By the folder's name: a damaged manifest must not hide which one it is."""
        return _step(self.folder)

    @property
    def is_readable(self) -> bool:
        """Whether its manifest is, which says nothing of its files."""
        try:
            return bool(self.manifest)
        except CheckpointError:
            return False

    @property
    def micro_batch(self) -> int:
        return int(self.manifest["micro_batch"])

    def _damaged(self, why: str) -> CheckpointError:
        run = self.folder.parents[1].name
        steps = [
            _step(one) for one in self.folder.parent.glob("step-*") if one.name[5:].isdecimal() and one != self.folder
        ]
        said = f"the checkpoint {self.folder} is damaged: {why}"
        if not steps:
            return CheckpointError(f"{said}; the run has no other one, so start it anew")
        at = f"{run}@{max(steps)}"
        return CheckpointError(
            f"{said}; resume from another one, `--resume {at}`, or export it, `meshcee checkpoint export {at}`"
        )

    def verify(self) -> None:
        """Read every file and compare its hash; raises CheckpointError."""
        for name, entry in self.manifest["files"].items():
            path = self.folder / name
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise self._damaged(f"{name} cannot be read ({error})") from error
            if found != entry.get("sha256"):
                raise self._damaged(f"{name} is not what was written")

    def check(self, job: Job, captured: Capture) -> None:
        """Whether this job may go on from here; raises UsageError naming what is different."""
        check_same(job, captured, self.manifest.get("job", {}), self.micro_batch)

    @cached_property
    def _model_files(self) -> dict[str, str]:
        return self._index("model-", FROZEN)

    @cached_property
    def _optimizer_files(self) -> dict[str, str]:
        return self._index("optimizer-")

    def _index(self, *beginnings: str) -> dict[str, str]:
        """Which file holds each name; a shared parameter lies in several, alike."""
        found: dict[str, str] = {}
        for name in self.manifest["files"]:
            if name.startswith(beginnings):
                with self._open(name) as file:
                    found.update(dict.fromkeys(file.keys(), name))
        return found

    def _open(self, name: str) -> Any:
        try:
            return safetensors.safe_open(self.folder / name, "pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise self._damaged(f"{name}: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._model_files)

    @property
    def changed(self) -> frozenset[str]:
        """The names that training may have changed."""
        return frozenset(name for name, file in self._model_files.items() if file != FROZEN)

    def weights(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """Parameters (masters) and buffers, each read when it is asked for."""
        return self._read(self._model_files, names)

    def optimizer(self, parameters: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """What the optimizer keeps for these parameters, as "<parameter>/<key>"; read as `weights` are."""
        wanted = set(parameters)
        return self._read(self._optimizer_files, (n for n in self._optimizer_files if n.rpartition("/")[0] in wanted))

    @property
    def averages(self) -> Mapping[str, torch.Tensor]:
        """Of the weights, by their names; empty where the job had none. Read as `weights` are."""
        names = {n.rpartition("/")[0]: n for n in self._optimizer_files if n.endswith(f"/{AVERAGE}")}
        found = self._read(self._optimizer_files, names.values())
        return OnDemand(names, lambda name: found[names[name]])

    def _read(self, files: Mapping[str, str], names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        wanted = list(names)
        for name in wanted:
            if name not in files:
                raise self._damaged(f"{name!r} is missing")
        # A run asks for frozen weights when this checkpoint was removed long ago. All checkpoints share the file.
        frozen: Any = self._open(FROZEN) if any(files[name] == FROZEN for name in wanted) else None

        def read(name: str) -> torch.Tensor:
            with contextlib.nullcontext(frozen) if files[name] == FROZEN else self._open(files[name]) as file:
                tensor: torch.Tensor = file.get_tensor(name).clone()  # the file may be removed while it is in use
            return tensor

        return OnDemand(wanted, read)


class Draft:
    """A checkpoint that is being written, in a folder beside its place."""

    def __init__(self, store: CheckpointStore, next_step: int) -> None:
        self.next_step = next_step
        self._store = store
        self.folder = store.folder / f".step-{next_step:08d}.{os.getpid()}.{next(_drafts)}"
        disk.remove_tree(self.folder)
        disk.make_folder(self.folder)
        self._files: dict[str, dict[str, Any]] = {}
        self._writers: list[Writer] = []
        self._lock = threading.Lock()  # a thread may outlive its epoch

    def create(self, name: str, header: bytes) -> Writer:
        with self._lock:
            writer = Writer(disk.File(self.folder / name), self._files, name)
            self._writers.append(writer)
        writer.write(header)
        return writer

    def _frozen(self, state: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """What training does not change is written once; later checkpoints link to it."""
        before = next((one for one in self._store.list_complete() if one.is_readable), None)
        if before is not None and FROZEN in before.manifest["files"]:
            disk.link(before.folder / FROZEN, self.folder / FROZEN)
            self._files[FROZEN] = before.manifest["files"][FROZEN]
            return
        header, starts, _ = head_of(layout)
        writer = self.create(FROZEN, header)
        try:
            for name in starts:  # in the order of their places
                tensor = state[name].detach().cpu().to(layout[name][0]).contiguous()
                if tensor.numel():
                    writer.write(byte_view(tensor))
            writer.close()
        finally:
            writer.abort()

    def finish(self, state: Mapping[str, torch.Tensor], frozen: Layout, **about: Any) -> Checkpoint:
        """Add what training does not change, make it durable, put it in its place, forget the oldest. What fails leaves nothing:
        the epoch may be over by then.
        """
        try:
            about = {
                **about,
                "data": self._store.place(self.next_step),
            }  # before the lock: it may read data, and take long
            with self._store.lock:
                return self._finish(state, frozen, about)
        except BaseException:
            self.discard()
            raise

    def _finish(self, state: Mapping[str, torch.Tensor], frozen: Layout, about: Mapping[str, Any]) -> Checkpoint:
        if self not in self._store.drafts:
            raise CheckpointError(f"the state after {self.next_step} steps was taken back while it was written")
        if frozen:
            self._frozen(state, frozen)
        data = {"format": FORMAT, "next_step": self.next_step, **self._store.about, **about, "files": self._files}
        self._store.rely()
        disk.write_whole(self.folder / MANIFEST, dumps(data, indent=1).encode())  # and the names of the files before it
        place = self._store.folder / f"step-{self.next_step:08d}"
        before = place.with_name(place.name + BEFORE)
        if place.exists():  # written by an epoch that was lost; it counts until this one is in its place
            if before.exists():
                _remove(before)
            disk.move(place, before)
        disk.move(self.folder, place)
        self._store.taken_back.discard(place)
        self._store.drafts.discard(self)
        disk.sync_folder(self._store.folder)
        self._store.made.append(made := Checkpoint(place))  # though its epoch may be over, and nobody wait for it
        if before.exists():
            _remove(before)
        complete = self._store.list_complete()
        spared = self._store.spares([checkpoint.next_step for checkpoint in complete])
        for old in complete[MOST_COMPLETE:]:
            if old.next_step not in (spared, self._store.pinned):
                _remove(old.folder)
        return made

    def discard(self) -> None:
        # A disk that cannot be written; who resumes the run clears it away.
        self._store.drafts.discard(self)
        with self._lock, contextlib.suppress(OSError):
            for writer in self._writers:
                writer.abort()
            disk.remove_tree(self.folder)


class Writer:
    """One file of a draft; hashed as it is written."""

    def __init__(self, file: disk.File, files: dict[str, dict[str, Any]], name: str) -> None:
        self._file = file
        self._files = files
        self._name = name
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._over = False
        self._lock = threading.Lock()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._lock:
            if not self._over:
                self._file.write(data)
                self._digest.update(data)
                self._bytes += len(data)

    def close(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._file.close()
                self._files[self._name] = {"sha256": self._digest.hexdigest(), "bytes": self._bytes}

    def abort(self) -> None:
        """Nothing is written any more."""
        with self._lock:
            self._over = True
            self._file.abort()


class CheckpointStore:
    """The checkpoints of one run. `about` goes into every manifest: the job, the names of the model. `rely` brings to the disk
    what one is worth nothing without, and what takes one back.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any] | None = None, rely: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self.about = dict(about or {})
        self.rely = rely
        self.lock = threading.Lock()  # a checkpoint that is being completed when its epoch ends is completed first
        self.place: Callable[[int], Mapping[str, Any]] = lambda step: {}  # of the data before a step
        self.taken_back: set[Path] = set()  # whose steps count no more; a disk that cannot be written still has them
        self.drafts: set[Draft] = set()  # that may be finished
        self.made = deque[Checkpoint](maxlen=8)  # by this process, in all epochs, the newest last; the disk keeps fewer
        self.pinned = 0  # the step of one that outlives newer ones, too
        self.spares: Callable[[Sequence[int]], int | None] = lambda steps: None  # which of these outlives newer ones

    @classmethod
    def of(
        cls,
        folder: Path,
        job: Job,
        captured: Capture,
        micro_batch: int,
        devices: Sequence[Sequence[Any]] = (),
        before: CheckpointStore | None = None,
        rely: Callable[[], None] = lambda: None,
    ) -> CheckpointStore:
        """Of a run that is about to write. `devices`: all kinds of device that have computed it, as (kind, name, threads).
        `before`: with which an earlier epoch wrote, and may be completing its last checkpoint.
        """
        from meshcee.files import hugging_face

        for left in folder.glob(".step-*") if before is None else ():  # by an owner that died
            disk.remove_tree(left)
        about = {
            "job": description(job, captured),
            "name": job.name,
            "micro_batch": micro_batch,
            "devices": [list(device) for device in devices],
            "persistent": list(captured.persistent),
            "aliases": captured.aliases,
            **hugging_face.described(job.model),
            "torch": torch.__version__,
        }
        store = cls(folder, about, rely)
        if before is not None:
            store.lock, store.taken_back = before.lock, before.taken_back
            store.drafts, store.made = before.drafts, before.made
        return store

    @classmethod
    def found(cls, run: Run) -> CheckpointStore:
        """Of a run that was left: what its reports have taken back counts no more, though its owner died before it was removed."""
        store, least = cls(run.checkpoints), run.counts_to
        store.taken_back = {later.folder for later in store.list_complete() if later.next_step > least}
        return store

    def complete(self) -> list[Checkpoint]:
        """Newest first."""
        with self.lock:
            return self.list_complete()

    def list_complete(self) -> list[Checkpoint]:
        """As `complete`, for who holds the lock."""
        found = [f for f in self.folder.glob("step-*") if (f / MANIFEST).exists()] if self.folder.exists() else []
        return [Checkpoint(f) for f in sorted(found, key=_age) if f not in self.taken_back]

    def newest(self, known: Checkpoint | None) -> Checkpoint | None:
        """The newest whose manifest can be read; `known` where the disk does not even tell which there are."""
        try:
            return next((one for one in self.complete() if one.is_readable), None)
        except OSError as error:
            log.warning(Event.CHECKPOINTS_UNREAD, folder=str(self.folder), error=str(error))
            return known

    def oldest(self) -> Checkpoint | None:
        """None where the disk does not tell."""
        with contextlib.suppress(OSError):
            return next(iter(reversed(self.complete())), None)
        return None

    def find(self, step: str, run: str) -> Checkpoint:
        """The newest, or that before this step; UsageError when there is none. `run` is its id, for people."""
        found = [c for c in self.complete() if step in ("", str(c.next_step))]
        if not found:
            raise UsageError(
                f"run {run} has no checkpoint{' after ' + step + ' steps' if step else ''}; `meshcee run list` shows what there is"
            )
        return found[0]

    def forget_after(self, next_step: int) -> None:
        """A run goes on from here: what was written later will be written again."""
        with self.lock:
            for later in [one for one in self.list_complete() if one.next_step > next_step]:
                self.rely()
                _remove(later.folder)

    def take_back(self, step: int) -> None:
        """What was written later counts no more: it is removed at once, or as soon as the disk lets it."""
        with self.lock:
            self.drafts -= {draft for draft in self.drafts if draft.next_step > step}
            for later in [checkpoint for checkpoint in self.made if checkpoint.next_step > step]:
                self.made.remove(later)
            self.taken_back |= {later.folder for later in self.list_complete() if later.next_step > step}
            self.let_go()

    def let_go(self) -> None:
        """Of what was taken back, for who holds the lock; as soon as the disk knows that it was."""
        for folder in sorted(self.taken_back):
            with contextlib.suppress(OSError):
                self.rely()
                _remove(folder)
            if not folder.exists():
                self.taken_back.discard(folder)

    def draft(self, next_step: int) -> Draft:
        with self.lock:
            self.let_go()
            draft = Draft(self, next_step)
            self.drafts.add(draft)
            return draft


_drafts = itertools.count()


def _age(folder: Path) -> tuple[int, str]:
    """Sorts the newest first; of one step, what was written last."""
    return -_step(folder), folder.name


def _step(folder: Path) -> int:
    step = folder.name.removeprefix("step-").removesuffix(BEFORE)
    return int(step) if step.isdecimal() else 0


def _remove(folder: Path) -> None:
    """Under its name it is whole until it is gone."""
    aside = folder.with_name(f".{folder.name}.removed")
    disk.remove_tree(aside)
    disk.move(folder, aside)
    disk.sync_folder(folder.parent)  # or a power cut might bring the name back, and not the files
    disk.remove_tree(aside)
