"""The page over HTTP on this machine: its files, the runs that there are, and a stream of what is new.

The idea: it listens on 127.0.0.1. Another user of the machine, or a page in the same browser, has no token; a name that somebody
makes point to this machine is no Host of ours. A slow browser gets the newest only. GET changes nothing. What may be changed
(acts) is asked by POST, with the token in a header. A cookie goes to every port of this machine, and no form can send a header.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from aiohttp import http_exceptions, web

from meshcee.errors import MeshceeError, NotPermittedError, UsageError
from meshcee.picture import Painter
from peers.cli.ui.acts import Act, Acts
from peers.cli.ui.page import FILES, POLICY, read_file
from peers.cli.ui.sources import Source

__all__ = ["EVERY_S", "Site", "serving"]

log = structlog.get_logger()

EVERY_S = 1.0  # between two looks at a source
STREAMS = 16  # at a time, of all browsers
SLOW_S = 20.0  # that a browser may take for what it is sent
SOURCES = 8  # that are open at a time
ENDS_WITHIN_S = 2.0
ACTS = 4  # that are under way at a time: a peer may take its time to leave
TOKEN_HEADER = "X-Meshcee-Token"
SILENT = logging.Logger("aiohttp", logging.CRITICAL + 1)  # a traceback for every byte that is no HTTP helps nobody
HOSTS = ("127.0.0.1", "localhost", "[::1]")
SECTIONS = ("mesh", "run", "plan", "limit", "helps", "moments", "gantt")  # of a picture, each sent when it has changed
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass
class Feed:
    """One source, and the newest of every section of its picture with a number that rises when it changes."""

    source: Source
    streams: int = 0
    sections: dict[str, tuple[int, Any, bytes]] = field(default_factory=dict)
    number: int = 0
    is_broken: bool = False  # which was logged
    is_new: asyncio.Condition = field(default_factory=asyncio.Condition)  # held by whoever reads or writes the painter

    async def refresh(self, at: float) -> bool:
        """Whether there is more to read at once."""
        async with self.is_new:
            more = await self.source.refresh()
            picture = self.source.painter.picture(at, curves=False)
            for name in SECTIONS:
                value = getattr(picture, name)
                known = self.sections.get(name)
                if known is None or (known[1] is not value and known[1] != value):
                    self.number += 1
                    self.sections[name] = self.number, value, msgspec.json.encode(value)
            self.is_new.notify_all()
        return more


@dataclass
class Known:
    """What one browser has."""

    number: int = 0
    stride: int = 0
    points: int = 0

    def news(self, feed: Feed, painter: Painter) -> bytes:
        """What it lacks, as one JSON object; b"" when that is nothing."""
        found = [
            f'"{name}":'.encode() + data for name, (number, _, data) in feed.sections.items() if number > self.number
        ]
        self.number = feed.number
        series = painter.series
        if series.stride != self.stride or len(series) < self.points:
            self.stride, self.points = series.stride, 0
        since = max(self.points - 1, 0)
        curves = series.curves(since)
        if len(series) and (len(series) != self.points or found):
            sent = {"since": since, **curves.__dict__}
            found.append(b'"curves":' + msgspec.json.encode(sent))
            self.points = len(series)
        return b"{" + b",".join(found) + b"}" if found else b""


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """An act: of the run with this id, or of what the page is about."""

    act: Act
    run: str = ""
    peer: str = ""


class Site:
    """What is served. `open` makes the source of a run by its id, MeshceeError where there is none; `runs` lists them.
    `acts` says what may be changed from the page of a run by its id, or, for "", of the first source.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        open: Callable[[str], Source] | None = None,
        runs: Callable[[], list[dict[str, Any]]] | None = None,
        acts: Callable[[str], Acts] = lambda run: Acts(),
        clock: Callable[[], float],
    ) -> None:
        self.token = secrets.token_urlsafe(18)
        self.port = 0
        self._open, self._runs, self._acts, self._clock = open, runs, acts, clock
        self._acting = 0
        self._feeds: dict[str, Feed] = {} if source is None else {"": Feed(source)}
        self._is_closing = asyncio.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_told, self._check], client_max_size=1024)
        app.router.add_get("/", self._page)
        app.router.add_get("/runs", self._list)
        app.router.add_get("/live", self._live)
        app.router.add_get("/picture.json", self._picture)
        app.router.add_get("/may", self._may)
        app.router.add_post("/do", self._do)
        app.router.add_get("/{name}", self._file)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        """Everybody is sent the last of it, and told that this is all."""
        self._is_closing.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_WITHIN_S / 2):
                for feed in self._feeds.values():
                    if feed.streams:
                        await self._bring_up(feed)

    async def keep(self) -> None:
        """Every feed that somebody looks at is brought up to date, for ever. What fails here never ends what is beside the page."""
        while True:
            for key, feed in list(self._feeds.items()):
                if feed.streams or not key:
                    await self._bring_up(feed)
                elif len(self._feeds) > SOURCES:
                    del self._feeds[key]
            await asyncio.sleep(EVERY_S)

    async def _bring_up(self, feed: Feed, *, at_once: bool = False) -> None:
        """To the newest; `at_once` as far as one look goes, so that a browser need not wait for the rest."""
        try:
            while await feed.refresh(self._clock()) and not at_once:
                pass
        except MeshceeError as error:  # of a mesh that is not there at the moment
            log.debug("the page waits", error=str(error))
        except Exception as error:
            if not feed.is_broken:
                feed.is_broken = True
                log.exception("the page cannot be drawn; please report this", error=repr(error))

    # -- who may ask ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        host = request.headers.get("Host", "").rpartition(":")
        name = host[0] if host[1] and host[2].isdigit() else request.headers.get("Host", "")
        if name not in HOSTS:
            return _refused(403, "this page answers to 127.0.0.1 only: open the address that was printed")
        acts = request.method == "POST" and request.path == "/do"
        if request.method not in ("GET", "HEAD") and not acts:
            return _refused(405, "this page is only asked by GET, and changes something by POST to /do alone")
        is_foreign = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        is_link = request.path == "/" and "token" in request.query  # to the page, which may stand anywhere
        if acts and request.headers.get("Origin", own := f"http://{request.headers['Host']}") != own:
            is_foreign = True
        if is_foreign and not is_link:
            return _refused(403, "another page may not ask for this")
        if acts:
            said = request.headers.get(TOKEN_HEADER, "")
        else:
            said = request.query.get("token") or request.cookies.get(self._cookie) or ""
        if not secrets.compare_digest(said.encode(errors="surrogateescape"), self.token.encode()):
            return _refused(403, "the token is missing or wrong: open the address that was printed")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return _refused(error.status, error.reason)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    @property
    def _cookie(self) -> str:
        return f"meshcee-ui-{self.port}"

    # -- what there is -------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        response = web.Response(text=read_file("index.html"), content_type="text/html")
        if "token" in request.query:  # from now on in a cookie, which no other site's page can send
            response.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict", path="/")
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in FILES:
            return _refused(404, "there is no such file")
        return web.Response(text=read_file(name), content_type=FILES[name])

    async def _list(self, request: web.Request) -> web.StreamResponse:
        found = await asyncio.to_thread(self._runs) if self._runs is not None else []
        return web.Response(
            body=msgspec.json.encode({"runs": found, "one": "" in self._feeds}), content_type="application/json"
        )

    async def _may(self, request: web.Request) -> web.StreamResponse:
        """What the page offers to whoever looks."""
        try:
            found = self._acts(request.query.get("run", ""))
        except MeshceeError:
            return _refused(404, "there is no such run")
        body = msgspec.json.encode({"role": found.role, "may": found.may})
        return web.Response(body=body, content_type="application/json")

    async def _do(self, request: web.Request) -> web.StreamResponse:
        """One act; the answer is a sentence for the person who asked, once it is done or has begun."""
        if request.content_type != "application/json":
            return _refused(415, "an act is asked for in JSON")
        if self._acting >= ACTS:
            return _refused(503, f"{ACTS} acts are under way: wait for one of them")
        self._acting += 1
        try:
            asked = msgspec.json.decode(await request.read(), type=_Asked)
            return web.Response(text=await self._acts(asked.run).do(asked.act, asked.peer))
        except msgspec.DecodeError as error:
            return _refused(400, f"no act is asked for: {error}")
        except NotPermittedError as error:
            return _refused(403, str(error))
        except MeshceeError as error:
            return _refused(409, str(error))
        finally:
            self._acting -= 1

    def _feed(self, request: web.Request) -> Feed | None:
        key = request.query.get("run", "")
        if key not in self._feeds:
            if self._open is None or not key:
                return None
            try:
                self._feeds[key] = Feed(self._open(key))
            except MeshceeError:
                return None
        return self._feeds[key]

    async def _picture(self, request: web.Request) -> web.StreamResponse:
        if (feed := self._feed(request)) is None:
            return _refused(404, "there is no such run")
        await self._bring_up(feed)
        async with feed.is_new:
            picture = feed.source.painter.picture(self._clock())
        return web.Response(body=msgspec.json.encode(picture), content_type="application/json")

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, until the browser goes or the site ends."""
        feed = self._feed(request)
        if feed is None:
            return _refused(404, "there is no such run")
        if sum(one.streams for one in self._feeds.values()) >= STREAMS:
            return _refused(503, f"{STREAMS} pages are open: close one")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        known = Known()
        feed.streams += 1
        try:
            if not feed.sections:
                await self._bring_up(feed, at_once=True)
            is_last = False
            while not is_last:
                is_last = self._is_closing.is_set()
                async with feed.is_new:
                    news = known.news(feed, feed.source.painter)
                if news:
                    async with asyncio.timeout(SLOW_S):
                        await response.write(b"data: " + news + b"\n\n")
                else:
                    await response.write(b":\n\n")  # a browser that has gone is heard of
                if is_last:
                    await response.write(b"event: over\ndata: {}\n\n")
                else:
                    await self._next(feed)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            feed.streams -= 1
        return response

    async def _next(self, feed: Feed) -> None:
        """Until there may be something new, or the site ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(10 * EVERY_S), feed.is_new:
                await feed.is_new.wait()


@web.middleware
async def _told(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What we do wrong is logged here, and what a client does wrong is not."""
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):
        raise
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
        return _refused(400, "what came with the request cannot be read")
    except Exception as error:
        log.exception("a question cannot be answered; please report this", error=repr(error))
        return _refused(500, "this cannot be answered: the terminal says why")


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"meshcee: {why}\n", headers=HEADERS)


@asynccontextmanager
async def serving(site: Site, port: int = 0) -> AsyncIterator[Site]:
    """The site, on this port of 127.0.0.1 or a free one, while the block runs. Ends within ENDS_WITHIN_S."""
    runner = web.AppRunner(
        site.app(),
        handle_signals=False,
        access_log=None,
        logger=SILENT,
        shutdown_timeout=ENDS_WITHIN_S,
        max_line_size=4096,
    )
    await runner.setup()
    try:
        listening = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await listening.start()
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else error
            raise UsageError(
                f"--port {port} cannot be had: {why}; name another port, or leave --port out for a free one"
            ) from error
        addresses: list[Any] = runner.addresses
        site.port = addresses[0][1]
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(site.keep())
            try:
                yield site
            finally:
                keeping.cancel()
    finally:
        await runner.cleanup()
