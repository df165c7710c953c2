"""`python -m benchmarks.rivals.torch_worker`: what torch brings along: pipelines, DDP, and one device alone."""

from __future__ import annotations

from benchmarks.rivals import data_parallel, pipeline
from benchmarks.rivals.worker import serve

if __name__ == "__main__":
    pipelines = dict.fromkeys(pipeline.SCHEDULES, pipeline.trainer)
    serve({**pipelines, "ddp": data_parallel.trainer, "single": data_parallel.trainer})
