"""What people do to gradients and to weights in a forward pass: checkpoints, hooks, functions of their own, writes in place."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.rig.habits.registry import WIDTH, WORDS, Blocks, blocks, habit


@habit("tok", "toky")
class CheckpointedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(4))
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        h = self.e(x)
        for i, b in enumerate(self.b):
            h = h + (torch.utils.checkpoint.checkpoint(b, h, use_reentrant=False) if self.training and i % 2 else b(h))
        return self.h(h)


@habit("tok", "toky")
class CheckpointedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.b = blocks(4)
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.h(torch.utils.checkpoint.checkpoint_sequential(self.b, 2, self.e(x), use_reentrant=False))


@habit("tok", "toky", refused="use_reentrant=False")
class ReentrantCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.b = blocks(4)
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.h(torch.utils.checkpoint.checkpoint(self.b, self.e(x), use_reentrant=True))


@habit("vec", "cls", refused="torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in forward")
class WrappedCheckpoint(Blocks):
    """whose hooks give its weights other names in state_dict"""

    def __init__(self):
        super().__init__()
        self.b[1] = checkpoint_wrapper(self.b[1])

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls", refused="remove the hook")
class BackwardHook(Blocks):
    def __init__(self):
        super().__init__()
        self.b[1].register_full_backward_hook(lambda m, gi, go: tuple(g * 0.5 for g in gi))

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls", refused="remove the hook")
class ParameterHook(Blocks):
    def __init__(self):
        super().__init__()
        self.h.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls", refused="remove the hook")
class TensorHook(Blocks):
    def forward(self, x):
        h = self.b(x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return self.h(h)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@habit("vec", "cls", refused="remove the hook")
class AccumulateHook(Blocks):
    def __init__(self):
        super().__init__()
        self.h.weight.register_post_accumulate_grad_hook(halve)

    def forward(self, x):
        return self.h(self.b(x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class TutorialReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[x < 0] = 0
        return grad_input


class Reversed(torch.autograd.Function):
    """a gradient reversal; it returns a view"""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.factor * g, None


class Linear(torch.autograd.Function):
    """weights among the inputs, setup_context, a gradient that autograd adds up, a size"""

    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.t() + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.count = x.shape[0]

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, (g.t() @ x) * ctx.count / ctx.count, g


class Nearest(torch.autograd.Function):
    """a code book: two outputs, one without a gradient, needs_input_grad, writes into a tensor of its own"""

    @staticmethod
    def forward(ctx, x, book):
        index = (x.unsqueeze(1) - book).pow(2).sum(2).argmin(1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index, book)
        return book[index], index

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        to_x = to_book = None
        index, book = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            to_x = g.clone()
        if ctx.needs_input_grad[1]:
            to_book = torch.zeros_like(book)
            to_book.index_add_(0, index, g)
        return to_x, to_book


class Kept(torch.autograd.Function):
    """backward reads no gradient that arrives, and forward keeps an intermediate result on ctx"""

    @staticmethod
    def forward(ctx, x):
        ctx.half = torch.sigmoid(x)
        return x * ctx.half

    @staticmethod
    def backward(ctx, g):
        return ctx.half * 0.01


class Twins(torch.autograd.Function):
    """two outputs with gradients, of which one may not be used"""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp(), 3 * x

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        found = g * x.exp()
        found.add_(h, alpha=3.0)
        return found


through = StraightThrough.apply  # a name of its own, as modules have it


@habit("vec", "cls")
class CustomFunction(Blocks):
    def forward(self, x):
        return self.h(StraightThrough.apply(self.b(x)) + x)


@habit("vec", "cls")
class CustomFunctions(Blocks):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        h = TutorialReLU.apply(self.b(x)) + through(x)
        h = Linear.apply(Reversed.apply(h, 0.3), self.w, self.bias)
        both, one = Twins.apply(0.1 * h), Twins.apply(0.1 * h)[0]
        return self.h(F.dropout(h, 0.1, self.training) + both[0] * both[1] + one)


@habit("vec", "cls")
class CodeBook(Blocks):
    def __init__(self):
        super().__init__()
        self.book = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x):
        h = Kept.apply(self.b(x))
        nearest, index = Nearest.apply(h, self.book)
        with torch.no_grad():
            through(h)  # nothing records
        return self.h(nearest + h + index.unsqueeze(1))


@habit("vec", "cls", refused="draws random numbers")
class RandomBackward(Blocks):
    class Rounded(StraightThrough):
        @staticmethod
        def backward(ctx, g):
            return g + torch.rand_like(g)

    def forward(self, x):
        return self.h(self.Rounded.apply(self.b(x)))


@habit("vec", "cls")
class DataRead(nn.Module):
    """reads tensors as code from before torch 0.4 does: inputs, activations, weights, and buffers, which it writes too"""

    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.h = nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        h = self.b(x)
        if self.training:
            self.mean.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
        return self.h(h * x.data.abs() + self.mean + self.h.weight.data.new(WIDTH).zero_())


@habit("vec", "cls", refused="changes parameter 'l.weight' in place")
class DataWrite(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        self.l.weight.data.clamp_(-0.2, 0.2)
        return self.h(self.l(self.b(x)))


@habit("vec", "cls", refused="compute with what it shall be, as self.scale.clamp(max=4.6) or F.linear")
class WeightNormInit(nn.Module):
    """normalises its weight in place under no_grad, as weight-tied ArcFace heads do"""

    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.l = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x):
        with torch.no_grad():
            self.l.weight.div_(self.l.weight.norm(dim=1, keepdim=True))
        return self.l(F.normalize(self.b(x), dim=-1)) * 8


@habit("vec", "cls")
class InplaceView(Blocks):
    def forward(self, x):
        h = self.b(x).clone()
        h[:, :3] = 0
        h[:, 4:] += 1
        h[x > 1] = 0.5
        h.view(-1)[0::5].mul_(2)
        return self.h(h)


@habit("vec", "cls")
class InplaceInput(Blocks):
    def forward(self, x):
        x[:, 0] = 0
        x.mul_(2)
        return self.h(self.b(x))


@habit("vec", "cls")
class NoGradPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = blocks(2)
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        with torch.no_grad():
            t = self.t(x)
        return self.h(self.b(x + t))


@habit("vec", "cls", refused="torch.inference_mode, which a graph does not hold")
class InferencePart(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = blocks(2)
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        with torch.inference_mode():
            t = self.t(x)
        return self.h(self.b(x + t.clone()))


@habit("vec", "cls")
class DetachedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.p = nn.Linear(WIDTH, 4)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.b(x)
        return self.h(h) + self.p(h.detach()) + self.h(h).detach()


@habit("vec", "cls", loss=lambda o, y: F.cross_entropy(o, y) if True else 0, refused="which a graph does not hold")
class GradPenalty(Blocks):
    def forward(self, x):
        x = x.requires_grad_()
        o = self.h(self.b(x))
        (g,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        return o + g.pow(2).sum()


@habit("vec", "cls")
class AutocastPart(Blocks):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(x)
        return self.h(h.float())


@habit(
    "vec",
    "cls",
    refused="write torch.autocast(x.device.type, ...), or leave it out and say Job(precision='bf16-mixed')",
)
class AutocastOfAGpu(Blocks):
    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            h = self.b(x)
        return self.h(h.float())


@habit("vec", "cls")
class FrozenBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = (
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)
            )
            .requires_grad_(False)
            .eval()
        )
        self.h = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def train(self, mode=True):
        super().train(mode)
        self.b.eval()
        return self

    def forward(self, x):
        return self.h(self.b(x))


@habit("vec", "cls", refused="changes attribute 'n'")
class UnfreezeLater(Blocks):
    """requires_grad toggled in forward (gradual unfreezing)"""

    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        self.b[0].requires_grad_(self.n > 8)
        return self.h(self.b(x))


@habit("img", "cls", refused="set Job(recompute=True)")
class CheckpointedBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)
        )
        self.h = nn.Linear(3, 4)

    def forward(self, x):
        for b in self.b:
            x = torch.utils.checkpoint.checkpoint(b, x, use_reentrant=False)
        return self.h(x.mean((2, 3)))


@habit("vec", "cls", refused="which a graph does not hold; under torch.no_grad() write k.mul_(m).add_(p, alpha=1 - m)")
class MomentumEncoder(nn.Module):
    """BYOL/MoCo: momentum encoder updated in forward"""

    def __init__(self):
        super().__init__()
        self.q = blocks(2)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for a, b in zip(self.q.parameters(), self.k.parameters()):
                    b.data = b.data * 0.9 + a.data * 0.1
        with torch.no_grad():
            k = self.k(x)
        return self.h(self.q(x) * k)
