"""What a program does, found without computing: a run on fake tensors, and which values share memory.

The idea: one fake forward pass runs under the FLOP counter, and with hooks on what autograd saves. The pass tells, per
node, FLOPs, bytes that stay until the backward pass, and whether a gradient flows. All else follows from the numbering.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshcee.capture.graph.program import VIEWS, Input, Node, Ref, Value, is_random, samples_of

__all__ = ["PACKED", "SMALL_BUFFER_BYTES", "Analysis", "analyse", "find_recomputed", "quiet", "resolve", "unfolded"]

PACKED = (torch.uint8, torch.int8, torch.int32)
_HINT = 2  # samples in the fake pass, of a graph for any number; figures are divided by it
SMALL_BUFFER_BYTES = 4 << 20  # unmutated buffers up to this size may be used by any stage that recomputes from them


@dataclasses.dataclass
class Analysis:
    """Per node: FLOPs and saved bytes for one sample. Per value: does a gradient flow, who reads it, alias groups."""

    flops: list[float]
    saved_bytes: list[float]
    requires_grad: list[bool]
    users: list[list[int]]  # value number -> node positions that read it
    group: list[int]  # value number -> alias group
    mutations: dict[int, list[int]]  # alias group -> node positions that write it
    written: dict[int, int]  # input whose memory is written -> the first node position that does

    def reached(self, nodes: Sequence[Node], output: int) -> set[int]:
        """The values that a gradient of this one flows to."""
        found, writers = {output}, set(self.mutations.get(self.group[output], ()))
        for position, number in reversed([*enumerate(range(len(self.group) - len(nodes), len(self.group)))]):
            if number in found or (position in writers and not nodes[position].no_grad):
                more = {n for n in nodes[position].refs if self.requires_grad[n]} - found
                found |= more
                writers.update(p for n in more for p in self.mutations.get(self.group[n], ()))
        return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch logs about kernels that refuse their arguments: the error that we raise says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def resolve(argument: Any, values: Sequence[Any] | Mapping[int, Any]) -> Any:
    """An argument with every Ref replaced by its value."""
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, list | tuple):
        return [resolve(a, values) for a in argument]
    return argument


class _NoModules:
    """In the place of torch's own, which hears of the modules of all threads, and hangs hooks into their backward passes."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def analyse(inputs: Sequence[Input], nodes: Sequence[Node]) -> Analysis:
    flops, saved, requires, memory = _fake_pass(inputs, nodes)
    users: list[list[int]] = [[] for _ in range(len(inputs) + len(nodes))]
    for position, node in enumerate(nodes):
        for number in set(node.refs):
            users[number].append(position)
    group, writes = _aliases(inputs, nodes, memory)
    mutations: dict[int, list[int]] = {}
    written: dict[int, int] = {}
    for number, position in writes:
        mutations.setdefault(group[number], []).append(position)
        for i in range(len(inputs)):
            if memory[i] & memory[number]:
                written.setdefault(i, position)
    return Analysis(flops, saved, requires, users, group, mutations, written)


def _fake_pass(
    inputs: Sequence[Input], nodes: Sequence[Node]
) -> tuple[list[float], list[float], list[bool], list[frozenset[int]]]:
    """FLOPs and saved bytes of every node; whether a gradient flows, and the storages, of every value."""
    flops: list[float] = []
    saved: list[float] = []
    now = [0.0]
    seen: set[int] = set()
    kept: list[torch.Tensor] = []  # keeps storages alive, so that their addresses stay unique
    remade = unfolded(enumerate(inputs), enumerate(nodes, len(inputs)))
    samples = samples_of(inputs) or _HINT

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(tensor)
            now[0] += storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive

    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        values: list[Any] = []
        for entry in inputs:
            fake = entry.laid_out(torch.empty(entry.value.sizes(samples, usual=True), dtype=entry.value.dtype))
            if entry.kind != "raw":  # weights are there anyway, activations are not
                seen.add(fake.untyped_storage()._cdata)
            if entry.kind == "constant":
                fake = mode.from_tensor(entry.laid_out(entry.data).detach())  # type: ignore[arg-type]
            kept.append(fake)
            values.append(fake.requires_grad_(entry.trainable) if entry.trainable else fake)
        with counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            for node in nodes:
                before, now[0] = counter.get_total_flops(), 0.0
                with torch.set_grad_enabled(not node.no_grad):
                    out = node.operator.call(
                        *(resolve(a, values) for a in node.args),
                        **{k: resolve(v, values) for k, v in node.kwargs.items()},
                    )
                tensors = _tensors(out)
                if len(values) in remade:  # a stage makes it again (meshcee/stage/remade.py)
                    kept += tensors
                    seen.update(t.untyped_storage()._cdata for t in tensors)
                values.append(out)
                counted = counter.get_total_flops() - before
                elementwise = 0 if node.operator.aliases else sum(t.numel() for t in tensors)
                flops.append(max(counted, elementwise) / samples)
                saved.append(now[0] / samples)
        # Asked at the end: a later write through a view gives the base a gradient, and every other view of it.
        requires = [any(t.requires_grad for t in _tensors(value)) for value in values]
        memory = [frozenset(t.untyped_storage()._cdata for t in _tensors(value)) for value in values]
    return flops, saved, requires, memory


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple | list) else [value]) if isinstance(t, torch.Tensor)]


def _aliases(
    inputs: Sequence[Input], nodes: Sequence[Node], memory: Sequence[frozenset[int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """A group for every value, by union-find over what may share memory; and every write, as (value, node position).

    What may share memory is told by the operators' schemas, and by the storages of the fake pass.
    Not every schema says that an operator returns a view (einsum, broadcast_tensors), and not every view that a schema
    allows is one for these shapes.
    """
    base = len(inputs)
    parent = list(range(base + len(nodes)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    written: list[tuple[int, int]] = []
    for position, node in enumerate(nodes):
        number = base + position
        if node.operator.name == "getitem":
            parent[root(number)] = root(node.refs[0])
        names = node.operator.argument_names
        for place in {*node.operator.aliases, *node.writes}:
            argument = node.args[place] if place < len(node.args) else node.kwargs.get(names[place])
            for shared in argument if isinstance(argument, list) else [argument]:
                if isinstance(shared, Ref):
                    if place in node.operator.aliases:
                        parent[root(number)] = root(shared.index)
                    if place in node.writes:
                        written.append((shared.index, position))
    first: dict[int, int] = {}  # storage -> the first value in it
    for number, storages in enumerate(memory):
        for storage in storages:
            parent[root(number)] = root(first.setdefault(storage, number))
    return [root(number) for number in range(len(parent))], written


def unfolded(inputs: Iterable[tuple[int, Input]], nodes: Iterable[tuple[int, Node]]) -> dict[int, tuple[int, ...]]:
    """Weights that lie packed: each value of small integers of frozen weights that is larger than they are -> the nodes that make
    it, in order.

    Autograd would keep it from F to W. As a step changes nothing that it comes from, a stage makes it again where a gradient
    asks for it (meshcee/stage/remade.py). What a write may reach is left out: nobody would write again.
    """
    held = {
        number: entry.value
        for number, entry in inputs
        if entry.kind != "raw" and not (entry.trainable or entry.mutated)
    }
    packed = {number for number, value in held.items() if value.dtype in PACKED}
    calls = dict(nodes)
    sources: dict[int, frozenset[int]] = {number: frozenset({number}) for number in held}
    # Of what a value is made of: a slice of a weight is less.
    sizes = {number: value.nbytes(1) for number, value in held.items()}
    made: dict[int, frozenset[int]] = {number: frozenset() for number in held}
    found: dict[int, tuple[int, ...]] = {}
    for number, node in calls.items():
        if not node.refs or is_random(node) or node.writes or any(r not in sources for r in node.refs):
            continue
        sources[number] = frozenset().union(*(sources[r] for r in node.refs))
        made[number] = frozenset({number}).union(*(made[r] for r in node.refs))
        size, own = sum(sizes[r] for r in set(node.refs)), node.value.nbytes(1)
        sizes[number] = min(size, own) if node.value.is_tensor else size
        if sources[number] & packed and node.value.is_tensor and own > size:
            found[number] = tuple(sorted(made[number]))
    reached = _written(calls, made)
    return {number: way for number, way in found.items() if not reached & {*way, *sources[number]}}


def _written(nodes: Mapping[int, Node], made: Mapping[int, frozenset[int]]) -> set[int]:
    """Values that share memory with what is written in place, or may: all that a target was made of, as far as it may be a view."""
    found: set[int] = set()
    for node in nodes.values():
        places = [
            node.args[k] if k < len(node.args) else node.kwargs.get(node.operator.argument_names[k])
            for k in node.writes
        ]
        pending = [
            ref.index
            for place in places
            for ref in (place if isinstance(place, list) else [place])
            if isinstance(ref, Ref)
        ]
        while pending:
            number = pending.pop()
            if number in found:
                continue
            found |= {number, *made.get(number, ())}
            if number in nodes and (
                number in made or nodes[number].operator.aliases or nodes[number].operator.name in VIEWS
            ):
                pending += nodes[number].refs
    return found


def find_recomputed(inputs: Sequence[Input], nodes: Sequence[Node], analysis: Analysis) -> frozenset[int]:
    """Values that any stage redoes for itself, instead of receiving them through all stages between.

    Always, what is computed from constants, small fixed buffers and sizes (causal masks, positions). And what elementwise
    operators make of raw inputs, where those are no larger than the result (attention masks, shifted labels). The owner
    then sends the raw input to the stages that need the value.
    """
    base, count = len(inputs), samples_of(inputs) or 1
    # Value number -> raw inputs that it is computed from; values that cannot be redone are absent.
    sources: dict[int, frozenset[int]] = {}
    for i, entry in enumerate(inputs):
        small = entry.kind == "buffer" and not entry.mutated and entry.value.nbytes(1) <= SMALL_BUFFER_BYTES
        if entry.kind == "raw":
            sources[i] = frozenset({i})
        elif entry.kind == "constant" or small:
            sources[i] = frozenset()
    for position, node in enumerate(nodes):
        number = base + position
        if node.writes or is_random(node) or analysis.group[number] in analysis.mutations:
            continue
        if _is_size(base, nodes, number):
            sources[number] = frozenset()  # carried, for a few bytes, to whoever computes with it
        elif all(r in sources for r in node.refs):
            sources[number] = frozenset().union(*(sources[r] for r in node.refs))
    found: set[int] = set()
    for number in range(base + len(nodes) - 1, base - 1, -1):
        if number not in sources or _is_size(base, nodes, number):
            continue
        node = nodes[number - base]
        raw_bytes = sum(inputs[i].value.nbytes(1, usual=True) for i in sources[number])
        worth = not raw_bytes or (
            0 < raw_bytes <= node.value.nbytes(1, usual=True)
            and count * analysis.flops[number - base] <= _elements(node.value)
        )
        if worth or number in found:
            found.add(number)
            found.update(r for r in node.refs if r >= base and not _is_size(base, nodes, r))
    return frozenset(found)


def _elements(value: Value) -> int:
    return value.nbytes(1, usual=True) // value.dtype.itemsize if value.dtype is not None else 0


def _is_size(base: int, nodes: Sequence[Node], number: int) -> bool:
    """A Python integer read off a tensor."""
    return number >= base and nodes[number - base].operator.name == "aten.sym_size.int"
