"""How a command runs a coroutine: uvloop, Ctrl-C twice, and errors unwrapped from task groups.

The idea: the first Ctrl-C (or SIGTERM) asks politely, the second cancels; either way every `async with` is left, so
nothing of ours remains. A job file is the user's own Python: it is loaded here, on the owner, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from rich.console import Console
from rich.text import Text

from meshcee.errors import MeshceeError, NotNowError, UsageError, unwrap
from meshcee.files import disk
from meshcee.files.steady import lost_lines, written_apart
from meshcee.user_code import import_job_file, under_way

if TYPE_CHECKING:
    from meshcee.job import Job

__all__ = [
    "KINDS",
    "Interrupted",
    "Screen",
    "configure_logging",
    "load_job",
    "not_loaded",
    "parse_bytes",
    "printable",
    "run_async",
    "safetensors_file",
    "short_ids",
    "spin_briefly",
    "waiting",
    "write_job",
]

T = TypeVar("T")

ENDS_WITHIN_S = 15.0  # of the moment when everything was asked to end; what is bounded takes a few seconds
FILE_COLUMNS = 200  # that a table may take where no terminal says how many there are
WRITTEN_WITHIN_S = 0.2  # a last line, by the thread that writes


class Interrupted(BaseException):
    """The user asked twice; becomes exit code 130."""


def configure_logging(*, as_json: bool, level: str | None = None) -> None:
    """Logs go to standard error: key=value lines, or JSON with --json. MESHCEE_LOG sets the level; `level` is the default."""
    name = os.environ.get("MESHCEE_LOG", level or "info").upper()
    renderer: Any = structlog.processors.JSONRenderer()
    if not as_json:  # with plain tracebacks: with every local variable, one takes hundreds of lines
        plain = structlog.dev.plain_traceback
        screen = Screen(stderr=True)
        colors = screen.is_live and not screen.no_color
        renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
            structlog.processors.format_exc_info if as_json else structlog.dev.set_exc_info,
            _printable,
            *([] if as_json else [_shortened]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping().get(name, logging.INFO)),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def code_of_output(told: Sequence[str]) -> int:
    """Of a command that has ended well: 0, or another one if what it is run for is what it prints, and that is lost."""
    if not (lost := lost_lines()):
        return 0
    print(f"meshcee: standard output cannot be written: {lost}", file=sys.stderr)
    return 0 if told[:1] in (["demo"], ["peer"], ["train"]) else NotNowError.exit_code


def printable(text: str) -> str:
    """The text as a terminal may be given it: what could move its cursor or turn its letters around is spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _printable(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A step of logging. A traceback has line ends of its own; nothing else has."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def short_ids(text: str) -> str:
    """With the ends of peer ids in place of whole ones, as people tell them apart. An address to join at keeps its own."""
    return PEER_ID.sub(lambda found: f"…{found[0][-8:]}", text)


def _shortened(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A step of logging, for people."""

    def of(value: Any) -> Any:
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(of, value))
        if type(value) is dict:
            return {of(key): of(one) for key, one in value.items()}
        return short_ids(value) if isinstance(value, str) else value

    return {key: value if key == "exc_info" else of(value) for key, value in event.items()}


class Screen(Console):
    """A terminal or a pipe for people. Texts come from other machines too, so none of them is read as markup.

    Our own marks are `Text` and `style`.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.soft_wrap = True  # a sentence is one line, for whoever searches in a file
            if "COLUMNS" not in os.environ:
                self.width = FILE_COLUMNS

    @property
    def is_live(self) -> bool:
        """Whether what stands on it can be drawn anew: it is a terminal that knows escape sequences, whatever FORCE_COLOR says."""
        return self.is_terminal and self.file.isatty() and not self.is_dumb_terminal

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


@contextmanager
def waiting(for_what: str, *, as_json: bool = False) -> Iterator[None]:
    """On a terminal something moves while nothing else is to be said; a pipe hears nothing of that."""
    screen = Screen(stderr=True)
    if as_json or not screen.is_terminal:
        yield
        return
    with screen.status(for_what):
        yield


PEER_ID = re.compile(r"(?<!/p2p/)\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")
UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def safetensors_file(out: Path) -> Path:
    """UsageError for any other name of what --out writes."""
    if out.suffix != ".safetensors":
        name = out / "model.safetensors" if out.is_dir() else out.with_name(f"{out.stem}.safetensors")
        raise UsageError(f"--out writes a safetensors file; name it {name}")
    return out


def parse_bytes(text: str) -> int:
    """ "8GiB", "512M" or a plain number of bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--memory {text!r} is not a size; write for example 8GiB or 512MiB")
    return int(float(match[1]) * UNITS[match[2]])


HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
ENDING = (signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP is not None else []))


def end_anyway() -> None:
    """End the process in a while even if code of the user's, in a thread, never returns: nobody can end a thread."""

    def end() -> None:
        if what := under_way():
            print(f"ended without waiting for {what}, which has not returned", file=sys.stderr, flush=True)
            time.sleep(WRITTEN_WITHIN_S)
            os._exit(130)

    timer = threading.Timer(ENDS_WITHIN_S, end)
    timer.daemon = True
    timer.start()


def run_async(main: Coroutine[Any, Any, T], polite: Callable[[], bool] | None = None) -> T:
    """Run to the end. `polite()` is called at the first Ctrl-C and returns whether it could ask for an orderly end.

    SIGTERM is another Ctrl-C, and so is SIGHUP, of a terminal that was closed, unless whoever started us (nohup) ignores that.
    """
    handlers = {number: signal.getsignal(number) for number in ENDING}
    if handlers.get(HANGUP) is signal.SIG_IGN:
        del handlers[HANGUP]

    import uvloop  # here, so that `meshcee doctor` can say that it is missing

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        count = 0

        def interrupt() -> None:
            nonlocal count
            count += 1
            if count > 1 or polite is None or not polite():
                print("interrupted: ending", file=sys.stderr, flush=True)
                task.cancel()
                end_anyway()

        for number in handlers:
            loop.add_signal_handler(number, interrupt)
        try:
            return await main
        except asyncio.CancelledError:
            if count:
                raise Interrupted from None
            raise

    try:
        with written_apart(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(supervised())
    except Interrupted:
        sys.exit(130)
    except BaseExceptionGroup as group:
        error = unwrap(group)
    finally:  # a thread of the job's file may go on, and whoever waits for it can still end that
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if isinstance(error, Interrupted | asyncio.CancelledError | KeyboardInterrupt):
        sys.exit(130)
    raise error  # out here, so that its cause stays what it was


SETTINGS = {
    "GOMP_SPINCOUNT": "10000",  # GNU, in torch for Linux: some 10 us
    "KMP_BLOCKTIME": "1",  # LLVM, in torch for macOS: ms
}
OWN = (*SETTINGS, "OMP_WAIT_POLICY")


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Of this process and of those that it starts."""
    if not any(name in environment for name in OWN):
        environment.update(SETTINGS)


NO_MEMORY = ("failed to map segment from shared object", "Cannot allocate memory")
KINDS = ("text", "images", "huggingface", "table")


def write_job(kind: str, path: Path) -> None:
    """A job file that runs as it is, to be changed by its user. UsageError for a file that is there already."""
    if kind not in KINDS:
        raise UsageError(f"there is no job of the kind {kind!r:.40}: say {', '.join(KINDS)}")
    if path.suffix != ".py":
        raise UsageError(f"{path}: a job is a Python file, whose name ends with .py, as job.py")
    if not os.path.isdir(path.absolute().parent):
        raise UsageError(f"there is no folder {path.parent} for {path.name}: make it, or name a file in another one")
    text = Path(__file__).with_name("jobs").joinpath(f"{kind}.txt").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("FILE", path.name))
    except FileExistsError as error:
        raise UsageError(f"there is a file {path} already: name another one") from error
    except OSError as error:
        raise disk.kind_of(error)(f"cannot write {path}: {error.strerror}; {disk.remedy(error)}") from error


def not_loaded(error: BaseException) -> NotNowError | None:
    """What to tell where the system had no memory for a library. The loader says that in words alone, and libraries add to them."""
    at: BaseException | None = error
    while at is not None:
        said = str(at).strip()
        if isinstance(at, ImportError | OSError) and said.endswith(NO_MEMORY):
            return NotNowError(
                f"this machine, or a limit of it, leaves meshcee no memory ({said}): free some, or raise the "
                "limit (`ulimit -v` shows one, in KiB; a batch system has its own)"
            )
        at = at.__cause__ or at.__context__
    return None


def load_job(path: Path) -> Job:
    """Import the file under the name `job_file` and return its `job`. Raises UsageError naming the line that failed."""
    from meshcee.job import Job  # torch comes with it, and what OpenMP reads must be set before

    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a Python file that defines `job = meshcee.Job(...)`")
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give a Python file that defines `job = meshcee.Job(...)`")
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file: its name ends with .py")
    try:
        module = import_job_file(str(path))
    except MeshceeError:
        raise
    except (Exception, SystemExit) as error:
        file = path.resolve()
        lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file]
        told, code = f"{type(error).__name__}: {error}", (lines[-1].line or "") if lines else ""
        if isinstance(error, SystemExit):
            told = (
                f"the file ended by itself (status {error.code or 0}); a job file is given no arguments: give its options "
                "defaults, or read os.environ, and let the file define `job` to its last line"
            )
        elif isinstance(error, ImportError) and "relative import" in str(error):
            told += f"; a job file is run by itself: {_instead(file, code)}"
        elif isinstance(error, ModuleNotFoundError) and (folder := _above(file, error.name or "")) is not None:
            told += (
                f"; it lies in {folder}, and a job file imports from its own folder: keep the file there, or say "
                f"PYTHONPATH={shlex.quote(str(folder))} before the command"
            )
        where = f", line {lines[-1].lineno}" if lines else ""
        raise UsageError(f"{path}{where}: {told}") from error
    job = getattr(module, "job", None)
    if not isinstance(job, Job):
        other = next(
            (f"; it has one of the name {n}: call that job" for n, it in vars(module).items() if isinstance(it, Job)),
            "",
        )
        raise UsageError(f"{path} defines no `job = meshcee.Job(...)`{other}")
    return job


def _above(file: Path, module: str) -> Path | None:
    """The folder above that of the job's file from which this module could be imported; the nearest, or none."""
    places = [
        folder for folder in file.parents[1:] if (folder / module).is_dir() or (folder / f"{module}.py").is_file()
    ]
    return places[0] if places and module.isidentifier() else None


def _instead(file: Path, code: str) -> str:
    """What to do about a relative import that this line of the job's file has, or leads to."""
    found = re.search(r"(?:from|import)\s+(\.*)([\w.]*)", code)
    dots, rest = found.groups() if found else ("", "")
    folder = top = file.parents[: max(len(dots), 1)][-1]
    while (top.parent / "__init__.py").exists():
        top = top.parent
    names = folder.relative_to(top.parent).parts
    package = ".".join(names) if names and all(name.isidentifier() for name in names) else "<package>"
    return (
        f"write `from {package}{rest and '.'}{rest} import ...` and keep the file beside the package, in {top.parent}"
    )
