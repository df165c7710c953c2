"""An owner that is killed goes on where it was; what a run leaves loads elsewhere. With real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from meshcee.files.home import Home
from peers.state.checkpoint import CheckpointStore
from tests.mesh.harness import meshcee, peers, training, wait_until
from tests.mesh.jobs import make_job
from tests.rig.reference import reference

STEPS = 60
JOB = """
from dataclasses import replace
from tests.mesh.jobs import make_job
job = replace(make_job({case!r}), steps={steps}, checkpoint_every=5)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cnn-adamw", "noisy-adamw"])
def test_a_killed_owner_resumes_on_other_stages_bit_for_bit(tmp_path: Path, case: str) -> None:
    job_file, out, home = tmp_path / "job.py", tmp_path / "out.safetensors", Home(tmp_path / "home")
    job_file.write_text(JOB.format(case=case, steps=STEPS))
    with peers(home.folder, 3) as mesh:
        with training(mesh, job_file, "--stages", "3", cwd=ROOT) as owner:
            run = home.run("last")
            wait_until("a checkpoint is complete", lambda: CheckpointStore(run.checkpoints).complete(), 60)
            owner.kill()
            owner.wait(10)
        assert run.state == "died"
        told = len(run.reports())
        assert 5 <= told < STEPS
        arguments = ("--join", mesh.token, "--resume", run.id, "--stages", "2", "--out", str(out), "--json")
        done = meshcee("train", str(job_file), *arguments, home=home.folder, cwd=ROOT)
        assert done.code == 0, done.err
        listed = meshcee("run", "list", "--json", home=home.folder).lines
    assert [(r["run"], r["state"], r["checkpoints"][0]) for r in listed] == [(run.id, "done", STEPS)]
    plan = next(line["plan"] for line in done.lines if "plan" in line)
    assert len(plan["pipelines"][0]["stages"]) == 2
    expected = reference(make_job(case), STEPS)
    reports = run.reports()
    assert [r["step"] for r in reports] == list(range(STEPS))
    assert [r["loss"] for r in reports] == [sum(float(loss) / 4 for loss in step) for step in expected.losses]
    state = safetensors.torch.load_file(out)
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in state.items())
    newest = CheckpointStore(run.checkpoints).complete()[0].folder / "optimizer-0.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    damaged = meshcee("checkpoint", "export", "last", "--out", str(out), home=home.folder)
    assert damaged.code == 9
    assert "optimizer-0.safetensors is not what was written" in damaged.err


@pytest.mark.slow
def test_an_exported_gpt2_loads_with_from_pretrained_and_gives_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the examples' extra is not installed")
    job = tmp_path / "job.py"
    job.write_text(
        "from dataclasses import replace\nfrom examples.hf_gpt2 import job as full\njob = replace(full, steps=2)\n"
    )
    out, folder = tmp_path / "all.safetensors", tmp_path / "hf"
    home = tmp_path / "home"
    done = meshcee("train", str(job), "--local", "2", "--json", home=home, cwd=ROOT)
    assert done.code == 0, done.err
    for flags in (("--hf", str(folder)), ("--out", str(out))):
        exported = meshcee("checkpoint", "export", "last", *flags, home=home)
        assert exported.code == 0, exported.err
    from examples.hf_gpt2 import build

    state = safetensors.torch.load_file(out)
    ours = build()
    ours.load_state_dict(state)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    x = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(ours.eval()(x).logits, theirs.eval()(x).logits)
        assert not torch.equal(build().eval()(x).logits, ours(x).logits)  # it was trained
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
