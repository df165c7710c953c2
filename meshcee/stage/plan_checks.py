"""Plans that no mesh can train exactly: refused in words before anything is offered.

The idea: whoever holds the same parameters must end every step with the same bits, and whoever draws random numbers must
draw those of one machine. Plan, graph and devices tell beforehand where that cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshcee.capture import Capture, Program
from meshcee.capture.graph import Node, analyse, is_random
from meshcee.errors import PlanError
from meshcee.plan import Plan
from meshcee.stage.statistics import why_not_folded

__all__ = ["check_count", "check_kinds", "check_pipelines", "remarks", "why_one_pipeline"]

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def check_count(program: Program, stages: int | None) -> None:
    """Raise PlanError where more stages are asked for than there are blocks, with the line that keeps most of a model in one."""
    count, base = program.num_blocks, len(program.inputs)
    if stages is None or stages <= count:
        return
    found = analyse(program.inputs, program.nodes)
    held = {0: 0}  # by the last write of a tensor: nodes from its making on
    for group, writes in found.mutations.items():
        members = [n for n, of in enumerate(found.group) if of == group]
        first = min([*(n - base for n in members if n >= base), *(u for n in members for u in found.users[n])])
        held[max(writes)] = max(writes) - first
    widest = max(held, key=held.__getitem__)
    why = ""
    if 2 * held[widest] >= len(program.nodes):
        why = f"no stage begins before the last write in place{program.nodes[widest].at}: write `h = h + ...` for `h += ...`, or "
    raise PlanError(
        f"{stages} stages were asked for and the model has {count} block{'s' * (count != 1)}: {why}ask for fewer stages"
    )


def check_kinds(captured: Capture, plan: Plan, kinds: Mapping[str, str]) -> None:
    """Raise PlanError where results would depend on the kinds of devices, which `kinds` maps peers to.

    The same blocks may not lie on devices of two kinds: each applies the same gradients and must end with the same weights.
    Stages that draw random numbers lie on one kind. Where several pipelines fold statistics of batches, devices are CPUs.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    for stage in stages:
        alike = [other for other in stages if other.first < stage.end and stage.first < other.end]
        if len(found := sorted({kinds[peer] for other in alike for peer in other.peers})) > 1:
            raise PlanError(
                f"the plan has blocks {stage.first}..{stage.end - 1} on {' and '.join(found)} devices, whose copies of the "
                "weights would drift apart; give blocks that several devices hold to devices of one kind"
            )
    for stage in stages:
        written = captured.train.slice(stage.first, stage.end).mutated
        if (
            len(plan.pipelines) > 1
            and written
            and (kind := next((kinds[peer] for peer in stage.peers if kinds[peer] != "cpu"), ""))
        ):
            raise PlanError(
                f"the plan has several pipelines with {written[0]!r}, statistics of batches, on {kind} devices: only those of CPUs "
                "are known to be equal to one machine's; put all devices of the plan in one pipeline"
            )
    drawing = {
        kinds[peer]: peer
        for stage in stages
        if any(program.slice(stage.first, stage.end).uses_random for program in captured.programs)
        for peer in stage.peers
    }
    if len(drawing) > 1:
        raise PlanError(
            f"the plan draws random numbers (as dropout does) on {' and '.join(sorted(drawing))} devices, which draw others; "
            "lend devices of one kind, or fewer stages (--stages), or set dropout to 0"
        )
    if "cuda" in drawing and (dropping := [n for n in captured.train.nodes if _drops_between_layers(n)]):
        raise PlanError(
            f"the recurrent module{dropping[0].at} has dropout between its layers, and {drawing['cuda']} is a GPU: cuDNN draws "
            "for it from numbers of its own, so no step could be done again; put nn.Dropout between modules of one layer each, "
            "or lend CPUs (--device cpu)"
        )


def _drops_between_layers(node: Node) -> bool:
    name = node.operator.name.split(".")[1] if node.operator.is_aten else ""
    return name in RECURRENT and node.argument("num_layers") != 1 and is_random(node)


def why_one_pipeline(program: Program) -> str:
    """Why a model cannot be in several pipelines side by side; "" where it can."""
    if written := why_not_folded(program.slice(0, program.num_blocks)):
        return (
            f"its buffer {written!r} is made of all micro-batches in their order, and each pipeline would have only its own; "
            "only statistics of batch norms, of inputs that are not transposed, can be put together"
        )
    return ""


def remarks(program: Program, plan: Plan, micro_batch_size: int | None) -> tuple[str, ...]:
    """What people should know of a plan's numbers before it runs. `micro_batch_size`: as the job says, None where it does not."""
    if micro_batch_size is not None:
        return ()
    whole = program.slice(0, program.num_blocks)
    found = ["batch statistics"] * bool(whole.mutated) + ["random masks"] * whole.uses_random
    of = f"{' and '.join(found)} are of micro-batches of {plan.micro_batch} samples, which the plan has chosen"
    return (f"{of}: say micro_batch_size in the job, as their size is part of the result",) if found else ()


def check_pipelines(program: Program, plan: Plan) -> None:
    """Raise PlanError where a model cannot be in the several pipelines of a plan."""
    if len(plan.pipelines) > 1 and (why := why_one_pipeline(program)):
        raise PlanError(f"the model cannot be in several pipelines: {why}; put all devices of the plan in one pipeline")
