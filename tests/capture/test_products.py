"""Products of three tensors, whose order opt_einsum chooses by their sizes: the graph has the plain loop's, or there is no job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig import zoo
from tests.rig.chain import Chain
from tests.rig.reference import reference


class Product(nn.Module):
    """Of few samples with two matrices: first with the one, or first the two with one another."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, inner)), nn.Parameter(torch.randn(inner, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.einsum("bd,de,ef->bf", x, self.a, self.b)
        return found


def job_of(inner: int, micro: int) -> Job:
    torch.manual_seed(0)
    data = [(torch.randn(4), torch.randn(inner)) for _ in range(micro)]
    settings: dict[str, Any] = {"batch_size": micro, "steps": 2, "optimizer": Optimizer("SGD", lr=0.1)}
    return Job(model=Product(inner), loss=nn.functional.mse_loss, data=data, **settings)


@pytest.mark.cases(1)
@pytest.mark.parametrize("enabled", [True, False])
def test_the_order_of_the_plain_loop_is_the_graphs(enabled: bool) -> None:
    with torch.backends.opt_einsum.flags(enabled=enabled):
        job = zoo.make("moe", steps=2)
        captured = capture(job)
        expected = reference(job)
    orders = [n.argument("path") for n in captured.train.nodes if "einsum" in n.operator.name and len(n.refs) > 2]
    assert orders
    assert all((order is not None) == enabled for order in orders)
    chain = Chain(job, captured, 3)
    assert chain.run(2) == expected.losses
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in chain.state().items())


def test_an_order_that_depends_on_the_samples_is_refused() -> None:
    capture(job_of(3, 2))
    with pytest.raises(CaptureError, match=r"of 1 and of 64 samples.*enabled = False"):
        capture(job_of(16, 64))
    with torch.backends.opt_einsum.flags(enabled=False):
        capture(job_of(16, 64))
