"""What cannot be captured, in one sentence: the operation, the line of the user's file, what to do.

The idea: torch.export fails in a dozen classes of its own, and is silent about what it leaves out: it records operators, not
the rules by which gradients flow. A custom autograd.Function would train with the gradient of its forward pass, a hook on
a gradient would never run, a number drawn by Python would be drawn once for all steps. The mesh would then train something
else than the plain loop, so these are refused too, while the model is traced.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from meshcee.errors import CaptureError, MeshceeError

__all__ = [
    "FixedSizes",
    "explain",
    "faithful",
    "not_the_users",
    "refuse_functions",
    "refuse_hooks",
    "users_lines",
    "where",
]

_NOT_THE_USERS = re.compile(r"/torch/|/meshcee/capture/|/contextlib\.py|/logging/|^<")
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


def not_the_users(file: str) -> bool:
    """Whether code of this file is torch's or ours."""
    return _NOT_THE_USERS.search(file) is not None


def where(node: Any) -> str:
    """ " at FILE:LINE `code`" of the innermost user frame in the stack trace of a node of an exported graph."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s+(.*)', node.meta.get("stack_trace") or "")
    for file, line, code in reversed(frames):
        if not _NOT_THE_USERS.search(file):
            return f" at {file}:{line} `{code.strip()}`"
    return ""


@contextlib.contextmanager
def users_lines() -> Iterator[None]:
    """While tracing, nodes get every frame that is the user's: torch keeps those of forward alone, not of what it calls."""
    tracer: Any = torch.fx.proxy.TracerBase
    before = tracer._filter_traceback_frames

    def own(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in frames if not _NOT_THE_USERS.search(f.filename)][-1:])

    tracer._filter_traceback_frames = own
    try:
        yield
    finally:
        tracer._filter_traceback_frames = before


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    found = [f for f in frames if not _NOT_THE_USERS.search(f.filename)]
    return f" at {found[-1].filename}:{found[-1].lineno} `{(found[-1].line or '').strip()}`" if found else ""


# What torch says -> what went wrong (None: its own words) and what to do.
_ADVICE: tuple[tuple[str, str | None, str], ...] = (
    (
        r"data-dependent|unbacked|GuardOnDataDependent",
        "a Python number or a branch is made from the values of a tensor",
        "write a branch with torch.where or a mask, and keep numbers as tensors",
    ),
    (r"\.numpy\(\)|__array__|__format__", None, "use torch functions of tensors; look at values outside the model"),
    (
        r"fake tensor in the exported program constant",
        "a parameter's .data is used, or a tensor that is neither parameter nor buffer",
        "use .detach(), or register_buffer",
    ),
    (r"device.*meta|meta.*device", None, "create tensors on the device of the input"),
    (
        r"Constraints violated|specializ",
        "the model fixes a size that changes between micro-batches",
        "compute sizes from x.shape instead of a constant",
    ),
)


def explain(error: BaseException, fixed: str = "") -> CaptureError:
    """What torch.export could not do. `fixed` is where a size became a constant, for errors that do not say."""
    text = str(error)
    at = _innermost(traceback.extract_tb(error.__traceback__)) or fixed
    first = re.sub(r"\s+", " ", text.strip().splitlines()[0] if text.strip() else "")[:300].rstrip(".;")
    problem, advice = f"{type(error).__name__}: {first}", "replace this operation by torch functions of tensors"
    for pattern, words, known in _ADVICE:
        if re.search(pattern, f"{type(error).__name__} {text}", re.DOTALL):
            problem, advice = words or problem, known
            break
    return CaptureError(f"the model cannot be captured{at}: {problem}; {advice}")


class FixedSizes(logging.Handler):
    """Notes where torch makes a size that should vary a constant: it logs that there, but its error does not say."""

    _LOG = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.at = ""  # the first place

    def emit(self, record: logging.LogRecord) -> None:
        if not self.at and str(record.msg).startswith("set_replacement") and "singleton" in record.getMessage():
            self.at = _innermost(traceback.extract_stack())

    def __enter__(self) -> FixedSizes:
        self._before = self._LOG.level, self._LOG.propagate, self._LOG.handlers
        self._LOG.handlers = [self]
        self._LOG.propagate = False
        self._LOG.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc: object) -> None:
        level, self._LOG.propagate, self._LOG.handlers = self._before
        self._LOG.setLevel(level)


class _NoHooks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS:
            raise _hooked(f"{func.__name__} is called{_innermost(traceback.extract_stack())}")
        return func(*args, **(kwargs or {}))


def _hooked(what: str) -> CaptureError:
    return CaptureError(f"{what}, and peers run no hooks on gradients; remove the hook, or change the loss instead")


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError for hooks on gradients that the model has before it is traced."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _hooked(f"module {name!r} has a backward hook")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise _hooked(f"parameter {name!r} has a hook")


@contextlib.contextmanager
def faithful() -> Iterator[None]:
    """Around the forward pass that is traced: errors in words, and CaptureError for what export would leave out."""
    before = _python_generators()
    try:
        with _NoHooks():
            yield
    except MeshceeError:
        raise
    except Exception as error:  # torch and the user's code raise what they like
        raise explain(error) from error
    drawn = [name for name, state in _python_generators().items() if state != before[name]]
    if drawn:
        raise CaptureError(
            f"the model draws from Python's {drawn[0]}, which would be drawn once for all steps; draw with torch.rand"
        )


def _python_generators() -> dict[str, str]:
    return {"random": repr(random.getstate()), "numpy.random": repr(np.random.get_state(legacy=False)["state"])}


def refuse_functions(loss: torch.Tensor) -> None:
    """Raise CaptureError if a custom autograd.Function made what the loss depends on."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            function = type(node)._forward_cls
            if not function.__module__.startswith("torch._library"):  # an operator of a library: refused by its name
                raise CaptureError(_about(function))
        waiting += [following for following, _ in node.next_functions]


def _about(function: type) -> str:
    if function.__module__.startswith("torch.utils.checkpoint"):
        return "the model uses a re-entrant checkpoint; pass use_reentrant=False, or use Job(recompute=True) instead"
    place = f"{function.__module__}.{function.__qualname__}"
    with contextlib.suppress(OSError, TypeError):
        place += f" at {inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    return (
        f"the model uses the autograd.Function {place}, whose own backward peers cannot run; write it with torch functions, "
        "whose gradients follow from them"
    )
