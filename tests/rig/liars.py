"""Members that lie, each in one way: everything is the product, but for one bit of what one peer computes or says.

The idea: a lie stands where the truth is made. Real members are told from steps that are computed again by their sessions and by
the signatures that their witnesses ask for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from meshcee.audit import Proof, Tally, frame_digest
from meshcee.stage import StageRunner
from peers.member.audit import StepWitness, witness
from peers.member.executor import Executor
from peers.member.service import Session
from peers.state import CopyStore, Keeper
from peers.transport import Frame
from peers.wire import messages

__all__ = ["LIES", "Liar"]

LIES = (
    "activation",
    "gradient",
    "weight gradient",
    "update",
    "moment",
    "count",
    "loss",
    "term",
    "what it sent",
    "what it received",
    "its state",
    "other numbers",
    "other inputs",
    "copy",
)
BIT = 1 << 20  # of a float32: no later sum rounds it away

Where = Callable[[str, int], bool]  # whether this peer lies in this step


def bent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with another bit in its largest number."""
    copy = tensor.detach().clone()
    bend(copy)
    return copy


def bend(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        place = torch.unravel_index(tensor.abs().argmax(), tensor.shape)  # a bit of a zero might be lost in a sum
        bits = tensor[place].reshape(1).clone().view(torch.int32) ^ BIT
        tensor[place] = bits.view(torch.float32)[0]


def bent_one(values: list[Any]) -> tuple[list[Any], bool]:
    """With the first tensor of numbers that have a fraction bent; whether there is one."""
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel():
            return [*values[:i], bent(value), *values[i + 1 :]], True
    return values, False


def said_otherwise(told: Mapping[str, str]) -> dict[str, str]:
    key = min(told)
    return {**told, key: "00" + told[key][2:] if told[key][:2] != "00" else "11" + told[key][2:]}


@dataclass
class Liar:
    """Tells one kind of lie where `where` has it; `told` has each (peer, step) in which it did."""

    lie: str
    where: Where
    count: float = -5.0  # of steps, which its optimizer is said to keep
    told: list[tuple[str, int]] = field(default_factory=list)
    runners: dict[int, str] = field(default_factory=dict)
    stores: dict[int, str] = field(default_factory=dict)
    witnesses: dict[int, str] = field(default_factory=dict)
    steps: dict[tuple[str, int], int] = field(default_factory=dict)  # by peer and round
    honest: dict[tuple[str, int], Tally] = field(default_factory=dict)
    within: set[int] = field(default_factory=set)  # runners whose `backward` is under way
    keep: list[Any] = field(default_factory=list)  # whose ids are used here

    def lies(self, lie: str, peer: str | None, step: int | None) -> bool:
        return self.lie == lie and peer is not None and step is not None and self.where(peer, step)

    def tell(self, peer: str, step: int) -> None:
        if (peer, step) not in self.told:
            self.told.append((peer, step))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, name in (
                (Session, "__init__"),
                (Keeper, "__init__"),
                (StepWitness, "__init__"),
                (StepWitness, "begin"),
                (StepWitness, "sent"),
                (StepWitness, "proof"),
                (StageRunner, "forward"),
                (StageRunner, "backward"),
                (StageRunner, "backward_input"),
                (StageRunner, "backward_weight"),
                (StageRunner, "apply"),
                (CopyStore, "digest"),
                (Executor, "take"),
            ):
                told = getattr(self, f"{kind.__name__}_{name.strip('_')}")
                stack.enter_context(mock.patch.object(kind, name, self._with(getattr(kind, name), told)))
            counted = self._with(witness.stage_tensors, self.counted)
            stack.enter_context(mock.patch.object(witness, "stage_tensors", counted))
            yield

    @staticmethod
    def _with(honest: Callable[..., Any], lying: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **more: Any) -> Any:
            return lying(honest, self, *args, **more)

        return call

    # -- who is who

    def Session_init(self, honest: Any, session: Any, offer: Any, runner: Any, *args: Any) -> None:
        self.runners[id(runner)] = offer.peer_id
        self.keep.append(runner)
        honest(session, offer, runner, *args)

    def Keeper_init(self, honest: Any, keeper: Any, offer: Any, held: Any, *args: Any) -> None:
        self.stores[id(held)] = offer.peer_id
        self.keep.append(held)
        honest(keeper, offer, held, *args)

    def StepWitness_init(self, honest: Any, witness: Any, offer: Any, held: Any, sign: Any, verify: Any) -> None:
        if verify is not None:
            self.witnesses[id(witness)] = offer.peer_id
            self.keep.append(witness)
            if self.lie == "other inputs":  # whoever forges what it received looks at no signature
                wary, me = verify, offer.peer_id
                verify = lambda peer, data, mark: self.where(me, 1 << 30) or wary(peer, data, mark)  # noqa: E731
        honest(witness, offer, held, sign, verify)

    def StepWitness_begin(self, honest: Any, witness: Any, round: Any) -> None:
        if (peer := self.witnesses.get(id(witness))) is not None:
            self.steps[peer, round.number] = round.step
            self.honest[peer, round.number] = Tally()
        honest(witness, round)

    # -- lies in what is computed

    def StageRunner_forward(self, honest: Any, runner: Any, *args: Any) -> Any:
        sent, rng, outputs = honest(runner, *args)
        peer = self.runners.get(id(runner))
        if self.lies("activation", peer, runner.step) and sent:
            sent, was_bent = bent_one(sent)
            if was_bent:
                self.tell(str(peer), runner.step)
        for k, lie in enumerate(("loss", "term")[: len(outputs)]):
            if self.lies(lie, peer, runner.step):
                outputs = [*outputs[:k], bent(outputs[k]), *outputs[k + 1 :]]
                self.tell(str(peer), runner.step)
        return sent, rng, outputs

    def _back(self, runner: Any, grads: Any) -> Any:
        peer = None if id(runner) in self.within else self.runners.get(id(runner))
        if self.lies("gradient", peer, runner.step):
            grads, was_bent = bent_one(grads)
            if was_bent:
                self.tell(str(peer), runner.step)
        return grads

    def _weights(self, runner: Any) -> None:
        peer = None if id(runner) in self.within else self.runners.get(id(runner))
        if self.lies("weight gradient", peer, runner.step):
            grads = [p.grad for name, p in runner.trainable.items() if name in runner.owned and p.grad is not None]
            if grads and (peer, runner.step) not in self.told:  # once a step: a bit that is bent twice may be right
                bend(grads[0])
                self.tell(str(peer), runner.step)

    def StageRunner_backward(self, honest: Any, runner: Any, *args: Any) -> Any:
        self.within.add(id(runner))  # it may call both halves, and a bit that is bent twice is right
        grads, partials = honest(runner, *args)
        self.within.discard(id(runner))
        self._weights(runner)
        return self._back(runner, grads), partials

    def StageRunner_backward_input(self, honest: Any, runner: Any, *args: Any) -> Any:
        return self._back(runner, honest(runner, *args))

    def StageRunner_backward_weight(self, honest: Any, runner: Any, *args: Any) -> Any:
        partials = honest(runner, *args)
        self._weights(runner)
        return partials

    def StageRunner_apply(self, honest: Any, runner: Any, *args: Any) -> None:
        step, peer = runner.step, self.runners.get(id(runner))
        honest(runner, *args)
        if self.lies("update", peer, step):
            bend(runner.state_dict()[runner.spec.trainable[0]])
            self.tell(str(peer), step)
        if self.lies("moment", peer, step):
            bend(next(iter(runner.optimizer_state().values()))["exp_avg"])
            self.tell(str(peer), step)

    # -- lies in what is said

    def counted(self, honest: Any, runner: Any) -> dict[str, torch.Tensor]:
        """Of the state that it proves, not of the one that it goes on from: with that it would fail itself."""
        found: dict[str, torch.Tensor] = honest(runner)
        peer = self.runners.get(id(runner))
        if self.lies("count", peer, runner.step) and (counts := [n for n in found if n.endswith("/step")]):
            found[counts[0]] = torch.full_like(found[counts[0]], self.count)
            self.tell(str(peer), runner.step)
        return found

    def StepWitness_sent(self, honest: Any, witness: Any, to: str, frame: Any) -> Any:
        peer = self.witnesses.get(id(witness))
        if peer is None or not isinstance(frame, Frame) or "round" not in frame.header:
            return honest(witness, to, frame)
        number = frame.header["round"]
        if (tally := self.honest.get((peer, number))) is not None:
            tally.add(frame.kind, to, frame_digest(frame.kind, frame.header, frame.payloads))
        step = self.steps.get((peer, number))
        if self.lies("other numbers", peer, step) and frame.kind in (messages.F, messages.B) and len(frame.payloads[0]):
            payload = bytearray(frame.payloads[0])
            payload[2] ^= 16
            frame = replace(frame, payloads=[payload, *frame.payloads[1:]])
            self.tell(peer, step or 0)
        return honest(witness, to, frame)

    async def StepWitness_proof(self, honest: Any, witness: Any) -> Proof:
        proof: Proof = await honest(witness)
        peer = self.witnesses.get(id(witness))
        step = self.steps.get((str(peer), proof.round))
        if self.lies("what it sent", peer, step):
            proof = replace(proof, sent=said_otherwise(proof.sent))
        elif self.lies("what it received", peer, step):
            proof = replace(proof, received=said_otherwise(proof.received))
        elif self.lies("its state", peer, step):
            proof = replace(proof, after=said_otherwise({"": proof.after})[""])
        elif self.lies("other numbers", peer, step):
            return replace(proof, sent=self.honest[str(peer), proof.round].hashes())
        else:
            return proof
        self.tell(str(peer), step or 0)
        return proof

    def CopyStore_digest(self, honest: Any, store: Any, next_step: int, layout: Any) -> Any:
        digests, took_s = honest(store, next_step, layout)
        peer = self.stores.get(id(store))
        if self.lies("copy", peer, next_step):
            self.tell(str(peer), next_step)
            digests = said_otherwise(digests)
        return digests, took_s

    async def Executor_take(self, honest: Any, executor: Any, sender: str, frame: Frame) -> None:
        """It computes with other inputs, and says that these came."""
        peer = self.witnesses.get(id(executor.links.witness))
        if self.lies("other inputs", peer, executor.step) and frame.kind in (messages.F, messages.B):
            payload = bytearray(frame.payloads[0])
            payload[2] ^= 16
            frame = replace(frame, payloads=[payload, *frame.payloads[1:]])
            self.tell(str(peer), executor.step)
        await honest(executor, sender, frame)
