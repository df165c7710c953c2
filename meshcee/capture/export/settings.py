"""Settings of torch by which a process chooses other kernels: those of the user's script are not those of a peer's process.

The idea: a plain loop in the user's process has the bits of its settings, and every peer those of torch's own. So a job is refused
where the two differ and that can be seen in a number: always on a CPU, of GPUs only where the user's machine has one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as everywhere

from meshcee.errors import CaptureError, UsageError
from meshcee.optim import Optimizer

__all__ = ["PEERS_DEFAULT", "caller", "peers_default", "refuse_settings", "replaced", "unfused"]

Setting = tuple[Callable[[], Any], tuple[Any, ...]]  # what it is, and what it may be
_cuda: Any = torch.backends.cuda
_mkldnn: Any = torch.backends.mkldnn
PEERS_DEFAULT = torch.float32
IN_DEFAULT = ("NAdam", "ASGD")  # what their numbers depend on, torch keeps in the default type
EXACT = ("none", "ieee", "tf32")  # no CPU of today has tf32
MATMUL = "torch.backends.{}.matmul.fp32_precision (torch.set_float32_matmul_precision)"


def _flushes() -> bool:
    """Whether numbers too small for a normal exponent become zero; torch sets that and does not say it."""
    return float(torch.full((1,), 2.0**-140, dtype=torch.float32) * 0.5) == 0.0


ON_CPUS: Mapping[str, Setting] = {
    "torch.backends.mkldnn.enabled": (lambda: torch._C._get_mkldnn_enabled(), (True,)),
    "torch.backends.cuda.flash_sdp_enabled()": (_cuda.flash_sdp_enabled, (True,)),
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (_cuda.mem_efficient_sdp_enabled, (True,)),
    "torch.backends.cuda.math_sdp_enabled()": (_cuda.math_sdp_enabled, (True,)),
    MATMUL.format("mkldnn"): (lambda: _mkldnn.matmul.fp32_precision, EXACT),
    "torch.backends.mkldnn.conv.fp32_precision": (lambda: _mkldnn.conv.fp32_precision, EXACT),
    "torch.backends.mkldnn.rnn.fp32_precision": (lambda: _mkldnn.rnn.fp32_precision, EXACT),
    "what torch.set_flush_denormal() sets": (_flushes, (False,)),
}
ON_GPUS: Mapping[str, Setting] = {
    "torch.backends.cuda.cudnn_sdp_enabled()": (_cuda.cudnn_sdp_enabled, (True,)),
    MATMUL.format("cuda"): (lambda: _cuda.matmul.fp32_precision, ("none", "ieee")),
    "the variable NVIDIA_TF32_OVERRIDE": (lambda: os.environ.get("NVIDIA_TF32_OVERRIDE"), (None,)),
    "torch.backends.cudnn.enabled": (lambda: torch._C._get_cudnn_enabled(), (True,)),
    "torch.backends.cudnn.benchmark": (lambda: torch._C._get_cudnn_benchmark(), (False,)),
    "torch.backends.cudnn.allow_tf32": (lambda: torch._C._get_cudnn_allow_tf32(), (True,)),
}


_OPTIMIZERS = os.path.dirname(everywhere.__file__)
_AROUND: tuple[tuple[Callable[[], bool], str, str], ...] = (
    (lambda: torch.is_autocast_enabled("cpu"), "torch.autocast", ", and say Job(precision='bf16-mixed')"),
    (torch.is_inference_mode_enabled, "torch.inference_mode", ": nothing could be trained"),
    (
        lambda: torch.get_default_device().type != "cpu",
        "another device than the CPU, by torch.set_default_device() or a with statement,",
        ": peers move what they get",
    ),
)


@contextlib.contextmanager
def peers_default() -> Iterator[None]:
    """Meanwhile the type of what is made without one is that of a peer's process."""
    own = torch.get_default_dtype()
    torch.set_default_dtype(PEERS_DEFAULT)
    try:
        yield
    finally:
        torch.set_default_dtype(own)


def refuse_settings(optimizer: Optimizer) -> None:
    """Raise UsageError if this process has set what would give a plain loop here other bits than peers have."""
    for is_on, what, instead in _AROUND:
        if is_on():
            raise UsageError(f"{what} is on around the job, and not in a peer's process; leave it{instead}")
    kinds = [optimizer.name, *(group.get("class", "") for group in optimizer.groups.values())]
    counting = [kind for kind in kinds if kind in IN_DEFAULT]
    if counting and torch.get_default_dtype() != PEERS_DEFAULT:
        raise UsageError(
            f"{counting[0]} counts in the type that torch.set_default_dtype() sets, which peers do not have; leave the setting out "
            "and write model.double()"
        )
    if everywhere._global_optimizer_pre_hooks or everywhere._global_optimizer_post_hooks:
        raise UsageError(
            "a hook of all optimizers is set in this process (register_optimizer_step_post_hook), and in no peer's; do in forward "
            "what it does, as w.clamp(-c, c), or take Job(ema=), Job(clip_norm=) or callbacks"
        )
    for kind in kinds:
        step = inspect.unwrap(getattr(getattr(torch.optim, kind, None), "step", everywhere.Optimizer.step))
        if not step.__code__.co_filename.startswith(_OPTIMIZERS):
            raise UsageError(
                f"{kind}.step is not torch's own in this process, and is so in a peer's; leave it as it is"
            )
    for name, (read, fine) in {**ON_CPUS, **(ON_GPUS if torch.cuda.is_available() else {})}.items():
        if (found := read()) not in fine:
            raise UsageError(
                f"{name} is {found!r} in this process, and {fine[0]!r} in a peer's, whose kernels give other bits; leave the "
                "setting out"
            )


def unfused(kind: type[nn.Module], model: nn.Module, here: Callable[[], Any]) -> Callable[..., Any]:
    """The forward pass of torch's attention, and CaptureError where torch would go its fast way, which computes other bits."""
    forward: Any = kind.forward

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        one = self.self_attn if isinstance(self, nn.TransformerEncoderLayer) else self
        fits = one.batch_first and one.num_heads % 2 == 0 and one._qkv_same_embed_dim and one.bias_k is None
        fits = fits and given[0].dim() == 3 and (one is not self or all(t is given[0] for t in given[:3]))
        gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (given[0], *self.parameters()))
        if fits and not self.training and not gradient:
            name = next((name for name, module in model.named_modules() if module is self), "")
            raise CaptureError(
                f"torch computes {name or kind.__name__!r} with fused kernels{here()}, since it is in eval mode and frozen, "
                "and graphs have none; write torch.backends.mha.set_fastpath_enabled(False) at the top of the file"
            )
        return forward(self, *args, **kwargs)

    return compute


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another function meanwhile, in this thread: others train. Nothing where this torch has no such attribute."""
    inherited, here = getattr(owner, name, None), threading.get_ident()
    if inherited is None:
        yield
        return

    @functools.wraps(inherited, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return (value if threading.get_ident() == here else inherited)(*args, **kwargs)

    own = vars(owner).get(name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def caller() -> types.FrameType:
    """For a function that stands in another's place by `replaced`: where it is called."""
    return sys._getframe(3)  # behind `caller`, the function, and the `call` above
