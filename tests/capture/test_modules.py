"""What shows in a model before it is traced is told at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError
from tests.capture.exactness import job_of


def test_modules_that_are_not_ready_are_told_before_anything_is_traced() -> None:
    nested = nn.Sequential(nn.Linear(4, 4))
    nested[0].compile(backend="eager")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    graph = nn.Linear(4, 4)
    graph.register_buffer("edges", torch.eye(4).to_sparse())
    hiding = nn.Linear(4, 4)
    hiding.parameters = nn.ParameterList(hiding.parameters())  # type: ignore[assignment]
    for model, says in (
        (graph, "'edges' is sparse.*register edges.to_dense"),
        (hiding, "the model has a submodule 'parameters', which is the name of a method of nn.Module.* another name"),
        (nn.LazyLinear(4), "'weight' has no shape yet; run one batch through the model"),
        (torch.compile(nn.Linear(4, 4), backend="eager"), "the model is compiled.*without torch.compile"),
        (nested, "module '0' is compiled"),
        (scripted, "the model is scripted; pass the module"),
    ):
        with pytest.raises(CaptureError, match=says):
            capture(job_of(model))
