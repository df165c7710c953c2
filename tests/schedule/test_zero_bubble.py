"""The local rule as a table, the windows as formulas, and that nothing can get stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcee.schedule.actions import Action, Kind
from meshcee.schedule.zero_bubble import (
    StageView,
    choose,
    hard_window,
    period_s,
    residence_s,
    soft_window,
)


def view(**changes: int | bool | None) -> StageView:
    base = {
        "num_micro": 8,
        "forwards": 3,
        "backwards": 1,
        "weights": 0,
        "input_here": True,
        "gradient_here": True,
        "weight_here": True,
    }
    return StageView(**{**base, "window": 6, "live_cap": 6, "soft": 3, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Kind.B),
        ({"gradient_here": False}, Kind.F),  # two in flight, below the soft window of three
        ({"gradient_here": False, "soft": None}, Kind.F),
        ({"gradient_here": False, "soft": None, "window": 2}, Kind.W),
        ({"gradient_here": False, "soft": 2}, Kind.W),  # at the soft window W goes first
        ({"gradient_here": False, "soft": 2, "weight_here": False}, Kind.F),  # no W waits: up to the hard window
        ({"gradient_here": False, "window": 2, "soft": 2, "weight_here": False}, None),  # at the hard window
        ({"gradient_here": False, "live_cap": 3}, Kind.W),  # memory is full
        ({"gradient_here": False, "live_cap": 3, "weight_here": False}, None),
        ({"gradient_here": False, "input_here": False}, Kind.W),
        ({"live_cap": 3}, Kind.B),  # another stage waits for the gradient
    ],
)
def test_the_rule(changes: dict[str, int | bool | None], expected: Kind | None) -> None:
    assert choose(view(**changes)) == expected


def test_windows_of_a_pipeline_worked_out_by_hand() -> None:
    # two stages of f + b = 3 and 2 seconds, w = 1 each; a link of 0.5 s there and back
    assert residence_s([3, 2], [0.5]) == [5.5, 2]
    assert period_s([4, 3], [0.25, 0.25]) == 4
    assert (soft_window(5.5, 4), hard_window(5.5, 4)) == (3, 5)
    assert (soft_window(2, 4), hard_window(2, 4)) == (2, 3)


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


@given(st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 9999))
def test_actions_print_and_parse(stage: int, kind: Kind, micro: int) -> None:
    assert Action.parse(str(Action(stage, kind, micro))) == Action(stage, kind, micro)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "-1F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)
