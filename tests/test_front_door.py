"""What a user's script, notebook or terminal meets: the API's names, one-line results, and errors that name the user's line."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcee
from meshcee.errors import CaptureError, MeshceeError, UsageError
from meshcee.sampling.order import read
from peers.owner.result import Result
from tests.peers.member.test_training import Pairs, make_job

HERE = re.escape(__file__)
ROOT = Path(__file__).parents[1]


def test_dir_lists_the_api() -> None:
    assert sorted(dir(meshcee)) == sorted(meshcee.__all__)
    assert all(hasattr(meshcee, name) for name in dir(meshcee))


def test_a_result_is_shown_in_one_line() -> None:
    result = Result(losses=[0.5] * 1000, state={"w": torch.zeros(1000, 1000)}, run="20260101-job")
    assert repr(result) == "Result(1000 steps, loss 0.5000 -> 0.5000, run 20260101-job)"


# -- errors of the user's own code ---------------------------------------------------------------------------------


def fails(*_: Any) -> Any:
    raise ValueError("mine")


class Bad(Pairs):
    def __getitem__(self, i: int) -> Any:
        return fails() if i % 96 > 50 else super().__getitem__(i)


class Ragged(Pairs):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return torch.as_tensor(x).repeat(2) if i == 95 else x, y


class Raises(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fails(x)  # type: ignore[no-any-return]


LINE = rf"failed at {HERE}:\d+: ValueError: mine"
CASES = {
    "data": ({"data": Bad(96)}, rf"data\[\d+\] {LINE}|data\[\d+\] of step 1 {LINE}"),
    "weight": ({"weight": fails}, f"Job.weight {LINE}"),
    "loss": ({"loss": fails}, f"the loss {LINE}"),
    "model": ({"model": Raises()}, f"the model {LINE}"),
    "metric": ({"eval_data": Pairs(6), "metrics": {"bad": fails}}, f"metric 'bad' {LINE}"),
    "schedule, at once": ({"schedule": meshcee.Schedule("LambdaLR", lr_lambda=fails)}, f"LambdaLR {LINE}"),
    "schedule, later": (
        {"schedule": meshcee.Schedule("LambdaLR", lr_lambda=lambda step: fails() if step else 1.0)},
        f"the schedule, after step 1 {LINE}",
    ),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
def test_an_error_of_the_users_code_names_its_line_and_keeps_its_cause(case: str) -> None:
    changes, message = CASES[case]
    with pytest.raises(UsageError, match=message) as caught:
        meshcee.train(make_job(steps=2, **changes), local=2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.exit_code == 2


def test_what_only_capture_cannot_do_is_still_told_by_capture() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = torch.nn.Embedding(50, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.emb(x)
            return made * 2 if made.sum() > 0 else made

    with pytest.raises(CaptureError, match="branch"):
        meshcee.capture(make_job(model=Branches(), loss=lambda out, y: out.sum()))


def test_an_error_without_a_line_of_python_names_the_sample_alone() -> None:
    with pytest.raises(UsageError, match=r"^data\[3\] of step 8 failed: IndexError: list index out of range$"):
        read([], [3], 0, 7)


def test_samples_that_cannot_be_stacked_are_named() -> None:
    with pytest.raises(
        UsageError, match=r"data\[i\] of step \d for i in \[\d+(, \d+)*\]: samples cannot be stacked at x"
    ):
        meshcee.train(make_job(data=Ragged(96), steps=4, micro_batch_size=6), local=1)


@pytest.mark.slow
def test_the_command_names_the_line_and_shows_the_traceback_when_asked(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from tests.peers.member.test_training import Pairs, make_job\n"
        "class Bad(Pairs):\n"
        "    def __getitem__(self, i):\n"
        "        return 1 / 0\n"
        "job = make_job(data=Bad(96))\n"
    )
    command = [sys.executable, "-m", "meshcee", "train", str(job), "--local", "1"]
    environment = {**os.environ, "MESHCEE_HOME": str(tmp_path / "home")}
    for level in ("warning", "debug"):
        done = subprocess.run(
            command, env={**environment, "MESHCEE_LOG": level}, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2
        assert f"meshcee: data[0] failed at {job}:4: ZeroDivisionError: division by zero" in done.stderr
        assert ("return 1 / 0" in done.stderr) == (level == "debug")


# -- around join ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_no_exception_group_reaches_who_joins() -> None:
    async def trains() -> None:
        async with meshcee.join(local=2) as mesh:
            async for _ in mesh.train(make_job(data=Late(96), steps=50)):
                pass

    with pytest.raises(UsageError, match=LINE):
        await trains()
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with meshcee.join(local=1):
            raise mine
    assert caught.value is mine
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), meshcee.join(local=1):
            await asyncio.Event().wait()
    with pytest.raises(MeshceeError, match="give the token"):
        await meshcee.join().__aenter__()


class Late(Pairs):
    """Fails after capture and profiling, while the run is on its way."""

    reads = 0

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return fails() if self.reads > 200 else super().__getitem__(i)


async def test_train_works_where_a_loop_runs_already_as_in_a_notebook() -> None:
    result = meshcee.train(make_job(steps=2), local=2)
    assert len(result.losses) == 2
    with pytest.raises(UsageError, match="the loss"):
        meshcee.train(make_job(loss=fails), local=1)


@pytest.mark.slow
def test_ctrl_c_ends_a_training_beside_a_running_loop() -> None:
    script = """
import asyncio, os, signal
import meshcee
from tests.peers.member.test_training import make_job
async def cell():
    meshcee.train(make_job(steps=100000), local=2, on_report=lambda r: r.step == 3 and os.kill(os.getpid(), signal.SIGINT))
try:
    asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted\n", done.stderr


# -- what the documents say ----------------------------------------------------------------------------------------


def test_every_dotted_name_of_the_documents_is_there_after_one_import() -> None:
    texts = [file.read_text() for file in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"))]
    names = {found for text in texts for found in re.findall(r"`(meshcee(?:\.[a-z]\w*)+)(?=[`(])", text)}
    assert "meshcee.sampling.read" in names
    code = f"import meshcee\nfor name in {sorted(names)!r}: eval(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class Foreign(meshcee.Callback):
    def on_step_end(self) -> None:
        raise AssertionError("nobody calls it")


UNGUARDED = """
import torch, meshcee

class Rows:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.ones(2) * i, torch.ones(1)

job = meshcee.Job(
    model=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, data=Rows(), optimizer=meshcee.Optimizer("SGD", lr=0.1),
    batch_size=4, micro_batch_size=2, steps=2, workers=1, verify=False,
)
meshcee.train(job, local=1)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_that_reads_in_other_processes_is_told_what_to_write(tmp_path: Path) -> None:
    """Each process that reads runs the file anew, and would train as well."""
    (tmp_path / "job.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "job.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 1
    assert "this process reads data for another one, and runs your file anew" in done.stderr
    assert 'put all that trains under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"device": "cuda:99"}, r"device 'cuda:99' is not usable here: .*so try cpu"),
        ({"device": "gpu"}, r"device 'gpu' is not usable here; a device is auto, cpu, cuda:N or mps, so try cpu"),
        ({"local": "2"}, "local='2': how many peers"),
        ({"local": -1}, "local=-1: how many peers"),
        ({"stages": "2"}, "stages='2': how many stages"),
        ({"plan": "plan.json"}, "plan is a meshcee Plan, .* not a str: of a file write"),
        ({"early_stop": "loss"}, "patience='loss': a number of evaluations"),
        ({"keep_best": True}, r"KeepBest\(True\): the metric is a text"),
        (
            {"callbacks": [Foreign()]},
            "Foreign.on_step_end is no event of a run, so nobody calls it: the events are on_begin, ",
        ),
        ({"callbacks": meshcee.EarlyStop()}, r"callbacks is a list: callbacks=\[meshcee\.EarlyStop\(\)\]"),
        ({"callbacks": [lambda report: None]}, r"callbacks is called with \(run, report\): too many positional"),
    ],
)
def test_what_train_is_told_wrong_is_one_sentence(told: dict[str, Any], says: str) -> None:
    with pytest.raises(MeshceeError, match=says):
        meshcee.train(make_job(), **{"local": 1, **told})


@pytest.mark.parametrize("call", [meshcee.train, meshcee.plain, meshcee.check, meshcee.capture])
def test_what_is_no_job_is_told_so(call: Any) -> None:
    with pytest.raises(UsageError, match=r"meshcee\.Job\(model=\.\.\., loss=\.\.\., data=\.\.\.\); got str"):
        call("job.py", **({"local": 1} if call is meshcee.train else {}))
