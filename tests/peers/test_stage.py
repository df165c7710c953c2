"""Chains of stages against the eager reference: every bit of every loss and parameter."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from meshcee.capture import Capture, capture, decode_program, encode_program
from tests import zoo
from tests.peers.chain import Chain
from tests.reference import Reference, reference


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def captured(model: str, precision: str = "fp32") -> Capture:
    """Captured, and through the wire format and back."""
    found = capture(zoo.make(model, precision=precision), evaluate=True)
    assert found.evaluate is not None
    train, evaluate = (decode_program(encode_program(p)) for p in (found.train, found.evaluate))
    return dataclasses.replace(found, train=train, evaluate=evaluate)


@functools.cache
def expected(model: str, optimizer: str, precision: str = "fp32") -> Reference:
    return reference(zoo.make(model, optimizer, precision=precision))


def assert_equal(chain: Chain, losses: list[list[torch.Tensor]], want: Reference) -> None:
    for step, (got, wanted) in enumerate(zip(losses, want.losses, strict=True)):
        for micro, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(a, b), f"loss of step {step}, micro-batch {micro}: {a} != {b}"
    state = chain.state()
    assert set(state) == set(want.state)
    for name, tensor in want.state.items():
        assert torch.equal(state[name], tensor), f"{name} differs by {(state[name] - tensor).abs().max()}"


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("model", zoo.PHASE_ONE)
def test_a_chain_of_stages_is_the_eager_loop(model: str, stages: int) -> None:
    optimizer = "adamw" if stages % 2 else "sgd"
    order = {1: "split", 2: "late", 3: "late", 5: "fused"}[stages]
    job = zoo.make(model, optimizer)
    chain = Chain(job, captured(model), stages, order)
    assert_equal(chain, chain.run(job.steps), expected(model, optimizer))
