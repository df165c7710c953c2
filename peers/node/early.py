"""How a process takes part in a mesh, and what is looked at before the capture: a wrong word shall not cost its minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dht import Token
from meshcee.config import Timeouts
from meshcee.errors import UsageError
from meshcee.plan import Plan
from peers.device import Pace

if TYPE_CHECKING:
    from meshcee.files.home import Home

__all__ = ["JoinOptions", "check_told", "look_for"]


@dataclass(frozen=True)
class JoinOptions:
    """How to take part. `local` means that many peers inside this process instead of a mesh."""

    token: str | None = None
    local: int | None = None
    name: str = "owner"
    compute: bool = False
    observes: bool = False
    device: str = "cpu"
    memory_bytes: int | None = None
    region: str | None = None
    listen: str = "0.0.0.0:0"
    announce: str | None = None
    direct_port: int = 0  # -1: none
    relay: bool = True  # a peer that computes passes on streams between members who cannot reach each other
    identity: Path | None = None
    open: bool = False
    valid_s: float = 7 * 86400
    shape: str | None = None
    shape_device: str | None = None
    jitter_s: float = 0.0
    pace: Pace | None = None  # emulate the device only
    regroup_s: float | None = None
    leave_s: float | None = None
    threads_said: bool = False  # by the user, who has set torch's number
    device_process: bool = False  # the device computes in a process of its own
    direct_sums: bool = False  # jobs that ask for them may open connections from here that are not encrypted
    datasets: tuple[str, ...] = ()  # NAME=FILE.py:FUNCTION, that jobs of others may be fed from here
    measures: bool = True  # what peers in this process measure; not where a plan is given and nothing may change it
    shelves: bool = True  # peers in this process keep journals; not where no run has a folder

    def over(self, usual: Timeouts) -> Timeouts:
        said = {"regroup_s": self.regroup_s, "leave_s": self.leave_s}
        return replace(usual, **{name: for_s for name, for_s in said.items() if for_s is not None})


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
        from meshcee.files import disk

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
        from peers.state.checkpoint import CheckpointStore

        CheckpointStore.found(run).find(step, run.id)
