"""Autocast: what it converts is in the graph, so that stages compute what a plain loop under torch.autocast computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd

import meshcee
from meshcee.capture import capture
from meshcee.capture.export import autocast
from meshcee.errors import CaptureError
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import changed
from tests.rig import zoo
from tests.rig.reference import reference

MIXED = "bf16-mixed"


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


class Shared(nn.Module):
    """One weight, used three times; `forward` is given."""

    def __init__(self, run: Callable[[Shared, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.run = nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x).float()


def one_region(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        return m.one(m.one(m.one(x).tanh()).tanh())


def two_regions(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        h = m.one(x).tanh()
    with bf16():
        return m.one(m.one(h).tanh())


def nested(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        h = m.one(x).tanh()
        with bf16():
            h = m.one(h).tanh()
        with bf16(enabled=False):
            h = m.one(h.float())
        return m.one(h)


def nothing_kept(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16(cache_enabled=False):
        return m.one(m.one(m.one(x).tanh()).tanh())


def without_gradient_first(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        with torch.no_grad():
            scale = m.one(x).sigmoid()
        return m.one(m.one(x) * scale)


def without_gradient_last(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        h = m.one(m.one(x))
        with torch.no_grad():
            scale = m.one(x).sigmoid()
        return h * scale


def decorated(m: Shared, x: torch.Tensor) -> torch.Tensor:
    return torch.autocast("cpu", torch.bfloat16)(lambda h: m.one(m.one(h)))(x)


def taken_apart(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        h = torch.einsum("ij,kj->ik", m.one(x), m.one.weight)
        return torch.cat([h, x], -1)[:, ::2] + F.cosine_similarity(h, x)[:, None]


def halves(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return m.one(x)


@torch.autocast("cuda", enabled=False)
def in_full(t: torch.Tensor) -> torch.Tensor:
    """As rotary embeddings are written; on a CPU its autocast goes on."""
    return torch.cat([t * 0.5, t.float()], -1)


def off_elsewhere(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        return m.one(in_full(m.one(x))[:, ::2])


def two_types(m: Shared, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        h = m.one(x).float()
    with bf16():
        return m.one(h)


REGIONS = (
    two_types,
    off_elsewhere,
    *(one_region, two_regions, nested, nothing_kept, without_gradient_first, without_gradient_last),
    *(decorated, taken_apart, halves),
)


@pytest.mark.parametrize("run", REGIONS, ids=lambda run: run.__name__)
def test_a_region_of_autocast_trains_as_in_the_plain_loop(run: Callable[..., torch.Tensor]) -> None:
    assert difference(job_of(Shared(run))) == ""


def test_the_gradients_of_a_weight_add_up_in_16_bits_while_autocast_is_on() -> None:
    """As torch keeps the converted weight. A conversion for each use gives other bits."""
    with changed(autocast, "since if keeps else None", "None"):
        assert difference(job_of(Shared(one_region))) != ""


@pytest.mark.parametrize(
    ("run", "line", "other"),
    [(two_regions, "since = since if on else place", "since = 0"), (nothing_kept, "since if keeps else None", "since")],
    ids=["two_regions", "nothing_kept"],
)
def test_and_only_while_it_is_on(run: Callable[..., torch.Tensor], line: str, other: str) -> None:
    with changed(autocast, line, other):
        assert difference(job_of(Shared(run))) != ""


@pytest.mark.cases(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["char_gpt", "resnet", "lengths", "moe"])
def test_models_train_in_mixed_precision_on_any_number_of_stages(name: str, recompute: bool) -> None:
    job = zoo.make(name, precision=MIXED, recompute=recompute)
    found = meshcee.check(job, stages=(1, 3), steps=2)
    assert found.equal, found.differs
    assert found.losses != meshcee.plain(dataclasses.replace(job, precision="fp32"), 2).losses


class Evaluations(meshcee.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_evaluate(self, run: Any, report: Any) -> None:
        self.metrics.append(dict(report.metrics))


def test_peers_train_and_evaluate_what_a_loop_under_autocast_does() -> None:
    held_out = zoo.make("char_gpt").data
    job = zoo.make("char_gpt", precision=MIXED, steps=3)
    job = dataclasses.replace(job, eval_data=[held_out[i] for i in range(8)], eval_every=3, adapt=False)
    want = reference(job)
    heard = Evaluations()
    result = meshcee.train(job, local=2, callbacks=[heard])
    assert result.losses == want.totals
    assert all(torch.equal(want.state[name], tensor) for name, tensor in result.state_dict.items())
    assert heard.metrics == [metrics for _, metrics in want.metrics]


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad.to(w.dtype) @ w, grad.to(x.dtype).t() @ x


class Wide(Plain):
    forward = staticmethod(custom_fwd(device_type="cpu", cast_inputs=torch.float32)(Plain.forward))
    backward = staticmethod(custom_bwd(device_type="cpu")(Plain.backward))


class Narrow(Plain):
    forward = staticmethod(custom_fwd(device_type="cpu")(Plain.forward))
    backward = staticmethod(
        custom_bwd(device_type="cpu")(lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.t() @ ctx.saved_tensors[0]))
    )


@pytest.mark.parametrize("function", [Plain, Wide, Narrow], ids=lambda function: function.__name__)
def test_backward_of_a_function_runs_where_autocast_is_off(function: type[Plain]) -> None:
    def run(m: Shared, x: torch.Tensor) -> torch.Tensor:
        return function.apply(m.one(x), m.one.weight)  # type: ignore[no-any-return, no-untyped-call]

    assert difference(job_of(Shared(run), precision=MIXED)) == ""


class Direct(Plain):
    """Whose forward converts the weight first: autograd has the function before that conversion."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w.float())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad.to(w.dtype) @ w, grad.to(w.dtype).t() @ x.to(w.dtype)


def test_a_weight_that_a_function_converts_first_gets_its_gradients_in_the_plain_loops_order() -> None:
    def run(m: Shared, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = Direct.apply(m.one(x), m.one.weight)  # type: ignore[no-untyped-call]
        h = h + F.linear(h, m.one.weight) + h @ (m.one.weight * 2)
        return Direct.apply(h, m.one.weight)  # type: ignore[no-any-return, no-untyped-call]

    assert difference(job_of(Shared(run), precision=MIXED)) == ""


def switched(m: Shared, x: torch.Tensor) -> torch.Tensor:
    torch.set_autocast_enabled("cpu", False)
    h = m.one(x)
    torch.set_autocast_enabled("cpu", True)
    return h


def cleared(m: Shared, x: torch.Tensor) -> torch.Tensor:
    h = m.one(x)
    torch.clear_autocast_cache()
    return m.one(h)


@pytest.mark.parametrize("run", [switched, cleared], ids=lambda run: run.__name__)
def test_what_changes_autocast_without_a_with_is_refused(run: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"torch.\w+autocast\w+ is called in forward at .*test_autocast.py.*by a `with` alone"
    ):
        capture(job_of(Shared(run), precision=MIXED))
    assert torch.is_autocast_cache_enabled()


def test_an_operator_that_hides_its_conversions_is_refused_whatever_its_numbers() -> None:
    """With a weight of zeros the first step is equal, and the second is not."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mix = nn.Linear(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)
            nn.init.zeros_(self.mix.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x) + self.mix(x, x.flip(1))
            return found

    with pytest.raises(CaptureError, match=r"_trilinear.* at .*test_autocast.py.*leave autocast for it"):
        capture(job_of(Gate(), precision=MIXED))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, None])[0][:, 0]  # type: ignore[no-any-return]


def test_what_converts_inside_of_itself_is_refused_with_its_line() -> None:
    with pytest.raises(
        CaptureError, match=r"aten.lstm.input at .*test_autocast.py.*leave autocast for it: with torch.autocast"
    ):
        capture(job_of(Recurrent(), precision=MIXED))
