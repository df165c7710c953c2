"""Settings of torch that a peer's process does not have are refused where they could be seen in a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshcee.capture import capture
from meshcee.errors import UsageError
from tests.peers.member.test_training import make_job

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
