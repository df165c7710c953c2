"""Attention masks: what torch and Hugging Face's models ask of their values, which nobody knows while a model is traced.

The idea: torch's encoder and decoder ask whether a mask is causal. For two kinds of masks one knows the answer all the same. One
kind is a tensor that stands there before the first step and stays unchanged. The other is a mask that forward computes from sizes
and fixed numbers: it is computed here, too, for the sizes that may come.
So is any small tensor that forward asks for its numbers, if it follows from fixed ones (`known`): meshcee/capture/asserts.py.

Hugging Face's models leave out a mask that masks nothing. In eager code they ask whether all of it is set, and then call the
kernel without one; while a graph is made they do not ask. The kernel computes the same bits either way. But with a mask, keys and
values of grouped queries are repeated before it, and a learned bias of positions in 16 bits is spread over the samples. Their
gradients then add up in another order. So a stage asks of grouped queries in each micro-batch (meshcee/capture/graph/guards.py).
A bias in 16 bits is refused: nobody knows whether a micro-batch without padding will come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from meshcee.capture.export.flatten import LENGTH_MARGIN, Exported
from meshcee.capture.export.settings import replaced
from meshcee.capture.graph import ATTENTION, Node, given_to_write
from meshcee.errors import CaptureError

__all__ = [
    "MOST_KNOWN",
    "Asked",
    "Masks",
    "asked_for_masks",
    "causal_masks",
    "known",
    "places",
    "really",
    "refuse_idle",
]

_DETECT: Any = transformer._detect_is_causal_mask
MOST_KNOWN = 1 << 16  # numbers of a tensor
_IN_SDPA = "integrations/sdpa_attention.py"
_QUESTIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextlib.contextmanager
def causal_masks(model: nn.Module, real: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Around forward: torch's question is answered where that can be. `real` are the model's buffers as they are before."""
    masks = Masks(model, real)
    with replaced(transformer, "_detect_is_causal_mask", masks.is_causal):
        yield
    masks.refuse_changed()


class Masks:
    def __init__(self, model: nn.Module, real: Mapping[str, torch.Tensor]) -> None:
        self._model, self._real = model, real
        self._versions = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        self._asked: set[str] = set()

    def is_causal(self, mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        """As torch's function."""
        if mask is None or is_causal is not None:
            return bool(_DETECT(mask, is_causal, size))
        size = mask.shape[-2] if size is None else size
        if mask.dim() != 2 or mask.shape[0] != size or mask.shape[1] != size:
            return False
        real = self._real_of(mask)
        answers = {_is_causal(one) for one in (_of_sizes(mask) if real is None else [real])}
        return answers.pop() if len(answers) == 1 else bool(_DETECT(mask, is_causal, size))

    def _real_of(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The tensor whose numbers a mask has; None where nobody knows them yet."""
        for name, buffer in self._model.named_buffers():
            if buffer is mask:
                self._asked.add(name)
                mask = self._real.get(name, mask)
        return mask if type(mask) is torch.Tensor and not isinstance(mask, FakeTensor) else None

    def refuse_changed(self) -> None:
        """Raise CaptureError where forward writes into a mask: another step would have another answer."""
        now = {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}
        for name in self._asked:
            if now[name][0] is not self._versions[name][0] or now[name][1] != self._versions[name][1]:
                raise CaptureError(
                    f"forward changes the mask {name!r}, and torch asks whether it is causal; say is_causal=False beside it"
                )


def _is_causal(real: torch.Tensor) -> bool:
    with really():
        return bool(_DETECT(real, None, len(real)))


def _of_sizes(mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """A mask that is computed from sizes alone, for each size that is tried; nothing where it is computed from anything else."""
    tracer = getattr(proxy_tensor.get_proxy_mode(), "tracer", None)
    slot = None if tracer is None else proxy_tensor.get_proxy_slot(mask, tracer, None)
    if tracer is None or slot is None:
        return
    nodes = _from_sizes(tracer, slot.proxy.node)
    symbols = set().union(*(_expression(node).free_symbols for node in nodes if _is_size(node)))
    if slot.proxy.node not in nodes or len(symbols) > 1:
        return
    usual = next((node.meta["val"].node.hint for node in nodes if _is_size(node) and _expression(node) in symbols), 0)
    if symbols and not usual:
        return
    for size in _tried(usual) if symbols else [usual]:
        yield _computed(nodes, dict.fromkeys(symbols, size))[slot.proxy.node]


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Meanwhile tensors with numbers are computed with."""
    with unset_fake_temporarily(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a small tensor that follow from fixed numbers, and from no size; None where they follow from anything else."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return tensor.constant
    found: torch.Tensor | None = None
    if (
        not isinstance(tensor, FakeTensor)
        or not all(type(size) is int for size in tensor.shape)
        or tensor.numel() > MOST_KNOWN
    ):
        return None
    with contextlib.suppress(RuntimeError, IndexError):  # an operator takes not all sizes
        for real in _of_sizes(tensor):
            with really():
                if found is not None and not (found.shape == real.shape and torch.equal(found, real)):
                    return None
            found = real
        return found
    return None


def places(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where a mask of numbers is true, one tensor for each of its dimensions."""
    with really():
        return tuple(place.clone() for place in mask.nonzero(as_tuple=True))


def _computed(nodes: Mapping[torch.fx.Node, Any], sizes: Mapping[Any, int]) -> Mapping[torch.fx.Node, Any]:
    held: dict[torch.fx.Node, Any] = {}
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        for node, fixed in nodes.items():
            if _is_size(node):
                held[node] = int(_expression(node).subs(sizes))
            elif node.op == "get_attr":
                held[node] = fixed.clone()
            else:
                if _is_new(node):
                    held.setdefault(node.args[0], _empty_like(node.args[0]))  # type: ignore[arg-type]
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
                held[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return held


def _from_sizes(tracer: Any, mask: torch.fx.Node) -> dict[torch.fx.Node, torch.Tensor | None]:
    """The nodes that a mask follows from, in their order, if these are sizes and fixed numbers, and those numbers; else nothing."""
    found: dict[torch.fx.Node, torch.Tensor | None] = {}
    needed = {mask}
    for node in tracer.graph.nodes:
        fixed = getattr(tracer.root, node.target, None) if node.op == "get_attr" else None
        operator = node.target if isinstance(node.target, torch._ops.OpOverload) else None
        written = set(tree_leaves(given_to_write(operator, node.args, node.kwargs))) if operator is not None else set()
        given = [arg in found for arg in node.all_input_nodes if not _is_new(node) or arg is not node.args[0]]
        drawn = operator is not None and torch.Tag.nondeterministic_seeded in operator.tags
        computes = (operator is not None and not drawn) or node.target is getitem  # one of several results
        if _is_size(node) or type(fixed) is torch.Tensor or (computes and all(given)):
            found[node] = fixed
            needed |= {node} if written else set()
        elif not written.isdisjoint(found):  # from now on its numbers follow from something else
            return {}
    for node in reversed(list(found)):
        needed |= set(node.all_input_nodes) if node in needed and not _is_size(node) else set()
    return {node: fixed for node, fixed in found.items() if node in needed}


def _is_new(node: torch.fx.Node) -> bool:
    """Whether it takes of its input only what is no number: its type, and its sizes where these are fixed."""
    first = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(first, torch.fx.Node):
        return False
    kind, given = node.target._opname, first.meta.get("val")
    fixed = isinstance(given, torch.Tensor) and all(type(size) is int for size in given.shape)
    return kind in ("new_ones", "new_zeros", "new_full") or (fixed and kind in ("ones_like", "zeros_like", "full_like"))


def _empty_like(node: Any) -> torch.Tensor:
    given = node.meta["val"]
    fixed = all(type(size) is int for size in given.shape)
    return torch.empty(given.shape if fixed else (0,), dtype=given.dtype)


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _expression(node: torch.fx.Node) -> Any:
    return node.meta["val"].node.expr


def _tried(usual: int) -> Iterable[int]:
    """Each size up to 64, then some, up to as far as a size may go."""
    most = min(LENGTH_MARGIN * usual, max(usual, 2048))
    return sorted(
        {*range(1, min(most, 64) + 1), usual, *(most >> halved for halved in range(6)), *range(most, 64, -256)}
    )


class Asked:
    """Which masks of transformers would have been left out if they mask nothing, and what was called with those."""

    def __init__(self) -> None:
        self.adds_otherwise = False  # without the mask, and a stage cannot do likewise
        self._idle: list[torch.Tensor] = []  # masks that are left out where they mask nothing
        self._needed: list[torch.Tensor] = []  # masks that stay whatever their values, as those of a sliding window
        self._unanswered = self._marked = False

    def question(self, asked: Callable[..., bool]) -> Callable[..., bool]:
        def ask(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
            answer = asked(padding_mask, *args, **kwargs)
            self._unanswered |= padding_mask is not None and not answer and asked(None, *args, **kwargs)
            return answer

        return ask

    def make(self, make: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            self._unanswered = False
            mask = make(*args, **kwargs)
            if mask is not None:
                (self._idle if self._unanswered else self._needed).append(mask)
            return mask

        return made

    def attend(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        def attended(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            own, use = F.scaled_dot_product_attention, _attention().use_gqa_in_sdpa
            times = getattr(module, "num_key_value_groups", 1)
            asks = self._in_doubt(mask) and kwargs.get("position_bias") is None
            if not asks or use(
                mask, key, value
            ):  # which is alike with a mask and without, where the environment says so
                return attend(module, query, key, value, mask, *args, **kwargs)
            if not any(mask is one for one in self._idle) or (times > 1 and query.shape[2] == 1):
                self.adds_otherwise |= times > 1
                return attend(module, query, key, value, mask, *args, **kwargs)
            self._marked = True

            def marked(*args: Any, **kwargs: Any) -> torch.Tensor:
                return own(*args, **{**kwargs, "enable_gqa": True})

            with (
                replaced(F, "scaled_dot_product_attention", marked),
                replaced(_attention(), "use_gqa_in_sdpa", lambda mask, *rest: use(None, *rest)),
            ):
                return attend(module, query, key, value, mask, *args, **kwargs)

        return attended

    def bias(self, spread: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def spread_out(bias: torch.Tensor, mask: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.adds_otherwise |= self._in_doubt(mask) and bias.requires_grad and bias.itemsize < 4
            return spread(bias, mask, *args, **kwargs)

        return spread_out

    def _in_doubt(self, mask: torch.Tensor | None) -> bool:
        return mask is not None and bool(self._idle) and all(mask is not needed for needed in self._needed)

    def put(self, exported: Exported) -> None:
        """Let a stage ask what was not asked: attention with such a mask is written as torch itself takes none."""
        base, values = len(exported.inputs), [x.value for x in exported.inputs] + [n.value for n in exported.nodes]
        for place, node in enumerate(exported.nodes) if self._marked else ():
            if not _is_marked(node):
                continue
            query, key, value, mask = map(node.argument, ("query", "key", "value", "attn_mask"))
            for number in {key.index, value.index} & set(range(base, len(values))):
                given = exported.nodes[number - base]
                if given.operator.name == "aten.to.dtype" and _IN_SDPA in given.at:  # autocast rounds what was repeated
                    wide = values[given.refs[0]].dtype
                    exported.nodes[number - base] = dataclasses.replace(
                        given,
                        args=(given.args[0], wide, *given.args[2:]),
                        value=dataclasses.replace(given.value, dtype=wide),
                    )
            args = (query, key, value, mask, node.argument("dropout_p", 0.0), True)
            options = {"scale": node.argument("scale"), "enable_gqa": True}
            exported.nodes[place] = dataclasses.replace(node, args=args, kwargs=options)


def _is_marked(node: Node) -> bool:
    if node.operator.name != ATTENTION or _IN_SDPA not in node.at:
        return False
    return node.argument("attn_mask") is not None and bool(node.argument("enable_gqa"))


@contextlib.contextmanager
def asked_for_masks() -> Iterator[Asked]:
    noted = Asked()
    masks = sys.modules.get("transformers.masking_utils")
    calls = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        *((masks, name, noted.question) for name in _QUESTIONS),
        (_attention(), "create_position_bias_mask", noted.bias),
    ]
    with contextlib.ExitStack() as put_back:
        for module, name, noting in places:
            if (own := getattr(module, name, None)) is not None:
                setattr(module, name, noting(own))
                put_back.callback(setattr, module, name, own)
        for functions, noting in (
            (getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", {}), noted.make),
            (calls, noted.attend),
        ):
            if "sdpa" in functions:
                put_back.callback(functions.__setitem__, "sdpa", functions["sdpa"])
                functions["sdpa"] = noting(functions["sdpa"])
        yield noted


def _attention() -> Any:
    return sys.modules.get("transformers.integrations.sdpa_attention")


def refuse_idle(noted: Asked, inputs: Iterable[str]) -> None:
    """Raise CaptureError if that makes a difference: a micro-batch may come whose mask masks nothing."""
    name = next((name for name in inputs if name.rpartition(".")[2].endswith("attention_mask")), None)
    if name is not None and noted.adds_otherwise:
        raise CaptureError(
            f"where {name} masks nothing, transformers leaves it out and rounds otherwise, which a graph cannot decide; load the "
            "model with attn_implementation='eager', or leave the mask out of data[i] if no sample is padded"
        )
