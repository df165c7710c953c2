"""The local rule as a table, how long a micro-batch resides in a stage, and that nothing can get stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcee.schedule import Kind, StageView, choose, residence_s


def view(**changes: int | bool) -> StageView:
    base = {
        "num_micro": 8,
        "forwards": 3,
        "backwards": 1,
        "weights": 0,
        "input_here": True,
        "gradient_here": True,
        "weight_here": True,
    }
    return StageView(**{**base, "window": 6, "live_cap": 6, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Kind.B),
        ({"gradient_here": False}, Kind.F),  # two in flight
        ({"gradient_here": False, "window": 2}, Kind.W),
        ({"gradient_here": False, "window": 2, "weight_here": False}, None),
        ({"gradient_here": False, "live_cap": 3}, Kind.W),  # memory is full
        ({"gradient_here": False, "live_cap": 3, "weight_here": False}, None),
        ({"gradient_here": False, "input_here": False}, Kind.W),
        ({"live_cap": 3}, Kind.B),  # another stage waits for the gradient
    ],
)
def test_the_rule(changes: dict[str, int | bool], expected: Kind | None) -> None:
    assert choose(view(**changes)) == expected


def test_residence_in_a_pipeline_worked_out_by_hand() -> None:
    # two stages of f + b = 3 and 2 seconds; a link of 0.5 s there and back
    assert residence_s([3, 2], [0.5]) == [5.5, 2]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 4), st.data())
def test_a_stage_whose_inputs_all_come_runs_everything(
    num_micro: int, window: int, more: int, data: st.DataObject
) -> None:
    done = dict.fromkeys(Kind, 0)
    arrived = back = 0
    for _ in range(10 * num_micro + 10):
        if done[Kind.W] == num_micro:
            break
        arrived = data.draw(st.integers(arrived, num_micro))
        back = data.draw(st.integers(back, done[Kind.F]))
        action = choose(
            StageView(
                num_micro, done[Kind.F], done[Kind.B], done[Kind.W], done[Kind.F] < arrived,
                done[Kind.B] < back, done[Kind.W] < done[Kind.B], window, window + more,
            )
        )  # fmt: skip
        if action is None:
            arrived, back = num_micro, done[Kind.F]  # nothing else can be waited for
        else:
            done[action] += 1
        assert done[Kind.F] - done[Kind.B] <= window
        assert done[Kind.F] - done[Kind.W] <= window + more
        assert done[Kind.F] >= done[Kind.B] >= done[Kind.W]
    assert done[Kind.W] == num_micro
