"""Multicast DNS: a machine that shows a short code says so on its network, and a newcomer hears of it.

The idea: what is announced is a random label, addresses and a port, and only as long as the code holds. It names neither mesh,
peer nor user. What is heard is from strangers: it is checked, and a few of it is enough.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import structlog
from zeroconf import Error as ZeroconfError
from zeroconf import InterfaceChoice, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

__all__ = ["SERVICE", "Found", "announced", "browse", "fresh_label"]

log = structlog.get_logger()

SERVICE = "_meshcee._tcp.local."  # what is announced is a TCP port
LABEL = re.compile(r"[a-z2-7]{8}")
MOST_FOUND = 8
MOST_ADDRESSES = 6
ASK_S = 1.0  # that a service is asked where it is
SETTLE_S = 0.4  # after the first is found
LIFE_S = 60  # that others may remember it

# The library warns of every odd packet of any device on the network.
logging.getLogger("zeroconf").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Found:
    """A machine on this network that shows a code."""

    label: str
    addresses: tuple[str, ...]
    port: int


def fresh_label() -> str:
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(8))


def _interfaces(only: Sequence[str] | None) -> Any:
    return list(only) if only else InterfaceChoice.All


def _addresses() -> list[str]:
    """Of this machine on its networks; loopback where there is nothing else."""
    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    far = [a for a in found if not ipaddress.ip_address(a).is_loopback]
    return (far or found)[:MOST_ADDRESSES]


@asynccontextmanager
async def announced(label: str, port: int, only: Sequence[str] | None = None) -> AsyncIterator[bool]:
    """Tell the network; whether that was possible. `only` these interfaces' addresses, which are what is told then."""
    try:
        zeroconf = AsyncZeroconf(interfaces=_interfaces(only))
    except OSError as error:  # no network, or somebody holds port 5353 for itself
        log.info("this network is not told of the code", why=str(error))
        yield False
        return
    try:
        info = AsyncServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port,
            parsed_addresses=list(only or _addresses()),
            properties={},
            server=f"{label}.local.",
            host_ttl=LIFE_S,
            other_ttl=LIFE_S,
        )
        try:
            await (await zeroconf.async_register_service(info))
        except (ZeroconfError, OSError) as error:
            log.info("this network is not told of the code", why=repr(error))
            yield False
        else:
            yield True
    finally:  # which says goodbye
        await zeroconf.async_close()


async def browse(for_s: float, only: Sequence[str] | None = None) -> list[Found]:
    """Machines that show a code; at most so long, and hardly longer than until the first is found."""
    names: dict[str, None] = {}
    heard = asyncio.Event()

    def hear(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            names.pop(name, None)
        elif len(names) < MOST_FOUND and LABEL.fullmatch(name.removesuffix(f".{SERVICE}")):
            names[name] = None
            heard.set()

    try:
        zeroconf = AsyncZeroconf(interfaces=_interfaces(only))
    except OSError as error:
        log.info("this network cannot be looked at", why=str(error))
        return []
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[hear])
        try:
            async with asyncio.timeout(for_s):
                await heard.wait()
            await asyncio.sleep(SETTLE_S)
        except TimeoutError:
            pass
        await browser.async_cancel()
        infos = [AsyncServiceInfo(SERVICE, name) for name in names]
        answers = await asyncio.gather(*(info.async_request(zeroconf.zeroconf, ASK_S * 1e3) for info in infos))
        found = [_found(info) for info, answered in zip(infos, answers, strict=True) if answered]
        return sorted((one for one in found if one is not None), key=lambda one: one.label)
    finally:
        await zeroconf.async_close()


def _found(info: AsyncServiceInfo) -> Found | None:
    """What a stranger has announced, if it makes sense."""
    label = info.name.removesuffix(f".{SERVICE}")
    addresses = []
    for text in info.parsed_scoped_addresses():
        try:
            ip = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            continue
        if not ip.is_multicast and not ip.is_unspecified:
            addresses.append(text)
    if not LABEL.fullmatch(label) or not info.port or not 0 < info.port < 1 << 16 or not addresses:
        return None
    return Found(label, tuple(addresses[:MOST_ADDRESSES]), info.port)
