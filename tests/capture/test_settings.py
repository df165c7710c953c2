"""Settings of torch that a peer's process does not have are refused where they could be seen in a number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshcee.capture import capture
from meshcee.capture.export import peers_default
from meshcee.capture.export.flatten import is_factory
from meshcee.capture.graph.encoding import decode_program, encode_program
from meshcee.config import Limits
from meshcee.errors import CaptureError, UsageError
from meshcee.optim import Optimizer
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import breaks, changed
from tests.peers.member.test_training import make_job

capturing: Any = sys.modules["meshcee.capture.programs"]  # the name is that of the function
cuda: Any = torch.backends.cuda
matmul: Any = torch.backends.mkldnn.matmul
SETTINGS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    # what sets it, to what, and what it is else
    r"mkldnn\.enabled": (lambda on: setattr(torch.backends.mkldnn, "enabled", on), False, True),
    r"flash_sdp_enabled": (cuda.enable_flash_sdp, False, True),
    r"math_sdp_enabled": (cuda.enable_math_sdp, False, True),
    r"mem_efficient_sdp_enabled": (cuda.enable_mem_efficient_sdp, False, True),
    r"set_float32_matmul_precision\) is 'bf16'": (torch.set_float32_matmul_precision, "medium", "highest"),
    r"mkldnn\.matmul\.fp32_precision": (lambda how: setattr(matmul, "fp32_precision", how), "bf16", "none"),
    r"set_flush_denormal": (torch.set_flush_denormal, True, False),
}


@pytest.mark.parametrize(
    ("around", "says"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), r"autocast is on around the job.*precision='bf16-mixed'"),
        (torch.inference_mode, r"inference_mode is on around the job.*leave it"),
        (lambda: torch.device("meta"), r"another device than the CPU.* is on around the job.*leave it"),
    ],
)
def test_what_is_on_around_a_job_and_in_no_peers_process_is_told(around: Callable[[], Any], says: str) -> None:
    job = job_of(nn.Linear(WIDTH, WIDTH))
    with around(), pytest.raises(UsageError, match=says):
        capture(job)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_gives_other_bits_is_refused_before_anything_else(name: str) -> None:
    put, value, usual = SETTINGS[name]
    put(value)
    try:
        with pytest.raises(UsageError, match=rf"{name}.* in a peer's.*leave the setting out"):
            capture(make_job())
    finally:
        put(usual)
    capture(make_job())


def test_a_choice_of_attention_kernels_around_a_job_is_one() -> None:
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(UsageError, match="flash_sdp_enabled"):
        capture(make_job())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes otherwise with it")
def test_what_changes_nothing_on_a_cpu_is_left_alone() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        capture(make_job())
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "none"


class Noisy(nn.Module):
    """Makes tensors without saying their type."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.linspace(-1, 1, x.shape[1]) / 3 + torch.full((1,), 0.1) + torch.arange(0.0, x.shape[1])
        return self.linear(x + grid + torch.rand(x.shape[1])) * self.then(x)


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(())


def halves(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1]) / 2


@pytest.mark.usefixtures("in_float64")
def test_a_graph_of_a_script_in_float64_is_the_same_to_a_peer() -> None:
    """A default type is the script's alone: in the same process all was well, and every real peer refused the graph."""

    def story() -> None:
        torch.manual_seed(1)
        data = [(torch.randn(WIDTH), torch.randn(WIDTH)) for _ in range(24)]
        job = job_of(Noisy(ones), data=data)
        assert difference(job) == ""
        graph = encode_program(capture(job).train)
        with peers_default():
            decode_program(graph, Limits(graph_bytes=len(graph)))
        assert torch.get_default_dtype() == torch.float64

    story()
    with changed(is_factory, "bool(typed)", "False"):
        assert breaks(story)


@pytest.mark.usefixtures("in_float64")
def test_what_a_peer_would_make_in_another_type_is_refused() -> None:
    def story() -> None:
        with pytest.raises(
            CaptureError, match=r"aten.div.Tensor at .*test_settings.py.* cannot run on a peer.*default_dtype"
        ):
            capture(job_of(Noisy(halves), data=[(torch.randn(WIDTH), torch.randn(WIDTH)) for _ in range(24)]))

    story()
    with changed(capturing, "with peers_default():", "if True:"):
        assert breaks(story)
    for optimizer in (Optimizer("NAdam", lr=0.1), Optimizer("SGD", lr=0.1, groups={"*": {"class": "ASGD"}})):
        with pytest.raises(UsageError, match=r"counts in the type that torch.set_default_dtype\(\) sets"):
            capture(make_job(optimizer=optimizer))
