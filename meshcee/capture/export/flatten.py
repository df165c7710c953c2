"""From an nn.Module to flat nodes, by torch.export.

The idea: torch.export already gives aten calls in eager execution order. What is left to do here: give every value our
own number, call parameters by their original names, inline the sub-graphs of `torch.no_grad()`, and drop assertions.
An operation that cannot be captured becomes one sentence, which names the operation and the line.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from meshcee.capture.export.functions import BEGINS, ENDS, backward_program, renumbered, traced_functions
from meshcee.capture.export.modes import AUTOCAST_OFF, AUTOCAST_ON, SET_GRAD, SINCE, flat
from meshcee.capture.export.refusals import COUNTED, LENGTH, RANKS, SQUARE, Watched, explain, instead, where
from meshcee.capture.export.settings import PEERS_DEFAULT
from meshcee.capture.export.sizes import Branch, branches_of, one_order
from meshcee.capture.graph import (
    FUNCTION,
    Batch,
    Dim,
    Free,
    Input,
    Node,
    Operator,
    Ref,
    Value,
    canonical,
    contiguous,
    find_operator,
    is_random,
    operator_name,
    places_written,
    quiet,
    without_out,
)
from meshcee.errors import CaptureError, GraphError, MeshceeError
from meshcee.files.layout import offset_of
from meshcee.sampling import KERNELS
from meshcee.user_code import Place

__all__ = ["EXAMPLES", "Exported", "export_module", "is_factory"]

EXAMPLES = 3  # samples in the example batch; not 1, which torch.export would treat as special
UNBRANCHED = 2  # the least size that torch.export lets vary, whatever the model does
LENGTH_MARGIN = 8  # a size that varies may be this many times that of the example, if the model takes so much
_DROPPED = re.compile(r"aten\._assert.*|aten\.sym_constrain.*|.*_assert_scalar.*|_operator\.(and_|or_)")
# What reads memory that nobody wrote becomes its zero-filled twin: the same to a program that fills it first. Other names of
# an operator become its own.
_REWRITTEN = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.detach_.default": "aten.detach.default",
    "aten.swapaxes.default": "aten.transpose.int",
    "aten.swapdims.default": "aten.transpose.int",
    "aten.swapaxes_.default": "aten.transpose_.default",
    "aten.swapdims_.default": "aten.transpose_.default",
}
# What eager code may call on a tensor that needs a gradient, and the same operator in a graph only where none is recorded.
_INSTEAD = "write it with other torch functions"
_INSTEAD_OF = {
    "aten.item.default": "keep it a tensor, and take a length from a size, as torch.arange(x.shape[1])",
    "aten._conj.default": "write torch.complex(z.real, -z.imag)",
    "aten.bincount.default": COUNTED,
    "aten.renorm.default": "scale x by x.norm(dim=1, keepdim=True)",
}
_SAME = ("aten.view_as.default", "aten.to.dtype")  # where the type stays
_WITHOUT_GRADIENT = re.compile(r"aten\.randint_like\..*")


@dataclasses.dataclass
class Exported:
    """The flat graph before blocks are known."""

    inputs: list[Input]
    nodes: list[Node]
    outputs: list[int]
    constants: list[tuple[torch.Tensor, str]]  # the user's own tensors among the inputs, and where each is used
    branches: tuple[Branch, ...] = ()  # on sizes that vary


def export_module(
    module: nn.Module,
    arguments: Mapping[str, torch.Tensor],
    name_of: Callable[[str], str],
    varying: Set[tuple[str, int]] = frozenset(),
    most: int = EXAMPLES,
    *,
    evaluates: bool = False,
    fixed: bool = False,
) -> Exported:
    """Export `module(*arguments)`; `name_of` maps a parameter's or buffer's path to its one original name.

    `varying` are the dimensions of arguments whose size changes between micro-batches, besides the first. A micro-batch has
    at most `most` samples: code that takes another way for more is no obstacle. `evaluates`: no gradient is wanted. `fixed`: the
    graph is for as many samples as `arguments` have.
    """
    batch = torch.export.Dim("batch", min=1, max=max(most, EXAMPLES))
    first = {} if fixed else {0: batch}
    shapes = tuple({**first, **{d: torch.export.Dim.DYNAMIC for n, d in varying if n == name}} for name in arguments)
    try:
        with quiet(), flat(), one_order(most), traced_functions(backward=not evaluates), Watched() as watched:
            given = tuple(tensor.detach() for tensor in arguments.values())  # labels in x and in y would be one input
            with KERNELS.changed():
                exported = torch.export.export(module, given, dynamic_shapes=(shapes,), strict=False)
    except MeshceeError:
        raise
    except Exception as error:  # torch.export raises a dozen unrelated classes
        raise explain(error, watched) from error
    return _Flattener(exported, tuple(arguments), name_of).run(watched.branches)


@dataclasses.dataclass
class _Sizes:
    """How far each size that varies may go."""

    ranges: Mapping[Any, Any]  # symbol -> the sizes that the model takes
    hints: dict[Any, int] = dataclasses.field(default_factory=dict)  # symbol -> its size in the example
    equalities: list[Any] = dataclasses.field(default_factory=list)  # differences of sizes, 0 wherever the model runs
    branches: tuple[Branch, ...] = ()
    limits: dict[Any, int] = dataclasses.field(default_factory=dict)  # symbol -> what `most` has found

    def most(self, symbol: Any) -> int:
        """How far a size that varies may go: a table of positions, say, has so many rows, and labels are no more, or one less."""
        if symbol in self.limits:
            return self.limits[symbol]
        found, same = [LENGTH_MARGIN * self.hints[symbol], *self.upper(symbol)], {symbol}
        for other in self.hints.keys() - {symbol}:
            apart = self.hints[symbol] - self.hints[other]
            if any(e.subs(symbol, other) == 0 for e in self.equalities):
                found += self.upper(other)
                same.add(other)
            elif any(
                {symbol, other} <= e.free_symbols and e.is_polynomial() and e.subs(symbol, other + apart).expand() == 0
                for e in self.equalities
            ):
                found += [most + apart for most in (LENGTH_MARGIN * self.hints[other], *self.upper(other))]
        pieces = [branch for branch in self.branches if branch.pieces and branch.condition.free_symbols <= same]
        fits = (m for m in range(int(min(found)), 0, -1) if all(b.allows(dict.fromkeys(same, m)) for b in pieces))
        self.limits[symbol] = next(fits, int(min(found)))
        return self.limits[symbol]

    def upper(self, symbol: Any) -> list[Any]:
        return [r.upper for r in (self.ranges.get(symbol),) if r is not None and r.upper.is_finite]

    def least(self, symbol: Any) -> int:
        """Under which size forward takes another way than here, by its branches; 0 where there are none."""
        found = self.ranges[symbol].lower if symbol in self.ranges else 0
        return int(found) if found > UNBRANCHED else 0


class _Flattener:
    """Walks the exported graph once; `numbers` maps its nodes to our value numbers."""

    def __init__(self, exported: Any, raw: Sequence[str], name_of: Callable[[str], str]) -> None:
        self.exported = exported
        self.raw = raw
        self.name_of = name_of
        self.numbers: dict[Any, Any] = {}
        self.inputs: list[Input] = []
        self.constants: list[tuple[torch.Tensor, str]] = []
        self.nodes: list[Node] = []
        self.by_name: dict[str, int] = {}
        self.batch_symbol: Any = None
        self.size_numbers: dict[Any, int] = {}  # symbol of a raw input's size -> the one node that reads it
        self.raw_sizes: dict[Any, tuple[int, int]] = {}  # symbol -> the first raw input that has it, and where
        self.sizes = _Sizes(exported.range_constraints)
        self.converted: dict[tuple[int, int] | None, Ref] = {}  # what torch makes once under autocast -> the result
        self.waiting: dict[tuple[int, int] | None, Node] = {}  # the same, which a function's forward has made first
        self.backward_at: int | None = None  # where the backward pass of the function begins that is being walked

    def run(self, asked: Mapping[str, Place]) -> Exported:
        """`asked`: conditions of sizes that Python code has asked for, and where."""
        graph = self.exported.graph_module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        users = [s for s in self.exported.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
        raw_of = {s.arg.name: name for s, name in zip(users, self.raw)}
        specs = {s.arg.name: s for s in self.exported.graph_signature.input_specs}
        places: dict[Any, tuple[str, int]] = {}
        for placeholder in placeholders:
            sizes = getattr(placeholder.meta["val"], "shape", ()) if placeholder.name in raw_of else ()
            self.sizes.hints |= {symbol: _hint(size) for size in sizes if (symbol := _symbol(size)) is not None}
            for place, symbol in enumerate(map(_symbol, sizes)):
                places.setdefault(symbol, (raw_of[placeholder.name], place))
        modes = (getattr(placeholder.meta["val"], "fake_mode", None) for placeholder in placeholders)
        if (mode := next(filter(None, modes), None)) is not None:
            self.sizes.equalities = _equalities(mode.shape_env)
            pads = _pads(self.exported.graph_module)
            self.sizes.branches = branches_of(mode.shape_env, asked, places, pads)
        for placeholder in placeholders:
            self._input(placeholder, specs[placeholder.name], raw_of)
        if any(node.target is AUTOCAST_ON for node in graph.nodes):
            from meshcee.capture.export.autocast import with_conversions

            with_conversions(graph)
        self._graph(graph)
        _refuse_asserted(graph)
        output = next(n for n in graph.nodes if n.op == "output")
        kinds = [s.kind.name for s in self.exported.graph_signature.output_specs]
        outputs = [
            self._argument(a, output) for a, kind in zip(output.args[0], kinds, strict=True) if kind == "USER_OUTPUT"
        ]
        if not all(isinstance(o, Ref) for o in outputs):
            raise CaptureError("an output of the model does not depend on its inputs; return tensors made from them")
        return _canonical(
            Exported(self.inputs, self.nodes, [o.index for o in outputs], self.constants, self.sizes.branches)
        )

    def _input(self, placeholder: Any, spec: Any, raw_of: Mapping[str, str]) -> None:
        kind = spec.kind.name
        held = placeholder.meta["val"]
        if kind == "USER_INPUT":
            if not isinstance(held, torch.Tensor):
                raise CaptureError(f"input {placeholder.name} is not a tensor; make it one in data[i]")
            if self.batch_symbol is None:
                self.batch_symbol = _symbol(held.shape[0])
            for place, size in enumerate(held.shape):
                if (symbol := _symbol(size)) is not None:
                    self.raw_sizes.setdefault(symbol, (len(self.inputs), place))
            made = Input("raw", self._value(held, raw_of[placeholder.name]))
        elif kind in ("PARAMETER", "BUFFER"):
            name = self.name_of(spec.target)
            if name in self.by_name:
                self.numbers[placeholder] = Ref(self.by_name[name])
                return
            trainable = kind == "PARAMETER" and bool(held.requires_grad)
            persistent = kind == "PARAMETER" or bool(spec.persistent)
            value = dataclasses.replace(self._value(held, name), requires_grad=trainable)
            strides, offset = _strides(held), _offset(self.exported, spec.target, held)
            made = Input(kind.lower(), value, trainable, persistent=persistent, strides=strides, offset=offset)
            self.by_name[name] = len(self.inputs)
        elif kind == "CONSTANT_TENSOR":
            given = self.exported.constants[spec.target].detach()
            if given.layout != torch.strided:
                at = next((where(user) for user in placeholder.users), "")
                raise CaptureError(
                    f"a sparse tensor is used{at}, and graphs have dense tensors only: give its to_dense()"
                )
            self.constants += [(given, str(where(user))) for user in list(placeholder.users)[:1]]
            given = given.resolve_conj().resolve_neg()
            value = self._value(given, f"c{len(self.inputs)}")
            made = Input("constant", value, data=given.contiguous(), strides=_strides(given), offset=offset_of(given))
        elif kind == "CUSTOM_OBJ":
            at = next((where(user) for user in placeholder.users), "")
            raise CaptureError(
                f"a torch.Generator is used{at}: leave generator= out, as the job seeds every micro-batch"
            )
        else:
            raise CaptureError(f"the model has an input of kind {kind}, which cannot be sent to a peer")
        self.numbers[placeholder] = Ref(len(self.inputs))
        self.inputs.append(made)

    def _graph(self, graph: Any) -> None:
        needed, no_grad, around = _needed(graph), False, torch.is_grad_enabled()
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or node not in needed or node.target in (AUTOCAST_ON, AUTOCAST_OFF):
                continue
            if node.target is SET_GRAD:
                no_grad = around and not node.args[0]
            elif node.op == "call_function":
                self._call(node, no_grad)
            else:
                raise CaptureError(f"the exported graph holds a {node.op}{where(node)}, which cannot be sent to a peer")

    def _call(self, node: Any, no_grad: bool) -> None:
        target = node.target
        if target is BEGINS:
            self.backward_at = len(self.nodes)
            self.numbers[node] = [Ref(-1 - place) for place in range(len(node.args[0]))]
            return
        if target is ENDS:
            self._function(node)
            return
        name = operator_name(target)
        if _DROPPED.fullmatch(name or str(target)):
            return
        if name == "getitem" and isinstance(self.numbers.get(node.args[0]), list):
            self.numbers[node] = self.numbers[node.args[0]][node.args[1]]  # of what a function's backward pass is given
            return
        args = [self._argument(a, node) for a in node.args]
        kwargs = {k: self._argument(v, node) for k, v in node.kwargs.items()}
        if name in _REWRITTEN:
            name = _REWRITTEN[name]
            if name == "aten.zeros.default":
                kwargs.pop("memory_format", None)
        into = kwargs.pop("out") if isinstance(kwargs.get("out"), Ref) and without_out(target) is not None else None
        if into is not None:
            name = operator_name(without_out(target))
        no_grad = no_grad or _WITHOUT_GRADIENT.fullmatch(name or "") is not None
        if name is None:
            if isinstance(target, types.BuiltinFunctionType):
                problem = f"Python computes {target.__name__}() of a size{where(node)}"
                raise CaptureError(f"{problem}; {instead(where(node), LENGTH)}")
            advice = instead(where(node), "write it with torch functions")
            raise CaptureError(f"operation {target}{where(node)} is not an aten operator; {advice}")
        try:
            operator: Operator = find_operator(name)
        except GraphError as error:
            advice = _INSTEAD_OF.get(name, _INSTEAD)
            advice = instead(where(node), advice)
            raise CaptureError(f"operation {name}{where(node)} cannot run on a peer: {error}; {advice}") from error
        held = node.meta.get("val")
        if name == "aten.sym_size.int" and (symbol := _symbol(held)) in self.raw_sizes:
            if symbol in self.size_numbers:  # one node for each size, whoever asks
                self.numbers[node] = Ref(self.size_numbers[symbol])
                return
            source, place = self.raw_sizes[symbol]
            args = [Ref(source), place]
            self.size_numbers[symbol] = len(self.inputs) + len(self.nodes)
        if is_factory(target) and torch.get_default_dtype() != PEERS_DEFAULT:
            kwargs["dtype"] = held.dtype  # as it was made here
        once = self._once(node)
        if once in self.converted:
            self.numbers[node] = self.converted[once]
            return
        inside = once is not None and args[0] != Ref(once[0])  # of a function's forward
        if once is not None:  # it has a gradient wherever it is made
            no_grad, args[0] = False, Ref(once[0])
        value = self._value(held, "", f"operation {name}{where(node)} makes", where(node))
        self._add(
            node, Node(operator, tuple(args), kwargs, value, no_grad=no_grad, scope=_scope(node), at=str(where(node)))
        )
        if inside:
            self.waiting[once] = self.nodes[-1]
        elif once is not None:
            self.converted[once] = self.numbers[node]
        if into is not None:  # what was computed is written to where it was asked for
            copied = find_operator("aten.copy_.default")
            self._add(
                node, dataclasses.replace(self.nodes[-1], operator=copied, args=(into, self.numbers[node]), kwargs={})
            )

    def _once(self, node: Any) -> tuple[int, int] | None:
        """A trained weight and since when autocast is on, if the node is what torch then makes once: its conversion."""
        if SINCE not in node.meta or self.backward_at is not None:
            return None
        number = self.numbers[node.args[0]].index
        while (made := self._made(number)) is not None:  # a function's forward is given a view of each argument
            source = made.refs[0] if made.refs else number
            if made.operator.name not in _SAME or self._value_of(source).dtype != made.value.dtype:
                return None
            number = source
        return (number, node.meta[SINCE]) if self.inputs[number].trainable else None

    def _made(self, number: int) -> Node | None:
        return self.nodes[number - len(self.inputs)] if number >= len(self.inputs) else None

    def _value_of(self, number: int) -> Value:
        made = self._made(number)
        return self.inputs[number].value if made is None else made.value

    def _function(self, node: Any) -> None:
        """Cut the backward pass out of the nodes, as a program of its own, and give it to the function's node."""
        outputs, inputs, grads, fixed = (self._argument(a, node) for a in node.args)
        begins, self.backward_at = self.backward_at, None
        assert begins is not None
        first = len(self.inputs) + begins
        values = [*(entry.value for entry in self.inputs), *(made.value for made in self.nodes)]
        behind = self.nodes[begins:]
        del self.nodes[begins:]
        stays: dict[
            int, int
        ] = {}  # sizes of what was there before: old number -> new, as other nodes may read them too
        inner: dict[int, Node] = {}
        for number, made in enumerate(behind, first):
            is_size = made.value.dtype is None and not made.value.multiple
            if is_size and all(r >= 0 and r not in inner for r in made.refs):
                stays[number] = len(self.inputs) + len(self.nodes)
                self.nodes.append(renumbered(made, {n: stays.get(n, n) for n in made.refs}))
            else:
                inner[number] = made
        self.numbers = {n: _moved(held, stays) for n, held in self.numbers.items()}
        self.size_numbers = {symbol: stays.get(number, number) for symbol, number in self.size_numbers.items()}
        saved, backward = backward_program(inner, [values[r.index] for r in outputs], [r.index for r in grads], values)
        arguments = outputs, inputs, [Ref(stays.get(number, number)) for number in saved], fixed
        ended = self.nodes[outputs[0].index - len(self.inputs)] if outputs[0].index >= len(self.inputs) else None
        made = Node(find_operator(FUNCTION), arguments, {"backward": backward}, Value("", None, multiple=True))
        self._add(node, made if ended is None else dataclasses.replace(made, scope=ended.scope, at=ended.at))
        result = self.numbers[node]
        for once, conversion in self.waiting.items():  # autograd has the function before it
            self._add(node, conversion)
            self.converted[once] = self.numbers[node]
        self.waiting, self.numbers[node] = {}, result

    def _add(self, node: Any, made: Node) -> None:
        self.numbers[node] = Ref(len(self.inputs) + len(self.nodes))
        self.nodes.append(dataclasses.replace(made, value=dataclasses.replace(made.value, name=f"n{len(self.nodes)}")))

    def _argument(self, argument: Any, node: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.numbers[argument]
        if isinstance(argument, tuple | list):
            return [self._argument(a, node) for a in argument]
        if isinstance(
            argument, bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format | None
        ):
            return argument
        if isinstance(argument, torch.device):
            return argument
        said = f"argument {argument!r} of {node.target}{where(node)} cannot be sent to a peer"
        raise CaptureError(f"{said}; {instead(where(node), _INSTEAD)}")

    def _value(self, held: Any, name: str, maker: str = "there is", place: Place = Place()) -> Value:  # noqa: B008
        if isinstance(held, torch.Tensor):
            shape = tuple(self._dim(d, maker, place) for d in held.shape)
            if any(isinstance(size, torch.SymInt) and size.node.hint is None for size in (*held.shape, *held.stride())):
                raise _follows_from_values(maker, place)  # it has met a tensor of as many samples
            strides = [_hint(s) for s in held.stride()]
            sizes = [_hint(s) for s in held.shape]
            order = range(len(shape)) if held.is_contiguous() else _order(sizes, strides)
            return Value(name, held.dtype, shape, tuple(order))
        if isinstance(held, tuple | list):
            return Value(name, None, multiple=True)
        return Value(name, None)

    def _dim(self, dim: Any, maker: str, place: Place) -> Dim:
        if isinstance(dim, int):
            return dim
        expression = dim.node.expr
        ways = [(expression, False)]
        if self.batch_symbol is not None:
            ways.insert(0, ((expression / self.batch_symbol).expand(), True))
        for each, batch in ways:
            if batch and each.is_Integer:
                return Batch(int(each))
            if self.batch_symbol not in each.free_symbols and each.free_symbols <= self.sizes.hints.keys():
                hints = {s: self.sizes.hints[s] for s in each.free_symbols}
                most = {s: self.sizes.most(s) for s in hints}
                usual, limit = int(each.subs(hints)), int(each.subs(most))
                return Free(max(usual, limit), usual, batch, self.sizes.least(each))
        if {s for s in expression.free_symbols if s not in self.sizes.hints and s != self.batch_symbol}:
            raise _follows_from_values(maker, place)
        powers = expression.as_poly(self.batch_symbol)
        apart = (
            SQUARE
            if powers is not None and powers.degree() > 1
            else "keep samples apart, or pad what is left out, as by F.pad"
        )
        advice = instead(place, RANKS if "//" in str(expression) else apart)
        said = str(expression).replace(str(self.batch_symbol), "n")
        raise CaptureError(f"{maker} a tensor with size {said}, no multiple of the batch size; {advice}")


def _follows_from_values(maker: str, place: Place) -> CaptureError:
    advice = instead(
        place,
        "use a mask of fixed size, as torch.where does: s.masked_fill(mask, -torch.inf) leaves out in a softmax, and "
        "(c * mask).sum() / mask.sum() is a mean; of a mask that stays as it is, keep the places: register_buffer('kept', "
        "mask.nonzero()[:, 0])",
    )
    return CaptureError(f"{maker} a tensor whose size follows from values of the data; {advice}")


def is_factory(target: Any) -> bool:
    """Whether an operator makes a tensor of no other, in torch's default type where none is said."""
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    typed = [argument.name for argument in arguments if argument.name == "dtype"]
    return bool(typed) and not any("Tensor" in str(argument.type) for argument in arguments)


def _equalities(shapes: Any) -> list[Any]:
    """What torch has found to be equal while it traced: of each such pair the difference, without what is 0 by itself."""
    equal = [guard.expr for guard in shapes.guards if guard.expr.is_Equality]
    found = [(e.lhs - e.rhs).subs(shapes.replacements).expand() for e in equal]
    return [difference for difference in found if difference != 0]


def _pads(module: Any) -> set[Any]:
    """By how many the graph pads, where that follows from sizes."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    padding = [
        n
        for g in graphs
        for n in g.nodes
        if operator_name(n.target) in ("aten.pad.default", "aten.constant_pad_nd.default")
    ]
    return {_symbol(given.meta.get("val")) for n in padding for given in n.all_input_nodes} - {None}


def _refuse_asserted(graph: Any) -> None:
    """Raise CaptureError where torch asserts something of a number that is read from a tensor: no peer would."""
    for node in graph.nodes:
        found, waiting = set(), [node] if node.target is torch.ops.aten._assert_scalar.default else []
        while waiting:
            one = waiting.pop()
            found.add(one)
            waiting += [before for before in one.all_input_nodes if before not in found]
            if one.target is torch.ops.aten.item.default:
                advice = instead(where(one), "write the condition of tensors, as assert not bad.any()")
                raise CaptureError(
                    f"a number that is read from a tensor{where(one)} decides whether forward fails; {advice}"
                )


def _needed(graph: Any) -> set[Any]:
    """Nodes that results or effects depend on. An assertion is no effect, nor what only assertions read."""
    needed: set[Any] = set()
    for node in reversed(graph.nodes):
        target, name = node.target, operator_name(node.target) if node.op == "call_function" else None
        effect = name is None  # a mode, an input, the output
        if isinstance(target, torch._ops.OpOverload):
            writes = places_written(target._schema) != ()
            effect = target is BEGINS or writes or torch.Tag.nondeterministic_seeded in target.tags
        if node in needed or (effect and not _DROPPED.fullmatch(name or str(target))):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return needed


def _order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions from slow to fast; those of size 1, or expanded to more, go where they were, between their neighbours."""
    apart = [d for d in range(len(sizes)) if sizes[d] != 1 and strides[d] != 0]
    order = sorted(apart, key=lambda d: (-strides[d], d))
    for d in range(len(sizes)):
        if d not in apart:
            order.insert(min(d, len(order)), d)
    return order


def _strides(held: torch.Tensor) -> tuple[int, ...]:
    found = canonical(held.shape, held.stride())
    return () if found == contiguous(held.shape) else found


def _offset(exported: Any, name: str, held: torch.Tensor) -> int:
    """Where the user's own tensor begins in memory, of which `held` is a fake."""
    return offset_of(exported.state_dict.get(name, held))


def _symbol(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _scope(node: Any) -> str:
    """Path of the innermost module, "" for the model itself; repeated calls of a module keep their "@n"."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [(key, entry[0]) for key, entry in stack.items() if not key.startswith("_empty")]
    if not entries:
        return ""
    key, path = entries[-1]
    path = re.sub(r"@\d+", "", path)
    call = re.search(r"@(\d+)$", key)
    path = path.removeprefix("model").removeprefix(".")
    return path + (f"@{call[1]}" if call else "")


def _canonical(exported: Exported) -> Exported:
    """Drop what nothing needs (random draws are needed: they advance the generator), number anew.

    Outputs of a node with several are taken right behind it, so that no tuple ever crosses a cut.
    """
    inputs, nodes = exported.inputs, exported.nodes
    base = len(inputs)
    needed = set(exported.outputs)
    for i in range(len(nodes) - 1, -1, -1):
        if base + i in needed or nodes[i].writes or is_random(nodes[i]):
            needed.update(nodes[i].refs)
            needed.add(base + i)
    taken: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.operator.name == "getitem" and base + i in needed:
            taken.setdefault(node.refs[0], []).append(base + i)
    keep: list[int] = [i for i in range(base) if i in needed]
    for i, node in enumerate(nodes):
        if base + i in needed and node.operator.name != "getitem":
            keep.append(base + i)
            pending = [base + i]
            while pending:
                items = taken.get(pending.pop(0), [])
                keep += items
                pending += items
    renumber = {old: new for new, old in enumerate(keep)}
    new_inputs = []
    new_nodes: list[Node] = []
    for number in keep:
        if number < base:
            new_inputs.append(inputs[number])
            continue
        node = renumbered(nodes[number - base], renumber)
        value = dataclasses.replace(node.value, name=f"n{len(new_nodes)}")
        new_nodes.append(dataclasses.replace(node, value=value))
    outputs = [renumber[o] for o in exported.outputs]
    return dataclasses.replace(exported, inputs=new_inputs, nodes=new_nodes, outputs=outputs)


def _moved(held: Any, places: Mapping[int, int]) -> Any:
    """What the flattener holds of a node of torch's graph, after some values have got other numbers."""
    if isinstance(held, list):
        return [_moved(one, places) for one in held]
    return Ref(places.get(held.index, held.index)) if isinstance(held, Ref) else held
