"""One process of a device, from its start to its end: its channel, what it writes, how it has ended.

The idea: it is started by exec with what computing needs of the peer's environment, and nothing else: a token may stand there. The
kernel ends it with the peer, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import subprocess
from pathlib import Path

from peers.device.worker.workers import launch
from peers.node.device_process.messages import FROM_DEVICE
from peers.transport.bridge import TAKES, Channel, pair

__all__ = ["Child"]

NAMES = ("PATH", "PYTHONPATH", "PYTHONHOME", "HOME", "LANG", "TMPDIR", "MESHCEE_LOG")
FAMILIES = (
    *("LC_", "LD_", "CUDA", "NVIDIA_", "MALLOC_", "ATEN_", "TORCH", "PYTORCH_", "ONEDNN_", "DNNL_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
)
# By the first ones libgomp pins threads, with a call that the process may not make: it would end. Pinned or not, bits are the
# same. By the last a GPU would compute other bits than those of its kernel class.
LEFT_OUT = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "NVIDIA_TF32_OVERRIDE"})
# numpy's library starts threads when it is imported, and torch for these machines has another one.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"} if platform.machine() == "x86_64" else {}
MOST_WRITTEN_BYTES = 4096  # that are kept of what it writes
ENDS_S = 0.5  # a process that has closed its channel has ended, or is about to


class Child:
    """Runs at once; ends with `end`, or with this process, or with the thread that started it."""

    def __init__(self) -> None:
        near, far = pair()
        self.channel = Channel(near, (*FROM_DEVICE, *TAKES))
        self.ready = asyncio.Event()
        self.silent_for = 0  # questions that were not answered
        self._why = ""  # we have ended it
        self._written = b""
        passed = {k: v for k, v in os.environ.items() if k in NAMES or k.startswith(FAMILIES)}
        env = {k: v for k, v in passed.items() if k not in LEFT_OUT} | ONE_THREAD
        try:
            self._process = launch("peers.node.device_process.program", far, env=env)
        except BaseException:
            self.channel.close()
            raise
        assert self._process.stderr is not None
        self._stderr = self._process.stderr
        os.set_blocking(self._stderr.fileno(), False)
        asyncio.get_running_loop().add_reader(self._stderr, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def had_s(self) -> float:
        """Seconds that its threads have run, or waited for a core: schedstat of proc(5). 0 where the kernel does not tell."""
        had_ns = 0
        for file in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # that thread has ended
                had_ns += sum(map(int, file.read_text().split()[:2]))
        return had_ns / 1e9

    @property
    def written(self) -> str:
        """The last line that it has written, for people."""
        lines = (line.strip() for line in reversed(self._written.decode(errors="replace").split("\n")))
        return "".join(c if c.isprintable() else "?" for c in next(filter(None, lines), ""))[:500]

    def kill(self, why: str = "") -> None:
        """`why`: it does not do what it should; `end` tells that, too."""
        self._why = self._why or (f"{why}, and " if why else "")
        self._process.kill()

    async def end(self) -> str:
        """How it has ended, or ends now: by which signal, or with which status. More than one may ask."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, ENDS_S)
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        finally:  # also where this is cancelled
            self._process.kill()
            self.channel.close()
            self._read()
        return self._why + (f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}")

    def _read(self) -> None:
        if self._stderr.closed:
            return
        try:
            found = os.read(self._stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._written = (self._written + found)[-MOST_WRITTEN_BYTES:]
        if not found:
            asyncio.get_running_loop().remove_reader(self._stderr)
            self._stderr.close()
