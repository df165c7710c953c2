"""The page's server lets in who has the token and nobody else, changes nothing, and ends; what strangers write stays text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.files import dumps
from meshcee.files.home import Home, Run
from meshcee.picture import Painter, Picture
from peers.cli.main import main
from peers.cli.ui.command import listed, tell_when_alone
from peers.cli.ui.page import FILES, read_file
from peers.cli.ui.sources import FolderSource, Tail
from tests.picture.test_picture import plan, report, status

aiohttp = pytest.importorskip("aiohttp", reason="the ui extra is not installed")

from peers.cli.ui.server import Site, serving  # noqa: E402 - it needs aiohttp


def a_run(home: Home, steps: int = 5, **info: Any) -> Run:
    """A folder as an owner leaves it."""
    run = home.new_run("gpt")
    about = {
        "name": "gpt",
        "steps": 100,
        "started": 1.0,
        "plan": plan("a", "b").to_json(),
        "names": {"a": "ann"},
        **info,
    }
    (run.folder / "run.json").write_text(dumps(about))
    run.report_file.write_text("".join(dumps(report(step)) + "\n" for step in range(steps)))
    return run


@asynccontextmanager
async def a_site(home: Home, run: Run | None) -> AsyncIterator[tuple[Site, aiohttp.ClientSession]]:
    site = Site(
        FolderSource(run) if run is not None else None,
        open=lambda wanted: FolderSource(home.run(wanted)),
        runs=lambda: listed(home),
        clock=time.time,
    )
    async with serving(site), aiohttp.ClientSession() as session:
        yield site, session


def at(site: Site, path: str = "/") -> str:
    return f"http://127.0.0.1:{site.port}{path}"


async def test_who_has_no_token_sees_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with a_site(home, a_run(home)) as (site, session):
        for path in ("/", "/page.js", "/runs", "/live", "/picture.json", "/nothing"):
            for query in ("", "?token=", "?token=" + "x" * 32, "?token=" + site.token[:-1], "?token=ä"):
                async with session.get(at(site, path + query)) as answer:
                    assert answer.status == 403, path + query
                    assert "token" in await answer.text()
        async with session.get(at(site, "/picture.json"), cookies={f"meshcee-ui-{site.port}": "wrong"}) as answer:
            assert answer.status == 403
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        host = f"Host: 127.0.0.1:{site.port}\r\nConnection: close\r\n"
        writer.write(f"GET / HTTP/1.1\r\n{host}Cookie: meshcee-ui-{site.port}=".encode() + b"\xff\r\n\r\n")
        assert b" 403 " in await reader.readline()
        writer.close()


async def test_the_token_becomes_a_cookie_and_every_answer_has_its_policy(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with a_site(home, a_run(home)) as (site, session):
        assert site.address.startswith(f"http://127.0.0.1:{site.port}/?token=")
        async with session.get(site.address) as answer:
            assert answer.status == 200
            told = answer.headers["Set-Cookie"]
            assert "HttpOnly" in told
            assert "SameSite=Strict" in told
        cookie = {told.partition("=")[0]: site.token}
        for name in FILES:
            async with session.get(at(site, f"/{name}"), cookies=cookie) as answer:
                assert answer.status == 200
                assert await answer.text() == read_file(name)
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Cache-Control"] == "no-store"
        for name in ("secret.py", "..%2fserver.py", "%2e%2e/server.py", "uPlot.LICENSE", "static/page.js"):
            async with session.get(at(site, f"/{name}"), cookies=cookie) as answer:
                assert answer.status == 404


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("127.0.0.1:{port}", True),
        ("localhost:{port}", True),
        ("localhost:9000", True),  # through ssh -L
        ("[::1]:{port}", True),
        ("localhost", True),
        ("evil.example:{port}", False),
        ("evil.example", False),
        ("127.0.0.1.evil.example:{port}", False),
        ("127.0.0.1:80@evil.example", False),
        ("", False),
    ],
)
async def test_a_name_that_points_here_is_no_host_of_ours(tmp_path: Path, host: str, good: bool) -> None:
    home = Home(tmp_path)
    async with a_site(home, a_run(home)) as (site, session):
        headers = {"Host": host.format(port=site.port)}
        async with session.get(site.address, headers=headers) as answer:
            assert answer.status == (200 if good else 403)


async def test_it_only_shows(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with a_site(home, a_run(home)) as (site, session):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            async with session.request(method, site.address) as answer:
                assert answer.status == 405, method
        async with session.get(
            at(site, f"/picture.json?token={site.token}"), headers={"Sec-Fetch-Site": "cross-site"}
        ) as answer:
            assert answer.status == 403
        async with session.get(site.address, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 200  # a link in a mail or a terminal
        async with session.get(at(site, "/?token=" + "x" * 20_000)) as answer:
            assert answer.status in (400, 403, 414)


async def heard(session: aiohttp.ClientSession, address: str) -> AsyncIterator[dict[str, Any]]:
    async with session.get(address) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def test_a_stream_begins_with_all_and_goes_on_with_what_is_new(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run = a_run(home, steps=300)
    async with a_site(home, run) as (site, session), asyncio.timeout(20):
        stream = heard(session, at(site, f"/live?token={site.token}"))
        first = await anext(stream)
        assert first.keys() == {"mesh", "run", "plan", "limit", "helps", "moments", "gantt", "curves"}
        assert first["run"]["step"] == 300
        assert first["plan"]["seats"][0]["name"] == "ann"
        assert first["curves"]["since"] == 0
        assert len(first["curves"]["steps"]) == 300
        with run.report_file.open("a") as file:
            file.write(dumps(report(300)) + "\n" + dumps(report(301))[:20])
        (run.folder / "events.jsonl").write_text(dumps({"at": 2.0, "kind": "lost", "text": "ann was lost"}) + "\n")
        later = await anext(stream)
        assert later.keys() == {"run", "moments", "curves"}
        assert later["run"]["step"] == 301  # a line that is torn waits
        assert (later["curves"]["since"], later["curves"]["steps"]) == (299, [299, 300])
        assert later["moments"][0]["text"] == "ann was lost"
        await stream.aclose()


async def test_a_stream_is_told_that_all_is_over_and_the_server_ends_at_once(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run, lines = a_run(home), list[bytes]()
    async with aiohttp.ClientSession() as other:
        async with a_site(home, run) as (site, _):
            answer = await other.get(at(site, f"/live?token={site.token}"))
            await answer.content.readline()
            started = time.monotonic()
        assert time.monotonic() - started < 5
        lines = (await answer.content.read()).splitlines()
        with pytest.raises(aiohttp.ClientConnectionError):
            await other.get(at(site))
    assert b"event: over" in lines


async def test_runs_are_listed_and_each_has_its_stream(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run = a_run(home)
    async with a_site(home, None) as (site, session), asyncio.timeout(20):
        async with session.get(at(site, f"/runs?token={site.token}")) as answer:
            found = await answer.json()
        assert found["one"] is False
        assert [(one["run"], one["step"], one["state"]) for one in found["runs"]] == [(run.id, 5, "died")]
        stream = heard(session, at(site, f"/live?run={run.id}&token={site.token}"))
        assert (await anext(stream))["run"]["name"] == "gpt"
        await stream.aclose()
        for wanted in ("", "nothing", "../../etc", "%00"):
            async with session.get(at(site, f"/live?run={wanted}&token={site.token}")) as answer:
                assert answer.status == 404


class Seen:
    """A directory, as far as who looks waits for who is there."""

    def __init__(self) -> None:
        self.peers: dict[str, str] = {}
        self.changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], Any]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def see(self, *peers: str) -> None:
        self.peers = dict.fromkeys(peers, "")
        async with self.changed:
            self.changed.notify_all()
        await asyncio.sleep(0.01)


async def test_the_terminal_is_told_once_that_nobody_is_there_any_more_and_that_somebody_is_again() -> None:
    seen: Any = Seen()
    with capture_logs() as told:
        telling = asyncio.create_task(tell_when_alone(seen))
        for peers in ((), ("a", "b"), ("b",), (), (), ("b",)):
            await seen.see(*peers)
        telling.cancel()
    assert [line["event"] for line in told] == [Event.MESH_GONE, Event.MESH_BACK]


async def test_streams_are_few(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with a_site(home, a_run(home)) as (site, session), asyncio.timeout(20):
        address = at(site, f"/live?token={site.token}")
        opened = [await session.get(address) for _ in range(16)]
        async with session.get(address) as answer:
            assert answer.status == 503
        for one in opened:
            one.close()


async def test_a_port_that_is_taken_is_said() -> None:
    async with serving(Site(clock=time.time)) as site:
        with pytest.raises(
            UsageError, match=rf"--port {site.port} cannot be had: address already in use; name another port"
        ):
            async with serving(Site(clock=time.time), site.port):
                pass


RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"B\xffD / HTTP/1.1\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /do HTTP/1.1\r\nHost: localhost\r\nX-Meshcee-Token: %s\r\nContent-Type: application/json\r\n"
    b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
)


async def test_what_is_no_request_of_a_browser_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each cost a traceback in the terminal."""
    with capture_logs() as logged:
        async with serving(Site(clock=time.time)) as site, asyncio.timeout(20):
            for raw in RAW:
                reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
                writer.write(raw.replace(b"%s", site.token.encode()))
                assert b" 400 " in await reader.readline(), raw[:20]
                writer.close()
    assert (logged, caplog.records) == ([], [])


async def test_a_question_that_we_cannot_answer_is_logged() -> None:
    def runs() -> list[dict[str, Any]]:
        raise ZeroDivisionError

    async with serving(Site(runs=runs, clock=time.time)) as site, aiohttp.ClientSession() as session:
        with capture_logs() as logged:
            async with session.get(at(site, f"/runs?token={site.token}")) as answer:
                assert answer.status == 500
    assert [one["error"] for one in logged] == ["ZeroDivisionError()"]


class Broken:
    """A source whose painter has a bug."""

    painter = Painter()

    async def refresh(self) -> bool:
        raise ZeroDivisionError


async def test_a_page_that_cannot_be_drawn_disturbs_nothing_beside_it() -> None:
    with capture_logs() as logged:
        async with serving(Site(Broken(), clock=time.time)) as site, aiohttp.ClientSession() as session:
            async with session.get(at(site, f"/picture.json?token={site.token}")) as answer:
                assert answer.status == 200
            for _ in range(20):
                await asyncio.sleep(0.01)
    assert len(logged) == 1


def test_what_is_torn_or_written_by_others_is_passed_over(tmp_path: Path) -> None:
    run = a_run(Home(tmp_path))
    with run.report_file.open("ab") as file:
        file.write(
            b'\xff\xfe\n{"step": "x"}\n[]\n{"step": 5, "loss": NaN}\n'
            + b"[" * 100_000
            + b"\n"
            + b"x" * 3_000_000
            + b"\n"
        )
        file.write(dumps(report(7)).encode() + b"\n")
    (run.folder / "events.jsonl").write_bytes(
        b'{}\n"x"\n\xff\n' + b"[" * 100_000 + b'\n{"at": 1, "kind": "lost", "text": "t"}\n'
    )
    for name, text in (
        ("seen", "[1]"),
        ("mesh", '{"status": {"peers": 3}, "account": {"plan": 1}}'),
        ("trace", '{"traceEvents": [1, {}]}'),
    ):
        (run.folder / f"{name}.json").write_text(text)
    found = FolderSource(run).read_all().picture(1.0)
    assert found.run is not None
    assert found.run.step == 8
    assert [moment.text for moment in found.moments] == ["t"]
    (run.folder / "run.json").write_text('{"plan": {"pipelines": 3}, "names": [], "steps": "x"}')
    FolderSource(run).read_all()


def test_steps_that_an_audit_took_back_are_not_drawn(tmp_path: Path) -> None:
    run = a_run(Home(tmp_path), steps=0)
    follows = FolderSource(run)
    told = [report(step, loss=float(step)) for step in range(4)]
    for lines, losses in (
        (told, (0.0, 1.0, 2.0, 3.0)),
        ([{"step": 2, "loss": None}, {"step": 3, "loss": None}], (0.0, 1.0)),
        ([report(2, loss=9.0)], (0.0, 1.0, 9.0)),
    ):
        with run.report_file.open("a") as file:
            file.writelines(dumps(line) + "\n" for line in lines)
        for source in (follows, FolderSource(run)):
            found = source.read_all().picture(1.0)
            assert found.run is not None
            assert found.run.loss is not None
            assert found.curves.steps == tuple(range(len(losses)))
            assert found.curves.loss == losses
    assert (found.run.step, found.run.loss) == (3, 9.0)


def test_sentences_name_peers_where_errors_of_the_transport_say_the_end_of_an_id(tmp_path: Path) -> None:
    ann, ben, stranger = ("12D3KooW" + "x" * 36 + end for end in ("AnnAnn11", "BenBen22", "nobody33"))
    run = a_run(Home(tmp_path), names={ann: "ann"})
    told = status(ben)
    told["peers"][0]["name"] = "ben ..AnnAnn11"  # a name is not read again
    (run.folder / "mesh.json").write_text(dumps({"at": 1.0, "status": told}))
    text = f"ann was lost: the stream with ..{ann[-8:]} is over; ..{ben[-8:]} and ..{stranger[-8:]} are there"
    (run.folder / "events.jsonl").write_text(dumps({"at": 2.0, "kind": "lost", "text": text}) + "\n")
    (run.folder / "result.json").write_text(dumps({"state": "failed", "ended": 3.0, "error": f"..{ann[-8:]} left"}))
    found = FolderSource(run).read_all().picture(4.0)
    (said,) = [moment.text for moment in found.moments if moment.kind == "lost"]
    assert said == "ann was lost: the stream with ann is over; ben ..AnnAnn11 and ..nobody33 are there"
    assert found.run is not None
    assert found.run.error == "ann left"


def test_a_line_comes_once_and_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert tail.lines() == [b"two"]
    assert tail.lines() == []


def test_a_report_is_one_file_or_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    a_run(Home())
    with pytest.raises(SystemExit) as ended:
        main(["report", "last", "--html", str(tmp_path / "run.html")])
    assert ended.value.code == 0
    assert "uPlot" in (tmp_path / "run.html").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["report", "last", "--json"])
    assert Picture.from_json(json.loads(capsys.readouterr().out)).run is not None
    with pytest.raises(SystemExit) as refused:
        main(["report", "last"])
    assert refused.value.code == 2
    with pytest.raises(SystemExit) as both:
        main(["ui", "last", "--join", "x"])
    assert both.value.code == 2
