"""The calls that a device's threads are in, and whether this process computes there any more.

The idea: a call that never comes back cannot be ended, and a GPU that a kernel has broken answers nothing in this process. Then
only another process computes again, and whoever asks for this one hears that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog
import torch

from meshcee.errors import MeshceeError, PeerLostError, PlanError
from meshcee.sampling import KERNELS

__all__ = ["Calls"]

log = structlog.get_logger()

T = TypeVar("T")
ASSERTED = "device-side assert"  # in what CUDA says where a kernel has found an index out of range
LOOK_S = 0.1  # between two looks whether a call has come back


class Marks(Protocol):
    """What a GPU's `Staging` has."""

    def mark(self) -> Any: ...


class Calls:
    """Of one device. `restarts`: another process takes the place of this one where that is what helps."""

    def __init__(self, restarts: bool = False) -> None:
        self.broken = ""  # why this process computes nothing here any more, and what to do
        self._restarts, self._is_broken = restarts, asyncio.Event()
        self._under_way: dict[int, object] = {}  # by thread
        self._left: dict[object, float] = {}  # of them those whose work is over: since when, by the loop's clock

    def begin(self) -> None:
        """On the loop that is to hear."""
        self._loop = asyncio.get_running_loop()

    def noted(self, staging: Marks | None, call: Callable[..., T], *args: Any) -> T:
        """On the device's thread, or the one beside it."""
        thread = threading.get_ident()
        self._under_way[thread] = object()
        try:
            return call(*args)
        except RuntimeError as error:
            if staging is not None:
                self._explain(staging, error)
            raise
        finally:
            del self._under_way[thread]

    def _explain(self, staging: Marks, error: RuntimeError) -> None:
        """Raise in its place what the owner of the work can act on, if there is more to say."""
        name, found, _ = str(error).partition(" does not have a deterministic implementation")
        if found:
            raise PlanError(
                f"{name} adds in another order each time on a GPU, so no step could be done again with the same bits; replace that "
                "module (docs/models.md names them), or lend CPUs (--device cpu)"
            ) from error
        if isinstance(error, torch.OutOfMemoryError):
            return
        try:
            staging.mark().synchronize()
        except RuntimeError:
            what = str(error).partition("\n")[0]
            self._break(f"this peer's device is broken ({what})")
            advice = "an index is out of range on a GPU (a label or a token id); look at the data"
            raise MeshceeError(f"{what}; {advice if ASSERTED in what else 'the device is broken'}") from error

    def _break(self, why: str) -> None:
        """From any thread."""
        if not self.broken:
            self.broken = f"{why}; {'its process starts again' if self._restarts else 'start this peer again'}"
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._is_broken.set)
                self._loop.call_soon_threadsafe(
                    partial(log.error, "this peer's device computes no more", why=self.broken)
                )

    async def until_broken(self) -> str:
        """Why it is."""
        await self._is_broken.wait()
        return self.broken

    def let_go(self) -> None:
        """The work is over that was done here: nobody waits for a call that is still under way."""
        now_s = asyncio.get_running_loop().time()
        under_way = dict(self._under_way)
        self._left = {call: self._left.get(call, now_s) for call in under_way.values()}
        for thread in under_way:
            KERNELS.let_go(thread)

    async def free(self, hung_s: float) -> None:
        """Until each call that was let go has come back. Where one is `hung_s` late, or the device is broken: PeerLostError if it
        will be there again, else MeshceeError, so that a run goes on without it."""
        now_s = asyncio.get_running_loop().time
        while not self.broken and (left := [self._left[c] for c in list(self._under_way.values()) if c in self._left]):
            if (late_s := now_s() - min(left)) > hung_s:
                self._break(f"a call of earlier work has not come back from this peer's device for {late_s:.0f} s")
            else:
                await asyncio.sleep(LOOK_S)
        if self.broken:
            raise (PeerLostError if self._restarts else MeshceeError)(self.broken)
