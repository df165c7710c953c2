"""Graphs of others are read and checked in a process that has nothing to lose: no keys, no files, no network.

A peer of a real mesh keeps one such process ready. What crashes, hangs or grows in it is one graph refused, and the peer
lives on. Linux only; elsewhere, and for peers in one process, `peers.device.Graphs` checks in the peer's own.
"""

from peers.device.worker.workers import Workers, launch, read_exactly

__all__ = ["Workers", "launch", "read_exactly"]
