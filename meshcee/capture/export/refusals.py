"""What cannot be captured, in one sentence: the operation, the line of the user's file, what to do.

The idea: torch.export fails in a dozen classes of its own, and is silent about what it leaves out: it records operators, not
the rules by which gradients flow. A hook on a gradient would never run. A number drawn by Python would be drawn once for all
steps. The mesh would then train something else than the plain loop, so these are refused too, while the model is traced.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import rnn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from meshcee.capture.export.settings import caller, replaced, unfused
from meshcee.errors import CaptureError, MeshceeError
from meshcee.user_code import Place, avoided, is_ours, place_in

__all__ = [
    "AFTER_ONE_BATCH",
    "COUNT",
    "COUNTED",
    "GRADIENT_SET",
    "RANKS",
    "Watched",
    "explain",
    "faithful",
    "hooked",
    "instead",
    "users_line",
    "where",
]

_MOST_LINES = 12  # of a node's stack: the innermost ones
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_NEEDS: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_GRAD: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


def where(node: Any) -> Place:
    """Of the innermost user frame in the stack trace of a node of an exported graph."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s+(.*)', node.meta.get("stack_trace") or "")
    return place_in([(file, int(line), code) for file, line, code in frames])


def _innermost(frames: Sequence[traceback.FrameSummary]) -> Place:
    return place_in([(f.filename, f.lineno or 0, f.line or "") for f in _inside(frames)])


def _inside(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Those behind the call of the model: who asked for the capture is not to blame."""
    last = max((i for i, f in enumerate(frames) if f.filename == _CALLER), default=-1)
    return frames[last + 1 :]


_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_MODULES = str(Path(nn.__file__).parent)  # torch.nn's own, whose lines say what they do
_CALLER = str(Path(__file__).parents[1] / "with_loss.py")
_FUNCTIONS = str(Path(__file__).with_name("functions.py"))


def instead(place: Place, advice: str) -> str:
    """What to do: what a user may write in code of his own, of a library's only how to avoid it."""
    return avoided(place.library) if place.library else advice


COUNTED = "write torch.nn.functional.one_hot(y, N).sum(0), with the number of classes N"
COUNT = "divide by x.shape[0] itself, or compute with the tensor torch.full((), x.shape[0]), as .log() does, or with a fixed number"

RANKS = (
    "keep all samples and weigh them: after l = l.sort(descending=True).values, the mask torch.arange(l.shape[0]) < "
    "l.shape[0] // 2 has the larger half"
)

# What torch says -> what went wrong (None: its own words) and what to do.
_ADVICE: tuple[tuple[str, str | None, str], ...] = (
    (
        r"(?i:layer_?drop|\bto_drop\b|drop_path_rate)|dropout_probability",
        "layers are left out by chance, as a number that is drawn says",
        "set the probability to 0 (in configurations of transformers: layerdrop, encoder_layerdrop and decoder_layerdrop)",
    ),
    (
        r"causal_comparison",
        "torch asks whether a mask is causal, and looks at its values",
        "say is_causal=True beside a causal mask and is_causal=False beside another (src_is_causal, tgt_is_causal)",
    ),
    (
        r"num_batches_tracked",
        "a batch norm with momentum=None divides by the number of batches that it has seen",
        "give it a momentum",
    ),
    (
        r"expert",
        "experts compute the rows that are sent to them, as many as the data say",
        "compute every row with every expert and a mask, or all at once with torch.nn.functional.grouped_mm",
    ),
    (
        r"(?:\.|\b)(?:rand|randn|randint|bernoulli|uniform_)\(",
        "a number that is drawn decides what is computed",
        "compute both and choose with torch.where(torch.rand(()) < 0.5, a, b), or augment in data[i]",
    ),
    (
        r"\bone_hot\(",
        "torch.nn.functional.one_hot asks the values how many classes there are",
        "say how many: one_hot(x, N)",
    ),
    (
        r"\brow_indices\b",
        "nn.AdaptiveLogSoftmaxWithLoss takes as many rows as the data say",
        "write torch.nn.functional.nll_loss(adaptive.log_prob(h), y)",
    ),
    (r"Expected op to be '=='", "a size follows from a part of the number of samples", RANKS),
    (
        r"The only supported seed types are",
        "Python's generator is seeded with a tensor",
        "leave this choice by chance out, or draw with torch.rand and choose by torch.where",
    ),
    (r"\bbincount\(", "torch.bincount asks the values how many numbers it makes", COUNTED),
    (
        r"data-dependent|unbacked|GuardOnDataDependent",
        "a Python number or a branch is made from the values of a tensor",
        "write a branch with torch.where or a mask, leave out one that takes the same way from now on, and keep numbers as tensors"
        "; an assert trains as `assert not bad.any()`, with all of its condition in the line; what is only logged is a term of the "
        'loss, {{"loss": loss, "kl": kl}}',
    ),
    (
        r"_ctc_loss",
        "the CTC loss adds up over lengths, which are values of the data",
        "take another loss, or train on one machine",
    ),
    (
        r"\.numpy\(\)|__array__|__format__",
        "numbers leave torch there, which no graph follows",
        "use torch functions of tensors, or data[i] where it depends on the data alone; look at values outside the model",
    ),
    (
        r"symbolically trace a dynamo-optimized function",
        "a function or module is compiled with torch.compile",
        "pass what it was made of, without torch.compile; peers run eager kernels",
    ),
    (
        r"fake tensor in the exported program constant",
        "a tensor that is neither parameter nor buffer of the model is used",
        "say register_buffer in a module of the model, where what the loss updates belongs too; or run one batch through the "
        "model before you make the job, if its first call fills a cache",
    ),
    (
        r"UnsupportedOperatorException.*fake_quantize",
        "torch cannot trace its fake quantization",
        "write h + (quantized - h).detach(), with quantized = (h / scale).round().clamp(low, high) * scale",
    ),
    (r"SyntaxError.*proxy_tensor", "torch.export has no words for x.random_(first, end)", "draw by torch.randint"),
    (
        r"aten\.equal",
        "torch.equal, or a function of torch that calls it, as torch.cov does, looks at the values of two tensors",
        "ask `a is b`; for torch.cov(x) write d = x - x.mean(1, keepdim=True), and then d @ d.T / (x.shape[1] - 1)",
    ),
    (r"expected predicate to be bool", None, "write mask.bool()"),
    (r"type SymInt which has no callable", "numpy computes with a size", COUNT),
    (
        r"unhashable type: .*SymInt",
        "a size is a key, as of a dict or of functools.lru_cache",
        "make the value in forward each time, or once for the longest samples, and take [:n] of it, with n = x.shape[1]",
    ),
    (
        r"Constraints violated.*generated guard [^\n]*(?:!=|==) \d+\.\n",
        "a branch asks for the number of samples",
        "write it alike for any number of samples",
    ),
    (r"device.*meta|meta.*device", None, "create tensors on the device of the input"),
    (
        r"Constraints violated.*max=(\d+)",
        "the model takes another way for micro-batches of more than {0} samples",
        "set Job(micro_batch_size=N) to at most {0}",
    ),
    (
        r"Constraints violated|specializ",
        "the model fixes a size that changes between micro-batches",
        "compute sizes from x.shape instead of a constant; where the line does so, it calls what wants the number itself, as "
        "range() does, and not torch.arange()",
    ),
)
_BY_VALUE = "data-dependent|unbacked|GuardOnDataDependent"
_CONFIGURED = 4  # the first entries of _ADVICE say what a library's user can do too
_ONLY_BY_VALUE = 8  # the first entries of _ADVICE tell what the line is about, and say so only of what values decide


def explain(error: BaseException, sizes: Watched | None = None) -> CaptureError:
    """What torch.export could not do. `sizes` has seen where a size became a constant, for errors that do not say."""
    text, frames = f"{type(error).__name__} {error}", traceback.extract_tb(error.__traceback__)
    at = _innermost(frames)
    lines = " ".join([at.text, *(f.line or "" for f in frames if f.filename.startswith(_MODULES))])
    if not at.text and sizes is not None:
        at = sizes.at if sizes.at.text else sizes.branch()
    if sizes is not None and sizes.mapped.text and not re.search(_BY_VALUE, text):
        at = sizes.mapped
        advice = "write it for a whole batch, as the functions of torch are"
        return CaptureError(f"the model cannot be captured{at}: torch.vmap is used; {instead(at, advice)}")
    fixes = sizes.fixes if sizes is not None and re.search("Constraints violated|exponent must be", text) else {}
    suspect = "Constraints violated" in text and sizes is not None and sizes.suspect
    for at, how, advice in (*(found for word, found in fixes.items() if word in text), *([suspect] if suspect else [])):
        return CaptureError(f"the model cannot be captured{at}: {how}; {instead(at, advice)}")
    first = re.sub(r"\s+", " ", str(error).strip().partition("\n")[0])[:300].rstrip(".;")
    problem, advice = f"{type(error).__name__}: {first}", "replace this operation by torch functions of tensors"
    if re.search(r"\bgenerator=(?!None)", lines):
        problem, advice = "a torch.Generator is used", "leave generator= out, as the job seeds every micro-batch"
    for number, (pattern, words, known) in enumerate(_ADVICE):
        about = lines if number < _ONLY_BY_VALUE else text
        if number < _ONLY_BY_VALUE and not re.search(_BY_VALUE, text):
            continue
        if (found := re.search(pattern, about, re.DOTALL)) is not None:
            problem, advice = (words or problem).format(*found.groups()), known.format(*found.groups())
            if number < _CONFIGURED:
                return CaptureError(f"the model cannot be captured{at}: {problem}; {advice}")
            break
    return CaptureError(f"the model cannot be captured{at}: {problem}; {instead(at, advice)}")


_PART = re.compile(r"//|(?:Trunc|Floor|Ceil|Round)ToInt")
_SPLITS = re.compile(r"\b(?:chunk|(?:tensor_)?split)\(")
SQUARE = "keep samples apart in the model; of m = z @ z.t() take m.diagonal(), or m.masked_fill(torch.eye(n, dtype=torch.bool), 0)"
PAIRS = "take d = torch.cdist(o, o) and weigh each pair once, by torch.ones_like(d).triu(1)"
STEP = "write it by rows and columns, as w[:, 0] for w.view(-1)[::n], and w.diagonal() for w.view(-1)[:: n + 1]"
SPLIT = "take the parts as z[:n] and z[n:] with n = z.shape[0] // 2, or by torch.split(z, [n, n])"
GRADIENT_SET = "requires_grad is set in forward{at}, which a graph does not hold, and no weight needs it; leave it out"
LENGTH = (
    "with n = x.shape[1], compute whole numbers by //, as -(-n // 2), and others with the tensor torch.full((), n), as .sqrt() "
    "does; or pad all samples to one length"
)
# Functions of torch that make constants of sizes -> what to write, with a size n taken from x.shape.
_FIXING = {
    "linspace": "write torch.arange(n) / (n - 1)",
    "fill_diagonal_": "write s.masked_fill(torch.eye(n, dtype=torch.bool), value)",
    "take_along_dim": "write x.gather(dim, indices)",
    "triu_indices": "weigh all numbers of the matrix by torch.ones_like(s).triu(1)",
    "tril_indices": "weigh all numbers of the matrix by torch.ones_like(s).tril(-1)",
    "diag": "take the part first, as s[:n, n:].diagonal()",
    "diagonal": "take the part first, as s[:n, n:].diagonal()",
}
ONE_LENGTH = "pad all samples to one length, in the data or in collate"


def _loops(code: str) -> bool:
    """Whether this line, which has just fixed the number of samples, did so by a loop over them."""
    asked = {frame.name for frame in _inside(traceback.extract_stack()) if is_ours(frame.filename)}
    over = "__iter__" in asked or "range(len(" in code or ("range(" in code and "__index__" in asked)
    return over and re.search(r"\bfor\b.+\bin\b", code) is not None


def _computes(code: str) -> bool:
    """Whether this line has fixed the number of samples by a Python number that it wants of it."""
    asks = itertools.pairwise(_inside(traceback.extract_stack()))
    asked = any(inner.name == "__index__" and not is_ours(outer.filename) for outer, inner in asks)
    return "as_tensor(" in code or (asked and "len(" not in code)


def _decides(asks: Any) -> bool:
    """Whether this place asks for a size to do one thing or another. What torch asks besides is of strides and of errors."""
    frame = getattr(asks, "framework_loc", None)
    file, name = getattr(frame, "filename", ""), getattr(frame, "name", "")
    return bool(file) and (name == "split" or file.startswith(_MODULES) or not is_ours(file))


class Watched(logging.Handler):
    """Around an export: notes what its errors do not say.

    Where torch makes a size that should vary a constant: it logs that there. Where torch.vmap is used, which some code does
    with success. And every node of the graph gets the lines of all functions that led to it, not of forward alone.
    """

    _LOG = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    now: Watched | None = None

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.at = Place()  # the first place of a size that became a constant
        self.mapped = Place()  # of a torch.vmap
        self.fixes: dict[str, tuple[Place, str, str]] = {}  # torch's word -> where, what, advice
        self.suspect: tuple[Place, str, str] | None = None  # the same of a function that may fix a size
        self.samples: set[str] = set()  # what torch calls their number
        self.branches: dict[str, Place] = {}  # a condition of sizes that decides what is computed -> where it is asked

    def emit(self, record: logging.LogRecord) -> None:
        said, what = str(record.msg), cast(tuple[Any, ...], record.args or ())
        given = [str(a) for a in what]
        if said.startswith("create_symbol") and given[2].endswith(".size()[0]"):
            self.samples.add(given[0])
        if "[guard added]" in said and given[0] == "eval" and _decides(what[2]):
            self.branches[given[1]] = users_line()
        if "[guard added]" in said and _PART.search(given[1]) and set(re.findall(r"\bs\d+", given[1])) <= self.samples:
            here = users_line().text
            advice = SPLIT if _SPLITS.search(here) else PAIRS if "pdist(" in here else RANKS
            self.fix("generated guard", "a size or a branch follows from a part of the number of samples", advice)
            says_sympy = "exponent must be non-negative"
            self.fix(says_sympy, "the number of samples is the step of a slice", STEP)
        if not self.at.text and said.startswith("set_replacement") and "singleton" in record.getMessage():
            self.at = users_line()
            if given[0] not in self.samples and any(f.filename == rnn.__file__ for f in traceback.extract_stack()):
                self.fix(
                    "specialized",
                    "an LSTM, GRU or RNN computes step by step, and a graph holds steps of one length",
                    ONE_LENGTH,
                )
            if given[0] in self.samples and ".tolist()" in self.at.text:
                how = "tolist() makes Python's numbers of values"
                self.fix("specialized", how, "keep them in tensors, and look at values outside of the model")
            elif given[0] in self.samples and _loops(self.at.text):
                self.fix("specialized", "a Python loop goes over the samples", "compute on the whole batch at once")
            elif given[0] in self.samples and re.search(r"\bint\([^()]*(?:shape\[0\]|size\(0\))", self.at.text):
                self.fix(
                    "specialized", "int() makes a constant of the number of samples", "write a // b, without int()"
                )
            elif given[0] in self.samples and re.search(r"\]\s*\*|\*\s*\[", self.at.text):
                how = "a list has an item for each sample"
                self.fix("specialized", how, "with n = x.shape[0], write t.expand(n, ...) or t.repeat(n, ...)")
            elif given[0] in self.samples and re.search(r"\w\[[^\[\]:]*\w\s*-\s*\d", self.at.text):
                how = "an index is counted from the number of samples"
                self.fix("specialized", how, "count from the end, as w[-2, 0]")
            elif given[0] in self.samples and _computes(self.at.text):
                self.fix("specialized", "Python computes with the number of samples", COUNT)
            elif given[0] not in self.samples and (_computes(self.at.text) or _loops(self.at.text)):
                self.fix("specialized", "Python computes with the length of samples, or goes over them", LENGTH)

    def branch(self) -> Place:
        """The first branch on the number of samples alone."""
        found = [at for asked, at in self.branches.items() if set(re.findall(r"\bs\d+", asked)) <= self.samples]
        return next(iter(found), Place())

    def fix(self, word: str, how: str, advice: str) -> None:
        if word not in self.fixes:
            self.fixes[word] = users_line(), how, advice

    def __enter__(self) -> Watched:
        self._before = self._LOG.level, self._LOG.propagate, self._LOG.handlers
        self._LOG.handlers = [self]
        self._LOG.propagate = False
        self._LOG.setLevel(logging.INFO)
        Watched.now = self
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(replaced(vmap, "_vmap_increment_nesting", self._noting))
        self._patches.enter_context(replaced(torch.fx.proxy.TracerBase, "_filter_traceback_frames", _lines))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()
        Watched.now = None
        level, self._LOG.propagate, self._LOG.handlers = self._before
        self._LOG.setLevel(level)

    def _noting(self, *args: Any) -> Any:
        if not self.mapped.text:
            self.mapped = users_line()
        return _BEGIN_VMAP(*args)


_BEGIN_VMAP: Any = vmap._vmap_increment_nesting  # type: ignore[attr-defined]


def _lines(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
    kept = [f for f in _inside(frames) if not is_ours(f.filename)]
    return traceback.StackSummary.from_list(kept[-_MOST_LINES:])


AFTER_ONE_BATCH = "run one batch through the model before you make the job, if only its first call does so"


COMPUTED = (
    "compute with what it shall be, as self.scale.clamp(max=4.6) or F.linear(x, F.normalize(self.weight, dim=-1)); "
    + AFTER_ONE_BATCH
)
FOLLOWS = "under torch.no_grad() write k.mul_(m).add_(p, alpha=1 - m)"
AVERAGE = "write into a registered buffer, as self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1) does"

# A function of torch -> the argument that must be set ("": any call), what it does, and what does the same on peers.
_KNOWN = (
    (
        "_pack_padded_sequence",
        "",
        "a packed sequence is made{}, whose sizes follow from values",
        "pad all samples to one length, give the padded sequence, and mask what lies behind its end",
    ),
    (
        "embedding_bag",
        "",
        "an embedding bag is used{}, and its kernel trusts the offsets that it is given",
        "for ids of one length nn.Embedding(...)(ids).mean(1) does the same, or .sum(1) with mode='sum'",
    ),
    ("embedding", "max_norm", "an nn.Embedding writes its weights when it is read{} (max_norm)", "leave out max_norm"),
    (
        "_sample_dirichlet",
        "",
        "a number of a Beta or Dirichlet distribution is drawn{}, for which peers have no operator",
        "draw it in data[i] or Job.collate, as mixup's lambda, and give it with x or y",
    ),
    (
        "embedding",
        "sparse",
        "an nn.Embedding makes sparse gradients{}",
        "with sparse=False the same numbers are added up in another order",
    ),
)


class _Looking(TorchFunctionMode):
    """Looks at every call of a torch function for what the graph would not hold.

    `others`: by id, tensors that the user's objects hold, with those that stand for them meanwhile. A call is given the latter.
    """

    def __init__(self, model: nn.Module, others: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._others = others
        self._own = {id(p) for p in model.parameters()}
        self._thawed: dict[int, Place] = {}  # weights whose requires_grad forward has changed, and where
        self._used: set[int] = set()  # of these, since then

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._others and any(id(given) in self._others for given in tree_leaves((args, kwargs))):
            if _in_optimizer():
                raise _trained_inside()
            args, kwargs = tree_map(
                lambda it: self._others[id(it)][1] if id(it) in self._others else it, (args, kwargs)
            )
        if func in _HOOKS:
            raise hooked(f"{func.__name__} is called{users_line()}")
        for name, argument, what, advice in _KNOWN:
            if getattr(func, "__name__", "") == name and (not argument or (kwargs or {}).get(argument)):
                raise CaptureError(f"{what.format(users_line())}; {instead(users_line(), advice)}")
        if func in (torch.Tensor.requires_grad_, _SET_NEEDS) and id(args[0]) in self._own:
            wanted = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
            if bool(wanted) != args[0].requires_grad:
                self._refuse_thawing(id(args[0]))
        elif self._thawed:
            self._used.update(id(given) for given in args if id(given) in self._thawed)
        set_now = func is torch.Tensor.requires_grad_ and not args[0].requires_grad and args[1:] != (False,)
        made = set_now and not isinstance(args[0], nn.Parameter)  # by forward
        if made and sys._getframe(1).f_code.co_filename != nn.parameter.__file__:
            words = GRADIENT_SET.format(at=users_line())
            if any(f.name == "_backward" and f.filename == _FUNCTIONS for f in traceback.extract_stack()):
                raise CaptureError(
                    f"the backward of an autograd.Function computes gradients itself{users_line()}, and peers run what it computes "
                    "with tensors alone; a checkpoint of your own is torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)"
                )
            raise CaptureError(
                f"{words} (model.disable_input_require_grads() of Hugging Face); a derivative by inputs, as torch.autograd.grad "
                "computes it, is to be written as a formula"
            )
        if func == _VERSION and not is_ours(sys._getframe(1).f_code.co_filename):
            raise CaptureError(
                f"a tensor's _version is read{users_line()}, which counts what was written there, and peers count otherwise; "
                "leave it out, count steps in a buffer that forward changes in place, and augment samples in data[i] or Job.collate"
            )
        if func in (_GRAD, _SET_GRAD) and _means_gradients(sys._getframe(1).f_code):
            if _in_optimizer():
                raise _trained_inside()
            how = "read" if func == _GRAD else "set"
            raise CaptureError(
                f"a .grad is {how}{users_line()}, and a graph has none: what a backward pass has left is of the micro-batch "
                "before; leave it out, or clip and scale gradients by the Job's own settings"
            )
        if func == _SET_DATA:
            advice = COMPUTED if args[0].requires_grad else FOLLOWS if id(args[0]) in self._own else AVERAGE
            raise CaptureError(
                f"a .data is assigned{users_line()}, which a graph does not hold; {instead(users_line(), advice)}"
            )
        if func == _DATA and Watched.now is not None:
            return args[0].detach()  # which a graph has a word for: what is written there is written here
        for given in args:
            if isinstance(given, torch.Tensor) and self._astray(given):
                if isinstance(given, FakeTensor):
                    raise CaptureError(
                        f"forward makes a parameter{users_line()}; {AFTER_ONE_BATCH}, or keep what each call makes in a buffer"
                    )
                if _in_optimizer():
                    raise _trained_inside()
                if not torch.is_grad_enabled():  # kernels are chosen by requires_grad, even where no gradient is made
                    raise CaptureError(
                        f"a tensor that is no parameter of the model and needs a gradient is used{users_line()}, under "
                        "torch.no_grad(); say that it is not trained, as teacher.requires_grad_(False) does for a module"
                    )
                advice = instead(
                    users_line(),
                    "reach it by its module (model.head.weight), or register it in one, or compute with a detached copy",
                )
                raise CaptureError(
                    f"a tensor that needs a gradient is used{users_line()}, and as no parameter of the model it would not be "
                    f"trained; {advice}"
                )
        sizes = Watched.now
        free = sizes is not None and not sizes.at.text
        made = func(*args, **(kwargs or {}))
        if sizes is None:
            return made
        name, fixed = getattr(func, "__name__", ""), free and sizes.at.text
        if fixed and name == "mean" and any(torch.is_complex(t) for t in args[:1]):
            how = "the mean of complex numbers over the samples fixes their number"
            sizes.fix("specialized", how, "write z.sum(0) / z.shape[0]")
        elif name in _FIXING and (fixed or (free and sizes.suspect is None and _vary(args))):
            sizes.suspect = users_line(), f"torch.{name} makes a constant of a size", _FIXING[name]
        return made

    def _refuse_thawing(self, weight: int) -> None:
        """A weight that is frozen and thawed again in one pass, with what uses it between, has two minds in one graph."""
        if weight in self._used:
            at = self._thawed[weight]
            advice = "call torch.func.functional_call(m, {n: p.detach() for n, p in m.named_parameters()}, h)"
            words = f"requires_grad of a weight is set{at} and set back in one pass, which no graph holds"
            raise CaptureError(f"{words}; {instead(at, advice)}")
        self._thawed.setdefault(weight, users_line())

    def _astray(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._own or not (tensor.requires_grad and tensor.is_leaf):
            return False
        return isinstance(tensor, nn.Parameter) or not isinstance(tensor, FakeTensor)  # made before the forward pass


def _means_gradients(code: types.CodeType) -> bool:
    """Whether this wants those of the micro-batch before: code of the user's, or of torch's that is called for it."""
    return (
        not is_ours(code.co_filename)
        or code.co_name == "zero_grad"
        or code.co_filename.startswith(f"{_MODULES}/utils/")
    )


def _vary(args: Sequence[Any]) -> bool:
    """Whether one of these is a size that varies, or a tensor with one."""
    sizes = (size for arg in args for size in (arg.shape if isinstance(arg, torch.Tensor) else (arg,)))
    return any(isinstance(size, torch.SymInt) for size in sizes)


def users_line() -> Place:
    return _innermost(traceback.extract_stack())


def _in_optimizer() -> bool:
    return any(frame.filename.startswith(_OPTIMIZERS) for frame in traceback.extract_stack())


def _trained_inside() -> CaptureError:
    advice = instead(users_line(), "return one loss for all weights, with .detach() where no gradient shall pass")
    return CaptureError(
        f"there is a backward pass inside of forward or loss{users_line()}, and peers make one, of what the loss returns; {advice}"
    )


def hooked(what: str) -> CaptureError:
    return CaptureError(f"{what}, and peers run no hooks on gradients; remove the hook, or change the loss instead")


@contextlib.contextmanager
def faithful(
    model: nn.Module, others: Mapping[int, tuple[torch.Tensor, torch.Tensor]], *, evaluate: bool = False
) -> Iterator[None]:
    """Around the forward pass that is traced: errors in words, and CaptureError for what export would leave out.

    others    what the user's objects hold -> what stands for it in the model meanwhile, by the former's id
    evaluate  whether the pass is one of an evaluation, for which torch's fused kernels count as other bits
    """
    before = _python_generators()
    with contextlib.ExitStack() as patches:
        for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer):
            if torch.backends.mha.get_fastpath_enabled() and not evaluate:
                patches.enter_context(replaced(kind, "forward", unfused(kind, model, users_line)))
        patches.enter_context(_Looking(model, others))
        patches.enter_context(replaced(torch.distributions.Distribution, "__init__", _unvalidated))
        patches.enter_context(replaced(torch.distributions.Distribution, "_validate_sample", lambda self, value: None))
        patches.enter_context(replaced(logging.LogRecord, "getMessage", _unformatted))
        patches.enter_context(replaced(torch.random, "fork_rng", _unforked))
        patches.enter_context(replaced(torch.jit.ScriptFunction, "__call__", _scripted))
        for owner, name, words in _GRADIENTS:
            patches.enter_context(replaced(owner, name, _refusing(words)))
        drawing: dict[str, Place] = {}
        for owner, name in _DRAWING:
            patches.enter_context(replaced(owner, name, _telling(owner, name, drawing)))
        try:
            yield
        except MeshceeError:
            raise
        except Exception as error:  # torch and the user's code raise what they like; of some, export prints pages
            raise explain(error, Watched.now) from error
    drawn = [name for name, state in _python_generators().items() if state != before[name]]
    if drawn:
        at = drawing.get(drawn[0], Place())
        advice = instead(
            at,
            "draw with torch.rand, and choose with torch.where(torch.rand(()) < 0.5, a, b); draw mixup's lambda in Job.collate",
        )
        raise CaptureError(
            f"the model draws from the module {drawn[0]}{at}, which would be drawn once for all steps; {advice}"
        )


_GRADIENTS: tuple[tuple[Any, str, str], ...] = (
    (torch.autograd, "backward", "backward"),
    (torch.autograd, "_engine_run_backward", "torch.autograd"),
    (eager_transforms, "grad_and_value_impl", "torch.func"),
    (eager_transforms, "_vjp_with_argnums", "torch.func"),
    (eager_transforms, "_jvp_with_argnums", "torch.func"),
    (CheckpointFunction, "apply", "checkpoint"),
)


def _unformatted(self: logging.LogRecord) -> str:
    """A line that the user's code logs. It is logged while the model is traced, and tensors have no numbers there."""
    try:
        return _GET_MESSAGE(self)
    except RuntimeError:  # torch's, of numbers that nobody knows
        return str(self.msg)


_GET_MESSAGE = logging.LogRecord.getMessage


def _unforked(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("enabled", True) and not caller().f_code.co_filename.startswith(_TORCH):
        advice = instead(users_line(), "draw without it, or draw in data[i] and give what is drawn with x")
        why = f"torch.random.fork_rng is used in forward{users_line()}, as for a seed of its own, and generators of peers go on"
        raise CaptureError(f"{why}; {advice}")
    return _FORK(*args, **kwargs)


_FORK, _TORCH = torch.random.fork_rng, str(Path(torch.__file__).parent)


def _scripted(self: Any, *args: Any, **kwargs: Any) -> Any:
    advice = instead(users_line(), "call the function that it was made of, without torch.jit.script")
    raise CaptureError(
        f"a scripted function is called{users_line()}, and peers run eager kernels, which may round otherwise; {advice}"
    )


def _unvalidated(self: Any, *args: Any, **kwargs: Any) -> None:
    """A distribution that does not look at its arguments: to look is a branch on values, and changes none."""
    _MAKE_DISTRIBUTION(self, *args[:2], **(kwargs | {"validate_args": False}))  # the third is that


_MAKE_DISTRIBUTION = torch.distributions.Distribution.__init__


def _refusing(words: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if words == "backward":
            raise _trained_inside()
        if words == "checkpoint":
            advice = "pass use_reentrant=False, or leave it out and use Job(recompute=True)"
            raise CaptureError(f"the model uses a re-entrant checkpoint{users_line()}; {instead(users_line(), advice)}")
        raise CaptureError(
            f"the model computes a gradient while it runs forward ({words}){users_line()}, and peers compute gradients of the loss "
            "only; " + instead(users_line(), "write the derivative as a formula")
        )

    return refuse


_DRAWING: list[tuple[Any, str]] = [
    (owner, name)
    for owner, kind in ((random, random.Random), (np.random, np.random.RandomState))
    for name in dir(owner)
    if isinstance(getattr(getattr(owner, name), "__self__", None), kind) and name not in ("getstate", "get_state")
]


def _telling(owner: Any, name: str, drawing: dict[str, Place]) -> Callable[..., Any]:
    """The function, that notes where a generator is used first."""
    draw = getattr(owner, name)

    def tell(*args: Any, **kwargs: Any) -> Any:
        if owner.__name__ not in drawing:
            drawing[owner.__name__] = users_line()
        return draw(*args, **kwargs)

    return tell


def _python_generators() -> dict[str, str]:
    return {"random": repr(random.getstate()), "numpy.random": repr(np.random.get_state(legacy=False)["state"])}
