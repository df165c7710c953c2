"""Whether the graph is all that forward does: eager code beside it, twice and with every number of samples, on fake tensors.

The idea: a storage is named by how its numbers come about. The name is a digest of the operator that wrote the storage, and of
the names of all that this operator read. Shapes, strides, scalars, constants, gradients and backends are included. Runs that
end in equal names compute the same, and nothing has to be computed to know. State that forward keeps anywhere in Python gives
another name. So does a clock, a context that export leaves out, or a branch on the number of samples. The first operator that
has another name tells the line.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from meshcee.capture.export.flatten import is_factory
from meshcee.capture.export.masks import MOST_KNOWN, really
from meshcee.capture.export.refusals import AFTER_ONE_BATCH, COUNT, GRADIENT_SET
from meshcee.capture.export.settings import replaced
from meshcee.capture.export.writes import is_copy
from meshcee.capture.graph import Program, canonical, places_written, quiet, resolve, without_out
from meshcee.errors import CaptureError
from meshcee.files.tensor_files import byte_view
from meshcee.reach import Remembered
from meshcee.reach.modules import entries
from meshcee.user_code import avoided, is_ours, library_of

__all__ = ["Watch", "keeping"]

_ZEROS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::zeros", "aten::zeros_like", "aten::new_zeros"}
)
_SEED = 0x6D65736863656521  # one that nobody else sets
_WITHOUT_GRADIENT = frozenset({"aten::randint_like"})
# Of these the gradient of one operand does not ask whether another one needs one, and no kernel is chosen by that.
_APART = frozenset(
    f"aten::{name}{how}"
    for name in ("add", "sub", "mul", "div", "sum", "mean", "stack", "cat", "clone", "_to_copy")
    for how in ("", "_")
)
_SAME = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})


@dataclass
class Run:
    """What one forward pass came to: the names of the loss and of the buffers, and every operator on the way, by name."""

    results: dict[str, str] = field(default_factory=dict)
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> names that its operator read
    at: dict[str, str] = field(default_factory=dict)  # name -> the user's line
    odd: dict[str, str] = field(default_factory=dict)  # name -> what was set around the operator that made it
    hints: dict[str, str] = field(default_factory=dict)  # name -> why a graph may not have it, if it has not
    drawn: set[str] = field(default_factory=set)  # names of random numbers
    shaped: set[str] = field(default_factory=set)  # names whose operator reads shapes and no numbers

    def end(self, naming: _Naming, loss: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> None:
        self.results["the loss"] = naming.name(loss)
        self.reads[naming.name(loss)] = (naming.storage(loss),)
        self.results |= {name: naming.storage(tensor) for name, tensor in buffers.items()}

    def first_difference(self, other: Run) -> str | None:
        """The first name on the way to a result that the other run does not have; None when what both end in is the same."""
        differing = [name for key, name in self.results.items() if other.results.get(key, name) != name]
        if not differing:
            return None
        needed, waiting = set(), list(differing)
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += self.reads.get(name, ())
        return next((name for name in self.reads if name in needed and name not in other.reads), "")

    def moving(self, given: Iterable[str]) -> set[str]:
        """The names whose numbers the next call would have otherwise: what was given or drawn, and what was made of that."""
        found = self.drawn.union(given)
        for name, read in self.reads.items():  # in the order of the operators
            if name not in self.shaped and not found.isdisjoint(read):
                found.add(name)
        return found


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


class _Naming(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names every storage that is written while it is on."""

    def __init__(self, run: Run, names: dict[int, str], seeded: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._names, self._seeded = run, names, seeded
        self._held: list[Any] = []  # storages, so that their addresses stay theirs
        self._draws = 0
        # Storages of what forward has made with requires_grad, and of what is made of these alone.
        self._vain: set[str] = set()
        self._usual = _surroundings()

    def name(self, tensor: torch.Tensor) -> str:
        """Of a tensor: its storage's name and where it lies in there, as far as that matters to kernels."""
        place = tensor.storage_offset() if isinstance(tensor, FakeTensor) else 0
        strides = canonical(tensor.shape, tensor.stride())
        bits = tensor.is_conj(), tensor.is_neg()
        return _digest(self.storage(tensor), tensor.dtype, tuple(tensor.shape), strides, place, bits)

    def storage(self, tensor: torch.Tensor) -> str:
        key = tensor.untyped_storage()._cdata
        if key in self._names:
            return self._names[key]
        if isinstance(tensor, FakeTensor):
            return "unknown"
        with _disable_current_modes():
            return hashlib.blake2b(byte_view(tensor), digest_size=12).hexdigest()  # it may be written: not kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            # C++ code asks, as for a device: an error in there would end this process.
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        # As export writes it.
        if isinstance(kwargs.get("out"), torch.Tensor) and (twin := without_out(func)) is not None:
            into = kwargs.pop("out")
            made = self.__torch_dispatch__(twin, types, args, kwargs)
            return self.__torch_dispatch__(torch.ops.aten.copy_.default, types, (into, made))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = [self.storage(t) for t in given]
        parts = [self.name(p) if isinstance(p, torch.Tensor) else repr(p) for p in tree_leaves((args, kwargs))]
        self._vain.update(own for own, t in zip(before, given) if _is_born(t))
        apart = func._schema.name in _APART
        grads = [t.requires_grad and not (apart and own in self._vain) for own, t in zip(before, given)]
        vain = apart and not any(grads) and any(t.requires_grad for t in given)
        out = func(*args, **kwargs)
        shared = {t.untyped_storage()._cdata for t in given}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in shared]
        written = _written(func, args, kwargs)
        if not made and not written:
            return out
        name = func._schema.name
        if name in _SAME:
            parts, grads, before = [self.name(given[0])], [], before
        elif name in _ZEROS:
            parts, grads = [repr((t.dtype, tuple(t.shape), t.stride())) for t in made], []
        elif made and is_factory(func):  # whether its type is said or torch's default
            said = kwargs | {"dtype": made[0].dtype}
            parts = [
                repr(p)
                for p in (*tree_leaves(args), *((key, said[key]) for key in sorted(said) if said[key] is not None))
            ]
        odd, line = "", _users_line()
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws += 1
            parts.append(str(self._draws))
            if torch.initial_seed() != _SEED:
                odd, line = "a seed of its own", self._seeded[-1] if self._seeded else line
        recorded = torch.is_grad_enabled() and any(grads) and name not in _WITHOUT_GRADIENT
        odd = odd or next((what for what, now in _surroundings().items() if now != self._usual[what]), "")
        kind = "zeros" if name in _ZEROS else "same" if name in _SAME else str(func)
        operator = _digest(kind, parts, grads if recorded else (), odd)
        for i, tensor in enumerate((*written, *made)):
            own = _digest(operator, i)
            self._names[tensor.untyped_storage()._cdata] = own
            self._held.append(tensor.untyped_storage())
            self._run.reads[own] = tuple(before)
            if vain:
                self._vain.add(own)
            self._run.at[own], self._run.odd[own] = line, odd
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._run.drawn.add(own)
            if name.endswith("_like") or name.startswith("aten::new_"):
                self._run.shaped.add(own)
            if hint := self._hint(name, before):
                self._run.hints[own] = hint
        return out

    def _hint(self, operator: str, reads: Sequence[str]) -> str:
        if vain := self._vain.intersection(reads):
            return GRADIENT_SET.format(at=_at(self._run.at.get(min(vain), "")))
        return f"a tensor is made of a number of samples{{at}}; {COUNT}" if operator in _SAME else ""


def _is_born(tensor: torch.Tensor) -> bool:
    if tensor._is_view():  # of what was written it has no history in here
        return False
    return tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter)


def _at(line: str) -> str:
    """The user's line, with its code."""
    file, _, number = line.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if line else ""
    return f" at {line} `{code}`" if code else f" at {line}" if line else ""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [t for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)) if _is_tensor(t)]
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _surroundings() -> dict[str, Any]:
    """What changes numbers or gradients and is no part of a graph."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    own = hooks is not None and not getattr(hooks[0], "__module__", "").startswith("torch.")
    backends: Any = torch.backends
    kernels = backends.cuda
    return {
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "saved_tensors_hooks": own,
        "sdpa_kernel or another choice of attention kernels": (
            kernels.flash_sdp_enabled(),
            kernels.math_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
            kernels.cudnn_sdp_enabled(),
        ),
        "a setting of torch.backends": (
            torch._C._get_mkldnn_enabled(),
            torch._C._get_cudnn_enabled(),
            torch._C._get_cudnn_deterministic(),
            torch._C._get_cudnn_allow_tf32(),
            torch._C._get_cublas_allow_tf32(),
        ),
        # Not torch.get_float32_matmul_precision, which fails where a script has used both of torch's ways to set it.
        "torch.set_float32_matmul_precision": (backends.mkldnn.matmul.fp32_precision, kernels.matmul.fp32_precision),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.set_num_threads": torch.get_num_threads(),
    }


def _users_line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_ours(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def _fake() -> Iterator[None]:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # and sympy: peers need neither

    sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        with mode, _Fixed(mode):
            yield


class _Fixed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Small tensors that follow from no other, or from real ones, are known (`masks.known`): their `constant` holds the numbers.

    torch itself keeps one number alone, so constants are out of its sight while it computes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._converter = mode.fake_tensor_converter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {id(t): (t, t.constant) for t in given if isinstance(t, FakeTensor) and t.constant is not None}
        for t, _ in known.values():
            t.constant = None
        try:
            made = func(*args, **kwargs)
        finally:
            for t, constant in known.values():
                t.constant = constant
        results = [t for t in tree_leaves(made) if isinstance(t, FakeTensor)]
        writes = places_written(func._schema) != ()
        if not all(id(t) in known or (type(t) is torch.Tensor and not writes) for t in given) or _unknown(
            func, results
        ):
            for _, constant in known.values() if writes else ():
                self._converter.invalidate_constant_aliases(constant)
            return made
        with really(), torch.no_grad():
            own, named = tree_map(lambda it: known[id(it)][1] if id(it) in known else it, (args, kwargs))
            real = [t for t in tree_leaves(func(*own, **named)) if isinstance(t, torch.Tensor)]
        for result, constant in zip(results, real, strict=True) if not writes else ():
            result.constant = constant
            self._converter.add_constant_storage_mapping(result)
        return made


def _unknown(func: Any, results: Sequence[torch.Tensor]) -> bool:
    """Whether the numbers of these are drawn, are left as memory has them, or are too many."""
    drawn = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__
    return drawn or sum(t.numel() for t in results) > MOST_KNOWN


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def eager_runs(
    module: nn.Module,
    arguments: Mapping[str, torch.Tensor],
    name_of: Callable[[str], str],
    samples: int,
    times: int = 1,
    after: Callable[[], None] = lambda: None,
    lines: Mapping[tuple[int, str], str] | None = None,
) -> tuple[list[Run], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The module's forward pass on fakes of its tensors, so many times in a row; `after` is called after each.

    lines  where attributes are assigned (`_assignments`), for errors
    Besides, the buffers that forward assigned: their tensors before and after the first pass.
    """
    rebound: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    runs: list[Run] = []
    held: list[Any] = []
    with _fake():
        fakes: dict[int, torch.Tensor] = {}
        stand_ins: dict[str, torch.Tensor] = {}
        for path, tensor in _slots(module):
            if id(tensor) not in fakes:
                strides = canonical(tensor.shape, tensor.stride())
                empty = torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype)
                own = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if own else empty
            stand_ins[path] = fakes[id(tensor)]
        names: dict[int, str] = {}
        known = {path for path, _ in entries(module)}
        with _reparametrize_module(module, stand_ins):
            for _ in range(times):
                run = Run()
                torch.default_generator.manual_seed(_SEED)  # the pass before may have left another
                state = [(path, t, _digest("state", name_of(path))) for path, t in entries(module)]
                names |= {_key(t): own for _, t, own in state}
                inputs = {n: torch.empty((samples, *t.shape[1:]), dtype=t.dtype) for n, t in arguments.items()}
                raw = {_key(t): _digest("raw", n) for n, t in inputs.items()}
                names |= raw
                with torch.enable_grad(), _seedings() as seeded, _Naming(run, names, seeded) as naming:
                    loss = module(*inputs.values())[0]
                if made := [path for path, _ in module.named_buffers(remove_duplicate=False) if path not in known]:
                    at = _line_of(module, made[0], lines or {})
                    raise CaptureError(
                        f"forward makes a buffer {made[0].removeprefix('model.')!r}{at}; {AFTER_ONE_BATCH}"
                    )
                buffers = {name_of(path): t for path, t in module.named_buffers(remove_duplicate=False)}
                run.end(naming, loss, buffers)
                for path, tensor in module.named_buffers(remove_duplicate=False):
                    if not runs and path in stand_ins and tensor is not stand_ins[path]:
                        rebound[path] = stand_ins[path], tensor
                runs.append(run)
                held.append((naming, inputs))
                now = {path: naming.storage(t) for path, t in entries(module)}
                changed = [own for path, t, own in state if t.requires_grad or now.get(path) != own]
                moving = run.moving([*raw.values(), *changed])
                names |= {key: _digest("left by a call", own) for key, own in names.items() if own in moving}
                after()
    return runs, rebound


def graph_run(program: Program, arguments: Mapping[str, torch.Tensor], samples: int) -> Run:
    """The same of the graph."""
    run, names = Run(), {}
    values: list[Any] = []
    with _fake(), torch.enable_grad():
        buffers: dict[str, torch.Tensor] = {}
        for entry in program.inputs:
            if entry.kind == "raw":
                like = arguments[entry.name]
                value = torch.empty((samples, *like.shape[1:]), dtype=like.dtype)
            elif entry.data is not None:
                with _disable_current_modes():  # its numbers count
                    value = entry.laid_out(entry.data)
            else:
                value = entry.laid_out(torch.empty(entry.value.sizes(samples), dtype=entry.value.dtype))
                value = nn.Parameter(value) if entry.trainable else value
            if entry.data is None:
                names[_key(value)] = _digest("raw" if entry.kind == "raw" else "state", entry.name)
            if entry.kind == "buffer":
                buffers[entry.name] = value
            values.append(value)
        with _Naming(run, names) as naming:
            for node in program.nodes:
                with torch.set_grad_enabled(not node.no_grad):
                    args = [resolve(a, values) for a in node.args]
                    values.append(node.operator.call(*args, **{k: resolve(v, values) for k, v in node.kwargs.items()}))
                if is_copy(program, node):
                    names[_key(values[-1])] = names[_key(args[0])]  # eager code writes the sample itself
        run.end(naming, values[program.outputs[0]], buffers)
    return run


def _slots(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each place that holds a tensor once, by its first path: torch puts back what a place held once for each path given."""
    for path, part in module.named_modules():
        yield from part.named_parameters(path, recurse=False, remove_duplicate=False)
        yield from part.named_buffers(path, recurse=False, remove_duplicate=False)


@contextlib.contextmanager
def _seedings() -> Iterator[list[str]]:
    """The user's lines that seeded torch's generator, the newest last."""
    lines: list[str] = []
    before = torch.manual_seed

    def noted(seed: int) -> torch.Generator:
        lines.append(_users_line())
        return before(seed)

    torch.manual_seed = torch.random.manual_seed = noted
    try:
        yield lines
    finally:
        torch.manual_seed = torch.random.manual_seed = before


@contextlib.contextmanager
def _assignments() -> Iterator[dict[tuple[int, str], str]]:
    """The user's line that assigned an attribute last, by the module's id and the attribute's name."""
    lines: dict[tuple[int, str], str] = {}

    def noting(before: Callable[..., None]) -> Callable[..., None]:
        def noted(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            lines[id(module), name] = f" at {_users_line()}"
            before(module, name, *args, **kwargs)

        return noted

    with contextlib.ExitStack() as patches:
        for name in ("__setattr__", "register_buffer"):
            patches.enter_context(replaced(nn.Module, name, noting(getattr(nn.Module, name))))
        yield lines


def _line_of(module: nn.Module, path: str, lines: Mapping[tuple[int, str], str]) -> str:
    """Of the assignment to this place."""
    owner, _, key = path.rpartition(".")
    return lines.get((id(module.get_submodule(owner)), key), "")


@contextlib.contextmanager
def keeping(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Around forward: what it assigns to these buffers is written into them at the end, as a graph can say it."""
    owners = [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    before = [owner._buffers[key] for owner, key in owners]
    for (owner, key), buffer in zip(owners, before):
        assert buffer is not None
        owner._buffers[key] = buffer.clone()  # what reads the old value keeps it
    yield
    with torch.no_grad():
        for (owner, key), buffer in zip(owners, before):
            assigned = owner._buffers[key]
            assert buffer is not None
            assert assigned is not None
            buffer.copy_(assigned)
            owner._buffers[key] = buffer


class Watch:
    """One module under watch: what `eager` finds before export, and what `compare` finds of the graph."""

    def __init__(
        self,
        module: nn.Module,
        arguments: Mapping[str, torch.Tensor],
        name_of: Callable[[str], str],
        remember: Callable[[], Remembered],
        samples: int,
    ) -> None:
        self._module, self._arguments, self._name_of = module, arguments, name_of
        self._remember = remember
        self._samples = samples
        self._first = Run()

    def eager(self) -> tuple[str, ...]:
        """Two calls of forward. Raises CaptureError for state that it keeps; returns the buffers that it assigns."""
        notes: list[Remembered] = []
        before = self._remember()
        try:
            with _assignments() as lines:
                runs, rebound = eager_runs(
                    self._module,
                    self._arguments,
                    self._name_of,
                    self._samples,
                    2,
                    lambda: notes.append(self._remember()),
                    lines,
                )
        finally:
            before.put_back()
        for path, (was, now) in rebound.items():
            self._refuse_assigned(path, was, now, _line_of(self._module, path, lines))
        for place in notes[0].changed(notes[1]):
            at = lines.get(notes[1].owners.get(place, (0, "")), notes[1].line_at(place))
            who = notes[1].who_changes(place)
            raise CaptureError(
                f"{who} changes {place}{at} in every call, and peers run a graph that would keep one value; let forward add to "
                f"a registered buffer of the model{'' if who == 'forward' else ', and return it beside the output for the loss'}"
            )
        self._refuse(
            runs[1],
            runs[0],
            "forward does something else when it is called again{at}: it reads what an earlier call left in Python, a clock "
            "or a generator; keep state in registered buffers, and draw with torch.rand",
        )
        self._first = runs[0]
        return tuple(path for path in rebound)

    def assigned(self) -> tuple[str, ...]:
        """The buffers that one call of forward assigns."""
        before = self._remember()
        try:
            _, rebound = eager_runs(self._module, self._arguments, self._name_of, self._samples)
        finally:
            before.put_back()
        return tuple(rebound)

    def compare(self, program: Program, sizes: Sequence[int]) -> None:
        """Raises CaptureError where the graph is not what forward does, with as many samples as the job has."""
        before = self._remember()
        try:
            for samples in dict.fromkeys((self._samples, *sizes)):
                eager = self._first
                if samples != self._samples:
                    [eager], _ = eager_runs(self._module, self._arguments, self._name_of, samples)
                few = samples != self._samples
                self._refuse(
                    eager,
                    graph_run(program, self._arguments, samples),
                    f"with micro-batches of {samples} samples, forward does something else than with {self._samples}{{at}}; "
                    "write it alike for any number of samples, or choose another micro_batch_size"
                    if few
                    else "torch.export leaves out or changes something that forward does{at}; write it with other torch functions",
                    graph=True,
                )
        finally:
            before.put_back()

    def _refuse(self, eager: Run, other: Run, words: str, graph: bool = False) -> None:
        name = eager.first_difference(other)
        if name is None:
            return
        at = _at(eager.at.get(name, ""))
        if odd := eager.odd.get(name):
            raise CaptureError(f"forward runs{at} under {odd}, which a graph does not hold; leave it out")
        words = eager.hints.get(name, words) if graph else words
        if library := library_of(eager.at.get(name, "").rpartition(":")[0]):
            words = f"{words.rpartition(';')[0]}; {avoided(library)}"
        raise CaptureError(words.format(at=at))

    def _refuse_assigned(self, path: str, was: torch.Tensor, now: torch.Tensor, at: str) -> None:
        name = path.removeprefix("model.")
        if now.requires_grad:
            raise CaptureError(f"forward assigns buffer {name!r} a value with a gradient{at}; assign it with .detach()")
        if now.dtype != was.dtype or now.shape != was.shape or now.stride() != was.stride():
            raise CaptureError(
                f"forward assigns buffer {name!r} a tensor of another type, shape or order{at}; assign one like it, or "
                + AFTER_ONE_BATCH
            )
