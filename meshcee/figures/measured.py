"""What a planner is told of a live mesh and of a job: values that peers measure and owners send, no tensor and no code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import Count, NotNegative
from meshcee.figures.kernels import MIXES, KernelClass, fitting
from meshcee.figures.profile import BlockCost, Cores, DeviceProfile, LinkProfile
from meshcee.figures.timing import MAX_SIZES, BlockTimes
from meshcee.figures.versions import Versions
from meshcee.plan import LeftOut

__all__ = ["DEFAULT_LINK", "FEW", "MOST_MICROS", "NEXT_TO_NOTHING", "JobCosts", "Measured", "without_links"]

FEW = 32  # peers up to which everybody measures the link to everybody

NEXT_TO_NOTHING = 1e3  # bytes per second: of a link that nothing has crossed lately
MOST_MICROS = 1 << 16  # of a step: a planner simulates each
MAX_BLOCKS = 4096
MAX_CLASS = 200  # letters of a kernel class
DEFAULT_LINK = LinkProfile(0.02, 12.5e6)  # 100 Mbit/s and 40 ms there and back: a link that nobody has measured yet

_Message = Annotated[int, Meta(ge=0, lt=1 << 30)]
_Parameter = Annotated[int, Meta(ge=0, lt=1 << 50)]
_Sample = Annotated[int, Meta(ge=0, lt=1 << 40)]


@dataclass(frozen=True)
class JobCosts:
    """What a planner must know of a job: no tensor, no code.

    alike  per block the first block that is the same work (meshcee.capture.graph.same_work); () when nothing was profiled
    tied   (first block, last block, bytes) of shared parameters
    mix    which devices a plan may put together (meshcee.figures.kernels.MIXES), for an owner who runs these `versions`
    threads  that every CPU computes with; 0: each with its own number
    codec  of every boundary, or "auto" or "lossless": as planner/rules.py has it between regions
    feeds  of each raw input the bytes of a sample and the blocks that read it; data_s: that reading a sample takes the owner
    moments  per block: bytes of what the optimizer keeps, and of an average, for each byte of weights in full; (): 2, as AdamW
    audited  members keep what their last steps began with; judge: the kernel class that computes their steps again
    draws  random numbers, as dropout does: a CPU's are not a GPU's, so a plan has devices of one kind
    keeps  of a run that has begun: the kernel class (mix "none") or the kind of device (`draws`) that its plans keep to
    groups  whether devices of one region may share a stage; direct_sums and clips as the job says
    workspace  of micro-batches of so many samples, what the operators of each block take for a moment; () when nobody looked
    pipelines  whether a plan may have several side by side; with batch `statistics` only CPUs hold the same blocks
    """

    blocks: Annotated[Sequence[BlockCost], Meta(min_length=1, max_length=MAX_BLOCKS)]
    batch_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    micro_batch: Annotated[int, Meta(ge=1)] | None = None
    recompute: bool = False
    element_bytes: Annotated[int, Meta(ge=2, le=4, multiple_of=2)] = 4
    message_bytes: tuple[_Message, _Message] = (0, 0)
    alike: Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS)] = ()
    tied: Annotated[tuple[tuple[Count, Count, _Parameter], ...], Meta(max_length=MAX_BLOCKS)] = ()
    codec: str = "none"
    groups: bool = False
    pipelines: bool = False
    statistics: bool = False
    direct_sums: bool = False
    clips: bool = False
    mix: str = "devices"
    versions: Versions | None = None
    threads: Cores = 0
    feeds: Annotated[tuple[tuple[_Sample, tuple[Count, ...]], ...], Meta(max_length=MAX_BLOCKS)] = ()
    data_s: NotNegative = 0.0
    moments: Annotated[tuple[Annotated[float, Meta(ge=0, le=16)], ...], Meta(max_length=MAX_BLOCKS)] = ()
    audited: bool = False
    judge: Annotated[str, Meta(max_length=MAX_CLASS)] = ""
    draws: bool = False
    keeps: Annotated[str, Meta(max_length=MAX_CLASS)] = ""
    workspace: Annotated[tuple[tuple[Count, tuple[Count, ...]], ...], Meta(max_length=MAX_SIZES)] = ()

    def fitting(self, devices: Mapping[str, DeviceProfile]) -> tuple[dict[str, DeviceProfile], list[LeftOut]]:
        """The devices that a plan may have, and why not the others."""
        return fitting(devices, self.mix, self.threads, self.versions, self.judge, self.keeps)

    def begun_on(self, classes: Iterable[KernelClass]) -> JobCosts:
        """The same of a run that such devices have computed; of none, or of unlike ones, it keeps to nothing."""
        every = list(classes)
        kernels = {str(replace(of, threads=0)) for of in every if self.mix == "none"}
        kinds = {of.kind for of in every if self.draws}
        return replace(self, keeps=next((found.pop() for found in (kernels, kinds) if len(found) == 1), ""))

    def check(self) -> None:
        """Figures that belong together do; ProtocolError otherwise. Each by itself has been read."""
        count = len(self.blocks)
        if len(self.moments) not in (0, count):
            raise ProtocolError("what an optimizer keeps is told of each block")
        if len(self.alike) not in (0, count) or any(k > i for i, k in enumerate(self.alike)):
            raise ProtocolError("each block is like itself or an earlier one")
        if not all(first < last < count for first, last, _ in self.tied):
            raise ProtocolError("a shared parameter lies on two blocks of the job and has a size")
        if not all(block < count for _, blocks in self.feeds for block in blocks):
            raise ProtocolError("a raw input has a size, and blocks of the job read it")
        sizes = [size for size, _ in self.workspace]
        if sizes != sorted(set(sizes)) or any(len(each) != count for _, each in self.workspace):
            raise ProtocolError("workspaces are of ascending numbers of samples, with a figure for each block")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ProtocolError("a batch is of equal micro-batches")
        if self.mix not in MIXES:
            raise ProtocolError(f"mix {self.mix[:40]!r} is unknown to this coordinator; upgrade it")


@dataclass(frozen=True)
class Measured:
    """What is known of a mesh's idle devices."""

    devices: Mapping[str, DeviceProfile]
    links: Mapping[tuple[str, str], LinkProfile]  # ordered pairs, each as measured by its first peer
    times: Mapping[str, BlockTimes]  # of this job's blocks, where they were profiled
    hints: Mapping[str, str]  # regions, as people said
    feeds: Mapping[str, LinkProfile] = field(default_factory=dict)  # from the owner of the job


def without_links(
    links: Mapping[tuple[str, str], LinkProfile], pairs: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], LinkProfile]:
    """The same links, but nothing to speak of crosses these. At their best they are what they were: nobody has moved."""
    found = dict(links)
    for pair in pairs:
        link = found.get(pair, DEFAULT_LINK)
        best = (link.bandwidth_range_bytes_per_s or (0.0, link.bandwidth_bytes_per_s))[1]
        span = (NEXT_TO_NOTHING, max(best, NEXT_TO_NOTHING))
        found[pair] = replace(link, bandwidth_bytes_per_s=NEXT_TO_NOTHING, bandwidth_range_bytes_per_s=span)
    return found
