"""Torch's default process group for one row: gloo over the lab's device, gone before the next row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from benchmarks.rivals.worker import Order

__all__ = ["process_group"]


@contextmanager
def process_group(order: Order) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lab0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{order.addresses[0]}:{order.port}",
        rank=order.rank,
        world_size=order.world,
        timeout=timedelta(seconds=120),
    )
    yield
    dist.barrier()  # nobody leaves while another still reads
    dist.destroy_process_group()
