// Curves by uPlot. One chart a card; its colours are those of the page, also when the theme changes.
import { byId, number, show } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Up to a third above what nearly all points are: one odd step does not flatten the rest.
function clipped(plot, scale, high) {
  const [from, to] = plot.series[0].idxs || [0, plot.data[0].length - 1];
  const values = plot.data.flatMap((column, k) => (k && (plot.series[k].scale === scale) ? column.slice(from, to + 1).filter((value) => value !== null) : []));
  values.sort((a, b) => a - b);
  const usual = values.length ? values[Math.floor(0.97 * (values.length - 1))] : high;
  return [0, Math.min(high, 1.35 * usual) || 1];
}

function options(host, lines, settings) {
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--muted"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
  const scales = { x: { time: false } };
  const axes = [{ ...axis, size: 30, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) }];
  for (const [index, scale] of [...new Set(lines.map((line) => line.scale || "y"))].entries()) {
    scales[scale] = settings.log ? { distr: 3 } : settings.clips ? { range: (plot, low, high) => clipped(plot, scale, high) } : {};
    axes.push({ ...axis, scale, side: index ? 1 : 3, size: 62, grid: index ? { show: false } : grid,
      values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) });
  }
  const series = [{ label: "step", value: (_, value) => (value === null ? "–" : String(value)) }];
  for (const line of lines) {
    series.push({ label: line.label, scale: line.scale || "y", stroke: line.hidden ? "transparent" : colour(line.colour), width: line.hidden ? 0 : 1.6,
      dash: line.dash, spanGaps: Boolean(line.gaps), points: { show: Boolean(line.gaps), size: 5 }, value: (_, value) => number(value) });
  }
  const bands = lines.flatMap((line, k) => (line.band ? [{ series: [k + 1, line.band], fill: colour("--band") }] : []));
  return { width: host.clientWidth || 300, height: Math.max(90, (host.clientHeight || 200) - LEGEND), scales, axes, series, bands,
    cursor: { drag: { x: true, y: false }, sync: settings.sync ? { key: "steps" } : undefined, points: { size: 6 } }, legend: { live: true } };
}

const LEGEND = 30; // pixels below a chart

class Chart {
  constructor(id, lines, settings = {}) {
    this.host = byId(id);
    this.lines = lines;
    this.settings = settings;
    this.data = [[], ...lines.map(() => [])];
    this.plot = null;
    this.isDue = false;
    new ResizeObserver(() => this.fit()).observe(this.host);
  }

  set(data) {
    this.data = data;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      if (this.plot) this.plot.setData(this.data);
      else this.again();
    });
  }

  again(settings = {}) {
    Object.assign(this.settings, settings);
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (!this.host.clientWidth) return;
    this.plot = new uPlot(options(this.host, this.lines, this.settings), this.data, this.host);
    this.fit();
  }

  fit() {
    if (!this.plot) {
      if (this.host.clientWidth && this.data[0].length) this.again();
      return;
    }
    const height = Math.max(90, this.host.clientHeight - LEGEND);
    if (this.plot.width !== this.host.clientWidth || this.plot.height !== height) {
      this.plot.setSize({ width: this.host.clientWidth, height });
    }
  }
}

const COLUMNS = ["steps", "loss", "loss_low", "loss_high", "lr", "norm", "samples_per_s", "step_s"];

// The curves of a run, put together from what comes: from point `since` on everything is new.
export class Curves {
  constructor() {
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.charts = [
      [new Chart("loss", [
        { label: "lowest", colour: "--compute", hidden: true }, { label: "highest", colour: "--compute", hidden: true, band: 1 },
        { label: "loss", colour: "--compute" },
      ], { sync: true }), ["loss_low", "loss_high", "loss"]],
      [new Chart("speed", [
        { label: "samples/s", colour: "--apply" }, { label: "s a step", colour: "--data", scale: "s" },
      ], { sync: true, clips: true }), ["samples_per_s", "step_s"]],
      [new Chart("rate", [
        { label: "learning rate", colour: "--code" }, { label: "norm", colour: "--data", scale: "norm" },
      ], { sync: true }), ["lr", "norm"]],
    ];
    this.metrics = null;
    this.names = "";
  }

  hear(sent) {
    const since = sent.since || 0;
    for (const name of COLUMNS) {
      const column = this.columns[name];
      column.length = Math.min(column.length, since);
      for (const value of sent[name]) column.push(value);
    }
    const steps = this.columns.steps.map((step) => step + 1);
    const some = steps.length > 0;
    for (const id of ["card-loss", "card-speed"]) show(id, some);
    show("card-rate", this.columns.lr.some((value) => value !== null) || this.columns.norm.some((value) => value !== null));
    for (const [chart, names] of this.charts) chart.set([steps, ...names.map((name) => this.columns[name].slice())]);
    this.evaluations(sent.metrics || {});
  }

  evaluations(metrics) {
    const names = Object.keys(metrics).filter((name) => metrics[name].length);
    show("card-metrics", names.length > 0);
    if (!names.length) return;
    if (this.names !== names.join("\n")) {
      this.names = names.join("\n");
      const colours = ["--compute", "--data", "--apply", "--code"];
      if (this.metrics && this.metrics.plot) this.metrics.plot.destroy();
      this.metrics = new Chart("metrics", names.map((name, k) => (
        { label: name, colour: colours[k % colours.length], gaps: true, scale: k ? "other" : "y" })), { sync: true });
    }
    const steps = [...new Set(names.flatMap((name) => metrics[name].map(([step]) => step)))].sort((a, b) => a - b);
    const of = names.map((name) => {
      const values = new Map(metrics[name]);
      return steps.map((step) => (values.has(step) ? values.get(step) : null));
    });
    this.metrics.set([steps.map((step) => step + 1), ...of]);
  }

  logarithmic(wanted) {
    const positive = this.columns.loss_low.every((value) => value === null || value > 0);
    this.charts[0][0].again({ log: wanted && positive });
  }

  recolour() {
    for (const [chart] of this.charts) chart.again();
    if (this.metrics) this.metrics.again();
  }
}
