"""What a run is asked to join and to go on with, looked at before the capture: a wrong word shall not cost its minutes."""

from __future__ import annotations

from dht import Token
from meshcee.errors import UsageError
from meshcee.files import Home
from peers.state import CheckpointStore

__all__ = ["look_for"]


def look_for(token: str | None, home: Home | None, resume: str | None) -> None:
    """UsageError where a token cannot be read, or a run or its checkpoint is not in `home`; who else is there shows later."""
    if token is not None:
        Token.parse(token)
    if resume is None:
        return
    if home is None:
        raise UsageError("only a run that this machine keeps can be resumed: join a mesh, or say keeps=True")
    name, _, step = resume.partition("@")
    run = home.run(name)
    if step:
        CheckpointStore.found(run).find(step, run.id)
