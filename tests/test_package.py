"""What must hold wherever meshcee is installed: these run against the built wheel too.

The idea: the wheel test sets MESHCEE_WHEEL_TEST, and then nothing may come from a checkout.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dht
import meshcee
import peers

pytestmark = pytest.mark.smoke

PACKAGES = (meshcee, dht, peers)
RUNS_WHEN_IMPORTED = "__main__"
OF_EXTRAS = ("aiohttp", "prometheus_client", "textual")  # which some modules of peers/cli want, and no other


def modules() -> list[str]:
    """Every module of the three packages, `__main__` files left out."""
    names = [package.__name__ for package in PACKAGES]
    for package in PACKAGES:
        names += [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [name for name in names if not name.endswith(RUNS_WHEN_IMPORTED)]


@pytest.mark.parametrize("name", modules())
def test_all_names_of_a_module_exist(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OF_EXTRAS or "MESHCEE_WHEEL_TEST" not in os.environ:
            raise
        pytest.skip(f"the wheel is tested without its extras: {error.name}")
    names = getattr(module, "__all__", [])
    assert [n for n in names if not hasattr(module, n)] == []
    assert len(names) == len(set(names))


def test_the_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("meshcee") == meshcee.__version__


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_the_wheel_test_sees_the_wheel(package: ModuleType) -> None:
    inside = Path(str(package.__file__)).is_relative_to(Path(sys.prefix))
    assert inside == ("MESHCEE_WHEEL_TEST" in os.environ)


def test_the_front_door_opens_without_torch() -> None:
    """`meshcee plan --testbed` must start on a machine without torch, and everything must start fast."""
    code = (
        "import sys, meshcee, meshcee.errors, meshcee.plan, meshcee.figures.profile; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("torch", "told"), [("2.15.0", True), ("2.10.1+cu130", True), ("2.13.9", False)])
def test_an_installation_that_breaks_the_range_of_torch_says_so_at_import(
    torch: str, told: bool, tmp_path: Path
) -> None:
    """As `pip install -U torch` or another library may leave it behind."""
    about = tmp_path / f"torch-{torch}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import meshcee"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (f"torch {torch} is installed" in done.stderr) == told
    assert ("pip install 'torch>=2.11,<2.14'" in done.stderr) == told
    strictly = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60, check=False)
    assert (strictly.returncode != 0) == told


def test_the_demo_job_is_part_of_the_package_and_trains() -> None:
    """One step over four micro-batches in a plain loop: the loss starts near that of a guess, and falls."""
    demo = importlib.import_module("meshcee._demo_job")
    job = demo.job
    assert isinstance(job, meshcee.Job)
    model, optimizer = job.model, job.optimizer.build(dict(job.model.named_parameters()))
    x, y = (tensor.repeat(job.micro_batch_size, 1) for tensor in job.data[0])
    losses = []
    for step in range(4):
        with meshcee.seeded(job.seed, step, 0):
            loss = job.loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 4.0 < losses[0] < 5.5
    assert losses[-1] < losses[0] - 0.5


def test_a_sample_begins_with_its_prompt_and_repeats() -> None:
    demo = importlib.import_module("meshcee._demo_job")
    state = demo.build().state_dict()
    text = demo.sample(state, "def ", n=8)
    assert text.startswith("def ")
    assert len(demo.encode(text)) == 4 + 8 or "    " in text
    assert text == demo.sample(state, "def ", n=8)


def test_the_command_is_installed_and_answers() -> None:
    script = Path(sys.executable).with_name("meshcee")
    for command in ([str(script)], [sys.executable, "-m", "meshcee"]):
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120, check=True)
        assert shown.stdout.strip() == f"meshcee {meshcee.__version__}"


def test_a_wrong_flag_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "meshcee", "train", "--no-such-flag"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert outcome.returncode == 2
    assert "--no-such-flag" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_the_command_line_is_there_before_torch() -> None:
    """OpenMP reads its settings when torch is loaded, and the command sets them first."""
    code = "import sys, peers.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_traceback() -> None:
    code = """
import importlib.abc, sys

class CtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from meshcee.__main__ import main
main()
"""
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (outcome.returncode, outcome.stderr) == (130, "")
