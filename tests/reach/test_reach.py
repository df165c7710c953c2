"""Whatever of Python's the user's code can write is seen and put back by all three who look: at the model, in `check`, at data."""

from __future__ import annotations

import functools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshcee
from meshcee.equality.watch import Watch
from meshcee.job import Job
from meshcee.reach import Backup, Reached, Remembered, content_of
from meshcee.sampling.traces import Traces

Write = Callable[[], Any]
Read = Callable[[], Any]
State = tuple[Callable[..., Any], Write, Read]  # code that has it within reach, what changes it, what it is
NUMBER = 0
LAST: list[int] = []


class Words(dict[str, int]):
    """A user's own, whose methods nobody calls who only looks."""

    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("read only")

    def clear(self) -> None:
        raise AssertionError("read only")


@dataclass(slots=True)
class Slots:
    n: int = 0


class Holder:
    n = 0


def of(held: Any, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> State:
    def code(*_: Any) -> Any:
        return held

    return code, lambda: write(held), lambda: read(held)


def variable() -> State:
    n = 0

    def write() -> None:
        nonlocal n
        n += 1

    return (lambda *_: n), write, lambda: n


def module_variable() -> State:
    def write() -> None:
        global NUMBER
        NUMBER += 1

    return (lambda *_: NUMBER), write, lambda: NUMBER


def attribute_of_function() -> State:
    def code(*_: Any) -> Any:
        return held.n

    held: Any = code
    held.n = 0
    return code, lambda: setattr(held, "n", held.n + 1), lambda: held.n


def default_by_name() -> State:
    def code(*_: Any, seen: list[int] = []) -> Any:  # noqa: B006
        return seen

    return code, lambda: code().append(1), lambda: list(code())


def cached() -> State:
    @functools.lru_cache
    def code(n: int) -> Any:
        return n

    return (lambda *_: code(1)), lambda: code(1), lambda: code.cache_info().currsize


def method() -> State:
    held = Slots()

    class Owner:
        def __init__(self) -> None:
            self.kept = held

        def code(self, *_: Any) -> Any:
            return self.kept.n

    return Owner().code, lambda: setattr(held, "n", 1), lambda: held.n


def tree() -> Any:
    return {"a": [1, {"b": deque([2])}]}


STATES: dict[str, Callable[[], State]] = {
    "a variable": variable,
    "a module's variable": module_variable,
    "a module's list": lambda: ((lambda *_: LAST), lambda: LAST.append(1), lambda: list(LAST)),
    "an attribute of a function": attribute_of_function,
    "a default": default_by_name,
    "a method's object": method,
    "a cache": cached,
    "a list": lambda: of([0], lambda it: it.append(1), list),
    "a list, of one length": lambda: of([0], lambda it: it.__setitem__(0, 1), list),
    "a list in a dict in a list": lambda: of(tree(), lambda it: it["a"][1]["b"].append(3), repr),
    "a dict": lambda: of({}, lambda it: it.update(a=1), dict),
    "a dict of the user's": lambda: of(Words(), lambda it: dict.__setitem__(it, "a", 1), dict),
    "a counter": lambda: of(Counter(), lambda it: it.update("a"), dict),
    "an ordered dict": lambda: of(OrderedDict(a=1), lambda it: it.update(b=2), list),
    "a queue": lambda: of(deque([1], maxlen=2), lambda it: it.append(2), list),
    "a set": lambda: of({0}, lambda it: it.add(1), set),
    "bytes": lambda: of(bytearray(1), lambda it: it.append(1), bytes),
    "an array": lambda: of(np.zeros(2), lambda it: it.fill(1), lambda it: it.tolist()),
    "a tensor": lambda: of(torch.zeros(2), lambda it: it.fill_(1), lambda it: it.tolist()),
    "Python's generator": lambda: of(random.Random(0), lambda it: it.random(), lambda it: it.getstate()),
    "NumPy's generator": lambda: of(
        np.random.default_rng(0), lambda it: it.random(), lambda it: repr(it.bit_generator.state)
    ),
    "NumPy's old generator": lambda: of(
        np.random.RandomState(0), lambda it: it.rand(), lambda it: repr(it.get_state())
    ),
    "torch's generator": lambda: of(
        torch.Generator(), lambda it: torch.rand(1, generator=it), lambda it: it.get_state().tolist()
    ),
    "a slot": lambda: of(Slots(), lambda it: setattr(it, "n", 1), lambda it: it.n),
    "an attribute": lambda: of(Holder(), lambda it: setattr(it, "n", 1), lambda it: it.n),
    "an attribute of a class": lambda: of(Holder, lambda it: setattr(it, "n", it.n + 1), lambda it: it.n),
    "a partial's list": lambda: of(
        functools.partial(max, [0]), lambda it: it.args[0].append(1), lambda it: list(it.args[0])
    ),
}
HIDDEN = {"a cache"}  # nothing can be read of what it holds


class Net(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.code(x)
        y: torch.Tensor = self.a(x)
        return y


@pytest.fixture(params=["the loss", "forward"])
def begun(kind: str, request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[..., Any], Write, Read]:
    """A model and a loss, one of which has a state within reach; what changes it, what it is."""
    code, write, read = STATES[kind]()
    model, loss = (nn.Linear(2, 2), code) if request.param == "the loss" else (Net(code), nn.functional.mse_loss)
    return model, loss, write, read


@pytest.mark.parametrize("kind", STATES)
def test_what_a_call_keeps_is_seen_and_put_back(kind: str, begun: Any) -> None:
    model, loss, write, read = begun
    before, was = Remembered(model, loss), read()
    assert not before.changed(Remembered(model, loss, keeps=False))
    write()
    assert read() != was
    of_shape = {"a tensor"}  # its numbers are compared in what graph and forward compute
    assert bool(before.changed(Remembered(model, loss, keeps=False))) != (kind in HIDDEN | of_shape)
    before.put_back()
    assert read() == was


@pytest.mark.parametrize("kind", STATES)
def test_what_a_pass_keeps_is_seen_by_check_and_put_back(kind: str, begun: Any) -> None:
    model, loss, write, read = begun
    watch, was = Watch(model, loss), read()
    before = watch.look()
    write()
    after = watch.look()
    differ = [name for name, slot in after.items() if name not in before or before[name].seen != slot.seen]
    assert bool(differ) != (kind in HIDDEN)
    assert all(before[name].look() != before[name].seen for name in differ if name in before)
    watch.restore()
    assert read() == was
    assert not [name for name, slot in watch.look().items() if before[name].seen != slot.seen]


@pytest.mark.parametrize("kind", STATES)
def test_what_reading_data_keeps_is_seen_and_put_back(kind: str) -> None:
    code, write, read = STATES[kind]()
    rows = [(torch.zeros(2), torch.zeros(2))] * 4
    told = {"batch_size": 2, "steps": 1, "loss": nn.functional.mse_loss, "optimizer": meshcee.Optimizer("SGD", lr=0.1)}
    traces = Traces(Job(model=nn.Linear(2, 2), data=rows, collate=code, **told))
    was = read()
    assert not traces.has_changed
    write()
    assert traces.has_changed
    traces.put_back(all_of_it=True)
    assert read() == was


# -- one object --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers()), st.lists(st.integers()), st.sampled_from([list, deque, set, OrderedDict.fromkeys]))
def test_any_content_is_put_back_in_its_order(first: list[int], second: list[int], make: Any) -> None:
    it = make(first)
    content = content_of(it)
    assert content is not None
    kept, was = Backup(content), make(it)
    it.clear()
    (it.extend if isinstance(it, list | deque) else it.update)(make(second))
    kept.put_back()
    assert it == was
    assert isinstance(it, set) or list(it) == list(was)
    assert not kept.has_changed


def test_the_order_of_items_is_content() -> None:
    it = OrderedDict(a=1, b=2)
    content = content_of(it)
    assert content is not None
    kept = Backup(content)
    it.move_to_end("a")
    assert kept.has_changed
    kept.put_back()
    assert list(it) == ["a", "b"]


def test_objects_of_arrays_are_compared_one_by_one() -> None:
    it = np.array([[1], "b"], dtype=object)
    content = content_of(it)
    assert content is not None
    kept = Backup(content)
    it[1] = "c"
    kept.put_back()
    assert list(it) == [[1], "b"]


class Rows:
    """Data with all that a look is to see."""

    def __init__(self) -> None:
        self.level, self.of_nobody = 1, 1
        self.rows = [{"x": [n]} for n in range(1000)]
        self.numbers, self.tensor = np.zeros((100, 100)), torch.zeros(100, 100)
        self.options = {"rate": 0.1}
        self.iterator = iter([1, 2, 3])

    def __getitem__(self, i: int) -> Any:
        return self.level, self.rows[i], self.numbers[i], self.tensor[i], self.options["rate"], self.iterator


def _fill(rows: Rows) -> None:
    rows.numbers[...] = 1.0


REACHED: dict[str, tuple[Callable[[Rows], Any], list[str]]] = {
    "nothing": (lambda rows: rows[3], []),
    "a number": (lambda rows: setattr(rows, "level", 2), ["attribute 'level' of data"]),
    "an item": (
        lambda rows: rows.options.update(rate=0.2),
        ["attribute 'options' of data", "['rate'] of attribute 'options' of data"],
    ),
    "the order": (lambda rows: rows.rows.reverse(), ["attribute 'rows' of data"]),
    "an array": (_fill, ["attribute 'numbers' of data"]),
    "a tensor": (lambda rows: rows.tensor.add_(1), ["attribute 'tensor' of data"]),
    "what no code names": (lambda rows: setattr(rows, "of_nobody", 2), []),
    "an iterator": (lambda rows: next(rows.iterator), []),
}


@pytest.mark.parametrize("what", REACHED)
def test_what_data_holds_and_reads_is_seen(what: str) -> None:
    rows, (write, expected) = Rows(), REACHED[what]
    before = Reached({"data": rows})
    write(rows)
    assert before.changed(Reached({"data": rows})) == expected
