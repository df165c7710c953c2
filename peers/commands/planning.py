"""`meshcee plan` and `meshcee simulate` over files: nothing is rented, nothing is trained, torch is not even loaded.

The idea: a thin layer over meshcee.planner and meshcee.simulator; what a live mesh measured goes the same way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshcee.errors import UsageError
from meshcee.plan import Plan
from meshcee.scenario import Scenario, load_scenario, packaged
from meshcee.workload import CODECS
from peers.strict_json import dumps

__all__ = ["plan", "read_scenario", "simulate"]

Testbed = Annotated[
    str, typer.Option("--testbed", help="FILE:NAME of a testbed, or NAME of one that ships with meshcee.")
]
Profiles = Annotated[
    Path | None, typer.Option("--profiles", help="A file of device profiles; default: the one that ships with meshcee.")
]


def read_scenario(testbed: str, profiles: Path | None) -> Scenario:
    """FILE:NAME, or the NAME of a testbed that ships with meshcee."""
    file, _, name = testbed.rpartition(":")
    path = Path(file) if file else packaged("testbeds.json")
    return load_scenario(path, name, profiles or packaged("gpu_profiles.json"))


def _codecs(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in CODECS]
    if unknown or not names:
        raise UsageError(f"--codecs {text!r}: give some of {', '.join(CODECS)}, separated by commas")
    return names


def plan(
    testbed: Testbed,
    profiles: Profiles = None,
    codecs: Annotated[str, typer.Option(help="What boundaries may travel as: bf16,int8,int4.")] = "bf16",
    effort: Annotated[float, typer.Option(min=0.01, help="How long to search: 1 takes about a second.")] = 1.0,
    start: Annotated[Path | None, typer.Option(help="A plan in JSON to start from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Every figure behind the plan.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the cluster and one step to this file.")] = None,
) -> None:
    """Plan a testbed: which device holds which blocks, how fast a step is, and who is left out and why."""
    from meshcee.planner.explain import explain as explained
    from meshcee.planner.job import plans
    from meshcee.planner.page import page
    from meshcee.planner.search import Effort

    scenario = read_scenario(testbed, profiles)
    cluster, workload = scenario.cluster, scenario.workload
    chosen = plans(
        cluster,
        workload,
        codecs=_codecs(codecs),
        start=None if start is None else _read_plan(start),
        effort=Effort().times(effort),
    )
    text = (
        explained(chosen.best, cluster, workload, chosen.single) if explain or html is not None or not as_json else ""
    )
    if html is not None:
        html.write_text(page(chosen.best, cluster, workload, text, f"meshcee plan: {scenario.name}"), encoding="utf-8")
    if as_json:
        print(dumps(chosen.best.to_json()))
    elif explain:
        print(text)
    else:
        print(_short(chosen.best, text))


def _short(best: Plan, text: str) -> str:
    """The first lines of the explanation, and who does what."""
    head = text.splitlines()[:1]
    for pipeline in best.pipelines:
        for j, stage in enumerate(pipeline.stages):
            head.append(f"  stage {j}: blocks {stage.first} to {stage.end - 1} on {', '.join(stage.peers)}")
    if best.left_out:
        head.append(f"  left out: {', '.join(x.peer for x in best.left_out)} (--explain says why)")
    return "\n".join(head)


def _read_plan(path: Path) -> Plan:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a file with the output of plan --json") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    return Plan.from_json(data)


def simulate(
    plan_file: Annotated[Path, typer.Argument(help="A plan in JSON, as plan --json prints it.")],
    testbed: Testbed,
    profiles: Profiles = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps to simulate.")] = 3,
    trace: Annotated[bool, typer.Option("--trace", help="Apply the link changes of the testbed's trace.")] = False,
    fail: Annotated[list[str] | None, typer.Option(help="PEER@SECONDS: this device dies then.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Simulate a plan: when each step ends, and how busy every device is."""
    from meshcee.planner.memory import shortages
    from meshcee.simulator import simulate as run

    scenario = read_scenario(testbed, profiles)
    chosen = _read_plan(plan_file)
    for short in shortages(chosen, scenario.cluster, scenario.workload):
        missing = short.needed_bytes - short.memory_bytes
        raise UsageError(f"{short.peer} needs {short.needed_bytes} bytes for this plan, {missing} more than it has")
    timeline = run(
        chosen,
        scenario.cluster,
        scenario.workload,
        steps=steps,
        trace=scenario.trace if trace else (),
        failures=dict(_failure(text, scenario) for text in fail or []),
    )
    done = timeline.outcome.steps
    if as_json:
        result: dict[str, Any] = {"steps": done, "step_s": timeline.step_s, "stalled": done < steps}
        if done:
            rate = chosen.global_batch / timeline.period_s
            result |= {"period_s": timeline.period_s, "samples_per_s": rate, "utilisation": timeline.utilisation()}
        print(dumps(result))
        return
    for s, seconds in enumerate(timeline.step_s):
        print(f"step {s}: {seconds:.4g} s")
    if done < steps:
        print(f"step {done} never ends: a device that it needs is dead")
    if done:
        print(f"period {timeline.period_s:.4g} s, {chosen.global_batch / timeline.period_s:.4g} samples/s")
        for peer, share in timeline.utilisation().items():
            print(f"  {peer}: busy {share:.0%}")


def _failure(text: str, scenario: Scenario) -> tuple[str, float]:
    peer, _, at = text.rpartition("@")
    if peer not in scenario.cluster.devices:
        raise UsageError(f"--fail {text!r}: write PEER@SECONDS with one of {', '.join(scenario.cluster.devices)}")
    try:
        return peer, float(at)
    except ValueError as error:
        raise UsageError(f"--fail {text!r}: {at!r} is no number of seconds") from error
