"""What a planner is told of a live mesh and of a job: values that peers measure and owners send, no tensor and no code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshcee.figures.profile import BlockCost, DeviceProfile, LinkProfile
from meshcee.figures.timing import BlockTimes
from meshcee.figures.versions import Versions

__all__ = ["DEFAULT_LINK", "NEXT_TO_NOTHING", "JobCosts", "Measured", "without_links"]

NEXT_TO_NOTHING = 1e3  # bytes per second: of a link that nothing has crossed lately
DEFAULT_LINK = LinkProfile(0.02, 12.5e6)  # 100 Mbit/s and 40 ms there and back: a link that nobody has measured yet


@dataclass(frozen=True)
class JobCosts:
    """What a planner must know of a job: no tensor, no code.

    alike  per block the first block that is the same work (meshcee.capture.graph.alike); () when nothing was profiled
    tied   (first block, last block, bytes) of shared parameters
    mix    which devices a plan may put together (meshcee.figures.kernels.MIXES), for an owner who runs these `versions`
    threads that every CPU computes with; 0: each with its own number
    codec  of every boundary, or "auto" or "lossless": as planner/rules.py has it between regions
    feeds  of each raw input the bytes of a sample and the blocks that read it; data_s: that reading a sample takes the owner
    groups whether devices of one region may share a stage; direct_sums and clips as the job says
    """

    blocks: Sequence[BlockCost]
    batch_size: int
    micro_batch: int | None = None
    recompute: bool = False
    element_bytes: int = 4
    message_bytes: tuple[int, int] = (0, 0)
    alike: tuple[int, ...] = ()
    tied: tuple[tuple[int, int, int], ...] = ()
    codec: str = "none"
    groups: bool = False
    direct_sums: bool = False
    clips: bool = False
    mix: str = "devices"
    versions: Versions | None = None
    threads: int = 0
    feeds: tuple[tuple[int, tuple[int, ...]], ...] = ()
    data_s: float = 0.0


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
