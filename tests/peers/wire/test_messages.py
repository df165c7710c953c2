"""Headers from the network are read field by field, and errors keep their class across the wire."""

import msgpack
import pytest

from meshcee import errors
from meshcee.errors import MeshceeError, NonFiniteLossError, ProtocolError
from peers.wire.messages import Round, epoch_of, error_from, error_header, need


@pytest.mark.parametrize(("value", "kind"), [(True, int), ("1", int), (None, str), (1.5, int), ([], dict)])
def test_a_mistyped_field_is_refused(value: object, kind: type) -> None:
    with pytest.raises(ProtocolError, match="'x'"):
        need({"x": value}, "x", kind)


def test_an_integer_serves_where_a_float_is_wanted() -> None:
    assert need({"x": 2}, "x", float) == 2.0


def test_a_step_survives_its_header() -> None:
    step = Round(3, 2, (0.25, 0.75), ({"lr": 0.1},))
    assert Round.from_header(step.header(), forward_only=False, max_micro=4) == step


def test_an_evaluation_of_very_many_micro_batches_fits_the_header() -> None:
    step = Round(1, 0, (1.0,) * 60_000, forward_only=True)
    assert len(msgpack.packb(step.header())) < 100
    assert Round.from_header(step.header(), forward_only=True, max_micro=1 << 20) == step


@pytest.mark.parametrize("changes", [{"count": 1 << 40}, {"count": 0}, {"weights": [0.5, 0.5]}, {"weights": []}])
def test_a_step_whose_count_and_weights_disagree_is_refused(changes: dict[str, object]) -> None:
    header = {**Round(1, 0, (0.25,) * 4).header(), **changes}
    with pytest.raises(ProtocolError, match="step"):
        Round.from_header(header, forward_only=False, max_micro=8)


@pytest.mark.parametrize("bad", [{}, {"epoch": 1}, {"epoch": [1]}, {"epoch": [1, "2"]}, {"epoch": [1, True]}])
def test_an_epoch_is_two_integers(bad: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="epoch"):
        epoch_of(bad)


def test_errors_keep_their_class_and_foreign_ones_do_not_pretend() -> None:
    back = error_from(error_header(NonFiniteLossError("loss is nan")))
    assert type(back) is NonFiniteLossError
    assert str(back) == "loss is nan"
    assert type(error_from(error_header(ValueError("x")))) is MeshceeError
    assert type(error_from({"error": "SystemExit", "message": "x"})) is MeshceeError
    assert all(issubclass(getattr(errors, name), MeshceeError) for name in errors.__all__)
