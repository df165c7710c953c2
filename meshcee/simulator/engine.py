"""The event loop: every device decides by the local rule, every line is a queue.

The idea: a device is looked at only when something can have changed for it: its own work is done, or what it waits for
has arrived. A line is a clock that says when it is free again, so a message costs no event of its own.

The rules are those of docs/simulator.md; the order of decisions is `schedule.choose`, written out for speed
(tests hold the two together).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshcee.simulator.instance import Instance, Ring
from meshcee.simulator.weather import Weather

__all__ = ["Outcome", "Span", "run"]

Lines = tuple[tuple[int, float], ...]  # (line, seconds that it is held)
Event = tuple[float, int, int, int, int]  # when, in which order, what, at which node, micro-batch or step
SENDS = ("", "out", "back")  # what messages are called, by the work that makes them

WAKE, F_DONE, B_DONE, W_DONE, APPLIED, REDUCE, REDUCED, COMMIT, VOTE = range(9)


@dataclass(frozen=True)
class Span:
    """One piece of work, or one message. `kind`: F, B, W, O(ptimizer), or "out"/"back"/"ring" for a message."""

    node: int
    kind: str
    step: int
    micro: int
    start_s: float
    end_s: float
    target: int = -1


@dataclass
class Outcome:
    """When steps began and were applied everywhere, and how busy everybody was."""

    begun_s: list[float] = field(default_factory=list)  # first F of each step
    applied_s: list[float] = field(default_factory=list)  # the last node has applied the step
    busy_s: list[float] = field(default_factory=list)  # per node, over all steps
    line_s: list[float] = field(default_factory=list)  # per line, over all steps
    max_live: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: int = 0
    end_s: float = 0.0  # of the last event
    period_s: float | None = None  # of a second step that finds everybody as the first did, or longer than the limit

    @property
    def steps(self) -> int:
        return len(self.applied_s)


def run(
    instance: Instance,
    steps: int,
    *,
    record: bool = False,
    num_micro: int | None = None,
    weather: Weather | None = None,
    dead_at_s: dict[int, float] | None = None,
    steady: bool = False,
    limit_s: float = math.inf,
) -> Outcome:
    """Simulate this many steps, or until nothing happens any more (a device died).

    num_micro   instead of the plan's own, for extrapolation; the plan must have one pipeline
    weather     bandwidths and latencies that change; None: they stay
    steady      stop where the second step must repeat the first, and say so in `period_s`
    limit_s     stop where the first head's first step was longer, said in `period_s`: with others behind it no step of
                its is shorter
    """
    nodes = instance.nodes
    count = len(nodes)
    micros = [num_micro or n.num_micro for n in nodes]
    f_s, b_s, w_s = [n.f_s for n in nodes], [n.b_s for n in nodes], [n.w_s for n in nodes]
    window, cap = [n.window for n in nodes], [n.live_cap for n in nodes]
    flush = instance.forward_first
    is_last = [n.is_last for n in nodes]
    is_first = [n.inputs == 0 for n in nodes]
    # by kind of the work that makes a message: per node [(target, needed messages, latency, lines)], when inputs of that
    # work's next stage arrive, and how many messages of each are missing
    sends: tuple[list[list[tuple[int, int, float, Lines]]], ...] = (
        [],
        [[(e.target, nodes[e.target].inputs, e.latency_s, e.lines) for e in n.forward] for n in nodes],
        [[(e.target, nodes[e.target].gradients, e.latency_s, e.lines) for e in n.back] for n in nodes],
    )
    total = [m * steps for m in micros]
    inf = math.inf
    input_at = [[0.0 if first else inf] * t for first, t in zip(is_first, total)]
    grad_at = [[inf] * t for t in total]
    arrives: tuple[list[list[float]], ...] = ([], input_at, grad_at)
    missing: tuple[list[list[int]], ...] = (
        [],
        [[n.inputs] * t if n.inputs > 1 else [] for n, t in zip(nodes, total)],
        [[n.gradients] * t if n.gradients > 1 else [] for n, t in zip(nodes, total)],
    )
    done_f, done_b, done_w = [0] * count, [0] * count, [0] * count
    limit = micros[:]  # F's that the current step allows
    step_of = [0] * count
    busy = [False] * count
    wake_at = [inf] * count
    free_at = [0.0] * len(instance.lines)
    out = Outcome(begun_s=[inf] * steps, line_s=[0.0] * len(instance.lines), max_live=[0] * count)
    applied_left = [count] * steps
    first_applied_s = [0.0] * count
    heads = instance.heads
    heads_left = [len(heads)] * steps
    head_done = {h: [0.0] * steps for h in heads}
    committed = [[False] * count for _ in range(steps)]
    weights_done = [[False] * count for _ in range(steps)]
    rings_of: list[list[int]] = [[] for _ in nodes]
    for r, ring in enumerate(instance.rings):
        for n in ring.nodes:
            rings_of[n].append(r)
    ring_left = [[len(r.nodes) for r in instance.rings] for _ in range(steps)]
    ring_ready = [[0.0] * len(instance.rings) for _ in range(steps)]
    chain_ready: dict[tuple[int, int, int], float] = {}  # (step, ring, node) -> when its last W was done
    reduce_left = [[len(r) for r in rings_of] for _ in range(steps)]
    votes_left = [[1 + n.below for n in nodes] for _ in range(steps)] if instance.votes else []
    first_head = heads[0]
    dead = dead_at_s or {}
    spans = out.spans
    host_of, load = [n.host for n in nodes], [n.load for n in nodes]
    loaded = [0.0] * instance.hosts  # by the nodes that compute; beyond 1 they slow each other down
    shared = instance.hosts > 0
    heap: list[Event] = [(0.0, n, WAKE, n, 0) for n in range(count)]
    sequence = count
    begun: Event | None = None  # the work that was begun last; it is queued when the next event is taken
    push, pop, push_pop = heapq.heappush, heapq.heappop, heapq.heappushpop
    line_s, max_live = out.line_s, out.max_live

    def leave(now: float, lines: Lines) -> float:
        """Queue a message on its lines; when the last of them has served it, it has left."""
        end, extra_s = now, 0.0
        for line, held in lines:
            free = free_at[line]
            begin = free if free > now else now
            if weather is None:
                free = begin + held
            else:
                free = weather.serve(line, held, begin)
                extra_s += weather.extra_s(line, free)
            free_at[line] = free
            if free > end:
                end = free
        return end + extra_s

    def crowded(n: int) -> float:
        """This node begins to compute: times as long as alone, if who computes now does so all along."""
        host = host_of[n]
        if host < 0:
            return 1.0
        loaded[host] += load[n]
        return max(1.0, loaded[host])

    def apply(n: int, now: float) -> None:
        """All three are there: W's reduced, and the commit; the optimizer takes the device."""
        nonlocal sequence
        s = step_of[n]
        if weights_done[s][n] and not reduce_left[s][n] and committed[s][n]:
            busy[n] = True
            end = now + nodes[n].optimizer_s * (crowded(n) if shared else 1.0)
            if record:
                spans.append(Span(n, "O", s, 0, now, end))
            sequence += 1
            push(heap, (end, sequence, APPLIED, n, s))

    def ready_to_commit(head: int, s: int, now: float) -> None:
        """The heads of all pipelines tell each other; the commit goes out when all are ready."""
        nonlocal sequence
        head_done[head][s] = now
        heads_left[s] -= 1
        for a in heads if not heads_left[s] else ():
            at = max(head_done[b][s] + instance.head_latency_s[b, a] for b in heads)
            sequence += 1
            push(heap, (at, sequence, COMMIT, a, s))

    def vote(n: int, s: int, now: float) -> None:
        """One more word that a node waits for, its own included; with the last of them its vote goes up."""
        nonlocal sequence
        votes_left[s][n] -= 1
        if votes_left[s][n]:
            return
        if (above := nodes[n].above) is None:
            ready_to_commit(n, s, now)
        else:
            sequence += 1
            push(heap, (now + above[1], sequence, VOTE, above[0], s))

    def settled(n: int, now: float) -> None:
        """The W's of a step, or its reductions, are done; with the last of both its gradient is final."""
        s = step_of[n]
        if weights_done[s][n] and not reduce_left[s][n]:
            if votes_left:
                vote(n, s, now)
            apply(n, now)

    now = 0.0
    while True:
        if begun is not None:
            now, _, what, n, extra = push_pop(heap, begun)
            begun = None
        elif heap:
            now, _, what, n, extra = pop(heap)
        else:
            break
        if shared and (F_DONE <= what <= W_DONE or what == APPLIED) and host_of[n] >= 0:
            loaded[host_of[n]] -= load[n]
        if dead and now >= dead.get(n, inf) and what != REDUCE:
            continue
        if what == WAKE:
            if wake_at[n] <= now:
                wake_at[n] = inf
            if busy[n]:
                continue
        elif what <= B_DONE:
            busy[n] = False
            if what == F_DONE and is_last[n]:
                grad_at[n][extra] = now
            for target, needed, latency, lines in sends[what][n]:
                if weather is None:  # as `leave`, written out: half of all time goes here
                    at = now
                    for line, held in lines:
                        free = free_at[line]
                        free = (free if free > now else now) + held
                        free_at[line] = free
                        if free > at:
                            at = free
                    at += latency
                else:
                    at = leave(now, lines) + latency
                if record:
                    spans.append(Span(n, SENDS[what], step_of[n], extra, now, at, target))
                there = arrives[what][target]
                if needed > 1:
                    rest = missing[what][target]
                    rest[extra] -= 1
                    if there[extra] == inf or at > there[extra]:
                        there[extra] = at
                    if rest[extra]:
                        continue
                    at = there[extra]
                else:
                    there[extra] = at
                if not busy[target] and at < wake_at[target]:
                    wake_at[target] = at
                    sequence += 1
                    push(heap, (at, sequence, WAKE, target, 0))
            if what == B_DONE and is_first[n] and done_b[n] == limit[n] and not votes_left:
                ready_to_commit(n, step_of[n], now)
        elif what == W_DONE:
            busy[n] = False
            if done_w[n] == limit[n]:
                weights_done[step_of[n]][n] = True
                settled(n, now)
                continue
        elif what == REDUCE:
            ring = instance.rings[n]
            ends_s = [now]  # of the nodes, the last one first
            if ring.up_s:
                for hop, latency in zip(ring.hops, ring.back_s):
                    ends_s.append(leave(ends_s[-1], hop) + latency)
            else:
                ends_s = [max(leave(now, hop) for hop in ring.hops) + ring.latency_s] * len(ring.nodes)
            for line, held in (x for hop in ring.hops for x in hop):
                line_s[line] += held
            if record:
                spans.append(Span(ring.nodes[0], "ring", extra, ring.block, now, ends_s[-1]))
            sequence += 1
            for holder, end in zip(reversed(ring.nodes), ends_s):
                push(heap, (end, sequence, REDUCED, holder, extra))
            continue
        elif what == REDUCED:
            reduce_left[extra][n] -= 1
            if not reduce_left[extra][n]:
                settled(n, now)
            continue
        elif what == VOTE:
            vote(n, extra, now)
            continue
        elif what == COMMIT:
            if committed[extra][n]:
                continue
            committed[extra][n] = True
            for target, latency in nodes[n].commits:
                sequence += 1
                push(heap, (now + latency, sequence, COMMIT, target, extra))
            if step_of[n] == extra:
                apply(n, now)
            continue
        else:  # APPLIED
            busy[n] = False
            applied_left[extra] -= 1
            if not extra:
                first_applied_s[n] = now
                if n == first_head and now > limit_s:
                    out.period_s = now
                    break
            if not applied_left[extra]:
                out.applied_s.append(now)
                if steady and not extra:
                    out.period_s = _repeated(first_applied_s, heads, [at[0] for at in input_at])
                    if out.period_s is not None:
                        break
            step_of[n] += 1
            if step_of[n] == steps:
                continue
            limit[n] += micros[n]

        # the local rule: B, else F, else W
        f, b, w = done_f[n], done_b[n], done_w[n]
        grads = grad_at[n]
        ready = limit[n] == f if flush else True
        if ready and b < f and grads[b] <= now:
            kind, extra, took = B_DONE, b, b_s[n]
            done_b[n] = b + 1
        else:
            may = f < limit[n] and f - b < window[n] and f - w < cap[n]
            if may and input_at[n][f] <= now:
                kind, extra, took = F_DONE, f, f_s[n]
                done_f[n] = f + 1
                if f + 1 - w > max_live[n]:
                    max_live[n] = f + 1 - w
                if is_first[n] and f + micros[n] == limit[n]:
                    s = step_of[n]
                    if now < out.begun_s[s]:
                        out.begun_s[s] = now
            elif w < b:
                kind, extra, took = W_DONE, w, w_s[n]
                done_w[n] = w + 1
                if w + 1 == limit[n] and rings_of[n]:
                    at = now
                    ends = {}
                    for k, seconds in enumerate(nodes[n].weights_s):
                        at += seconds
                        ends[nodes[n].end - 1 - k] = at
                    s = step_of[n]
                    for r in rings_of[n]:
                        ring = instance.rings[r]
                        ring_ready[s][r] = max(ring_ready[s][r], ends[ring.block])
                        if ring.up_s:
                            chain_ready[s, r, n] = ends[ring.block]
                        ring_left[s][r] -= 1
                        if not ring_left[s][r]:
                            if ring.up_s:
                                ring_ready[s][r] = _down(ring, [chain_ready.pop((s, r, m)) for m in ring.nodes])
                            sequence += 1
                            push(heap, (ring_ready[s][r], sequence, REDUCE, r, s))
            else:
                # nothing can run: wake when what is on its way arrives
                at = inf
                if may:
                    at = input_at[n][f]
                if ready and b < f and grads[b] < at:
                    at = grads[b]
                if at < wake_at[n] and at > now:
                    wake_at[n] = at
                    sequence += 1
                    push(heap, (at, sequence, WAKE, n, 0))
                continue
        busy[n] = True
        end = now + (took * crowded(n) if shared else took)
        if record:
            spans.append(Span(n, "?FBW"[kind], step_of[n], extra, now, end))
        sequence += 1
        begun = (end, sequence, kind, n, extra)
    out.events, out.end_s = sequence, now
    for n, node in enumerate(nodes):
        work = done_f[n] * f_s[n] + done_b[n] * b_s[n] + done_w[n] * w_s[n]
        out.busy_s.append(work + step_of[n] * node.optimizer_s)
        for edges, messages in ((node.forward, done_f[n]), (node.back, done_b[n])):
            for edge in edges:
                for line, held in edge.lines:
                    line_s[line] += messages * held
    return out


def _down(ring: Ring, ready_s: Sequence[float]) -> float:
    """When the sum reaches the last node of a chain: each sends on what it has got when its own W's are done."""
    at = ready_s[0]
    for up_s, own_s in zip(ring.up_s, ready_s[1:]):
        at = max(at + up_s, own_s)
    return at


def _repeated(applied_s: list[float], heads: list[int], arrives_s: list[float]) -> float | None:
    """The period, where the second step finds every node as the first one did: done with it when its first input comes."""
    period = applied_s[heads[0]]
    close = 1e-9 * period
    same = all(abs(applied_s[h] - period) <= close for h in heads)
    if same and all(done <= period + at + close for done, at in zip(applied_s, arrives_s)):
        return period
    return None
