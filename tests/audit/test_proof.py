"""What proofs say, which steps are chosen, and how likely a lie is to be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshcee.audit import SIGNED, Edge, Proof, Tally, chance, chosen, frame_digest, root_of, unequal
from meshcee.errors import ProtocolError, UsageError
from tests.peers.member.test_training import make_job
from tests.rig.mutations import check_every_field

HASH = "0a" * 32
PROOF = Proof(3, HASH, HASH, {"f b": HASH}, {"b b": HASH})


def test_a_frame_is_known_by_all_but_its_signature() -> None:
    header = {"round": 3, "micro": 1, "tensors": [["float32", [2]]]}
    found = frame_digest("f", header, [b"12345678"])
    assert frame_digest("f", {**header, SIGNED: b"x"}, [memoryview(b"12345678")]) == found
    others = (("b", header, [b"12345678"]), ("f", {**header, "micro": 2}, [b"12345678"]), ("f", header, [b"12345679"]))
    assert found not in {frame_digest(*other) for other in others}
    assert frame_digest("f", header, [b"1234", b"5678"]) != frame_digest("f", header, [b"12", b"345678"])


def test_a_direction_of_a_link_is_known_by_its_frames_in_their_order() -> None:
    def told(*digests: bytes) -> dict[str, str]:
        tally = Tally()
        for digest in digests:
            tally.add("f", "b", digest)
        return tally.hashes()

    assert told(b"1", b"2") == told(b"1", b"2")
    assert len({str(told(*order)) for order in ((b"1",), (b"1", b"2"), (b"2", b"1"), (b"1", b"2", b"2"))}) == 4


def test_ends_of_a_link_that_say_the_same_are_no_case() -> None:
    a, b = Proof(1, HASH, HASH, {"f b": HASH}, {"b b": HASH}), Proof(1, HASH, HASH, {"b a": HASH}, {"f a": HASH})
    assert list(unequal({"a": a, "b": b})) == []
    other = replace(b, received={"f a": "0b" * 32})
    assert list(unequal({"a": a, "b": other})) == [Edge("f", "a", "b")]
    assert list(unequal({"a": a, "b": replace(b, sent={})})) == [Edge("b", "b", "a")]


def test_a_state_is_known_by_names_and_digests() -> None:
    assert root_of({"x": HASH, "y": "1"}, {}) == root_of({"y": "1", "x": HASH}, {})
    assert len({root_of({"x": HASH}, {}), root_of({}, {"x": HASH}), root_of({"y": HASH}, {}), root_of({}, {})}) == 4


def test_every_field_of_a_proof_is_checked() -> None:
    free = (".sent.f b left out", ".received.b b left out")  # the plan says which there must be
    check_every_field(PROOF.header(), Proof.from_header, free=free)
    assert Proof.from_header(PROOF.header()) == PROOF
    with pytest.raises(ProtocolError):
        Proof.from_header({**PROOF.header(), "after": "no hash"})


def test_so_many_steps_are_chosen_as_the_share_says_and_each_epoch_has_others() -> None:
    peers, steps = [f"p{i}" for i in range(10)], range(2000)
    for share in (0.0, 0.01, 0.3, 1.0):
        found = sum(chosen(b"seed", share, (1, 1), step, peer) for step in steps for peer in peers)
        assert abs(found - share * 20_000) <= 4 * (20_000 * share * (1 - share)) ** 0.5
    one, two = ([chosen(b"seed", 0.5, epoch, step, "p") for step in steps] for epoch in ((1, 1), (1, 2)))
    assert 800 < sum(a == b for a, b in zip(one, two)) < 1200
    assert one != [chosen(b"other", 0.5, (1, 1), step, "p") for step in steps]


def test_the_chance_to_be_found_grows_with_every_lie() -> None:
    assert chance(0.01, 1) == pytest.approx(0.01)
    assert chance(0.01, 69) == pytest.approx(0.5, abs=0.001)
    assert (chance(0.0, 1000), chance(1.0, 1)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("said", "why"),
    [({"audit": 1.1}, "from 0 to 1"), ({"groups": True}, "leave groups or audit out"), ({"codec": "bf16"}, "rounds")],
)
def test_a_job_that_no_audit_fits_is_refused(said: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make_job(**{"audit": 0.5, **said})
    assert make_job(audit=0.5, codec="auto").codec == "lossless"
