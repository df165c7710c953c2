"""`meshcee train`: load the job, join a mesh or make one in this process, train, save."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshcee.callbacks import Callback, called
from meshcee.callbacks.spans import spans_where_set_up
from meshcee.capture import Capture, capture
from meshcee.errors import MeshceeError, UsageError
from meshcee.figures import remark
from meshcee.figures.amounts import size
from meshcee.files import disk
from meshcee.files.home import Home, Run, file_name
from meshcee.files.steady import write_fact
from meshcee.files.tensor_files import save
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.planner import needs, remarks, situation
from peers.cli.meters import address_of, metered
from peers.cli.plan import read_plan
from peers.cli.session import configure_logging, load_job, run_async, safetensors_file
from peers.cli.ui.watching import needs_ui, page_of
from peers.cli.ui.wishes import mark_stop
from peers.cli.view import View, naming, view_for
from peers.device import alters_kernels, capability, resolve_device, take_threads
from peers.measure import Trace
from peers.mesh_view import named
from peers.node import JoinOptions, Mesh, Result, join
from peers.node.early import look_for
from peers.planning import costs_of

__all__ = ["TrainOptions", "again_with", "run_train"]


@dataclass(frozen=True)
class TrainOptions:
    """The flags of `meshcee train`."""

    job: Path
    join: str | None
    local: int | None
    out: Path | None
    dry_run: bool
    compute: bool
    stages: int | None
    device: str
    threads: int | None
    resume: str | None = None
    checkpoint_every: int | None = None
    codec: str | None = None
    regroup: float | None = None
    plan: Path | None = None
    trace: Path | None = None
    wait: bool = True
    groups: bool | None = None
    standby: bool = False
    verify: bool = True
    mix: str | None = None
    audit: float | None = None
    workers: int | None = None
    steps: int | None = None
    log: tuple[str, ...] = ()
    ui: bool = False
    metrics: str | None = None


def run_train(options: TrainOptions, *, as_json: bool) -> None:
    if options.join is not None and options.local is not None:
        raise UsageError("--join TOKEN (or MESHCEE_JOIN) and --local N exclude each other: leave one out")
    if options.join is None and options.local is None:
        raise UsageError("say where to train: --join TOKEN for a mesh, or --local N for N peers in this process")
    if options.standby and (options.join is None or options.resume or options.dry_run or options.plan):
        raise UsageError(
            "--standby follows the run of another machine: give --join TOKEN, and no --resume, --dry-run or --plan"
        )
    if options.out is not None:
        disk.check_place(safetensors_file(options.out), "--out")
    if options.trace is not None:
        disk.check_place(options.trace, "--trace")
    if options.plan is not None and options.stages is not None:
        raise UsageError("--plan says how many stages there are: leave --stages out")
    if options.stages is not None and options.local is not None and options.stages > options.local + options.compute:
        raise UsageError(
            f"--stages {options.stages} needs as many devices: say --local {options.stages}, or ask for fewer stages"
        )
    if options.ui:
        needs_ui()
    given = read_plan(options.plan) if options.plan is not None else None
    if given is not None:
        _check_said(options, given)
    loggers = called(options.log)  # a library that is missing is told of before anything runs
    address_of(options.metrics)  # here too
    configure_logging(as_json=as_json, level="warning")
    threads_said = take_threads(options.threads)
    look_for(options.join, Home(), options.resume)
    job = load_job(options.job)
    names = ("checkpoint_every", "codec", "groups", "threads", "mix", "workers", "audit", "steps")
    said = {name: getattr(options, name) for name in names}
    job = replace(job, **{name: value for name, value in said.items() if value is not None})
    if not options.verify:
        job = replace(job, verify=False)
    where = JoinOptions(
        token=options.join,
        local=options.local,
        compute=options.compute,
        device=resolve_device(options.device) if options.compute or options.local else "cpu",
        name="owner",
        regroup_s=options.regroup,
        threads_said=threads_said,
    )
    current: list[Mesh] = []
    stopping: list[str] = []  # the run that was asked to stop

    def polite() -> bool:
        asked = [mesh.result.run for mesh in current if mesh.stop()]
        for run in filter(None, asked):
            stopping.append(run)
            mark_stop(Run(Home().folder / "runs" / run), os.getpid())  # so `run stop` sends no second
        if not asked and any(len(mesh.result.losses) == job.steps for mesh in current):
            view.note("all steps are done, and the run ends now; Ctrl-C again ends it at once")
            return True
        if asked:
            evaluated = "" if job.eval_data is None else ", and its evaluation"
            view.note(
                f"the run ends after this step{evaluated}, once its weights are on disk; Ctrl-C again ends it at once"
            )
        return bool(asked)

    view = view_for(as_json=as_json)
    again = again_with(options)
    with view:
        start_s = time.perf_counter()
        try:
            captured = capture(job)  # before there is a loop: that would keep Ctrl-C waiting until capture has ended
        except KeyboardInterrupt:
            view.note("interrupted while the model was captured: no run has begun")
            raise
        blocks = len(captured.costs)
        view.note(
            f"captured {job.name}: {blocks} block{'s' * (blocks != 1)}, {size(captured.state_bytes)} of weights "
            f"in {time.perf_counter() - start_s:.1f} s"
        )
        try:
            result = run_async(_train(job, captured, where, options, given, view, current, loggers), polite)
        except SystemExit:
            for run in stopping:
                view.note(
                    f"ended at once; it goes on from its newest checkpoint, if there is one: `meshcee train {again} --resume {run}`"
                )
            raise
        except MeshceeError as error:
            error.args = (str(error).replace("meshcee train JOB.py", f"meshcee train {again}"), *error.args[1:])
            raise
    if result is None:
        return
    out, refused = options.out, None
    if out is None and result.stopped:
        out = Path(f"{file_name(job.name)}-stopped.safetensors")
    try:
        if out is not None:
            save(out, result.state)
    except UsageError as error:  # the run has its weights, and is still to be told of
        out, refused = None, error
    _tell(result, out, again, as_json=as_json)
    if refused is not None and options.out is not None:
        raise refused


def _check_said(options: TrainOptions, plan: Plan) -> None:
    """Raises UsageError where a given plan is not what the command line asks for besides."""
    if options.groups is False and plan.shares_samples:
        raise UsageError("--no-groups and --plan contradict each other: the plan has groups; leave --no-groups out")
    if options.threads is not None and plan.threads not in (0, options.threads):
        raise UsageError(
            f"--threads {options.threads} (or MESHCEE_THREADS) and --plan contradict each other: the plan is for "
            f"{plan.threads} threads; say --threads {plan.threads}"
        )


def again_with(options: TrainOptions) -> str:
    """What stands behind `meshcee train` to go on with the run: the file, where, and what was said of numbers and files.

    The token is left to the reader, who is also given `--resume`.
    """
    found = [str(options.job), *(["--local", str(options.local)] if options.local else ["--join", "TOKEN"])]
    for name in ("codec", "mix", "audit", "out", "checkpoint_every", "workers", "steps"):
        if (value := getattr(options, name)) is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    if options.groups is not None:
        found.append("--groups" if options.groups else "--no-groups")
    found += ["--device", options.device] * (options.device != "auto") + ["--compute"] * options.compute
    for where in options.log:
        found += ["--log", where]
    return shlex.join(found)


def _tell(result: Result, out: Path | None, again: str, *, as_json: bool) -> None:
    """How it ended, where the weights are, and how a run that was stopped goes on: by `meshcee train` with `again`."""
    plan, step_s = result.plan, result.step_s
    expected_s = plan.predicted.step_s if plan is not None and plan.predicted is not None else None
    summary = {
        "state": "stopped" if result.stopped else "done",
        "steps": len(result.losses),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "metrics": result.metrics[-1][1] if result.metrics else {},
        "step_s": step_s,
        "predicted_step_s": expected_s,
        "out": str(out) if out else None,
        "run": result.run,
    }
    if as_json:
        write_fact({"result": summary})
        return
    verb = "Stopped" if result.stopped else "Done"
    losses = f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}" if result.losses else "no step was finished"
    print(
        f"{verb}: {len(result.losses)} steps, {losses}"
        + (f"; weights in {out}" if out else f"; weights in run {result.run} (`meshcee checkpoint export`)")
    )
    if result.stopped and result.run:
        print(f"  run {result.run} goes on with `meshcee train {again} --resume {result.run}`")
    if step_s is not None and expected_s is not None:
        print(f"  {step_s:.3g} s a step (median), {expected_s:.3g} s were expected")
    for name, value in (result.metrics[-1][1] if result.metrics else {}).items():
        print(f"  eval {name}: {value:.4f}")


async def _train(
    job: Job,
    captured: Capture,
    where: JoinOptions,
    options: TrainOptions,
    given: Plan | None,
    view: View,
    current: list[Mesh],
    loggers: Sequence[Callback],
) -> Result | None:
    home = Home()
    async with (
        metered(address_of(options.metrics)) as meters,
        join(where, home) as mesh,
        page_of(mesh, home, view.note, wanted=options.ui, token=options.join) as page,
        naming(mesh.agent.names),
    ):
        loggers = (*loggers, *meters.of_run(mesh, job), *spans_where_set_up(options.log), page.wishes)
        if options.dry_run:
            plan, _, notes = await mesh.plan(job, captured, options.stages, given)
            names = mesh.agent.names()
            view.plan(plan, names)
            for line in (*_memory(job, captured, plan, mesh), *_bits(job, plan, mesh), *remarks(plan), *notes):
                view.note(named(line, names))
            return None
        current.append(mesh)

        def show(plan: Plan, names: Mapping[str, str]) -> None:
            view.plan(plan, names)
            for note in (*_bits(job, plan, mesh), *remarks(plan), *mesh.result.notes):
                view.note(named(note, names))

        resume, after = options.resume, ""
        if options.standby:
            followed = await mesh.stand_by(job, captured, tell=view.note)
            if followed is None:
                view.note("the run has ended: there is nothing to take over")
                return None
            resume, after = followed
        try:
            trace = Trace() if options.trace is not None else page.trace
            async for report in mesh.train(
                job,
                captured=captured,
                stages=options.stages,
                plan=given,
                resume=resume,
                after=after,
                on_plan=show,
                trace=trace,
                wait=options.wait,
                on_wait=view.wait,
                callbacks=loggers,
            ):
                view.report(report)
                await page.hear(report.step, trace)
            if trace is not None and options.trace is not None:
                told = f"trace of a few steps in {options.trace}: open it at ui.perfetto.dev"
                try:
                    await asyncio.to_thread(trace.write, options.trace)
                except UsageError as error:  # the weights are still to be written
                    told = f"there is no trace: {error}"
                for note in (*trace.notes, told):
                    view.note(note)
        except BaseException:
            current.clear()
            raise
        return mesh.result


def _bits(job: Job, plan: Plan, mesh: Mesh) -> Iterator[str]:
    """With which plain loop the run has its bits in common."""
    known = mesh.agent.directory.peers
    devices = {peer: d for peer in plan.peers if peer in known and (d := known[peer].device) is not None}
    if (told := remark(plan, devices, mixed=job.precision == "bf16-mixed")) is not None:
        yield told
    own, models = capability(), {d.capability for d in devices.values() if d.kind == "cpu"}
    if own not in models and own.partition(" ")[0] in {model.partition(" ")[0] for model in models}:
        by = f", perhaps by {', '.join(names)}" if (names := alters_kernels()) else ""
        yield f"a plain loop in this process has other bits: its kernels are of a cpu {own}{by}"


def _memory(job: Job, captured: Capture, plan: Plan, mesh: Mesh) -> Iterator[str]:
    """Memory of each stage, and how long the job will take, for --dry-run."""
    cluster, workload = situation(mesh.agent.measured(), replace(costs_of(job, captured), threads=plan.threads))
    for peer, needed in needs(plan, cluster, workload).items():
        have = cluster.devices[peer].memory_bytes
        yield f"{peer} needs {size(needed)} of {size(have)}"
    if plan.predicted is not None:
        step_s = plan.predicted.step_s
        yield f"expected: {step_s:.3g} s a step, {step_s * job.steps:.0f} s for {job.steps} steps"
