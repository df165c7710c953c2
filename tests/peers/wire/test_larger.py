"""Models that the owner never holds: built by their members, or read from a checkpoint; equal to the plain loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch
from torch import nn

from meshcee.capture import recipes
from meshcee.capture.initial_state import InitialState
from meshcee.capture.recipes import constructor
from meshcee.errors import ProtocolError
from meshcee.job import Job
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.weights import StateReceiver, StateSender, names_of
from tests.peers.member.test_training import Net, make_job
from tests.rig import zoo
from tests.rig.mesh_fixture import train
from tests.rig.reference import reference


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructor, "SMALL_BYTES", 256)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that members made by recipe."""
    found: list[str] = []
    follow = StateReceiver.follow

    def spy(self: StateReceiver, data: bytes) -> None:
        before = set(self.state)
        follow(self, data)
        found.extend(self.state.keys() - before)

    monkeypatch.setattr(StateReceiver, "follow", spy)
    return found


async def assert_parity(job: Job, stages: int) -> None:
    assert job.micro_batch_size is not None
    trained = await train(job, stages, job.micro_batch_size)
    expected = reference(job)
    share = job.micro_batch_size / job.batch_size
    assert trained.losses == [sum(float(part) * share for part in step) for step in expected.losses]
    assert trained.state.keys() == expected.state.keys()
    assert [name for name, tensor in trained.state.items() if not torch.equal(tensor, expected.state[name])] == []


def of_zoo(name: str) -> Callable[[], nn.Module]:
    """As a user would write it: draws from the generator as it stands, so that the job's seed decides."""

    def factory() -> nn.Module:
        state = torch.get_rng_state()
        made = zoo.make(name).model  # seeds by itself
        torch.set_rng_state(state)
        assert isinstance(made, nn.Module)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() > 1:
                    nn.init.trunc_normal_(parameter, std=0.1)
        return made

    return factory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "stages"),
    [
        ("plain", "fp32", 3),
        ("plain", "bf16", 2),
        ("gpt2", "fp32", 3),
        ("gpt2", "bf16", 3),
        ("lora", "fp32", 3),
        ("llama", "bf16", 2),
        ("cnn", "fp32", 3),
    ],
)
async def test_a_model_built_by_its_members_equals_the_plain_loop(
    followed: list[str], model: str, precision: str, stages: int
) -> None:
    if model == "plain":
        job = make_job(model=Net, micro_batch_size=6, precision=precision)  # with batch norm and a tied weight
    else:
        job = replace(zoo.make(model), model=of_zoo(model), precision=precision, steps=3, seed=11)
    await assert_parity(job, stages)
    assert len(set(followed)) > 5


def sharded(model: nn.Module, folder: Path) -> None:
    """As Hugging Face saves it: of tied names one, in two files and an index."""
    folder.mkdir()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: tensor.detach() for name, tensor in model.state_dict().items() if name in own}
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in parts.items():
        safetensors.torch.save_file({name: state[name].contiguous() for name in inside}, folder / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("built", [True, False])
async def test_a_job_that_begins_with_a_checkpoint_equals_the_plain_loop(
    followed: list[str], tmp_path: Path, built: bool
) -> None:
    torch.manual_seed(42)
    sharded(Net(), tmp_path / "weights")
    job = make_job(model=Net() if built else Net, weights=tmp_path / "weights", micro_batch_size=6)
    await assert_parity(job, 3)
    assert followed == []


async def test_what_another_processor_draws_differently_is_sent_instead(
    followed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = recipes.decode
    spoiled: list[tuple[int, ...]] = []

    def elsewhere(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        recipe, view = decode(data, dtype, shape)
        if len(spoiled) == 3 or recipe.calls[0].state is None:
            return recipe, view
        spoiled.append(shape)
        call = replace(recipe.calls[0], state=torch.Generator().manual_seed(1).get_state())
        return replace(recipe, calls=(call, *recipe.calls[1:])), view

    monkeypatch.setattr(recipes, "decode", elsewhere)
    await assert_parity(make_job(model=Net, micro_batch_size=6), 2)
    assert len(spoiled) == 3
    assert len(followed) > 3  # the rest came out right


def test_a_receiver_takes_recipes_only_where_they_belong_and_once() -> None:
    module, recorder = constructor.construct(lambda: nn.Linear(40, 30), 3)
    state = InitialState(dict(module.named_parameters()), recorder)
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in module.named_parameters()}
    frames = list(StateSender(state).frames(expected, recipes=True))
    recipes = frames[0]
    assert [frame.kind for frame in frames] == [messages.RECIPES, messages.STATE, messages.STATE_END]
    receiver = StateReceiver(expected, recipes=True)
    assert [receiver.take(frame) for frame in frames] == [False, False, True]
    assert all(torch.equal(receiver.state[name], state[name]) for name in expected)
    refused = {
        "no meaning": (StateReceiver(expected), recipes),
        "not expected": (StateReceiver({"bias": expected["bias"]}, recipes=True), recipes),
        "not valid msgpack": (StateReceiver(expected, recipes=True), Frame(messages.RECIPES, {}, [b"\xc1"])),
        "expected `bytes`": (
            StateReceiver(expected, recipes=True),
            Frame(messages.RECIPES, {}, [msgpack.packb({"weight": [3, "x"]})]),
        ),
        "matching regex": (
            StateReceiver(expected, recipes=True),
            Frame(messages.RECIPES, {}, [msgpack.packb({"weight": [b"", "x"]})]),
        ),
    }
    for what, (taker, frame) in refused.items():
        with pytest.raises(ProtocolError, match=what):
            taker.take(frame)
    with pytest.raises(ProtocolError, match="were not expected"):
        receiver.take(recipes)


def test_what_is_unequal_must_come_at_the_second_try() -> None:
    module, recorder = constructor.construct(lambda: nn.Linear(40, 30), 3)
    state = InitialState(dict(module.named_parameters()), recorder)
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in module.named_parameters()}
    sender = StateSender(state)
    recipes, values, end = sender.frames(expected, recipes=True)
    made = msgpack.unpackb(bytes(recipes.payloads[0]))
    made["weight"][1] = "0" * 64
    receiver = StateReceiver(expected, recipes=True)
    for frame in (Frame(messages.RECIPES, {}, [msgpack.packb(made)]), values):
        assert not receiver.take(frame)
    assert receiver.take(end)
    assert receiver.unequal == {"weight"}
    with pytest.raises(ProtocolError, match="weights of weight"):
        receiver.take(end)
    asked = names_of(Frame(messages.AGAIN, {}, [msgpack.packb(sorted(receiver.unequal))]), 0, set(expected))
    for frame in sender.frames(asked):
        receiver.take(frame)
    assert receiver.unequal == set()
    assert receiver.hash == sender.hash
    for wrong in (["other"], ["weight", "weight"], 3, {"weight": 1}):
        with pytest.raises(ProtocolError, match=r"not offered|asks for again"):
            names_of(Frame(messages.AGAIN, {}, [msgpack.packb(wrong)]), 0, set(expected))


def test_what_has_been_copied_is_held_no_more() -> None:
    """By a member that builds its stage of it; what has not been looked up is there for another try."""
    receiver = StateReceiver({"a": (torch.float32, (2,)), "b": (torch.float32, (3,))})
    receiver.state |= {"a": torch.ones(2), "b": torch.ones(3)}
    state = receiver.spend()
    assert (list(state), len(state)) == (["a", "b"], 2)
    assert torch.equal(state["a"], torch.ones(2))
    assert (list(state), list(receiver.state)) == (["b"], ["b"])
