"""What is left on a member of an epoch that is over: copies that the next one may begin with.

The idea: nobody tells a member that no other epoch will come, so it waits for one, as long as an owner looks for a plan; and
longer while somebody reads, who may have left some of it for later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from meshcee.config import Timeouts
from peers import messages
from peers.fetch import serve
from peers.offer import Offer
from peers.snapshot import Held
from peers.transport.base import Stream, Transport

__all__ = ["Remains"]


class Remains:
    """Serves the stream `copies`."""

    def __init__(self, transport: Transport, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.held = Held()
        self.of = ""  # the run
        self._keep_s = timeouts.regroup_s  # as the owner of that run says
        self._forgetting: asyncio.TimerHandle | None = None
        self._readers = 0
        transport.serve("copies", self._serve)

    def for_epoch(self, offer: Offer) -> Held:
        """What is left of the last epoch of the same run; anything else is forgotten."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        if not offer.resumes or self.of != offer.run:
            offered = self.held.offered if self.of == offer.run else {}
            self.held = Held()
            self.held.offered = offered
        self.of, self._keep_s = offer.run, offer.terms.regroup_s
        return self.held

    def keep(self, offered: Mapping[str, torch.Tensor]) -> None:
        """What has come of an offer that led nowhere, in the place of what is kept of an earlier one."""
        if offered:
            self.held.offered = dict(offered)

    def over(self) -> None:
        """No epoch is running here; after an offer that was refused nothing changes."""
        if self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(self._keep_s, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        if self._readers:
            self.over()
        else:
            self.held = Held()

    async def _serve(self, stream: Stream) -> None:
        """For whoever has a stage of the same run to restore, or to keep."""
        self._readers += 1
        try:
            await serve(stream, self._find, self._timeouts)
        finally:
            self._readers -= 1
            if self._forgetting is not None:
                self._forgetting.cancel()
                self._forgetting = None
                self.over()

    def _find(self, header: Mapping[str, Any], digest: str) -> torch.Tensor | None:
        same = self.of == messages.run_of(header)
        return self.held.find(digest) if same else None
