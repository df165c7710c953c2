"""What a worker is for today: reading a graph of others and checking that it means what it says."""

from __future__ import annotations

from meshcee.capture import decode_program, prepare
from meshcee.config import Limits

__all__ = ["check", "prepare"]


def check(graph: bytes, limits: Limits) -> None:
    """GraphError when it may not be run."""
    decode_program(graph, limits)
