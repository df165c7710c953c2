"""The p2pd process that carries a peer's bytes: started, watched, restarted, and never left behind.

The idea: we start p2pd ourselves, under a launcher that outlives a kill -9 of ours just long enough to clean up, and
hivemind's P2P merely connects to it. So its output, its death and its sockets are in our hands. They lie in a private
folder, its last lines are in our errors, and after a restart it is the same peer on the same port.

    async with P2PDaemon(identity, listen=["0.0.0.0:0"], seeds=token.addresses) as daemon:
        daemon.on_restart(transport.rebind)
        ... daemon.p2p, daemon.peer_id, daemon.addresses
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

import structlog

from dht import Identity, dialable, peer_of
from dht.control import ENOUGH_S, P2P, P2PDaemonError, answers, at_once, attach, dial
from meshcee.config import Timeouts
from meshcee.errors import JoinError, UsageError
from meshcee.events import Event
from peers.transport.p2p import launcher
from peers.transport.p2p.interfaces import announced, reserve

__all__ = ["P2PDaemon"]

log = structlog.get_logger(__name__)

KEPT_LINES = 30  # of p2pd's output, for errors
KEPT_CHARS = 400  # of each line
START_S = 30.0  # until p2pd says its peer id: it reads a key and opens a port, but a machine may be busy
SILENT_S = 2.0  # until somebody who waits hears that no seed has answered
RESTARTS = 8  # in a row that fail before we give up
LOOK_EVERY_S = 5.0  # whether a p2pd that runs also answers
RETRY_S, MOST_RETRY_S = 0.5, 10.0  # until what failed after a restart is tried again
SILENT_LOOKS = 3  # unanswered in a row before it is killed and restarted
_SOCKET_CHARS = 60  # of a folder's name, so that sockets in it stay below the 104 bytes that macOS allows


C = TypeVar("C")
Restarted = Callable[[P2P], Awaitable[None]]


class P2PDaemon:
    """Lifetime is `async with`; entering raises JoinError when p2pd does not start or no seed answers."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str] = ("0.0.0.0:0",),
        announce: Sequence[str] = (),
        seeds: Sequence[str] = (),
        timeouts: Timeouts | None = None,
    ) -> None:
        if identity.path is None:
            raise UsageError("p2pd reads its identity from a file: use Identity.load_or_create")
        self.peer_id = identity.peer_id
        self.addresses: tuple[str, ...] = ()  # what others are told, ending in /p2p/ID
        self.seeds = tuple(dict.fromkeys(seeds))
        self.reached: frozenset[str] = frozenset()  # ids of the seeds that answered at the start
        self.timeouts = timeouts or Timeouts()
        self._identity_file = identity.path
        self._listen, self._announce = tuple(listen), tuple(announce)
        self.listening: tuple[str, ...] = ()  # where p2pd listens, ports filled in
        self._held = contextlib.ExitStack()  # the identity's lock, and the ports that p2pd is to have
        self._p2p: P2P | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.folder = ""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._callbacks: list[Restarted] = []
        self._moved: list[Callable[[], Awaitable[None]]] = []
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def p2p(self) -> P2P:
        """hivemind's handle of the p2pd that runs now; another one after each restart."""
        if self._p2p is None:
            raise UsageError("p2pd is not running: use it inside `async with P2PDaemon(...)`")
        return self._p2p

    @property
    def pid(self) -> int:
        """The launcher's process id; p2pd is its child."""
        assert self._process is not None
        return self._process.pid

    def on_restart(self, callback: Restarted) -> None:
        """Have `callback(p2p)` awaited, in the order of these calls, whenever p2pd was restarted."""
        self._callbacks.append(callback)

    def on_move(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Have `callback` awaited whenever this machine's own addresses, and so `addresses`, have changed."""
        self._moved.append(callback)

    # -- lifetime ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._held.enter_context(_locked(self._identity_file, self.peer_id))
        try:
            self.listening, keepers = reserve(self._listen)
            for keeper in keepers:
                self._held.enter_context(keeper)
            self.addresses = self._own_addresses()
            await self._group.__aenter__()
        except BaseException:
            self._held.close()
            raise
        try:
            await self._start()
            await self._join()
            self._tasks = [self._group.create_task(self._supervise()), self._group.create_task(self._look())]
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:  # a restart under way must not start another p2pd behind our back
                await asyncio.wait(self._tasks, timeout=self.timeouts.shutdown_s)
            await self._stop()
        finally:
            self._held.close()
            if not isinstance(error, asyncio.CancelledError):
                kind = error = trace = None  # the caller's own error goes on as it is, not inside a group
            try:
                await self._group.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:  # p2pd could not be restarted: say that, not "unhandled errors"
                if len(group.exceptions) == 1:
                    raise group.exceptions[0] from None
                raise

    # -- one p2pd ------------------------------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        binary = Path(str(files("hivemind.hivemind_cli"))) / "p2pd"
        if not os.access(binary, os.X_OK):
            raise JoinError(f"hivemind's p2pd is missing or not executable at {binary}: reinstall hivemind")
        options: dict[str, Any] = {
            "id": self._identity_file.absolute(),
            "listen": f"/unix{self.folder}/p2pd.sock",
            "hostAddrs": ",".join(self.listening),
            "dhtServer": 1,  # libp2p's own DHT finds the addresses of peers that are known by id only
            **dict.fromkeys(("natPortMap", "autonat", "relay", "autoRelay"), 0),  # slow to find out that there are none
            "announceAddrs": ",".join(a.removesuffix(f"/p2p/{self.peer_id}") for a in self.addresses),
            "connManager": 1,
            "idleTimeout": f"{START_S + 2 * self.timeouts.join_s:.0f}s",  # until hivemind connects
        }
        return [str(binary), *(f"-{name}={value}" for name, value in options.items())]

    async def _start(self) -> None:
        """Start p2pd and connect to it; JoinError with its last lines when that fails."""
        self.folder = tempfile.mkdtemp(prefix="meshcee-")
        if len(self.folder) > _SOCKET_CHARS:
            os.rmdir(self.folder)
            self.folder = tempfile.mkdtemp(prefix="meshcee-", dir="/tmp")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launcher.__file__, self.folder, str(os.getpid())),
                *self._command(),
                stdin=asyncio.subprocess.PIPE,  # ends with us, whatever happens
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={
                    "GOLOG_LOG_LEVEL": "error",
                    **os.environ,
                    "LIBP2P_TCP_REUSEPORT": "false",  # two that dial each other at once from these ports become one connection
                },
                start_new_session=True,  # a Ctrl-C in the terminal is for us to handle, not for p2pd
            )
        except OSError as error:
            launcher.remove(self.folder)
            raise JoinError(f"p2pd cannot be started ({error}): check the limits of this machine") from error
        started = asyncio.Event()
        self._group.create_task(self._read(self._process, started))
        try:
            async with asyncio.timeout(START_S):
                await started.wait()
                if self._process.returncode is not None or not any(x.startswith("Peer ID:") for x in self._lines):
                    raise JoinError(f"p2pd does not start; its last lines: {self._said()}")
                self._p2p = await attach(f"{self.folder}/p2pd.sock", self.folder)
        except TimeoutError as error:
            raise JoinError(f"p2pd did not start within {START_S:g} s; its last lines: {self._said()}") from error
        except (OSError, EOFError, P2PDaemonError) as error:
            raise JoinError(f"p2pd started but does not answer ({error!r}); its last lines: {self._said()}") from error
        if self._p2p.peer_id.to_base58() != self.peer_id:
            raise JoinError(
                f"p2pd is peer {self._p2p.peer_id}, not {self.peer_id}: was {self._identity_file} replaced?"
            )

    async def _read(self, process: asyncio.subprocess.Process, started: asyncio.Event) -> None:
        """Keep the last lines; `started` once p2pd has said its peer id, or nothing more will come."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-KEPT_CHARS:]
            for line in lines:
                text = line[:KEPT_CHARS].decode(errors="replace").strip()
                if text:
                    self._lines.append(text)
                    log.debug("p2pd", line=text)
                if text.startswith("Peer ID:"):
                    started.set()
        await process.wait()
        started.set()

    def _said(self) -> str:
        return " | ".join(list(self._lines)[-5:]) or "(none)"

    async def _stop(self) -> None:
        """End the p2pd that runs, if any. Bounded; what a hanging launcher leaves is removed here."""
        p2p, self._p2p = self._p2p, None
        process, self._process = self._process, None
        try:
            if p2p is not None:  # without a child of its own, this only closes connections and a socket
                await p2p.shutdown()
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.timeouts.shutdown_s):
                        await process.wait()
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # the kernel then kills p2pd
            if self.folder:
                launcher.remove(self.folder)

    # -- supervision ---------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Restart p2pd whenever it ends; JoinError when that fails too often."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.warning("p2pd ended and is restarted", code=code, said=self._said())
            await self._restart()
            await self._tell(self._process)

    async def _tell(self, process: asyncio.subprocess.Process) -> None:
        """Who counts on p2pd goes on over this one, and tries again after a failure: a machine that has just lost it is busy."""
        waiting, pause_s = list(self._callbacks), RETRY_S
        while waiting and process.returncode is None:
            waiting = await self._failing(waiting, lambda callback: callback(self.p2p))
            if waiting:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_RETRY_S)

    async def _failing(self, callbacks: Iterable[C], call: Callable[[C], Awaitable[None]]) -> list[C]:
        """Those that fail or hang: they are to be called again."""
        failing = []
        for callback in callbacks:
            try:
                async with asyncio.timeout(self.timeouts.join_s):
                    await call(callback)
            except Exception as error:
                log.warning("p2pd.callback_failed", error=repr(error))
                failing.append(callback)
        return failing

    async def _restart(self) -> None:
        for attempt in range(RESTARTS):
            await self._stop()
            self._lines.clear()
            try:
                await self._start()
            except JoinError as error:
                if attempt == RESTARTS - 1:
                    raise
                log.warning("p2pd.restart_failed", error=str(error))
                await asyncio.sleep(min(5.0, 0.1 * 2**attempt))
                continue
            await self.connect(self.seeds, ENOUGH_S)
            return

    def _own_addresses(self) -> tuple[str, ...]:
        return tuple(f"{a}/p2p/{self.peer_id}" for a in announced(self.listening, self._announce))

    async def _look(self) -> None:
        """A p2pd that runs but does not answer is as good as dead. A laptop in another network has other addresses."""
        silent, before = 0, self.addresses
        untold: list[Callable[[], Awaitable[None]]] = []
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            here = self._own_addresses()
            if here == before != self.addresses and dialable(here):  # p2pd listens on all of them, and need not know
                self.addresses, untold = here, self._moved
                log.info(Event.MOVED, addresses=here)
            untold = await self._failing(untold, lambda callback: callback())
            before = here
            process = self._process
            if self._p2p is None or process is None:
                continue
            silent = 0 if await answers(self._p2p, LOOK_EVERY_S) else silent + 1
            if silent >= SILENT_LOOKS and process is self._process and process.returncode is None:
                log.warning("p2pd does not answer and is killed", said=self._said())
                process.kill()
                silent = 0

    # -- seeds ---------------------------------------------------------------------------------------------------------

    async def connect(self, addresses: Iterable[str], enough_s: float | None = None) -> Mapping[str, str]:
        """Dial these peers (addresses ending in /p2p/ID), all at once; peer id -> what went wrong, "" for nothing.

        Where one has answered and `enough_s` is said, those that need more seconds are left out.
        """
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            peer = peer_of(address)
            if peer is not None and peer != self.peer_id:
                by_peer.setdefault(peer, []).append(address.removesuffix(f"/p2p/{peer}"))
        outcome: dict[str, str] = {}

        async def one(peer: str, where: list[str]) -> bool:
            outcome[peer] = await dial(self.p2p, peer, where, self.timeouts.dial_s)
            return not outcome[peer]

        await at_once(itertools.starmap(one, by_peer.items()), enough_s)
        return outcome

    async def _join(self) -> None:
        """Until one seed answers; the others are tried again later by whoever keeps the DHT together."""
        if not self.seeds:
            return
        if all(peer_of(seed) == self.peer_id for seed in self.seeds):
            raise JoinError(
                "the address to join is this peer's own: two peers with one identity, or its own token; "
                "give each peer an identity file of its own"
            )
        failures: dict[str, str] = {}
        pause_s = 0.5
        more = {"and_others": len(self.seeds) - 1} if len(self.seeds) > 1 else {}
        waiting = partial(log.warning, Event.NO_ANSWER_YET, at=self.seeds[0], **more, until_s=self.timeouts.join_s)
        silent = asyncio.get_running_loop().call_later(SILENT_S, waiting)
        try:
            async with asyncio.timeout(self.timeouts.join_s):
                while True:
                    outcome = await self.connect(self.seeds, ENOUGH_S)
                    self.reached = frozenset(peer for peer, problem in outcome.items() if not problem)
                    if self.reached:
                        return
                    for seed in self.seeds:
                        why = _reason(outcome.get(peer_of(seed) or "", ""), seed)
                        if why:  # libp2p's "dial backoff" hides the reason of the attempt before
                            failures[seed] = why
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 4.0)
        except TimeoutError as error:
            said = "".join(f"\n  {seed}: {failures.get(seed, 'no answer')}" for seed in self.seeds)
            raise JoinError(
                f"no peer of the mesh answered within {self.timeouts.join_s:g} s: check that one of them runs and that "
                f"its address and port are reachable from here, or ask for a new token{said}"
            ) from error
        finally:
            silent.cancel()


def _reason(problem: str, seed: str) -> str:
    """What libp2p says of one address, without its list of all addresses; "" when it says only that it waits."""
    where = re.sub(r"/p2p/[^/]+$", "", seed)
    match = re.search(rf"\[{re.escape(where)}(?:/p2p/[^\]]+)?\] ([^\n]+)", problem)
    why = match[1] if match else problem.removeprefix("failed to dial: ").split("\n")[0]
    return "" if "backoff" in why or why.endswith("all dials failed") else why


def _locked(identity_file: Path, peer_id: str) -> IO[bytes]:
    """The identity file, locked for as long as it stays open: two processes with one identity break each other."""
    file = open(identity_file, "rb")  # noqa: SIM115 - it stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise JoinError(
            f"another process on this machine already is peer {peer_id} (identity file {identity_file}): "
            "stop it, or give this peer an identity file of its own"
        ) from error
    return file
