"""What software a peer runs, and whether meshcee knows it.

The idea: other releases of torch have other kernels and round differently, so what a peer runs is told with its device. A release
beyond the supported range may work; nobody has tried it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from meshcee import TORCH_BELOW, TORCH_FROM

__all__ = ["PYTHON_FROM", "TORCH_BELOW", "TORCH_FROM", "Versions"]

PYTHON_FROM = (3, 11)

_Version = Annotated[str, Meta(max_length=32)]


@dataclass(frozen=True)
class Versions:
    """Of one process. `torch` is the whole build, as in "2.13.0+cpu"."""

    meshcee: _Version
    torch: _Version
    python: _Version

    @property
    def torch_release(self) -> str:
        """Without what it was built for: a CPU's kernels and a GPU's are of one release."""
        return self.torch.partition("+")[0]

    def outside(self) -> str | None:
        """What of it is outside of the supported range, in words; None if nothing is."""
        torch, python = _numbers(self.torch), _numbers(self.python)
        if not TORCH_FROM <= torch < TORCH_BELOW:
            return f"torch {self.torch}, and meshcee {self.meshcee} supports {_text(TORCH_FROM)} up to below {_text(TORCH_BELOW)}"
        if python < PYTHON_FROM:
            return f"Python {self.python}, and meshcee {self.meshcee} supports {_text(PYTHON_FROM)} and newer"
        return None

    def unlike(self, other: Versions, whose: str = "the owner has") -> str | None:
        """Why results of this software may differ from the other's in their last bits, in words; None if they do not.

        Python computes none of them.
        """
        if self.torch_release != other.torch_release:
            return f"torch {self.torch_release}, and {whose} {other.torch_release}"
        if self.meshcee != other.meshcee:
            return f"meshcee {self.meshcee}, and {whose} {other.meshcee}"
        return None


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
