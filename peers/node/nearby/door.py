"""Where a short code is exchanged: a TCP server that knows one code, and the other side's call of it.

The idea: strangers may connect, so everything is small and one at a time. A few wait, two of each address. Each has some seconds,
and a message is at most 2 KB. After a wrong guess there is a pause, and after three the code has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from types import TracebackType
from typing import Self

import structlog

from meshcee.errors import JoinError, MeshceeError, ProtocolError
from peers.node.nearby.code import Code, CodeWindow
from peers.node.nearby.exchange import MAX_MESSAGE_BYTES, DoorSide, JoinerSide, refusal

__all__ = ["Door", "Ending", "ask"]

log = structlog.get_logger()

SIDE_S = 5.0  # that an exchange may take
DIAL_S = 3.0
WAITING = 8  # connections beside the one that is served
MOST_FROM = 2  # one address
PAUSE_S, WRONG_PAUSE_S = 0.1, 1.0
PREFIX_BYTES = 2


class Ending(Enum):
    """How a code came to its end."""

    USED = "used"
    GUESSED = "guessed"  # wrongly, too often
    EXPIRED = "expired"


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(PREFIX_BYTES, "big") + data)
    await writer.drain()


async def _recv(reader: asyncio.StreamReader) -> bytes:
    try:
        size = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "big")
        if not 0 < size <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes: at most {MAX_MESSAGE_BYTES} are read")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise ProtocolError("the other side has hung up") from error


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Door:
    """Lets in who knows the code. Lifetime is `async with`; `wait` returns when the code has ended.

    invite  makes the line that is given for the code
    """

    def __init__(
        self,
        code: Code,
        label: str,
        peer_id: str,
        invite: Callable[[], str],
        window: CodeWindow,
        *,
        host: str = "0.0.0.0",
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.label = label
        self.window = window
        self.port = 0
        self._code, self._peer_id, self._invite = code, peer_id, invite
        self._host = host
        self._pause = pause
        self._waiting: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue(WAITING)
        self._from: Counter[str] = Counter()  # addresses of those who wait or are served
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, self.port, limit=2 * MAX_MESSAGE_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        await self._group.__aenter__()
        self._serving = self._group.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._serving.cancel()
        await self._group.__aexit__(kind, error, trace)
        await self._shut()

    async def wait(self) -> Ending:
        """Until somebody has used the code, it was guessed at too often, or its time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.window.left_s):
                await asyncio.shield(self._serving)
        if self.window.is_used:
            return Ending.USED
        return Ending.GUESSED if not self.window.guesses_left else Ending.EXPIRED

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("",))[0])
        if self._from[address] >= MOST_FROM or self._waiting.full():
            writer.transport.abort()
            return
        self._from[address] += 1
        self._waiting.put_nowait((reader, writer))

    async def _serve(self) -> None:
        """One after the other, while the code holds."""
        while not self.window.why_not:
            reader, writer = await self._waiting.get()
            wrong_before = self.window.wrong
            address = str((writer.get_extra_info("peername") or ("",))[0])
            try:
                async with asyncio.timeout(SIDE_S):
                    await self._exchange(reader, writer)
            except (MeshceeError, OSError) as error:  # TimeoutError is an OSError
                log.debug("an exchange of a short code came to nothing", address=address, why=repr(error))
            finally:
                await _hang_up(writer)
                self._from -= Counter([address])
            await self._pause(WRONG_PAUSE_S if self.window.wrong > wrong_before else PAUSE_S)
        await self._shut()

    async def _shut(self) -> None:
        """Nobody waits here any more."""
        self._server.close()
        while not self._waiting.empty():
            await _hang_up(self._waiting.get_nowait()[1])

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await _recv(reader)
        if why := self.window.why_not:
            await _send(writer, refusal(why))
            return
        side = DoorSide(self._code, self.label, self._peer_id)
        await _send(writer, await asyncio.to_thread(side.answer, hello))
        proof = await _recv(reader)
        if why := self.window.why_not:  # its time was over meanwhile
            await _send(writer, refusal(why))
        elif side.knows(proof):
            sealed = side.sealed(self._invite())
            self.window.use()
            await _send(writer, sealed)
        else:
            self.window.guessed_wrong()
            log.warning("a wrong code was tried", left=self.window.guesses_left)
            await _send(writer, refusal("", self.window.guesses_left, wrong=True))


async def ask(addresses: Sequence[str], port: int, label: str, code: Code, peer_id: str) -> str:
    """The invite for this code. NotPermittedError for a wrong one, JoinError where nobody answers.

    One address at most is told anything: whoever answers in the first machine's place has one guess.
    """
    problem = "it has no address"
    for address in addresses:
        try:
            async with asyncio.timeout(DIAL_S):
                reader, writer = await asyncio.open_connection(address, port, limit=2 * MAX_MESSAGE_BYTES)
        except OSError as error:
            problem = str(error) or "no answer in time"
            continue
        try:
            async with asyncio.timeout(2 * SIDE_S):
                side = JoinerSide(code, label, peer_id)
                await _send(writer, await asyncio.to_thread(side.hello))
                await _send(writer, await asyncio.to_thread(side.prove, await _recv(reader)))
                return side.open(await _recv(reader))
        except (ProtocolError, OSError) as error:
            raise _no_answer(str(error) or "no answer in time") from error
        finally:
            await _hang_up(writer)
    raise _no_answer(problem)


def _no_answer(why: str) -> JoinError:
    return JoinError(
        f"the machine that shows the code does not answer ({why}): is the code still shown there? "
        "`meshcee invite --code` shows another, and `meshcee peer --join LINE` needs none"
    )
