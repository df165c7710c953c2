"""Iterable sets as people write them, and as `datasets` and torchdata do: with a state, with one that loses samples, with none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import IterableDataset

__all__ = ["Ahead", "Counted", "Plain", "Shuffled", "sample_of"]


def sample_of(number: int) -> dict[str, Any]:
    """A row as `datasets` gives one, augmented by chance."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, generator=generator) + torch.randn(8) * 0.1
    return {"x": x.tolist(), "text": f"number {number}", "label": (number + random.randrange(2)) % 5}


class Reads(list[int]):
    """One for a set and all its copies."""

    def __deepcopy__(self, memo: Any) -> Reads:
        return self


class Plain(IterableDataset[Any]):
    """Begins anew whenever it is iterated. `reads` are the numbers of the samples that anybody has read."""

    def __init__(self, count: int = 50, make: Callable[[int], Any] = sample_of) -> None:
        self.count, self.make, self.epoch, self.reads = count, make, 0, Reads()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def begin(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        for number in order[self.begin() :]:
            self.reads.append(number)
            yield self.make(number)


class Counted(Plain):
    """Knows where it is, as a stream of `datasets`: state_dict() is that of the last iterator."""

    def __init__(self, count: int = 50, make: Callable[[int], Any] = sample_of) -> None:
        super().__init__(count, make)
        self._starting: Mapping[str, Any] | None = None
        self._state: dict[str, Any] = {"place": {"read": 0}, "epoch": 0}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state  # so copy.copy makes no copy

    def state_dict(self) -> dict[str, Any]:
        return {**self._state, "place": dict(self._state["place"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._starting = state

    def begin(self) -> int:
        begins = self._starting is not None and self._starting["epoch"] == self.epoch
        read = self._starting["place"]["read"] if begins and self._starting is not None else 0
        self._state = {"place": {"read": read}, "epoch": self.epoch}
        return int(read)

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            self.advance()
            yield sample

    def advance(self) -> None:
        self._state["place"]["read"] += 1


class Shuffled(Counted):
    """Shuffles in a buffer, whose samples its state does not hold: it goes on with the next ones."""

    size = 10

    def __iter__(self) -> Iterator[Any]:
        samples = super().__iter__()
        while buffer := list(itertools.islice(samples, self.size)):
            random.shuffle(buffer)
            yield from buffer


class Ahead(Plain):
    """A thread of its own makes samples before they are wanted, and a buffer of them is shuffled: `map` before `shuffle`."""

    size = 20

    def __iter__(self) -> Iterator[Any]:
        with ThreadPoolExecutor(1) as pool:
            order = iter(range(self.count))
            while numbers := list(itertools.islice(order, self.size)):
                buffer = list(pool.map(self.make, numbers))
                random.Random(self.epoch).shuffle(buffer)
                yield from buffer
