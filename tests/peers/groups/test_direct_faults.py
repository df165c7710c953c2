"""What breaks before and in a sum through a process group: as over streams, and no thread and no socket is left of the group."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.groups.direct_sum import DirectSum
from tests.rig.faults import (
    HOW,
    LEFT_WITHIN_S,
    PROC,
    SHARED,
    STRUCK,
    Fault,
    assert_done_again,
    count_threads,
    falls_to,
    job_of,
    open_sockets,
    plan_of,
    trained,
    undisturbed,
)
from tests.rig.virtual_time import quiet, run

pytestmark = pytest.mark.skipif(not PROC.exists(), reason="threads and sockets are counted in /proc")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("kind", "sender", "receiver", "step"), [("meet", "p0", "p1", 0), ("whole", "p1", "p0", STRUCK)]
)
def test_a_fault_before_a_direct_sum_leaves_no_thread_and_no_socket(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sender: str,
    receiver: str,
    step: int,
    how: str,
) -> None:
    # One member may be in the call already, and then only that time ends it.
    monkeypatch.setattr("peers.groups.direct_sum.TIMEOUT_S", 1.0 if how == "stall" else 5.0)
    job, fault = job_of(0.5, True), Fault(how, kind, sender, receiver, step)
    with quiet():
        expected = undisturbed(SHARED, 0.5, True)
        before = count_threads()
        told = run(trained(job, plan_of(*SHARED), tmp_path, fault))
    assert told.left_s <= LEFT_WITHIN_S[how]
    assert step not in told.applied
    assert told.sockets_close
    assert falls_to(count_threads, before)
    assert not torch.distributed.is_initialized()
    assert_done_again(told, expected, step)


@pytest.mark.parametrize("how", ["its connections break", "no byte of it comes"])
def test_a_fault_in_a_direct_sum_does_not_keep_the_device_from_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """One member never takes part in the call that the other is in, and its own thread hangs until all is over."""
    with quiet():
        expected = undisturbed(SHARED, 0.5, True)
    monkeypatch.setattr("peers.groups.direct_sum.TIMEOUT_S", 1.0)
    fault, over, waits, sums = Fault("", "", "p1", "p0"), threading.Event(), [], itertools.count()
    reduce = DirectSum.reduce

    def struck(self: DirectSum, *args: Any) -> None:
        if self.peer != "p1" or next(sums) != STRUCK:
            reduce(self, *args)
            return
        fault.struck_s = 0.0  # what follows takes real time
        if how == "its connections break":
            self.process_group = None
        waits.append(over.wait(60))

    monkeypatch.setattr(DirectSum, "reduce", struck)
    with quiet():
        sockets, before = open_sockets(), count_threads()
        told = run(trained(job_of(0.5, True), plan_of(*SHARED), tmp_path, fault))
    assert waits == []  # it hangs still
    over.set()
    assert STRUCK not in told.applied
    assert falls_to(count_threads, before)
    assert falls_to(open_sockets, sockets)
    assert falls_to(lambda: 1 - len(waits), 0)  # the thread may be the last to go on
    assert waits == [True]
    assert_done_again(told, expected, STRUCK)
