"""Before the first step: does the captured model, cut as the plan cuts it, do what the user's module does?

The idea: a thing that the capture does not know of shows when both sides run. Such things are state in Python, a branch that the
example did not take, a context that the graph does not hold. So the owner runs a real micro-batch twice through the user's own
module and twice through the stages. The second time every block is a stage of its own; any later plan only makes this cut
coarser. The second time weights are others, too: at the first ones a penalty or a gradient may be zero. The owner compares
losses, gradients, buffers, generators, and changes in Python. Then all of the user's is put back.

What it may take is what the capture took: of a large model it runs fewer samples, or the forward pass alone, and says so. A model
that does not fit some times over runs forward only, block by block (`blocks`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshcee.capture import Capture, watch_sizes
from meshcee.capture.graph import Free
from meshcee.equality.blocks import Blocks, Weights, stand_in, without_saving
from meshcee.equality.failing import BACKWARD_PASS, blame, forward_place, names_of, odd_ones, warnings_told
from meshcee.equality.lengths import Pass, parted, shortest_and_longest
from meshcee.equality.lines import line_that
from meshcee.equality.metrics import try_data, try_metrics
from meshcee.equality.recorder import Call, Recorder, tensors_in, unlike, unlike_backwards, values_of
from meshcee.equality.sizes import Cut, forward_s
from meshcee.equality.watch import Slot, Watch, digest, same
from meshcee.errors import MeshceeError, UnequalError, UsageError
from meshcee.files import large_apart, limits
from meshcee.files.layout import copied
from meshcee.job import Job, parts_of, seed_of
from meshcee.optim import Optimizer
from meshcee.reach.modules import entries, halve, into_training, on_loan
from meshcee.sampling import GENERATORS, Source, call_model, inputs_of, rebuild, source_of
from meshcee.sampling.traces import leaving_nothing
from meshcee.stage.chain import Chain
from meshcee.user_code import RAISED

__all__ = ["Net", "examine"]

_WHICH = re.compile(
    r"\bid\(|\bis (?!not None|None)|\b(?:if|and|or|not) \w+ (?:not )?in \b|\b(?:isinstance|type)\(|\.get\("
)
_NOTHING = Slot("value", None, lambda: None)
WAY_OUT = "Job(verify=False) or --no-verify trains it all the same"
MEMORY_SHARE = 0.8  # of what is free
COPIES = 4  # of the model's state: what is put back, the stages', and both sides' gradients
BLOCKS = 3  # largest blocks that a model takes which is run block by block: as made, laid out, and while it is made
BACKWARD = 2.0  # what a backward pass takes, in forward passes
LEAST_S = 1.0  # for models whose capture takes no time


@dataclass(frozen=True)
class _Outcome:
    """What one pass left; gradients by the name of the parameter."""

    losses: Sequence[torch.Tensor]  # the loss, and its terms
    grads: Mapping[str, torch.Tensor] | None  # None: only the forward pass ran
    seen: Mapping[str, Slot]  # the state after it
    rng: torch.Tensor


def examine(
    job: Job,
    captured: Capture,
    sizes: Sequence[int],
    cuts: Sequence[Cut],
    *,
    budget_s: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Raise UnequalError where the captured model is not the user's module. `say` is told what was not looked at.

    `budget_s` is what it may take, about; by default what the capture took.
    """
    with warnings_told(), large_apart(), leaving_nothing(job):
        Net(job, captured, cuts, max(LEAST_S, captured.took_s) if budget_s is None else budget_s, say).run(sizes)


class Net:
    """One job's look. `budget_s` bounds what it takes; `say` is told what was left out."""

    def __init__(
        self, job: Job, captured: Capture, cuts: Sequence[Cut], budget_s: float, say: Callable[[str], None]
    ) -> None:
        self.job, self.captured, self.cuts, self.budget_s, self.say = job, captured, cuts, budget_s, say
        self.compared: set[int] = set()  # sizes of which every sample was
        self.weights: Weights | None = None  # of a model that does not fit
        self.trains = True  # else it evaluates

    def run(self, sizes: Sequence[int]) -> None:
        self._look(sizes)
        watch_sizes(self.job, self.captured, [size for size in dict.fromkeys(sizes) if size not in self.compared])
        if self.job.eval_data is not None and len(self.job.eval_data):
            try_data(self.job, self.captured, sizes[0])
        fits = COPIES * self.captured.state_bytes <= MEMORY_SHARE * limits.free_bytes()
        if self.job.metrics and self.captured.evaluate and fits and sizes[0] * self._one_s() <= self.budget_s:
            try_metrics(self.job, self.captured, sizes[0], self.say)

    def _look(self, sizes: Sequence[int]) -> None:
        free = MEMORY_SHARE * limits.free_bytes()
        whole = self._fits(free)
        if not whole:
            sizes = [min(sizes)]
            if (needed := self._block_bytes(sizes[0])) > free:
                self.say(
                    f"whether the captured model is the module was not checked: that takes {needed / 2**30:.1f} GiB here, and "
                    f"{free / MEMORY_SHARE / 2**30:.1f} GiB are free"
                )
                return
        with self._at_work(whole):
            self.ready = self.watch.look()
            if whole:
                for size, backward in self._affordable(sizes):
                    self._compare(size, backward)
                if self.compared and any(
                    isinstance(d, Free) for e in self.captured.train.inputs for d in e.value.shape
                ):
                    self._compare_lengths(max(self.compared))
            else:
                self._forward_only(sizes[0])

    def _fits(self, free_bytes: float) -> bool:
        """Whether there is room for the module beside what it is compared with."""
        own = isinstance(self.job.model, nn.Module) and self.job.precision != "bf16"
        return (COPIES + (not own)) * self.captured.state_bytes <= free_bytes

    @contextmanager
    def _at_work(self, whole: bool) -> Iterator[None]:
        """With the module to run; then all of the user's is as it was."""
        with GENERATORS, torch.enable_grad(), on_loan(self._lent):
            generator = torch.get_rng_state()
            try:
                self._take_model(whole)
                try:
                    self._begin()
                    yield
                finally:
                    self.watch.restore()
            finally:
                torch.set_rng_state(generator)

    @property
    def _lent(self) -> nn.Module:
        """The module that closures refer to: the user's own, or what the capture has built."""
        model = self.captured.built or self.job.model
        assert isinstance(model, nn.Module)
        return model

    def _take_model(self, whole: bool) -> None:
        """The module to run, what forward may write of it, and what is to be put back."""
        spared: set[int] = set()
        if whole:
            self.model = self._module()
            trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
            self.cloned = self.captured.layout.keys() - trained
        else:
            self.cloned = {entry.name for entry in self.captured.train.inputs if entry.mutated}
            if isinstance(self.job.model, nn.Module) and self.job.precision != "bf16":
                self.model = self.job.model
            else:
                self.model = self._lent
                real = {name: self.captured.state[name] for name in self.cloned}
                stand_in(self.model, self.job.precision == "bf16", self.job.keep_fp32, real)
            self.weights = Weights(self.model, self.captured, self._largest_block())
            spared = {id(t) for n, t in entries(self.model) if self.captured.aliases.get(n, n) not in self.cloned}
        self.watch = Watch(self.model, self.job.loss, spared=spared)

    def _largest_block(self) -> int:
        layout = self.captured.layout
        return max(
            sum(layout[n][0].itemsize * math.prod(layout[n][1]) for n in cost.parameters)
            for cost in self.captured.costs
        )

    def _block_bytes(self, size: int) -> int:
        """What a forward pass of so many samples takes, block by block."""
        return BLOCKS * self._largest_block() + 2 * size * max(c.activation_bytes for c in self.captured.costs)

    def _module(self) -> nn.Module:
        """The user's own module: what closures refer to. Of a function that makes one, another one."""
        model = self.job.model
        if not isinstance(model, nn.Module):
            torch.manual_seed(self.job.seed)
            model = model()
        if self.job.precision == "bf16":
            halve(model, self.job.keep_fp32)
        return model

    def _affordable(self, sizes: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """What to run: (samples, with the backward pass), as much of the plan's sizes as the budget allows."""
        one_s, left_s = self._one_s(), self.budget_s
        for size in dict.fromkeys(sizes):
            passes = 4 * (1 + BACKWARD)
            few = min(size, 2)  # one sample is often special, two are as many
            if size * one_s * passes <= left_s:
                self.compared.add(size)
                yield size, True
                left_s -= size * one_s * passes
            elif few * one_s * passes <= left_s:
                self._less(
                    f"{few} samples of the {size} of a micro-batch were compared with the module", size * one_s * passes
                )
                yield few, True
                left_s -= few * one_s * passes
            elif few * one_s * 2 <= left_s:
                self._less(
                    f"only the forward pass of {few} samples was compared with the module", size * one_s * passes
                )
                yield few, False
                left_s -= few * one_s * 2
            else:
                self._less(f"a micro-batch of {size} was not compared with the module", size * one_s * passes)

    def _one_s(self) -> float:
        """A sample's forward pass."""
        return forward_s(self.captured)

    def _forward_only(self, size: int) -> None:
        """Compares as many samples of a model that does not fit as the budget allows."""
        one_s = self._one_s()
        few = next((n for n in (size, min(size, 2), 1) if 2 * n * one_s <= self.budget_s), 0)
        if not few:
            self._less(f"a micro-batch of {size} was not compared with the module", 2 * size * one_s)
        elif self._compare_blocks(few):
            if few == size:
                self.compared.add(size)
            self.say(
                f"the model does not fit here some times over: only the forward pass of {self._samples()} was compared with the "
                "module, block by block"
            )

    def _less(self, what: str, wanted_s: float) -> None:
        self.say(f"{what}: all would take about {wanted_s:.0f} s here; `meshcee check JOB.py` takes the time")

    # -- one size ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _source(self) -> Source:
        return source_of(self.job)

    @property
    def size(self) -> int:
        return next(len(tensor) for tensor in inputs_of(self.batch).values())

    def _draw(self, size: int, backward: bool) -> None:
        self.batch = self._source.batch(0, 0, size)
        self.backward = backward
        if said := self.captured.misfit(self.captured.inputs_of(self.batch)):
            raise UnequalError(f"step 1, a micro-batch of {self._samples()}: {said}", "data")

    def _compare(self, size: int, backward: bool) -> None:
        self._draw(size, backward)
        finest = tuple((b, b + 1) for b in range(self.captured.train.num_blocks))
        seen: list[Mapping[str, Slot]] = [self.ready]
        for cuts, moved in [(self.cuts, False), ([finest], True)] if backward else [(self.cuts, False)]:
            before, state, theirs = self._own_pass(moved)
            same_as = {n for n, slot in theirs.seen.items() if before.get(n, _NOTHING).seen == slot.seen}
            seen.append({n: seen[-1].get(n, slot) if n in same_as else slot for n, slot in theirs.seen.items()})
            for cut in cuts:
                difference = self._difference(theirs, self._captured(state, before, cut))
                if difference is not None:
                    raise self._unequal(self._carried(seen, differs=True), difference, cut, state)
        if found := self._carried(seen):
            raise UnequalError(found)
        self.watch.moved = False
        self._put_back()

    def _own_pass(self, moved: bool) -> tuple[Mapping[str, Slot], dict[str, torch.Tensor], _Outcome]:
        """The module's, with other weights if it can: what was there before, the state that it began with, and its outcome."""
        if moved:
            self.watch.move()
        before = self.watch.look() if moved else self.ready
        state = {name: copied(t) if name in self.cloned else t for name, t in self._state().items()}
        try:
            theirs = self._eager()
            if theirs.losses[0].isfinite() or not moved:
                return before, state, theirs
        except MeshceeError:
            if not moved:
                raise
        self.watch.moved = False
        self._put_back()
        return self._own_pass(False)

    def _compare_lengths(self, size: int) -> None:
        batches, seen = shortest_and_longest(self.job, self._source, size), [self.ready]

        def run(batch: Any) -> Pass:
            state = {name: copied(t) for name, t in self._state().items() if name in self.cloned}
            self.batch, recorder = batch, Recorder(forget=True)
            losses = [loss.detach() for loss in self._forward(recorder)]
            seen.append(self.watch.look())
            for name, tensor in state.items():
                self._state()[name].copy_(tensor)
            return Pass(recorder, losses[0], tuple(map(digest, (*tensors_in(recorder.output), *losses))))

        call = parted(*batches, self._put_back, run) if batches is not None else None
        if call is not None:
            says = self._carried(seen, differs=True) or (
                f"peers keep nothing of Python's from pass to pass; compute all from x and y in each pass; {WAY_OUT}"
            )
            raise UnequalError(
                f"after a micro-batch of another length {call.name}{call.where} makes other numbers: {says}"
            )
        self._put_back()

    def _compare_blocks(self, size: int) -> bool:
        """The forward pass alone, of a model that does not fit. False where its code wants its tensors as they are."""
        assert self.weights is not None
        self._draw(size, backward=False)
        state = {name: copied(t) for name, t in self._state().items() if name in self.cloned}
        torch.manual_seed(seed_of(self.job.seed, 0, 0))
        ours = Blocks(self.captured.train, self.captured.inputs_of(self.batch), self.weights, state)
        failed: list[Exception] = []

        def follow() -> None:
            try:
                if not failed:
                    ours.follow()
            except Exception as error:  # kernels raise what they like
                failed.append(error)

        self.weights.before = follow
        recorder = Recorder(forget=True)
        try:
            losses = self._forward(recorder)
        except RAISED as error:
            if self.weights.stand_in:
                self._put_back()
                self.say(f"the module was not compared: without its weights at hand, {_first_line(error)}")
                return False
            raise self._own_error(error, names_of(self.job, 0, 0, self.size)) from error
        theirs = _Outcome(losses, None, self.watch.look(), torch.get_rng_state())
        try:
            if failed:
                raise failed[0]
            with without_saving():
                ours.finish()
        except UsageError:
            raise
        except RAISED as error:
            raise self._fails(error) from error
        written = {n: replace(self.ready[n], seen=seen) for n, seen in ours.written().items()}
        found = self._difference(theirs, _Outcome(ours.outputs, None, {**self.ready, **written}, ours.rng))
        self.weights.forget()
        if found is None and (wrote := sorted(self.weights.written)):
            found = "state", f"parameter {wrote[0]!r} is not what the module leaves in it"
        apart = [(block, number) for block, number, seen in ours.ends if seen not in recorder.numbers]
        call = unlike(recorder, losses[0].detach(), ours.numbers) if apart or found else None
        if found is not None or call is not None:
            if carried := self._carried([self.ready, theirs.seen], differs=True):
                raise UnequalError(carried)
            raise self._blocks_differ(found[1] if found else "", apart, call)
        if carried := self._carried([self.ready, theirs.seen]):
            raise UnequalError(carried)
        self._put_back()
        return True

    def _blocks_differ(self, what: str, apart: Sequence[tuple[int, int]], call: Call | None) -> UnequalError:
        wanted = seed_of(self.job.seed, 0, 0)
        where = f"; the first operation that differs is {call.name}{call.where}" if call is not None else ""
        if line := line_that(lambda: torch.initial_seed() != wanted, self._forward):
            where = f"; the generator is seeded{line}: leave seeding to meshcee, which seeds each micro-batch"
        if apart:
            (block, number), program = apart[0], self.captured.train
            at = program.nodes[number - len(program.inputs)].at
            what = f"block {block + 1} of {program.num_blocks} ({self.captured.costs[block].name}) ends with another tensor{at}"
        return UnequalError(
            f"the captured model does not do what your module does: for a micro-batch of {self._samples()}, {what}{where}; "
            f"{WAY_OUT}",
            "capture",
        )

    def _fails(self, error: BaseException) -> UnequalError:
        return UnequalError(
            f"the captured model fails on a micro-batch of {self._samples()}, which your module computes: "
            f"{_first_line(error)}; give another micro_batch_size"
        )

    def _state(self) -> dict[str, torch.Tensor]:
        """The module's tensors by the names of the program; the same memory."""
        return {name: tensor.detach() for name, tensor in entries(self.model) if name in self.captured.layout}

    def _put_back(self, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """All of the user's as it was before the first pass; then what forward may write as it was in `state`."""
        self.watch.restore()
        self._begin()
        if self.watch.moved:
            self.watch.move()
        for name, tensor in self._state().items():
            if state is not None and name in self.cloned:
                tensor.copy_(state[name])

    def _begin(self) -> None:
        into_training(self.model)
        if not self.trains:
            self.model.eval()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _forward(self, recorder: Recorder | None = None) -> list[torch.Tensor]:
        """The loss, and its terms."""
        x, y = self.batch
        tensors = {n: copied(t) for n, t in self.captured.inputs_of(self.batch).items()}  # forward may write there
        if self.job.precision == "bf16":
            tensors = {
                n: t.bfloat16() if n.split(".")[0] == "x" and t.is_floating_point() else t for n, t in tensors.items()
            }
        torch.manual_seed(seed_of(self.job.seed, 0, 0))
        with self.job.autocast(), contextlib.ExitStack() as around:
            if self.weights is not None:
                around.enter_context(without_saving())
                around.enter_context(self.weights)
            if recorder is not None:  # what it is given are stand-ins
                around.enter_context(recorder)
            self.under_way = "the model"
            output = call_model(self.model, rebuild(x, "x", tensors))
            self.under_way = "the loss"
            loss, terms = parts_of(self.job.loss(output, rebuild(y, "y", tensors)))
            if recorder is not None:
                recorder.output = output
        if (now := tuple(terms)) != (known := self.captured.terms):
            raise UsageError(
                f"the loss tells of {now}, and of {known} while it was captured: return the same terms in every pass"
            )
        return [loss, *terms.values()]

    def _pass(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """One of the module: its loss with its terms, and the generator's state before the backward pass."""
        for parameter in self.model.parameters():
            parameter.grad = None
        losses, rng = self._forward(), torch.get_rng_state()
        if self.backward:
            self.under_way = BACKWARD_PASS
            losses[0].backward()  # type: ignore[no-untyped-call]
        return losses, rng

    def _own_error(self, error: BaseException, names: Sequence[str]) -> UsageError:
        """Of a pass that has just failed; each row of its batch has a name."""
        where, batch, count, until_s = self.under_way, self.batch, len(names), time.monotonic() + self.budget_s

        def fails(rows: Sequence[int]) -> bool:
            if time.monotonic() > until_s:
                return False
            self._put_back()
            twice = list(rows) * (1 + (len(rows) == 1))  # a batch norm refuses one sample, which is nobody's fault
            given = {name: tensor[twice] for name, tensor in inputs_of(batch).items()}
            self.batch = rebuild(batch[0], "x", given), rebuild(batch[1], "y", given)
            try:
                self._pass()
            except RAISED as again:
                return self.under_way == where and type(again) is type(error)
            return False

        place = None
        if where == BACKWARD_PASS:
            self._put_back()
            place = forward_place(self._pass)
        odd = odd_ones(fails, range(count))
        together = len(odd) == count > 1 and not fails(odd[:1])
        told = blame(where, error, self.model, [names[row] for row in odd], count, place, together=together)
        told.__cause__ = error
        return told

    def failing(self, batch: tuple[Any, Any], names: Sequence[str], *, evaluate: bool) -> UsageError | None:
        """What the module itself fails with on this batch, if it does; None also where that would take too long, or too much."""
        self.batch, self.backward, self.trains, size = batch, not evaluate, not evaluate, len(names)
        free = MEMORY_SHARE * limits.free_bytes() - COPIES * size * sum(
            cost.activation_bytes for cost in self.captured.costs
        )
        if not self._fits(free) or size * self._one_s() * (1 + BACKWARD) > self.budget_s:
            return None
        with self._at_work(whole=True):
            try:
                self._pass()
            except MeshceeError:
                return None
            except RAISED as error:  # torch and the user's code raise what they like
                return self._own_error(error, names)
        return None

    def _eager(self) -> _Outcome:
        try:
            losses, rng = self._pass()
        except MeshceeError:
            raise
        except RAISED as error:
            raise self._own_error(error, names_of(self.job, 0, 0, self.size)) from error
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return _Outcome(losses, grads if self.backward else None, self.watch.look(), rng)

    def _captured(self, state: Mapping[str, torch.Tensor], before: Mapping[str, Slot], cut: Cut) -> _Outcome:
        torch.manual_seed(seed_of(self.job.seed, 0, 0))
        untouched = torch.get_rng_state()
        try:
            chain = Chain(self.job, self.captured, cut, "fused", state=state, optimizer=Optimizer("SGD", lr=0.0))
            chain.begin(0)
            losses = [chain.forward(0, 0, self.batch), *chain.terms.values()]
            if self.backward:
                chain.fused(0, 0, 1.0)
        except UsageError:
            raise
        except RAISED as error:  # kernels raise what they like
            raise self._fails(error) from error
        written = {n: replace(before[n], seen=digest(t)) for runner in chain.runners for n, t in runner.written.items()}
        rng = chain.rng if isinstance(chain.rng, torch.Tensor) else untouched
        return _Outcome(losses, chain.grads() if self.backward else None, {**before, **written}, rng)

    def _samples(self) -> str:
        return f"{self.size} sample{'s' if self.size > 1 else ''}"

    # -- what differs --------------------------------------------------------------------------------------------------

    def _difference(self, theirs: _Outcome, ours: _Outcome) -> tuple[str, str] | None:
        """(kind, name) of the first thing that differs; kinds: loss, gradient, buffer, generator."""
        names = ("the loss", *(f"the term {name!r} of the loss" for name in self.captured.terms))
        for name, their, our in zip(names, theirs.losses, ours.losses, strict=True):
            if not same(their.detach(), our):
                return "loss", f"{name} is {our.item():.9g} instead of {their.item():.9g}"
        for name in self.captured.layout:
            if name in theirs.seen and ours.seen[name].seen != theirs.seen[name].seen:
                kind = "parameter" if name in self.captured.param_order else "buffer"
                return "state", f"{kind} {name!r} is not what the module leaves in it"
        if not torch.equal(theirs.rng, ours.rng):
            return "generator", "torch's generator is not where the module leaves it"
        if theirs.grads is not None and ours.grads is not None:
            for name in self.captured.param_order:
                a, b = theirs.grads.get(name), ours.grads.get(name)
                if (a is None) != (b is None):
                    return (
                        "gradient",
                        f"parameter {name!r} has {'a' if a is None else 'no'} gradient, and in the module "
                        + ("none" if a is None else "one"),
                    )
                if a is not None and b is not None and not same(a, b):
                    return "gradient", f"the gradient of parameter {name!r} differs"
        return None

    def _unequal(
        self, carried: str, difference: tuple[str, str], cut: Cut, state: Mapping[str, torch.Tensor]
    ) -> UnequalError:
        if carried:
            return UnequalError(carried)
        kind, what = difference
        self._put_back(state)
        whole = self._captured(state, self.watch.look(), ((0, cut[-1][1]),))
        is_cut = len(cut) > 1 and self._difference(self._eager(), whole) is None
        self._put_back(state)
        if is_cut:
            side = f"the model cut into {len(cut)} stages"
            detail = f"{self._first_use(what)}; in one stage it is equal, so please report it, with the model"
        else:
            side, detail = "the captured model", self._part(kind, what, state)
        return UnequalError(
            f"{side} does not do what your module does: for a micro-batch of {self._samples()}, {what}{detail}; {WAY_OUT}",
            "cut" if is_cut else "capture",
        )

    def _part(self, kind: str, what: str, state: Mapping[str, torch.Tensor]) -> str:
        """Where an eager pass and the graph part, and what to do."""
        wanted = seed_of(self.job.seed, 0, 0)
        if line := line_that(lambda: torch.initial_seed() != wanted, self._forward):
            return f"; the generator is seeded{line}: leave seeding to meshcee, which seeds each micro-batch"
        self._put_back(state)
        if kind == "state":
            slot = self.watch.look()[what.split("'")[1]]
            line = line_that(lambda: slot.look() != slot.seen, self._forward)
            self._put_back(state)
            if self.backward and self._writes_again(slot):
                return (
                    f"; it is written{line}, and once more in the backward pass, as under torch.utils.checkpoint: leave that "
                    "out, and set Job(recompute=True)"
                )
            return f"; it is written{line}: let forward change a buffer in place, under torch.no_grad()"
        recorder, loss = self._recorded()
        told = recorder.calls
        values, numbers = self._graph_values(state)
        call = unlike(recorder, loss, numbers)
        if call is None:
            call = unlike_backwards(recorder, loss, values, values[self.captured.train.outputs[0]])
            return (
                f"; the backward pass parts from the module's at {call.name}{call.where}: a graph holds no modes or hooks "
                "of autograd; use detach() and torch.no_grad() there"
                if call is not None
                else self._first_use(what)
            )
        found = f"; the first operation that differs is {call.name}{call.where}"
        self._put_back(state)
        if [call.left for call in self._recorded()[0].calls] != [call.left for call in told]:
            return f"{found}: there two passes over the same samples differ; draw with torch.rand, and read no clock"
        if _WHICH.search(str(call.where).partition("`")[2]):
            return (
                f"{found}: it seems to ask by id(), `is`, `in` or a class which parameter this is, and while a model is captured "
                "its parameters are other objects; ask by the names of named_parameters()"
            )
        if not any(node.at == call.where for node in self.captured.train.nodes):
            return (
                f"{found}, a line that the graph does not hold: it runs for this micro-batch, and did not while the model was "
                "captured; write the branch with torch.where, and without the number of samples or Python's state"
            )
        return (
            f"{found}: what it computes with is not what it was while the model was captured, or lies otherwise in memory; keep it "
            "in parameters, buffers and inputs, contiguous, and choose kernels outside of the model"
        )

    def _writes_again(self, slot: Slot) -> bool:
        """Whether the backward pass changes what forward has left there."""
        loss = self._forward()[0]
        left = slot.look()
        loss.backward()  # type: ignore[no-untyped-call]
        return bool(slot.look() != left)

    def _recorded(self) -> tuple[Recorder, torch.Tensor]:
        recorder = Recorder()
        return recorder, self._forward(recorder)[0]

    def _graph_values(self, state: Mapping[str, torch.Tensor]) -> tuple[list[Any], set[Any]]:
        program, raw = self.captured.train, self.captured.inputs_of(self.batch)
        inputs: list[torch.Tensor] = []
        for entry in program.inputs:
            if entry.kind == "raw":
                inputs.append(raw[entry.name])
            elif entry.kind == "constant":
                assert entry.data is not None
                inputs.append(entry.placed(entry.data))
            else:
                given = state[entry.name].to(entry.value.dtype or torch.float32)
                inputs.append(entry.placed(given, copy=True).requires_grad_(entry.trainable))
        torch.manual_seed(seed_of(self.job.seed, 0, 0))
        return values_of(program, inputs)

    def _first_use(self, what: str) -> str:
        """The line that first uses the parameter whose gradient differs."""
        program = self.captured.train
        name = what.split("'")[1] if "'" in what else ""
        for node in program.nodes:
            if any(r < len(program.inputs) and program.inputs[r].name == name for r in node.refs):
                return f"; it is used{node.at}" if node.at else ""
        return ""

    def _carried(self, seen: Sequence[Mapping[str, Slot]], *, differs: bool = False) -> str:
        """What the module keeps in Python from one pass to the next, in words; "" if nothing.

        A note that every pass writes anew is none, unless the second pass came out different from the stages'.
        """
        changed = [
            name
            for earlier, later in itertools.pairwise(seen)
            for name, slot in later.items()
            if slot.kind != "tensor" and (name not in earlier or earlier[name].seen != slot.seen)
        ]
        for name in dict.fromkeys(changed):
            if seen[-1].get(name, seen[0].get(name, _NOTHING)).kind == "flag" or self._moves(name):
                return self._keeps(name)
        return self._keeps(changed[0]) if changed and differs and len(seen) > 2 else ""

    def _moves(self, name: str) -> bool:
        """Whether a value of Python's differs after two passes from the same tensors."""
        found = []
        self._put_back()
        tensors = {n: t.clone() for n, t in self._state().items() if self.weights is None or n in self.cloned}
        for _ in range(2):
            self._forward()
            slot = self.watch.look().get(name)
            found.append(slot.seen if slot is not None else "absent")
            with torch.no_grad():
                for n, t in self._state().items():
                    if n in tensors:
                        t.copy_(tensors[n])
        return found[0] != found[1]

    def _keeps(self, name: str) -> str:
        self._put_back()
        if name not in self.watch.look():  # made by the first pass
            self._forward()
        slot = self.watch.look().get(name)
        line = line_that(lambda: slot.look() != slot.seen, self._forward) if slot is not None else ""
        return (
            f"a forward pass changes {name}{line}: peers keep nothing of Python's, so the mesh would train something else than "
            f"your module; keep it in a buffer that forward changes in place under torch.no_grad(), or drop it; {WAY_OUT}"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
