"""Loads a user's job file: an ordinary Python file that defines `job = meshcee.Job(...)`. Runs on the owner only."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from meshcee.errors import MeshceeError, UsageError
from meshcee.job import Job

__all__ = ["load_job"]


def load_job(path: Path) -> Job:
    """Import the file under the name `job_file` and return its `job`. Raises UsageError naming the line that failed."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give a Python file that defines `job = meshcee.Job(...)`")
    spec = importlib.util.spec_from_file_location("job_file", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["job_file"] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except MeshceeError:
        raise
    except Exception as error:
        lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        where = f", line {lines[-1].lineno}" if lines else ""
        raise UsageError(f"{path}{where}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    job = getattr(module, "job", None)
    if not isinstance(job, Job):
        raise UsageError(f"{path} defines no `job = meshcee.Job(...)`")
    return job
