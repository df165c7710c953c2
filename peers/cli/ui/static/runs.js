// The runs of this machine, each a link to its page.
import { byId, date, el, fill, number, show } from "./dom.js";

export async function listRuns() {
  const answer = await fetch("runs");
  return answer.ok ? answer.json() : { runs: [], one: true };
}

export function drawRuns(runs) {
  show("runs", true);
  const columns = ["run", "state", "step", "loss", "started"];
  const rows = runs.map((run) => el("tr", {},
    el("th", { scope: "row" }, el("a", { href: `?run=${encodeURIComponent(run.run)}` }, run.run)),
    el("td", {}, el("span", { class: `pill ${run.state}` }, run.state)),
    el("td", {}, run.steps ? `${run.step} of ${run.steps}` : String(run.step)), el("td", {}, number(run.loss)), el("td", {}, date(run.started))));
  fill(byId("run-table"), el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.length ? rows : el("tr", {}, el("td", { colspan: 5 }, "No runs yet: start one with `meshcee train JOB.py --join LINE`."))));
}
