"""How modules take and give values, and how they are put together: containers, parametrizations, hooks, compiled parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from tests.rig.habits.registry import WIDTH, Blocks, blocks, habit


@dataclass
class Output:
    logits: torch.Tensor
    aux: torch.Tensor | None = None


@habit("vec", "cls", loss=lambda o, y: F.cross_entropy(o.logits, y) + 0.1 * o.aux)
class GivesDataclass(Blocks):
    def forward(self, x):
        h = self.b(x)
        return Output(self.h(h), h.pow(2).mean())


class Named(NamedTuple):
    logits: torch.Tensor
    aux: torch.Tensor
    none: Any = None


@habit("vec", "cls", loss=lambda o, y: F.cross_entropy(o.logits, y) + 0.1 * o.aux.mean())
class GivesNamedTuple(Blocks):
    def forward(self, x):
        h = self.b(x)
        return Named(self.h(h), h.pow(2))


@habit("vec", "cls", loss=lambda o, y: F.cross_entropy(o["l"], y) + sum(0.1 * a.pow(2).mean() for a in o["hid"]))
class GivesNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        hid = []
        for b in self.b:
            x = torch.tanh(b(x))
            hid.append(x)
        return {"l": self.h(x), "hid": hid, "n": 3, "none": None}


@habit({"a": "vec", "b": "vec"}, "cls")
class KeywordOnly(Blocks):
    def forward(self, *, a, b=None, scale=1.0, flag=False, **kw):
        h = self.b(a)
        h = h if b is None else h + b
        return self.h(-h if flag else h * scale)


@habit(("vec", "vec"), "cls")
class AnyArguments(Blocks):
    def forward(self, *xs):
        return self.h(sum(self.b(x) for x in xs))


@habit("vec", "cls")
class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleDict(
            {
                "z": nn.Linear(WIDTH, WIDTH),
                "a": nn.Linear(WIDTH, WIDTH),
                "m": nn.ModuleDict({"x": nn.Linear(WIDTH, WIDTH)}),
            }
        )
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for k, b in self.b.items():
            x = torch.tanh(b["x"](x) if k == "m" else b(x))
        return self.h(x)


@habit("vec", "cls")
class Hooked(Blocks):
    def __init__(self):
        super().__init__()
        self.b[0].register_forward_hook(lambda m, i, o: o * 1.5)
        self.b[1].register_forward_pre_hook(lambda m, i: (i[0] + 0.1,))
        self.acts = []
        self.b[2].register_forward_hook(lambda m, i, o: self.acts.append(o.detach()))

    def forward(self, x):
        self.acts.clear()
        h = self.b(x)
        return self.h(h + self.acts[0])


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)
        self.b = nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, w):
        return w + self.a @ self.b


@habit("vec", "cls")
class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.h = nn.Linear(WIDTH, 4)
        for b in self.b:
            torch.nn.utils.parametrize.register_parametrization(b, "weight", LowRank())
            b.parametrizations.weight.original.requires_grad_(False)

    def forward(self, x):
        with torch.nn.utils.parametrize.cached():
            for b in self.b:
                x = torch.tanh(b(x))
            return self.h(b(x))


@habit("vec", "cls")
class FunctionalCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(WIDTH, WIDTH)
        self.mod = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        w = self.mod(x.mean(0)).view(WIDTH, WIDTH)
        return self.h(x + torch.func.functional_call(self.b, {"weight": w}, (x,)) + self.b(x))


@habit("vec", "cls", refused="write it for a whole batch")
class VmapEnsemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(torch.func.vmap(lambda w: torch.tanh(x @ w))(self.w).mean(0))


@habit("vec", "cls", refused="without torch.compile")
class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = torch.compile(blocks(), backend="eager")
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls", refused="one batch")
class LazyLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(WIDTH)
        self.b = blocks(2)
        self.h = nn.LazyLinear(4)

    def forward(self, x):
        return self.h(self.b(self.a(x)))


@habit("vec", "cls")
class Pruned(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks(2)
        self.l = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)
        prune.l1_unstructured(self.l, "weight", 0.5)
        prune.random_structured(self.h, "weight", 0.3, dim=1)

    def forward(self, x):
        return self.h(self.l(self.b(x)))


@habit("vec", "cls")
class OldWeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.s = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for b in self.b:
            x = torch.tanh(b(x))
        return self.h(self.s(x))


@habit("vec", "cls")
class IntegerBuffers(Blocks):
    def __init__(self):
        super().__init__()
        self.register_buffer("perm", torch.randperm(WIDTH))
        self.register_buffer("w8", torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("i16", torch.arange(WIDTH, dtype=torch.int16))

    def forward(self, x):
        return self.h(self.b(x)[:, self.perm] @ (self.w8.float() / 20) + self.i16)


@habit("vec", "cls")
class AppliedInit(Blocks):
    def __init__(self):
        super().__init__()
        self.apply(lambda m: nn.init.trunc_normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls")
class MixedTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.d = nn.Linear(WIDTH, WIDTH).double()
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(self.d(self.b(x).double()).float().half().float())


@habit("vec", "cls")
class ShapeBranch(Blocks):
    def forward(self, x):
        h = self.b(x)
        return self.h(h) / (x.shape[0] if x.shape[0] > 1 else 1)


@habit("vec", "cls")
class LossInAttribute(Blocks):
    def __init__(self):
        super().__init__()
        self.aux = 0.0

    def forward(self, x):
        h = self.b(x)
        self.aux = h.pow(2).mean()
        return self.h(h)


@habit("py", "cls")
class PythonInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(3, WIDTH)
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(self.b(self.e(x)))


@habit(("np", "pyf"), "cls")
class NumpyInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x, f):
        return self.h(self.b(x * f.unsqueeze(-1).float()))


@habit("vec", "cls", refused="without torch.jit")
class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls")
class Hypernetwork(nn.Module):
    """weights made from others in forward, kept as an attribute (hypernet)"""

    def __init__(self):
        super().__init__()
        self.g = nn.Linear(3, WIDTH * WIDTH)
        self.z = nn.Parameter(torch.randn(3))
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        self.w = self.g(self.z).view(WIDTH, WIDTH)
        return self.h(self.b(x) @ self.w + self.b(x @ self.w))


@habit("vec", "cls")
class UnusedOutput(Blocks):
    def __init__(self):
        super().__init__()
        self.x = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.b(x)
        _ = self.x(h)
        F.dropout(h, 0.5)
        return self.h(F.dropout(h, 0.1, self.training))
