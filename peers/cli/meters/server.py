"""A small HTTP server for machines that ask now and then: one request a connection, GET alone, everything bounded.

The idea: what is answered is a function of the path. A client that is slow, loud or one too many costs a few kilobytes for a few
seconds; when the server ends, so do its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import structlog

from meshcee.errors import UsageError

__all__ = ["Answer", "serving"]

log = structlog.get_logger()

REQUEST_BYTES = 8192
PATIENCE_S = 5.0  # with a request, and with who reads an answer
MOST_CLIENTS = 16  # at once

Answer = tuple[int, str, bytes]  # status, type of the content, content


@asynccontextmanager
async def serving(where: tuple[str, int], answer: Callable[[str], Answer | None]) -> AsyncIterator[tuple[str, int]]:
    """Answers paths while the block runs; None is not found. Yields where. UsageError where the address cannot be had."""
    host, port = where
    async with asyncio.TaskGroup() as group:
        asked: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(asked) >= MOST_CLIENTS:
                writer.transport.abort()
                return
            task = group.create_task(_serve(reader, writer, answer))
            asked.add(task)
            task.add_done_callback(asked.discard)

        try:
            server = await asyncio.start_server(connected, host, port, limit=REQUEST_BYTES)
        except (OSError, UnicodeError) as error:
            number = getattr(error, "errno", None)
            why = os.strerror(number).lower() if number and number > 0 else error
            raise UsageError(f"--metrics {host}:{port} cannot be had: {why}; name another address or port") from error
        try:
            found = server.sockets[0].getsockname()
            yield str(found[0]), int(found[1])
        finally:
            server.close()
            for task in asked:
                task.cancel()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[str], Answer | None]
) -> None:
    try:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = _answered(head, answer)
                lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}"]
                lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
                writer.write("\r\n".join(lines).encode() + (b"" if head.startswith(b"HEAD ") else body))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
    finally:
        writer.transport.abort()


def _answered(head: bytes, answer: Callable[[str], Answer | None]) -> Answer:
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return 400, "text/plain; charset=utf-8", b"this is no HTTP\n"
    if words[0] not in ("GET", "HEAD"):
        return 405, "text/plain; charset=utf-8", b"GET alone is answered\n"
    try:
        found = answer(words[1].partition("?")[0])
    except Exception as error:  # who looks never ends what is looked at
        log.exception("a question cannot be answered; please report this", error=repr(error))
        return 500, "text/plain; charset=utf-8", b"this cannot be answered: the log says why\n"
    return found or (404, "text/plain; charset=utf-8", b"there are /metrics and /health\n")
