"""What a run is asked to join and to go on with, looked at before the capture: a wrong word shall not cost its minutes."""

from __future__ import annotations

from typing import Any

from dht import Token
from meshcee.errors import UsageError
from meshcee.files import Home, disk
from meshcee.plan import Plan
from peers.state import CheckpointStore

__all__ = ["check_told", "look_for"]


def check_told(stages: Any, plan: Any) -> None:
    """UsageError for what cannot say how the stages are to be."""
    if stages is not None and (type(stages) is not int or stages < 1):
        raise UsageError(f"stages={stages!r:.40}: how many stages the plan shall have, as stages=2")
    if not isinstance(plan, Plan | None):
        raise UsageError(
            f"plan is a meshcee Plan, as result.plan, and not a {type(plan).__name__}: of a file write "
            "Plan.from_json(json.loads(open(FILE).read())), with `from meshcee.plan import Plan`"
        )


def look_for(token: str | None, home: Home | None, resume: str | None) -> None:
    """UsageError where a token cannot be read, `home` cannot be written, or a run or its checkpoint is not there.

    Who else is in the mesh shows later.
    """
    if token is not None:
        Token.parse(token)
    if home is not None:
        with home.writable():
            disk.make_folder(home.folder)
            disk.probe(home.folder / "incarnation")
    if resume is None:
        return
    if home is None:
        raise UsageError("only a run that this machine keeps can be resumed: join a mesh, or say keeps=True")
    name, _, step = resume.partition("@")
    run = home.run(name)
    if step:
        CheckpointStore.found(run).find(step, run.id)
