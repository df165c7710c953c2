"""hivemind's collaborative optimizer: peers gather a batch together, then average their gradients.

The idea: as in hivemind's own examples, every peer holds the whole model and computes at its own pace until all together have
the batch; here each takes a fixed share of the step's samples, in proportion to its speed, so that the step is the plain
loop's. Matchmaking time is as short as its round trips allow.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.rivals.data_parallel import shares
from benchmarks.rivals.job import build, job, loss
from benchmarks.rivals.pace import paced
from benchmarks.rivals.worker import Order, Train, samples_of, say, serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hivemind

MATCHMAKING_S = 2.0
WAIT_S = 180.0


@contextmanager
def trainer(order: Order) -> Iterator[Train]:
    host = f"/ip4/{order.addresses[order.rank]}/tcp"
    seeds = [order.seed] if order.seed else []
    dht = hivemind.DHT(initial_peers=seeds, host_maddrs=[f"{host}/{order.port + order.rank}"], start=True)
    if order.rank == 0:
        say(seed=str(dht.get_visible_maddrs()[0]))
    part = shares(job.batch_size, order.speeds_flops_per_s)[order.rank]
    size = part.stop - part.start
    model = paced(build(), [size * work for work in order.flops], order.device())
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="wan",
        target_batch_size=job.batch_size,
        batch_size_per_step=size,
        optimizer=job.optimizer.build(dict(model.named_parameters())),
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=WAIT_S,
        next_chunk_timeout=WAIT_S,  # as long as matchmaking, unless told: on a slow line half of the gradients would be left out
        delay_optimizer_step=False,
        delay_state_averaging=False,
        average_state_every=1 << 30,  # all start equal and stay so
        tracker_opts={"min_refresh_period": 0.1, "max_refresh_period": 1.0, "default_refresh_period": 0.5},
    )
    # hivemind makes the optimizer's state by a step with zero gradients, which Adam counts; the plain loop has none.
    for state in optimizer.state_averager.optimizer.state.values():
        state["step"].zero_()
    for parameter, fresh in zip(model.parameters(), build().parameters(), strict=True):
        parameter.data.copy_(fresh.data)

    def train(step: int) -> tuple[float, int]:
        x, y = samples_of(step, part)
        value = loss(model(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        deadline_s = time.monotonic() + WAIT_S
        optimizer.step(batch_size=size)
        while optimizer.local_epoch <= step:  # the others are not done yet
            if time.monotonic() > deadline_s:
                sys.exit(f"step {step} was not made within {WAIT_S:.0f} s: the peers do not find each other")
            # What `step` would do, without counting another (empty) accumulation, by which it would divide the gradient.
            optimizer._maybe_schedule_gradient_averaging()
            if optimizer.tracker.ready_to_update_epoch:
                optimizer._update_global_epoch(None)
            time.sleep(0.02)
        optimizer.zero_grad()
        return value.item(), size

    yield train
    time.sleep(2.0)  # nobody leaves while another still averages
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    serve({"hivemind": trainer})
