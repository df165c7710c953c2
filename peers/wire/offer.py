"""An offer: all that a member must be told to hold its stage, as one frame, and what follows from it.

The idea: owner and member derive everything else (who links to whom, what a shared parameter needs, how large a frame
may be). They use the plan, the graph and the same pure functions. So it need not be sent and cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgpack
import torch
from msgspec import Meta

from meshcee.capture import Capture, Program, StageSpec, encode_program
from meshcee.capture.initial_state import InitialState
from meshcee.codec import codec_of
from meshcee.errors import PlanError, ProtocolError
from meshcee.fields import Finite, NotNegative, plain, read, unpack
from meshcee.job import Job
from meshcee.optim import Optimizer, scheduled
from meshcee.plan import Epoch, Plan, Stage, Term
from meshcee.role import Place, StageFlops, Sum
from meshcee.stage import Boundaries, StageRunner, check_pipelines, optimizer_layout
from peers.transport import Frame
from peers.wire import messages
from peers.wire.messages import need

__all__ = ["Offer", "Terms", "host_of"]

RNG_BYTES = 64 * 1024
NORM_BYTES = 16  # a parameter's index and the norm of its gradient
MOST_REGROUP_S = 86400.0
MOST_SOURCES = 32  # that a member asks for copies
MOST_KEPT, KEPT_BYTES = 16, 256  # of one parameter: tensors in a copy, and bytes that say which, beside its name
BODY_BYTES = 4 << 20  # plan, names and settings; msgpack may unfold to 64 times as much


def host_of(addresses: Sequence[str]) -> str:
    """The IPv4 address that others reach a peer by, from its multiaddresses; loopback when it names no other."""
    found = [m[1] for a in addresses if (m := re.match(r"/ip4/([0-9.]+)/", a))]
    return next((host for host in found if not host.startswith("127.")), "127.0.0.1")


Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Terms:
    """What is the same for every member: the job's settings that a stage must know."""

    job: str
    optimizer: Optimizer
    seed: int
    clip_norm: Annotated[float, Meta(gt=0)] | None
    precision: str
    flops: tuple[NotNegative, ...]  # forward, per sample, of each block: what emulated devices are paced by
    parameters: tuple[str, ...]  # names in named_parameters order: the order in which norms are combined
    recompute: bool = False  # on every stage; the plan may also ask for it stage by stage
    direct_sums: bool = False  # groups sum gradients through process groups of their own
    audited: bool = False  # members prove their steps, and show those that the owner asks for
    regroup_s: Finite = 60.0  # for so long the owner looks for peers, and members keep what is left of an epoch
    rounded: bool = False  # frozen parameters are sent in the type that stages compute with

    @classmethod
    def of(cls, job: Job, captured: Capture, regroup_s: float) -> Terms:
        flops = tuple(cost.flops for cost in captured.costs)
        return cls(
            job.name,
            scheduled(job.optimizer, job.schedule),
            job.seed,
            job.clip_norm,
            job.stage_precision,
            flops,
            captured.param_order,
            job.recompute,
            job.direct_sums,
            job.audit > 0,
            regroup_s,
            job.precision == "bf16" and not isinstance(captured.state, InitialState),  # which is sent as recipes
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Terms:
        found = read(data, cls, "an offer's terms")
        if found.precision not in ("fp32", "bf16"):
            raise ProtocolError(f"unknown precision {found.precision[:40]!r}")
        return replace(found, job=found.job[:200], regroup_s=min(max(found.regroup_s, 0.0), MOST_REGROUP_S))


@dataclass(frozen=True)
class _Body:
    """What an offer says beside its header and its programs."""

    terms: Mapping[str, Any]
    plan: Mapping[str, Any]
    addresses: Mapping[str, tuple[str, ...]]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Offer:
    """One member's view of a plan: its place, and the graph that its stage is cut from."""

    terms: Terms
    plan: Plan
    epoch: Epoch
    term: Term
    peer_id: str
    train: Program
    evaluate: Program | None
    addresses: Mapping[str, tuple[str, ...]]
    resumes: bool = False  # the optimizer's state follows the weights
    sources: tuple[str, ...] = ()  # as a member hears it: peers that hold copies of its state
    run: str = ""  # names the run over all its epochs and owners: who gives it may go on from its copies
    owner: str = ""  # the peer that has made the offer
    supplier: str = ""  # the peer that feeds training in the owner's place

    def frame(self, sources: Sequence[str] = ()) -> Frame:
        """The OFFER frame; programs travel encoded by `meshcee.capture`, the rest as msgpack."""
        body = plain(_Body(plain(self.terms), self.plan.to_json(), self.addresses, tuple(sources)))
        header = {"epoch": list(self.epoch), "term": list(self.term), "resumes": self.resumes, "run": self.run}
        header |= {"supplier": self.supplier} if self.supplier else {}
        programs = [self.train, *([self.evaluate] if self.evaluate else [])]
        return Frame(messages.OFFER, header, [msgpack.packb(body), *map(encode_program, programs)])

    @staticmethod
    def graphs(frame: Frame) -> list[bytes]:
        """Of an OFFER frame, as they came. ProtocolError when it is another."""
        if frame.kind != messages.OFFER or len(frame.payloads) not in (2, 3):
            raise ProtocolError(f"expected an offer, got a frame of kind {frame.kind!r}")
        return [bytes(payload) for payload in frame.payloads[1:]]

    @classmethod
    def from_frame(cls, frame: Frame, programs: Sequence[Program], peer_id: str, owner: str) -> Offer:
        """Parse and check the rest; raises ProtocolError, PlanError or UsageError. `programs` are what its graphs were read as."""
        body = read(unpack(frame.payloads[0], BODY_BYTES, "an offer"), _Body, "an offer")
        terms, plan = Terms.from_json(body.terms), Plan.from_json(body.plan)
        epoch, term, run = (
            messages.epoch_of(frame.header),
            messages.term_of(frame.header),
            messages.run_of(frame.header),
        )
        resumes = need(frame.header, "resumes", bool)
        supplier = need({"supplier": "", **frame.header}, "supplier", str)
        offer = cls(
            terms,
            plan,
            epoch,
            term,
            peer_id,
            programs[0],
            programs[1] if len(programs) > 1 else None,
            body.addresses,
            resumes,
            body.sources[:MOST_SOURCES],
            run,
            owner,
            supplier,
        )
        if offer.plan.num_blocks != offer.train.num_blocks:
            raise PlanError(f"the plan has {offer.plan.num_blocks} blocks, the graph {offer.train.num_blocks}")
        check_pipelines(offer.train, offer.plan)
        for stage in offer.stages:
            codec_of(stage.codec_out), codec_of(stage.codec_back)
        offer.check()
        return offer

    def check(self) -> None:
        """Raises PlanError where this member's stage cannot be shared by samples as the plan wants it."""
        stage = self.stages[self.index]
        for program in (self.train, self.evaluate) if len(stage.members) > 1 else ():
            from meshcee.capture.graph.rows import why_unsplit

            if program is not None and (why := why_unsplit(program, stage.first, stage.end)):
                raise PlanError(f"blocks {self.blocks} cannot be shared by samples: {why}; give them to one device")
        _ = self.boundaries, self._draws

    # -- the plan, seen from this member -----------------------------------------------------------------------------

    @property
    def job(self) -> str:
        return self.terms.job

    @cached_property
    def pipeline(self) -> int:
        return self.plan.where(self.peer_id)[0]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of this member's pipeline."""
        return self.plan.pipelines[self.pipeline].stages

    @cached_property
    def index(self) -> int:
        return self.plan.where(self.peer_id)[1]

    @property
    def blocks(self) -> str:
        return f"{self.stages[self.index].first}..{self.stages[self.index].end - 1}"

    def attach_header(self) -> dict[str, Any]:
        return {"epoch": list(self.epoch), "run": self.run, "owner": self.owner}

    def is_epoch(self, header: Mapping[str, Any]) -> bool:
        theirs = header.get("run"), header.get("owner")
        return messages.epoch_of(header) == self.epoch and theirs == (self.run, self.owner)

    @cached_property
    def specs(self) -> tuple[StageSpec, ...]:
        """The training slice of every stage, this one's included."""
        return tuple(self.train.slice(stage.first, stage.end) for stage in self.stages)

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Each shared trainable parameter and the stages that hold it, ascending."""
        found: dict[str, list[int]] = {}
        for i, spec in enumerate(self.specs):
            for name in spec.trainable:
                found.setdefault(name, []).append(i)
        return {name: tuple(at) for name, at in found.items() if len(at) > 1}

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """All of the plan: each parameter is added up by the first stages that hold it, one in each pipeline. So are statistics of
        batches.

        The same on every member, order included; nothing where every parameter's gradient is whole by itself.
        """
        if not self.plan.sums_gradients:
            return ()
        holders: dict[tuple[bool, str], list[str]] = {}
        for k, pipeline in enumerate(self.plan.pipelines):
            slices = (self.train.slice(stage.first, stage.end) for stage in pipeline.stages)
            owned: dict[tuple[bool, str], Stage] = {}
            for stage, spec in zip(pipeline.stages, self.specs if k == self.pipeline else slices):
                for name in spec.trainable:
                    owned.setdefault((False, name), stage)
                for name in spec.mutated:
                    owned.setdefault((True, name), stage)
            for key, stage in owned.items():
                holders.setdefault(key, []).extend(stage.peers)
        found: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
        for (statistics, name), peers in holders.items():
            if len(peers) > 1:
                found.setdefault((statistics, tuple(peers)), []).append(name)
        return tuple(
            Sum(k, peers, tuple(names), statistics) for k, ((statistics, peers), names) in enumerate(found.items())
        )

    @cached_property
    def place(self) -> Place:
        """This member's place: the earliest holder of a shared parameter sums its gradient and tells the others."""
        me = self.index
        mine = {name: at for name, at in self.holders.items() if me in at}
        partial_from: set[tuple[str, str]] = set()
        totals_to: dict[str, list[str]] = {}
        for name, at in sorted(mine.items()):
            if at[-1] != me:
                later = at[at.index(me) + 1]
                partial_from |= {(name, p) for p in self.stages[later].peers if self._partner(p, me) == self.peer_id}
            if at[0] == me:
                for peer in (p for later in at[1:] for p in self.stages[later].peers):
                    if self._partner(peer, me) == self.peer_id:
                        totals_to.setdefault(peer, []).append(name)
        others = {name: at for name, at in mine.items() if at[0] != me}
        return Place(
            peer=self.peer_id,
            plan=self.plan,
            epoch=self.epoch,
            seed=self.terms.seed,
            clip_norm=self.terms.clip_norm,
            norm_order={name: i for i, name in enumerate(self.terms.parameters)},
            norm_dtypes=self._norm_dtypes,
            partial_to={name: self._partner(self.peer_id, at[at.index(me) - 1]) for name, at in others.items()},
            partial_from=frozenset(partial_from),
            totals_to={peer: tuple(names) for peer, names in totals_to.items()},
            totals_from={name: self._partner(self.peer_id, at[0]) for name, at in others.items()},
            sums=tuple(one for one in self.sums if self.peer_id in one.peers),
            limit_bytes=self.max_payload_bytes,
            meeting_host=self._meeting_host if self._sums_directly else None,
        )

    def check_consent(self, who: str, *, direct_sums: bool) -> None:
        """PlanError where the job asks for connections that are not encrypted, and whose device it is has not said yes."""
        if self._sums_directly and not direct_sums:
            raise PlanError(
                f"{who} opens no connections for direct_sums: start it with `meshcee peer --direct-sums`, or leave direct_sums out "
                "of the job"
            )

    @property
    def _sums_directly(self) -> bool:
        """Only inside a group: other pipelines are in other regions, as a rule, where process groups do not reach."""
        return self.terms.direct_sums and len(self.plan.pipelines) == 1

    @property
    def _meeting_host(self) -> str:
        """An address of another member of our group."""
        others = [peer for peer in self.stages[self.index].peers if peer != self.peer_id]
        return host_of(self.addresses.get(others[0], ()) if others else ())

    def _partner(self, peer: str, index: int) -> str:
        """The member of an earlier stage that a later stage's member exchanges shared gradients with."""
        later = next(stage.peers for stage in self.stages if peer in stage.peers)
        earlier = self.stages[index].peers
        return earlier[later.index(peer) * len(earlier) // len(later)]

    @cached_property
    def boundaries(self) -> tuple[Boundaries, Boundaries | None]:
        """What crosses on either side, in training and in evaluation, and how groups divide it."""
        grouped = [len(stage.members) > 1 for stage in self.stages]
        before = self.index > 0 and any(grouped[self.index - 1 : self.index + 1])
        after = any(grouped[self.index : self.index + 2])
        train = Boundaries.of(self.train, self.specs[self.index], before=before, after=after)
        if self.evaluate is None:
            return train, None
        return train, Boundaries.of(self.evaluate, self.evaluation_specs[self.index], before=before, after=after)

    @cached_property
    def _draws(self) -> Mapping[int, Callable[..., Any]] | None:
        place, stage = self.place, self.stages[self.index]
        if len(place.group) == 1:
            return None
        from meshcee.capture.graph.draws import whole_draws

        return whole_draws(self.train, stage.first, stage.end, place.rows(place.micro_batch), place.micro_batch)

    @property
    def _norm_dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the norm of each of the job's parameters; a frozen one has none."""
        dtypes = {e.name: e.value.dtype for e in self.train.inputs if e.trainable}
        return tuple(self._full(dtypes.get(name) or torch.float32).to_real() for name in self.terms.parameters)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def evaluation_specs(self) -> tuple[StageSpec, ...]:
        if self.evaluate is None:
            return ()
        return tuple(self.evaluate.slice(stage.first, stage.end) for stage in self.stages)

    def raw_inputs(self, *, forward_only: bool) -> tuple[str, ...]:
        """What the owner must send to this stage for each micro-batch."""
        spec = (self.evaluation_specs if forward_only else self.specs)[self.index]
        return tuple(value.name for value in spec.raw_inputs)

    @cached_property
    def expected_state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every parameter and buffer of this stage, as the owner sends them."""
        done = self._frozen if self.terms.rounded else frozenset()
        return {
            name: (dtype if name in done else self._full(dtype), shape)
            for name, (dtype, shape) in self._computed_state.items()
        }

    @property
    def _frozen(self) -> frozenset[str]:
        """Parameters that training leaves as they are."""
        spec = self.specs[self.index]
        mine = {name for one in (spec, *self.evaluation_specs[self.index : self.index + 1]) for name in one.parameters}
        return frozenset(mine - {entry.name for entry in self.train.inputs if entry.trainable})

    @cached_property
    def changed_state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What the member sends back in the end: masters of what was trained, and the buffers that F wrote."""
        spec = self.specs[self.index]
        trained = {name: self.expected_state[name] for name in spec.trainable}
        return trained | {name: self._computed_state[name] for name in spec.mutated}

    @cached_property
    def frozen_state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of what training leaves as it is."""
        return {name: layout for name, layout in self.expected_state.items() if name not in self.changed_state}

    @cached_property
    def expected_optimizer(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """All that this stage's optimizer may keep, by "<parameter>/<key>"."""
        spec = self.specs[self.index]
        return optimizer_layout(self.terms.optimizer, {name: self.expected_state[name] for name in spec.trainable})

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Names, types and shapes of a copy: weights as they are offered, and all that the optimizer may keep."""
        return {name: self.expected_state[name] for name in self.changed_state}, self.expected_optimizer

    def _full(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.terms.precision == "bf16" and dtype == torch.bfloat16 else dtype

    @cached_property
    def _computed_state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """As the stage computes with it."""
        names = set(self.specs[self.index].state_names())
        if self.evaluate is not None:
            names |= set(self.evaluation_specs[self.index].state_names())
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for program in (self.train, self.evaluate):
            for entry in program.inputs if program else ():
                if entry.name in names and entry.kind in ("parameter", "buffer"):
                    assert entry.value.dtype is not None
                    found[entry.name] = (entry.value.dtype, entry.value.sizes(1))
        return found

    @cached_property
    def state_bytes(self) -> int:
        """Weights as they arrive; the planner has accounted for gradients, moments and activations."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.expected_state.values())

    @property
    def max_in_flight(self) -> int:
        return int(max(stage.live_cap for stage in self.stages))

    @property
    def max_micro(self) -> int:
        return 1 << 20

    @cached_property
    def max_payload_bytes(self) -> int:
        """The largest frame that another stage may send, or what it may unfold to: a boundary, or the shared gradients.

        A codec never makes a tensor larger, and any tensor may climb its ladder to `none`: so this holds with all codecs.
        """
        batch = self.plan.micro_batch
        boundary = max(
            sum(v.nbytes(batch) for v in spec.sent) + sum(v.nbytes(batch) for v in spec.received)
            for spec in (*self.specs, *self.evaluation_specs)
        )
        norms = NORM_BYTES * len(self.terms.parameters)
        return int(boundary + self.state_bytes + norms + RNG_BYTES)

    @cached_property
    def max_fed_bytes(self) -> int:
        """The largest frame that the owner may send once the member is ready: inputs, or what describes a copy of any stage."""
        mine = [specs[self.index] for specs in (self.specs, self.evaluation_specs) if specs]
        inputs = max(sum(value.nbytes(self.plan.micro_batch) for value in spec.raw_inputs) for spec in mine)
        described = sum(MOST_KEPT * (KEPT_BYTES + 6 * len(entry.name)) for entry in self.train.inputs)
        return int(inputs + described)

    @property
    def recompute(self) -> bool:
        """Not on the last stage: there B follows F at once, so nothing would be kept for less time."""
        stage = self.stages[self.index]
        return bool(stage.recompute or self.terms.recompute) and self.index < len(self.stages) - 1

    @cached_property
    def flops(self) -> StageFlops:
        """Backward costs twice the forward: half for the inputs, half for the weights; B may run F again."""
        stage = self.stages[self.index]
        first, end = self.place.rows(self.plan.micro_batch)
        work = sum(self.terms.flops[stage.first : stage.end]) * (end - first)
        return StageFlops(work, work * (2 if self.recompute else 1), work)

    def build(self, state: Mapping[str, torch.Tensor], device: torch.device) -> StageRunner:
        """The stage, ready to run; called on the compute thread."""
        return StageRunner(
            self.specs[self.index],
            state,
            self.terms.optimizer,
            evaluate=self.evaluation_specs[self.index] if self.evaluate else None,
            stages=[(stage.first, stage.end) for stage in self.stages],
            index=self.index,
            device=device,
            recompute=self.recompute,
            draws=self._draws,
            split=not self.place.fused,
        )
