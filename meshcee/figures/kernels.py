"""Kernel classes: devices that compute the same bits.

The idea: a sum's order depends on the kind of device, on the instructions or the model that its kernels are for, and on
torch's build. On a CPU it also depends on the number of threads. A plan whose members are of one class has the bits of a plain
loop on such a device. One that mixes classes has those of no single machine, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from meshcee.errors import PlanError
from meshcee.figures.profile import DeviceProfile
from meshcee.figures.versions import Versions
from meshcee.plan import LeftOut, Plan

__all__ = [
    "MIXES",
    "KernelClass",
    "check_alike",
    "class_of",
    "fitting",
    "remark",
    "with_classes",
    "without_settings",
    "without_threads",
]

_SETTINGS = re.compile(r"/[0-9a-f]{4}(?=,|$)")  # of a CPU's model
MIXES = ("none", "devices", "versions")


@dataclass(frozen=True)
class KernelClass:
    """`model` is a CPU's vendor, instructions and four digits of what its libraries compute, or a GPU's name; `threads` is 0
    where kernels do not depend on them.
    """

    kind: str
    model: str
    torch: str
    threads: int

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.model}".strip()]
        if self.torch:
            parts.append(f"torch {self.torch}")
        if self.threads:
            parts.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        return ", ".join(parts)

    @classmethod
    def of_run(cls, kind: str, name: str, threads: int | None) -> KernelClass:
        """As a run's description has it: the kind, then model and torch, then threads."""
        model, _, build = name.rpartition(", torch ")
        return cls(kind, model, build, threads or 0)

    def plain_loop(self) -> str:
        """What the plain loop with the same bits must run on, and how."""
        where = str(replace(self, threads=0))
        return f"torch.set_num_threads({self.threads}) on {where}" if self.threads else f"the model on {where}"


def class_of(device: DeviceProfile, threads: int = 0) -> KernelClass:
    """Of a device, in a run with so many threads; 0: with its own number."""
    build = device.versions.torch if device.versions is not None else ""
    if device.kind == "cpu":
        return KernelClass("cpu", device.capability, build, threads or device.threads)
    return KernelClass(device.kind, device.name, build, 0)


def without_threads(device: DeviceProfile) -> str:
    """Its kernel class in words, whatever number of threads a run has."""
    return str(replace(class_of(device), threads=0))


def without_settings(kernels: str) -> str:
    """A kernel class in words, without the digits of what its libraries compute."""
    return _SETTINGS.sub("", kernels)


def fitting(
    devices: Mapping[str, DeviceProfile],
    mix: str,
    threads: int,
    owner: Versions | None,
    judge: str = "",
    keeps: str = "",
) -> tuple[dict[str, DeviceProfile], list[LeftOut]]:
    """The devices that a plan may have, and why not the others.

    mix      one of MIXES: "none": devices of one kernel class only, that with the most speed; "devices": all that run the owner's
             versions; "versions": all
    threads  of the run; 0: each has its own
    owner    what it runs; None: nobody knows
    judge    the kernel class, threads aside, of the machine that computes audited steps again; "": no step is audited
    keeps    the kernel class, threads aside, or the kind of device that the run must go on with; "": any
    """
    kept: dict[str, DeviceProfile] = {}
    left: list[LeftOut] = []
    for peer, device in devices.items():
        why = None
        if device.kind == "cpu" and threads > device.most_threads:
            why = f"it computes with {device.most_threads} threads at most, and the run with {threads}"
        elif mix != "versions" and device.versions is not None:
            why = device.versions.outside() or (device.versions.unlike(owner) if owner is not None else None)
            why = f'it runs {why}; Job(mix="versions") allows it' if why else None
        if why is None and judge and (own := without_threads(device)) != judge:
            why = f"it is a {own}, and the job is audited on a {judge}, which cannot compute its steps again"
        own = without_threads(device)
        if why is None and keeps not in (
            "",
            device.kind,
            own,
            without_settings(own),
        ):  # runs of before say no settings
            other = ", or go on with --mix devices" if mix == "none" else ""
            why = f"it is a {own}, and the run has begun on {keeps}, whose bits it must keep: join such a device{other}"
        if why is None:
            kept[peer] = device
        else:
            left.append(LeftOut(peer, why))
    if mix != "none" or not kept:
        return kept, left
    speeds: dict[KernelClass, float] = {}
    for device in kept.values():
        of = class_of(device, threads)
        speeds[of] = speeds.get(of, 0.0) + device.speed_flops_per_s
    chosen = max(speeds, key=lambda of: (speeds[of], str(of)))
    for peer in [p for p, d in kept.items() if class_of(d, threads) != chosen]:
        left.append(
            LeftOut(peer, f'it is a {class_of(kept.pop(peer), threads)}; Job(mix="none") keeps to one kernel class')
        )
    return kept, left


def check_alike(plan: Plan, devices: Mapping[str, DeviceProfile], names: Mapping[str, str]) -> None:
    """PlanError where pipelines have a block on devices of two classes: each applies the same gradients, and rounds by itself."""
    held: list[dict[KernelClass, str]] = [{} for _ in range(plan.num_blocks if len(plan.pipelines) > 1 else 0)]
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for classes in held[stage.first : stage.end]:
            classes |= {class_of(devices[peer], plan.threads): peer for peer in stage.peers}
    for block, classes in enumerate(held):
        if len(classes) > 1:
            (one, peer), (two, twin) = list(classes.items())[:2]
            unlike = " and ".join(f.name for f in fields(KernelClass) if getattr(one, f.name) != getattr(two, f.name))
            raise PlanError(
                f"the plan has block {block} on {names.get(peer, peer)} ({one}) and {names.get(twin, twin)} ({two}), "
                f"unlike in {unlike}, whose copies of the weights would drift apart; give what pipelines share to devices of "
                "one kernel class, or put all devices in one pipeline"
            )


def with_classes(plan: Plan, devices: Mapping[str, DeviceProfile], threads: int) -> Plan:
    """The plan with its number of threads, and the kernel classes of its members."""
    found = dict.fromkeys(str(class_of(devices[peer], threads)) for peer in plan.peers)
    return replace(plan, threads=threads, kernels=tuple(found))


def remark(plan: Plan, devices: Mapping[str, DeviceProfile], *, mixed: bool = False) -> str | None:
    """What people should know of a plan's bits: the plain loop that has them, or that none has. `mixed`: under autocast."""
    classes = list(dict.fromkeys(class_of(devices[p], plan.threads) for p in plan.peers if p in devices))
    if not classes:
        return None
    if mixed and any(of.kind != "cpu" for of in classes):
        return (
            "what computes in 16 bits is what torch.autocast has for CPUs, and for GPUs it has other lists: no plain loop on a GPU "
            "has these bits"
        )
    if len(classes) == 1:
        if plan.codecs or plan.shares_samples:
            return f"kernel class: {classes[0]}"
        return f"equals the plain loop with {classes[0].plain_loop()}"
    alike = len({without_settings(str(of)) for of in classes}) < len(classes)
    by = (
        "; behind a slash is what a CPU's libraries compute, by variables as MKL_CBWR and ONEDNN_MAX_CPU_ISA"
        if alike
        else ""
    )
    return (
        f"exact within a kernel class; this plan mixes {_listed([str(of) for of in classes])}, so no single machine's loop has its "
        f'bits: Job(mix="none") keeps to one class{by}'
    )


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(f"({text})" for text in texts)
