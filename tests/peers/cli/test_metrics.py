"""`/metrics` and `/health` of a peer and of a run, asked over a socket; and the dashboard, whose every name exists."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")
pytest.importorskip("opentelemetry.sdk", reason="a library that only tests need is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from dht import RunRecord
from meshcee.callbacks import Control
from meshcee.errors import UsageError, unwrap
from meshcee.files import loads
from meshcee.files.home import Home
from meshcee.job import Job
from peers.cli.meters import Meters, address_of, metered
from peers.cli.meters.health import FIRST_S, of_run
from peers.cli.meters.run import RunMeter
from peers.cli.meters.server import MOST_CLIENTS, PATIENCE_S, REQUEST_BYTES, serving
from peers.owner import Result
from tests.peers.owner.test_recovery import a_mesh, captured_job, job_of, stage_of

ROOT = Path(__file__).resolve().parents[3]
HERE = ("127.0.0.1", 0)


async def ask(where: tuple[str, int] | None, request: bytes) -> tuple[int, bytes]:
    """The status and the content; 0 where the connection was closed without an answer."""
    assert where is not None
    reader, writer = await asyncio.open_connection(*where)
    try:
        writer.write(request)
        data = await reader.read()
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


async def get(where: tuple[str, int] | None, path: str) -> tuple[int, bytes]:
    return await ask(where, f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())


def figures(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Of each sample its values, by the values of its labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run told that lost a member: figures before and after, health at several moments, and its spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
        found = asyncio.run(lost_one(Home(tmp_path_factory.mktemp("home"))))
    return {**found, "spans": [span.name for span in exporter.get_finished_spans()]}


async def lost_one(home: Home) -> dict[str, Any]:
    found: dict[str, Any] = {"job": job_of()}
    async with metered(HERE) as meters, a_mesh(home, 3) as (here, mesh):
        where = meters.listens_on
        found["joining"] = await get(where, "/health")
        found["empty"] = await get(where, "/metrics")
        callbacks = (*meters.of_run(mesh, job_of()), "opentelemetry")
        found["waiting"] = await get(where, "/health")
        steps = []
        async for report in mesh.train(job_of(), captured=captured_job(), stages=3, callbacks=callbacks):
            steps.append(report)
            if report.step == 10:
                found["before"] = figures((await get(where, "/metrics"))[1])
                found["well"] = await get(where, "/health")
                here.crash(stage_of(here, mesh, 1))
        found["after"] = figures((await get(where, "/metrics"))[1])
        found["steps"], found["result"] = steps, mesh.result
        found["owner"] = mesh.agent.names()[mesh.agent.peer_id]
    with pytest.raises(OSError):
        await get(where, "/health")
    return found


@pytest.mark.slow
def test_a_run_tells_its_steps_loss_samples_and_epochs(told: dict[str, Any]) -> None:
    after, steps, job = told["after"], told["steps"], told["job"]
    assert isinstance(job, Job)
    assert after["meshcee_run_step_seconds_count"][()] == len(steps) == job.steps
    assert after["meshcee_run_step_seconds_sum"][()] == pytest.approx(sum(r.step_s for r in steps))
    assert after["meshcee_run_loss"][()] == steps[-1].loss
    assert after["meshcee_run_samples_total"][()] == len(steps) * job.batch_size
    assert after["meshcee_run_step"][()] == job.steps
    assert after["meshcee_run_epochs_total"][()] >= 2
    assert after["meshcee_run_recoveries_total"][("lost",)] == 1
    assert told["before"]["meshcee_run_recoveries_total"][("lost",)] == 0


@pytest.mark.slow
def test_a_run_has_spans_of_its_steps_epochs_and_recovery(told: dict[str, Any]) -> None:
    assert told["spans"].count("step") == told["job"].steps
    assert told["spans"].count("recovery") == 1
    assert told["spans"].count("epoch") == told["after"]["meshcee_run_epochs_total"][()]


def test_a_run_tells_its_links_bytes_memory_and_copies(told: dict[str, Any]) -> None:
    before = told["before"]
    names = {"p0", "p1", "p2"}
    links = before["meshcee_link_bandwidth_bytes_per_second"]
    assert links
    assert links.keys() == before["meshcee_link_latency_seconds"].keys()
    assert {name for pair in links for name in pair} <= {*names, told["owner"]}
    assert all(value > 0 for value in links.values())
    assert sum(before["meshcee_peers"].values()) == 3
    assert before["meshcee_coordinator_seen"][()] == 1
    assert before["meshcee_sent_bytes_total"][()] > 10_000
    assert told["after"]["meshcee_sent_bytes_total"][()] > before["meshcee_sent_bytes_total"][()]
    assert told["after"]["meshcee_received_bytes_total"][()] > before["meshcee_received_bytes_total"][()]
    assert before["meshcee_memory_resident_bytes"][()] > 1e7
    needed = {name: value for (name,), value in before["meshcee_memory_accounted_bytes"].items()}
    assert needed.keys() == names
    assert all(value > 0 for value in needed.values())
    ages = {place: age for (place,), age in told["after"]["meshcee_run_copies_age_seconds"].items()}
    assert ages
    assert all(0 <= age < 60 for age in ages.values())


def test_health_says_what_is_missing(told: dict[str, Any]) -> None:
    status, body = told["joining"]
    assert (status, loads(body)["ok"]) == (503, False)
    assert loads(body)["reason"] == "the mesh is not joined yet"
    assert told["empty"][0] == 200
    status, body = told["well"]
    assert status == 200, body
    assert loads(body)["ok"] is True
    assert loads(body)["step"] >= 10
    assert told["waiting"][0] in (200, 503)  # by whether a coordinator was seen in that moment


def test_a_run_that_stands_still_is_not_well() -> None:
    assert of_run(1.0, 0.5, 3, 10, "").reason == ""
    assert of_run(31.0, 0.5, 3, 10, "").reason == "no step has been done for 31 s"
    assert of_run(31.0, 60.0, 3, 10, "").reason == "", "its steps are long"
    assert of_run(60.0, None, 0, 10, "").reason == "", "it begins"
    assert "the first step" in of_run(FIRST_S + 1, None, 0, 10, "").reason
    assert of_run(0.1, 0.5, 3, 10, "ben").reason == "the run looks for a plan without ben"


def test_a_run_that_hangs_before_its_plan_is_not_well_and_one_that_waits_is() -> None:
    now_s, runs = [0.0], dict[str, Any]()
    mesh: Any = SimpleNamespace(
        training=None, result=Result(), agent=SimpleNamespace(peer_id="me", directory=SimpleNamespace(runs=runs))
    )
    meter = RunMeter(mesh, job_of(), monotonic=lambda: now_s[0])

    def after(seconds: float) -> str:
        now_s[0] += seconds
        return meter.health().reason

    assert after(9999) == "", "it stands by"
    mesh.training, runs["me"] = object(), RunRecord("me", 0.0, "job", state="waiting")
    assert [after(9999), after(1)] == ["", ""], "it waits for its turn"
    runs["me"] = RunRecord("me", 0.0, "job", state="running")
    assert after(9999) == "", "nobody has asked since its turn has come"
    assert after(FIRST_S - 1) == ""
    assert after(2) == "the job has no plan for 601 s"
    meter.on_plan(Control(), None)
    assert after(0) == ""


async def test_a_peer_without_a_coordinator_is_not_well(tmp_path: Path) -> None:
    meters = Meters()
    async with a_mesh(Home(tmp_path), 1) as (here, _), meters.of_peer(agent := here.agents["p0"]):
        await agent.coordinator()
        await agent.directory.refresh()
        status, _, body = meters.answer("/health") or (0, "", b"")
        assert status == 200, body
        assert loads(body) == {"ok": True, "peers": len(agent.directory.peers), "coordinator": "p0"}
        agent.elector.lease = None
        status, _, body = meters.answer("/health") or (0, "", b"")
        assert (status, loads(body)["reason"]) == (503, "no coordinator is seen")
    status, _, body = meters.answer("/health") or (0, "", b"")
    assert (status, loads(body)["reason"]) == (503, "the mesh is not joined yet"), "it is away"


# -- the server


def plain(path: str) -> tuple[int, str, bytes] | None:
    return (200, "text/plain", b"yes") if path == "/health" else None


async def test_requests_are_bounded_in_size_kind_and_number() -> None:
    async with serving(HERE, plain) as where:
        assert await get(where, "/health?a=b") == (200, b"yes")
        assert (await get(where, "/else"))[0] == 404
        assert (await ask(where, b"POST /health HTTP/1.1\r\n\r\n"))[0] == 405
        assert (await ask(where, b"HEAD /health HTTP/1.1\r\n\r\n")) == (200, b"")
        assert (await ask(where, b"\x16\x03\x01\r\n\r\n"))[0] == 400
        assert (await ask(where, b"GET /" + b"a" * 2 * REQUEST_BYTES))[0] == 0
        idle = [await asyncio.open_connection(*where) for _ in range(MOST_CLIENTS)]
        await asyncio.sleep(0.05)
        assert (await get(where, "/health"))[0] == 0, "one too many"
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.05)
        assert (await get(where, "/health"))[0] == 200


async def test_a_question_that_cannot_be_answered_ends_nothing() -> None:
    def broken(path: str) -> tuple[int, str, bytes]:
        raise ValueError(path)

    async with serving(HERE, broken) as where:
        assert (await get(where, "/health"))[0] == 500
        assert (await get(where, "/health"))[0] == 500


async def test_it_ends_at_once_whoever_is_connected() -> None:
    async with serving(HERE, plain) as where:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"GET /hea")
        await asyncio.sleep(0.02)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < PATIENCE_S / 2
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(*where)


async def test_an_address_that_is_taken_is_a_usage_error() -> None:
    with socket.create_server(HERE) as taken:
        where = taken.getsockname()
        with pytest.raises(BaseExceptionGroup) as failed:
            await metered(where).__aenter__()
    error = unwrap(failed.value)
    assert isinstance(error, UsageError)
    assert f"--metrics 127.0.0.1:{where[1]} cannot be had" in str(error)


def test_an_address_is_on_loopback_unless_it_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of(None) is None
    assert address_of("9464") == ("127.0.0.1", 9464)
    assert address_of(":9464") == ("127.0.0.1", 9464)
    assert address_of("0.0.0.0:1") == ("0.0.0.0", 1)
    assert address_of("[::1]:9464") == ("::1", 9464)
    for wrong in ("", "a", "1.2.3.4", "127.0.0.1:99999", "http://127.0.0.1:1", "٨٨"):
        with pytest.raises(UsageError, match="is no address"):
            address_of(wrong)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'meshcee\[metrics\]'"):
        address_of("9464")


# -- the dashboard


def expressions(panel: Any) -> Iterable[str]:
    """Everything under a key `expr`, and the queries of variables."""
    if isinstance(panel, dict):
        for key, value in panel.items():
            if key in ("expr", "query") and isinstance(value, str) and "meshcee" in value:
                yield value
            else:
                yield from expressions(value)
    elif isinstance(panel, list):
        for one in panel:
            yield from expressions(one)


def test_every_expression_of_the_dashboard_names_metrics_and_labels_that_exist(told: dict[str, Any]) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    found = list(expressions(board))
    assert len(found) >= 10
    known = told["after"].keys() | told["before"].keys()
    named = {name for text in found for name in re.findall(r"meshcee_\w+", text)}
    assert named - known == set()
    assert {"meshcee_run_loss", "meshcee_link_latency_seconds", "meshcee_run_recoveries_total"} <= named


def test_names_and_units_are_as_prometheus_wants_them(told: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "watch.md").read_text()
    own = {name for name in told["after"] if name.startswith("meshcee_") and not name.endswith(("_created", "_info"))}
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in own}
    assert [name for name in sorted(bases) if f"`{name}`" not in page] == []
    wrong = [
        name for name in bases if re.search(r"_(ms|kb|mib|percent)(_|$)", name) or not re.fullmatch(r"[a-z_]+", name)
    ]
    assert wrong == []
    assert "bytes" in "".join(bases)


def test_without_the_option_nothing_is_counted() -> None:
    assert Meters().of_run(None, None) == ()  # type: ignore[arg-type]


def test_the_clock_of_a_run_starts_with_its_plan_and_waits_for_an_evaluation() -> None:
    now, told = [0.0], SimpleNamespace(steps=10, eval_every=2)
    mesh = SimpleNamespace(training=None)
    meter: Any = RunMeter(cast(Any, mesh), cast(Any, told), monotonic=lambda: now[0])
    now[0] = FIRST_S + 1
    assert meter.health().reason == "", "it waits for its turn"
    told.batch_size = 1
    meter.on_plan(None, SimpleNamespace(peers=()))
    assert meter.health().reason == ""
    meter.on_step(None, SimpleNamespace(step=0, step_s=0.1, loss=1.0))
    now[0] += 100
    assert meter.health().reason == "", "it evaluates"
    meter.on_step(None, SimpleNamespace(step=1, step_s=0.1, loss=1.0))
    now[0] += 100
    assert meter.health().reason == "no step has been done for 100 s"
