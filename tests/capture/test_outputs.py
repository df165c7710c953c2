"""An output that is taken apart and put together again is what it was, for whoever reads it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from meshcee.capture.outputs import put_together, taken_apart


class Two(NamedTuple):
    logits: Any
    rest: Any


@dataclass
class Record:
    logits: Any
    temperature: float = 2.0
    cache: Any = None


def again(output: Any) -> Any:
    tensors: list[torch.Tensor] = []
    form = taken_apart(output, tensors)
    return put_together(form, iter([tensor + 1 for tensor in tensors]))


def test_the_form_of_an_output_is_kept() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert torch.equal(again(a), a + 1)
    named = again(Two(a, [b, ("text", None)]))
    assert type(named) is Two
    assert torch.equal(named.logits, a + 1)
    assert type(named.rest) is list
    assert named.rest[1] == ("text", None)
    largest = again(torch.stack([a, b]).max(0))
    assert torch.equal(largest.values, b + 1)
    assert largest.indices.tolist() == [2, 2]
    for mapping in (again(OrderedDict(logits=a, temperature=2.0)), again(Record(a))):
        assert torch.equal(mapping.logits, a + 1)
        assert mapping["temperature"] == mapping.temperature == 2.0


def test_what_no_tensor_comes_back_of_keeps_its_place_and_says_so() -> None:
    first, held, last = again((torch.zeros(1), threading.Lock(), torch.ones(1)))
    assert [float(first), float(last)] == [1.0, 2.0]
    with pytest.raises(
        AttributeError, match=r"forward returns a lock, .* named tuples or dataclasses: return 'logits' in one"
    ):
        _ = held.logits
    assert "cache" not in again(Record(torch.zeros(1), cache=threading.Lock()))
