"""`--metrics`: what a command puts around its peer, and tells of its run.

The idea: the address is had before the mesh is joined, so one that is taken is an error before anything runs. What is asked before
the peer is there is answered with 503.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from peers.cli.meters.health import Health, answered, of_mesh
from peers.cli.meters.server import Answer, serving

if TYPE_CHECKING:
    from meshcee.callbacks import Callback
    from meshcee.job import Job
    from peers.cli.meters.run import RunMeter
    from peers.mesh_view import MeshView
    from peers.node import Mesh

__all__ = ["Meters", "metered"]


class Meters:
    """`listens_on` is None where nobody asked for metrics: then it hears and answers nothing."""

    def __init__(self) -> None:
        self.listens_on: tuple[str, int] | None = None
        self._agent: MeshView | None = None
        self._run: RunMeter | None = None

    @asynccontextmanager
    async def of_peer(self, agent: MeshView) -> AsyncIterator[None]:
        """While this peer is in the mesh."""
        self._agent = agent
        try:
            yield
        finally:
            self._agent = None

    def of_run(self, mesh: Mesh, job: Job) -> tuple[Callback, ...]:
        """What is to hear of the run."""
        if self.listens_on is None:
            return ()
        from peers.cli.meters.run import RunMeter

        self._agent, self._run = mesh.agent, RunMeter(mesh, job)
        return (self._run,)

    def answer(self, path: str) -> Answer | None:
        if path == "/health":
            return answered(self._health())
        return self._metrics() if path == "/metrics" else None

    def _health(self) -> Health:
        if self._agent is None:
            return Health("the mesh is not joined yet", {})
        found = of_mesh(self._agent)
        if self._run is None or found.reason:
            return found
        run = self._run.health()
        return Health(run.reason, {**found.facts, **run.facts})

    def _metrics(self) -> Answer:
        from peers.cli.meters.mesh import MeshMeter, exposed

        run = self._run
        if self._agent is None:
            return exposed()
        own = MeshMeter(self._agent, lambda: run.members if run is not None else ())
        return exposed(own, *([run.registry] if run is not None else []))


@asynccontextmanager
async def metered(where: tuple[str, int] | None) -> AsyncIterator[Meters]:
    """Answers while the block runs, if an address was given."""
    meters = Meters()
    if where is None:
        yield meters
        return
    async with serving(where, meters.answer) as meters.listens_on:
        yield meters
