"""`--spot`: hears from the cloud that it will take this machine back, and makes the peer leave in order before.

The idea: a machine asks its cloud's metadata server every few seconds, which is a page at an address of the machine's own. What an
answer means is a pure function. A server that does not answer at the start is the user's to mend; later, it is asked again.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from meshcee.errors import NotNowError, UsageError
from meshcee.files import loads
from peers.cli.session import printable

__all__ = ["CLOUDS", "Metadata", "aws_notice", "azure_notice", "find", "gcp_notice", "heeded", "known"]

log = structlog.get_logger(__name__)

ADDRESS = "http://169.254.169.254"
ASK_S, ASK_EVERY_S = 2.0, 5.0
MOST_BYTES = 64 << 10
# Of each cloud, the seconds between its notice and the end that are left for leaving; None: enough for any.
LEAVE_S: dict[str, float | None] = {"aws": None, "gcp": 20.0, "azure": 20.0}
CLOUDS = (*LEAVE_S, "auto")
PREEMPTS = ("Preempt", "Terminate")


@dataclass(frozen=True)
class Metadata:
    """A cloud's metadata server."""

    cloud: str
    base: str = ADDRESS

    @property
    def leave_s(self) -> float | None:
        return LEAVE_S[self.cloud]

    def name(self) -> str:
        """Of this machine, as the cloud calls it; "" where no server of that cloud answers. Blocks, for a few seconds at most."""
        if self.cloud == "aws":
            return self._aws("/latest/meta-data/instance-id")
        if self.cloud == "gcp":
            return self._gcp("/computeMetadata/v1/instance/name")
        return self._azure("/metadata/instance/compute/name?api-version=2021-02-01&format=text")

    def notice(self) -> str:
        """Why this machine will be taken, as the end of a sentence; "" while it stays. Blocks as `name` does."""
        if self.cloud == "aws":
            return aws_notice(self._aws("/latest/meta-data/spot/instance-action"))
        if self.cloud == "gcp":
            return gcp_notice(self._gcp("/computeMetadata/v1/instance/preempted"))
        return azure_notice(self._azure("/metadata/scheduledevents?api-version=2020-07-01"), self.name())

    def _aws(self, path: str) -> str:
        lasts = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = _ask(self.base + "/latest/api/token", lasts, "PUT")
        return _ask(self.base + path, {"X-aws-ec2-metadata-token": token.strip()}) if token else ""

    def _gcp(self, path: str) -> str:
        return _ask(self.base + path, {"Metadata-Flavor": "Google"})

    def _azure(self, path: str) -> str:
        return _ask(self.base + path, {"Metadata": "true"})


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    """What a page says; "" where it does not exist, or nobody answers in time. No proxy: the page is this machine's own."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, None, dict(headers), method=method), timeout=ASK_S) as answer:
            return bytes(answer.read(MOST_BYTES)).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError):  # a refusal by status is an OSError too
        return ""


def aws_notice(page: str) -> str:
    """Of /spot/instance-action, which is there only when there is a notice."""
    told = _object(page)
    return f"{told['action']} at {told.get('time', 'any moment')}" if isinstance(told.get("action"), str) else ""


def gcp_notice(page: str) -> str:
    """Of /instance/preempted."""
    return "it is preempted" if page.strip() == "TRUE" else ""


def azure_notice(page: str, name: str) -> str:
    """Of /scheduledevents, which tells of the other machines of a set too."""
    events = _object(page).get("Events")
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("EventType") in PREEMPTS and name in (event.get("Resources") or ()):
            return f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return ""


def _object(page: str) -> dict[str, Any]:
    try:
        found = loads(page)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def known(cloud: str) -> str:
    """Raises UsageError for what is no cloud."""
    if cloud not in CLOUDS:
        raise UsageError(f"--spot {cloud!r:.40} is no cloud: write {', '.join(CLOUDS[:-1])} or {CLOUDS[-1]}")
    return cloud


def find(cloud: str, environment: Mapping[str, str] = os.environ) -> Metadata:
    """The server that answers here. Raises NotNowError where none does: a notice would never be heard."""
    known(cloud)
    asked = [Metadata(one, _base(one, environment)) for one in (CLOUDS[:-1] if cloud == "auto" else (cloud,))]
    for one in asked:
        if one.name():
            return one
    where = ", ".join(dict.fromkeys(one.base for one in asked))
    raise NotNowError(
        f"no metadata server of {'a known cloud' if cloud == 'auto' else cloud} answers at {where}, so no notice would be heard: "
        f"leave out --spot {cloud} here, or let this process reach that address (in a container of AWS: a hop limit of 2)"
    )


def _base(cloud: str, environment: Mapping[str, str]) -> str:
    """As the cloud's own tools are told where it is."""
    if cloud == "aws" and (said := environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")):
        return said.rstrip("/")
    if cloud == "gcp" and (said := environment.get("GCE_METADATA_HOST")):
        return f"http://{said}"
    return ADDRESS


@asynccontextmanager
async def heeded(
    metadata: Metadata | None,
    ask: Callable[[], bool],
    tell: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[None]:
    """Inside, a notice is told and `ask` called, until it says that the peer could be asked to leave."""
    if metadata is None:
        yield
        return
    async with asyncio.TaskGroup() as group:
        heeding = group.create_task(_heed(metadata, ask, tell, sleep))
        yield
        heeding.cancel()


async def _heed(
    metadata: Metadata,
    ask: Callable[[], bool],
    tell: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    while not (why := await asyncio.to_thread(metadata.notice)):
        await sleep(ASK_EVERY_S)
    log.info("the cloud takes this machine", cloud=metadata.cloud, why=printable(why))
    tell(f"{metadata.cloud} takes this machine: {printable(why)}. This peer leaves")
    while not ask():  # it joins
        await sleep(1.0)
