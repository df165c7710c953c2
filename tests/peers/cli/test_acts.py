"""What a page may change: asked by POST with its token, refused in a sentence where the role does not allow it, and done as the
commands do it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dht import Role
from meshcee.callbacks import Control
from meshcee.errors import UsageError
from meshcee.files import disk
from meshcee.files.home import Home, Run
from peers.cli.runs import stop_run
from peers.cli.ui.acts import Acts, drains, of_folder, role_in
from peers.cli.ui.watching import page_of
from peers.cli.ui.wishes import Wishes, ask_to_stop, mark_stop, wish_checkpoint
from peers.node.departure import Departure
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from tests.peers.owner.test_recovery import a_mesh, captured_job, job_of
from tests.rig.disks import RefusingDisk
from tests.rig.virtual_time import run as on_virtual_time

aiohttp = pytest.importorskip("aiohttp", reason="the ui extra is not installed")

from peers.cli.ui.server import Site, serving  # noqa: E402 - it needs aiohttp
from tests.peers.cli.test_ui import a_run  # noqa: E402 - it needs aiohttp too


async def _told(_: str) -> str:
    return "it is done"


@asynccontextmanager
async def a_site(acts: Acts) -> AsyncIterator[tuple[Site, aiohttp.ClientSession]]:
    async with serving(Site(acts=lambda run: acts, clock=time.time)) as site, aiohttp.ClientSession() as session:
        yield site, session


async def post(
    site: Site, session: aiohttp.ClientSession, asked: Any, *, token: str | None = None, **headers: str
) -> tuple[int, str]:
    said = {
        "X-Meshcee-Token": site.token if token is None else token,
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    async with session.post(f"http://127.0.0.1:{site.port}/do", json=asked, headers=said) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("role", "may"), [("compute", []), ("own", ["stop", "checkpoint"]), ("admin", ["stop", "checkpoint", "drain"])]
)
async def test_the_role_decides_what_is_offered_and_done(role: Role, may: list[str]) -> None:
    async with a_site(Acts(role, {"stop": _told, "checkpoint": _told, "drain": _told})) as (site, session):
        async with session.get(f"http://127.0.0.1:{site.port}/may?token={site.token}") as answer:
            assert await answer.json() == {"role": role, "may": may}
        for act in ("stop", "checkpoint", "drain"):
            status, text = await post(site, session, {"act": act, "peer": "p"})
            if act in may:
                assert (status, text) == (200, "it is done")
            else:
                assert status == 403
                assert f"came by an invite to {role}" in text
                assert "meshcee invite --role" in text


async def test_nothing_is_done_without_the_token_by_a_get_or_for_another_page() -> None:
    done: list[str] = []

    async def note(peer: str) -> str:
        done.append(peer)
        return "done"

    stop = {"act": "stop"}
    async with a_site(Acts("admin", {"stop": note})) as (site, session):
        for token in ("", "x" * 24, site.token[:-1]):
            assert (await post(site, session, stop, token=token))[0] == 403
        cookie = {"Cookie": f"meshcee-ui-{site.port}={site.token}"}  # every port of this machine is sent it
        assert (await post(site, session, stop, token="", **cookie))[0] == 403
        async with session.post(f"{site.address.replace('/?', '/do?')}", json=stop) as answer:
            assert answer.status == 403, "a token in an address is in logs and histories"
        for headers in (
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
            {"Origin": "http://evil.example"},
            {"Origin": f"http://127.0.0.1:{site.port + 1}"},
            {"Origin": "null"},
            {"Host": "evil.example"},
        ):
            assert (await post(site, session, stop, **headers))[0] == 403, headers
        said = {"X-Meshcee-Token": site.token}
        for path in ("/do", "/do?act=stop", "/stop"):
            async with session.get(f"http://127.0.0.1:{site.port}{path}", headers=said) as answer:
                assert answer.status in (403, 404, 405)
        form = {**said, "Content-Type": "text/plain"}
        async with session.post(f"http://127.0.0.1:{site.port}/do", data='{"act": "stop"}', headers=form) as answer:
            assert answer.status == 415
        for wrong in ({}, [], {"act": "x"}, {"act": "stop", "peer": 1}, {"act": "stop", "more": 1}):
            assert (await post(site, session, wrong))[0] == 400, wrong
        assert (await post(site, session, {"act": "stop", "peer": "x" * 2000}))[0] == 413
        assert done == []
        own = {"Origin": f"http://127.0.0.1:{site.port}", "Sec_Fetch_Site": "same-origin"}
        assert (await post(site, session, {"act": "stop"}, **own))[0] == 200
        assert done == [""]


async def test_what_a_page_is_not_about_is_said() -> None:
    async with a_site(Acts("admin")) as (site, session):
        assert (await post(site, session, {"act": "drain"}))[0] == 409
        assert "meshcee ui last" in (await post(site, session, {"act": "stop"}))[1]


async def test_a_run_of_another_process_is_asked_through_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(Home(tmp_path))
    acts = of_folder(run)
    for act in ("stop", "checkpoint"):
        with pytest.raises(UsageError, match="not running"):
            await acts.do(act, "")
    with pytest.raises(UsageError, match="ui --join"):
        await acts.do("drain", "p")
    signals: list[int] = []

    class Process:
        pid = 1

        def send_signal(self, number: int) -> None:
            signals.append(number)

    with run.hold():
        monkeypatch.setattr(Run, "process", Process())
        for _ in range(3):
            assert "saves" in await acts.do("stop", "")
        assert signals == [signal.SIGINT], "a second one would end it without saving"
        with pytest.raises(UsageError, match="from Python"):
            await acts.do("checkpoint", "")
        wishes, control = Wishes(lambda: run), Control(saves=True)
        with pytest.raises(UsageError, match="nothing trains"):
            wishes.checkpoint()
        wishes.on_plan(control, None)
        wishes.look()
        assert "saves its state" in await acts.do("checkpoint", "")
        control.begin(6)
        assert not any(map(control.saves_before, range(9)))
        wishes.look()
        control.begin(7)
        wishes.look()
        assert [step for step in range(9) if control.saves_before(step)] == [7], "once for a wish"
        wish_checkpoint(run)
        wishes.close()
        with pytest.raises(UsageError, match="takes no wishes"):  # its folder is there, and nobody looks
            wish_checkpoint(run)
        later = Wishes(lambda: run)
        later.on_plan(again := Control(saves=True), None)
        later.look()
        later.close()
        assert not again.saves_before(0), "what an owner before has not heard is of no use now"
        later.look()  # as its thread does where Ctrl-C came between
        with pytest.raises(UsageError, match="takes no wishes"):
            wish_checkpoint(run)


def test_a_run_is_sent_one_signal_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `meshcee run stop`, or Stop on a page behind it, threw away what the run was saving."""
    run, signals = a_run(Home(tmp_path)), list[int]()
    monkeypatch.setattr(psutil.Process, "send_signal", lambda process, number: signals.append(number))
    with run.hold():
        for _ in range(2):
            assert ask_to_stop(run).pid == os.getpid()
        assert "saves" in asyncio.run(of_folder(run).do("stop", ""))
        assert signals == [signal.SIGINT]
    with run.hold():  # a number is used again, in a container always
        assert mark_stop(run, os.getpid())
        assert mark_stop(run, 1), "what another process was asked counts for nothing"
    with run.hold(), disk.using(RefusingDisk(tmp_path, errno.EROFS)):
        ask_to_stop(run)
    assert len(signals) == 2, "a folder that cannot be written keeps nobody from stopping a run"


def test_an_owner_that_ends_as_it_is_asked_to_stop_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))

    def gone(process: psutil.Process, number: int) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", gone)
    run = a_run(Home())
    with run.hold(), pytest.raises(UsageError, match="cannot be asked to stop"):
        stop_run("last")
    assert mark_stop(run, os.getpid()), "somebody else may have the right to"


@pytest.mark.slow
async def test_a_page_beside_training_saves_and_stops_its_run(tmp_path: Path) -> None:
    home, said = Home(tmp_path), list[str]()
    async with (
        a_mesh(home, 2) as (_, mesh),
        page_of(mesh, home, said.append, wanted=True) as page,
        aiohttp.ClientSession() as session,
    ):
        address, _, token = said[0].removeprefix("the page: ").partition("/?token=")

        async def ask(act: str) -> tuple[int, str]:
            headers = {"X-Meshcee-Token": token}
            async with session.post(f"{address}/do", json={"act": act}, headers=headers) as answer:
                return answer.status, await answer.text()

        assert (await ask("stop"))[0] == 409
        assert (await ask("checkpoint"))[0] == 409
        assert (await ask("drain"))[0] == 409, "all of its peers are in this process"
        job, saved = replace(job_of(), checkpoint_every=1000), 0
        async for report in mesh.train(job, captured=captured_job(), stages=2, callbacks=[page.wishes]):
            if report.step == 2:
                assert (await ask("checkpoint"))[0] == 200
                saved = report.step + 1
            if report.step == 9:
                assert (await ask("stop"))[0] == 200
        assert 10 <= len(mesh.result.losses) < job.steps
        assert mesh.result.stopped
        kept = [
            int(folder.name.rpartition("-")[2]) for folder in home.run("last").checkpoints.iterdir() if folder.is_dir()
        ]
        assert any(saved <= steps < 10 for steps in kept), kept


def test_a_peer_leaves_as_the_command_asks_it() -> None:
    async def main() -> tuple[str, list[str]]:
        loop = asyncio.get_running_loop()
        clocks = {"clock": loop.time, "monotonic": loop.time}
        async with InProcess(JoinOptions(), **clocks) as here, asyncio.TaskGroup() as group:  # type: ignore[arg-type]
            looks = await here.start("looks", lends=False, role="admin")
            lends = await here.start("lends")
            await looks.wait_for_devices(1)
            home = Home(Path("/nonexistent"))
            roles = [role_in(looks, home, None), role_in(lends, home, None)]
            departure = Departure(lends)

            async def leave() -> None:
                await departure.run()
                here.crash("lends")

            leaving = group.create_task(leave())
            with pytest.raises(UsageError, match="no peer"):
                await Acts("admin", {"drain": drains(looks)}).do("drain", "nobody")
            told = await Acts("admin", {"drain": drains(looks)}).do("drain", lends.peer_id)
            await leaving
            return told, list(roles)

    told, roles = on_virtual_time(main())
    assert told == "lends has gone; its job goes on without it"
    assert roles == ["admin", "own"]
