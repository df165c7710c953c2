"""The guard: what is measured, when a rung is left, and what climbs alone."""

from __future__ import annotations

import math

import pytest
import torch

from meshcee.codec import Coder, codec_of, noise_seed
from meshcee.codec.blocks import BLOCK
from meshcee.codec.coder import SAMPLE_EVERY


def spiky() -> torch.Tensor:
    """Past int8's budget: one number of each block is large, the others lie halfway between two steps."""
    tensor = torch.full((8, BLOCK), 0.5)
    tensor[:, 0] = 127.0
    return tensor


def test_ordinary_tensors_stay_on_their_rung_and_the_error_is_reported() -> None:
    torch.manual_seed(0)
    for name in ("int4", "int8", "bf16"):
        coder = Coder(name)
        for seed in range(40):
            coded = coder.encode(torch.randn(4, 8, 32), seed)
            assert coded is not None
            assert coded[0] == name
        measured = coder.take()
        assert 0 < measured.error <= codec_of(name).budget
        assert measured.codec == name
        assert measured.raw_bytes == 40 * 4096
        assert measured.wire_bytes == 40 * codec_of(name).wire_bytes(torch.float32, 1024)
        assert coder.take().error == 0.0


def test_past_the_budget_the_rung_is_left_for_good_with_this_tensor_already() -> None:
    coder = Coder("int8", every=1)
    coded = coder.encode(spiky())
    assert coded is not None
    assert coded[0] == "bf16"
    assert coder.codec == "bf16"
    assert coder.take().error <= codec_of("bf16").budget
    later = coder.encode(torch.randn(4 * BLOCK))
    assert later is not None
    assert later[0] == "bf16"


def test_only_every_so_many_tensors_are_measured() -> None:
    coder = Coder("int8")
    coder.encode(torch.randn(BLOCK))
    for _ in range(SAMPLE_EVERY - 1):
        assert coder.encode(spiky()) is not None
        assert coder.codec == "int8"
    coder.encode(spiky())
    assert coder.codec == "bf16"


def test_all_the_way_up_means_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("int4", "int8", "bf16"):
        monkeypatch.setattr(codec_of(name), "budget", 0.0)
    coder = Coder("int4", every=1)
    assert coder.encode(torch.randn(BLOCK)) is None
    assert coder.codec == "none"
    assert coder.take().wire_bytes == 4 * BLOCK


def test_what_is_not_finite_climbs_alone() -> None:
    coder = Coder("int4", every=1)
    tensor = torch.randn(4 * BLOCK)
    tensor[3], tensor[9] = math.nan, math.inf
    coded = coder.encode(tensor)
    assert coded is not None
    assert coded[0] == "bf16"
    assert coder.codec == "int4"
    back = codec_of("bf16").decode(coded[1], tensor.dtype, tensor.shape)
    assert torch.equal(back.isfinite(), tensor.isfinite())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(100),
        torch.ones(100, dtype=torch.bool),
        torch.get_rng_state(),
        torch.randn(100, dtype=torch.complex64),
        torch.randn(100).to(torch.float8_e4m3fn),
        torch.tensor(1.5),
        torch.empty(0),
        torch.randn(15),  # a block takes more than these
    ],
)
def test_what_is_no_float_or_gains_nothing_travels_as_it_is(tensor: torch.Tensor) -> None:
    coded = Coder("int8").encode(tensor)
    assert coded is None or coded[0] == "bf16"
    assert coded is None or 2 * coded[1].numel() == tensor.nbytes


def test_seeds_differ_in_every_place() -> None:
    seeds = {noise_seed(*[int(i == j) for i in range(5)]) for j in range(6)}
    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)
