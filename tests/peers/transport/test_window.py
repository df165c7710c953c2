"""Byte credits: a sender and a receiver that keep the rules never starve and never exceed the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcee.errors import ProtocolError
from peers.transport.window import INITIAL_WINDOW_BYTES, ReceiveWindow, SendWindow

RECORD = 1000


@given(
    st.integers(1, 200_000),
    st.lists(st.lists(st.integers(1, RECORD), min_size=1, max_size=30), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_everything_passes_and_the_unread_bytes_are_bounded(
    window: int, frames: list[list[int]], random: object
) -> None:
    """A model of the wire: records leave when there is credit, a consumer takes frames at random moments."""
    rng = random
    sender, receiver = SendWindow(), ReceiveWindow(RECORD)
    sender.grant(receiver.widen(window))
    records = [(cost, last) for frame in frames for cost, last in zip(frame, [False] * (len(frame) - 1) + [True])]
    inbox: list[int] = []
    taken, idle = 0, 0
    while taken < len(frames):
        waiting = rng.random() < 0.5  # type: ignore[attr-defined]
        if waiting and inbox:
            sender.grant(receiver.release(inbox.pop(0)))
            taken += 1
            idle = 0
        elif waiting:
            sender.grant(
                receiver.release(receiver.complete())
            )  # the consumer waits: what has come of the frame counts as taken
        if sender.available > 0 and records:
            cost, last = records.pop(0)
            sender.spend(cost)
            receiver.arrive(cost)
            idle = 0
            if last:
                inbox.append(receiver.complete())
        idle += 1
        assert idle < 1000, "starved"
        assert 0 <= receiver.unread_bytes <= max(window, INITIAL_WINDOW_BYTES) + RECORD + 1
    assert not records


def test_a_sender_that_ignores_the_window_is_refused() -> None:
    receiver = ReceiveWindow(RECORD)
    receiver.arrive(INITIAL_WINDOW_BYTES)
    receiver.arrive(RECORD)
    with pytest.raises(ProtocolError, match="allowed to have unread"):
        receiver.arrive(1)


def test_absurd_credit_is_refused() -> None:
    sender = SendWindow()
    sender.grant(1 << 39)
    with pytest.raises(ProtocolError, match="absurd"):
        sender.grant(1 << 39)


def test_grants_are_batched() -> None:
    receiver = ReceiveWindow(RECORD)
    window = receiver.widen(1_000_000) + INITIAL_WINDOW_BYTES
    grants = []
    for _ in range(1000):
        receiver.arrive(1000)
        if grant := receiver.release(receiver.complete()):
            grants.append(grant)
    assert window == 1_000_000
    assert grants == [250_000] * 4


def test_nothing_is_granted_before_the_handshake_is_accepted_since_the_first_grant_lets_payloads_come() -> None:
    receiver = ReceiveWindow(RECORD)
    receiver.arrive(INITIAL_WINDOW_BYTES // 2)  # long names, a key for a direct path
    assert receiver.release(receiver.complete()) == 0
    assert receiver.widen(4 * INITIAL_WINDOW_BYTES) > 0
    receiver.arrive(INITIAL_WINDOW_BYTES)
    assert receiver.release(receiver.complete()) == INITIAL_WINDOW_BYTES // 2 + INITIAL_WINDOW_BYTES, (
        "all of it is lent again"
    )
