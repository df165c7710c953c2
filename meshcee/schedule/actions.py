"""The three kinds of work of a pipeline stage, and how an action is written: "2F0" is stage 2's F of micro-batch 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Action", "Kind"]


class Kind(StrEnum):
    """F forward, B input-gradient, W weight-gradient."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True)
class Action:
    """One piece of work."""

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not an action like 2F0")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
