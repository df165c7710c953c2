"""Walks the steps of one stage: decides by the local rule, computes on the device's thread, sends what is ready.

The idea: a step is a transaction. F, B and W run as arrivals allow and windows permit; when the first stage has run
its last B every gradient exists, so it sends the commit down the chain; a stage applies once its own W's are done and
it knows of the commit. Until then `rollback` forgets the step. There is no barrier between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.capture.program import Value
from meshcee.errors import NonFiniteLossError
from meshcee.job import seed_of
from meshcee.plan import Stage
from meshcee.schedule.actions import Kind
from meshcee.schedule.zero_bubble import StageView, choose
from peers import messages, tensors
from peers.coding import Coding
from peers.compute import Compute
from peers.inbox import Activation, Collect, Inbox, TakeSnapshot
from peers.messages import Step
from peers.outbox import Outbox
from peers.snapshot import Held
from peers.stage import StageRunner, clip_coefficient, global_norm
from peers.state_frames import state_frames
from peers.transport.base import Frame

__all__ = ["Executor", "Place", "StageFlops"]


@dataclass(frozen=True)
class StageFlops:
    """Work of one micro-batch, forward and input-gradient and weight-gradient, that emulated devices are paced by."""

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where this stage stands: its index, its plan entry, and with whom it shares parameters.

    `partial_to` maps a shared parameter to the earlier stage that adds its own use; `partial_from` names the shared
    parameters whose later uses must arrive first; `totals_to` maps a stage to the parameters whose total it needs;
    `totals_from` names those that arrive.
    """

    index: int
    count: int
    stage: Stage
    epoch: tuple[int, int]
    seed: int
    clip_norm: float | None
    norm_order: Mapping[str, int]  # parameter -> its place in named_parameters
    norm_dtype: torch.dtype = torch.float32  # in which norms are combined: what all gradients promote to
    partial_to: Mapping[str, int] = field(default_factory=dict)
    partial_from: frozenset[str] = frozenset()
    totals_to: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    totals_from: frozenset[str] = frozenset()
    arriving: Mapping[str, str] = field(default_factory=dict)  # F and B -> the codec that the neighbour sends by
    limit_bytes: int = 1 << 30  # the most that one of its frames may unfold to

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def fused(self) -> bool:
        """Split only where another stage waits for B: not on the first stage, nor where W feeds an earlier stage."""
        return self.is_first or bool(self.partial_to)


class Executor:
    """Runs the walks that the inbox receives, in order, until the owner's stream ends or something fails."""

    def __init__(
        self, runner: StageRunner, place: Place, inbox: Inbox, compute: Compute, owner: Outbox, flops: StageFlops
    ) -> None:
        self._runner = runner
        self._place = place
        self._inbox = inbox
        self._compute = compute
        self._owner = owner
        self._flops = flops
        self.coding = Coding(
            {messages.F: place.stage.codec_out, messages.B: place.stage.codec_back},
            place.arriving,
            compute,
            seed=place.seed,
            stage=place.index,
            limit_bytes=place.limit_bytes,
        )
        self.held = Held()  # snapshots, for whoever reads them
        self.stages: dict[int, Outbox] = {}  # stage index -> its outbox; set before the first walk
        self.seconds: dict[str, float] = {}
        self._norm: float | None = None  # the last step's global gradient norm, known to the first stage
        self.max_live = 0  # most micro-batches between F and W, ever
        self.max_in_flight = 0  # most micro-batches between F and B, ever

    async def run(self) -> None:
        """Take walks until cancelled."""
        while True:
            walk = await self._inbox.walks.get()
            if isinstance(walk, Collect):
                await self._send_state(walk)
            elif isinstance(walk, TakeSnapshot):
                await self._owner.put(await self._compute.run(self.held.take, walk.next_step, self._runner))
            elif walk.forward_only:
                await self._evaluate(walk)
            else:
                await self._train(walk)

    # -- one training step ---------------------------------------------------------------------------------------

    async def _train(self, walk: Step) -> None:
        place, runner = self._place, self._runner
        self.seconds = dict.fromkeys(("f", "b", "w", "wait", "apply"), 0.0)
        start_s = time.perf_counter()
        runner.begin(walk.step)
        f = b = w = 0
        while w < walk.num_micro:
            action = choose(self._view(walk, f, b, w))
            if action is None:
                await self._wait()
            elif action is Kind.F and place.is_last:
                # Its gradient needs nobody: F and B in one visit to the compute thread.
                await self._forward_and_back(walk, f)
                f, b, w = f + 1, b + 1, w + place.fused
                self.max_live, self.max_in_flight = max(self.max_live, f - w + place.fused), max(self.max_in_flight, 1)
                await self._after_backward(walk, b)
            elif action is Kind.F:
                await self._forward(walk, f)
                f += 1
                self.max_live, self.max_in_flight = max(self.max_live, f - w), max(self.max_in_flight, f - b)
            elif action is Kind.B:
                await self._backward(walk, b)
                b, w = b + 1, w + place.fused
                await self._after_backward(walk, b)
            else:
                await self._weight_gradient(walk, w)
                w += 1
        await self._exchange_totals(walk)
        clip = await self._settle(walk)
        applied_s = time.perf_counter()
        await self._compute.run(
            runner.apply, None if clip is None else torch.tensor(clip, dtype=torch.float64), walk.hyper
        )
        self.seconds["apply"] = time.perf_counter() - applied_s
        self._inbox.finish(walk.walk)
        coding_s, codecs = self.coding.take()
        seconds = {**self.seconds, **coding_s, "total": time.perf_counter() - start_s}
        header = {"walk": walk.walk, "step": walk.step, "norm": self._norm, "seconds": seconds, "codecs": codecs}
        await self._owner.put(Frame(messages.APPLIED, header))

    def _view(self, walk: Step, f: int, b: int, w: int) -> StageView:
        """What the local rule sees; each kind in micro order, so only the next of each matters."""
        place, inbox, key = self._place, self._inbox, walk.walk
        input_here = f < walk.num_micro and self._input_ready(key, f)
        gradient_here = b < f and (place.is_last or (key, b) in inbox.back)
        if place.fused:
            gradient_here = gradient_here and self._partials_ready(key, b)
        return StageView(
            num_micro=walk.num_micro,
            forwards=f,
            backwards=b,
            weights=w,
            input_here=input_here,
            gradient_here=gradient_here,
            weight_here=w < b and self._partials_ready(key, w),
            window=place.stage.window,
            live_cap=place.stage.live_cap,
        )

    def _input_ready(self, walk: int, micro: int) -> bool:
        raw = not self._runner.spec.raw_inputs or (walk, micro) in self._inbox.raw
        return raw and (self._place.is_first or (walk, micro) in self._inbox.forward)

    def _partials_ready(self, walk: int, micro: int) -> bool:
        return self._place.partial_from <= self._inbox.shared.get((walk, micro), {}).keys()

    async def _wait(self) -> None:
        start_s = time.perf_counter()
        self._inbox.changed.clear()
        await self._inbox.changed.wait()
        if "wait" in self.seconds:
            self.seconds["wait"] += time.perf_counter() - start_s

    async def _timed(self, kind: str, call: Any, *args: Any) -> Any:
        start_s = time.perf_counter()
        work = sum(getattr(self._flops, letter) for letter in kind)
        result = await self._compute.run(call, *args, flops=work)
        self.seconds[kind[0]] += time.perf_counter() - start_s
        return result

    def _arrived(self, walk: int, micro: int) -> tuple[Mapping[str, torch.Tensor], Activation]:
        raw = self._inbox.raw.pop((walk, micro), {})
        return raw, self._inbox.forward.pop((walk, micro), Activation((), None))

    async def _forward(self, walk: Step, micro: int) -> None:
        raw, activation = self._arrived(walk.walk, micro)
        rng = self._rng(walk, micro, activation)
        sent, rng_after, _ = await self._timed("f", self._runner.forward, micro, raw, activation.values, rng)
        await self._send_forward(walk.walk, micro, self._runner.spec.sent, [*sent, rng_after])

    async def _forward_and_back(self, walk: Step, micro: int) -> None:
        """On the last stage: F, the loss, then B (and W where they are fused)."""
        raw, activation = self._arrived(walk.walk, micro)
        rng = self._rng(walk, micro, activation)
        partials = self._partials(walk.walk, micro)

        def work() -> tuple[float, list[torch.Tensor | None], dict[str, torch.Tensor]]:
            _, _, loss = self._runner.forward(micro, raw, activation.values, rng)
            assert loss is not None
            value = float(loss)
            if not math.isfinite(value):
                raise NonFiniteLossError(
                    f"the loss of step {walk.step}, micro-batch {micro} is {value}; the step was not applied. "
                    "Lower the learning rate, set clip_norm, or look at this batch"
                )
            if self._place.fused:
                return value, *self._runner.backward(micro, (), walk.weights[micro], partials)
            return value, self._runner.backward_input(micro, (), walk.weights[micro]), {}

        value, received, onward = await self._timed("fbw" if self._place.fused else "fb", work)
        header = {"walk": walk.walk, "step": walk.step, "micro": micro, "loss": value}
        await self._owner.put(Frame(messages.LOSS, header))
        await self._send_back(walk.walk, micro, received, onward)

    def _rng(self, walk: Step, micro: int, activation: Activation) -> torch.Tensor | int | None:
        return seed_of(self._place.seed, walk.step, micro) if self._place.is_first else activation.rng

    async def _backward(self, walk: Step, micro: int) -> None:
        gradients = self._inbox.back.pop((walk.walk, micro), ())
        weight = walk.weights[micro]
        onward: Mapping[str, torch.Tensor] = {}
        if self._place.fused:
            partials = self._partials(walk.walk, micro)
            received, onward = await self._timed("bw", self._runner.backward, micro, gradients, weight, partials)
        else:
            received = await self._timed("b", self._runner.backward_input, micro, gradients, weight)
        await self._send_back(walk.walk, micro, received, onward)

    async def _send_back(
        self, walk: int, micro: int, received: Sequence[Any], onward: Mapping[str, torch.Tensor]
    ) -> None:
        if not self._place.is_first:
            await self._send(self._place.index - 1, messages.B, walk, micro, received, [True] * len(received))
        if self._place.fused:
            await self._send_partials(walk, micro, onward)

    async def _after_backward(self, walk: Step, done: int) -> None:
        """The first stage's last B is the commit point: every gradient of the step exists somewhere."""
        if done == walk.num_micro and self._place.is_first and self._place.clip_norm is None:
            await self.commit(walk.walk, None)

    async def _weight_gradient(self, walk: Step, micro: int) -> None:
        partials = self._partials(walk.walk, micro)
        onward = await self._timed("w", self._runner.backward_weight, micro, partials)
        await self._send_partials(walk.walk, micro, onward)

    async def _send_partials(self, walk: int, micro: int, partials: Mapping[str, torch.Tensor]) -> None:
        """To the next earlier holder of each shared parameter; None where no gradient flowed, so that it need not wait."""
        for target in sorted(set(self._place.partial_to.values())):
            names = [name for name, at in self._place.partial_to.items() if at == target]
            await self._send(target, messages.SHARED, walk, micro, [partials.get(n) for n in names], names=names)

    def _partials(self, walk: int, micro: int) -> dict[str, torch.Tensor]:
        arrived = self._inbox.shared.pop((walk, micro), {})
        return {name: tensor for name, tensor in arrived.items() if tensor is not None}

    # -- the end of a step: shared totals, the norm, the commit ----------------------------------------------------

    async def _exchange_totals(self, walk: Step) -> None:
        if self._place.totals_to:
            totals = self._runner.shared_totals()
            for target, names in self._place.totals_to.items():
                # Copies: clipping writes to the gradients while these may still be on their way.
                copies = [totals[n].clone() if n in totals else None for n in names]
                await self._send(target, messages.TOTAL, walk.walk, 0, copies, names=list(names))
        while not self._place.totals_from <= self._inbox.totals.get(walk.walk, {}).keys():
            await self._wait()
        if self._place.totals_from:
            arrived = self._inbox.totals[walk.walk]
            self._runner.set_shared_totals({n: t for n, t in arrived.items() if t is not None})

    async def _settle(self, walk: Step) -> float | None:
        """Wait until the step is committed; returns what gradients are multiplied by when the job clips."""
        place, inbox = self._place, self._inbox
        if place.clip_norm is not None:
            own = await self._compute.run(self._runner.grad_norms)
            pairs = [(place.norm_order[name], float(norm)) for name, norm in own if name not in place.totals_from]
            if not place.is_last:
                while walk.walk not in inbox.norms:
                    await self._wait()
                pairs += inbox.norms[walk.walk]
            if place.is_first:
                # In named_parameters order, as clip_grad_norm_ combines them: another order rounds differently.
                norms = [torch.tensor(norm, dtype=place.norm_dtype) for _, norm in sorted(pairs)]
                self._norm = float(global_norm(norms))
                await self.commit(walk.walk, float(clip_coefficient(norms, place.clip_norm)))
            else:
                # In a payload: a header would be too small for a few thousand parameters. float64 holds every norm as it is.
                indices = torch.tensor([i for i, _ in pairs], dtype=torch.int64)
                found = torch.tensor([norm for _, norm in pairs], dtype=torch.float64)
                await self._send(place.index - 1, messages.NORMS, walk.walk, 0, [indices, found])
        while walk.walk not in inbox.commits:
            await self._wait()
        return inbox.commits[walk.walk]

    async def commit(self, walk: int, clip: float | None) -> None:
        """The step is committed: tell the next stage at once, before any F of the next step, then note it."""
        if not self._place.is_last:
            await self.stages[self._place.index + 1].put(Frame(messages.COMMIT, {"walk": walk, "clip": clip}))
        self._inbox.put_commit(walk, clip)

    # -- evaluation and state ----------------------------------------------------------------------------------------

    async def _evaluate(self, walk: Step) -> None:
        for micro in range(walk.num_micro):
            while not self._evaluation_ready(walk.walk, micro):
                await self._wait()
            raw, activation = self._arrived(walk.walk, micro)
            sent, outputs = await self._compute.run(self._runner.evaluate, raw, activation.values)
            if not self._place.is_last:
                spec = self._runner.eval_spec
                await self._send_forward(walk.walk, micro, spec.sent if spec else (), [*sent, None])
            else:
                meta, payloads = tensors.pack(outputs)
                header = {"walk": walk.walk, "micro": micro, "tensors": meta}
                await self._owner.put(Frame(messages.OUTPUT, header, payloads))
        self._inbox.finish(walk.walk)

    def _evaluation_ready(self, walk: int, micro: int) -> bool:
        spec = self._runner.eval_spec
        raw = spec is None or not spec.raw_inputs or (walk, micro) in self._inbox.raw
        return raw and (self._place.is_first or (walk, micro) in self._inbox.forward)

    async def _send_state(self, wanted: Collect) -> None:
        """What training has changed; the owner has kept the rest. Nothing when nothing was trained."""
        spec = self._runner.spec
        names = (*spec.trainable, *spec.mutated) if wanted.state else ()
        for frame in await self._compute.run(self._state_frames, names):
            await self._owner.put(frame)

    def _state_frames(self, names: Sequence[str]) -> list[Frame]:
        state = self._runner.state_dict()
        return list(state_frames({name: state[name] for name in names}))

    async def _send_forward(self, walk: int, micro: int, sent: Sequence[Value], values: Sequence[Any]) -> None:
        # What carries no gradient is a mask, an angle, a count: few bytes, and not to be touched.
        coded = [value.requires_grad for value in sent]
        await self._send(self._place.index + 1, messages.F, walk, micro, values, coded)

    async def _send(
        self,
        target: int,
        kind: str,
        walk: int,
        micro: int,
        values: Sequence[Any],
        coded: Sequence[bool] = (),
        **more: Any,
    ) -> None:
        header = {"epoch": list(self._place.epoch), "walk": walk, "micro": micro, **more}
        await self.stages[target].put(self.coding.frame(kind, header, values, coded, self._runner.step))
