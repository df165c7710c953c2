"""A run as spans: epochs, steps within them, recoveries that end with the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the dev extra is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshcee.callbacks import Control, called
from meshcee.callbacks.spans import Spans, spans_where_set_up
from meshcee.errors import UsageError


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where spans go in this test; the library has one such place a process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    return exporter


def plan(**more: Any) -> Any:
    return SimpleNamespace(pipelines=(SimpleNamespace(stages=(1, 2)),), peers=("a", "b"), predicted=None, **more)


def step(number: int) -> Any:
    return SimpleNamespace(step=number, step_s=0.5, loss=2.0, limit="links")


def test_steps_lie_in_their_epoch_and_a_recovery_between_two(exported: InMemorySpanExporter) -> None:
    now = 10_000_000_000
    spans, run = Spans(clock_ns=lambda: now), Control("gpt")
    spans.on_plan(run, plan())
    now += 1_000_000_000
    spans.on_step(run, step(0))
    spans.on_loss(run, "ben was lost", ["ben"])
    now += 2_000_000_000
    spans.on_change(run, plan())
    now += 1_000_000_000
    spans.on_step(run, step(1))
    spans.on_end(run, None, None)
    found = exported.get_finished_spans()
    assert [span.name for span in found] == ["step", "epoch", "recovery", "step", "epoch"]
    first, old, recovery, second, new = found
    assert first.end_time - first.start_time == 500_000_000
    for inner, outer in ((first, old), (second, new)):
        assert inner.parent is not None
        assert inner.parent.span_id == outer.context.span_id
    assert recovery.attributes["meshcee.lost"] == ("ben",)
    assert recovery.end_time - recovery.start_time == 3_000_000_000
    assert old.attributes["meshcee.run"] == "gpt"
    assert second.attributes["meshcee.step"] == 1


def test_an_error_marks_the_epoch(exported: InMemorySpanExporter) -> None:
    spans, run = Spans(), Control("gpt")
    spans.on_plan(run, plan())
    spans.on_end(run, None, "no peers are left")
    (epoch,) = exported.get_finished_spans()
    assert epoch.status.description == "no peers are left"


def test_a_command_has_spans_where_somebody_has_set_up_a_place_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans_where_set_up() == (), "nobody has"
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", TracerProvider)
    assert len(spans_where_set_up()) == 1
    assert spans_where_set_up(["opentelemetry"]) == (), "it was asked for by name already"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert spans_where_set_up() == ()


def test_by_name_it_wants_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(called(["opentelemetry"])) == 1
    monkeypatch.setattr("meshcee.callbacks.spans.LIBRARY", "no.such.library")
    with pytest.raises(UsageError, match="pip install opentelemetry-api"):
        called(["opentelemetry"])
