"""What forward keeps from one call to the next, and where it draws: attributes, globals, caches, generators."""

from __future__ import annotations

import random
import time
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.rig.habits.registry import WIDTH, Blocks, Convolutions, blocks, habit


@habit("img", "cls", refused="a number that is drawn decides what is computed")
class DepthByTorch(Convolutions):
    """depth by python branch on a random number: data-dependent"""

    def forward(self, x):
        for b in self.b:
            if self.training and torch.rand(1) < 0.3:
                continue
            x = x + F.relu(b(x))
        return self.h(x.mean((2, 3)))


@habit("img", "cls", refused="draw with torch.rand")
class DepthByNumpy(Convolutions):
    def forward(self, x):
        for b in self.b:
            if self.training and np.random.rand() < 0.3:
                continue
            x = x + F.relu(b(x))
        return self.h(x.mean((2, 3)))


@habit("img", "cls", refused="draw with torch.rand")
class PythonRandom(Convolutions):
    def forward(self, x):
        for b in self.b:
            x = x + F.relu(b(x)) * random.random()
        return self.h(x.mean((2, 3)))


@habit("img", "cls", refused="draw with torch.rand")
class NumpyNoise(Convolutions):
    def forward(self, x):
        if self.training:
            x = x + torch.from_numpy(np.random.randn(*x.shape)).float()
        for b in self.b:
            x = x + F.relu(b(x))
        return self.h(x.mean((2, 3)))


@habit("vec", "cls", refused="torch.where or a mask")
class ItemBranch(Blocks):
    def forward(self, x):
        h = self.b(x)
        if h.abs().max().item() > 1.5:
            h = h / h.abs().max()
        return self.h(h)


@habit("vec", "cls", refused="keep it a tensor")
class ItemScale(Blocks):
    def forward(self, x):
        h = self.b(x)
        return self.h(h * h.std().item())


@habit("vec", "cls", refused="registered buffer")
class PythonStep(Blocks):
    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.h(self.b(x)) * min(1.0, 0.2 * self.step)


@habit("vec", "cls", refused="registered buffer")
class PythonStepInTraining(Blocks):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.h(self.b(x)) * (2.0 if self.calls > 7 else 1.0)


@habit("vec", "cls", refused="registered buffer")
class PythonCountUnused(Blocks):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.h(self.b(x))


@habit("vec", "cls")
class TensorAttribute(Blocks):
    def __init__(self):
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, WIDTH)
        self.ids = [torch.tensor([3, 1, 0, 2])]

    def forward(self, x):
        return self.h(self.b(x) * self.scale)[:, self.ids[0]]


@habit("vec", "cls", refused="keep state in registered buffers")
class TensorAttributeAssigned(Blocks):
    """running mean in a plain attribute"""

    def __init__(self):
        super().__init__()
        self.m = torch.zeros(WIDTH)

    def forward(self, x):
        h = self.b(x)
        if self.training:
            self.m = 0.9 * self.m + 0.1 * h.detach().mean(0)
        return self.h(h - self.m)


@habit("vec", "cls", refused="register_buffer what is to be kept")
class TensorAttributeWritten(Blocks):
    def __init__(self):
        super().__init__()
        self.m = torch.zeros(WIDTH)

    def forward(self, x):
        h = self.b(x)
        if self.training:
            self.m.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.h(h - self.m)


MEAN = torch.zeros(WIDTH)


@habit("vec", "cls", refused="register_buffer what is to be kept")
class GlobalWritten(Blocks):
    def __init__(self):
        super().__init__()
        MEAN.zero_()

    def forward(self, x):
        h = self.b(x)
        MEAN.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.h(h - MEAN)


@habit("vec", "cls", refused="keep state in registered buffers")
class CacheInAttribute(Blocks):
    """KV-like cache kept in an attribute from a call to the next"""

    def __init__(self):
        super().__init__()
        self.prev = None

    def forward(self, x):
        h = self.b(x)
        o = self.h(h if self.prev is None else h + 0.1 * self.prev)
        self.prev = h.detach()
        return o


@habit("vec", "cls")
class LazyCache(Blocks):
    """positions made at first use"""

    def __init__(self):
        super().__init__()
        self.pos = None

    def forward(self, x):
        if self.pos is None:
            self.pos = torch.linspace(-1, 1, x.shape[-1])
        return self.h(self.b(x + self.pos))


@habit("vec", "cls", refused="forward makes a buffer 'mask' at")
class LazyBuffer(Blocks):
    """a buffer that the first call registers"""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is None:
            self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        return self.h(self.b(x) * self.mask)


@habit("vec", "cls", refused="forward makes a buffer 'pos' at")
class LazyNewBuffer(Blocks):
    def forward(self, x):
        if not hasattr(self, "pos"):
            self.register_buffer("pos", torch.arange(WIDTH).float())
        return self.h(self.b(x) + self.pos)


@habit("vec", "cls")
class LazyCacheLike(Blocks):
    """the same, of the shape of an activation and of a frozen buffer"""

    def __init__(self):
        super().__init__()
        self.pos = None
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        h = self.b(x)
        if self.pos is None:
            self.pos = torch.ones_like(h.detach()[0]).cumsum(-1) * self.scale
        return self.h(h + self.pos)


@habit("vec", "cls", refused="keep state in registered buffers")
class OverFirstLoss(Blocks):
    """GradNorm: the loss over that of the first batch"""

    def __init__(self):
        super().__init__()
        self.first = None

    def forward(self, x):
        h = self.b(x)
        size = h.square().mean()
        if self.first is None:
            self.first = size.detach()
        return self.h(h) * (size / self.first)


@habit("vec", "cls", refused="keep state in registered buffers")
class AnchoredToStart(Blocks):
    """L2-SP: a penalty for what the weights have moved"""

    def __init__(self):
        super().__init__()
        self.start = None

    def forward(self, x):
        if self.start is None:
            self.start = self.h.weight.detach().clone()
        return self.h(self.b(x)) + 0.1 * (self.h.weight - self.start).square().sum()


@habit("vec", "cls", refused="keep state in registered buffers")
class FirstBatchMean(Blocks):
    """inputs shifted by the mean of the first batch"""

    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0).detach()
        return self.h(self.b(x - self.mean))


@habit("vec", "cls", refused="keep state in registered buffers")
class DrawnOnce(Blocks):
    """a random projection that the first call draws"""

    def __init__(self):
        super().__init__()
        self.map = None

    def forward(self, x):
        if self.map is None:
            self.map = torch.randn(WIDTH, WIDTH)
        return self.h(self.b(x @ self.map))


@habit("vec", "cls")
class TrainToggle(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.n = nn.BatchNorm1d(WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        was = self.n.training
        self.n.eval()
        a = self.n(x)
        self.n.train(was)
        return self.h(self.b(a) + self.n(x))


@habit("vec", "cls")
class StatefulCell(nn.Module):
    """truncated BPTT: hidden state detached and kept"""

    def __init__(self):
        super().__init__()
        self.c = nn.GRUCell(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)
        self.register_buffer("s", torch.zeros(1, WIDTH))

    def forward(self, x):
        n = self.c(x, self.s.expand(x.shape[0], -1))
        self.s = n.detach().mean(0, keepdim=True)
        return self.h(n)


@habit("img", "cls", refused="momentum=None")
class BatchNormsOfAllKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 4, 3)
        self.n = nn.BatchNorm2d(4, momentum=None)
        self.n2 = nn.BatchNorm2d(4, track_running_stats=False)
        self.n3 = nn.BatchNorm2d(4, affine=False)
        self.h = nn.Linear(4, 4)

    def forward(self, x):
        return self.h(self.n3(self.n2(self.n(self.c(x)))).mean((2, 3)).relu())


@habit("vec", "cls")
class BufferOfAnotherShape(Blocks):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1))
        self.register_buffer("none", None)

    def forward(self, x):
        h = self.b(x)
        if self.training:
            self.k = self.k + (h.detach() > 0).float().mean()
        return self.h(h) * (1 + 0.01 * self.k)


@habit("vec", "cls", refused="let forward add to a registered buffer")
class ClassAttribute(Blocks):
    COUNT: ClassVar[list[int]] = [0]

    def __init__(self):
        super().__init__()
        ClassAttribute.COUNT[0] = 0

    def forward(self, x):
        ClassAttribute.COUNT[0] += 1
        return self.h(self.b(x)) * (1 + 0.1 * ClassAttribute.COUNT[0])


@habit("vec", "cls", refused="registered buffer")
class Annealed(Blocks):
    """temperature that the user's loop would anneal from outside: closure on a list"""

    def __init__(self):
        super().__init__()
        self.temps = []

    def forward(self, x):
        self.temps.append(1.0)
        return self.h(self.b(x)) / len(self.temps)


@habit("vec", "cls", refused="a torch.Generator is used at")
class OwnGenerator(Blocks):
    """noise from its own generator"""

    def __init__(self):
        super().__init__()
        self.g = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.h(self.b(x + 0.1 * torch.randn(x.shape, generator=self.g)))


@habit("vec", "cls", refused="a seed of its own")
class SeededInside(Blocks):
    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            n = torch.randn_like(x)
        return self.h(F.dropout(self.b(x + 0.1 * n), 0.2, self.training))


@habit("vec", "cls", refused="registered buffer")
class TimeInForward(Blocks):
    def forward(self, x):
        self.t = time.time()
        return self.h(self.b(x))
