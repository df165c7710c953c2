"""Records: each comes back equal, and whatever is forged, moved, kept alive or malformed is refused by its right name."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.records import (
    CLOCK_SKEW_S,
    MAX_LINKS,
    LeaseRecord,
    LinkRecord,
    PeerRecord,
    Record,
    RunRecord,
    check,
    open_sealed,
    place,
    seal,
    topic,
)
from dht.signing import Identity, MeshKey
from meshcee.config import Limits
from meshcee.errors import ClockError, NotPermittedError, ProtocolError
from meshcee.figures.profile import LinkProfile
from meshcee.plan import LeftOut
from tests.rig.mutations import check_every_field
from tests.rig.targets import ADDRESS, DEVICE, KEY, ME, NOW, OTHER, PLAN, UNTIL, sealed_body

RECORDS: list[Record] = [
    PeerRecord(
        ME.peer_id, NOW, "anna", (ADDRESS,), "lab", DEVICE, True, True, False, 900.0, "ab", 1, "0.1", ("seccomp",)
    ),
    PeerRecord(ME.peer_id, NOW, "ein Besitzer"),
    LinkRecord(ME.peer_id, NOW, ((OTHER.peer_id, LinkProfile(0.01, 1e6, NOW, (0.008, 0.02), (9e5, 2e6))),)),
    LeaseRecord(ME.peer_id, NOW, 7, True),
    RunRecord(ME.peer_id, NOW, "gpt", (1, 2), 30, 1.5, PLAN.to_json(), claim="5f" * 32),
    RunRecord(ME.peer_id, NOW, "gpt"),
]


def same(a: Record, b: Record) -> bool:
    """Equality, in which a loss that is not known equals another."""
    losses = [r.loss for r in (a, b) if isinstance(r, RunRecord)]
    if losses and all(map(math.isnan, losses)):
        return repr(a) == repr(b)
    return a == b


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_record_comes_back_and_has_one_place(record: Record) -> None:
    data = seal(record, ME, KEY, UNTIL)
    assert same(open_sealed(type(record), ME.peer_id, data, KEY, now=NOW), record)
    assert place(data, KEY) == (topic(record.kind, KEY), ME.peer_id, UNTIL)
    assert len(data) < 1000


def test_whom_and_what_an_envelope_is_not_for() -> None:
    data = seal(RECORDS[0], ME, KEY, UNTIL)
    with pytest.raises(NotPermittedError, match="in the name of"):
        open_sealed(PeerRecord, OTHER.peer_id, data, KEY)
    with pytest.raises(NotPermittedError, match="stored among lease"):
        open_sealed(LeaseRecord, ME.peer_id, data, KEY)
    with pytest.raises(NotPermittedError, match="another mesh"):
        open_sealed(PeerRecord, ME.peer_id, data, MeshKey.generate())
    with pytest.raises(NotPermittedError, match="another mesh"):
        open_sealed(PeerRecord, ME.peer_id, data, MeshKey())
    with pytest.raises(ProtocolError, match="cannot be signed by"):
        seal(RECORDS[0], OTHER, KEY, UNTIL)


def test_times() -> None:
    data = seal(RECORDS[0], ME, KEY, UNTIL)
    open_sealed(PeerRecord, ME.peer_id, data, KEY, now=NOW - CLOCK_SKEW_S)
    with pytest.raises(ClockError, match=r"is 21 s ahead of this machine's: set both by a time server"):
        open_sealed(PeerRecord, ME.peer_id, data, KEY, now=NOW - 21)
    with pytest.raises(ClockError, match="has expired"):
        open_sealed(PeerRecord, ME.peer_id, data, KEY, now=UNTIL)
    for until in (NOW, NOW - 1, NOW + 86400):
        with pytest.raises(ProtocolError, match="not valid at all, or for longer"):
            open_sealed(PeerRecord, ME.peer_id, seal(RECORDS[0], ME, KEY, until), KEY)


def test_a_member_of_the_mesh_cannot_speak_for_another() -> None:
    """It holds the mesh key, so only the signature stands between them."""
    kind, _, until, body, signature, shown, _ = msgpack.unpackb(seal(RECORDS[0], ME, KEY, UNTIL))
    covered = msgpack.packb(["meshcee record 2", kind, OTHER.peer_id, until, body])
    forged = msgpack.packb([kind, OTHER.peer_id, until, body, signature, shown, KEY.mac(covered + signature)])
    with pytest.raises(NotPermittedError, match="was not signed by it"):
        check(forged, KEY)


def test_a_stranger_with_an_identity_of_its_own_lacks_the_mesh_key() -> None:
    kind, who, until, body, signature, shown, mac = msgpack.unpackb(seal(RECORDS[0], ME, MeshKey.generate(), UNTIL))
    with pytest.raises(NotPermittedError, match="another mesh"):
        check(msgpack.packb([kind, who, until, body, signature, shown, mac]), KEY)


@given(st.data())
def test_one_changed_byte_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(seal(RECORDS[0], ME, KEY, UNTIL))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((ProtocolError, NotPermittedError)):
        open_sealed(PeerRecord, ME.peer_id, bytes(whole), KEY)
    assert place(bytes(whole), KEY) is None


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_each_field_is_checked(record: Record) -> None:
    """What a device has beside its five figures may be left out; an older peer says nothing of datasets, nor claims a run."""
    optional = ("capability", "versions", "host", "cores", "threads_said", "memory_said", "threads", "fingerprints")
    check_every_field(
        msgpack.unpackb(msgpack.packb(record.to_wire())),
        lambda wire: record.from_wire(wire, ME.peer_id, "a record"),
        free=(
            ".datasets left out",
            ".claim left out",
            *(f".device.{name} left out" for name in optional),
            *(f".{name} = None" for name in ("region", "device", "device.versions", "loss", "guards", "datasets")),
        ),
    )


def test_a_device_of_an_older_peer_tells_no_fingerprints() -> None:
    told = RECORDS[0].to_wire()
    del told["device"]["fingerprints"]
    found = PeerRecord.from_wire(told, ME.peer_id, "a record")
    assert found.device is not None
    assert found.device.fingerprints == ()


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (RECORDS[0], {"name": "x" * 129}),
        (RECORDS[0], {"device": {**asdict(DEVICE), "fingerprints": [["product", "\x1b[2J"]]}}),
        (RECORDS[0], {"device": {**asdict(DEVICE), "fingerprints": [["product", "0" * 65]]}}),
        (RECORDS[0], {"device": {**asdict(DEVICE), "fingerprints": [["product", "0"]] * 9}}),
        (RECORDS[0], {"name": "\x1b[2J"}),
        (RECORDS[0], {"name": OTHER.peer_id}),
        (RECORDS[0], {"addresses": ["127.0.0.1:80"]}),
        (RECORDS[0], {"addresses": [ADDRESS] * 17}),
        (RECORDS[0], {"busy": 1}),
        (RECORDS[0], {"sent_at": math.nan}),
        (RECORDS[0], {"sent_at": math.inf}),
        (
            RECORDS[0],
            {"device": {"kind": "cpu", "name": "x", "memory_bytes": -1, "speed_flops_per_s": 1.0, "threads": 1}},
        ),
        (
            RECORDS[0],
            {"device": {"kind": "cpu", "name": "x", "memory_bytes": 1, "speed_flops_per_s": 0.0, "threads": 1}},
        ),
        (RECORDS[2], {"links": [["me", [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]]]}),
        (RECORDS[2], {"links": [[OTHER.peer_id, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]]}),
        (RECORDS[2], {"links": [[OTHER.peer_id, [0.2, 0.1, 0.3, 1.0, 1.0, 1.0, 0.0]]]}),
        (RECORDS[2], {"links": [[OTHER.peer_id, [0.0, 0.0, 0.0, 1.0, 1.0, math.nan, 0.0]]]}),
        (RECORDS[2], {"links": [[OTHER.peer_id, [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.0]]]}),
        (RECORDS[2], {"links": [[OTHER.peer_id]] * 2}),
        (RECORDS[3], {"counter": 0}),
        (RECORDS[3], {"counter": 1 << 60}),
        (RECORDS[3], {"counter": True}),
        (RECORDS[4], {"epoch": [1]}),
        (RECORDS[4], {"plan": "[" * 9000}),
        (RECORDS[4], {"plan": "[1]"}),
        (RECORDS[4], {"plan": '{"pipelines": []}'}),
        (RECORDS[4], {"loss": math.inf}),
    ],
)
def test_absurd_fields_are_refused_by_name(record: Record, changes: dict[str, Any]) -> None:
    body = msgpack.packb({**record.to_wire(), **changes})
    with pytest.raises(
        ProtocolError, match="|".join(("multiaddress", "12D3KooW", "positive", "must be", *changes, "pairs"))
    ):
        open_sealed(type(record), ME.peer_id, sealed_body(record.kind, body), KEY)


@pytest.mark.parametrize("depth", [65, 400, 900])
@pytest.mark.parametrize("kind", ["in a new field", "in a plan"])
def test_a_record_nested_deep_is_refused_and_ends_nobody(depth: int, kind: str) -> None:
    if kind == "in a plan":
        run = next(one for one in RECORDS if isinstance(one, RunRecord))
        data = sealed_body(run.kind, msgpack.packb({**run.to_wire(), "plan": f"{'[' * depth}{']' * depth}"}))
    else:
        run = RECORDS[0]
        data = sealed_body("peers", msgpack.packb(run.to_wire() | {"new": 0})[:-1] + b"\x91" * depth + b"\xc0")
    with pytest.raises(ProtocolError):
        open_sealed(type(run), ME.peer_id, data, KEY)


def test_what_a_newer_version_adds_is_passed_over() -> None:
    body = msgpack.packb({**RECORDS[0].to_wire(), "new": [1, 2]})
    assert open_sealed(PeerRecord, ME.peer_id, sealed_body("peers", body), KEY) == RECORDS[0]


def test_what_does_not_fit_is_left_out_before_anything_is_refused() -> None:
    links = tuple((Identity.generate().peer_id, LinkProfile(0.01, 1e6, float(i))) for i in range(MAX_LINKS))
    whole = open_sealed(LinkRecord, ME.peer_id, seal(LinkRecord(ME.peer_id, NOW, links), ME, KEY, UNTIL), KEY)
    assert whole.links == links
    small = Limits(record_bytes=4096)
    few = open_sealed(
        LinkRecord, ME.peer_id, seal(LinkRecord(ME.peer_id, NOW, links), ME, KEY, UNTIL, small), KEY, small
    )
    assert 0 < len(few.links) < MAX_LINKS
    assert dict(few.links).items() <= dict(links).items()
    assert few.links[0] == links[-1]  # the newest stay
    run = RunRecord(ME.peer_id, NOW, "gpt", plan=replace(PLAN, left_out=(LeftOut("x", "x" * 100),) * 300).to_json())
    assert open_sealed(RunRecord, ME.peer_id, seal(run, ME, KEY, UNTIL), KEY).plan is None
    with pytest.raises(ProtocolError, match="shorten names"):
        seal(RECORDS[0], ME, KEY, UNTIL, Limits(record_bytes=100))
    with pytest.raises(ProtocolError, match="more than 100"):
        check(seal(RECORDS[0], ME, KEY, UNTIL), KEY, Limits(record_bytes=100))


def test_what_others_would_refuse_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=r"our own peers record: name: expected `str` of length <= 128"):
        seal(PeerRecord(ME.peer_id, NOW, "x" * 200), ME, KEY, UNTIL)
    with pytest.raises(ProtocolError, match="our own peers record: name must be printable"):
        seal(PeerRecord(ME.peer_id, NOW, "\x1b[2J"), ME, KEY, UNTIL)
    with pytest.raises(ProtocolError, match="our own lease record: counter"):
        seal(LeaseRecord(ME.peer_id, NOW), ME, KEY, UNTIL)


def test_the_keys_of_two_meshes_and_of_two_kinds_differ() -> None:
    assert len({topic(kind, key) for kind in ("peers", "lease") for key in (KEY, MeshKey())}) == 4


def test_terms_are_pairs() -> None:
    claims = [LeaseRecord("b", 0.0, 1), LeaseRecord("a", 0.0, 2), LeaseRecord("a", 0.0, 1)]
    assert max(claims, key=lambda c: c.term) == claims[1]
    assert replace(claims[0], counter=3).term == (3, "b")
