"""Who may compute a member's step again: a machine of the same kernel class, for another one has other bits.

The idea: the owner trusts itself, so where its own machine is of the class it computes every audited step, and nobody can accuse
anybody wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshcee.errors import UsageError
from meshcee.figures import DeviceProfile, class_of
from meshcee.figures.kernels import KernelClass
from meshcee.plan import Plan
from peers.device import capability, cores, versions

__all__ = ["check_judges", "own_class"]


def own_class(threads: int) -> KernelClass | None:
    """Of this machine's CPU in a run with so many threads; None where it has fewer."""
    return KernelClass("cpu", capability(), versions().torch, threads) if threads <= cores() else None


def check_judges(plan: Plan, devices: Mapping[str, DeviceProfile], names: Mapping[str, str]) -> None:
    """Raises UsageError where a member of the plan is one that nobody could find lying."""
    if plan.sums_gradients:
        raise UsageError(
            "an audit does not reach members that sum gradients with others: ask for as many stages as there are peers "
            "(--stages), or leave audit out"
        )
    own = own_class(plan.threads)
    for peer in plan.peers:
        of = class_of(devices[peer], plan.threads)
        if of != own:
            raise UsageError(
                f"nobody can compute again what {names.get(peer, peer)} computes: it is a {of}, and this machine is "
                f"{'none' if own is None else f'a {own}'}; give the job to a machine of that class, or leave audit out"
            )
