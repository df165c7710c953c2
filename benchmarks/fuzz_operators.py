"""Calls every operator of the allow-list with arguments that pass a peer's check: each call must end, with a value or an error.

The idea: arguments are drawn by the schema, and those that passed are changed one by one. Inputs lie against pages that nobody may
touch, so a kernel that reads beyond them dies of it; and each call is made twice, while fresh memory is filled with another
byte, so a kernel that gives out memory which nobody wrote gives two answers. A process of its own makes the calls.

    python benchmarks/fuzz_operators.py [--only NAME] [--minutes N] [--seed N] [--out FILE]
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import json
import math
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshcee.capture import prepare
from meshcee.capture.graph.analysis import quiet
from meshcee.capture.graph.encoding import DTYPES
from meshcee.capture.graph.operators import ALLOWED, Operator, find_operator
from meshcee.capture.graph.rules import check_call
from meshcee.capture.graph.verify import Measure

LIMIT_S = 5.0  # of processor time, for a call on tensors of a few kilobytes
MOST_BYTES = 1 << 22  # of what a call makes on its way: what is larger is a matter of --memory
TRIES = 40  # in a row, for one operator
VALUES = 3  # for the same shapes
_PAGE = mmap.PAGESIZE
_SLOT = 64 * _PAGE
_PERTURB = -6  # of mallopt(3): fills what is allocated and what is freed
_SIZES = (0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8, 17)
_NUMBERS = (0, 1, -1, 2, 0.5, -0.5, 1e-8, 3, 7, 100, -100, 1e30, -1e30, 2**31, -(2**31), 2**62, -(2**62))
_WIDE = (math.inf, -math.inf, math.nan)
_EQUATIONS = ("ab,bc->ac", "ab,ab->", "ab->ba", "ii->i", "...a,...b->...ab", "a,b", "abc,cd->abd", "aab->b", "a,a,a->a")
_DRAWN = (torch.float32,) * 6 + (torch.int64,) * 2 + tuple(DTYPES.values())
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Spec:
    """A tensor that is not made yet: its layout is of dimensions in another order, or of one row over and over."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    repeated: bool = False

    def laid(self, flat: torch.Tensor) -> torch.Tensor:
        inner = [1 if self.repeated and d == 0 else self.shape[d] for d in self.order]
        inverse = [self.order.index(d) for d in range(len(self.order))]
        return flat.view(inner).permute(inverse).expand(self.shape)

    @property
    def count(self) -> int:
        return math.prod(1 if self.repeated and d == 0 else size for d, size in enumerate(self.shape))


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec(shape, dtype, tuple(range(len(shape))))


def places(*shape: int) -> Spec:
    return spec(*shape, dtype=torch.int64)


_CELL = [spec(2, 3), spec(2, 4)]
_STARTS: dict[str, list[Any]] = {  # shapes that chance seldom finds; defaults follow
    "_grouped_mm.default": [spec(6, 16), spec(3, 16, 16), spec(3, dtype=torch.int32)],
    "addbmm.default": [spec(3, 5), spec(2, 3, 4), spec(2, 4, 5)],
    "addmm.default": [spec(3, 5), spec(3, 4), spec(4, 5)],
    "addmv.default": [spec(3), spec(3, 4), spec(4)],
    "addr.default": [spec(3, 4), spec(3), spec(4)],
    "affine_grid_generator.default": [spec(2, 2, 3), [2, 1, 4, 4], False],
    "avg_pool1d.default": [spec(2, 3, 8), [2]],
    "avg_pool2d.default": [spec(1, 2, 4, 4), [2, 2]],
    "baddbmm.default": [spec(2, 3, 5), spec(2, 3, 4), spec(2, 4, 5)],
    "bilinear.default": [spec(2, 3), spec(2, 4), spec(5, 3, 4), spec(5)],
    "col2im.default": [spec(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]],
    "conv1d.padding": [spec(2, 3, 8), spec(4, 3, 3), None, [1], "same"],
    "conv2d.default": [spec(1, 2, 6, 6), spec(4, 2, 3, 3), spec(4)],
    "conv2d.padding": [spec(1, 2, 6, 6), spec(4, 2, 3, 3), None, [1, 1], "same"],
    "conv3d.default": [spec(1, 2, 4, 4, 4), spec(3, 2, 2, 2, 2)],
    "conv3d.padding": [spec(1, 2, 4, 4, 4), spec(3, 2, 2, 2, 2), None, [1, 1, 1], "same"],
    "conv_tbc.default": [spec(5, 2, 3), spec(2, 3, 4), spec(4)],
    "conv_transpose2d.input": [spec(1, 2, 3, 3), spec(2, 3, 2, 2)],
    "conv_transpose3d.input": [spec(1, 2, 3, 3, 3), spec(2, 3, 2, 2, 2)],
    "cosine_embedding_loss.default": [spec(3, 4), spec(3, 4), spec(3)],
    "ctc_loss.IntList": [spec(5, 2, 3), places(2, 3), [5, 5], [2, 3]],
    "ctc_loss.Tensor": [spec(5, 2, 3), places(2, 3), places(2), places(2)],
    "einsum.default": ["ab,bc->ac", [spec(2, 3), spec(3, 4)]],
    "grid_sampler_2d.default": [spec(1, 2, 3, 3), spec(1, 2, 2, 2), 0, 0, False],
    "grid_sampler_3d.default": [spec(1, 2, 3, 3, 3), spec(1, 2, 2, 2, 3), 0, 0, False],
    "group_norm.default": [spec(2, 4, 3), 2, spec(4), spec(4)],
    "gru_cell.default": [*_CELL, spec(12, 3), spec(12, 4)],
    "im2col.default": [spec(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]],
    "index_add.default": [spec(3, 4), 0, places(2), spec(2, 4)],
    "index_copy.default": [spec(3, 4), 0, places(2), spec(2, 4)],
    "instance_norm.default": [spec(2, 3, 4), None, None, None, None, True, 0.1, 1e-5, False],
    "layer_norm.default": [spec(2, 3, 4), [4], spec(4), spec(4)],
    "lstm_cell.default": [_CELL[0], [_CELL[1]] * 2, spec(16, 3), spec(16, 4)],
    "masked_fill.Tensor": [spec(3, 4), spec(3, 4, dtype=torch.bool), spec()],
    "max_pool1d.default": [spec(2, 3, 8), [2]],
    "max_pool3d.default": [spec(1, 2, 4, 4, 4), [2, 2, 2]],
    "multi_margin_loss.default": [spec(3, 4), places(3)],
    "mv.default": [spec(3, 4), spec(4)],
    "orgqr.default": [spec(4, 3), spec(3)],
    "reflection_pad2d.default": [spec(1, 2, 4, 4), [1, 1, 1, 1]],
    "reflection_pad3d.default": [spec(1, 1, 3, 3, 3), [1] * 6],
    "replication_pad3d.default": [spec(1, 1, 3, 3, 3), [1] * 6],
    "rnn_relu_cell.default": [*_CELL, spec(4, 3), spec(4, 4)],
    "rnn_tanh_cell.default": [*_CELL, spec(4, 3), spec(4, 4)],
    "scatter.reduce": [spec(3, 4), 1, places(3, 2), spec(3, 2), "add"],
    "stft.default": [spec(2, 16), 4, None, None, spec(4), False, True, True],
    "stft.center": [spec(2, 16), 4, None, None, spec(4), True, "reflect", False, True, True],
    "upsample_bicubic2d.vec": [spec(1, 2, 4, 4), [8, 8], False, None],
    "upsample_bilinear2d.default": [spec(1, 2, 4, 4), [8, 8], False],
    "upsample_linear1d.vec": [spec(1, 2, 4), [8], False, None],
    "upsample_nearest1d.default": [spec(1, 2, 4), [8]],
    "upsample_nearest1d.vec": [spec(1, 2, 4), [8], None],
    "upsample_nearest2d.default": [spec(1, 2, 4, 4), [8, 8]],
    "upsample_nearest2d.vec": [spec(1, 2, 4, 4), None, [2.0, 2.0]],
    "upsample_nearest3d.default": [spec(1, 1, 2, 2, 2), [4, 4, 4]],
    "upsample_nearest3d.vec": [spec(1, 1, 2, 2, 2), [4, 4, 4], None],
    "upsample_trilinear3d.default": [spec(1, 1, 2, 2, 2), [4, 4, 4], False],
    "where.self": [spec(3, 4, dtype=torch.bool), spec(3, 4), spec(3, 4)],
}


class Memory:
    """Slots between two pages that nobody may touch."""

    def __init__(self, slots: int = 24) -> None:
        self._maps = [mmap.mmap(-1, _SLOT + 2 * _PAGE) for _ in range(slots)]
        for each in self._maps:
            start = ctypes.addressof(ctypes.c_char.from_buffer(each))
            for place in (start, start + _PAGE + _SLOT):
                if _libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(_PAGE), 0):
                    raise OSError(ctypes.get_errno(), "mprotect")
        self.free = 0

    def take(self, count: int, dtype: torch.dtype, *, low: bool) -> torch.Tensor:
        """At one end of a slot; without values."""
        size = count * dtype.itemsize
        if not size or size > _SLOT or self.free == len(self._maps):
            return torch.empty(count, dtype=dtype)
        self.free += 1
        offset = _PAGE if low else _PAGE + _SLOT - size
        return torch.frombuffer(self._maps[self.free - 1], dtype=dtype, count=count, offset=offset)


def fill(tensor: torch.Tensor, rng: random.Random) -> None:
    """Values that kernels are used to, or the ends of what the type holds."""
    wild, dtype = rng.random() < 0.3, tensor.dtype
    if dtype == torch.bool:
        tensor.copy_(torch.randint(0, 2, tensor.shape))
    elif dtype.is_floating_point or dtype.is_complex:
        tensor.copy_(torch.randn(tensor.shape))
        if wild and tensor.numel():
            tensor[rng.randrange(tensor.numel())] = rng.choice([*_WIDE, 1e30, -1e30, 0.0])
    else:
        most = torch.iinfo(dtype).max
        tensor.copy_(torch.randint(0 if dtype == torch.uint8 else -2, rng.choice((2, 4, 9)), tensor.shape))
        if wild and tensor.numel():
            ends = (most, torch.iinfo(dtype).min, most // 2, 1000)
            tensor[rng.randrange(tensor.numel())] = rng.choice([end for end in ends if end <= most])


class Fuzzer:
    """The calls of one operator: `pool` holds arguments that passed."""

    def __init__(self, name: str, seed: int) -> None:
        self.operator: Operator = find_operator(name)
        self.rng = random.Random(f"{seed} {name}")
        self.pool: list[list[Any]] = []
        self.schema = getattr(getattr(torch.ops.aten, name.split(".")[1]), name.split(".")[2])._schema.arguments
        start = _STARTS.get(name.removeprefix("aten.").replace("_.", "."))
        if start is not None:
            self.pool.append([*start, *(argument.default_value for argument in self.schema[len(start) :])])

    # -- arguments ---------------------------------------------------------------------------------------------------

    def draw(self) -> list[Any]:
        """One value for each argument of the schema."""
        rng = self.rng
        if self.pool and rng.random() < 0.7:
            args = list(rng.choice(self.pool))
            place = rng.randrange(len(args))
            args[place] = self.value(place, [rng.choice(_SIZES) for _ in range(rng.randrange(5))], rng.choice(_DRAWN))
            return args
        base = [rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4, 4, 5)))]
        dtype = rng.choice(_DRAWN)
        if self.operator.name.split(".")[1] in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return self.recurrent()
        return [self.value(place, base, dtype) for place in range(len(self.schema))]

    def value(self, place: int, base: list[int], dtype: torch.dtype) -> Any:
        argument, kind = self.schema[place], self.operator.schema_types[place]
        if argument.has_default_value() and self.rng.random() < 0.4:
            return argument.default_value
        return self.typed(argument.name, kind, base, dtype)

    def typed(self, name: str, kind: str, base: list[int], dtype: torch.dtype) -> Any:
        rng = self.rng
        if kind.startswith("Optional["):
            return None if rng.random() < 0.4 else self.typed(name, kind[len("Optional[") : -1], base, dtype)
        if kind.startswith("List["):
            count = rng.choice((0, 1, 1, 2, 2, 3, 4, len(base), len(base)))
            if name in ("size", "shape") and rng.random() < 0.5:
                return list(base)
            return [self.typed(name, kind[len("List[") : -1], base, dtype) for _ in range(count)]
        if kind == "Tensor":
            return self.tensor(name, base, dtype)
        if kind in ("int", "SymInt"):
            own = ALLOWED["integers_of"].get(self.operator.name, {})
            least, most = own.get(name) or ALLOWED["integers"][name]
            drawn = rng.choice([*range(-3, 6), *base, least, most, rng.randint(least, most), 2**31, most - 1])
            return min(max(drawn, least), most)
        if kind == "bool":
            return name not in ALLOWED["flags"]["off"] and rng.random() < 0.5
        if kind == "str":
            return rng.choice(_EQUATIONS if name == "equation" else ALLOWED["words"][name])
        if kind in ("number", "float"):
            number = rng.choice(_NUMBERS + _WIDE) if rng.random() < 0.5 else rng.uniform(-2, 2)
            return float(number) if kind == "float" else number
        return {
            "ScalarType": rng.choice(list(DTYPES.values())),
            "MemoryFormat": rng.choice((torch.contiguous_format, torch.preserve_format, torch.channels_last)),
            "Layout": torch.strided,
            "Device": torch.device("cpu"),
        }.get(kind)

    def tensor(self, name: str, base: list[int], dtype: torch.dtype) -> Spec:
        rng = self.rng
        shape = list(base)
        way = rng.random()
        if way < 0.15:
            shape = [size if rng.random() < 0.5 else 1 for size in shape]
        elif way < 0.3:
            shape = [rng.choice(_SIZES) for _ in range(rng.randrange(5))]
        elif way < 0.4:
            shape = shape[rng.randrange(len(shape) + 1) :]
        elif way < 0.5:
            shape = [rng.choice([*base, 1, 2]) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.1:
            dtype = rng.choice(_DRAWN)
        elif (
            name in ("index", "indices", "target", "targets", "self" if "embedding" in name else "")
            and rng.random() < 0.8
        ):
            dtype = torch.int64
        order = list(range(len(shape)))
        if rng.random() < 0.2:
            rng.shuffle(order)
        return Spec(tuple(shape), dtype, tuple(order), repeated=len(shape) > 0 and rng.random() < 0.2)

    def recurrent(self) -> list[Any]:
        """The shapes that fit are too many for chance to find."""
        rng, gates = self.rng, {"lstm": 4, "gru": 3}.get(self.operator.name.split(".")[1], 1)
        layers, ways, batch, steps, size, width = (rng.randint(1, 3) for _ in range(6))
        ways, biases, first = min(ways, 2), rng.random() < 0.5, rng.random() < 0.5

        params = []
        for layer in range(layers):
            entry = size if layer == 0 else width * ways
            one = [spec(gates * width, entry), spec(gates * width, width)] + [spec(gates * width)] * (
                2 if biases else 0
            )
            params += one * ways
        state = spec(layers * ways, batch, width)
        return [
            spec(batch, steps, size) if first else spec(steps, batch, size),
            [state, state] if gates == 4 else state,
            params, biases, layers, rng.choice((0.0, 0.5)), rng.random() < 0.5, ways == 2, first,
        ]  # fmt: skip

    # -- calls -------------------------------------------------------------------------------------------------------

    def passes(self, args: list[Any]) -> bool:
        """Whether a peer would take a graph with this call."""
        measure = Measure()
        try:
            with quiet(), torch.no_grad(), measure:
                values = made(args, lambda s: s.laid(torch.empty(s.count, dtype=s.dtype, device="meta")))
                plain, named = self.split(values, "meta")
                check_call(self.operator, plain, named)
                out = self.operator.call(*plain, **named)
        except Exception:  # whatever a kernel says of nonsense
            return False
        seen = [
            t.numel() * t.itemsize for t in (out if isinstance(out, list | tuple) else [out]) if hasattr(t, "numel")
        ]
        return max([measure.largest_bytes, *seen]) <= MOST_BYTES

    def split(self, args: list[Any], device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
        """Those of the schema that have no place go by name. What is made of nothing is made on this device."""
        kinds = self.operator.argument_types
        args = [torch.device(device) if kind == "Device" else a for a, kind in zip(args, kinds)]
        plain = [a for a, s in zip(args, self.schema) if not s.kwarg_only]
        return plain, {s.name: a for a, s in zip(args, self.schema) if s.kwarg_only}

    def call(self, args: list[Any], seed: int, memory: Memory) -> str:
        """ "value", "error", or "unwritten": two answers to one question."""
        answers = []
        for byte in (0x5A, 0xA5):
            rng, memory.free = random.Random(seed), 0
            torch.manual_seed(seed)

            def real(spec: Spec, rng: random.Random = rng) -> torch.Tensor:
                flat = memory.take(spec.count, spec.dtype, low=rng.random() < 0.5)
                fill(flat, rng)
                return spec.laid(flat)

            given = self.split(made(args, real))
            _libc.mallopt(_PERTURB, byte)
            try:
                with torch.no_grad():
                    out = self.operator.call(*given[0], **given[1])
            except Exception as error:
                answers.append((type(error).__name__,))
                continue
            finally:
                _libc.mallopt(_PERTURB, 0)
            outs = out if isinstance(out, list | tuple) else [out]
            answers.append(tuple(contents(t) for t in outs))
        if answers[0] != answers[1]:
            return "unwritten"
        return "error" if isinstance(answers[0][0] if answers[0] else None, str) else "value"


def contents(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = value.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""


def made(value: Any, make: Any) -> Any:
    if isinstance(value, list):
        return [made(v, make) for v in value]
    return make(value) if isinstance(value, Spec) else value


def work(names: list[str], seed: int, minutes: float, note: int) -> None:
    """The process that makes the calls: says what each operator did, and notes each call before it is made."""
    memory, end_s = Memory(), time.monotonic() + 60 * minutes
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries of kernels print there too
    torch.set_num_threads(1)
    prepare()
    fuzzers = {name: Fuzzer(name, seed) for name in names}
    for name, fuzzer in itertools.cycle(fuzzers.items()):
        found: collections.Counter[str] = collections.Counter()
        for _ in range(TRIES):
            args = fuzzer.draw()
            noted(note, f"{name} on meta tensors: {args}")
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process
            if not fuzzer.passes(args):
                continue
            fuzzer.pool.append(args)
            if len(fuzzer.pool) > 64:
                fuzzer.pool.pop(fuzzer.rng.randrange(64))
            for _ in range(VALUES):
                values = fuzzer.rng.getrandbits(32)
                noted(note, f"{name}, values {values}: {args}")
                signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
                answer = fuzzer.call(args, values, memory)
                found[answer] += 1
                if answer == "unwritten":
                    print(json.dumps({"name": name, "unwritten": f"values {values}: {args}"}), file=out)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"name": name, "calls": found}), file=out)
        if time.monotonic() > end_s:
            return


def noted(file: int, text: str) -> None:
    line = text.encode()[:4000]
    os.pwrite(file, line + b" " * (4000 - len(line)), 0)


def watch(names: list[str], seed: int, minutes: float) -> Iterator[dict[str, Any]]:
    """What the process says; when it dies, of which call, and another goes on without that operator."""
    end_s, left = time.monotonic() + 60 * minutes, list(names)
    for again in itertools.count():
        with tempfile.NamedTemporaryFile() as note:
            rest = {"names": left, "seed": seed + again, "minutes": (end_s - time.monotonic()) / 60, "note": note.name}
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(rest).encode())
            process.stdin.close()
            try:
                for line in process.stdout:
                    yield json.loads(line)
            except GeneratorExit:
                process.kill()
                raise
            if process.wait() == 0:
                return
            call = note.read().decode(errors="replace").strip()
        name = call.split(",")[0].split(" ")[0]
        why = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit {process.returncode}"
        yield {"name": name, "died": f"{why}: {call}"}
        if name not in left or time.monotonic() > end_s:
            return
        left = left[left.index(name) + 1 :] + left[: left.index(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="operators whose name contains this")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asked = json.loads(sys.stdin.read())
        work(asked["names"], asked["seed"], asked["minutes"], os.open(asked["note"], os.O_WRONLY))
        return
    names = [name for name in ALLOWED["overloads"] if (options.only or "") in name]
    random.Random(options.seed).shuffle(names)
    calls: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    faults: list[dict[str, Any]] = []
    for said in watch(names, options.seed, options.minutes):
        if "calls" in said:
            calls[said["name"]].update(said["calls"])
        else:
            faults.append(said)
            print(str(said)[:1000], flush=True)
        if options.out:
            options.out.write_text(json.dumps({"calls": calls, "faults": faults}, indent=1))
    total = sum(calls.values(), collections.Counter())
    never = [name for name, found in calls.items() if not found]
    print(
        f"{sum(total.values())} pairs of calls of {len(names) - len(never)} operators: {dict(total)}; {len(faults)} faults"
    )
    print(f"no arguments passed for {len(never)}: {' '.join(never)}")
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
