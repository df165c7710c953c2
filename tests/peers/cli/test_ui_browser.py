"""The page in a real browser: a mesh trains, a peer is killed, the page shows loss, event and new plan; hostile names stay text.

Pictures of it are in pytest's folder of the test. With MESHCEE_DOCS_PICTURE=docs/ui.png the README's is written, by

    MESHCEE_DOCS_PICTURE=docs/ui.png .venv/bin/python -m pytest tests/peers/cli/test_ui_browser.py -k killed
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dht import Role
from meshcee.figures import BlockCost
from meshcee.files.home import Home
from meshcee.picture import Painter, picture_of_capture
from meshcee.picture.account import Account, plan_view
from peers.cli.ui.acts import NEEDS, Act, Acts
from peers.cli.ui.page import self_contained
from peers.cli.ui.sources import FolderSource
from peers.cli.ui.watching import page_of
from tests.peers.cli.test_page import HOSTILE, hostile_picture
from tests.peers.owner.test_recovery import a_mesh, captured_job, job_of, stage_of
from tests.picture.test_picture import plan, status

pytest.importorskip("aiohttp", reason="the ui extra is not installed")

from peers.cli.ui.server import EVERY_S, Site, serving
from tests.peers.cli.test_ui import a_run  # it needs aiohttp too
from tests.rig.browser import BROWSER, WHY_NOT, Page, a_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)]

STEPS, KILLED_AT, LOOKED_AT = 40, 16, 8
HAS_CURVE = "(() => { const c = document.querySelector('#loss canvas'); return c && c.width > 100; })()"
SEATS = "[...document.querySelectorAll('#pipelines .member strong')].map((e) => e.textContent).join(' ')"
EVENTS_END = "document.getElementById('card-moments').getBoundingClientRect().bottom + scrollY + 14"
MOMENTS = "document.getElementById('moments').innerText"


async def test_a_mesh_trains_and_a_peer_is_killed(tmp_path: Path) -> None:
    home, said = Home(tmp_path / "home"), list[str]()
    job = replace(job_of(), name="small-model", steps=STEPS, checkpoint_every=0)
    async with (
        a_page(tmp_path) as page,
        a_mesh(home, 4) as (here, mesh),
        page_of(mesh, home, said.append, wanted=True) as shown,
    ):
        await page.open(said[0].removeprefix("the page: "))
        killed = ""
        async for report in mesh.train(job, captured=captured_job(), stages=4, trace=shown.trace):
            await shown.hear(report.step, shown.trace)
            await asyncio.sleep(0.05)  # a model of this size would be over before anybody looks
            if report.step == LOOKED_AT:
                await page.until(HAS_CURVE)
                names = await page.until(SEATS)
                assert sorted(names.split()) == ["p0", "p1", "p2", "p3"]
            if report.step == KILLED_AT:
                killed = stage_of(here, mesh, 1)
                here.crash(killed)
        assert killed
        await page.until(f"{MOMENTS}.includes('{killed} was lost')")
        await page.until(f"{MOMENTS}.includes('goes on without {killed}')")
        left = await page.until(f"(() => {{ const s = {SEATS}; return !s.includes('{killed}') && s; }})()")
        assert len(left.split()) == 3
        await page.until(f"document.getElementById('tiles').innerText.includes('{STEPS} / {STEPS}')")
        for name in ("card-map", "card-links", "card-memory", "card-gantt", "card-peers", "card-limit"):
            assert await page.value(f"!document.getElementById('{name}').hidden"), name
        for name, dark, width in (("light", False, 1280), ("dark", True, 1280), ("phone", False, 390)):
            await page.look(dark=dark, width=width)
            assert await page.value("document.documentElement.scrollWidth <= innerWidth"), f"{name} scrolls sideways"
            assert re.findall(r"\.\.\w{8}\b|12D3KooW\w*", await page.value("document.body.innerText")) == [], (
                "ids, not names"
            )
            await page.picture(tmp_path / f"ui-{name}.png")
        await page.look(width=1280)
        await page.picture(tmp_path / "ui.png", height=await page.value(EVENTS_END), scale=0.75)
        elements = await page.value("document.querySelectorAll('*').length")
        assert elements < 3000
    assert mesh.result.losses
    if wanted := os.environ.get("MESHCEE_DOCS_PICTURE"):
        shutil.copy(tmp_path / "ui.png", wanted)
    assert page.errors == []
    asked = {address.split("/")[2] for address in page.asked if address.startswith("http")}
    assert len(asked) == 1
    assert asked.pop().startswith("127.0.0.1:")


async def test_the_page_says_the_last_and_that_it_is_over(tmp_path: Path) -> None:
    home, said = Home(tmp_path / "home"), list[str]()
    async with a_page(tmp_path) as page:
        async with a_mesh(home, 2) as (_, mesh), page_of(mesh, home, said.append, wanted=True):
            await page.open(said[0].removeprefix("the page: "))
            await page.until("document.getElementById('state').textContent")
            async for _ in mesh.train(job_of(), captured=captured_job(), stages=2):
                pass
        await page.until("document.getElementById('foot').textContent.includes('has ended')")
        assert await page.value("document.getElementById('state').textContent") == "done"
    async with (
        a_page(tmp_path / "again") as page,
        serving(Site(FolderSource(home.run("last")), clock=time.time)) as site,
    ):
        await page.open(site.address)
        await page.until("document.getElementById('state').textContent === 'done'")
        await page.until(HAS_CURVE)
        await page.value("document.getElementById('theme').focus()")
        await page.call(
            "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
        await page.until("document.documentElement.dataset.theme === 'light'")
        assert page.errors == []


KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}
FOCUSED = "document.activeElement.id || document.activeElement.dataset.act"


async def press(page: Page, key: str) -> None:
    code, text = KEYS[key]
    told = {"key": key, "code": key, "windowsVirtualKeyCode": code}
    await page.call("Input.dispatchKeyEvent", type="keyDown", **told, **({"text": text} if text else {}))
    await page.call("Input.dispatchKeyEvent", type="keyUp", **told)


async def test_buttons_ask_first_and_work_by_keyboard(tmp_path: Path) -> None:
    run, done = a_run(Home(tmp_path / "home")), list[tuple[str, str]]()

    def noting(act: Act) -> Callable[[str], Awaitable[str]]:
        async def note(peer: str) -> str:
            done.append((act, peer))
            return f"{act}: {HOSTILE}"

        return note

    source = FolderSource(run)
    told = status("a", "b")
    told["peers"][0]["name"] = HOSTILE
    source.painter.look(told, time.time())
    roles: dict[str, Role] = {"": "admin"}
    ways: dict[Act, Callable[[str], Awaitable[str]]] = {act: noting(act) for act in NEEDS}
    site = Site(source, acts=lambda of: Acts(roles[of], ways), clock=time.time)
    async with a_page(tmp_path) as page:
        with run.hold():
            async with serving(site):
                await page.open(site.address)
                await page.until("document.querySelectorAll('#acts button').length === 2")
                assert "token" not in await page.value("location.href")
                await page.value("document.querySelector('[data-act^=stop]').focus()")
                await press(page, "Enter")
                await page.until("document.getElementById('sure').open")
                assert await page.value(FOCUSED) == "sure-no", "what is pressed by accident changes nothing"
                await press(page, "Escape")
                await page.until("!document.getElementById('sure').open")
                assert await page.value(FOCUSED) == "stop "
                assert done == []
                await page.value("document.querySelector('[data-act=\"drain a\"]').focus()")
                source.painter.look(told, time.time())  # the table is drawn anew
                await asyncio.sleep(2 * EVERY_S)
                assert await page.value(FOCUSED) == "drain a"
                await press(page, "Enter")
                await page.until("document.getElementById('sure').open")
                await page.picture(tmp_path / "sure.png")
                await press(page, "Tab")
                assert await page.value(FOCUSED) == "sure-yes"
                await press(page, "Enter")
                await page.until("document.getElementById('told').textContent.startsWith('drain: ')")
                assert done == [("drain", "a")]
                assert await page.value("document.querySelectorAll('img').length") == 0
                roles[""] = "compute"  # an admin has changed it since
                await page.value("document.querySelector('[data-act^=checkpoint]').click()")
                await page.value("document.getElementById('sure-yes').click()")
                await page.until("document.getElementById('told').textContent.includes('came by an invite to compute')")
                assert await page.value("document.getElementById('told').className") == "error"
                await page.call("Page.reload")
                is_new = "performance.getEntriesByType('navigation')[0].type === 'reload'"
                await page.until(f"{is_new} && document.querySelectorAll('#peers tr').length === 3")
                assert "changes nothing here" in await page.value("document.getElementById('foot').textContent")
                assert await page.value("document.querySelectorAll('[data-act]').length") == 0
        assert done == [("drain", "a")]
    assert [error for error in page.errors if "403" not in error] == []


async def test_hostile_names_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(self_contained(hostile_picture(), HOSTILE))
    async with a_page(tmp_path) as page:
        await page.open(f"file://{file}")
        await page.until(HAS_CURVE)
        await page.until("document.querySelector('#metrics canvas') !== null")
        assert await page.value("document.querySelectorAll('img').length") == 0
        assert await page.value("document.querySelectorAll('script').length") == 3
        assert HOSTILE in await page.value("document.getElementById('peers').textContent")
        assert HOSTILE in await page.value("document.getElementById('moments').textContent")
        assert page.errors == []
        assert len(page.asked) == 1
        blocks = [BlockCost(HOSTILE, 1e9, 1 << 20, 1, 4096, 64, 64), BlockCost("head", 5e8, 1 << 10, 1, 64, 0, 0)]
        file.write_text(self_contained(picture_of_capture(blocks, time.time()), HOSTILE))
        await page.open(f"file://{file}")
        await page.until("document.querySelectorAll('#blocks tbody tr').length === 2")
        assert HOSTILE in await page.value("document.getElementById('blocks').textContent")
        assert "1.5 G" in await page.value("document.getElementById('tiles').textContent")
        assert await page.value("document.querySelectorAll('img').length") == 0
        await page.picture(tmp_path / "capture.png")
        assert page.errors == []


async def test_a_stage_shows_what_it_sends_beside_what_it_computes(tmp_path: Path) -> None:
    painter, step_s = Painter(), 1.0
    painter.begin("r", {"name": "small", "steps": 9, "plan": plan("a", "b", "c").to_json()})
    view = plan_view(plan("a", "b", "c"), {})
    crosses = [
        replace(edge, bytes_out=5e4, bytes_back=1e4, seconds_out=0.02, seconds_back=0.01) for edge in view.boundaries
    ]
    seats = tuple(replace(seat, needed_bytes=400 << 20, memory_bytes=1000 << 20) for seat in view.seats)
    painter.account(Account(replace(view, seats=seats, boundaries=tuple(crosses)), "").to_json())
    times = {"compute": 0.5, "wait": 0.3, "apply": 0.1, "code": 0.0, "total": step_s, "memory": 380 << 20}
    painter.seen({"members": dict.fromkeys("abc", times), "rates": [["a", "b", 1e6], ["b", "a", 1e6]]})
    file = tmp_path / "run.html"
    file.write_text(self_contained(painter.picture(2.0), "small"))
    sent = "[...document.querySelectorAll('.sends')].map((bar) => [bar.title, bar.firstChild.style.width])"
    async with a_page(tmp_path) as page:
        await page.open(f"file://{file}")
        assert "sends" in await page.until("document.getElementById('plan-legend').textContent")
        # Four micro-batches: to b at the rate that was seen, and to c as long as was expected.
        assert await page.value(sent) == [
            ["a sends 200 ms of a step", "20%"],
            ["b sends 120 ms of a step", "12%"],  # 4 * 0.01 s back to a, 4 * 0.02 s on to c
            ["c sends 40 ms of a step", "4%"],
        ]
        held = "[...document.querySelectorAll('#memory .bar')].map((bar) => bar.getAttribute('aria-label'))"
        assert (await page.value(held))[:2] == ["a needs 40 % of its memory", "a took 38 % of its memory"]
        assert page.errors == []
