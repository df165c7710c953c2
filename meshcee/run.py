"""The front door of the Python API: `meshcee.train(job)` and `async with meshcee.join(...) as mesh`.

The idea: a script needs one call; everything else is behind it. This file and `__main__` are the only ones in the
package that import upward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from meshcee.errors import UsageError
from meshcee.job import Job

if TYPE_CHECKING:
    from peers.mesh import Mesh, Result
    from peers.owner import Report

__all__ = ["join", "train"]


@asynccontextmanager
async def join(
    address: str | None = None, *, local: int | None = None, compute: bool = False, device: str = "cpu"
) -> AsyncIterator[Mesh]:
    """Join a mesh as an owner; `compute` lends this machine too. `local=N` makes N peers in this process instead.

    >>> async with meshcee.join(token) as mesh:
    ...     async for report in mesh.train(job):
    ...         print(report.step, report.loss)
    """
    import structlog

    from peers.assemble import JoinOptions
    from peers.assemble import join as joined
    from peers.home import Home

    if not structlog.is_configured():  # a script that has not asked for logs gets warnings only
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

    if (address is None) == (local is None):
        raise UsageError("give the token or address of a mesh, or local=N for N peers in this process")
    options = JoinOptions(token=address, local=local, compute=compute, device=device)
    async with joined(options, Home() if address else None) as mesh:
        yield mesh


def train(
    job: Job,
    *,
    join: str | None = None,
    local: int | None = None,
    resume: str | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Result:
    """Train to the end and return losses, metrics and the state dict; without `join`, in this process on `local` peers.

    `resume` goes on with a run of this machine on that mesh: its id, "RUN@STEP" or "last".
    Raises a MeshceeError naming the cause. Not for use inside a running event loop: there, use `meshcee.join`.
    """

    async def main() -> Result:
        async with _joined(address=join, local=local if join or local else 1) as mesh:
            async for report in mesh.train(job, resume=resume):
                if on_report is not None:
                    on_report(report)
            return mesh.result

    try:
        return asyncio.run(main())
    except BaseExceptionGroup as group:
        from peers.commands.session import unwrap

        raise unwrap(group) from group


_joined = join
