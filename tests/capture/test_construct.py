"""Modules built without their weights: every value as the plain constructor leaves it, and recipes that nothing can abuse."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshcee.capture import capture
from meshcee.capture.initial_state import InitialState
from meshcee.capture.recipes import constructor as module_
from meshcee.capture.recipes.constructor import construct
from meshcee.capture.recipes.initial import from_checkpoint
from meshcee.capture.recipes.recipe import MAX_LIVE, SLACK_BYTES, decode
from meshcee.errors import CaptureError, GraphError, UsageError
from meshcee.files.tensor_files import Checkpoint, TensorFile
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig import zoo
from tests.rig.resident import growth
from tests.rig.strides import ODD

SEED = 5


class Everything(nn.Module):
    """What constructors do: each default initialisation, the ones in nn.init, copies, slices, tables, other types."""

    def __init__(self) -> None:
        super().__init__()
        self.randn, self.rand = nn.Parameter(torch.randn(1, 50, 60)), nn.Parameter(torch.rand(300))
        self.embedding = nn.Embedding(100, 40, padding_idx=3)
        self.lstm = nn.LSTM(20, 30, 2)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
        )  # copies its layers
        self.linear, self.conv, self.norm = nn.Linear(40, 50), nn.Conv2d(3, 16, 3), nn.BatchNorm2d(100)
        self.orthogonal, self.truncated, self.tail = nn.Linear(40, 50), nn.Linear(40, 50), nn.Linear(40, 50)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(
            self.truncated.weight, std=0.02
        )  # looks at the values, draws again where they are too far
        nn.init.trunc_normal_(self.tail.weight, std=10, a=-1, b=3)
        nn.init.dirac_(self.conv.weight)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(30, 30))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(30, 30))
        angles = torch.outer(torch.arange(100).float(), 1 / 10000 ** (torch.arange(0, 32, 2) / 32))
        self.register_buffer("rotary", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(50, 50, dtype=torch.bool)))
        self.double, self.half = nn.Linear(30, 30).double(), nn.Linear(30, 30).to(torch.bfloat16)
        self.permuted = nn.Parameter(torch.randperm(1000).float())
        self.bernoulli = nn.Parameter(torch.bernoulli(torch.full((40, 40), 0.3)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(40, 40), 0.3))
        self.own = nn.Parameter(torch.empty(40, 40).normal_(generator=torch.Generator().manual_seed(7)))
        self.listed = nn.Parameter(torch.tensor([[float(i * j) for i in range(40)] for j in range(40)]))
        self.seen = [x.item() for x in torch.linspace(0, 0.1, 300)] + torch.linspace(0, 0.1, 300).tolist()
        with torch.no_grad():
            self.orthogonal.weight.data[3].zero_()
            self.linear.weight[4:6] = 7
            self.truncated.weight.mul_(1 / math.sqrt(2 * 12))
            self.tail.weight.copy_(self.orthogonal.weight * 2)
        self.scaled = nn.Parameter(self.tail.weight.detach().clone() * self.embedding.weight.std())
        self.tied = self.linear.weight
        self.table = torch.arange(2000).sin()  # neither parameter nor buffer


def entries(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From which size on tensors are forgotten."""
    return lambda size: monkeypatch.setattr(module_, "SMALL_BYTES", size)


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "gpt2": lambda: zoo.make("gpt2").model,  # type: ignore[dict-item,return-value]
    "vit": lambda: zoo.make("vit").model,  # type: ignore[dict-item,return-value]
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("size", [0, 1024])
@pytest.mark.parametrize("cache", [0, 64 << 20])
@pytest.mark.parametrize("name", FACTORIES)
def test_every_value_is_that_of_the_plain_constructor(
    name: str, size: int, cache: int, small: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small(size)
    monkeypatch.setattr(module_, "CACHE_BYTES", cache)
    torch.manual_seed(SEED)
    plain = FACTORIES[name]()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    module, recorder = construct(FACTORIES[name], SEED)
    assert torch.equal(torch.get_rng_state(), before)
    wanted, found = entries(plain), entries(module)
    state = InitialState(found, recorder)
    assert found.keys() == wanted.keys()
    recipes = 0
    for key, tensor in wanted.items():
        value = state[key]
        assert isinstance(found[key], nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert (value.dtype, value.stride()) == (tensor.dtype, tensor.stride())
        assert found[key].requires_grad == tensor.requires_grad
        assert torch.equal(value, tensor), key
        if (recipe := state.recipe(key)) is not None:
            recipes += 1
            assert torch.equal(made(recipe, tensor), tensor), key
    assert recipes > len(wanted) / 3
    if isinstance(plain, Everything):
        assert module.seen == plain.seen
        assert torch.equal(module.table, plain.table)
        assert module.tied is module.linear.weight
    assert copy.deepcopy(module) is not module  # as capture does


def made(recipe: bytes, like: torch.Tensor) -> torch.Tensor:
    found, view = decode(recipe, like.dtype, tuple(like.shape))
    return found.tensor(view)


def test_a_constructor_that_fails_is_named_with_its_line() -> None:
    def broken() -> nn.Module:
        return nn.Linear(300, 300).weight.numpy()  # type: ignore[return-value]

    with pytest.raises(CaptureError, match=r"Job.model\(\) failed at .*test_construct.py:\d+.*give the built module"):
        construct(broken, 0)
    with pytest.raises(UsageError, match="function that returns one"):
        construct(lambda: 3, 0)  # type: ignore[arg-type,return-value]


def test_memory_stays_far_below_the_model() -> None:
    """64 layers of 4 MiB, a cache of 64 MiB."""

    def big() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(64)))

    construct(lambda: nn.Linear(300, 300), SEED)  # what torch imports on first use
    grown = growth()
    module, recorder = construct(big, SEED)
    state = InitialState(dict(module.named_parameters()), recorder)
    total = 0.0
    for name in state:
        total += float(state[name].abs().sum())
    assert total > 0
    assert grown() < 96 << 20  # of 256 MiB


@pytest.mark.parametrize("name", [name for name, tensor in ODD.items() if tensor.shape == (1,)])
def test_a_constant_of_a_recipe_may_have_any_strides(name: str) -> None:
    """As a constructor may read one from a table of its own."""

    def factory() -> nn.Module:
        layer = nn.Linear(300, 300)
        with torch.no_grad():
            layer.weight.mul_(ODD[name])
        return layer

    module, recorder = construct(factory, SEED)
    recipe = InitialState(dict(module.named_parameters()), recorder).recipe("weight")
    torch.manual_seed(SEED)
    wanted = factory().get_parameter("weight").detach()
    assert recipe is not None
    assert torch.equal(made(recipe, wanted), wanted)


# -- hostile recipes -----------------------------------------------------------------------------------------------------


@functools.cache
def genuine() -> tuple[bytes, torch.Tensor]:
    """A recipe with random draws, a rejection loop, constants and views."""

    def factory() -> nn.Module:
        layer = nn.Linear(300, 300)
        nn.init.trunc_normal_(layer.weight, std=1, a=-1, b=1)
        with torch.no_grad():
            layer.weight[3:9].mul_(torch.arange(300).float())
        return layer

    module, recorder = construct(factory, SEED)
    recipe = InitialState(dict(module.named_parameters()), recorder).recipe("weight")
    torch.manual_seed(SEED)
    assert recipe is not None
    return recipe, factory().weight.detach()


def tree() -> Any:
    return msgpack.unpackb(genuine()[0], raw=False)


# A recipe is [version, bytes of storages, calls, storage, view]; a call [operator, args, kwargs, makes, state].
REFUSED: dict[str, Callable[[Any], Any]] = {
    "another version": lambda d: d.__setitem__(0, 9),
    "an operator that loads files": lambda d: d[2][0].__setitem__(0, "from_file.default"),
    "an operator of graphs": lambda d: d[2][0].__setitem__(0, "linalg_qr.default"),
    "an attribute": lambda d: d[2][0].__setitem__(0, "__class__.default"),
    "a huge storage": lambda d: d[1].__setitem__(0, 1 << 40),
    "a negative storage": lambda d: d[1].__setitem__(0, -1),
    "storages without end": lambda d: d[1].extend([8] * 300),
    "calls without end": lambda d: d[2].extend(d[2] * 300),
    "another shape": lambda d: d[4].__setitem__(2, [100, 300]),
    "another type": lambda d: d[4].__setitem__(1, "float64"),
    "a view beyond its storage": lambda d: d[4].__setitem__(4, 10),
    "a view with huge strides": lambda d: d[4].__setitem__(3, [1 << 40, 1]),
    "a negative stride": lambda d: d[4].__setitem__(3, [-300, 1]),
    "a dangling storage": lambda d: d[4].__setitem__(0, 99),
    "a result that is another storage": lambda d: d.__setitem__(3, 1),
    "no generator": lambda d: next(c for c in d[2] if c[4]).__setitem__(4, None),
    "an impossible generator": lambda d: next(c for c in d[2] if c[4]).__setitem__(4, b"\xff" * 5056),
    "a short generator": lambda d: next(c for c in d[2] if c[4]).__setitem__(4, b"\x00" * 8),
    "a generator for who draws nothing": lambda d: next(c for c in d[2] if not c[4]).__setitem__(4, b"\x00" * 5056),
    "an argument that nobody takes": lambda d: d[2][0][2].__setitem__("out", 1),
    "a device": lambda d: d[2][0][2].__setitem__("device", "cuda"),
    "too many arguments": lambda d: d[2][0].__setitem__(1, [1] * 50),
    "a string": lambda d: d[2][0][1].__setitem__(0, "/etc/passwd"),
    "a constant without bytes": lambda d: d[2][0][1].__setitem__(0, {"c": ["float32", [1 << 20], b""]}),
    "a large tensor out of nothing": lambda d: d[2].append(["zeros.default", [[1 << 40]], {}, [0], None]),
    "a storage that is made and was there": lambda d: d[2].append(["zeros.default", [[90000]], {}, [0], None]),
    "what is made, thrown away": lambda d: d[2].append(["zeros.default", [[1 << 20]], {}, [None], None]),
    "too few results": lambda d: d[2].append(["zeros.default", [[90000]], {}, [], None]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_recipe_is_refused_before_it_costs_memory(name: str) -> None:
    document = tree()
    REFUSED[name](document)
    data = msgpack.packb(document)
    like = genuine()[1]
    grown = growth()
    with pytest.raises(GraphError):
        decode(data, like.dtype, tuple(like.shape))
    assert grown() < 10 << 20


def followed_or_refused(data: bytes) -> None:
    like = genuine()[1]
    grown = growth()
    try:
        value = made(data, like)
    except GraphError:
        return
    assert (value.dtype, value.shape) == (like.dtype, like.shape)
    assert grown() < 2 * (MAX_LIVE * like.nbytes + SLACK_BYTES)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
)
trees = st.recursive(
    scalars,
    lambda t: st.lists(t, max_size=4) | st.dictionaries(st.sampled_from(["v", "c", "t", "f", "x"]), t, max_size=2),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_recipe_with_any_part_replaced_is_refused_or_followed(data: st.DataObject) -> None:
    document = tree()
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = document
        for _ in range(data.draw(st.integers(1, 6))):
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if not isinstance(at[key], list | dict) or not at[key] or data.draw(st.booleans()):
                at[key] = data.draw(trees)
                break
            at = at[key]
    followed_or_refused(msgpack.packb(document))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_recipe_with_bytes_changed_is_refused_or_followed(data: st.DataObject) -> None:
    raw = bytearray(genuine()[0])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    followed_or_refused(bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw))


# -- jobs that begin with a checkpoint -------------------------------------------------------------------------------------


def save(model: nn.Module, path: Path, without: str = "", **more: torch.Tensor) -> Path:
    state = {n: t for n, t in {**model.state_dict(), **more}.items() if n != without}
    with TensorFile(path, {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}) as file:
        for name, tensor in state.items():
            file.write(name, tensor)
    return path


def test_a_checkpoint_is_loaded_as_load_state_dict_does_tied_names_and_types_included(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9, bias=False))
        model[2].weight = model[0].weight
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        return model

    other = tied()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    names = {n: "0.weight" if n == "2.weight" else n for n in other.state_dict()}
    layout = {n: (t.dtype, tuple(t.shape)) for n, t in entries(other).items() if n != "2.weight"}
    plain = tied()
    plain.load_state_dict(other.state_dict())
    for absent in ("0.weight", "2.weight", ""):
        path = save(copy.deepcopy(other).double(), tmp_path / "model.safetensors", without=absent)
        state = from_checkpoint(Checkpoint.at(path), names, layout, {"table": torch.arange(3.0)})
        assert state.keys() == layout.keys()
        for name, (dtype, _) in layout.items():
            assert state[name].dtype == dtype
            assert torch.equal(state[name], entries(plain)[name])


@pytest.mark.slow
def test_what_is_captured_begins_with_the_weights(tmp_path: Path) -> None:
    job = zoo.make("lstm")
    torch.manual_seed(77)
    other = zoo.make("lstm").model
    assert isinstance(other, nn.Module)
    path = save(other, tmp_path / "model.safetensors")
    for model in (job.model, lambda: zoo.make("lstm").model):
        captured = capture(replace(job, model=model, weights=path))
        assert set(captured.persistent) == set(other.state_dict())
        for name in captured.persistent:
            assert torch.equal(captured.state[name], other.state_dict()[name])


def test_what_does_not_fit_is_one_error_with_the_names(tmp_path: Path) -> None:
    def job(**changes: Any) -> Job:
        samples = [(torch.ones(3), 0)] * 4
        settings = {"model": nn.Linear(3, 2), "loss": nn.functional.cross_entropy, "data": samples, "batch_size": 2}
        return Job(**{**settings, "optimizer": Optimizer("SGD", lr=0.1), "steps": 1, **changes})

    path = save(
        nn.Linear(3, 4), tmp_path / "w.safetensors", without="bias", **{f"x{i}": torch.ones(1) for i in range(5)}
    )
    with pytest.raises(UsageError, match="fit") as error:
        capture(job(weights=path))
    for part in ("'weight' is (4, 3) there and (2, 3) in the model", "lacks 'bias'", "'x0', 'x1', 'x2' and 2 more"):
        assert part in str(error.value)
    with pytest.raises(UsageError, match="no weights at"):
        capture(job(weights=tmp_path / "nothing"))
