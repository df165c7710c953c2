"""`meshcee peer --spot`: the notice of a cloud is heard from its metadata server, and the peer leaves in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from meshcee.errors import UsageError
from peers.cli.joining.notice import CLOUDS, Metadata, aws_notice, azure_notice, find, gcp_notice, heeded
from peers.cli.joining.service import service_of

ROOT = Path(__file__).resolve().parents[3]
AWS = '{"action": "terminate", "time": "2026-01-02T08:22:00Z"}'
PREEMPT = {
    "EventId": "a",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["vm-7"],
    "EventStatus": "Scheduled",
    "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT",
}


def azure(*events: dict[str, Any]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


class Cloud:
    """A metadata server that answers as one of the three does, each by its own rule of who may ask."""

    def __init__(self, kind: str) -> None:
        self.kind, self.page = kind, {"aws": "", "gcp": "FALSE", "azure": azure()}.get(kind, "")
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer(*cloud.put(self.path, dict(self.headers)))

            def do_GET(self) -> None:
                self._answer(*cloud.get(self.path, dict(self.headers)))

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.where = f"127.0.0.1:{self.server.server_address[1]}"

    def put(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        lasts = {name.lower() for name in headers} & {"x-aws-ec2-metadata-token-ttl-seconds"}
        return (200, "t0ken") if (self.kind, path) == ("aws", "/latest/api/token") and lasts else (404, "")

    def get(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        said = {name.lower(): value for name, value in headers.items()}
        may = {"aws": ("x-aws-ec2-metadata-token", "t0ken"), "gcp": ("metadata-flavor", "Google")}
        name, value = may.get(self.kind, ("metadata", "true"))
        if said.get(name) != value:
            return 401, "who are you"
        pages = {
            "aws": {"/latest/meta-data/instance-id": "i-1", "/latest/meta-data/spot/instance-action": self.page},
            "gcp": {"/computeMetadata/v1/instance/name": "vm", "/computeMetadata/v1/instance/preempted": self.page},
            "azure": {"/metadata/instance/compute/name": "vm-7", "/metadata/scheduledevents": self.page},
        }.get(self.kind, {})
        page = pages.get(path.partition("?")[0], "")
        return (200, page) if page else (404, "none")


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    made = Cloud(request.param)
    serving = Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    yield made
    made.server.shutdown()
    serving.join()
    made.server.server_close()


@pytest.mark.parametrize(
    ("cloud", "page", "why"),
    [
        ("aws", AWS, "terminate at 2026-01-02T08:22:00Z"),
        ("gcp", "TRUE", "it is preempted"),
        ("azure", azure(PREEMPT), "Preempt not before Mon, 19 Sep 2026 18:29:47 GMT"),
    ],
    indirect=["cloud"],
)
def test_a_notice_is_heard_by_the_rules_of_each_cloud(cloud: Cloud, page: str, why: str) -> None:
    metadata = Metadata(cloud.kind, f"http://{cloud.where}")
    assert metadata.name()
    assert metadata.notice() == ""
    cloud.page = page
    assert metadata.notice() == why


@pytest.mark.parametrize(
    "page", ["", "none", "[]", "{", '{"action": 1}', '{"Events": 3}', '{"Events": [3]}', "[" * 9999]
)
def test_any_other_page_is_no_notice(page: str) -> None:
    assert aws_notice(page) == gcp_notice(page) == azure_notice(page, "vm-7") == ""


def test_of_a_set_of_machines_only_this_one_counts_and_a_reboot_is_no_end() -> None:
    assert azure_notice(azure(PREEMPT), "vm-8") == ""
    assert azure_notice(azure({**PREEMPT, "EventType": "Reboot"}), "vm-7") == ""
    assert (
        azure_notice(azure({**PREEMPT, "EventType": "Terminate", "NotBefore": ""}), "vm-7")
        == "Terminate not before now"
    )


@pytest.mark.parametrize("cloud", ["aws", "gcp", "nobody"], indirect=True)
def test_auto_finds_the_cloud_that_answers_and_no_cloud_is_an_error(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.cli.joining.notice.ADDRESS", f"http://{cloud.where}")
    if cloud.kind == "nobody":
        for name in CLOUDS:
            with pytest.raises(UsageError, match=f"leave out --spot {name}"):
                find(name, {})
        return
    assert find("auto", {}).cloud == find(cloud.kind, {}).cloud == cloud.kind


def test_what_is_no_cloud_is_said_where_a_service_is_made() -> None:
    assert service_of({"--spot": "gcp"}).flags == ("--spot", "gcp")
    with pytest.raises(UsageError, match="aws, gcp, azure or auto"):
        service_of({"--spot": "moon"})


@pytest.mark.parametrize("cloud", ["gcp"], indirect=True)
async def test_a_peer_is_asked_once_it_can_be(cloud: Cloud) -> None:
    asked, told, slept = list[bool](), list[str](), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        cloud.page = "TRUE"
        await asyncio.sleep(0)

    done = asyncio.Event()

    def ask() -> bool:
        asked.append(len(asked) == 2)  # it joins until then
        if asked[-1]:
            done.set()
        return asked[-1]

    async with asyncio.timeout(20), heeded(Metadata("gcp", f"http://{cloud.where}"), ask, told.append, sleep):
        await done.wait()
    assert asked == [False, False, True]
    assert slept == [5.0, 1.0, 1.0]
    assert told == ["gcp takes this machine: it is preempted. This peer leaves"]


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["aws"], indirect=True)
def test_the_command_leaves_at_the_notice(cloud: Cloud, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MESHCEE_")}
    env |= {"MESHCEE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{cloud.where}/"}
    command = [sys.executable, "-m", "meshcee", "peer", "--spot", "auto", "--listen", "127.0.0.1:0", "--no-lan"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as peer:
        assert peer.stdout is not None
        try:
            lines = list[str]()
            for line in peer.stdout:
                lines.append(line)
                if " is up as " in line:
                    cloud.page = AWS
            assert peer.wait(60) == 0, lines
        finally:
            if peer.poll() is None:
                peer.send_signal(signal.SIGKILL)
    assert any("aws takes this machine: terminate at 2026-01-02T08:22:00Z. This peer leaves" in x for x in lines), lines
