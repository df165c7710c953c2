"""Random jobs under random blows (benchmarks/random_jobs.py): some seeds, and that a difference of any kind is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import random_jobs
from benchmarks.random_jobs import FINE, play
from tests.rig.random_jobs import Drawn, draw
from tests.rig.random_layers import KINDS
from tests.rig.reference import Reference, reference


def outcomes(seeds: range) -> list[tuple[int, str]]:
    """Of those that were not as the plain loop's; most are trained."""
    found = [play(seed) for seed in seeds]
    assert sum(one["outcome"] == "equal" for one in found) >= len(seeds) / 2
    return [(one["seed"], one["outcome"]) for one in found if one["outcome"] not in FINE]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (2, 4, 6, 12, 14))])
def test_random_jobs_equal_a_plain_loop(first: int) -> None:
    assert outcomes(range(first, first + 2)) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_random_jobs_equal_a_plain_loop() -> None:
    assert outcomes(range(100, 300)) == []


def drawn(**changes: Any) -> Drawn:
    """A job with everything that is compared, whatever the draw of seed 0 is."""
    usual = {"optimizer": "AdamW", "options": {"lr": 1e-3}, "groups": {}, "schedule": None, "precision": "fp32"}
    sizes = {"samples": 40, "micro": 2, "micros": 2, "steps": 5, "breaks_at": None, "made": False, "reduction": "mean"}
    layers = {"layers": ("mlp", "layer_norm"), "ema": 0.9, "eval_ema": False, "eval_every": 2, "audit": 0.0}
    return replace(draw(0), **{**usual, **sizes, **layers, "clip": None, "rates": {}, **changes})


@pytest.mark.slow
def test_what_callbacks_ask_for_in_steps_that_are_taken_back_counts_once() -> None:
    """A peer is killed while it is audited, after the first step has halved the rate: that step is told of once more."""
    one = drawn(
        **{
            "seed": 3281,
            "width": 6,
            "length": 3,
            "inputs": "words",
            "layers": ("parameter_dict", "bilinear", "permute"),
        },
        **{"loss": "l1", "micro": 3, "micros": 4, "steps": 12, "samples": 25, "tied": False, "several": False},
        **{"optimizer": "RAdam", "options": {"lr": 0.003}, "groups": {"layers.1*|head*": {"lr": 0.001}}, "clip": 0.5},
        **{"ema": None, "eval_every": 0, "audit": 0.3, "job_seed": 0, "codec": "none", "checkpoint_every": 1},
        **{
            "rates": {2: ("set", 0.0), 0: ("scale", 0.5)},
            "peers": 4,
            "pace": 1e5,
            "augmented": False,
            "weighted": False,
        },
    )
    found = play(3281, drawn=one)
    assert found["outcome"] == "equal"
    assert any("killed" in blow for blow in found["blows"])


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("turn", range(8))
def test_every_kind_of_layer_is_trained(turn: int) -> None:
    found = play(1, 0, drawn(layers=tuple(KINDS)[turn::8], eval_every=0, ema=None, micro=2, micros=2, steps=2))
    assert found["outcome"] == "equal", found


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("what", ["totals", "state", "ema", "metrics", "moments"])
def test_a_difference_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*job: Any, **how: Any) -> Reference:
        found = reference(*job, **how)
        value = getattr(found, what)
        if what == "metrics":
            value[-1][1]["mass"] += 1e-9
        elif what == "totals":
            value[-1] += 1e-9
        else:
            tensor = value[max(value, key=lambda name: value[name].numel())]
            tensor.view(-1)[0] = torch.nextafter(tensor.view(-1)[0], torch.tensor(9.0))
        return found

    assert play(1, 0, drawn())["outcome"] == "equal"
    monkeypatch.setattr(random_jobs, "reference", other)
    found = play(1, 0, drawn())["outcome"]
    names = {"totals": "other losses", "metrics": "evaluations", "moments": "optimizer"}
    assert names.get(what, what) in found
