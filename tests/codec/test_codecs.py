"""Every codec keeps its bound, its size and its promises, whatever the tensor looks like."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshcee import workload
from meshcee.codec import CODECS, LADDER, Codec, accepted, codec_of
from meshcee.codec.blocks import BLOCK, PIECE
from meshcee.codec.coder import relative_error
from meshcee.errors import UsageError
from tests import small

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOSSY = [codec for codec in LADDER if codec.name != "none"]
every_codec = pytest.mark.parametrize("codec", LADDER, ids=[codec.name for codec in LADDER])
lossy = pytest.mark.parametrize("codec", LOSSY, ids=[codec.name for codec in LOSSY])


def there_and_back(codec: Codec, tensor: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    """Through fresh memory, which holds nothing but the bytes."""
    payload = codec.encode(tensor, seed)
    assert payload is not None
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.wire_bytes(tensor.dtype, tensor.numel()),)
    received = torch.frombuffer(bytearray(payload.cpu().numpy().tobytes()) or bytearray(1), dtype=torch.uint8)
    back = codec.decode(received[: payload.numel()], tensor.dtype, tensor.shape)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.is_contiguous()
    return back


@every_codec
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (1,), (63,), (64,), (65,), (3, 5, 7), (0,), (2, 0, 3), (PIECE + 1, BLOCK), (2, 3, 4, 5)]
)
@pytest.mark.parametrize("seed", [None, 7])
def test_every_type_and_shape_keeps_the_bound(
    codec: Codec, dtype: torch.dtype, shape: tuple[int, ...], seed: int | None
) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    back = there_and_back(codec, tensor, seed)
    own = 2 * torch.finfo(dtype).eps if codec.name != "none" else 0.0  # the result's own rounding
    assert relative_error(tensor, back) <= (codec.worst if seed is None else 2.2 * codec.worst) + own


@every_codec
@given(data=st.data())
def test_any_floats_keep_the_bound(codec: Codec, data: st.DataObject) -> None:
    numbers = st.floats(-(2.0**96), 2.0**96, width=32).filter(lambda x: x == 0 or abs(x) > 1e-29)
    values = data.draw(st.lists(numbers, min_size=1, max_size=2 * BLOCK + 1))
    tensor = torch.tensor(values)
    assert relative_error(tensor, there_and_back(codec, tensor)) <= codec.worst * (1 + 1e-5)


def test_each_number_of_int8_is_within_half_a_step_of_its_block() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(50, BLOCK) * torch.logspace(-6, 6, 50)[:, None]
    off = (there_and_back(CODECS["int8"], tensor) - tensor).abs()
    assert bool((off <= tensor.abs().amax(1, keepdim=True) / 250).all())


@lossy
def test_strides_do_not_matter(codec: Codec) -> None:
    torch.manual_seed(0)
    base = torch.randn(40, 6, 30)
    for view in (base.transpose(0, 2), base[::2, :, 3:], base[:, :1].expand(40, 6, 30)):
        assert torch.equal(there_and_back(codec, view), there_and_back(codec, view.contiguous()))


@lossy
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(codec: Codec) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(300)
    first, again, other = (codec.encode(tensor, seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (codec.name == "bf16")  # that one leaves nothing to chance
    global_state = torch.get_rng_state()
    codec.encode(tensor, 3)
    assert torch.equal(global_state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_by_chance_has_no_bias(name: str) -> None:
    torch.manual_seed(0)
    codec, tensor, count = CODECS[name], torch.randn(4 * BLOCK), 600
    mean = sum(there_and_back(codec, tensor, seed).double() for seed in range(count)) / count
    nearest = relative_error(tensor, there_and_back(codec, tensor))
    assert relative_error(tensor, mean) < nearest / 8  # nearest's error stays however often it is repeated


@lossy
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_or_is_refused(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    tensor = torch.randn(200).to(dtype)
    tensor[77] = bad
    payload = codec.encode(tensor)
    if payload is not None:
        back = codec.decode(payload, tensor.dtype, tensor.shape)
        assert torch.equal(back.isfinite(), tensor.isfinite())
        assert torch.equal(back[77], tensor[77]) or math.isnan(bad)
    else:
        assert codec.name != "bf16"


def test_what_is_too_large_is_refused_and_never_made_infinite() -> None:
    huge = torch.full((100,), 1e300, dtype=torch.float64)
    assert all(codec.encode(huge) is None for codec in LOSSY)
    assert CODECS["int8"].encode(torch.full((100,), 1e31)) is None
    half = torch.full((100,), torch.finfo(torch.float16).max, dtype=torch.float16)
    for codec in (CODECS["int8"], CODECS["int4"]):
        assert bool(there_and_back(codec, half).isfinite().all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zeros_and_vanishing_numbers(name: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(130, dtype=dtype)
    for seed in (None, 1):
        assert torch.equal(there_and_back(CODECS[name], zeros, seed), zeros)
    tiny = torch.full((130,), 1e-44).to(dtype)
    assert bool((there_and_back(CODECS[name], tiny).abs() <= 1e-30).all())


def test_an_outlier_costs_its_neighbours_little_after_the_rotation() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(100, BLOCK)
    tensor[:, 5] = 50.0
    quiet = torch.arange(BLOCK) != 5
    off = (there_and_back(CODECS["int4"], tensor) - tensor)[:, quiet]
    assert float(off.norm()) < 0.4 * float(
        tensor[:, quiet].norm()
    )  # plain int4 would lose them all: a step is 50 / 7.5


def test_sizes_are_as_documented() -> None:
    count = 1 << 20
    ratios = {name: 4 * count / codec.wire_bytes(torch.float32, count) for name, codec in CODECS.items()}
    assert ratios == pytest.approx({"none": 1.0, "bf16": 2.0, "int8": 3.879, "int4": 7.529}, rel=1e-3)


def test_the_planner_prices_the_sizes_that_are_sent() -> None:
    count = 1 << 16
    for name, priced in workload.CODECS.items():
        assert priced.bits == 8 * CODECS[name].wire_bytes(torch.float32, count) / count
    job = replace(small.workload(3), element_bytes=4)
    size = 4.0 * count
    for name in CODECS:
        assert job.wire_bytes(size, name) == CODECS[name].wire_bytes(torch.float32, count)
    assert job.codec_s(size, "none") == 0.0
    assert job.codec_s(size, "int4") > job.codec_s(size, "int8") > job.codec_s(size, "bf16") > workload.PAYLOAD_S
    halves = replace(job, element_bytes=2)
    assert halves.wire_bytes(size, "bf16") == size
    assert halves.codec_s(size, "bf16") == 0.0


def test_the_ladder_goes_up_to_none() -> None:
    assert [codec.name for codec in accepted("int4")] == ["int4", "int8", "bf16", "none"]
    assert [codec.name for codec in accepted("none")] == ["none"]
    with pytest.raises(UsageError, match="codec 'mp3' is unknown"):
        codec_of("mp3")
