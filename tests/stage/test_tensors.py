"""Tensors cross the wire bit by bit, in the same order in memory, and nothing that lies is built."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshcee.capture.graph import moved
from meshcee.errors import ProtocolError
from meshcee.files.layout import memory_at
from meshcee.files.tensor_files import flat_bytes
from meshcee.stage.tensors import _DTYPES, Value, pack, unpack
from tests.rig.strides import ODD


def cross(values: list[Value]) -> list[Value]:
    """Through msgpack and fresh memory, as the transport does it."""
    meta, payloads = pack(values)
    return unpack(msgpack.unpackb(msgpack.packb(meta)), [bytearray(payload) for payload in payloads])


def identical(a: torch.Tensor, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat_bytes(a), flat_bytes(b))


def test_on_another_device_a_tensor_lies_as_before() -> None:
    """The real part of complex numbers has gaps, which a kernel of a GPU sees and `to` leaves out."""
    real = torch.zeros(2, 3, 6, dtype=torch.complex64).real
    assert moved(real, torch.device("meta")).stride() == real.stride() == (36, 12, 2)
    assert moved(real, real.device) is real


@pytest.mark.parametrize("dtype", list(_DTYPES.values()), ids=list(_DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2, 0, 3), (2, 3, 4, 5)])
def test_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    tensor = raw.view(dtype).reshape(shape)
    (back,) = cross([tensor])
    assert identical(tensor, back)
    assert isinstance(back, torch.Tensor)
    assert back.device.type == "cpu"


@pytest.mark.parametrize("name", ODD)
def test_one_element_or_none_crosses_whatever_its_strides(name: str) -> None:
    (back,) = cross([ODD[name]])
    assert identical(ODD[name], back)


def test_special_values_keep_their_bits() -> None:
    tensor = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 5e-324], dtype=torch.float64)
    assert identical(tensor, cross([tensor])[0])


def test_numbers_and_none() -> None:
    values: list[Value] = [1, -(1 << 63), (1 << 63) - 1, 0.1, math.inf, True, False, None]
    back = cross(values)
    assert back == values
    assert [type(value) for value in back] == [type(value) for value in values]
    with pytest.raises(ProtocolError, match="cannot send"):
        pack([1 << 63])
    with pytest.raises(ProtocolError, match="cannot send a str"):
        pack(["text"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
        torch.randn(4, 1, 3).transpose(0, 2),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 7, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(5, 6).t()[:, :],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(4, 1, 1).expand(4, 3, 2),
        torch.randn(3, 1).t().expand(5, 3),
        torch.randn(4, 8)[:, :4],  # a gap of as much as is kept
    ],
)
def test_the_order_of_elements_in_memory_is_kept(tensor: torch.Tensor) -> None:
    (back,) = cross([tensor])
    assert isinstance(back, torch.Tensor)
    assert identical(tensor, back)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6)[:, ::2],
        torch.randn(6)[2:5],
        torch.randn(4, 1000, 3)[:, 0],
        torch.randn(4, 2, 6)[:, :, 1::2].transpose(0, 1),
        torch.randn(3, 3, requires_grad=True) * 2,
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(2, 2)),
    ],
)
def test_views_and_gradients_arrive_as_plain_tensors(tensor: torch.Tensor) -> None:
    (back,) = cross([tensor])
    assert isinstance(back, torch.Tensor)
    assert identical(tensor.detach().resolve_conj(), back)
    assert not back.requires_grad


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.randn(4, 6)[:, ::2], (6, 2)),
        (torch.randn(6, 900)[:, :300], (308, 1)),  # the narrowest gap that leaves rows where they lie on cache lines
        (torch.randn(4, 1000, 20)[:, 0], (32, 1)),
        (torch.randn(900, 6).t()[:3], (1, 6)),
        (torch.randn(4, 1, 40)[:, :, ::2].expand(4, 3, 20), (40, 0, 2)),
    ],
)
def test_gaps_stay_gaps_and_do_not_travel(tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    _, payloads = pack([tensor])
    (back,) = cross([tensor])
    assert isinstance(back, torch.Tensor)
    assert identical(tensor, back)
    assert back.stride() == strides
    assert len(payloads[0]) == 4 * math.prod(n for n, s in zip(tensor.shape, tensor.stride()) if s)
    assert back.untyped_storage().nbytes() <= 16 * back.numel()


def test_nothing_is_copied_where_memory_allows() -> None:
    tensor = torch.zeros(1000)
    _, (payload,) = pack([tensor])
    tensor[3] = 7.0
    assert memoryview(payload)[12:16] == struct.pack("=f", 7.0)
    buffer = memory_at(4000, 0).numpy().data
    (back,) = unpack([["float32", [1000]]], [buffer])
    buffer[12:16] = struct.pack("=f", 7.0)
    assert isinstance(back, torch.Tensor)
    assert back[3] == 7.0
    back += 1  # writable, without a warning
    transposed = torch.zeros(30, 40).t()
    _, (payload,) = pack([transposed])
    transposed[0, 0] = 1.0
    assert memoryview(payload)[:4] != bytes(4)


def test_read_only_memory_is_copied_rather_than_written_through() -> None:
    constant = bytes(8)
    (back,) = unpack([["int64", [1]]], [constant])
    assert isinstance(back, torch.Tensor)
    back += 5
    assert constant == bytes(8)


@pytest.mark.parametrize(
    ("meta", "sizes"),
    [
        (None, []),
        ({}, []),
        ("float32", []),
        ([["float32", [2]]] * 5000, [8] * 5000),
        ([["float32"]], [4]),
        ([["float32", [1], [0], 1]], [4]),
        ([["float33", [1]]], [4]),
        ([[5, [1]]], [4]),
        ([["__class__", [1]]], [4]),
        ([["float32", 1]], [4]),
        ([["float32", {"a": 1}]], [4]),
        ([["float32", [-1]]], [4]),
        ([["float32", [1.0]]], [4]),
        ([["float32", [True]]], [4]),
        ([["float32", ["1"]]], [4]),
        ([["float32", [1] * 33]], [4]),
        ([["float32", [1 << 62, 4]]], [0]),
        ([["float32", [1 << 32, 1 << 32]]], [0]),
        ([["float32", [0, 1 << 47, 1 << 47]]], [0]),
        ([["float32", [1 << 64]]], [0]),
        ([["float32", [2]]], [4]),
        ([["float32", [2]]], [9]),
        ([["float32", [2]]], []),
        ([["float32", [2]]], [8, 8]),
        ([5], [8]),
        ([["float32", [2, 3], [1]]], [24]),
        ([["float32", [2, 3], [1, 1]]], [24]),
        ([["float32", [2, 3], [1, 19]]], [24]),
        ([["float32", [2, 3], [0, 1]]], [24]),
        ([["float32", [2, 3], [23, 2]]], [24]),
        ([["float32", [2], 64]], [8]),
        ([["float32", [2], -4]], [8]),
        ([["float32", [2], 6]], [8]),
        ([["float32", [2], True]], [8]),
        ([["float32", [2], 4, 4]], [8]),
        ([["float32", [2], [1], [1]]], [8]),
        ([["float32", [2, 3], [-1, 2]]], [24]),
        ([["float32", [2, 3], [3, True]]], [24]),
        ([["float32", [1, 1], [1 << 60, 1]]], [4]),
        ([["float32", [0], [1]]], [0]),
        ([["float32", [2, 3], "31"]], [24]),
        ([b"bytes"], []),
        ([{"a": 1}], []),
    ],
)
def test_lies_are_refused(meta: Any, sizes: list[int]) -> None:
    with pytest.raises(ProtocolError):
        unpack(meta, [bytearray(size) for size in sizes])


entries = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 66), 1 << 66)
    | st.floats()
    | st.sampled_from(["float32", "int64", "bool", "x"])
    | st.binary(max_size=4),
    st.lists,
    max_leaves=12,
)


@given(st.lists(entries, max_size=4), st.lists(st.integers(0, 64), max_size=4))
def test_any_meta_builds_what_it_says_or_is_refused(meta: list[Any], sizes: list[int]) -> None:
    try:
        values = unpack(meta, [bytearray(size) for size in sizes])
    except ProtocolError:
        return
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert [tensor.nbytes for tensor in tensors] == sizes


def test_what_was_expected_is_checked() -> None:
    meta, payloads = pack([torch.zeros(2, 3), 5, None, 1.5])
    tensor_type = (torch.float32, (2, 3))
    assert len(unpack(meta, payloads, [tensor_type, int, type(None), float])) == 4
    assert len(unpack(meta, payloads, [None, None, None, None])) == 4
    for wrong in (
        [tensor_type, int, type(None)],
        [(torch.float64, (2, 3)), int, type(None), float],
        [(torch.float32, (3, 2)), int, type(None), float],
        [(torch.float32, (2, 3, 1)), int, type(None), float],
        [int, int, type(None), float],
        [tensor_type, tensor_type, type(None), float],
        [tensor_type, bool, type(None), float],
        [tensor_type, int, int, float],
    ):
        with pytest.raises(ProtocolError):
            unpack(meta, payloads, wrong)  # type: ignore[arg-type]


def test_tensors_that_cannot_cross_are_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot send"):
        pack([torch.eye(2).to_sparse()])
