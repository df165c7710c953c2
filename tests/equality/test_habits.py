"""Habits of people's models (tests/rig/habits): a chain of stages equals the plain loop, or the refusal says what helps."""

from __future__ import annotations

import pytest
import torch

import meshcee
from meshcee.errors import MeshceeError
from tests.rig.habits import HABITS, job_of
from tests.rig.reference import reference

STEPS = 2
TRAINED = [name for name, habit in HABITS.items() if not habit.refused]
REFUSED = [name for name, habit in HABITS.items() if habit.refused]


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of old ways of torch's


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", TRAINED)
def test_a_habit_is_trained_as_the_plain_loop_trains_it(name: str) -> None:
    found = meshcee.check(job_of(name), stages=(2,), steps=STEPS)
    assert found.equal, found.differs
    assert found.losses == reference(job_of(name), STEPS, in_place=True).totals


@pytest.mark.cases(15)
@pytest.mark.parametrize("name", REFUSED)
def test_another_habit_is_refused_with_what_helps(name: str) -> None:
    try:
        found = meshcee.check(job_of(name), stages=(2,), steps=1)
        said = "equal" if found.equal else found.differs
    except MeshceeError as error:
        said = str(error)
    assert HABITS[name].refused in said


def test_a_frozen_encoder_is_trained_where_torch_leaves_its_fused_kernels_out() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert meshcee.check(job_of("FrozenEncoder"), stages=(2,), steps=STEPS).equal
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
