// What may be changed from here, by the role of who runs the page: buttons, and a question before each act.
import { byId, el } from "./dom.js";

let offered = { role: "compute", may: [] };
let about = ""; // the run that the page shows, "" for what it is about
let key = ""; // the page's token, which a cookie may not stand in for here

const ACTS = { // its button; the question, and what then happens; what is said while it is under way
  stop: ["Stop", (name) => `Stop ${name}?`, "The run finishes its step, saves its state, and ends. It can be resumed.", "stopping"],
  checkpoint: ["Checkpoint now", (name) => `Save the state of ${name} now?`, "The state before the next step is written to the disk of this machine.", "asking"],
  drain: ["Drain", (name) => `Ask ${name} to leave?`, "Its job goes on without it first. It comes back when it is started again.", "asking it to leave"],
};

export const mayDo = (act) => offered.may.includes(act);

// The token stands in the address that was printed, and then in this tab alone.
export async function learnActs(run) {
  about = run || "";
  const said = new URLSearchParams(location.search).get("token");
  try {
    if (said) sessionStorage.setItem("meshcee-token", said);
    key = said || sessionStorage.getItem("meshcee-token") || "";
  } catch {
    key = said || "";
  }
  const answer = await fetch(about ? `may?run=${encodeURIComponent(about)}` : "may");
  if (answer.ok) offered = await answer.json();
  byId("foot").textContent = offered.may.length
    ? `meshcee asks before it changes anything. Here you may: ${offered.may.join(", ")} (role ${offered.role}).`
    : "meshcee shows; it changes nothing here.";
}

export function actButton(act, name, peer = "") {
  const [label] = ACTS[act];
  return el("button", { type: "button", class: act === "checkpoint" ? "" : "grave", "data-act": `${act} ${peer}`, "aria-label": `${label}: ${name}`, "aria-haspopup": "dialog", on: { click: () => ask(act, name, peer) } }, label);
}

// Buttons are drawn anew as figures come: not while one is pressed, and who stood on one by keyboard still stands on it.
export function keepFocus(node, draw) {
  if (node.querySelector("button:active")) return;
  const had = node.contains(document.activeElement) ? document.activeElement.dataset.act : null;
  draw();
  if (had) focusOn(had);
}

function focusOn(act) {
  for (const button of document.querySelectorAll("button[data-act]")) if (button.dataset.act === act) button.focus();
}

function ask(act, name, peer) {
  const [label, question, then] = ACTS[act], sure = byId("sure");
  byId("sure-what").textContent = question(name);
  byId("sure-then").textContent = then;
  byId("sure-yes").textContent = label;
  byId("sure-no").onclick = () => sure.close();
  byId("sure-yes").onclick = () => {
    sure.close();
    perform(act, name, peer);
  };
  sure.onclose = () => focusOn(`${act} ${peer}`);
  sure.showModal();
  byId("sure-no").focus();
}

async function perform(act, name, peer) {
  tell(`${name}: ${ACTS[act][3]} …`, false);
  try {
    const answer = await fetch("do", { method: "POST", headers: { "Content-Type": "application/json", "X-Meshcee-Token": key }, body: JSON.stringify({ act, run: about, peer }) });
    tell((await answer.text()).replace(/^meshcee: /, "").trim(), !answer.ok);
  } catch {
    tell("the page's server does not answer", true);
  }
}

function tell(text, isBad) {
  const told = byId("told");
  told.textContent = text;
  told.className = isBad ? "error" : "told";
  told.hidden = false;
}
