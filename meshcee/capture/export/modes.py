"""Modes in a traced graph: where gradients are recorded, and where autocast is on.

The idea: a graph is a list of operators, and where a mode begins or ends there is a node. torch.export would put what a mode is
for into graphs of their own, and so loses torch.no_grad() inside of autocast. What changes a mode without a node is refused.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshcee.capture.export.refusals import users_line
from meshcee.capture.export.settings import caller, replaced
from meshcee.errors import CaptureError

__all__ = ["AUTOCAST_OFF", "AUTOCAST_ON", "SET_GRAD", "SINCE", "Owned", "does_nothing", "flat", "one_by_one"]

SET_GRAD: Any = torch._C._set_grad_enabled
AUTOCAST_ON: Any = torch.amp.autocast_mode._enter_autocast
AUTOCAST_OFF: Any = torch.amp.autocast_mode._exit_autocast
SINCE = "meshcee_since"  # in the meta of a weight's conversion: since when autocast is on
_INIT: Any = torch.autocast.__init__
_KEEPS: Any = torch.set_autocast_cache_enabled
_SETTERS = (
    *("set_autocast_enabled", "set_autocast_dtype", "set_autocast_cpu_enabled", "set_autocast_cpu_dtype"),
    "clear_autocast_cache",
)
_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def flat() -> Iterator[None]:
    """Meanwhile torch.export leaves a graph as it was traced.

    It keeps no converted weights, and nodes say whether torch does.
    """
    from torch._export.passes import (  # they load sympy
        lift_constants_pass,
        replace_autocast_with_hop_pass,
        replace_set_grad_with_hop_pass,
    )

    unused = lift_constants_pass._unused_constant
    keeps = torch.is_autocast_cache_enabled()
    try:
        with contextlib.ExitStack() as patches:
            for name in _SETTERS:
                patches.enter_context(replaced(torch, name, _of_torch_alone(name, getattr(torch, name))))
            for owner, name, other in (
                (torch, "is_autocast_cache_enabled", lambda: keeps),
                (torch, "set_autocast_cache_enabled", lambda _: _KEEPS(False)),
                (torch.autocast, "__init__", _begun),
                (lift_constants_pass, "_unused_constant", lambda node: unused(node) if node.users else [node]),
                (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", lambda *given: given),
                (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", lambda *given: given),
            ):
                patches.enter_context(replaced(owner, name, other))
            yield
    finally:
        _KEEPS(keeps)


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Meanwhile functions of lists, as averages of weights use them, are those of their tensors: on a CPU torch does the same."""
    with contextlib.ExitStack() as patches:
        for name in (name + end for name in _OF_EACH for end in ("", "_") if hasattr(torch.Tensor, name + end)):
            patches.enter_context(replaced(torch, f"_foreach_{name}", _each(getattr(torch.Tensor, name))))
        patches.enter_context(replaced(F, "gaussian_nll_loss", _GAUSSIAN))
        yield


# It writes under no_grad, which export would not see: torch gives a mode the whole function.
_GAUSSIAN = types.FunctionType(
    F.gaussian_nll_loss.__code__,
    {**vars(F), "has_torch_function_variadic": lambda *tensors: False},
    argdefs=F.gaussian_nll_loss.__defaults__,
)


_OF_EACH = (
    *("add", "sub", "mul", "div", "neg", "abs", "sqrt", "exp", "log", "pow", "clamp_min", "clamp_max"),
    *("lerp", "copy", "zero"),
)


def _each(one: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensors: Sequence[torch.Tensor], *given: Any, **named: Any) -> list[Any]:
        def of(k: int, what: Any) -> Any:
            return what[k] if isinstance(what, list | tuple) else what

        return [
            one(t, *(of(k, g) for g in given), **{n: of(k, g) for n, g in named.items()}) for k, t in enumerate(tensors)
        ]

    return call


class Owned(TorchFunctionMode):
    """What torch composes of others gives tensors of their own while a model is traced.

    `nn.Linear` of three dimensions gives a view of a product of two, which no graph has. Were the result written through another
    view, as by `h[:, 0] = 0`, torch.export would look for that product. Where the graph runs, autograd has the view.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _COMPOSED or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
            return func(*args, **(kwargs or {}))


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_COMPOSED = frozenset(
    (
        *("linear", "matmul", "__matmul__", "einsum", "tensordot", "bilinear", "inner", "cov", "repeat_interleave"),
        *("conv1d", "conv2d", "conv3d", "instance_norm", "gru", "lstm", "rnn_tanh", "rnn_relu"),
        *("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d"),
        *("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
    )
)


def _of_torch_alone(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        if not caller().f_code.co_filename.startswith(_TORCH):
            raise CaptureError(
                f"torch.{name} is called in forward{users_line()}, and a graph has autocast by a `with` alone: write "
                "with torch.autocast('cpu', enabled=False): around what it is for"
            )
        return own(*given)

    return call


def _begun(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *more: Any, **named: Any) -> None:
    """Of a mode that forward makes: without such a device torch itself leaves it off."""
    if enabled and device_type != "cpu":
        raise does_nothing(device_type, str(users_line()))
    _INIT(self, device_type, dtype, enabled, *more, **named)


def does_nothing(device: str, at: str) -> CaptureError:
    return CaptureError(
        f"torch.autocast({device!r}) is on{at}, and does nothing on the CPU, where a model is captured; write "
        "torch.autocast(x.device.type, ...), or leave it out and say Job(precision='bf16-mixed')"
    )
