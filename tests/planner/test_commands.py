"""`meshcee plan` and `meshcee simulate` as a user types them: no torch, no hivemind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshcee.errors import PlanError, UsageError
from meshcee.figures.scenario import packaged
from meshcee.picture import Picture
from meshcee.plan import Plan
from peers.cli.main import app

FILE = f"{packaged('testbeds.json')}:cee-small"
PROFILES = str(packaged("gpu_profiles.json"))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_json_has_the_documented_keys_and_simulates_to_what_it_predicts(tmp_path: Path) -> None:
    text = run("plan", "--testbed", FILE, "--profiles", PROFILES, "--codecs", "bf16", "--json", "--effort", "0.1")
    data = json.loads(text)
    assert data.keys() >= {"micro_batch", "pipelines", "predicted", "left_out"}
    stage = data["pipelines"][0]["stages"][0]
    assert stage.keys() >= {"blocks", "members", "codec_out", "codec_back", "window", "live_cap"}
    assert data["predicted"].keys() == {"step_s", "samples_per_s", "lower_bound_s"}
    plan = Plan.from_json(data)
    assert plan.global_batch == 64
    file = tmp_path / "plan.json"
    file.write_text(text)
    result = json.loads(run("simulate", str(file), "--testbed", FILE, "--json"))
    assert result["period_s"] == pytest.approx(data["predicted"]["step_s"])
    assert set(result["utilisation"]) == set(plan.peers)
    again = run("plan", "--testbed", FILE, "--start", str(file), "--json", "--effort", "0.1")
    assert json.loads(again)["predicted"]["step_s"] <= data["predicted"]["step_s"] * (1 + 1e-9)
    stalled = json.loads(run("simulate", str(file), "--testbed", FILE, "--fail", f"{plan.peers[0]}@6", "--json"))
    assert stalled["stalled"]
    assert stalled["steps"] < 3
    changed = json.loads(
        run("simulate", str(file), "--testbed", "cee-fluctuating", "--trace", "--steps", "40", "--json")
    )
    assert max(changed["step_s"]) > 1.2 * min(changed["step_s"])


def test_explain_names_every_figure_and_every_device(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = run("plan", "--testbed", "cee-small", "--explain", "--effort", "0.1", "--html", str(page))
    for word in (
        "lower bound",
        "limit:",
        "best single device",
        "memory",
        "window",
        "slack",
        "left out",
        "bf16",
        "F ",
        "W ",
    ):
        assert word in text
    html = page.read_text()
    for name in ("cloud-a100-40-0", "edge-rtx-3090-1", "end-rtx-2080-1"):
        assert name in text
        assert name in html
    (data,) = re.findall(r'id="picture">(.*?)</script>', html)
    picture = Picture.from_json(json.loads(data)["picture"])
    assert picture.mesh is not None
    assert len(picture.mesh.peers) == 6
    assert picture.gantt is not None
    assert len(picture.gantt.lanes) == len(picture.plan.seats) == 4  # type: ignore[union-attr]
    assert "lower bound" in picture.words


def test_short_output_says_who_does_what() -> None:
    text = run("plan", "--testbed", "cee-small", "--effort", "0.1")
    assert "samples/s" in text
    assert "stage 0: blocks 0 to" in text


def test_a_testbed_is_planned_with_exactly_so_many_stages() -> None:
    text = run("plan", "--testbed", "cee-small", "--stages", "3", "--effort", "0.1", "--json")
    assert [len(pipeline.stages) for pipeline in Plan.from_json(json.loads(text)).pipelines] == [3]


def stage(first: int, end: int, peer: str, samples: int = 2, **more: str) -> dict[str, object]:
    member = {"peer": peer, "samples": samples}
    return {"blocks": [first, end], "members": [member], "window": 1, "live_cap": 1, **more}


FIRST, SECOND = "cloud-a100-40-0", "edge-rtx-3090-1"
CEE_SMALL = 26  # blocks


@pytest.mark.parametrize(
    ("num_micro", "stages", "more", "says"),
    [
        (32, [stage(0, 500, FIRST), stage(500, 1000, SECOND)], [], "the plan has 1000 blocks and the job"),
        (33, [stage(0, CEE_SMALL, FIRST)], [], "the plan takes 66 samples a step and the job 64"),
        (32, [stage(0, 1, FIRST, codec_out="mp3"), stage(1, CEE_SMALL, SECOND)], [], "codec 'mp3'"),
        (32, [stage(0, CEE_SMALL, FIRST)], ["--fail", f"{FIRST}@nan"], "'nan' is no number of seconds"),
        (32, [stage(0, CEE_SMALL, FIRST)], ["--fail", f"{FIRST}@inf"], "'inf' is no number of seconds"),
    ],
)
def test_a_plan_that_a_testbed_cannot_run_is_refused_in_words(
    tmp_path: Path, num_micro: int, stages: list[object], more: list[str], says: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"micro_batch": 2, "pipelines": [{"num_micro": num_micro, "stages": stages}]}))
    with pytest.raises((PlanError, UsageError), match=says):
        CliRunner().invoke(app, ["simulate", str(file), "--testbed", "cee-small", *more], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--testbed", "nowhere"], "no testbed 'nowhere'"),
        (["plan", "--testbed", "no.json:cee-small"], "cannot read no.json"),
        (["plan", "--testbed", "cee-small", "--codecs", "mp3"], "--codecs 'mp3'"),
        (["plan", "--testbed", "cee-small", "--start", "none.json"], "cannot read none.json"),
        (["simulate", "none.json", "--testbed", "cee-small"], "cannot read none.json"),
    ],
)
def test_errors_name_the_next_thing_to_do(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_neither_torch_nor_hivemind_is_imported() -> None:
    script = (
        "import sys; from peers.cli.main import app;"
        "app(['plan', '--testbed', 'cee-small', '--effort', '0.05', '--json'], standalone_mode=False);"
        "bad = [m for m in ('torch', 'hivemind') if m in sys.modules]; sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plan_in_the_documents_is_what_the_command_prints() -> None:
    shown = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    assert run("plan", "--testbed", "cee-small").strip() in shown
