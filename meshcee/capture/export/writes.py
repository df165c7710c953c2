"""What forward writes in place that it has not made: buffers and frozen parameters are marked, samples copied, the rest refused.

The idea: a write counts wherever it lands in memory. `buffer[:, 0] = h` writes the buffer as `buffer.copy_(h)` does, so
the storages of the fake pass say who is written, not the arguments of the operators that write.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from meshcee.capture.export.flatten import Exported
from meshcee.capture.export.refusals import COMPUTED
from meshcee.capture.graph import Analysis, Input, Node, Program, Ref, analyse, find_operator, unexpanded
from meshcee.errors import CaptureError

__all__ = ["is_copy", "overlap", "place_of", "refuse_aliases", "refuse_overlaps", "refuse_shared", "settled"]

MOST_COMPARED = 1 << 22  # numbers of a tensor; larger ones overlap if their ranges do


def settled(exported: Exported, changed: Set[str] = frozenset()) -> tuple[list[Input], list[Node], list[int], Analysis]:
    """Inputs, nodes and outputs of the same computation, in which only buffers are written; and its analysis.

    No output shares memory with the parameters and buffers of the names `changed`.
    """
    inputs, nodes, outputs = list(exported.inputs), list(exported.nodes), list(exported.outputs)
    try:
        analysis = analyse(inputs, nodes)
    except RuntimeError as error:  # as an `out=` of another size than the result, which torch would resize
        said = str(error).partition("\n")[0]
        raise CaptureError(f"the graph that export makes of the model does not run: {said}; leave out= out") from error
    samples = [n for n in analysis.written if inputs[n].kind == "raw"]
    if samples:  # they are fresh in every micro-batch, so a copy is as good; and a stage may run F twice on them
        nodes, outputs = _copied(inputs, nodes, outputs, samples, analysis)
        analysis = analyse(inputs, nodes)
    for number, position in analysis.written.items():
        entry = inputs[number]
        # A teacher that follows its student: state, like a buffer.
        if entry.kind == "parameter" and not entry.trainable:
            entry = dataclasses.replace(entry, kind="buffer")
        if entry.kind != "buffer":
            what = (
                f"parameter {entry.name!r}" if entry.kind == "parameter" else "a tensor that is no buffer of the model"
            )
            advice = (
                COMPUTED
                if entry.kind == "parameter"
                else "work on a copy of it, or register_buffer what is to be kept in a module of the model; a loss that keeps "
                "buffers must be a part of the model, too, and a frozen net in it with batch norm wants net.eval()"
            )
            raise CaptureError(f"the model changes {what} in place{nodes[position].at}; {advice}")
        inputs[number] = dataclasses.replace(entry, mutated=True)
    groups = {analysis.group[n] for n, entry in enumerate(inputs) if entry.name in changed}
    if shared := [number for number in dict.fromkeys(outputs) if analysis.group[number] in groups]:
        nodes, outputs = _cloned(inputs, nodes, outputs, analysis, shared)
        analysis = analyse(inputs, nodes)
    return inputs, nodes, outputs, analysis


def is_copy(program: Program, node: Node) -> bool:
    """Whether a node is a sample's copy, which the rest of the graph writes in its place."""
    [source, *rest] = node.refs or (len(program.inputs),)
    known = source < len(program.inputs) and program.inputs[source].kind == "raw" and not rest
    return known and node.operator.name == "aten.clone.default" and not node.at


def refuse_overlaps(tensors: Mapping[str, torch.Tensor], written: Set[str]) -> None:
    """Raise CaptureError where training changes memory that another parameter or buffer has too.

    Peers keep every one in memory of its own. Slices of one flat tensor that do not overlap are no matter.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in sharing.values():
        expanded = [n for n in names if 0 in tensors[n].stride() and tensors[n].numel()]
        if not written & set(names) or (len(names) == 1 and not expanded):
            continue
        first = tensors[names[0]]
        owner = torch.full((first.untyped_storage().nbytes() // first.itemsize,), -1, dtype=torch.int32)
        for number, name in enumerate(names):
            tensor = tensors[name]
            if tensor.dtype != first.dtype or (name in written and name in expanded):
                other = name
            else:
                part = owner.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
                before = int(part.max()) if part.numel() else -1
                both = {name, names[before]} if before >= 0 else set()
                other = names[before] if both & written else ""
                if not other:
                    own = tuple(slice(0, n) for n in unexpanded(part.shape, part.stride()))
                    part[own] = number
            if other:
                raise CaptureError(
                    f"{name!r} shares memory with {'itself' if other == name else repr(other)}, and training changes it; "
                    "tie whole tensors, and write transposes, slices and expansions of them in forward"
                )


def refuse_aliases(constants: Iterable[tuple[torch.Tensor, str]], changed: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise CaptureError where a tensor that the graph holds as it is has memory of what training changes by name.

    A view that was made outside of forward, as `self.w = self.head.weight.detach()`, follows the weight in a plain loop.
    """
    own = [(name, place_of(tensor)) for name, tensor in changed if not is_fake(tensor) and tensor.device.type == "cpu"]
    for constant, at in constants:
        first, end = place_of(constant)
        for name, (own_first, own_end) in own:
            if first < own_end and own_first < end:
                raise CaptureError(
                    f"the tensor that is used{at} shares memory with {name!r}, which training changes, and it is no parameter or "
                    f"buffer itself: take it from {name!r} in forward, or in the loss, each time"
                )


def refuse_shared(programs: Iterable[Program], inputs: Mapping[str, torch.Tensor], held: Set[str]) -> None:
    """Raise CaptureError where forward writes a raw input in memory that another one has too, or that outlives the micro-batch
    (`held`): eager code changes both.
    """
    written = {p.inputs[n.refs[0]].name for p in programs for n in p.nodes if is_copy(p, n)}
    for name in sorted(written & held):
        raise CaptureError(
            f"collate gives {name} as a view of what the data holds, and forward or the loss changes it, so the data would change: "
            f"return {name}.clone()"
        )
    for one, other in itertools.combinations(inputs, 2):
        if written & {one, other} and overlap(inputs[one], inputs[other]):
            raise CaptureError(
                f"collate gives {one} and {other} the same memory, and forward or the loss changes it: return {other}.clone()"
            )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have a number in common: parts of one tensor may lie between each other."""
    (first, end), (other_first, other_end) = place_of(a), place_of(b)
    if first >= other_end or other_first >= end:
        return False
    if a.itemsize != b.itemsize or max(a.numel(), b.numel()) > MOST_COMPARED:
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    """Of each number."""
    found = torch.tensor([tensor.data_ptr()])
    for size, stride in zip(tensor.shape, tensor.stride()):
        found = (found[:, None] + torch.arange(size) * (stride * tensor.itemsize)).flatten()
    return found


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and behind its last one. Of an array that is given twice there are two storages."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize * (tensor.numel() > 0)


def _copied(
    inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[int], numbers: Sequence[int], analysis: Analysis
) -> tuple[list[Node], list[int]]:
    """The nodes with clones of these inputs, which all others read in their place; and the outputs.

    Each clone stands before the first node that reads it, as no cut may lie between a clone and its last in-place change.
    """
    base, clone = len(inputs), find_operator("aten.clone.default")
    before: dict[int, list[int]] = {}
    for number in numbers:
        before.setdefault(min(analysis.users[number]), []).append(number)
    places = {n: n for n in range(base)}
    made: list[Node] = []
    for position, node in enumerate(nodes):
        for number in before.get(position, ()):
            places[number] = base + len(made)
            made.append(Node(clone, (Ref(number),), {}, inputs[number].value))
        places[base + position] = base + len(made)
        kwargs = {k: _moved(v, places) for k, v in node.kwargs.items()}
        made.append(dataclasses.replace(node, args=_moved(node.args, places), kwargs=kwargs))
    return _named(made), [places[o] for o in outputs]


def _cloned(
    inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[int], analysis: Analysis, shared: Sequence[int]
) -> tuple[list[Node], list[int]]:
    """The nodes, with clones of the shared values, and the outputs, which are the clones.

    Training changes that memory while an output waits to be sent. And a stage that only returns a parameter holds the values that
    the stage was given first. So the parameter's clone stands behind the last node that uses the parameter, in a stage that
    trains the parameter.
    """
    base = len(inputs)
    behind: dict[int, list[int]] = {}  # position of a node -> values whose clones go behind it; -1 is the start
    for number in shared:
        users = analysis.users[number] if number < base else [number - base]
        behind.setdefault(max(users, default=len(nodes) - 1), []).append(number)
    places = {n: n for n in range(base)}
    clones: dict[int, int] = {}
    made: list[Node] = []
    for position in range(-1, len(nodes)):
        if position >= 0:
            node = nodes[position]
            places[base + position] = base + len(made)
            kwargs = {k: _moved(v, places) for k, v in node.kwargs.items()}
            made.append(dataclasses.replace(node, args=_moved(node.args, places), kwargs=kwargs))
        for number in behind.get(position, ()):
            value = inputs[number].value if number < base else nodes[number - base].value
            clones[number] = base + len(made)
            made.append(Node(find_operator("aten.clone.default"), (Ref(places[number]),), {}, value))
    return _named(made), [clones.get(o, places[o]) for o in outputs]


def _named(nodes: Sequence[Node]) -> list[Node]:
    return [dataclasses.replace(n, value=dataclasses.replace(n.value, name=f"n{i}")) for i, n in enumerate(nodes)]


def _moved(argument: Any, places: Mapping[int, int]) -> Any:
    """An argument that refers to the new numbers of values."""
    if isinstance(argument, Ref):
        return Ref(places[argument.index])
    if isinstance(argument, list | tuple):
        return type(argument)(_moved(a, places) for a in argument)
    return argument
