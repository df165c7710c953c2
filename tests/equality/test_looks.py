"""What a forward pass may change is told by fingerprints, which any tensor has."""

from __future__ import annotations

import pytest
import torch

from meshcee.equality.watch import digest
from tests.rig.strides import ODD


@pytest.mark.parametrize("name", ODD)
def test_a_fingerprint_is_of_numbers_and_not_of_strides(name: str) -> None:
    tensor = ODD[name]
    flat = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    assert digest(tensor) == digest(flat)
    assert not tensor.numel() or digest(tensor) != digest(torch.zeros_like(flat))
