"""Every codec keeps its bound, its size and its promises, whatever the tensor looks like."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshcee.codec import CODECS, LADDER, Codec, accepted, codec_of
from meshcee.codec.blocks import BLOCK, PIECE
from meshcee.codec.coder import relative_error
from meshcee.errors import ProtocolError, UsageError
from meshcee.figures import workload
from tests.rig import small
from tests.rig.strides import ODD

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RUNGS = [codec_of(name) for name in LADDER]
LOSSY = [codec for codec in RUNGS if codec.name != "none"]
PACKED = [codec for codec in map(codec_of, CODECS) if codec.varies]
every_codec = pytest.mark.parametrize("codec", RUNGS, ids=LADDER)
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


@pytest.mark.parametrize("codec", [codec_of(name) for name in CODECS], ids=CODECS)
@pytest.mark.parametrize("name", [name for name, tensor in ODD.items() if tensor.is_floating_point()])
def test_one_element_or_none_is_coded_whatever_its_strides(codec: Codec, name: str) -> None:
    flat = torch.tensor(ODD[name].tolist(), dtype=ODD[name].dtype).reshape(ODD[name].shape)
    found, wanted = (None if coded is None else coded.tolist() for coded in map(codec.encode, (ODD[name], flat)))
    assert found == wanted


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
    off = (there_and_back(codec_of("int8"), tensor) - tensor).abs()
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
    codec, tensor, count = codec_of(name), torch.randn(4 * BLOCK), 600
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
    assert codec_of("int8").encode(torch.full((100,), 1e31)) is None
    half = torch.full((100,), torch.finfo(torch.float16).max, dtype=torch.float16)
    for codec in (codec_of("int8"), codec_of("int4")):
        assert bool(there_and_back(codec, half).isfinite().all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zeros_and_vanishing_numbers(name: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(130, dtype=dtype)
    for seed in (None, 1):
        assert torch.equal(there_and_back(codec_of(name), zeros, seed), zeros)
    tiny = torch.full((130,), 1e-44).to(dtype)
    assert bool((there_and_back(codec_of(name), tiny).abs() <= 1e-30).all())


def test_an_outlier_costs_its_neighbours_little_after_the_rotation() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(100, BLOCK)
    tensor[:, 5] = 50.0
    quiet = torch.arange(BLOCK) != 5
    off = (there_and_back(codec_of("int4"), tensor) - tensor)[:, quiet]
    assert float(off.norm()) < 0.4 * float(
        tensor[:, quiet].norm()
    )  # plain int4 would lose them all: a step is 50 / 7.5


def test_sizes_are_as_documented() -> None:
    count = 1 << 20
    ratios = {codec.name: 4 * count / codec.wire_bytes(torch.float32, count) for codec in RUNGS}
    assert ratios == pytest.approx({"none": 1.0, "bf16": 2.0, "int8": 3.879, "int4": 7.529}, rel=1e-3)


def test_the_planner_prices_the_sizes_that_are_sent() -> None:
    count = 1 << 16
    assert set(CODECS) == {"none", *workload.CODECS}
    job = replace(small.workload(3), element_bytes=4)
    size = 4.0 * count
    for codec in RUNGS:
        assert job.wire_bytes(size, codec.name) == codec.wire_bytes(torch.float32, count)
    torch.manual_seed(0)
    for codec in PACKED:  # by their numbers, hence roughly
        assert job.wire_bytes(size, codec.name) == pytest.approx(through(codec, torch.randn(count))[1], rel=0.04)
    assert job.codec_s(size, "none") == 0.0
    assert job.codec_s(size, "int4") > job.codec_s(size, "int8") > job.codec_s(size, "bf16") > workload.PAYLOAD_S
    halves = replace(job, element_bytes=2)
    assert halves.wire_bytes(size, "bf16") == size
    assert halves.codec_s(size, "bf16") == 0.0
    assert halves.wire_bytes(size, "bf16-lossless") == halves.wire_bytes(size, "lossless") == size * 11 / 16


packed = pytest.mark.parametrize("codec", PACKED, ids=[codec.name for codec in PACKED])
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def through(codec: Codec, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    payload = codec.encode(tensor)
    assert payload is not None
    assert payload.numel() <= codec.wire_bytes(tensor.dtype, tensor.numel())
    return codec.decode(payload, tensor.dtype, tensor.shape), payload.numel()


@packed
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_packed_unpacks_to_the_same_bits(codec: Codec, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(7, 150, 3).to(dtype)
    if dtype == torch.float16 and codec.worst > 0:
        assert codec.encode(tensor) is None  # it was rounded to bf16, and 65504 came back as infinity
        return
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-41, -1e-44])
    tensor[0, :7, 0] = odd.to(dtype)
    inner = codec_of(codec.name.replace("bf16-lossless", "bf16").replace("lossless", "none"))
    exact = inner.encode(tensor)
    assert exact is not None
    expected = inner.decode(exact, dtype, tensor.shape)
    for view in (tensor, tensor.transpose(0, 1)):
        want = expected if view is tensor else expected.transpose(0, 1)
        back, size = through(codec, view)
        assert torch.equal(back.contiguous().view(BITS[dtype.itemsize]), want.contiguous().view(BITS[dtype.itemsize]))
        assert size < 0.95 * exact.numel()
    assert codec.encode(torch.ldexp(torch.ones(256), torch.arange(-126, 130).clamp(max=127))) is None
    assert codec.encode(torch.empty(0)) is None


@packed
@given(data=st.data())
def test_any_bits_that_pack_come_back(codec: Codec, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
    tensor = torch.tensor(words * 4, dtype=torch.int64).to(torch.int32).view(torch.float32)
    if (payload := codec.encode(tensor)) is not None and codec.name == "lossless":
        back = codec.decode(payload, tensor.dtype, tensor.shape)
        assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


@packed
def test_packed_bytes_that_are_not_what_they_say_are_refused(codec: Codec) -> None:
    tensor = torch.randn(4096)
    payload = codec.encode(tensor)
    assert payload is not None
    for size in (1, 3000, payload.numel() - 20):
        with pytest.raises(ProtocolError, match="packed numbers"):
            codec.decode(payload[:size], tensor.dtype, tensor.shape)
    with pytest.raises(ProtocolError, match="packed numbers"):
        codec.decode(payload, tensor.dtype, (4097,))
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = torch.frombuffer(bytearray(bomb.compress(bytes(1 << 26)) + bomb.flush()), dtype=torch.uint8)
    raw = payload[: payload.numel() // 4096 * 4096]
    back = codec.decode(torch.cat([raw, zeros]), tensor.dtype, tensor.shape)  # 64 MiB of which 4 KiB are unpacked
    assert back.shape == tensor.shape


def test_the_ladder_goes_up_to_none() -> None:
    assert [codec.name for codec in accepted("int4")] == ["int4", "int8", "bf16", "none"]
    assert [codec.name for codec in accepted("none")] == ["none"]
    assert [codec.name for codec in accepted("lossless")] == ["lossless", "none"]
    assert [codec.name for codec in accepted("bf16-lossless")] == ["bf16-lossless", "bf16", "none"]
    with pytest.raises(UsageError, match="codec 'mp3' is unknown"):
        codec_of("mp3")
