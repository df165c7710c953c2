"""Whatever is left to chance or to a machine's clock in a mesh, decided by one seed: the same storm each time.

The idea: on virtual time only a few things are not a function of the seed yet. They are keys and nonces, whom a peer gossips with,
the seconds that real computing takes, and the memory that happens to be free. All of them are replaced at their source.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht.election import CHANCE
from dht.signing import Identity

__all__ = ["REAL_S", "decided_by"]

REAL_S = time.perf_counter
TICK_S = 1e-7  # between two looks at the clock: nothing takes no time
FREE_BYTES = 1 << 33


@contextlib.contextmanager
def decided_by(seed: int) -> Iterator[None]:
    """Inside, on one loop of virtual time that starts no threads."""
    chance, ticks = random.Random(f"chance {seed}"), itertools.count()
    CHANCE.seed(seed)  # who claims first

    def virtual_s() -> float:
        try:
            return asyncio.get_running_loop().time() + TICK_S * next(ticks)
        except RuntimeError:  # outside of the loop
            return REAL_S()

    def generate(kind: type[Identity]) -> Identity:
        return kind(Ed25519PrivateKey.from_private_bytes(chance.randbytes(32)))

    gossips = SimpleNamespace(Random=lambda: random.Random(chance.random()))
    with (
        mock.patch.object(Identity, "generate", classmethod(generate)),
        mock.patch("dht.gossip.random", gossips),
        mock.patch("secrets.token_bytes", chance.randbytes),
        mock.patch("secrets.token_hex", lambda size: chance.randbytes(size).hex()),
        mock.patch("meshcee.files.limits.free_bytes", return_value=FREE_BYTES),
        mock.patch("time.perf_counter", virtual_s),
        mock.patch("peers.owner.folder.diary.time", SimpleNamespace(time=virtual_s)),  # whose digits members keep
    ):
        yield
