"""The command line: options become values, errors become one sentence and an exit code.

The idea: each command is a thin function over the Python API. Flags are declared here, and those of several commands once, in
`settings/options.py`. The other files of this room know what to do with them, and are imported when their command is.

Exit codes:

- 0 ok, 1 bug, 2 usage, 3 cannot join, or not now, 4 model cannot be captured
- 5 no feasible plan, 6 unrecoverable loss of peers, 7 non-finite loss
- 8 not permitted, 9 damaged checkpoint, 10 not equal to the plain loop, 130 interrupted
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from meshcee import __version__
from meshcee.errors import MeshceeError, UsageError
from meshcee.files import disk
from meshcee.files.steady import part_prints, steady_output, write_fact
from meshcee.files.token_file import read_token
from meshcee.user_code import thread_left
from peers.cli.session import KINDS, code_of_output, not_loaded, printable, spin_briefly, write_job
from peers.cli.settings import config_file, defaults_of
from peers.cli.settings.options import (
    Device,
    DeviceProcess,
    Identity,
    JobFile,
    Join,
    Json,
    Lent,
    Metrics,
    PeerName,
    Port,
    Profiles,
    Qr,
    RunName,
    ShownRun,
    ShowUi,
    Stages,
    Testbed,
    Threads,
    Valid,
    runs_here,
    spread,
)

__all__ = ["app", "main"]

GONE = 128 + signal.SIGPIPE  # as other programs whose reader has gone, `| head`
HELPS = ((), ("config",), ("doctor",), ("peer", "uninstall"), ("peer", "logs"))  # these need no file of settings

app = typer.Typer(
    name="meshcee",
    help="Train one model across scattered machines, exactly as one machine would have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
run_app = typer.Typer(help="Runs that this machine owns: list, stop, checkpoint, logs.", no_args_is_help=True)
app.add_typer(run_app, name="run")
peer_app = typer.Typer(invoke_without_command=True)
app.add_typer(peer_app, name="peer")
checkpoint_app = typer.Typer(help="Checkpoints of the runs that this machine owns.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshcee {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@peer_app.callback(epilog="Example: meshcee peer --join @invite.txt --memory 8GiB")
@spread(Lent)
def peer(
    context: typer.Context,
    lent: Lent,
    identity: Identity = None,
    open_: Annotated[
        bool, typer.Option("--open", help="A mesh without a key: any address of it lets anyone join.")
    ] = False,
    valid: Valid = "7d",
    shape: Annotated[str | None, typer.Option(help="Emulate: FILE:NAME of a testbed.")] = None,
    shape_device: Annotated[str | None, typer.Option(help="Emulate: which of its devices this peer is.")] = None,
    jitter_ms: Annotated[float, typer.Option(min=0.0, max=6e4, help="Emulate: how late a message may be.")] = 0.0,
    pace_gflops: Annotated[
        float | None, typer.Option(min=1e-6, max=1e9, help="Emulate: a device of this many GFLOP/s, on real links.")
    ] = None,
    device_process: DeviceProcess = None,
    direct_sums: Annotated[
        bool,
        typer.Option(
            "--direct-sums",
            help="Jobs with direct_sums may open connections from here that are not encrypted.",
        ),
    ] = False,
    lan: Annotated[
        bool,
        typer.Option("--lan/--no-lan", help="At a terminal: look for a mesh on this network, or show a short code."),
    ] = True,
    metrics: Metrics = None,
    as_json: Json = False,
) -> None:
    """Lend this machine to a mesh: start one, or join with --join.

    At a terminal, a machine that knows no mesh looks for one on its network, and asks for the code that the first machine shows.

    The first Ctrl-C or SIGTERM leaves once the running job goes on without this peer, the second at once.
    """
    if (word := context.invoked_subcommand) is not None:
        if any(getattr(context.get_parameter_source(p), "name", "") == "COMMANDLINE" for p in context.params):
            raise UsageError(f"what a service shall do stands behind the word: meshcee peer {word} ...")
        return
    token = read_token(lent.join)  # before torch is imported, which takes seconds
    from peers.cli.peer import PeerOptions, run_peer

    run_peer(
        PeerOptions(
            **{**vars(lent), "join": token},
            identity=identity,
            open=open_,
            valid=valid,
            shape=shape,
            shape_device=shape_device,
            jitter_ms=jitter_ms,
            pace_gflops=pace_gflops,
            device_process=device_process,
            direct_sums=direct_sums,
            lan=lan,
            metrics=metrics,
        ),
        as_json=as_json,
    )


@peer_app.command("install", epilog="Example: meshcee peer install --join @invite.txt --memory 8GiB")
@spread(Lent)
def peer_install(
    context: typer.Context,
    lent: Lent,
    only_print: Annotated[bool, typer.Option("--print", help="Show what would be written, and write nothing.")] = False,
) -> None:
    """Make the peer a service of this machine: it starts with it, is the same peer again, and restarts when it fails.

    On Linux a unit of your own systemd, on macOS an agent of launchd.
    """
    from peers.cli.joining.service import install, service_of

    kept = context.parent.params if context.parent is not None else {}  # as `meshcee peer` has them

    def is_said(name: str, value: object) -> bool:
        """The rest is in the file of settings, which the service reads itself, as `meshcee peer` does."""
        source = getattr(context.get_parameter_source(name), "name", "")
        return source in ("COMMANDLINE", "ENVIRONMENT") or (source == "DEFAULT_MAP" and value != kept.get(name, value))

    said = {name: value for name, value in vars(lent).items() if name != "join" and is_said(name, value)}

    def flags(values: dict[str, Any]) -> dict[str, Any]:
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}

    install(service_of(flags(said), lent.join, flags(kept)), lent.join, only_print=only_print)


@peer_app.command("uninstall", epilog="Example: meshcee peer uninstall")
def peer_uninstall() -> None:
    """End the service in order, and remove it; the peer's identity stays."""
    from peers.cli.joining.service import uninstall

    uninstall()


@peer_app.command("logs", epilog="Example: meshcee peer logs --follow")
def peer_logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on, as more comes.")] = False,
) -> None:
    """Show what the service has said."""
    from peers.cli.joining.service import show_logs

    show_logs(follow=follow)


@app.command(epilog="Example: meshcee init text job.py")
def init(
    kind: Annotated[str, typer.Argument(help="text, images, huggingface or table.", autocompletion=lambda: KINDS)],
    file: Annotated[Path, typer.Argument(help="The job file to write.")] = Path("job.py"),
) -> None:
    """Write a job file that runs as it is; put your own data and model in."""
    write_job(kind, file)
    typer.echo(f"{file}: train it with `meshcee train {shlex.quote(str(file))} --local 2`")


@app.command(epilog="Example: meshcee train job.py --join @invite.txt --out weights.safetensors")
def train(
    job: JobFile,
    join: Join = None,
    local: Annotated[
        int | None, typer.Option(min=1, max=256, help="No mesh: this many peers inside this process.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train so many steps; default: the job's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the trained weights to this .safetensors file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Capture, plan, memory and ETA; train nothing.")] = False,
    compute: Annotated[bool, typer.Option("--compute", help="Let this machine hold a stage too.")] = False,
    stages: Stages = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="What crosses links: auto (16 bits between regions), lossless (exact), none, bf16, int8, int4."
        ),
    ] = None,
    groups: Annotated[
        bool | None,
        typer.Option("--groups/--no-groups", help="Let devices of a region share a stage; sums then differ by 1e-5."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Train by the plan in this JSON file (as --dry-run --json prints it).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a few steps, measured and predicted, for ui.perfetto.dev to this file.")
    ] = None,
    device: Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            envvar="MESHCEE_THREADS",
            min=1,
            max=1024,
            help="CPU threads of every peer in this run; default: what all can spare.",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that read samples ahead of training.")] = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Which devices a plan may put together: none (one kernel class), devices, versions."),
    ] = None,
    audit: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the members' steps that this machine computes again, in secret."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with a run of this machine: RUN, RUN@STEP (after that many steps) or last; see `meshcee run list`."
        ),
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Follow this job's run on another machine; take over when its owner dies.")
    ] = False,
    regroup: Annotated[
        float | None,
        typer.Option(min=0.0, max=86400.0, help="Seconds to wait for peers when those that are left cannot go on."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between checkpoints; 0: as often as it costs nearly nothing.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Log each step: csv:FILE, tensorboard:DIR, wandb, mlflow, trackio or opentelemetry. Several are fine."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="While another job runs: wait for its end, or use idle peers.")
    ] = True,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare the captured model with the module before the first step."),
    ] = True,
    ui: ShowUi = False,
    metrics: Metrics = None,
    as_json: Json = False,
) -> None:
    """Train a job on a mesh (--join) or inside this process (--local N)."""
    from peers.cli.train import TrainOptions, run_train

    run_train(
        TrainOptions(
            job=job,
            join=join,
            local=local,
            steps=steps,
            out=out,
            dry_run=dry_run,
            compute=compute,
            stages=stages,
            device=device,
            threads=threads,
            resume=resume,
            checkpoint_every=checkpoint_every,
            codec=codec,
            regroup=regroup,
            plan=plan,
            trace=trace,
            wait=wait,
            groups=groups,
            standby=standby,
            verify=verify,
            mix=mix,
            audit=audit,
            workers=workers,
            log=tuple(log or ()),
            ui=ui,
            metrics=metrics,
        ),
        as_json=as_json,
    )


@app.command(epilog="Example: meshcee capture job.py --html blocks.html")
def capture(
    job: JobFile,
    html: Annotated[Path | None, typer.Option(help="Draw the blocks and cuts on this page.")] = None,
    as_json: Json = False,
) -> None:
    """Show how a job's model falls into blocks, and what each costs."""
    from peers.cli.check import run_capture

    run_capture(job, html, as_json=as_json)


@app.command(epilog="Example: meshcee plan --testbed cee-small --explain")
def plan(
    job: Annotated[Path | None, typer.Argument(help="With --join: a Python file that defines `job`.")] = None,
    join: Join = None,
    testbed: Testbed = None,
    profiles: Profiles = None,
    stages: Stages = None,
    codecs: Annotated[str, typer.Option(help="Of a testbed: what boundaries may travel as: bf16,int8,int4.")] = "bf16",
    effort: Annotated[
        float, typer.Option(min=0.01, max=1e5, help="Of a testbed: how long to search; 1 takes about 1 s.")
    ] = 1.0,
    start: Annotated[Path | None, typer.Option(help="Of a testbed: a plan in JSON to start from.")] = None,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option("--explain", help="Every figure behind the plan.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="What other codecs, pipelines and devices would give, and what hardware would."),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the cluster and one step to this file.")] = None,
) -> None:
    """Plan a job on a live mesh, or a testbed: who holds which blocks, how fast a step is, who is left out and why."""
    from peers.cli.plan import run_plan

    run_plan(
        job, join, testbed, profiles, stages, codecs, effort, start,
        as_json=as_json, in_full=explain, compare=compare, html=html,
    )  # fmt: skip


@app.command(epilog="Example: meshcee simulate plan.json --testbed cee-small --steps 5")
def simulate(
    file: Annotated[Path, typer.Argument(help="A plan as plan --json prints it; with --join a job, which is planned.")],
    join: Join = None,
    testbed: Testbed = None,
    profiles: Profiles = None,
    stages: Stages = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps to simulate.")] = 3,
    trace: Annotated[bool, typer.Option("--trace", help="Apply the link changes of the testbed's trace.")] = False,
    fail: Annotated[list[str] | None, typer.Option(help="PEER@SECONDS: this device dies then.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a plan on a testbed, or a job on a live mesh: when each step ends, and how busy every device is."""
    from peers.cli.plan import run_simulate

    run_simulate(file, join, testbed, profiles, stages, steps, trace=trace, fail=fail or (), as_json=as_json)


@app.command(epilog="Example: meshcee check job.py --stages 1,2 --steps 2")
def check(
    job: JobFile,
    stages: Annotated[
        str | None, typer.Option(help="Numbers of stages to compare, e.g. 1,2,3,5 (the default).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; default 3.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train some steps in the plain loop and on stages, in this process, and say equal, or what differs and why (exit code 10)."""
    from peers.cli.check import run_check

    run_check(job, stages, steps, threads, as_json=as_json)


@app.command(epilog="Example: meshcee status --join @invite.txt --watch")
def status(
    join: Join = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again every second, until Ctrl-C; a pipe hears of changes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the mesh: peers, links, coordinator, and the running plan."""
    from peers.cli.status import run_status

    run_status(join, as_json=as_json, watches=watch)


@app.command(epilog="Example: meshcee ui last")
def ui(
    context: typer.Context,
    run: ShownRun = None,
    join: Join = None,
    port: Port = 0,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")] = False,
    as_json: Json = False,
) -> None:
    """Show a mesh (--join), a run, or without either all runs of this machine on a page of this machine, live."""
    from peers.cli.ui.command import run_ui

    is_typed = getattr(context.get_parameter_source("join"), "name", "") == "COMMANDLINE"
    run_ui(run, join if run is None or is_typed else None, port, opens=opens, as_json=as_json)


@app.command(epilog="Example: meshcee report last --html run.html")
def report(
    run: RunName = "last",
    html: Annotated[Path | None, typer.Option(help="Write the run as one page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run of this machine into one file: its curves, plan, events and mesh, to send to somebody."""
    from peers.cli.ui.command import run_report

    run_report(run, html, as_json=as_json)


@app.command(epilog="Example: meshcee top --join @invite.txt")
def top(run: ShownRun = None, join: Join = None) -> None:
    """Show a mesh (--join) or a run live in a terminal: peers, pipeline, loss, events, limit. Needs the extra `top`."""
    from peers.cli.top import run_top

    run_top(run, join)


@app.command(
    epilog="Example: meshcee config peer --memory 8GiB",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def config(
    context: typer.Context,
    as_json: Json = False,
) -> None:
    """Show every setting, its value, and where that comes from: a flag, the environment, the file or the default.

    With a command behind it, as you would type that one: its settings only, and nothing is run.
    """
    from peers.cli.settings.listing import run_config

    run_config(app, context.args, context.find_root().default_map or {}, as_json=as_json)


@app.command(epilog="Example: meshcee doctor --join @invite.txt")
def doctor(join: Join = None, as_json: Json = False) -> None:
    """Say what is well on this machine and what is not, each with what mends it; with --join, in that mesh too."""
    from peers.cli.doctor import run_doctor

    run_doctor(join, as_json=as_json)


@app.command(epilog="Example: meshcee drain anna --join @invite.txt")
def drain(
    peer: PeerName,
    join: Join = None,
    as_json: Json = False,
) -> None:
    """Ask a peer to leave: its job goes on without it first. Returns when it has gone."""
    from peers.cli.peer import run_drain

    run_drain(peer, join, as_json=as_json)


@app.command(epilog="Example: meshcee token --valid 12h")
def token(join: Join = None, valid: Valid = "7d", qr: Qr = False) -> None:
    """Print a fresh invite to the mesh that this machine is an admin of; `invite` has more to say."""
    from peers.cli.members import run_invite
    from peers.cli.peer import parse_duration_s

    run_invite(join, "own", None, parse_duration_s(valid), qr=qr, as_json=False)


@app.command(epilog="Example: meshcee invite --role compute --uses 3 --for 7d")
def invite(
    join: Join = None,
    role: Annotated[
        str,
        typer.Option(help="What who comes by it may do: compute, own (offer jobs too), admin (invite and revoke too)."),
    ] = "compute",
    uses: Annotated[
        int | None,
        typer.Option(min=0, max=1 << 31, help="How many peers it lets in; 0: any number. Default: 1, with --code 8."),
    ] = None,
    valid: Annotated[str, typer.Option("--for", help="How long it lets peers in, e.g. 12h, 7d.")] = "1d",
    code: Annotated[
        bool,
        typer.Option("--code", help="Show a short code in place of the line, for a machine on this network; wait."),
    ] = False,
    qr: Qr = False,
    as_json: Json = False,
) -> None:
    """Print a line that lets others join; on the machine that has started the mesh, or another admin's."""
    from peers.cli.members import run_invite
    from peers.cli.peer import parse_duration_s

    if uses is None:
        from peers.cli.joining.nearby import CODE_USES

        uses = CODE_USES if code else 1
    run_invite(join, role, uses or None, parse_duration_s(valid, "--for"), code=code, qr=qr, as_json=as_json)


@app.command(epilog="Example: meshcee members --join @invite.txt")
def members(join: Join = None, as_json: Json = False) -> None:
    """Show who is in the mesh as what, and who was revoked."""
    from peers.cli.members import run_members

    run_members(join, as_json=as_json)


@app.command(epilog="Example: meshcee revoke carl")
def revoke(
    peer: PeerName,
    join: Join = None,
    everybody: Annotated[bool, typer.Option("--all", help="And all who came by the same invite.")] = False,
    as_json: Json = False,
) -> None:
    """End a membership, and the invite that it came by; on an admin's machine."""
    from peers.cli.members import run_revoke

    run_revoke(peer, join, everybody=everybody, as_json=as_json)


@app.command(epilog="Example: meshcee local --peers 3")
def local(
    peers: Annotated[
        int | None, typer.Option("-n", "--peers", min=1, max=64, help="How many peers; default: 4.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Emulate a testbed: NAME, or FILE:NAME; sets the peers too.")
    ] = None,
    jitter_ms: Annotated[
        float | None, typer.Option(min=0.0, max=6e4, help="With --shape: how late a message may be.")
    ] = None,
    job: Annotated[Path | None, typer.Option(help="Train this job on it, then end; default: run until Ctrl-C.")] = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Start a mesh of real peer processes on this machine, with emulated devices and links if a shape is given."""
    from peers.cli.local import run_local

    run_local(peers, shape, jitter_ms, job, threads or 1, as_json=as_json)


@app.command(epilog="Example: meshcee demo --peers 2 --steps 20")
def demo(
    peers: Annotated[
        int,
        typer.Option("-n", "--peers", min=1, max=10, help="How many peers train the demo; its model has 10 blocks."),
    ] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    ui: ShowUi = False,
    as_json: Json = False,
) -> None:
    """Train a character GPT on four local peers and check it against the plain PyTorch loop."""
    from peers.cli.demo import run_demo

    run_demo(peers, steps, ui=ui, as_json=as_json)


@checkpoint_app.command("export", epilog="Example: meshcee checkpoint export last --out weights.safetensors")
def checkpoint_export(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's id, its beginning, or last; RUN@STEP for the state after that many steps.",
            autocompletion=runs_here,
        ),
    ],
    hf: Annotated[Path | None, typer.Option(help="Write what Hugging Face's from_pretrained loads, here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write one .safetensors file of the model's own names.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the average of the weights, of a job with ema=.")] = False,
    as_json: Json = False,
) -> None:
    """Take the weights out of a run."""
    from peers.cli.runs import export

    export(run, hf, out, ema=ema, as_json=as_json)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def runs() -> None:
    raise UsageError("`meshcee runs` is called `meshcee run list`: type that")


@run_app.command("list", epilog="Example: meshcee run list --json")
def run_list(as_json: Json = False) -> None:
    """List the runs of this machine, newest first, with the checkpoints that each can go on from."""
    from peers.cli.runs import list_runs

    list_runs(as_json=as_json)


@run_app.command("stop", epilog="Example: meshcee run stop last")
def run_stop(run: RunName = "last") -> None:
    """Finish the running step, save, and end the run."""
    from peers.cli.runs import stop_run

    stop_run(run)


@run_app.command("checkpoint", epilog="Example: meshcee run checkpoint last")
def run_checkpoint(run: RunName = "last") -> None:
    """Save the state before the next step of a run, and go on."""
    from peers.cli.runs import save_run

    save_run(run)


@run_app.command("logs", epilog="Example: meshcee run logs last")
def run_logs(run: RunName = "last", as_json: Json = False) -> None:
    """Print the reports of a run."""
    from peers.cli.runs import show_logs

    show_logs(run, as_json=as_json)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `meshcee` script: runs a command, then exits with the documented code."""
    spin_briefly(os.environ)
    steady_output()
    defaults: dict[str, Any] = {}
    try:
        told = sys.argv[1:] if arguments is None else arguments
        defaults = _defaults(told)
        with part_prints(wanted="--json" in told and "--help" not in told):
            app(arguments, default_map=defaults)
    except SystemExit as done:  # click has told what is wrong, but not where that may stand
        if done.code == UsageError.exit_code and defaults:
            print(f"meshcee: options also come from {config_file(os.environ)}", file=sys.stderr)
        sys.exit(GONE if isinstance(done.__context__, BrokenPipeError) else done.code or code_of_output(told))
    except MeshceeError as error:
        if os.environ.get("MESHCEE_LOG", "").lower() == "debug":
            traceback.print_exception(error)
        _fail(error, error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(GONE)
    except MemoryError as error:  # wherever it happened to be: more of the same would not work either
        said = f" ({error})" if str(error) else ""
        _fail(MeshceeError(f"no memory is left on this machine{said}; free some, then run the command again"), 1)
    except Exception as error:
        if (unloaded := not_loaded(error)) is not None:
            _fail(unloaded, unloaded.exit_code)
        if isinstance(error, OSError) and disk.is_refusal(error):  # a file that the user has named
            kind = disk.kind_of(error)
            _fail(kind(f"{disk.refusal(error)}; {disk.remedy(error, 'name another place')}"), kind.exit_code)
        traceback.print_exc()
        _fail(error, 1)
    finally:
        if (place := thread_left()) and not sys.stderr.closed:
            said = f"meshcee: the command has ended, and a thread of yours{place} has not: Ctrl-C ends it"
            print(printable(said), file=sys.stderr)


def _defaults(arguments: list[str]) -> dict[str, Any]:
    """What the file of settings says. A wrong one does not lock out what helps to mend it."""
    try:
        return defaults_of(app, os.environ)
    except UsageError as error:
        words = tuple(word for word in arguments if not word.startswith("-"))
        if not (words[:1] in HELPS or words[:2] in HELPS or {*arguments} & {"--help", "--version"}):
            raise
        print(printable(f"meshcee: {error}; this command goes on without that file"), file=sys.stderr)
        return {}


def _fail(error: BaseException, code: int) -> None:
    arguments: list[Any] = sys.argv
    if "--json" in arguments:
        write_fact({"error": type(error).__name__, "message": str(error), "exit_code": code})
    bug = " (this is a bug of meshcee; please report it with the lines above)"
    print(printable(f"meshcee: {error}{'' if isinstance(error, MeshceeError) else bug}"), file=sys.stderr)
    sys.exit(code)
