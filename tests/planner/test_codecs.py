"""Codecs between regions only, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.chain import layout_of
from meshcee.planner.rules import Runs, between, remarks


def plan(codec: str = "none") -> Plan:
    names = ["none", *[codec] * 3, "none"]
    stages = tuple(
        Stage(i, i + 1, (Member(f"p{i}", 4),), window=2, live_cap=2, codec_back=names[i], codec_out=names[i + 1])
        for i in range(4)
    )
    return Plan(4, (Pipeline(8, stages),))


@pytest.mark.parametrize("planned", ["bf16", "int8", "none"])
@pytest.mark.parametrize(
    ("choice", "bytes_per_s", "expected"),
    [
        ("auto", 1e9, "bf16"),
        ("auto", 1e6, "bf16-lossless"),
        ("lossless", 1e9, "none"),
        ("lossless", 1e6, "lossless"),
    ],
)
def test_all_is_exact_inside_a_region_and_coded_between_those_that_have_met(
    planned: str, choice: str, bytes_per_s: float, expected: str
) -> None:
    regions = {"p0": "home", "p1": "home", "p2": "cloud", "p3": "far"}
    codec = partial(between, choice, regions=regions, links={frozenset(("home", "cloud")): bytes_per_s})
    (chain,) = Runs(codec=codec).coded(layout_of(plan(planned)))
    assert [(c.out, c.back) for c in chain.codecs] == [("none", "none"), (expected, expected), ("none", "none")]
    assert Runs().coded(layout_of(plan(planned))) == layout_of(plan(planned))


def test_the_thinnest_link_of_two_groups_counts() -> None:
    regions = {"a": "home", "b": "cloud", "c": "far"}
    links = {frozenset(("home", "cloud")): 1e9, frozenset(("home", "far")): 1e6}
    assert between("lossless", ["a"], ["b", "c"], regions=regions, links=links) == "lossless"


def test_what_is_rounded_is_said_with_the_way_out() -> None:
    assert remarks(plan()) == remarks(plan("lossless")) == ()
    (said,) = remarks(plan("int8"))
    assert "int8" in said
    assert "--codec lossless" in said
    grouped = replace(plan().pipelines[0].stages[0], members=(Member("a", 1), Member("b", 3)))
    assert "1e-5" in remarks(replace(plan(), pipelines=(Pipeline(1, (grouped,)),)))[0]


def test_a_job_takes_known_codecs_only() -> None:
    def job(**codec: str) -> Job:
        data = [(torch.zeros(1), torch.zeros(1))] * 4
        return Job(
            nn.Linear(1, 1), nn.functional.mse_loss, data, Optimizer("SGD", lr=0.1), batch_size=4, steps=1, **codec
        )

    assert job().codec == "auto"
    for name in ("none", "lossless", "bf16", "int8", "int4", "auto"):
        assert job(codec=name).codec == name
    with pytest.raises(UsageError, match="codec must be one of none, lossless, bf16, int8, int4, auto, got 'mp3'"):
        job(codec="mp3")
