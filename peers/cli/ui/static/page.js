// The page: it takes what is new of the picture, and has each part draw itself again.
import { byId, clock, duration, el, fill, number, percent, seconds, show } from "./dom.js";
import { Curves } from "./charts.js";
import { actButton, keepFocus, learnActs, mayDo } from "./acts.js";
import { drawMesh } from "./mesh.js";
import { drawGantt, drawPlan } from "./plan.js";
import { blockTiles, drawBlocks } from "./blocks.js";
import { drawRuns, listRuns } from "./runs.js";

const picture = {};
let curves = null;
let named = ""; // what the file is called that the page stands in
let link = ""; // of the page to its server: "" while it is well, or what is wrong
const MARKS = { lost: "✕", left: "✕", recovered: "↻", planned: "▸", replanned: "⇄", drained: "⇠", leaving: "⇠", joined: "+", coordinator: "★", resumed: "▸", ended: "■" };

function hear(news) {
  show("wait", false);
  for (const [name, value] of Object.entries(news)) if (name !== "curves") picture[name] = value;
  if (news.run !== undefined || news.plan !== undefined || news.mesh !== undefined) drawHead();
  if (news.limit !== undefined || news.helps !== undefined) drawLimit();
  if (news.plan !== undefined) drawPlan(picture.plan);
  if (news.mesh !== undefined || news.plan !== undefined) drawMesh(picture.mesh, picture.plan, picture.at);
  if (news.moments !== undefined) drawMoments();
  if (news.words !== undefined) {
    show("card-words", Boolean(news.words));
    byId("words").textContent = news.words;
  }
  if (news.gantt !== undefined) drawGantt(picture.gantt);
  if (news.blocks !== undefined) drawBlocks(picture.blocks);
  if (news.curves) {
    curves = curves || new Curves();
    curves.hear(news.curves);
  }
  pair();
}

// Cards stand in pairs; the last of an odd number takes the row.
function pair() {
  const cards = [...document.querySelectorAll(".card.half")];
  const shown = cards.filter((card) => !card.hidden);
  for (const card of cards) card.classList.toggle("alone", shown.length % 2 === 1 && card === shown[shown.length - 1]);
}

function drawHead() {
  const { run, mesh, plan } = picture;
  const title = run ? run.name : named || "meshcee";
  byId("title").textContent = title;
  document.title = run && run.steps ? `${percent(run.step / run.steps)} ${title}` : title;
  const about = [];
  if (run && run.owner) about.push(`owner ${run.owner}`);
  if (run && run.id && !run.owner) about.push(run.id);
  if (mesh) about.push(picture.words ? `${mesh.peers.length} devices` : `${mesh.peers.length} peers`);
  byId("about").textContent = about.join(" · ");
  const state = link || (run ? run.state : picture.words ? "" : mesh ? "no job" : "");
  byId("state").textContent = state;
  byId("state").className = `pill ${link ? "failed" : run ? run.state : "idle"}`;
  show("error", Boolean(run && run.error));
  if (run && run.error) byId("error").textContent = run.error;
  show("progress", Boolean(run && run.steps));
  if (run && run.steps) byId("done").style.setProperty("width", `${Math.min(100, (100 * run.step) / run.steps)}%`);
  const acts = run && run.state === "running" ? ["checkpoint", "stop"].filter(mayDo) : [];
  keepFocus(byId("acts"), () => fill(byId("acts"), acts.map((act) => actButton(act, title))));
  const figures = tiles(run, mesh, plan);
  show("tiles", figures.length > 0);
  fill(byId("tiles"), figures);
}

function tiles(run, mesh, plan) {
  const found = [];
  const tile = (name, value, more) => found.push(el("div", { class: "tile" }, el("span", { class: "muted small" }, name), el("b", {}, value), el("span", { class: "muted small" }, more || " ")));
  if (run) {
    tile("step", run.steps ? `${run.step} / ${run.steps}` : String(run.step), run.eta_s && run.state === "running" ? `${duration(run.eta_s)} to go` : run.ended_at && run.started_at ? `in ${duration(run.ended_at - run.started_at)}` : "");
    tile("loss", number(run.loss), Object.entries(run.metrics || {}).slice(0, 2).map(([name, value]) => `eval ${name} ${number(value)}`).join(", "));
    if (run.step_s) {
      const expected = plan && plan.step_s ? `${seconds(plan.step_s)} expected` : "";
      tile("a step takes", seconds(run.step_s), expected);
    }
    if (run.samples_per_s) tile("samples/s", number(run.samples_per_s, 3), run.lr === null ? "" : `learning rate ${number(run.lr, 3)}`);
  }
  if (!run && plan && plan.step_s) {
    tile("a step takes", seconds(plan.step_s), "expected");
    tile("samples/s", number(plan.samples_per_s, 3), "expected");
    tile("stages", String(new Set(plan.seats.map((seat) => seat.label)).size), plan.micros.length > 1 ? `in ${plan.micros.length} pipelines` : "");
  }
  for (const figure of picture.blocks && picture.blocks.length ? blockTiles(picture.blocks) : []) tile(...figure);
  if (mesh) {
    const devices = mesh.peers.filter((peer) => peer.device).length;
    const works = plan ? plan.seats.filter((seat) => mesh.peers.some((peer) => peer.peer === seat.peer)).length : 0;
    tile("devices", String(devices), plan ? `${works} in the plan` : "");
  }
  return found;
}

function drawLimit() {
  const helps = picture.helps || [];
  show("card-limit", Boolean(picture.limit || helps.length));
  byId("limit").textContent = picture.limit || "–";
  byId("help-title").hidden = !helps.length;
  fill(byId("helps"), helps.map((help) => el("li", {}, help.text, el("span", { class: "muted" }, `: ${seconds(help.step_s)} a step, ${percent(help.gain - 1)} faster`))));
}

function drawMoments() {
  const moments = picture.moments || [];
  show("card-moments", moments.length > 0);
  fill(byId("moments"), moments.slice().reverse().map((moment) => {
    const gain = moment.gain ? el("span", { class: "tag" }, `expected ${number(moment.gain, 3)}×${moment.gain_measured ? `, measured ${number(moment.gain_measured, 3)}×` : ""}`) : null;
    return el("li", { class: `moment ${moment.kind}` }, el("span", { class: "mark", "aria-hidden": "true" }, MARKS[moment.kind] || "·"),
      el("div", {}, el("div", {}, moment.text, " ", gain), el("div", { class: "muted small" }, [clock(moment.at), moment.step === null ? "" : `step ${moment.step + 1}`, moment.kind].filter(Boolean).join(" · "))));
  }));
}

function listen(run) {
  const stream = new EventSource(run ? `live?run=${encodeURIComponent(run)}` : "live");
  stream.onmessage = (event) => {
    if (link) {
      link = "";
      if (picture.run || picture.mesh) drawHead();
    }
    hear(JSON.parse(event.data));
  };
  stream.addEventListener("over", () => {
    stream.close();
    byId("foot").textContent = "What was shown has ended; this is the last of it. `meshcee ui` opens a run again.";
  });
  stream.onerror = () => {
    link = stream.readyState === EventSource.CLOSED ? "the page's server has ended" : "no connection, trying again";
    drawHead();
  };
}

function themes() {
  const root = document.documentElement, button = byId("theme"), order = ["auto", "light", "dark"];
  let now = "auto";
  try { now = localStorage.getItem("meshcee-theme") || "auto"; } catch { /* a page from a file may have no storage */ }
  const set = (theme) => {
    now = order.includes(theme) ? theme : "auto";
    if (now === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", now);
    button.textContent = `theme: ${now}`;
    if (curves) curves.recolour();
  };
  button.addEventListener("click", () => {
    set(order[(order.indexOf(now) + 1) % 3]);
    try { localStorage.setItem("meshcee-theme", now); } catch { /* it holds for this visit */ }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(now));
  set(now);
}

async function begin() {
  themes();
  byId("link-what").addEventListener("change", () => drawMesh(picture.mesh, picture.plan, picture.at));
  byId("log").addEventListener("change", (event) => curves && curves.logarithmic(event.target.checked));
  const given = byId("picture");
  if (given) {
    const { title, picture: shown } = JSON.parse(given.textContent);
    byId("foot").textContent = `${title}, as of ${new Date(shown.at * 1000).toLocaleString()}. One file, which loads nothing.`;
    named = title;
    hear(shown);
    return;
  }
  const run = new URLSearchParams(location.search).get("run");
  await learnActs(run);
  history.replaceState(null, "", run ? `?run=${encodeURIComponent(run)}` : location.pathname); // the token is in a cookie
  const { runs, one } = await listRuns();
  byId("others").hidden = one || !run;
  if (run || one) {
    listen(run);
    return;
  }
  show("wait", false);
  drawRuns(runs);
  byId("about").textContent = "runs of this machine";
  setInterval(async () => drawRuns((await listRuns()).runs), 5000);
}

begin();
