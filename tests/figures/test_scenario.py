"""Files that describe clusters: what ships is read, what makes no sense is refused with the place where it stands."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from meshcee.errors import UsageError
from meshcee.figures.scenario import load_scenario, packaged

TESTBEDS = json.loads(packaged("testbeds.json").read_text())
PROFILES = json.loads(packaged("gpu_profiles.json").read_text())


def load(folder: Path, testbeds: Any, profiles: Any = PROFILES, name: str = "cee-small") -> Any:
    a, b = folder / "t.json", folder / "p.json"
    a.write_text(json.dumps(testbeds))
    b.write_text(json.dumps(profiles))
    return load_scenario(a, name, b)


@pytest.mark.parametrize("name", [t["name"] for t in TESTBEDS["testbeds"]])
def test_every_testbed_that_ships_is_read(name: str) -> None:
    scenario = load_scenario(packaged("testbeds.json"), name, packaged("gpu_profiles.json"))
    assert scenario.workload.num_blocks in (26, 34)
    for a in scenario.cluster.devices:
        for b in scenario.cluster.devices:
            assert scenario.cluster.path(a, b) is not None


def test_figures_follow_the_rules_of_the_files() -> None:
    scenario = load_scenario(packaged("testbeds.json"), "cee-fluctuating", packaged("gpu_profiles.json"))
    cluster, work = scenario.cluster, scenario.workload
    a100 = work.times["A100-40"]
    assert a100.stage(1, 2, 1).f_s == pytest.approx(0.002314)
    assert a100.stage(1, 2, 1).b_s == a100.stage(1, 2, 1).w_s == pytest.approx(0.005909 / 2)
    assert a100.stage(1, 2, 3).f_s == pytest.approx((0.004169 + 0.008204) / 2)  # linear between 2 and 4
    with pytest.raises(UsageError, match="9 samples was not profiled"):
        a100.stage(1, 2, 9)
    assert work.state_bytes[1] == 16 * (12 * 1024**2 + 13 * 1024)
    assert work.state_bytes[0] == 16 * (50272 + 2048) * 1024
    assert work.live_bytes(1, 3, 2) == 2 * 2 * 34 * 2048 * 1024
    assert work.boundary_bytes[0] == 2048 * 1024 * 2
    device = cluster.devices["end-rtx-2080-0"]
    assert device.memory_bytes == 7 * 2**30
    path = cluster.path("cloud-a100-40-0", "edge-rtx-3090-1")
    assert path is not None
    assert path.latency_s == pytest.approx(0.015)
    assert path.bandwidth_bytes_per_s == 1e9 / 8
    assert [c.at_s for c in scenario.trace] == [60, 180, 240, 360]


def edit(path: list[Any], value: Any) -> Any:
    data = copy.deepcopy(TESTBEDS)
    place = data["testbeds"][0]
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["links", 2], None, "no link between cloud and end"),
        (["links", 0, "gbps"], -1, r"links\[0\].gbps: expected `float` > 0"),
        (["links", 0, "gbps"], float("nan"), "NaN is no number"),
        (["links", 0, "rtt_ms"], float("inf"), "Infinity is no number"),
        (["links", 0, "rtt_ms"], "30", r"links\[0\].rtt_ms: expected `float`, got `str`"),
        (["links", 0, "between"], ["cloud", "moon"], "which is no region"),
        (["links", 1, "between"], ["edge", "cloud"], "linked twice"),
        (["links", 1, "between"], ["edge", "edge"], "'edge' twice"),
        (["trace"], [{"at_s": 1, "between": ["cloud", "moon"]}], "which is no region"),
        (["regions", "cloud", "gbps"], 0, "region cloud: gbps: expected `float` > 0"),
        (["devices", 0, "gpu"], "Abacus", "in no profile"),
        (["devices", 0, "region"], "moon", "not in regions"),
        (["devices", 1, "name"], "cloud-a100-40-0", "there twice"),
        (["devices"], [], "devices: expected `array` of length >= 1"),
        (["global_batch"], 0, "global_batch: expected `int` >= 1"),
        (["global_batch"], 2.5, "global_batch: expected `int`, got `float`"),
        (["model"], "GPT-9", "no model 'GPT-9'"),
        (["regions"], [], "regions: expected `object`, got `array`"),
    ],
)
def test_a_testbed_that_makes_no_sense_is_refused(tmp_path: Path, path: list[Any], value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(tmp_path, edit(path, value))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["models", "OPT-350", "gpus", "RTX-2080"], None, "no times for RTX-2080"),
        (
            ["models", "OPT-350", "gpus", "RTX-2080", "1", "block"],
            [0.1, -0.2, 0],
            r"RTX-2080: size 1: block\[1\]: expected `float` >= 0",
        ),
        (["models", "OPT-350", "gpus", "RTX-2080", "1", "block"], [0.1, float("nan"), 0], "NaN is no number"),
        (["models", "OPT-350", "gpus", "RTX-2080", "1", "block"], [0.1], "block: expected `array` of length 3"),
        (["models", "OPT-350", "hidden"], -4, "OPT-350: hidden: expected `int` >= 1"),
        (["memory_gib", "RTX-2080"], 0.5, "no memory left"),
        (["models"], None, "missing required field `models`"),
    ],
)
def test_profiles_that_make_no_sense_are_refused(tmp_path: Path, path: list[Any], value: Any, says: str) -> None:
    data = copy.deepcopy(PROFILES)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(UsageError, match=says):
        load(tmp_path, TESTBEDS, data)


def test_files_that_are_not_there_or_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_scenario(tmp_path / "none.json", "x", packaged("gpu_profiles.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        load_scenario(broken, "x", packaged("gpu_profiles.json"))
    with pytest.raises(UsageError, match="no testbed 'x'; it has cee-small"):
        load_scenario(packaged("testbeds.json"), "x", packaged("gpu_profiles.json"))
