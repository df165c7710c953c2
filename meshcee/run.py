"""The front door of the Python API: `meshcee.train(job)` and `async with meshcee.join(...) as mesh`.

The idea: a script needs one call; everything else is behind it. This file, `__main__` and the room
`hf` are the only ones in the package that import upward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from meshcee.callbacks import called
from meshcee.errors import UsageError, unwrap
from meshcee.job import Job, check_is_job
from meshcee.user_code import refuse_in_reader

if TYPE_CHECKING:
    from meshcee.callbacks import Callback, Control
    from meshcee.capture import Capture
    from meshcee.equality import Checked
    from meshcee.plan import Plan
    from peers.measure import Trace
    from peers.node import Mesh, Result
    from peers.owner import Report

__all__ = ["check", "join", "train"]

T = TypeVar("T")


@asynccontextmanager
async def join(
    address: str | None = None,
    *,
    local: int | None = None,
    compute: bool = False,
    device: str = "cpu",
    measures: bool = True,
    keeps: bool = False,
) -> AsyncIterator[Mesh]:
    """Join a mesh as an owner; `compute` lends this machine too. `local=N` makes N peers in this process instead.

    Those measure nothing with `measures=False`: then every job needs a plan of its own. Their runs have a folder with `keeps=True`.

    >>> async with meshcee.join(token) as mesh:
    ...     async for report in mesh.train(job):
    ...         print(report.step, report.loss)
    """
    import structlog

    refuse_in_reader()
    from peers.node import JoinOptions
    from peers.node import join as joined

    if not structlog.is_configured():  # a script that has not asked for logs gets warnings only
        told = structlog.make_filtering_bound_logger(logging.WARNING)
        # Python's own, on standard error unless the script says otherwise: a line that its disk refuses ends nothing.
        structlog.configure(wrapper_class=told, logger_factory=structlog.stdlib.LoggerFactory())
    if address is not None:
        from meshcee.files.token_file import read_token

        address = read_token(address)
    if (address is None) == (local is None):
        raise UsageError("give the token or address of a mesh, or local=N for N peers in this process")
    _check_count(local)
    home: Home | None = None
    if address or keeps:
        from meshcee.files.home import Home

        home = Home()
    shelves = home is not None
    options = JoinOptions(
        token=address, local=local, compute=compute, device=device, measures=measures, shelves=shelves
    )
    own: BaseException | None = None
    try:
        async with joined(options, home) as mesh:
            try:
                yield mesh
            except BaseException as error:
                own = error
                raise
        return
    except BaseExceptionGroup as group:  # of task groups of ours: a user's `except` shall not have to know them
        failure = unwrap(group) if own is None or isinstance(own, asyncio.CancelledError) else own
    raise failure


def train(
    job: Job,
    *,
    join: str | None = None,
    local: int | None = None,
    compute: bool = False,
    device: str = "cpu",
    keeps: bool = False,
    on_report: Callable[[Report], None] | None = None,
    captured: Capture | None = None,
    stages: int | None = None,
    plan: Plan | None = None,
    codec: str | None = None,
    resume: str | None = None,
    after: str = "",
    on_plan: Callable[[Plan, Mapping[str, str]], None] | None = None,
    trace: Trace | None = None,
    wait: bool = True,
    on_wait: Callable[[str], None] = lambda text: None,
    callbacks: Sequence[Callback | Callable[[Control, Report], object] | str] = (),
    keep_best: str | None = None,
    early_stop: int | None = None,
) -> Result:
    """Train to the end and return losses, metrics and the state dict; without `join`, in this process on `local` peers.

    `join`, `local`, `compute`, `device` and `keeps` are those of `meshcee.join`, all others those of its `mesh.train`.
    `keep_best` says `keeps=True` too, and so does a callback whose `needs_folder` is true, as that of `KeepBest`.
    `join` may be `@FILE`, a file whose first line is the token.
    Raises a MeshceeError naming the cause. Where an event loop runs already, as in a notebook, it trains beside that one and
    still returns only at the end; code that must not wait uses `meshcee.join`.
    """
    from meshcee.capture import capture  # here, as Ctrl-C would not be heard before its end in a loop.

    refuse_in_reader()
    check_is_job(job)
    _check_count(local)
    callbacks = called(callbacks)
    keep = keeps or keep_best is not None or any(getattr(one, "needs_folder", False) for one in callbacks)
    if join is not None or resume is not None or keep:
        from meshcee.files.home import Home
        from meshcee.files.token_file import read_token
        from peers.node.early import look_for

        join = read_token(join)
        look_for(join, Home() if join or keep else None, resume)
    from peers.node.early import check_told

    check_told(stages, plan)
    if keep_best is not None or early_stop is not None:
        from meshcee.callbacks.rules import rules

        rules(keep_best, early_stop, job.metrics)
    found = captured or capture(job)

    async def main() -> Result:
        measures = plan is None or job.adapt  # else nobody asks for figures
        count = local if join or local else 1
        async with _joined(join, local=count, compute=compute, device=device, measures=measures, keeps=keep) as mesh:
            async for report in mesh.train(
                job,
                captured=found,
                stages=stages,
                plan=plan,
                codec=codec,
                resume=resume,
                after=after,
                on_plan=on_plan,
                trace=trace,
                wait=wait,
                on_wait=on_wait,
                callbacks=callbacks,
                keep_best=keep_best,
                early_stop=early_stop,
            ):
                if on_report is not None:
                    on_report(report)
            return mesh.result

    return run_blocking(main)


_joined = join


def _check_count(local: Any) -> None:
    if local is not None and (type(local) is not int or local < 1):
        raise UsageError(f"local={local!r:.40}: how many peers this process shall have, as local=2")


def run_blocking(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end, in this thread; where a loop runs already, as in a notebook, beside it in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    begun: Future[Callable[[], object]] = Future()

    async def told() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await main()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshcee") as pool:
        done = pool.submit(lambda: asyncio.run(told()))
        try:
            return done.result()
        except KeyboardInterrupt:
            with contextlib.suppress(RuntimeError):  # its loop has ended by itself
                begun.result()()
            raise  # once the pool has ended


def check(
    job: Job, stages: Sequence[int] = (1, 2, 3, 5), steps: int | None = None, *, captured: Capture | None = None
) -> Checked:
    """Train some steps (3 unless given) in the plain loop and on each number of stages, in this process, without a mesh.

    The result is `equal`, or its `differs` says which tensor differs first, in which step and after which operation.
    `blame` says whether that is the "data", the "capture", the "cut" or the "codec".
    """
    from meshcee.equality import check as checked

    return checked(job, stages, steps, captured=captured)
