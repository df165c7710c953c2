"""The random numbers of a stage: from a generator of its own, so that whoever else draws in this process changes none of them.

The idea: the eager loop draws from the process's generator, and beside a stage on the owner's machine the user's callbacks may
draw from it too. On a CPU a stage has a generator of its own, which gives the same numbers. A dispatch mode around the operators
that draw hands it to torch's kernels, also to those inside of an LSTM. On a GPU some kernels take none: there the device's is held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshcee.capture.graph import Node, StageSpec, is_random
from meshcee.errors import GraphError
from meshcee.sampling import GENERATORS, KERNELS
from meshcee.stage.deferred import Template

__all__ = ["Draws", "Rng"]

Rng = int | torch.Tensor | None  # a seed not yet used, the generator's state, or no randomness at all
Calls = dict[int, Callable[..., Any]]


class Draws:
    """Of one stage on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_own = device.type == "cpu"
        if self._is_own:
            self._generator = torch.Generator()
        elif device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        else:
            self._generator = torch.default_generator
        self._mode = _FromGenerator(self._generator)

    def calls(self, nodes: Iterable[tuple[int, Node]], instead: Mapping[int, Callable[..., Any]]) -> Calls:
        """For `StageSpec.build`: the nodes that draw, where they are to draw otherwise. `instead` replaces nodes already."""
        if not self._is_own:
            return {}
        found: Calls = {}
        for number, node in nodes:
            if is_random(node) and node.operator.name == "aten.dropout.default" and number not in instead:
                found[number] = Template(node, self._dropout).run
            elif is_random(node):
                found[number] = _Draw(self._mode, instead.get(number) or _on_cpu(node).run).run
        return found

    def _dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """What torch's kernel calls, one by one: a mode takes ten times as long as they do on a small tensor."""
        if p == 1 or not x.numel():
            nothing_drawn: torch.Tensor = torch.ops.aten.dropout.default(x, p, train)
            return nothing_drawn
        return x * torch.empty_like(x).bernoulli_(1 - p, generator=self._generator).div_(1 - p)

    @contextlib.contextmanager
    def seeded(self, rng: Rng, spec: StageSpec) -> Iterator[list[Rng]]:
        """The micro-batch's numbers around a forward that draws; the state after it is left in the yielded list."""
        after: list[Rng] = [rng]
        if rng is None or not spec.uses_random:
            yield after
            return
        with contextlib.nullcontext() if self._is_own else _generators():
            # Only this generator: torch.manual_seed visits every backend, which takes half a millisecond.
            if isinstance(rng, int):
                self._generator.manual_seed(rng)
            else:
                self._generator.set_state(rng.cpu())
            yield after
            after[0] = self._generator.get_state()


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    """As soon as nobody else in this process draws."""
    if not GENERATORS.acquire(blocking=False):
        with KERNELS.paused():
            GENERATORS.acquire()
    try:
        yield
    finally:
        GENERATORS.release()


class _Draw:
    def __init__(self, mode: TorchDispatchMode, call: Callable[..., Any]) -> None:
        self._mode, self._call = mode, call

    def run(self, *values: Any) -> Any:
        with self._mode:
            return self._call(*values)


def _on_cpu(node: Node) -> Template:
    """A graph names no device of its own."""
    kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
    return Template(dataclasses.replace(node, kwargs=kwargs), node.call)


class _FromGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        drawing, place = _taking_a_generator(func)
        return drawing(*args[:place], **(kwargs or {}) | {"generator": self._generator})


@functools.cache
def _taking_a_generator(func: Any) -> tuple[Any, int]:
    """The operator, or its variant that takes a generator, and the place of that among its arguments."""
    wanted = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    variants = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    for variant in (func, *variants):
        names = [argument.name for argument in variant._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return variant, names.index("generator")
    raise GraphError(f"{func} draws random numbers, and not from a generator that it is given")
