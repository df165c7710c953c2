"""Drawing: pure, complete, without repetition inside a data epoch. Reading: a sample follows from (seed, step, index)."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import default_collate

from meshcee.eager import plain, plain_steps
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.sampling import batched, call_model, inputs_of, rebuild, unrepeatable
from meshcee.sampling.order import draw, read


def test_a_data_epoch_holds_every_sample_at_most_once_and_drops_the_incomplete_batch() -> None:
    drawn = [i for step in range(3) for i in draw(5, 10, 3, step)]
    assert len(drawn) == len(set(drawn)) == 9
    assert set(drawn) <= set(range(10))


def test_every_data_epoch_and_seed_has_its_own_order() -> None:
    first, second = ([i for s in range(4) for i in draw(5, 16, 4, s + 4 * e)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second
    assert draw(6, 16, 4, 0) != draw(5, 16, 4, 0)


def test_any_step_can_be_drawn_again() -> None:
    assert draw(1, 100, 8, 57) == draw(1, 100, 8, 57)


def test_the_order_is_that_of_all_runs_before() -> None:
    """A run that is resumed by a later version sees the same samples."""
    drawn = [i for step in range(30) for i in draw(7, 1000, 32, step)]
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == "bfe4f1fa0e31b6ca"
    assert all(type(i) is int for i in drawn)


class Augmented:
    """Draws from all three generators, as augmentations of torchvision and albumentations do."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return i, random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), float(torch.randn(()))


DATA = Augmented()


def states() -> tuple[str, str, bytes]:
    return repr(random.getstate()), repr(np.random.get_state()), torch.default_generator.get_state().numpy().tobytes()


@given(st.integers(0, 2**40), st.integers(-1, 2**40), st.lists(st.integers(0, 31), min_size=1, max_size=8), st.data())
def test_a_sample_is_the_same_whenever_and_beside_whatever_it_is_read(
    seed: int, step: int, indices: list[int], data: st.DataObject
) -> None:
    alone = {i: read(DATA, [i], seed, step)[0] for i in indices}
    np.random.normal(), random.gauss(0, 1), torch.randn(data.draw(st.integers(0, 3)))  # half a pair is left over
    before = states()
    assert read(DATA, indices, seed, step) == [alone[i] for i in indices]
    assert states() == before


def test_each_step_seed_and_sample_draws_its_own_numbers() -> None:
    found = [sample[1:] for seed in (0, 1) for step in (-1, 0, 1) for sample in read(DATA, range(4), seed, step)]
    for column in zip(*found):
        assert len(set(column)) == 24


def test_the_callers_generators_are_put_back_when_a_sample_cannot_be_read() -> None:
    before = states()
    with pytest.raises(UsageError):
        read([0, 1], [0, 5], 0, 0)
    assert states() == before


def test_threads_do_not_disturb_one_another() -> None:
    """The owner's data is read by one thread while others in its process run seeded forwards."""
    expected = [read(DATA, range(16), 0, step) for step in range(40)]
    gate = threading.Barrier(4)

    def all_steps(_: int) -> list[Any]:
        gate.wait(10)
        return [read(DATA, range(16), 0, step) for step in range(40)]

    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(all_steps, range(4)))


@pytest.mark.slow
def test_another_process_reads_the_same() -> None:
    code = "from tests.sampling.test_sampling import DATA, read; print(read(DATA, range(4), 5, 6))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == repr(read(DATA, range(4), 5, 6))


@pytest.mark.slow
def test_nothing_of_ours_draws_from_the_generator_that_random_shares() -> None:
    """Another thread's draw would come between those of a sample. `import` all that an owner's process runs."""
    code = """
import random, sys
import peers.cli.main, peers.node.assemble, dht.kademlia, peers.transport.p2p.libp2p
shared = [
    name for name, module in sorted(sys.modules.items())
    if name.split('.')[0] in ('meshcee', 'dht', 'peers') or name.startswith('hivemind.dht.')
    for value in vars(module).values() if getattr(value, '__self__', None) is random._inst
]
print(shared, dht.kademlia.hivemind.dht.node.random is random, dht.kademlia.hivemind.dht.routing.random is random)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] False False"


@dataclass
class Row:
    x: torch.Tensor
    y: torch.Tensor


def test_a_collate_may_change_its_samples() -> None:
    """One object may be in a batch several times, and be kept for another."""
    everything = torch.arange(8.0).reshape(4, 2)

    def collate(samples: list[Any]) -> Any:
        for sample in samples:
            sample["x"] += 1
            sample["rows"][0].x.mul_(2)
            sample["list"].append(0)
            sample["array"][:] = 7
        assert all(len(sample["list"]) == 1 for sample in samples)
        ys = [sample.pop("y") for sample in samples]
        return torch.stack([s["x"] + s["rows"][0].x for s in samples]), torch.stack(ys)

    lock = threading.Lock()  # no copy of it can be made
    row = Row(everything[0], everything[1])
    sample = {"x": everything[2], "y": everything[3], "rows": (row,), "list": [], "array": np.zeros(2), "lock": lock}
    found = [batched([sample] * 3, 0, step=1, collate=collate) for _ in range(2)]
    assert torch.equal(found[0][0], torch.tensor([[5.0, 8.0]] * 3))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(everything, torch.arange(8.0).reshape(4, 2))
    assert not sample["list"]
    assert not sample["array"].any()


class Boxes(NamedTuple):
    corners: torch.Tensor
    kind: int


@pytest.mark.parametrize("collates", [False, True])
def test_a_named_tuple_stays_one(collates: bool) -> None:
    """As torch's default_collate has it."""
    samples = [(torch.ones(2), {"boxes": Boxes(torch.ones(4) * i, i)}) for i in range(3)]
    _, y = batched(samples, 0, collate=default_collate if collates else None)
    assert type(y["boxes"]) is Boxes
    assert y["boxes"].kind.tolist() == [0, 1, 2]
    again = rebuild(y, "y", {name: tensor[1:] for name, tensor in inputs_of((None, y)).items()})
    assert type(again["boxes"]) is Boxes
    assert again["boxes"].corners.tolist() == [[1.0] * 4, [2.0] * 4]


KINDS: dict[str, Callable[[int], Any]] = {
    "float": lambda i: i + 0.1,
    "int": lambda i: i,
    "bool": lambda i: i % 2 == 0,
    "float32 of NumPy": lambda i: np.float32(i + 0.1),
    "float64 of NumPy": lambda i: np.float64(i + 0.1),
    "int32 of NumPy": lambda i: np.int32(i),
    "array": lambda i: np.full((2,), i, np.float16),
    "tensor": lambda i: torch.full((2, 3), i + 0.1),
    "no dimension": lambda i: torch.tensor(i + 0.1),
    "list": lambda i: [i + 0.1, i],
}
LEAVES = st.sampled_from(sorted(KINDS))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
)


def of_tree(tree: Any, i: int) -> Any:
    if isinstance(tree, str):
        return KINDS[tree](i)
    return {k: of_tree(v, i) for k, v in tree.items()} if isinstance(tree, dict) else tuple(of_tree(v, i) for v in tree)


@given(TREES)
def test_a_micro_batch_is_what_torchs_default_collate_makes_of_it(tree: Any) -> None:
    """Python's floats were float32 here, and are float64 there."""
    samples = [(torch.ones(2), of_tree(tree, i)) for i in range(3)]
    found, theirs = inputs_of((None, batched(samples, 0)[1])), inputs_of((None, default_collate(samples)[1]))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in theirs.items()
    }
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.items())


@pytest.mark.parametrize("y", [0.5, {"a": (1, 0.5)}, (np.float32(1.5), 2)], ids=str)
def test_the_plain_loop_collates_alike(y: Any) -> None:
    seen: list[Any] = []

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        seen.append({name: tensor.dtype for name, tensor in inputs_of((None, target)).items()})
        return output.sum()

    samples = [(torch.ones(2), y)] * 4
    plain(Job(nn.Linear(2, 1), loss, samples, Optimizer("SGD", lr=0.1), batch_size=4, steps=1))
    theirs = inputs_of((None, default_collate(samples)[1]))
    assert seen == [{name: tensor.dtype for name, tensor in theirs.items()}]
    assert {name: tensor.dtype for name, tensor in inputs_of((None, batched(samples, 0)[1])).items()} == seen[0]


def test_a_column_of_floats_is_as_hugging_faces_collator_has_it() -> None:
    x, y = batched([{"x": [0.1, 0.2], "label": 0.1}] * 2, 0)
    assert (x["x"].dtype, y.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        ((1.0, 2.0), (1.0, 2.0, 3.0), "at x: 2 and 3 elements; pad them, or say collate"),
        ([1.0, 2.0], [1.0], "at x: 2 and 1 elements; pad them"),
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "at x: not all have b; give all"),
        ({"a": 1.0, "b": 2.0}, {"b": 2.0}, "at x: not all have a; give all"),
        ({"a": (1.0,)}, {"a": (1.0, 2.0)}, r"at x\.a: 1 and 2 elements"),
        ({"a": 1.0}, [1.0], "at x: a dict and a list; give all samples"),
        ((1.0,), None, "at x: a tuple and a NoneType"),
        ((1.0,), {0: 1.0}, "at x: a tuple and a dict"),
    ],
)
def test_samples_of_other_parts_are_refused_and_not_cut(first: Any, other: Any, says: str) -> None:
    data = [(first, 0.0), (other, 0.0)]
    with pytest.raises(UsageError, match=f"samples cannot be stacked {says}"):
        batched(data, 0)
    job = Job(nn.Linear(1, 1), nn.functional.mse_loss, data, Optimizer("SGD", lr=0.1), batch_size=2, steps=1, seed=0)
    with pytest.raises(UsageError, match="differ in their names or numbers of elements"):
        next(plain_steps(job))


def test_rows_that_are_dicts_are_a_pair() -> None:
    rows = [{"ids": [i, 2], "mask": None, "label": i} for i in range(3)]
    x, y = batched(rows, 0)
    assert x == {"ids": x["ids"], "mask": None, "label": x["label"]}
    assert x["ids"].tolist() == [[0, 2], [1, 2], [2, 2]]
    assert y.tolist() == x["label"].tolist() == [0, 1, 2]
    assert y.data_ptr() != x["label"].data_ptr(), "what forward writes there is not the target"
    assert batched([row | {"labels": 9} for row in rows], 0)[1].tolist() == [9, 9, 9]
    y = batched([{"ids": row["ids"]} for row in rows], 0)[1]
    assert y["ids"].tolist() == x["ids"].tolist()
    with pytest.raises(UsageError, match="rows differ in their columns: not all have mask"):
        batched([rows[0], {"ids": [1, 2], "label": 1}], 0)
    with pytest.raises(UsageError, match=r"must be a pair .* and is a dict"):
        batched([(1, 2), rows[0]], 0)


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch["image"] + 1


@pytest.mark.parametrize("rows", [True, False])
def test_a_forward_that_takes_a_whole_dict_is_told_how_to_give_it(rows: bool) -> None:
    samples: list[Any] = [{"image": 1.0, "label": 0}, {"image": 2.0, "label": 1}]
    if not rows:
        samples = [({"image": row["image"]}, row["label"]) for row in samples]
    with pytest.raises(
        UsageError,
        match=r"of Whole has one argument, 'batch': .* in a tuple, data\[i\] = \(\(\{'image': \.\.\.\},\), y\)",
    ):
        call_model(Whole(), batched(samples, 0)[0])
    x, _ = batched([(({"image": i},), i) for i in range(2)], 0)
    assert call_model(Whole(), x).tolist() == [1, 2]


class Listed(nn.Module):
    def forward(self, parts: Any, scale: float = 1.0) -> Any:
        return parts[0] + parts[1]


def test_parts_of_a_tuple_that_forward_cannot_take_are_refused() -> None:
    """A DataLoader gives the model a list of them."""
    samples = [([torch.ones(2), torch.ones(2), torch.ones(2)], 0)] * 2
    with pytest.raises(UsageError, match=r"3 here, and forward of Listed takes 2: .* data\[i\] = \(\(x,\), y\)"):
        call_model(Listed(), batched(samples, 0)[0])
    assert call_model(Listed(), batched([((x,), y) for x, y in samples], 0)[0]).tolist() == [[2.0, 2.0]] * 2


class Keeps:
    """A row, once it is read, is kept as `draw` has changed it."""

    def __init__(self, draw: Callable[[], Any], keeps: bool = True) -> None:
        self._draw, self._keeps = draw, keeps
        self._kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._kept.get(i)
        if row is None:
            row = torch.full((4,), float(i)) + float(self._draw())
            if self._keeps:
                self._kept[i] = row
        return row, row.sum()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.normal, lambda: torch.randn(())])
def test_data_that_keeps_what_it_draws_is_refused(draw: Callable[[], Any]) -> None:
    def job(data: Any) -> Job:
        return Job(nn.Linear(4, 1), nn.functional.mse_loss, data, Optimizer("SGD", lr=0.1), batch_size=4, steps=1)

    with pytest.raises(UsageError, match=r"data\[\d+\] draws random numbers when it is read first, and not when"):
        unrepeatable(job(Keeps(draw)))
    assert unrepeatable(job(Keeps(draw, keeps=False))) is None
    assert unrepeatable(job(Keeps(lambda: 1.0))) is None
