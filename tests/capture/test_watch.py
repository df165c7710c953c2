"""What forward keeps or does outside of a graph: refused with the user's line, made to work, or found to be harmless."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshcee.capture import capture
from meshcee.errors import CaptureError
from meshcee.reach import Remembered, content
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import Changed, breaks, changed
from tests.rig.strides import ODD

HERE = r"test_watch\.py:\d+(?: `.*`)?"
CALLS = 0
NOTED: dict[int, torch.Tensor] = {}
OTHER: Any = types.ModuleType("other")  # a file of the user's
OTHER.__file__ = __file__


class Keeps(nn.Module):
    ema: torch.Tensor

    def __init__(self, then: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Module()
        self.inner.register_buffer("ema", torch.zeros(WIDTH))
        self.inner.register_buffer("late", None)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.temperature, self.calls, self.seen, self.cache = 1.0, 0, [0], None
        self.plain = torch.zeros(WIDTH)
        self.drawer = np.random.default_rng(0)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, self.a(x))


def cools(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.temperature *= 0.9
    return m.b(h) / m.temperature


def counts_slowly(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return m.b(h) * (0.5 if m.calls % 100 == 0 else 1.0)


def lists(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen.append(1)
    return m.b(h) * len(m.seen)


def counts_globally(m: Any, h: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return m.b(h) * CALLS


def remembers(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.plain = 0.5 * m.plain + 0.5 * h.detach().mean(0)
    return m.b(h) + m.plain


def assigns_with_gradient(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.inner.ema = 0.5 * m.inner.ema + 0.5 * h.mean(0)
    return m.b(h) + m.inner.ema


def begins(m: Any, h: torch.Tensor) -> torch.Tensor:
    first, m.calls = m.calls == 0, 1
    return m.b(h) * 2 if first else m.b(h)


def seeds(m: Any, h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return m.b(h) + torch.rand_like(h)


def forks(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return m.b(h) + torch.rand_like(h)


def freezes(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.b.requires_grad_(False)
    out = m.b(h)
    m.b.requires_grad_(True)
    return out


def infers(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        gate = m.b(h).sigmoid()
    return h * gate.clone()


def packs(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return F.gelu(m.b(h))


def attends(m: Any, h: torch.Tensor) -> torch.Tensor:
    q = m.b(h).view(-1, 1, 4, 2)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q).reshape(-1, WIDTH)


def enqueues(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.inner.ema = torch.cat([h.detach().mean(0), m.inner.ema])
    return m.b(h)


def fills(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.inner.late is None:
        m.inner.late = torch.ones(WIDTH)
    return m.b(h) * m.inner.late


def registers(m: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(m.inner, "made"):
        m.inner.register_buffer("made", torch.ones(WIDTH), persistent=False)
    return m.b(h) * m.inner.made


class Counts:
    calls = 0


def counts_in_a_class(m: Any, h: torch.Tensor) -> torch.Tensor:
    Counts.calls += 1
    return m.b(h)


def sets_data(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.b.weight.data = F.normalize(m.b.weight.data, dim=-1)
    return m.b(h)


def follows_by_data(m: Any, h: torch.Tensor) -> torch.Tensor:
    for k, p in zip(m.frozen.parameters(), m.b.parameters()):
        k.data = k.data * 0.9 + p.data * 0.1
    return m.b(h) + m.frozen(h)


STATE = rf"at .*{HERE} in every call, .*registered buffer"
AGAIN = rf"something else when it is called again at .*{HERE}: .*torch\.rand"
UNDER = rf"forward runs at .*{HERE} under {{}}, which a graph does not hold"
REFUSED: dict[Callable[[Any, torch.Tensor], torch.Tensor], str] = {
    cools: "attribute 'temperature' of the model " + STATE,
    counts_slowly: "attribute 'calls' of the model " + STATE,
    lists: "attribute 'seen' of the model " + STATE,
    counts_globally: "the global 'CALLS' " + STATE,
    remembers: AGAIN,
    begins: AGAIN,
    lambda m, h: m.b(h) * (time.time() % 1): AGAIN,
    lambda m, h: m.b(h) * float(np.random.default_rng().normal()): AGAIN,
    lambda m, h: m.b(h) * torch.from_numpy(m.drawer.normal(size=WIDTH)).float(): "'drawer' of the model " + STATE,
    assigns_with_gradient: rf"assigns buffer 'inner\.ema' a value with a gradient at .*{HERE}; .*\.detach\(\)",
    enqueues: rf"assigns buffer 'inner\.ema' a tensor of another type, shape or order at .*{HERE}; assign one like it",
    fills: rf"makes a buffer 'inner\.late' at .*{HERE}; run one batch",
    registers: rf"makes a buffer 'inner\.made' at .*{HERE}; run one batch",
    counts_in_a_class: "attribute 'calls' of class Counts " + STATE,
    sets_data: rf"a \.data is assigned at .*{HERE}.*; compute with what it shall be, as self\.scale\.clamp\(max=4\.6\)",
    follows_by_data: rf"a \.data is assigned at .*{HERE}.*; under torch\.no_grad\(\) write k\.mul_\(m\)",
    seeds: UNDER.format("a seed of its own"),
    forks: rf"fork_rng is used in forward at .*{HERE} .*a seed of its own.*; draw without it",
    infers: UNDER.format("torch.inference_mode"),
    packs: UNDER.format("saved_tensors_hooks"),
    attends: UNDER.format("sdpa_kernel or another choice of attention kernels"),
    freezes: rf"requires_grad of a weight is set at .*{HERE} .*set back in one pass.*functional_call",
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("then", REFUSED, ids=lambda then: then.__name__)
def test_state_and_contexts_that_a_graph_does_not_hold(then: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model = Keeps(then)
    before = (
        CALLS,
        model.temperature,
        model.calls,
        list(model.seen),
        model.plain.clone(),
        repr(model.drawer.bit_generator.state),
    )
    generator = torch.get_rng_state()
    with pytest.raises(CaptureError, match=REFUSED[then]) as raised:
        capture(job_of(model))
    assert torch.equal(torch.get_rng_state(), generator)
    assert "\n" not in str(raised.value)
    after = CALLS, model.temperature, model.calls, list(model.seen), model.plain, repr(model.drawer.bit_generator.state)
    assert before[:4] == after[:4]
    assert torch.equal(before[4], after[4])
    assert before[5] == after[5]


def follows(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for k, p in zip(m.frozen.parameters(), m.b.parameters()):
            k.mul_(0.9).add_(p, alpha=0.1)
    return m.b(h) + m.frozen(h)


def detaches(m: Any, h: torch.Tensor) -> torch.Tensor:
    detached: torch.Tensor = torch.func.functional_call(m.b, {n: p.detach() for n, p in m.b.named_parameters()}, (h,))
    return detached + F.linear(h, F.normalize(m.b.weight, dim=-1), m.b.bias.clamp(max=0.1))


@pytest.mark.parametrize("then", [follows, detaches], ids=lambda then: then.__name__)
def test_what_refusals_say_to_write_trains_as_in_the_plain_loop(
    then: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    assert difference(job_of(Keeps(then)), ("late",), seed=1) == ""


def test_a_counter_in_the_closure_of_the_loss() -> None:
    calls = 0

    def annealed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(output, target) / calls

    with pytest.raises(CaptureError, match=rf"'calls' in the closure of annealed {STATE}"):
        capture(job_of(nn.Linear(WIDTH, WIDTH), annealed))
    assert calls == 0


def assigns(m: Any, h: torch.Tensor) -> torch.Tensor:
    out = m.b(h) * m.inner.ema
    m.inner.ema = 0.5 * m.inner.ema + 0.5 * h.detach().mean(0)
    return out + m.inner.ema


def caches(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.cache is None:
        m.cache = torch.arange(float(WIDTH)).sin()
    m.plain = h.detach()  # for somebody to look at
    return m.b(h) * m.cache


@pytest.mark.parametrize("then", [assigns, caches])
def test_assigned_buffers_and_caches_train_as_in_the_plain_loop(
    then: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(1)
    assert difference(job_of(Keeps(then))) == ""


@functools.lru_cache
def kept(n: int) -> torch.Tensor:
    return torch.arange(float(n)).sin()


def noted(n: int) -> torch.Tensor:
    if n not in NOTED:
        NOTED[n] = torch.arange(float(n)).sin()
    return NOTED[n]


OTHER.sines = noted


class Cached(nn.Module):
    """A table that the first call fills, where forward reaches it by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * kept(x.shape[1])


class ByMethod(Cached):
    def table(self, n: int) -> torch.Tensor:
        return noted(n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.table(x.shape[1])


class Table:
    def of(self, n: int) -> torch.Tensor:
        return noted(n)


class ByObject(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.held = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.held.of(x.shape[1])


class ByFile(Cached):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * OTHER.sines(x.shape[1])


MENDS: dict[type[Cached], Changed] = {
    Cached: (content, "cache.cache_clear()", "pass"),
    ByMethod: (Remembered, "waiting += used", "pass"),
    ByObject: (Remembered, '["__call__", *self._names]', "[]"),
    ByFile: (Remembered, "self._space(code, vars(module)", "print(code, vars(module)"),
}


@pytest.mark.parametrize("kind", MENDS)
def test_a_cache_that_the_first_call_fills_holds_no_fakes_afterwards(kind: type[Cached]) -> None:
    def story() -> None:
        kept.cache_clear()
        NOTED.clear()
        torch.manual_seed(1)
        job = job_of(kind())
        captured = capture(job)
        assert [n for n in captured.train.nodes if n.operator.name == "aten.sin.default"]
        assert kept.cache_info().currsize == len(NOTED) == 0
        assert difference(job) == ""

    story()
    with changed(*MENDS[kind]):
        assert breaks(story)


class CachedForEach(Cached):
    @functools.lru_cache  # noqa: B019
    def table(self, n: int) -> torch.Tensor:
        return torch.arange(float(n)).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.table(x.shape[1])


def test_a_cache_that_another_model_has_filled_is_emptied_each_time() -> None:
    """Python counts anew after that, and may come to what was counted before."""
    CachedForEach()(torch.ones(2, WIDTH))
    torch.manual_seed(1)
    assert difference(job_of(CachedForEach())) == ""


class Recording(Cached):
    """Hooks that the first call adds, as those of transformers for what a router says: once, as an attribute notes."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked, self.found = False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        if not self.hooked:
            self.a.register_forward_hook(lambda module, args, output: self.note(output))
            self.hooked = True
        self.note = found.append
        h = self.a(x)
        self.note = None
        return torch.stack(found).sum(0) + h


def test_hooks_that_the_first_call_adds_are_added_once() -> None:
    assert difference(job_of(Recording()), ("late",), seed=1) == ""


class Accumulates(nn.Module):
    """Begins a sum with a tensor that needs a gradient, which flows to no weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.how == "tensor":
            total = torch.tensor(0.0, requires_grad=self.training)
        elif self.how == "zeros":
            total = torch.zeros(1, requires_grad=True)
        elif self.how == "new":
            total = x.new_zeros((), requires_grad=True)
        else:
            total = torch.autograd.Variable(torch.zeros(1), requires_grad=True)
        total = total * 2 + 0.5
        for row in h.chunk(2, 1):
            total = total + row.square().mean()
        total += torch.stack([total, total / 2]).sum()
        return h + total


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("how", ["tensor", "zeros", "new", "variable"])
def test_a_sum_may_begin_with_a_tensor_that_needs_a_gradient(how: str, precision: str) -> None:
    assert difference(job_of(Accumulates(how), precision=precision)) == ""


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * 2 if x.shape[0] == 1 else self.a(x)


def test_a_branch_on_the_number_of_samples() -> None:
    with pytest.raises(CaptureError, match=rf"micro-batches of 1 samples, forward does something else .*at .*{HERE}; "):
        capture(job_of(Branches(), batch_size=1, micro_batch_size=None))
    assert capture(job_of(Branches(), micro_batch_size=1)).train.samples == 1
    assert capture(job_of(Branches(), micro_batch_size=2)).train.nodes


def test_statistics_of_a_single_value() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with pytest.raises(CaptureError, match="more than 1 value per channel"):
        capture(job_of(model, micro_batch_size=1))


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", [name for name, tensor in ODD.items() if tensor.numel()])
def test_a_tensor_that_forward_closes_over_may_have_any_strides(name: str) -> None:
    scale = ODD[name].reshape(1)
    assert difference(job_of(Keeps(lambda m, h: m.b(h) * scale))) == ""
