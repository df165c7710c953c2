"""What a member's report of failure means to the owner: the error, and how near it is to the cause.

The idea: several members fail when one does. The lowest rank is told to the user: 0 a cause, 1 a peer that the owner itself
has lost, 2 a peer that another one has lost, 3 silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshcee.errors import MeshceeError, PeerLostError
from peers import messages

__all__ = ["reported"]


def reported(
    header: Mapping[str, Any], peer_id: str, step: int, describe: Callable[[str], str]
) -> tuple[int, MeshceeError, tuple[str, ...]]:
    """Rank and error of a FAILED frame, and the peer that it blames if any; `describe` gives a peer's name and place."""
    error = messages.error_from(header)
    if isinstance(error, PeerLostError):
        lost = header.get("lost")
        who = describe(lost) if isinstance(lost, str) else "another stage"
        told = PeerLostError(f"peer {who} was lost in step {step}, before it was applied: {error}")
        return 2, told, (lost,) if isinstance(lost, str) else ()
    if type(error) is MeshceeError:  # nothing that it foresaw, so its message does not say where
        return 0, MeshceeError(f"peer {describe(peer_id)} failed in step {step}: {error}"), ()
    return 0, error, ()
