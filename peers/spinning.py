"""How long idle OpenMP threads spin: briefly, unless the user has said.

The idea: a thread that waits for its next kernel spins on a core, by default for milliseconds, and other processes on this machine
want that core. Spinning a little costs a lone process nothing. OpenMP reads its settings when torch is loaded: so this comes first.
"""

from __future__ import annotations

from collections.abc import MutableMapping

__all__ = ["spin_briefly"]

SETTINGS = {
    "GOMP_SPINCOUNT": "10000",  # GNU, in torch for Linux: some 10 us
    "KMP_BLOCKTIME": "1",  # LLVM, in torch for macOS: ms
}
OWN = (*SETTINGS, "OMP_WAIT_POLICY")


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Of this process and of those that it starts."""
    if not any(name in environment for name in OWN):
        environment.update(SETTINGS)
