"""What the members of a group may share: which dimension of each value counts the samples of a micro-batch.

The idea: one pass over a program's values. A value that holds one row (or a fixed number of rows) for each sample can
be cut by samples. A value that is computed from parameters alone is the same for every member. A size may grow with the
samples. Everything that is computed across samples is none of these, and says so: it may not cross between groups. What
shapes cannot tell (a normalisation over the samples, rows in another order) is found by running parts and the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshcee.capture.graph.program import Batch, Dim, Free, Node, Program, Ref, Value
from meshcee.errors import PlanError

__all__ = ["Cut", "cuts_of", "divided", "why_unsplit"]

# Arithmetic on sizes: how often the number of samples is a factor of the result, given that of the arguments.
_SAME = frozenset({"int.add", "int.sub", "int.mod", "int.min", "int.max", "int.neg", "int.float", "int.int"})
_FACTORS = {"int.mul": 1, "int.floordiv": -1, "int.truediv": -1}


@dataclass(frozen=True)
class Cut:
    """How a value is divided among the members of a group.

    `dim` is the dimension of a tensor that counts samples, None for what every member has whole. A size with
    `per_sample` is proportional to the samples; other sizes are the same for all. `mixed` says why a value cannot be
    divided at all.
    """

    dim: int | None = None
    per_sample: bool = False
    mixed: str = ""


def cuts_of(program: Program) -> tuple[Cut, ...]:
    """One Cut for each value of the program, by number."""
    cuts: list[Cut] = []
    varies: list[bool] = []  # whether a value depends on the samples of the micro-batch
    for entry in program.inputs:
        raw = entry.kind == "raw"
        cuts.append(_of_shape(entry.value, varies=raw))
        varies.append(raw)
    for node in program.nodes:
        number = len(cuts)
        if node.value.is_tensor or node.value.multiple:
            varies.append(any(varies[r] for r in node.refs))
            cuts.append(_of_shape(node.value, varies=varies[number]))
        else:
            cuts.append(_of_size(node, program, cuts))
            varies.append(False)
    return tuple(cuts)


def _of_shape(value: Value, *, varies: bool) -> Cut:
    if value.multiple:
        return Cut()
    dims = [d for d, size in enumerate(value.shape) if _counts_samples(size)]
    if len(dims) == 1:
        return Cut(dims[0])
    if dims:
        return Cut(mixed=f"{value.name} compares samples with each other (it has two dimensions of samples)")
    return Cut(mixed=f"{value.name} is computed across the samples of a micro-batch" if varies else "")


def _counts_samples(size: Dim) -> bool:
    return isinstance(size, Batch) or (isinstance(size, Free) and size.batch)


def _of_size(node: Node, program: Program, cuts: list[Cut]) -> Cut:
    name = node.operator.name
    if name == "aten.sym_size.int":
        source, place = node.args[0], node.args[1]
        shape = program.value(source.index).shape
        return Cut(per_sample=_counts_samples(shape[place]))
    degrees = [int(cuts[a.index].per_sample) if isinstance(a, Ref) else 0 for a in node.args]
    mixed = next((cuts[r].mixed for r in node.refs if cuts[r].mixed), "")
    if name in _FACTORS and len(degrees) == 2:
        degree = degrees[0] + _FACTORS[name] * degrees[1]
    elif len(set(degrees)) == 1 and (name in _SAME or not degrees[0]):
        degree = degrees[0]
    else:
        degree = 2
    if mixed or degree not in (0, 1):
        return Cut(mixed=mixed or f"{node.value.name} is a number that is not proportional to the samples")
    return Cut(per_sample=degree == 1)


def why_unsplit(program: Program, first: int, end: int) -> str:
    """Why blocks [first, end) cannot be shared by samples, as far as the program tells; "" when nothing speaks against.

    For planners: cheap, and never wrong when it objects. Before training the owner also compares parts with the whole.
    """
    spec, cuts = program.slice(first, end), cuts_of(program)
    if spec.mutated:
        return f"its buffer {spec.mutated[0]!r} holds statistics of the whole batch"
    for _, node in spec.nodes:
        if node.operator.name == "aten.embedding.default" and node.argument("scale_grad_by_freq") is True:
            return f"the embedding{node.at} scales gradients by how often an index occurs in the batch (scale_grad_by_freq)"
    mixed = {number: cuts[number].mixed for number in spec.received_numbers}
    for number, node in spec.nodes:  # what is computed from something mixed here is mixed too
        mixed[number] = cuts[number].mixed or next((why for r in node.refs if (why := mixed.get(r, ""))), "")
    return next((why for n in (*spec.received_numbers, *spec.sent_numbers) if (why := mixed[n])), "")


def divided(program: Program, numbers: tuple[int, ...]) -> tuple[Cut, ...]:
    """The Cuts of these values; raises PlanError naming the first that cannot be divided."""
    cuts = cuts_of(program)
    for number in numbers:
        if cuts[number].mixed:
            raise PlanError(f"the model cannot be shared by samples here: {cuts[number].mixed}; use one device a stage")
    return tuple(cuts[number] for number in numbers)
