"""What does not fit is refused at a boundary in its sender's name: later it would be an error of the receiver's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshcee.capture import Batch, Value
from meshcee.capture.graph.rows import Cut
from meshcee.errors import ProtocolError
from meshcee.role import Piece
from meshcee.stage import Boundary

VALUES = (Value("act", torch.float32, (3, Batch(2)), (1, 0), requires_grad=True), Value("length", None))
WHOLE = (Piece("a", 0, 4, (0, 4)),)
HALVES = (Piece("a", 0, 2, (0, 2)), Piece("b", 2, 4, (2, 4)))
UNCUT, CUT = Boundary(VALUES), Boundary(VALUES, (Cut(dim=1), Cut()))
STATE = torch.Generator().get_state()


def ones(rows: int, width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As it travels: the rows first."""
    return torch.ones(2 * rows, width, dtype=dtype)


@pytest.mark.parametrize(
    "rng", [7, None, STATE, torch.zeros(16, dtype=torch.uint8)], ids=["seed", "none", "cpu", "gpu"]
)
def test_what_fits_is_joined(rng: Any) -> None:
    values, after = UNCUT.join({"a": [ones(4), 5, rng]}, (0, 4), WHOLE)
    assert torch.equal(values[0], ones(4))
    assert (values[1], after) == (5, rng)
    values, after = CUT.join({"a": [ones(2), 5, rng], "b": [ones(2), None, None]}, (0, 4), HALVES)
    assert torch.equal(values[0], ones(4))
    assert (values[1], after) == (5, rng)


@pytest.mark.parametrize(
    "frame",
    [
        [ones(4, width=4), 5, 7],
        [ones(4, dtype=torch.float64), 5, 7],
        [ones(3), 5, 7],
        [ones(4)[0], 5, 7],
        [None, 5, 7],
        [ones(4), True, 7],
        [ones(4), ones(4), 7],
        [ones(4), 7],
        [ones(4), 5, True],
        [ones(4), 5, ones(4)],
        [ones(4), 5, STATE[:-1]],
        [ones(4), 5, torch.zeros_like(STATE)],
    ],
)
def test_values_that_do_not_fit_are_their_senders(frame: list[Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        UNCUT.join({"a": frame}, (0, 4), WHOLE)
    assert caught.value.__notes__ == ["a"]


@pytest.mark.parametrize("part", [ones(2, width=4), ones(1), ones(4), ones(2).double(), None])
def test_of_two_senders_the_one_is_named_whose_rows_do_not_fit(part: Any) -> None:
    for sender, other in ("ab", "ba"):
        with pytest.raises(ProtocolError) as caught:
            CUT.join({sender: [part, 5, 7], other: [ones(2), 5, 7]}, (0, 4), HALVES)
        assert caught.value.__notes__ == [sender]


@pytest.mark.parametrize("part", [ones(2, width=4), ones(1), ones(4), ones(2).double(), ones(2)[0]])
def test_gradients_that_do_not_fit_are_their_senders(part: torch.Tensor) -> None:
    sent = [torch.ones(3, 8), 5]
    for sender, other in ("ab", "ba"):
        with pytest.raises(ProtocolError) as caught:
            CUT.join_back({sender: [part, None], other: [ones(2), None]}, HALVES, sent)
        assert caught.value.__notes__ == [sender]
    for frame in ([ones(4), ones(4)], [ones(4)], [ones(4, width=4), None]):
        with pytest.raises(ProtocolError) as caught:
            UNCUT.join_back({"a": frame}, WHOLE, sent)
        assert caught.value.__notes__ == ["a"]


def test_gradients_that_fit_are_joined() -> None:
    sent = [torch.ones(3, 8), 5]
    assert UNCUT.join_back({"a": [None, None]}, WHOLE, sent) == [None, None]
    for second in (ones(2), None):
        found, size = CUT.join_back({"a": [ones(2), None], "b": [second, None]}, HALVES, sent)
        assert found is not None
        assert (found.shape, size) == ((8, 3), None)
