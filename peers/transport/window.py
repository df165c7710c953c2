"""Byte credits: how much a sender may have unread at the other end.

The idea: the receiver alone decides. It starts by lending a small window, enough for a handshake, widens it afterwards
(payloads and long headers wait for that), and lends again what its consumer has taken. The sender goes on while it has
any credit left, even if the next record is larger, so nothing is too large to pass. Hence the receiver tolerates one
record above the window and refuses more. A frame larger than the window passes because a consumer that waits takes
bytes as they arrive, before the frame is whole.
"""

from __future__ import annotations

from meshcee.errors import ProtocolError

__all__ = ["INITIAL_WINDOW_BYTES", "ReceiveWindow", "SendWindow"]

INITIAL_WINDOW_BYTES = 64 * 1024  # before the handshake; both sides know it, so it is part of the protocol
_MAX_CREDIT_BYTES = 1 << 40


class SendWindow:
    """The credits that the other side has lent us; the window is open while `available` is positive."""

    def __init__(self) -> None:
        self.available = INITIAL_WINDOW_BYTES
        self.accepted = False  # a first grant has come: the other side has accepted the handshake and takes payloads

    def spend(self, cost: int) -> None:
        self.available -= cost

    def grant(self, cost: int) -> None:
        if self.available + cost > _MAX_CREDIT_BYTES:
            raise ProtocolError("the other side grants an absurd number of credits")
        self.accepted = True
        self.available += cost


class ReceiveWindow:
    """What has arrived and was not taken, and what was taken and is not yet lent again.

    `release` and `widen` return the credit to send now, or 0. Grants are batched to a quarter of the window, which
    never starves the sender because the other three quarters are then his.
    """

    def __init__(self, record_bytes: int) -> None:
        self.window_bytes = INITIAL_WINDOW_BYTES
        self.unread_bytes = 0
        self._owed = 0  # taken, not yet granted
        self._partial = 0  # of the frame in assembly, not yet taken
        self._record_bytes = record_bytes  # by which a sender may overshoot: a head and a chunk
        self.frames_taken = 0  # since the handshake
        self.shaking = True  # until `widen`: a grant would tell the other side that its payloads are welcome

    def arrive(self, cost: int) -> None:
        self.unread_bytes += cost
        self._partial += cost
        if self.unread_bytes + self._owed > self.window_bytes + self._record_bytes:
            raise ProtocolError(
                f"the other side sent more than the {self.window_bytes} bytes that it was allowed to have unread"
            )

    def complete(self) -> int:
        """The cost of the frame in assembly so far, to be released when it is taken.

        Called when it is whole, but also when the consumer waits for it, or it was retracted. Then what has come of it
        is released at once, so that frames larger than the window pass.
        """
        cost, self._partial = self._partial, 0
        return cost

    def release(self, cost: int) -> int:
        self.unread_bytes -= cost
        self._owed += cost
        if self.shaking or self._owed * 4 < self.window_bytes:
            return 0
        grant, self._owed = self._owed, 0
        return grant

    def widen(self, window_bytes: int) -> int:
        # The first grant is never nothing: it opens the way for payloads.
        grant = max(int(self.shaking), window_bytes - self.window_bytes)
        self.shaking = False
        self.window_bytes += grant
        return grant
