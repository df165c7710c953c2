"""`meshcee ui` and `meshcee report`.

The idea: --join shows a mesh, a RUN one of this machine's runs, neither of them the list of these. Who looks is an observer:
nothing is written, and nothing is asked of anybody but what a person asks for by a button (acts).
"""

from __future__ import annotations

import asyncio
import time
import webbrowser
from pathlib import Path
from typing import Any

import structlog

from dht import Directory
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.files import disk
from meshcee.files.home import Home, Run
from meshcee.files.steady import write_fact
from peers.cli.session import Screen, configure_logging, run_async
from peers.cli.ui.acts import Acts, drains, of_folder, role_in
from peers.cli.ui.page import self_contained
from peers.cli.ui.sources import FolderSource, MeshSource, Source, Tail
from peers.cli.ui.watching import needs_ui
from peers.node import JoinOptions, join

__all__ = ["run_report", "run_ui", "tell_when_alone"]

log = structlog.get_logger()

LISTED = 200  # runs
LAST_BYTES = 1 << 16  # of a run's reports, which hold the last


def run_ui(run: str | None, token: str | None, port: int, *, opens: bool, as_json: bool) -> None:
    configure_logging(as_json=as_json, level="warning")
    needs_ui()
    if run is not None and token is not None:
        raise UsageError("a RUN is of this machine, and --join shows a mesh: leave one of them out")
    home = Home()
    chosen = home.run(run) if run is not None else None
    over, up = asyncio.Event(), asyncio.Event()

    def polite() -> bool:
        over.set()
        return up.is_set()  # while it joins it can only be cancelled

    run_async(_ui(home, chosen, token, port, over, up, opens=opens, as_json=as_json), polite)


async def _ui(
    home: Home,
    run: Run | None,
    token: str | None,
    port: int,
    over: asyncio.Event,
    up: asyncio.Event,
    *,
    opens: bool,
    as_json: bool,
) -> None:
    from peers.cli.ui.server import Site, serving

    def opened(wanted: str) -> Source:
        return FolderSource(home.run(wanted))

    first, known = Acts("own"), dict[str, Acts]()

    def acts(wanted: str) -> Acts:
        if not wanted:
            return first
        found = home.run(wanted)
        return known.setdefault(found.id, of_folder(found))

    async def serve(source: Source | None) -> None:
        site = Site(source, open=opened, runs=lambda: listed(home), acts=acts, clock=time.time)
        async with serving(site, port):
            up.set()
            say(site.address, as_json=as_json)
            if opens:
                await asyncio.to_thread(webbrowser.open, site.address)
            await over.wait()

    if token is None:
        if run is not None:
            first = acts(run.id)
        await serve(FolderSource(run) if run is not None else None)
        return
    async with join(JoinOptions(token=token, name="ui", observes=True), home) as mesh:
        first = Acts(role_in(mesh.agent, home, token), {"drain": drains(mesh.agent)})
        mesh.agent.spawn(tell_when_alone(mesh.agent.directory))
        await serve(MeshSource(mesh.agent))


async def tell_when_alone(directory: Directory) -> None:
    """In the terminal, as long as this is not cancelled: the page may be in another window, or closed."""
    while True:
        await directory.wait_for(lambda: directory.peers)
        await directory.wait_for(lambda: not directory.peers)
        log.warning(Event.MESH_GONE)
        await directory.wait_for(lambda: directory.peers)
        log.warning(Event.MESH_BACK, peers=len(directory.peers))


def say(address: str, *, as_json: bool) -> None:
    """Where the page is."""
    if as_json:
        write_fact({"ui": address})
    else:
        Screen().print(f"the page: {address}\nCtrl-C ends it.", soft_wrap=True)


def listed(home: Home) -> list[dict[str, Any]]:
    """Runs of this machine, newest first, each with its last report."""
    found = []
    for run in home.runs()[:LISTED]:
        info, last = run.info, _last(run)
        found.append(
            {
                "run": run.id,
                "name": info.get("name"),
                "state": run.state,
                "started": info.get("started"),
                "step": last.get("step", -1) + 1,
                "steps": last.get("steps") or info.get("steps"),
                "loss": last.get("loss"),
            }
        )
    return found


def _last(run: Run) -> dict[str, Any]:
    """Of its reports the last, without reading them all."""
    try:
        size = run.report_file.stat().st_size
    except OSError:
        return {}
    source = FolderSource(run)
    for line in reversed(Tail(run.report_file, max(0, size - LAST_BYTES)).lines()):
        if (report := source.report(line)) is not None:
            return report
    return {}


def run_report(wanted: str, html: Path | None, *, as_json: bool) -> None:
    if (html is None) == (not as_json):
        raise UsageError("say what to write: --html FILE for a page, or --json for the same as data")
    if html is not None:
        disk.check_place(html, "--html")
    run = Home().run(wanted)
    painter = FolderSource(run).read_all()
    picture = painter.picture(time.time())
    if html is None:
        write_fact(picture.to_json())
        return
    disk.publish(html, self_contained(picture, run.id).encode())
    print(f"{run.id}: {html}")
