// The mesh: a map of its regions, its links as a heat map, its peers as a table.
import { bytes, byId, clock, duration, el, fill, number, percent, rate, seconds, show, svg } from "./dom.js";
import { actButton, keepFocus, mayDo } from "./acts.js";

const W = 460, H = 290;
let chosen = null; // the cell that is read, by its two peers

export function drawMesh(mesh, plan, at) {
  const some = Boolean(mesh && mesh.peers.length);
  for (const id of ["card-map", "card-peers"]) show(id, some);
  show("card-links", some && mesh.links.length > 0);
  if (!some) return;
  drawMap(mesh, plan, at);
  drawLinks(mesh);
  drawPeers(mesh, plan);
}

function drawMap(mesh, plan, at) {
  const seats = new Map((plan ? plan.seats : []).map((seat) => [seat.peer, seat]));
  const spot = new Map(mesh.peers.map((peer) => [peer.peer, [30 + peer.x * (W - 60), 28 + peer.y * (H - 62)]]));
  const shapes = [];
  const areas = new Map();
  for (const peer of mesh.peers) areas.set(peer.area, [...(areas.get(peer.area) || []), peer]);
  for (const [area, peers] of areas) {
    if (area < 0) continue;
    const hint = peers.map((peer) => peer.region).find((region) => region);
    const xs = peers.map((peer) => spot.get(peer.peer)[0]), ys = peers.map((peer) => spot.get(peer.peer)[1]);
    const x = Math.min(...xs) - 40, y = Math.min(...ys) - (hint ? 38 : 24), width = Math.max(...xs) - x + 40, height = Math.max(...ys) - y + 34;
    shapes.push(svg("rect", { class: "area", x, y, width, height, rx: 18 }));
    if (hint) shapes.push(svg("text", { class: "region", x: x + 12, y: y + 15 }, hint));
  }
  const links = new Map(mesh.links.map((link) => [`${link.source} ${link.target}`, link]));
  const between = new Map();
  for (const link of mesh.links) {
    const a = mesh.peers.find((peer) => peer.peer === link.source), b = mesh.peers.find((peer) => peer.peer === link.target);
    if (!a || !b || a.area < 0 || a.area >= b.area) continue;
    const key = `${a.area} ${b.area}`;
    if (!between.has(key)) between.set(key, { a, b, all: [] });
    between.get(key).all.push(link.latency_s);
  }
  for (const { a, b, all } of between.values()) {
    const middle = (area) => { const of = areas.get(area).map((peer) => spot.get(peer.peer)); return [0, 1].map((k) => of.reduce((sum, place) => sum + place[k], 0) / of.length); };
    const [x1, y1] = middle(a.area), [x2, y2] = middle(b.area);
    all.sort((u, v) => u - v);
    shapes.push(svg("line", { class: "far", x1, y1, x2, y2 }));
    shapes.push(svg("text", { class: "latency", x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 4, "text-anchor": "middle" }, seconds(all[Math.floor(all.length / 2)])));
  }
  for (const seat of seats.values()) {
    for (const next of seats.values()) {
      if (next.pipeline !== seat.pipeline || next.stage !== seat.stage + 1 || !spot.has(seat.peer) || !spot.has(next.peer)) continue;
      const [x1, y1] = spot.get(seat.peer), [x2, y2] = spot.get(next.peer);
      const link = links.get(`${seat.peer} ${next.peer}`);
      shapes.push(svg("line", { class: "flow", x1, y1, x2, y2 }, svg("title", {}, `${seat.name} to ${next.name}${link ? `: ${seconds(link.latency_s)}, ${rate(link.bandwidth_bytes_per_s)}` : ""}`)));
    }
  }
  for (const peer of mesh.peers) {
    const [x, y] = spot.get(peer.peer), seat = seats.get(peer.peer);
    const kind = seat ? "works" : peer.device ? peer.state : "looks";
    shapes.push(svg("g", { class: `peer ${kind}` },
      svg("title", {}, `${peer.name}: ${seat ? `stage ${seat.label}` : peer.device ? peer.state : "lends no device"}${peer.device ? `, ${peer.device}` : ""}`),
      peer.peer === mesh.coordinator ? svg("circle", { class: "crown", cx: x, cy: y, r: 15 }) : null,
      svg("circle", { class: "dot", cx: x, cy: y, r: 11 }),
      svg("text", { class: "label", x, y: y + 4, "text-anchor": "middle" }, seat ? seat.label : ""),
      mesh.peers.length <= 24 ? svg("text", { class: "name", x, y: y + 25, "text-anchor": "middle" }, short(peer.name, 13)) : null));
  }
  fill(byId("map"), svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `Map of ${mesh.peers.length} peers in ${[...areas.keys()].filter((area) => area >= 0).length} regions` }, shapes));
  const who = mesh.peers.find((peer) => peer.peer === mesh.coordinator);
  const then = at && at - mesh.at > 60 ? ` As it was at ${clock(mesh.at)}.` : "";
  byId("map-about").textContent = `Distance is latency between regions.${who ? ` ${who.name} coordinates, term ${mesh.term}.` : ""}${then}`;
}

// The ends of a long name: peers of one kind often differ in the last letters.
export const short = (name, most = 14) => (name.length > most ? `${name.slice(0, most - 6)}…${name.slice(-5)}` : name);

const WHAT = { // of a link: its figure, how it reads, and how bad it is from 0 to 1
  latency: [(link) => link.latency_s, seconds, (value) => Math.log10(Math.max(value, 1e-4) / 1e-4) / 3.5],
  bandwidth: [(link) => link.bandwidth_bytes_per_s, rate, (value) => 1 - Math.log10(Math.max(value, 1e5) / 1e5) / 4],
  sag: [(link) => 1 - link.bandwidth_bytes_per_s / Math.max(link.best_bytes_per_s, 1), percent, (value) => value],
  age: [(link, at) => Math.max(0, at - link.measured_at), duration, (value) => value / 1800],
};

function drawLinks(mesh) {
  const [figure, text, badness] = WHAT[byId("link-what").value];
  const links = new Map(mesh.links.map((link) => [`${link.source} ${link.target}`, link]));
  const peers = mesh.peers.filter((peer) => peer.device || mesh.links.some((link) => link.source === peer.peer || link.target === peer.peer))
    .sort((a, b) => a.area - b.area || (a.name < b.name ? -1 : 1));
  const small = peers.length > 14;
  const read = (a, b, link) => {
    const sag = 1 - link.bandwidth_bytes_per_s / Math.max(link.best_bytes_per_s, 1);
    byId("link-about").textContent = `${a.name} to ${b.name}: ${seconds(link.latency_s)} one way, ${rate(link.bandwidth_bytes_per_s)}${sag > 0.1 ? `, ${percent(sag)} below its best` : ""}, measured ${duration(Math.max(0, mesh.at - link.measured_at))} ago.`;
  };
  const rows = peers.map((a) => el("tr", {}, el("th", { scope: "row" }, short(a.name)), peers.map((b) => {
    const link = links.get(`${a.peer} ${b.peer}`);
    if (!link) return el("td", { class: a === b ? "self" : "none" });
    const value = figure(link, mesh.at), heat = Math.min(1, Math.max(0, badness(value)));
    const key = `${a.peer} ${b.peer}`;
    const call = () => { chosen = key; read(a, b, link); };
    if (key === chosen) read(a, b, link);
    return el("td", { class: "heat", style: { "--heat": `${Math.round(heat * 100)}%` } },
      el("button", { type: "button", "aria-label": `${a.name} to ${b.name}: ${text(value)}`, on: { click: call, focus: call, mouseenter: call } }, small ? "" : text(value)));
  })));
  const had = document.activeElement && byId("links").contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  fill(byId("links"), el("table", { class: small ? "links small-cells" : "links" },
    el("thead", {}, el("tr", {}, el("td", {}, "from \\ to"), peers.map((peer) => el("th", { scope: "col" }, el("span", {}, short(peer.name, small ? 10 : 14)))))), el("tbody", {}, rows)));
  if (had) for (const button of byId("links").querySelectorAll("button")) if (button.getAttribute("aria-label").split(": ")[0] === had.split(": ")[0]) button.focus();
}

function drawPeers(mesh, plan) {
  const seats = new Map((plan ? plan.seats : []).map((seat) => [seat.peer, seat]));
  const drains = mayDo("drain"), columns = ["peer", "state", "stage", "device", "memory", "speed", "kernel class", "version", ...(drains ? ["ask"] : [])];
  const rows = mesh.peers.map((peer) => el("tr", {},
    el("th", { scope: "row" }, peer.name, peer.peer === mesh.coordinator ? el("span", { class: "tag" }, "coordinator") : null),
    el("td", {}, el("span", { class: `pill ${peer.device ? peer.state : "looks"}` }, peer.device ? peer.state : "no device")),
    el("td", {}, seats.has(peer.peer) ? seats.get(peer.peer).label : "–"),
    el("td", {}, peer.device || "–"), el("td", {}, bytes(peer.memory_bytes)),
    el("td", {}, peer.speed_flops_per_s ? `${number(peer.speed_flops_per_s / 1e9, 3)} GFLOP/s` : "–"),
    el("td", {}, peer.kernels || "–"), el("td", {}, peer.software || "–", peer.outside ? el("span", { class: "tag bad" }, peer.outside) : null),
    drains ? el("td", {}, peer.device && peer.state !== "leaving" ? actButton("drain", peer.name, peer.peer) : null) : null));
  keepFocus(byId("peers"), () => fill(byId("peers"), el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)));
  byId("peers-about").textContent = mesh.jobs.map((job) => `${job.owner} has the job ${job.job}: ${job.state}, step ${job.step + 1}.`).join(" ");
}
