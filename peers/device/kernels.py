"""Fingerprints of what a device computes: three kernels from the same numbers, so that others can compare.

The idea: devices of one kernel class compute the same bits. Each peer tells its own fingerprints in its record. Who has
others than the rest of its class has another build, or is broken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

from meshcee.files.tensor_files import byte_view

__all__ = ["KERNELS", "fingerprints", "settings"]

CHARS = 8
Draw = Callable[..., torch.Tensor]


def _product(draw: Draw) -> torch.Tensor:
    return draw(256, 384) @ draw(384, 256)


def _attention(draw: Draw) -> torch.Tensor:
    query, key, value = (draw(2, 4, 128, 32) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _softmax(draw: Draw) -> torch.Tensor:
    return draw(64, 1000).softmax(-1)


KERNELS: Mapping[str, Callable[[Draw], torch.Tensor]] = {
    "product": _product,
    "attention": _attention,
    "softmax": _softmax,
}


def _convolution(draw: Draw) -> torch.Tensor:
    return F.conv2d(draw(2, 16, 16, 16), draw(32, 16, 3, 3), padding=1)


def _small_product(draw: Draw) -> torch.Tensor:
    return draw(16, 96) @ draw(96, 16)


def settings() -> str:
    """Four hexadecimal digits of how this process's libraries compute, whatever the number of threads: variables as
    ONEDNN_MAX_CPU_ISA, ONEDNN_DEFAULT_FPMATH_MODE and MKL_CBWR choose other kernels, and nobody can ask which.
    """
    prints = [_fingerprint(kernel, torch.device("cpu")) for kernel in (_convolution, _small_product)]
    return hashlib.sha256("".join(prints).encode()).hexdigest()[:4]


def fingerprints(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Pairs of a kernel's name and eight hexadecimal digits, in milliseconds. The numbers are drawn on the processor: these are
    the same everywhere. On a CPU the calling thread's number of threads counts.
    """
    return tuple((name, _fingerprint(kernel, device)) for name, kernel in KERNELS.items())


def _fingerprint(kernel: Callable[[Draw], torch.Tensor], device: torch.device) -> str:
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = kernel(lambda *shape: torch.randn(*shape, generator=drawn, dtype=torch.float32).to(device))
    return hashlib.sha256(byte_view(found.contiguous().cpu())).hexdigest()[:CHARS]
