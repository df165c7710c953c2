"""What another process of this machine may ask of a run that trains: to save its state now, or to stop.

The idea: a file in the run's own folder is the wish. The owner looks for it now and then, beside training, and asks for what any
callback may. A lock beside it says that somebody looks, and ends with the owner. A run that was begun from Python hears of none.
Stopping is a signal, which must come once: a second ends the run without saving. So another file says that it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import psutil

from meshcee.callbacks import Callback, Control
from meshcee.errors import MeshceeError, UsageError
from meshcee.files import disk
from meshcee.files.home import Run, is_locked

__all__ = ["Wishes", "ask_to_stop", "mark_stop", "wish_checkpoint"]

PLACE, CHECKPOINT, HEARD = "wishes", "checkpoint", "heard.lock"
EVERY_S = 1.0


class Wishes(Callback):
    """The owner's side. `run` is the one that trains, once it has a folder."""

    waits: ClassVar[str] = "never"

    def __init__(self, run: Callable[[], Run | None]) -> None:
        self._run = run
        self._place: Path | None = None
        self._heard: BinaryIO | None = None  # held while somebody looks
        self._lock = threading.Lock()
        self._is_closed = False  # a look goes on in its thread after `watch` was cancelled
        self._control: Control | None = None

    def on_plan(self, run: Control, plan: Any) -> None:
        self._control = run

    def checkpoint(self) -> None:
        """As if a callback had asked; UsageError before there is a run, and where it has no folder."""
        if self._control is None:
            raise UsageError("nothing trains here yet: ask again once the run has a plan")
        self._control.checkpoint()

    async def watch(self) -> None:
        """Look now and then, for ever."""
        try:
            while True:
                await asyncio.to_thread(self.look)
                await asyncio.sleep(EVERY_S)
        finally:
            self.close()

    def close(self) -> None:
        """Nobody looks any more."""
        with self._lock:
            self._is_closed = True
            self._forget()

    def _forget(self) -> None:
        if self._heard is not None:
            self._heard.close()
        self._place = self._heard = None

    def look(self) -> None:
        """Take up a wish, if there is one; a disk that refuses ends no run."""
        run, control = self._run(), self._control
        if run is None or control is None:
            return
        place = run.folder / PLACE
        with self._lock, contextlib.suppress(OSError):
            if self._is_closed:
                return
            if self._place != place:
                self._forget()
                place.mkdir(exist_ok=True)
                (place / CHECKPOINT).unlink(missing_ok=True)  # of an owner before
                self._heard = (place / HEARD).open("ab")
                fcntl.flock(self._heard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._place = place
            if (place / CHECKPOINT).exists():
                (place / CHECKPOINT).unlink()
                with contextlib.suppress(MeshceeError):
                    control.checkpoint()


def wish_checkpoint(run: Run) -> None:
    """UsageError where the run does not train, or nobody looks for wishes."""
    if not run.is_owned:
        raise UsageError(f"run {run.id} is not running ({run.state})")
    place = run.folder / PLACE
    if not is_locked(place / HEARD):
        raise UsageError(
            f"run {run.id} takes no wishes: it has no plan yet, or was begun from Python, where a callback asks run.checkpoint()"
        )
    try:
        (place / CHECKPOINT).touch()
    except OSError as error:
        first = "make room" if disk.is_full(error) else "check the owner and permissions of its folder"
        raise disk.kind_of(error)(
            f"run {run.id} cannot be asked ({disk.refusal(error)}): {first}, then ask again"
        ) from error


def mark_stop(run: Run, pid: int) -> bool:
    """Whether nobody has asked this process to stop the run before; from now on somebody has."""
    try:
        disk.File(run.stop_mark(pid), flags=os.O_CREAT | os.O_EXCL).close()
    except FileExistsError:
        return False
    except OSError:
        pass  # a folder that cannot be written keeps nobody from stopping a run
    return True


def ask_to_stop(run: Run) -> psutil.Process:
    """The owner, which was sent the first Ctrl-C now or before. UsageError where the run is not running, or cannot be asked."""
    if (process := run.process) is None:
        if run.is_owned:
            raise UsageError(
                f"run {run.id} runs in another container, or on another machine: type `meshcee run stop` there"
            )
        raise UsageError(f"run {run.id} is not running ({run.state})")
    if mark_stop(run, process.pid):
        try:
            process.send_signal(signal.SIGINT)
        except psutil.Error as error:
            with contextlib.suppress(OSError):
                disk.remove(run.stop_mark(process.pid))  # it may be another user's, who has the right
            raise UsageError(
                f"the owner of run {run.id} cannot be asked to stop ({error}); `meshcee run list` shows whether it still runs"
            ) from error
    return process
