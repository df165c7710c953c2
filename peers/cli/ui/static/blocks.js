// The blocks of a captured model: what each costs for one sample, and what crosses the cut behind it.
import { amount, bytes, byId, el, fill, legend, percent, show } from "./dom.js";

const COSTS = [["flops", "FLOPs", "compute", amount], ["parameter_bytes", "parameters", "apply", bytes], ["activation_bytes", "activations", "code", bytes], ["boundary_bytes", "crosses the cut", "data", bytes]];

export function drawBlocks(blocks) {
  show("card-blocks", blocks.length > 0);
  if (!blocks.length) return;
  legend(byId("blocks-legend"), COSTS.map(([, name, colour]) => [colour, name]));
  const most = Object.fromEntries(COSTS.map(([of]) => [of, Math.max(1, ...blocks.map((block) => block[of]))]));
  const rows = blocks.map((block, k) => el("tr", {}, el("td", { class: "muted" }, String(k)), el("th", { scope: "row" }, block.name),
    COSTS.map(([of, name, colour, text]) => {
      if (of === "boundary_bytes" && k + 1 === blocks.length) return el("td", {}, "–");
      const share = block[of] / most[of];
      return el("td", { class: "cost" }, text(block[of]),
        el("div", { class: "bar thin", role: "img", "aria-label": `${percent(share)} of the most ${name}` }, el("i", { class: `piece ${colour}`, style: { width: `${100 * share}%` } })));
    })));
  fill(byId("blocks"), el("thead", {}, el("tr", {}, ["", "block", ...COSTS.map(([, name]) => name)].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows));
}

export function blockTiles(blocks) {
  const sum = (of) => blocks.reduce((all, block) => all + block[of], 0);
  return [["blocks", String(blocks.length), "a stage takes neighbours"], ["FLOPs", amount(sum("flops")), "forward, one sample"],
    ["parameters", bytes(sum("parameter_bytes")), "and buffers"], ["activations", bytes(sum("activation_bytes")), "of one sample, until W"]];
}
