"""Asserts on values: `assert not h.isnan().any()`, and `if (var < 0).any(): raise ...`, in the user's code or a library's.

The idea: nobody knows values while a model is traced. But of such a line one knows the answer with which training goes on. The
trace gets this answer, and the graph computes the condition. The loss then depends on all conditions by an operator that raises
where one does not hold. A micro-batch at which the plain loop raises so fails here as well, and the owner says at which line.
Where another answer would not always raise, none is given: the branch is refused as any other.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import dis
import functools
import linecache
import math
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from meshcee.capture.export.masks import known, places, really
from meshcee.capture.export.settings import caller, replaced
from meshcee.user_code import is_ours

__all__ = ["Asserts", "side"]

_CAPTURE, _FUNCTIONS = (str(Path(__file__).parent / file) for file in ("with_loss.py", "export/functions.py"))
_LEAVES = (ast.Return, ast.Break, ast.Continue)
_CAUGHT = re.compile(r"(StopIteration|IndexError|KeyError|AttributeError|GeneratorExit)\b")  # by Python itself
_KNOWN = re.compile(r"(torch|contextlib\.nullcontext|nullcontext|no_grad|enable_grad|autocast)\b")  # handle nothing
_BOOL, _ITEM, _EQUAL, _CLOSE = torch.Tensor.__bool__, torch.Tensor.item, torch.equal, torch.allclose


class _Place(NamedTuple):
    """Of an expression in a file; columns in bytes, as `ast` and code have them."""

    line: int
    end_line: int
    column: int
    end_column: int

    @classmethod
    def of(cls, node: Any) -> _Place:
        return cls(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)

    def is_in(self, node: ast.AST) -> bool:
        outer = self.of(node)
        begins = (outer.line, outer.column) <= (self.line, self.column)
        return begins and (self.end_line, self.end_column) <= (outer.end_line, outer.end_column)


class Asserts:
    """Of one pass of forward and loss."""

    def __init__(self) -> None:
        self._holds: torch.Tensor | None = None  # whether all conditions so far do

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Meanwhile a question on a value that nobody knows has the answer with which training goes on, where there is one."""

        def is_true(tensor: torch.Tensor) -> bool:
            if (real := known(tensor)) is not None:
                with really():
                    return _BOOL(real)
            wanted = _wanted(caller()) if isinstance(tensor, FakeTensor) and tensor.dim() == 0 else None
            if wanted is None:
                return _BOOL(tensor)
            holds = (tensor != 0) if wanted else (tensor == 0)
            self._holds = holds if self._holds is None else self._holds & holds
            return wanted

        def item(tensor: torch.Tensor) -> Any:
            """What is only compared stays a tensor, as exact as Python's numbers are."""
            if (real := known(tensor)) is not None:
                with really():
                    return _ITEM(real)
            if isinstance(tensor, FakeTensor) and tensor.dim() == 0 and _is_compared(caller()):
                return tensor if tensor.dtype == torch.bool else tensor.double()
            return _ITEM(tensor)

        def equal(one: torch.Tensor, other: torch.Tensor) -> Any:
            if isinstance(one, FakeTensor) and one.shape == other.shape and _is_compared(caller()):
                return (one == other).all()
            return _EQUAL(one, other)

        def allclose(*given: Any, **options: Any) -> Any:
            asked = isinstance(given[0], FakeTensor) and _is_compared(caller())
            return torch.isclose(*given, **options).all() if asked else _CLOSE(*given, **options)

        def on_tensors(name: str) -> Callable[[Any], Any]:
            of_numbers, of_tensors = getattr(math, name), getattr(torch, name)
            return lambda number: (of_tensors if isinstance(number, FakeTensor) else of_numbers)(number)

        with contextlib.ExitStack() as patches:
            for name in _OF_NUMBERS:
                patches.enter_context(replaced(math, name, on_tensors(name)))
            for name in _NUMBERS:
                patches.enter_context(replaced(torch.Tensor, name, _of_known(getattr(torch.Tensor, name))))
            for owner, name, answer in (
                (torch.Tensor, "__bool__", is_true),
                (torch.Tensor, "item", item),
                (torch, "equal", equal),
                (torch, "allclose", allclose),
            ):
                patches.enter_context(replaced(owner, name, answer))
            patches.enter_context(_Placing())
            yield

    def upon(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, which nobody has unless all conditions hold."""
        if self._holds is None:
            return loss
        checked: torch.Tensor = torch.ops.aten._functional_assert_async.msg(self._holds, "assert", loss)
        return checked


class _Placing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _TAKE:
            args = args[0], _placed(args[1])
        return func(*args, **(kwargs or {}))


def _placed(index: Any) -> Any:
    """The same index with places instead of a mask that follows from fixed numbers, as torch itself looks them up."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, FakeTensor) and part.dtype == torch.bool and part.dim()
        parts += [part] if not is_mask or (real := known(part)) is None else places(real)
    return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]


_TAKE = torch.Tensor.__getitem__
_OF_NUMBERS = ("isnan", "isinf", "isfinite")
_NUMBERS = ("tolist", "__int__", "__float__", "__index__")


def _of_known(ask: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Of a tensor whose numbers follow from fixed ones: these, as in eager mode."""

    def answer(tensor: torch.Tensor) -> Any:
        if (real := known(tensor)) is None:
            return ask(tensor)
        with really():
            return ask(real)

    return answer


# -- where a question is asked


def _wanted(frame: types.FrameType) -> bool | None:
    """The answer to what this frame asks with which it does not raise, where every other raises."""
    found = None if _is_caught(frame) else _asked(frame)
    if found is None:
        return None
    statement, place = found
    want = side(statement.test, place, isinstance(statement, ast.Assert))
    calls = [] if _asks(frame) else [node for node in _expressions(statement) if _Place.of(node) == place]
    return want if all(_is_asking(call, want) for call in calls) else None


def _is_asking(call: ast.AST, want: bool | None) -> bool:
    """Whether it asks for the truth of all that it is given, until one is not `want`."""
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
    return name == "bool" or name == {True: "all", False: "any"}.get(want)  # type: ignore[arg-type]


def _is_compared(frame: types.FrameType) -> bool:
    """Whether such a line computes or compares with what this call gives, or asks for its truth, and does nothing else with it.
    Or such lines alone read the name that it gets.
    """
    if (found := _asked(frame)) is None:
        return _is_named(frame)
    statement, place = found
    return any(_Place.of(part) == place for node in (statement, *_expressions(statement)) for part in _parts(node))


def _is_named(frame: types.FrameType) -> bool:
    """Whether this call's number gets a name, and all that reads the name are parts of such lines, or stand behind them."""
    place, tree, first = _place(frame), _tree(frame.f_code.co_filename), frame.f_code.co_firstlineno
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)) if place and tree else ()
    own = next((f for f in functions if first in (f.lineno, *(d.lineno for d in f.decorator_list[:1]))), None)
    nodes = [*ast.walk(own)] if own is not None else []
    given = (n for n in nodes if isinstance(n, ast.Assign) and _Place.of(n.value) == place)
    match next(given, None):
        case ast.Assign([ast.Name(name)]):
            lines = [n for n in nodes if _is_such(n)]
            compared = {id(p) for line in lines for part in (line, *_expressions(line)) for p in _parts(part)}
            behind = {id(n) for line in lines for part in _never_run(line) for n in ast.walk(part)}
            others = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and id(n) not in compared | behind]
            return len(others) == 1  # where it is given
    return False


def _is_such(node: ast.AST) -> TypeGuard[ast.Assert | ast.If]:
    return isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _raises(node.body))


def _never_run(line: ast.Assert | ast.If) -> list[Any]:
    """What is behind a line that does not raise."""
    return line.body if isinstance(line, ast.If) else [line.msg] if line.msg is not None else []


def _expressions(statement: ast.Assert | ast.If) -> list[ast.expr]:
    return [node for node in ast.walk(statement.test) if isinstance(node, ast.expr)]


def _parts(node: ast.AST) -> list[ast.expr]:
    """The expressions whose truth or value this asks for, without a `not` before them."""
    match node:
        case ast.Compare(left, _, others):
            return [left, *others]
        case ast.BoolOp(_, values):
            found = values
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right):  # as exact as Python's
            found = [left, right]
        case ast.UnaryOp(ast.USub(), operand) | ast.Call(ast.Name("abs"), [operand]):
            found = [operand]
        case ast.Call(ast.Attribute(ast.Name("math"), name), [operand]) if name in _OF_NUMBERS:
            found = [operand]
        case ast.Assert(test) | ast.If(test):
            found = [test]
        case _:
            found = []
    return [part.operand if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not) else part for part in found]


@functools.lru_cache(maxsize=64)
def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]


def _now(frame: types.FrameType) -> int:
    """Which of its instructions runs; a call may stand in its cache."""
    return bisect.bisect_right(_instructions(frame.f_code), frame.f_lasti, key=lambda one: one.offset) - 1


def _asks(frame: types.FrameType) -> bool:
    """Whether the frame itself asks for the truth of what its last instruction has made."""
    name = _instructions(frame.f_code)[_now(frame)].opname
    return "JUMP" in name or name in ("TO_BOOL", "UNARY_NOT")


def _place(frame: types.FrameType) -> _Place | None:
    """Of the expression whose truth this frame asks for, or of the call that it makes."""
    at: Any = _instructions(frame.f_code)[_now(frame) - _asks(frame)].positions
    return None if at is None or None in at else _Place(at.lineno, at.end_lineno, at.col_offset, at.end_col_offset)


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _asked(frame: types.FrameType) -> tuple[ast.Assert | ast.If, _Place] | None:
    """The `assert`, or the `if` of a `raise`, in whose condition this frame is, and where there."""
    place, tree = _place(frame), _tree(frame.f_code.co_filename)
    if place is None or tree is None:
        return None
    nodes = ast.walk(tree)
    return next(((line, place) for line in nodes if _is_such(line) and place.is_in(line.test)), None)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether these end in a `raise` of what Python itself does not catch, and go nowhere else before."""
    last = body[-1]
    if isinstance(last, ast.Expr) and ast.unparse(last).startswith("sys.exit("):
        last = ast.Raise(last.value)
    if not isinstance(last, ast.Raise) or last.exc is None or _CAUGHT.match(ast.unparse(last.exc)):
        return False
    return all(isinstance(one, ast.Expr | ast.Assign) for one in body[:-1])


def side(node: ast.expr, place: _Place, want: bool) -> bool | None:
    """What the expression at this place must be for the condition to be `want`; None where something else might decide."""
    if _Place.of(node) == place:
        chain = isinstance(node, ast.Compare) and len(node.ops) > 1  # each of its comparisons is asked for
        return want if want or not chain else None
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            return side(operand, place, not want)
        case ast.BoolOp(op, values):
            asked = next((value for value in values if place.is_in(value)), values[0])
            decides = want == isinstance(op, ast.And) or asked is values[-1]  # those before the last are known then
            return side(asked, place, want) if decides else None
    return None


def _is_caught(frame: types.FrameType | None) -> bool:
    """Whether somebody between here and our call of forward or loss may handle what is raised, and go on.

    The backward of an autograd.Function counts as well: it becomes a graph of its own, in which no loss is.
    """
    while frame is not None and (file := frame.f_code.co_filename) != _CAPTURE:
        if file == _FUNCTIONS and frame.f_code.co_name == "_backward":
            return True
        tree = None if is_ours(file) else _tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            if _handles(node) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0):  # type: ignore[attr-defined]
                return True
        frame = frame.f_back
    return False


def _handles(node: ast.AST) -> bool:
    match node:
        case ast.Try(_, handlers, _, final):
            ends = all(isinstance(handler.body[-1], ast.Raise) for handler in handlers)
            return not ends or any(isinstance(one, _LEAVES) for part in (*handlers, *final) for one in ast.walk(part))
        case ast.With(items):
            return not all(_KNOWN.match(ast.unparse(item.context_expr)) for item in items)
    return False
