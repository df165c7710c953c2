"""`meshcee plan` and `meshcee simulate`: nothing is rented, nothing is trained; over files torch is not even loaded.

The idea: a thin layer over meshcee.planner and meshcee.simulator; what a live mesh measured goes the same way, once
peers/cli/live_plan.py has asked it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcee.errors import PlanError, UsageError
from meshcee.figures.scenario import LinkChange, Scenario, load_scenario, packaged
from meshcee.figures.workload import CODECS
from meshcee.files import disk, loads
from meshcee.files.steady import write_fact
from meshcee.plan import Plan

if TYPE_CHECKING:
    from peers.cli.live_plan import LivePlan

__all__ = ["read_plan", "read_scenario", "run_plan", "run_simulate"]


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


def run_plan(
    job: Path | None,
    join: str | None,
    testbed: str | None = None,
    profiles: Path | None = None,
    stages: int | None = None,
    codecs: str = "bf16",
    effort: float = 1.0,
    start: Path | None = None,
    *,
    as_json: bool,
    in_full: bool = False,
    compare: bool = False,
    html: Path | None = None,
) -> None:
    from meshcee.planner import COMPARED, Effort, Question, comparison, plans, remarks
    from meshcee.show import comparison_text, explain, with_names

    if html is not None:
        disk.check_place(html, "--html")
    extra: dict[str, Any] = {}
    names: Mapping[str, str] = {}
    kernels: Mapping[str, str] = {}
    said: Sequence[str] = ()
    if testbed is not None and job is None:
        scenario = read_scenario(testbed, profiles)
        title, cluster, workload = scenario.name, scenario.cluster, scenario.workload
        old = None if start is None else read_plan(start)
        own = Question(cluster, workload, _codecs(codecs))
        own = replace(own, runs=replace(own.runs, stages=stages))
        asked = {codecs: own, **{name: replace(own, codecs=(name,)) for name in COMPARED if (name,) != own.codecs}}
        chosen = plans(cluster, workload, codecs=own.codecs, start=old, effort=Effort().times(effort), runs=own.runs)
        best, single = chosen.best, chosen.single
    else:
        live = _live(job, join, testbed, stages, as_json=as_json)
        title, cluster, workload = live.title, live.cluster, live.workload
        best, single, names = live.plan, live.single, live.names
        asked, kernels = (live.questions(), live.kernels()) if compare else ({}, {})
        said = remarks(best)
        extra = {"names": dict(names), "notes": [*said, *live.notes]}
    text = explain(best, cluster, workload, single) if in_full or html is not None or not as_json else ""
    table = ""
    if compare:
        found = comparison(best, asked, plain=workload, kernels=kernels)
        extra["comparison"] = found.to_json()
        table = "\n\n" + comparison_text(found, names)
    if html is not None:
        from meshcee.picture import picture_of_plan
        from peers.cli.ui import self_contained

        picture = picture_of_plan(best, cluster, workload, names, with_names(text, names) + table, time.time())
        disk.publish(html, self_contained(picture, f"meshcee plan: {title}").encode())
    if as_json:
        write_fact({**best.to_json(), **extra})
    else:
        print(with_names(text if in_full else _short(best, text), names) + table)
        for note in said:
            print(f"note: {note}")


def _live(job: Path | None, join: str | None, testbed: str | None, stages: int | None, *, as_json: bool) -> LivePlan:
    ways = "JOB.py --join TOKEN is for a job on a live mesh, and --testbed NAME for a cluster in a file"
    if testbed is not None:
        raise UsageError(f"--testbed excludes {'JOB.py' if join is None else '--join'}: {ways}")
    if job is None or join is None:
        raise UsageError(f"{'no mesh is named' if job is not None else 'nothing to plan is named'}: {ways}")
    from peers.cli.live_plan import plan_live  # torch and a transport: not for files

    return plan_live(job, join, stages, as_json=as_json)


def _short(best: Plan, text: str) -> str:
    """The first lines of the explanation, and who does what."""
    head = text.splitlines()[:1]
    for p, pipeline in enumerate(best.pipelines):
        for j, stage in enumerate(pipeline.stages):
            shared = len(stage.members) > 1
            who = ", ".join(f"{m.peer} ({m.samples} samples)" if shared else m.peer for m in stage.members)
            head.append(f"  stage {best.label(p, j)}: blocks {stage.first} to {stage.end - 1} on {who}")
    if best.left_out:
        head.append(f"  left out: {', '.join(x.peer for x in best.left_out)} (--explain says why)")
    return "\n".join(head)


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file, alone, under the key "plan", or among the lines that a command prints.

    Raises UsageError or PlanError.
    """
    printed = "`meshcee plan --json` and `meshcee train --dry-run --json` print one"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a file with a plan: {printed}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text; name a file with a plan: {printed}") from error
    try:
        try:
            data = loads(text)
        except ValueError:  # as a command prints: an object a line
            lines = map(loads, text.splitlines())
            data = next((found for found in lines if isinstance(found, dict) and "plan" in found), None)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}; {printed}") from error
    if isinstance(data, dict) and "pipelines" not in data and isinstance(data.get("plan"), dict):
        data = data["plan"]
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no plan; {printed}")
    return Plan.from_json(data)


def run_simulate(
    file: Path,
    join: str | None,
    testbed: str | None,
    profiles: Path | None,
    stages: int | None,
    steps: int,
    *,
    trace: bool,
    fail: Sequence[str],
    as_json: bool,
) -> None:
    from meshcee.planner import shortages
    from meshcee.simulator import simulate

    changes: Sequence[LinkChange] = ()
    names: Mapping[str, str] = {}
    if testbed is not None and join is None:
        if stages is not None:
            raise UsageError("--stages is for a job that is planned; the plan in the file has its own")
        if file.suffix == ".py":
            raise UsageError(
                f"{file} is a job: say --join TOKEN, or give a plan, as `meshcee plan --testbed {testbed} --json` prints"
            )
        scenario = read_scenario(testbed, profiles)
        cluster, workload, chosen = scenario.cluster, scenario.workload, read_plan(file)
        changes = scenario.trace if trace else ()
    else:
        live = _live(file, join, testbed, stages, as_json=as_json)
        cluster, workload, chosen, names = live.cluster, live.workload, live.plan, live.names
    if chosen.global_batch != workload.global_batch:
        raise PlanError(
            f"the plan takes {chosen.global_batch} samples a step and the job {workload.global_batch}; plan it again"
        )
    if short := shortages(chosen, cluster, workload):
        raise UsageError(short[0].text(names))
    timeline = simulate(
        chosen,
        cluster,
        workload,
        steps=steps,
        trace=changes,
        failures=dict(_failure(text, list(cluster.devices), names) for text in fail),
    )
    done = timeline.outcome.steps
    if as_json:
        result: dict[str, Any] = {"steps": done, "step_s": timeline.step_s, "stalled": done < steps}
        if done:
            rate = chosen.global_batch / timeline.period_s
            result |= {"period_s": timeline.period_s, "samples_per_s": rate, "utilisation": timeline.utilisation()}
        write_fact(result)
        return
    for s, seconds in enumerate(timeline.step_s):
        print(f"step {s + 1}: {seconds:.4g} s")
    if done < steps:
        print(f"step {done + 1} never ends: a device that it needs is dead")
    if done:
        print(f"period {timeline.period_s:.4g} s, {chosen.global_batch / timeline.period_s:.4g} samples/s")
        for peer, share in timeline.utilisation().items():
            print(f"  {names.get(peer, peer)}: busy {share:.0%}")


def _failure(text: str, peers: Sequence[str], names: Mapping[str, str]) -> tuple[str, float]:
    called, _, at = text.rpartition("@")
    known = {names.get(p, p): p for p in peers}
    if called not in known:
        raise UsageError(f"--fail {text!r}: write PEER@SECONDS with one of {', '.join(known)}")
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(at)) and seconds >= 0:
            return known[called], seconds
    raise UsageError(f"--fail {text!r}: {at!r} is no number of seconds from the start")
