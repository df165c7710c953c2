"""A peer that flips one bit of one element of one gradient in one step, then behaves: the parity test's prey."""

from __future__ import annotations

import torch

from meshcee.stage.runner import StageRunner
from peers.cli import main as cli

FLIP_AT_STEP = 5

_apply = StageRunner.apply


def apply(self: StageRunner, *arguments: object) -> None:
    if self.step == FLIP_AT_STEP:
        gradient = next(p.grad for p in self.trainable.values() if p.grad is not None)
        bits = gradient.view(-1).view(torch.int32)
        bits[int(gradient.abs().argmax())] ^= (
            1 << 22
        )  # half of it: a lower bit may be lost when the update or the loss is rounded
    _apply(self, *arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    StageRunner.apply = apply  # type: ignore[method-assign]
    cli.main()
