"""Settings that every test shares, and how workers share the tests and the machine.

The idea: a worker takes whole files, which capture a job or start a mesh once. A test that measures seconds, marked `alone`, waits
at a door until no other worker is in a test, and keeps it shut meanwhile. A family of cases, marked `cases(N)`, shows with N of
them what every commit must show; the others are `slow`.
"""

import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from hypothesis import HealthCheck, settings

# Two slow cores must not turn a property test into a timing test.
settings.register_profile("meshcee", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meshcee")

# The contract of equality is for one number of threads: every process that a test starts has one, and so has this one.
torch.set_num_threads(1)

# Captures leave many objects that live long: looked for less often, they cost 5 % less of all the tests' time.
gc.set_threshold(10_000, 20, 50)

# A shell that starts the tests in the background has them ignore Ctrl-C, and so every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LOCKS = "MESHCEE_TEST_LOCKS"  # a folder that the workers inherit


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[LOCKS] = folder = tempfile.mkdtemp(prefix="meshcee-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each family with `cases(N)`, N that lie evenly stay; the others are `slow`, as some may be anyway."""
    families: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (marker := item.get_closest_marker("cases")) and not item.get_closest_marker("slow"):
            families.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    for (_, shown), cases in families.items():
        stay = {len(cases) * k // shown for k in range(shown)}
        for k in set(range(len(cases))) - stay:
            cases[k].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()  # torch and the tests: a run need not look through them, 0.2 s each time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of tests/mesh one worker takes all files: they share five peers."""
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/mesh" if nodeid.startswith("tests/mesh/") else nodeid.partition("::")[0]

    return WholeFiles(config, log)


@pytest.fixture(autouse=True, scope="module")
def looked_through_once() -> Iterator[None]:
    """What a file leaves for those behind it, as captures that are cached, is no more looked through: a second for each look."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def thawed() -> Iterator[None]:
    """For a test of what the collector passes over: nothing yet, as in a user's process."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets the level of logs for all; the next test begins as the first did."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    """A job's file leaves its folder to import from, as functions of the file may; the next test finds none of its modules."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with _room(Path(os.environ[LOCKS]), alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def _room(folder: Path, *, alone: bool) -> Iterator[None]:
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
