"""The list of habits, what samples are like, and the job of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshcee.job import Job
from meshcee.optim import Optimizer

__all__ = ["HABITS", "Habit", "job_of"]

WORDS, WIDTH = 13, 8


class Habit(NamedTuple):
    model: type[nn.Module]
    samples: tuple[Any, Any]  # kinds of x and y
    loss: Callable[[Any, Any], torch.Tensor]
    refused: str  # words of the refusal, or "" where it is trained


HABITS: dict[str, Habit] = {}


def habit(x: Any, y: Any, loss: Any = None, refused: str = "") -> Callable[[Any], Any]:
    def add(model: type[nn.Module]) -> type[nn.Module]:
        HABITS[model.__name__] = Habit(model, (x, y), loss or ce, refused)
        return model

    return add


class Samples:
    def __init__(self, count: int, x: Any, y: Any) -> None:
        self.count, self.x, self.y = count, x, y

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        chance = torch.Generator().manual_seed(77 + i)
        kinds: dict[str, Callable[[], Any]] = {
            "img": lambda: torch.randn(3, 8, 8, generator=chance),
            "img1": lambda: torch.randn(1, 16, 16, generator=chance),
            "tok": lambda: torch.randint(1, WORDS, (5,), generator=chance),
            "vec": lambda: torch.randn(WIDTH, generator=chance),
            "seq": lambda: torch.randn(5, WIDTH, generator=chance),
            "cls": lambda: torch.randint(0, 4, (), generator=chance),
            "pad": lambda: torch.arange(5) < 2 + i % 4,
            "padf": lambda: (torch.arange(5) < 2 + i % 4).float(),
            "len": lambda: torch.tensor(2 + i % 4),
            "py": lambda: i % 3,
            "pyf": lambda: i / 7,
            "np": lambda: torch.randn(WIDTH, generator=chance).numpy(),
        }
        kinds |= {"toky": kinds["tok"], "vecy": kinds["vec"], "img3y": kinds["img"]}

        def made(kind: Any) -> Any:
            if isinstance(kind, dict):
                return {name: made(one) for name, one in kind.items()}
            return tuple(map(made, kind)) if isinstance(kind, tuple) else kinds[kind]()

        return made(self.x), made(self.y)


def job_of(name: str) -> Job:
    """A new one at each call: AdamW, clipping, micro-batches of two."""
    one = HABITS[name]
    torch.manual_seed(100)
    return Job(
        model=one.model(),
        loss=one.loss,
        data=Samples(20, *one.samples),
        optimizer=Optimizer("AdamW", lr=1e-2),
        batch_size=6,
        micro_batch_size=2,
        steps=3,
        clip_norm=0.5,
        codec="lossless",
    )


def ce(o, y):
    return F.cross_entropy(o if o.dim() == 2 else o.flatten(0, 1), y.flatten())


def blocks(n=3):
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(n)])


class Blocks(nn.Module):
    """For habits that need some layers and a head; what they do with these is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.b = blocks()
        self.h = nn.Linear(WIDTH, 4)


class Convolutions(nn.Module):
    """The same over images."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.h = nn.Linear(3, 4)
