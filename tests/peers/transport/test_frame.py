"""The wire format: whatever arrives, however it is cut, the decoder says what it was or refuses it cheaply."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import msgpack
import psutil
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from meshcee.config import Limits
from meshcee.errors import ProtocolError
from peers.transport.base import Frame
from peers.transport.frame import (
    CREDIT,
    GOODBYE,
    MAX_CHUNK_BYTES,
    RETRACT,
    Arrived,
    Credit,
    Decoder,
    Encoder,
    Event,
    Goodbye,
    Retracted,
    Spent,
    views,
)
from tests.peers.transport.harness import same

LIMITS = Limits(header_bytes=4096, payload_bytes=1 << 20, payloads=8, chunk_bytes=1000)

scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
headers = st.dictionaries(
    st.text(max_size=10), st.recursive(scalars | st.binary(max_size=50), st.lists, max_leaves=10), max_size=6
)
frames = st.builds(
    Frame, st.text(min_size=1, max_size=64), headers, st.lists(st.binary(max_size=5000), max_size=LIMITS.payloads)
)


def encode(frame: Frame, limits: Limits = LIMITS, check: bool = True) -> bytes:
    encoder, payloads = Encoder(limits, check), views(frame)
    head, _ = encoder.head(frame, [len(p) for p in payloads])
    return head + b"".join(encoder.chunks(payloads))


def control_record(kind: int, size: int = 0) -> bytes:
    return Encoder(LIMITS).control(kind, size)


def record(kind: int, size: int, check: int = 0, body: bytes = b"", magic: bytes = b"mc", version: int = 1) -> bytes:
    return struct.pack("!2sBBIQ", magic, version, kind, size, check) + body


def data(message: Any, **packing: Any) -> bytes:
    """A DATA record with a good checksum around any msgpack message."""
    body = message if isinstance(message, bytes) else msgpack.packb(message, **packing)
    return record(1, len(body), digest(1, body), body)


def digest(kind: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, int.from_bytes(struct.pack("!2sBBI", b"mc", 1, kind, len(body)), "big"))


def only_frames(events: list[Event]) -> list[Frame]:
    return [event.frame for event in events if isinstance(event, Arrived)]


@given(st.lists(frames, min_size=1, max_size=3), st.lists(st.integers(1, 3000)), st.booleans())
def test_frames_survive_any_cutting_of_the_bytes(sent: list[Frame], cuts: list[int], check: bool) -> None:
    encoded = memoryview(b"".join(encode(frame, check=check) for frame in sent))
    decoder = Decoder(LIMITS, check)
    events: list[Event] = []
    for cut in [*cuts, len(encoded)]:
        events += decoder.feed(encoded[:cut])
        encoded = encoded[cut:]
    received = only_frames(events)
    assert len(received) == len(sent)
    assert all(map(same, received, sent))
    assert not decoder.mid_frame
    cost = sum(Encoder(LIMITS).head(f, [len(p) for p in f.payloads])[1] + f.payload_bytes for f in sent)
    assert (
        sum(event.cost for event in events if isinstance(event, (Spent, Arrived))) == cost
    )  # both windows count alike


@given(frames, st.data())
def test_one_flipped_bit_is_always_found(frame: Frame, draw: st.DataObject) -> None:
    encoded = bytearray(encode(frame))
    bit = draw.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    decoder = Decoder(LIMITS)
    try:
        events = decoder.feed(encoded)
    except ProtocolError:
        with pytest.raises(ProtocolError):  # and it stays refused
            decoder.feed(b"x")
        return
    # A larger size in a prelude can only make the decoder wait for bytes that do not come.
    assert not only_frames(events)
    assert decoder.mid_frame


@given(frames, st.data())
def test_a_truncated_frame_is_no_frame(frame: Frame, draw: st.DataObject) -> None:
    encoded = encode(frame)
    decoder = Decoder(LIMITS)
    events = decoder.feed(encoded[: draw.draw(st.integers(1, len(encoded) - 1))])
    assert not only_frames(events)
    assert decoder.mid_frame


@pytest.mark.parametrize(
    ("bytes_", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a meshcee frame"),
        (record(1, 10, version=2), "version 2"),
        (record(9, 0), "type 9 is unknown"),
        (record(0, 0), "type 0 is unknown"),
        (record(1, 4097), "header of 4097 bytes"),
        (record(1, (1 << 32) - 1), "header of 4294967295 bytes"),
        (record(1, 3, 12345, b"abc"), "checksum of a frame's header"),
        (record(3, 5, 0), "checksum of a control record"),
        (control_record(CREDIT, 0), "credit of nothing"),
        (control_record(RETRACT), "not begun"),
        (record(2, 5, 0, b"abcde"), "outside a frame"),
        (encode(Frame("x")) + record(2, 5, 0, b"abcde"), "outside a frame"),
        (data(b""), "msgpack"),
        (data(b"\xc1"), "msgpack"),
        (data(msgpack.packb(["k", {}, []]) + b"x"), "msgpack"),
        (data(b"\x91" * 4000), "msgpack"),
        (data(["k", {}]), "must be"),
        (data({"k": 1}), "must be"),
        (data([1, {}, []]), "kind"),
        (data(["", {}, []]), "kind"),
        (data(["k" * 65, {}, []]), "kind"),
        (data([b"k", {}, []]), "kind"),
        (data(["k", [], []]), "map with string keys"),
        (data(["k", {1: 2}, []]), "msgpack"),
        (data(["k", {b"a": 2}, []]), "map with string keys"),
        (data(["k", {"t": msgpack.Timestamp(1)}, []]), "msgpack"),
        (data(["k", {"t": msgpack.ExtType(5, b"")}, []]), "msgpack"),
        (data(["k", {"t": msgpack.ExtType(5, b"12345")}, []]), "msgpack"),
        (data(msgpack.packb(["k", {"t": "zz"}, []]).replace(b"zz", b"\xff\xfe")), "msgpack"),
        (data(["k", {}, 5]), "list of non-negative"),
        (data(["k", {}, [-1]]), "list of non-negative"),
        (data(["k", {}, [1.5]]), "list of non-negative"),
        (data(["k", {}, [True]]), "list of non-negative"),
        (data(["k", {}, [0] * 9]), "9 payloads"),
        (data(["k", {}, [(1 << 20) + 1]]), "1048577 payload bytes"),
        (data(["k", {}, [1 << 63, 1 << 63]]), "payload bytes"),
        (data(["k", {}, [10]]) + data(["k", {}, []]), "inside another"),
        (data(["k", {}, [10]]) + control_record(GOODBYE), "middle of a frame"),
        (data(["k", {}, [10]]) + record(2, 11, 0, b"12345678901"), "does not fit"),
        (data(["k", {}, [10]]) + record(2, 0), "does not fit"),
        (data(["k", {}, [10]]) + record(2, MAX_CHUNK_BYTES + 1), "does not fit"),
        (data(["k", {}, [3, 3]]) + record(2, 6, 0, b"123456"), "does not fit"),
        (data(["k", {}, [3]]) + record(2, 3, 0, b"123"), "checksum of a payload chunk"),
    ],
)
def test_what_is_wrong_is_named(bytes_: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Decoder(LIMITS).feed(bytes_)


def test_an_announced_payload_costs_nothing_before_its_bytes_come() -> None:
    decoder = Decoder(Limits(payload_bytes=1 << 40))
    before = psutil.Process().memory_info().rss
    decoder.feed(data(["k", {}, [1 << 31, 1 << 31]]) + record(2, 1 << 20) + bytes(1000))
    assert decoder.mid_frame
    assert psutil.Process().memory_info().rss - before < 8 << 20


def test_control_records_stand_between_chunks() -> None:
    payload = bytes(range(256)) * 10
    encoded = encode(Frame("x", {}, [payload]))  # chunks of 1000, 1000 and 560 bytes
    head, *chunks = (encoded[a:b] for a, b in pairwise((0, -2608, -1592, -576, len(encoded))))
    decoder = Decoder(LIMITS)
    events = decoder.feed(head + chunks[0] + control_record(CREDIT, 77) + chunks[1])
    assert Credit(77) in events
    events = decoder.feed(chunks[2] + control_record(GOODBYE))
    assert [type(event) for event in events] == [Arrived, Goodbye]
    assert bytes(only_frames(events)[0].payloads[0]) == payload


def test_a_retracted_frame_leaves_nothing_behind() -> None:
    half = encode(Frame("gone", {}, [bytes(2500)]))[: -516 - 1016]  # without the last two of three chunks
    decoder = Decoder(LIMITS)
    events = decoder.feed(half + control_record(RETRACT) + encode(Frame("next", {}, [b"abc"])))
    assert Retracted() in events
    assert [frame.kind for frame in only_frames(events)] == ["next"]
    assert not decoder.mid_frame


def test_payload_bytes_land_in_their_final_memory() -> None:
    """Once a payload has begun, the lent buffer is the payload itself, up to the end of the chunk."""
    decoder = Decoder(LIMITS)
    decoder.feed(data(["k", {}, [2000]]) + record(2, 1000, digest(2, bytes(1000))))
    buffer = decoder.get_buffer()
    assert len(buffer) == 1000
    buffer[:400] = bytes(400)
    assert decoder.advance(400) == []
    assert len(decoder.get_buffer()) == 600
    buffer[400:] = bytes(600)
    assert decoder.advance(600) == [Spent(1000)]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Frame(""), "kind"),
        (Frame("k" * 65), "kind"),
        (Frame("x", {"x": object()}), "cannot be sent"),
        (Frame("x", {"x": 1 << 64}), "cannot be sent"),
        (Frame("x", {"x": b"0" * 5000}), "put large values into payloads"),
        (Frame("x", {}, [b""] * 9), "split it"),
    ],
)
def test_what_could_not_be_received_is_not_sent(frame: Frame, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        encode(frame)
