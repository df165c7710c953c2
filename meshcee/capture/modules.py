"""What can be seen of a model before it is traced, and cannot be captured.

The idea: a lazy layer, a hook on a gradient or a state_dict of another form shows in the modules themselves, so it is told at once.
"""

from __future__ import annotations

import itertools
from typing import Any

import structlog
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from torch.nn.parameter import is_lazy

from meshcee.capture.export import hooked
from meshcee.errors import CaptureError
from meshcee.events import Event
from meshcee.reach.modules import entries, with_a_train

__all__ = ["refuse_modules", "warn_of_eval"]

log = structlog.get_logger()


def refuse_modules(model: nn.Module, loss: Any) -> None:
    """Raise CaptureError for what can be seen before the model is traced."""
    held = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
    known = {id(p) for p in model.parameters()}
    if own := [name for name, p in held.items() if p.requires_grad and id(p) not in known]:
        raise CaptureError(
            f"the loss has a parameter {own[0]!r}, which is none of the model's, and only those are trained; where it shall stay "
            "as it is, as a teacher's, say .requires_grad_(False) of the module that has it; else make the loss a part of the "
            "model, which then returns it, and give Job(loss=lambda output, target: output)"
        )
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        raise hooked("a backward hook of all modules is set")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(f"{name!r} has no shape yet; run one batch through the model before you make the job")
        if tensor.is_inference():
            raise CaptureError(
                f"{name!r} was made under torch.inference_mode(), and such a tensor cannot be trained; make the model outside of it"
            )
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{what} is scripted; pass the module that it was made of, without torch.jit")
        if hidden := next((own for own in module._modules if hasattr(nn.Module, own)), None):
            raise CaptureError(
                f"{what} has a submodule {hidden!r}, which is the name of a method of nn.Module, and Python finds the method: give "
                "it another name"
            )
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise CaptureError(
                f"{what} is compiled, and peers run eager kernels, which may round otherwise; pass the module that it was made "
                "of, without torch.compile"
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CaptureError(
                f"{what} has a get_extra_state: of a state only parameters and buffers reach peers and come back; keep it in a "
                "buffer"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise hooked(f"module {name!r} has a backward hook")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise hooked(f"parameter {name!r} has a hook")
    _refuse_other_state(model)


def _refuse_other_state(model: nn.Module) -> None:
    """What a state_dict has under another name alone, or adds, would be in no result: those are the model's own tensors by name."""
    held = dict(entries(model))
    own = {id(tensor): name for name, tensor in held.items()}
    try:
        state = model.state_dict(keep_vars=True)
    except Exception as error:
        raise CaptureError(
            f"model.state_dict(keep_vars=True) failed with {type(error).__name__}: {error}; let a state_dict of your own take the "
            "arguments of nn.Module's and give them on, or leave it out"
        ) from error
    kept = {key: id(tensor) for key, tensor in state.items()}
    told = {tensor for key, tensor in kept.items() if key in held}
    for key, tensor in kept.items():
        if tensor not in own:
            raise CaptureError(
                f"model.state_dict() has {key!r}, which is no parameter or buffer of the model as it is, so results would lack it "
                "or have it otherwise: register what it is in a buffer, and leave out the hook or the method that puts it there"
            )
        if tensor not in told:
            raise CaptureError(
                f"model.state_dict() calls {own[tensor]!r} {key!r}, and results have the model's own names: leave out what renames "
                "it; for torch's checkpoint_wrapper call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in forward"
            )


def warn_of_eval(model: nn.Module) -> None:
    """A wrapper is born in train mode, and what is inside may still be as `from_pretrained`, or who copied a teacher, left it. A
    `train` of the user's own says what stays.
    """
    own = {inside for module in with_a_train(model) for inside in module.modules()}
    kinds = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase
    found = [
        name
        for name, module in model.named_modules()
        if model.training and not module.training and isinstance(module, kinds) and module not in own
        if getattr(module, "p", True) and getattr(module, "track_running_stats", True)
    ]
    if found:
        log.warning(Event.PART_IN_EVAL, modules=found[:3])
