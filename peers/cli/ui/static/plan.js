// The plan: its pipelines as they flow, memory by member, and one step as lanes.
import { bytes, byId, el, fill, legend, number, percent, rate, seconds, show, svg } from "./dom.js";

const TIMES = [["compute", "compute"], ["code", "encode, decode"], ["apply", "optimizer"], ["data", "samples from the owner"], ["wait", "wait"], ["rest", "the rest"]];
const SENDS = ["line", "sends, beside the rest"];
const WORK = [["F", "forward"], ["B", "input gradient"], ["W", "weight gradient"], ["O", "optimizer"],
  ["BW", "gradients in one"], ["FBW", "all in one"], ["FB", "forward and input gradient"], ["code", "encode, decode"]];

export function drawPlan(plan) {
  show("card-plan", Boolean(plan));
  show("card-memory", Boolean(plan && plan.seats.some((seat) => seat.needed_bytes)));
  if (!plan) return;
  const measured = plan.seats.some((seat) => seat.total_s);
  const expected = plan.step_s ? `${seconds(plan.step_s)} a step and ${number(plan.samples_per_s, 3)} samples/s expected` : "";
  const bound = plan.bound_s && plan.step_s ? `${percent(plan.bound_s / plan.step_s)} of what these devices could do` : "";
  byId("plan-about").textContent = [`micro-batches of ${plan.micro_batch}`, expected, bound, ...plan.kernels].filter(Boolean).join(" · ");
  const times = measured ? TIMES : [["compute", "computes, as expected"], ["wait", "waits"]];
  legend(byId("plan-legend"), plan.seats.some((seat) => sending(plan, seat) !== null) ? [...times, SENDS] : times);
  fill(byId("pipelines"), plan.micros.map((count, p) => pipeline(plan, p, count)));
  fill(byId("left-out"), plan.left_out.map(([name, why]) => el("li", {}, `left out: ${name}: ${why}`)));
  drawMemory(plan);
}

function pipeline(plan, p, count) {
  const seats = plan.seats.filter((seat) => seat.pipeline === p);
  const stages = [...new Set(seats.map((seat) => seat.stage))];
  const most = Math.max(0, ...plan.seats.map((seat) => seat.total_s || 0)) || plan.step_s || 0;
  const parts = [];
  for (const stage of stages) {
    const members = seats.filter((seat) => seat.stage === stage);
    parts.push(el("div", { class: "stage" },
      el("h3", {}, `stage ${members[0].label}`, el("span", { class: "muted" }, ` blocks ${members[0].first}–${members[0].end - 1}`)),
      members.map((seat) => member(seat, most, members.length > 1, sending(plan, seat)))));
    const edge = plan.boundaries.find((one) => one.pipeline === p && one.after === stage);
    if (edge) parts.push(boundary(edge));
  }
  const title = plan.micros.length > 1 ? el("p", { class: "muted small" }, `pipeline ${p}: ${count} micro-batches a step`) : el("p", { class: "muted small" }, `${count} micro-batches a step`);
  return el("div", {}, title, el("div", { class: "pipeline" }, parts));
}

// Seconds of a step that what a member sends is on its way, to the stages beside it: at the rate seen, or else as expected.
function sending(plan, seat) {
  const part = seat.samples / plan.micro_batch;
  const ways = plan.boundaries.filter((edge) => edge.pipeline === seat.pipeline).flatMap((edge) => [
    ...(edge.after === seat.stage ? [[edge.bytes_out, edge.seconds_out, edge]] : []),
    ...(edge.after + 1 === seat.stage ? [[edge.bytes_back, edge.seconds_back, edge]] : [])]);
  const each = ways.map(([size, took, edge]) => (edge.rate_bytes_per_s && size !== null ? (part * size) / edge.rate_bytes_per_s : took));
  return each.length && each.every((took) => took !== null) ? plan.micros[seat.pipeline] * each.reduce((sum, took) => sum + took, 0) : null;
}

function member(seat, most, shared, sent_s) {
  let pieces, told;
  if (seat.total_s) {
    const known = { compute: seat.compute_s || 0, code: seat.code_s || 0, apply: seat.apply_s || 0, data: 0, wait: seat.wait_s || 0 };
    known.data = Math.min(seat.data_s || 0, known.wait);
    known.wait -= known.data;
    known.rest = Math.max(0, seat.total_s - Object.values(known).reduce((sum, value) => sum + value, 0));
    pieces = TIMES.map(([kind, name]) => [kind, name, known[kind] / (most || seat.total_s)]);
    told = `${percent(1 - (seat.wait_s || 0) / seat.total_s)} busy of ${seconds(seat.total_s)}`;
  } else {
    pieces = [["compute", "computes", seat.busy || 0], ["wait", "waits", 1 - (seat.busy || 0)]];
    told = seat.busy === null ? "" : `${percent(seat.busy)} busy, as expected`;
  }
  const words = pieces.filter(([, , share]) => share > 0.005).map(([, name, share]) => `${name} ${percent(share)}`).join(", ");
  const f = seat.f_s === null ? "" : `F ${seconds(seat.f_s)}, B ${seconds(seat.b_s)}, W ${seconds(seat.w_s)} a micro-batch expected`;
  return el("div", { class: "member", title: f },
    el("div", { class: "row" }, el("strong", {}, seat.name, shared ? ` ×${seat.samples}` : ""), el("span", { class: "muted small" }, told)),
    el("div", { class: "bar", role: "img", "aria-label": `${seat.name}: ${words}` },
      pieces.map(([kind, name, share]) => (share > 0 ? el("i", { class: `piece ${kind}`, title: `${name} ${percent(share)}`, style: { width: `${100 * share}%` } }) : null))),
    sent_s !== null && most ? sends(seat, sent_s, Math.min(1, sent_s / most)) : null);
}

function sends(seat, sent_s, share) {
  const told = `${seat.name} sends ${seconds(sent_s)} of a step`;
  return el("div", { class: "bar thin sends", role: "img", "aria-label": told, title: told }, el("i", { class: "piece line", style: { width: `${100 * share}%` } }));
}

function boundary(edge) {
  const codec = (name) => (name === "none" ? "" : ` ${name}`);
  const line = (sign, size, name, took) => el("div", { class: "way" }, el("span", { class: "arrow", "aria-hidden": "true" }, sign), `${bytes(size)}${codec(name)}`, took === null ? null : el("span", { class: "muted" }, ` ${seconds(took)}`));
  const rows = [line("→", edge.bytes_out, edge.codec_out, edge.seconds_out), line("←", edge.bytes_back, edge.codec_back, edge.seconds_back)];
  if (edge.rate_bytes_per_s) rows.push(el("div", { class: "muted small" }, `${rate(edge.rate_bytes_per_s)} seen`));
  if (edge.queued_bytes > 1e5) rows.push(el("div", { class: "small warn" }, `${bytes(edge.queued_bytes)} queue`));
  return el("div", { class: "boundary", title: edge.busy === null ? "" : `its busier line is in use ${percent(edge.busy)} of the time, as expected` }, rows,
    el("div", { class: "bar thin", role: "img", "aria-label": `line in use ${percent(edge.busy)}` }, el("i", { class: `piece ${edge.busy > 0.7 ? "hot" : "line"}`, style: { width: `${100 * (edge.busy || 0)}%` } })));
}

function drawMemory(plan) {
  const measured = plan.seats.some((seat) => seat.held_bytes != null) ? [["data", "the most that was taken, as measured"]] : [];
  legend(byId("memory-legend"), [["compute", "what the plan needs"], ["wait", "what the peer lends"], ...measured]);
  const most = Math.max(1, ...plan.seats.map((seat) => seat.memory_bytes || 0));
  fill(byId("memory"), plan.seats.filter((seat) => seat.needed_bytes !== null).map((seat) => {
    const share = seat.needed_bytes / (seat.memory_bytes || seat.needed_bytes);
    const taken = seat.held_bytes == null ? null : seat.held_bytes / (seat.memory_bytes || seat.held_bytes || 1);
    const width = { width: `${Math.max(20, 100 * (seat.memory_bytes || 0) / most)}%` };
    const bar = (of, kind, label) => el("div", { class: "bar", role: "img", "aria-label": `${seat.name} ${label} ${percent(of)} of its memory`, style: width },
      el("i", { class: `piece ${of > 0.9 ? "hot" : kind}`, style: { width: `${Math.min(100, Math.max(0.8, 100 * of))}%` } }));
    const said = `${bytes(seat.needed_bytes)} of ${bytes(seat.memory_bytes)}, ${percent(share)}` + (taken === null ? "" : `; took ${bytes(seat.held_bytes)}`);
    return el("div", { class: "member" },
      el("div", { class: "row" }, el("strong", {}, seat.name), el("span", { class: "muted small" }, said)),
      bar(share, "compute", "needs"), taken === null ? null : bar(taken, "data", "took"));
  }));
}

// A lane is two rows: as expected above, as measured below. Spans of a kind are one path, so that thousands of them are few elements.
export function drawGantt(gantt) {
  const lanes = gantt ? gantt.lanes.filter((lane) => lane.expected.length || lane.measured.length) : [];
  show("card-gantt", lanes.length > 0);
  if (!lanes.length) return;
  const both = lanes.some((lane) => lane.measured.length);
  const there = new Set(lanes.flatMap((lane) => [...lane.expected, ...lane.measured].map((span) => span[0])));
  byId("gantt-title").textContent = both ? `Step ${gantt.step + 1}: expected above measured` : "One step, as expected";
  legend(byId("gantt-legend"), WORK.filter(([work]) => there.has(work)));
  const left = 150, width = 1000, row = 14, gap = 10, tall = both ? 2 * row + gap : row + gap;
  const scale = width / (gantt.end_s || 1);
  const shapes = [];
  lanes.forEach((lane, k) => {
    const top = k * tall;
    shapes.push(svg("text", { class: "lane", x: 0, y: top + (both ? row + 4 : 11) }, svg("title", {}, lane.label), lane.label.length > 24 ? `${lane.label.slice(0, 23)}…` : lane.label));
    for (const [y, spans, kind] of [[top, lane.expected, "expected"], [top + row, lane.measured, "measured"]]) {
      if (!both && kind === "measured") continue;
      for (const [work] of WORK) {
        const path = spans.filter((span) => span[0] === work).map(([, , from, to]) => `M${(left + from * scale).toFixed(2)} ${y + 1}h${Math.max((to - from) * scale - 0.5, 0.6).toFixed(2)}v${row - 2}h${(-Math.max((to - from) * scale - 0.5, 0.6)).toFixed(2)}z`).join("");
        if (path) shapes.push(svg("path", { class: `span ${work} ${both ? kind : "measured"}`, d: path }));
      }
    }
  });
  const bottom = lanes.length * tall;
  for (let k = 0; k <= 10; k += 1) {
    const x = left + (width * k) / 10;
    shapes.push(svg("line", { class: "tick", x1: x, y1: 0, x2: x, y2: bottom }));
    shapes.push(svg("text", { class: "tick", x, y: bottom + 14, "text-anchor": k === 10 ? "end" : "middle" }, seconds((gantt.end_s * k) / 10)));
  }
  const label = both ? `Step ${gantt.step + 1}: expected above measured` : "One step, as expected";
  fill(byId("gantt"), svg("svg", { viewBox: `0 0 ${left + width + 8} ${bottom + 20}`, role: "img", "aria-label": label }, shapes));
}
