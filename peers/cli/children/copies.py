"""The command's side of copies: it starts their source, asks for copies, and hears of their ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence

from meshcee.errors import MeshceeError
from meshcee.files import dumps
from peers.cli.children.source import PEER
from peers.device.worker import launch, read_exactly
from peers.device.worker.child import NUMBER
from peers.device.worker.packets import LENGTH

__all__ = ["Copies", "Copy"]

MODULES = ("peers.cli.main", "peers.cli.peer", "peers.node.assemble", "hivemind", "uvloop")
MOST_LINE = 16 << 20  # bytes
COPY_S = 600.0  # that a copy may take, the first import on a busy machine included
# What libraries read when they are loaded, and what a copy cannot be told later. Nothing else: a secret may stand there.
READ_EARLY = re.compile(
    "PATH$|HOME$|LANG|LC_|LD_|TMPDIR|PYTHON|MALLOC_|TORCH|PYTORCH_|ATEN_|OMP_|MKL_|KMP_|GOMP_|ONEDNN_|DNNL_"
)
SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENDED_WITHOUT_A_WORD = -int(signal.SIGKILL)


class Copy:
    """A process, as `asyncio.subprocess.Process` tells of one. `stdout` is what it prints."""

    def __init__(self, pid: int, channel: socket.socket, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._channel = channel
        self._over = asyncio.Event()
        asyncio.get_running_loop().add_reader(channel, self._hear)

    async def wait(self) -> int:
        await self._over.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _hear(self) -> None:
        try:
            said = self._channel.recv(NUMBER.size)
        except OSError:
            said = b""
        # Nothing is said where the source has ended: then this process is ending, too.
        self.returncode = NUMBER.unpack(said)[0] if len(said) == NUMBER.size else ENDED_WITHOUT_A_WORD
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._over.set()


class Copies:
    """The source of copies: `end` ends it, and those that still run with it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        early = {name: value for name, value in environment.items() if READ_EARLY.match(name)}
        early |= SINGLE  # no library of this process may have threads; a copy says how many it takes
        try:
            self._process = launch("peers.cli.children.source", theirs, *MODULES, env=early, stderr=None)
        except BaseException:
            self._control.close()
            raise

    async def copy(self, name: str, arguments: Sequence[str], *, env: Mapping[str, str], stderr: int) -> Copy:
        """`meshcee ARGUMENTS` in a process of its own that `ps` shows under this name. MeshceeError when there is none."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read, write = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COPY_S):
                with theirs:
                    socket.send_fds(self._control, [PEER], [theirs.fileno()])
                (pid,) = NUMBER.unpack(await read_exactly(ours, NUMBER.size))
                told: dict[str, object] = {"name": name, "arguments": list(arguments), "folder": os.getcwd()}
                told["environment"] = {**env, "MESHCEE_PARENT": str(self._process.pid)}
                body = dumps(told).encode()
                socket.send_fds(ours, [LENGTH.pack(len(body))], [null, write, stderr])
                await loop.sock_sendall(ours, body)
        except BaseException as error:
            ours.close()  # the copy ends when it is told nothing
            os.close(read)
            if isinstance(error, (OSError, EOFError)):  # TimeoutError is an OSError
                raise MeshceeError(f"{name} could not be started: {str(error) or type(error).__name__}") from error
            raise
        finally:
            os.close(write)
            os.close(null)
        stdout = asyncio.StreamReader(limit=MOST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(read, "rb", 0))
        return Copy(pid, ours, stdout)

    async def end(self) -> None:
        self._control.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
