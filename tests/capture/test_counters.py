"""A loss or a forward that counts its calls where Python keeps things: a graph holds one value, so the job is refused."""

from __future__ import annotations

import array
import contextvars
import ctypes
import datetime
import decimal
import functools
import io
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError
from meshcee.reach import Remembered
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import Changed, breaks, changed

HERE = r"test_counters\.py:\d+"
LATE = 50  # calls: capture makes fewer
Counter = Callable[[], int]


class Clock:
    step = 0


@dataclass(slots=True)
class Slots:
    step: int = 0


class Private:
    __slots__ = ("__dict__", "__step")

    def __init__(self) -> None:
        self.__step = 0

    def count(self) -> int:
        self.__step += 1
        return self.__step


def of_class() -> Counter:
    Clock.step = 0

    def count() -> int:
        Clock.step += 1
        return Clock.step

    return count


def of_slots() -> Counter:
    held = Slots()

    def count() -> int:
        held.step += 1
        return held.step

    return count


def of_private_slots() -> Counter:
    return Private().count


def of_function() -> Counter:
    def count() -> int:
        held.n += 1
        return held.n

    held: types.SimpleNamespace = count  # type: ignore[assignment]
    held.n = 0
    return count


def of_generator() -> Counter:
    def numbers() -> Iterator[int]:
        yield from itertools.count()

    held = numbers()
    return lambda: next(held)


def of_list() -> Counter:
    held = iter(range(1000))
    return lambda: next(held)


def of_cycle() -> Counter:
    held = itertools.cycle(range(1000))
    return lambda: next(held)


def of_zip() -> Counter:
    held = zip(range(1000), range(1000))
    return lambda: next(held)[0]


def of_array() -> Counter:
    held = array.array("i", [0])

    def count() -> int:
        held[0] += 1
        return held[0]

    return count


def of_bytes() -> Counter:
    held = bytearray(1)

    def count() -> int:
        held[0] += 1
        return held[0]

    return count


def of_context() -> Counter:
    held: contextvars.ContextVar[int] = contextvars.ContextVar("held", default=0)

    def count() -> int:
        held.set(held.get() + 1)
        return held.get()

    return count


def of(start: Any, add: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[], Counter]:
    """A counter that puts another value in the place of the last, or writes into it."""

    def make() -> Counter:
        held = [start()]

        def count() -> int:
            if (added := add(held[0])) is not None:
                held[0] = added
            return int(read(held[0]))

        return count

    return make


def of_partial() -> Counter:
    def count(held: list[int]) -> int:
        held[0] += 1
        return held[0]

    return functools.partial(count, [0])


def of_method() -> Counter:
    held: list[int] = []
    add = held.append

    def count() -> int:
        add(1)
        return len(add.__self__)  # type: ignore[attr-defined]

    return count


BYTES: Changed = (Remembered, "hash(bytes(held))", "0")
SET: Changed = (Remembered, "len(item), hash(frozenset(item))", "0")
BUILT: Changed = (Remembered, "self._visit(place, lambda: item.__reduce_ex__(2)[1:3], depth, line)", "pass")
OF_C: dict[str, tuple[Callable[[], Counter], Changed]] = {
    "NumPy's integer": (of(lambda: np.int64(0), lambda n: n + np.int64(1), int), BYTES),
    "NumPy's float": (of(lambda: np.float32(0), lambda n: n + np.float32(1), int), BYTES),
    "a record": (
        of(lambda: np.zeros(1, [("n", "i8")])[0], lambda n: n.__setitem__("n", n["n"] + 1), lambda n: n["n"]),
        BYTES,
    ),
    "Decimal": (of(lambda: decimal.Decimal(0), lambda n: n + 1, int), BUILT),
    "a range": (of(lambda: range(0), lambda n: range(len(n) + 1), len), BUILT),
    "a slice": (of(lambda: slice(0), lambda n: slice(n.stop + 1), lambda n: n.stop), BUILT),
    "a span of time": (of(datetime.timedelta, lambda n: n + datetime.timedelta(1), lambda n: n.days), BUILT),
    "text in memory": (of(io.StringIO, lambda n: n.write("a") and None, lambda n: n.tell()), BUILT),
    "C's integer": (of(ctypes.c_int, lambda n: setattr(n, "value", n.value + 1), lambda n: n.value), BYTES),
    "a view of bytes": (
        of(lambda: memoryview(bytearray(1)), lambda n: n.__setitem__(0, n[0] + 1), lambda n: n[0]),
        BYTES,
    ),
    "a set": (of(set, lambda n: n.add(len(n)), len), SET),
    "a set that cannot be changed": (
        of(lambda: frozenset({-1}), lambda n: n | {len(n)}, len),
        SET,
    ),
    "a partial": (of_partial, BUILT),
    "a method of a list": (of_method, BUILT),
}

COUNTERS: dict[Callable[[], Counter], Changed | None] = {
    of_class: (Remembered, "self._class(item, depth)", "pass"),
    of_slots: (Remembered, "for name in slots}", "for name in ()}"),
    of_private_slots: None,
    of_function: (Remembered, "for key in list(vars(function)):", "for key in []:"),
    of_generator: (Remembered, "return _Unseen()", "return None"),
    of_list: None,
    of_cycle: None,
    of_zip: None,
    of_array: BYTES,
    of_bytes: BYTES,
    of_context: (Remembered, "functools.partial(item.get, None)", "functools.partial(_same, None)"),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", [*COUNTERS, *OF_C])
def test_a_loss_that_counts_its_calls_is_refused(kind: Any) -> None:
    make, mend = OF_C[kind] if kind in OF_C else (kind, COUNTERS[kind])

    def story() -> None:
        count = make()

        def late(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(out, y) * (2.0 if count() > LATE else 1.0)

        with pytest.raises(CaptureError, match=r"the loss late changes .* in every call"):
            capture(job_of(net(), loss=late))

    story()
    if mend is not None:
        with changed(*mend):
            assert breaks(story)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_counts_its_calls_is_refused(register: str) -> None:
    calls = [0]

    def late(module: nn.Module, given: tuple[torch.Tensor, ...], *out: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        (found,) = out or given
        return found * (2.0 if calls[0] > LATE else 1.0)

    model = net()
    getattr(model[1], register)(late)
    with pytest.raises(CaptureError, match=r"forward changes .*'calls' in the closure of late.* in every call"):
        capture(job_of(model))


class Anneals(nn.Module):
    """Its schedule is a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.schedule = iter([0.0] * LATE + [1.0] * LATE)
        self.unused = iter(range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return h + next(self.schedule) * h.tanh()


def test_a_forward_that_uses_an_iterator_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=rf"forward changes attribute 'schedule' of the model at .*{HERE} in every"):
        capture(job_of(Anneals()))


class Holds(Anneals):
    """What nothing uses changes nothing; neither do constants of a class."""

    SCALE = 2.0
    TABLE = (1.0, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.SCALE * self.TABLE[1]


def test_iterators_that_nothing_uses_and_constants_of_classes_are_no_state() -> None:
    assert difference(job_of(Holds())) == ""
