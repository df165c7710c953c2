"""Examples keep what their first lines say; that they define a job, tests/test_repository.py sees."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcee
from meshcee.capture import capture
from meshcee.job import Job
from tests.rig.mesh_fixture import train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"an_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def trained_equal(job: Job, stages: int = 3) -> None:
    captured = await asyncio.to_thread(capture, job)
    assert job.micro_batch_size is not None
    found = await train(job, stages, job.micro_batch_size, captured=captured)
    expected = meshcee.plain(job)
    assert found.losses == expected.losses
    for name, tensor in found.state.items():
        assert torch.equal(tensor, expected.state_dict[name]), name


@pytest.mark.slow
async def test_the_subspace_is_what_crosses_a_cut() -> None:
    """Capture finds it by itself: eight numbers a character, where the plain transformer sends 128."""
    example = module_of("subspace")
    job = replace(example.job, steps=1, batch_size=4, micro_batch_size=2)
    costs = capture(job).costs
    sizes = {cost.boundary_bytes for cost in costs[:-1]}
    assert min(sizes) == 4 * example.CONTEXT * example.RANK
    narrow = [cost for cost in costs[:-1] if cost.boundary_bytes == min(sizes)]
    assert len(narrow) >= example.LAYERS - 1
    await trained_equal(job)


async def test_augmented_images_are_the_same_on_a_mesh() -> None:
    example = module_of("images_augmented")
    image = example.job.data[0][0]
    assert not torch.equal(image, example.job.data[0][0])  # without a seed it is another each time
    await trained_equal(replace(example.job, steps=2, eval_every=0, eval_data=None))


@pytest.mark.slow
def test_the_table_is_read_right_with_the_average() -> None:
    example = module_of("tabular")
    result = meshcee.train(example.job, local=2)
    model = example.build().eval()
    model.load_state_dict(result.ema)
    x, y = example.test_rows.tensors
    with torch.no_grad():
        assert example.accuracy(model(x), y) > 0.95


async def test_the_notebook_runs_from_its_first_cell_to_its_last() -> None:
    """Inside of a loop that runs already, as a notebook's does."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    space: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)
    assert space["equal"]
