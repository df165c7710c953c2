"""A peer: owns everything that runs in it, in one TaskGroup, from the first announcement to a bounded shutdown.

The idea: the agent is handed a transport and a store and knows nothing of libp2p or hivemind, so the same code runs on
real machines, in one process and under virtual time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import structlog

from dht.directory import Directory
from dht.election import Elector, Lease
from dht.records import PeerRecord, RunRecord
from dht.signing import Identity, MeshKey
from dht.store import Store
from meshcee import __version__
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, MeshceeError, NotPermittedError
from meshcee.plan import Plan
from meshcee.profile import DeviceProfile
from peers.compute import Compute
from peers.coordinator import PlanService
from peers.member import Member
from peers.profiler import measure_device, probe_link, serve_probe
from peers.transport.base import StreamClosed, Transport

__all__ = ["Agent", "AgentOptions"]

log = structlog.get_logger()
