// Elements and figures as text. What comes from other machines becomes a text node or an attribute, never markup.

export function el(tag, attributes, ...children) {
  return made(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, of] of Object.entries(value)) node.style.setProperty(key, of);
    else if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

export function show(id, shown) {
  byId(id).hidden = !shown;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!known(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function amount(value) {
  if (!known(value)) return "–";
  for (const unit of ["", " k", " M", " G", " T"]) {
    if (Math.abs(value) < 1000) return `${Number(value.toPrecision(3))}${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(3))} P`;
}

export function bytes(value) {
  if (!known(value)) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${Number(value.toPrecision(3))} ${unit}`;
    value /= 1024;
  }
  return `${Number(value.toPrecision(3))} TiB`;
}

export function rate(bytesPerS) {
  if (!known(bytesPerS)) return "–";
  const bits = bytesPerS * 8;
  if (bits >= 1e9) return `${Number((bits / 1e9).toPrecision(3))} Gbit/s`;
  return bits >= 1e6 ? `${Number((bits / 1e6).toPrecision(3))} Mbit/s` : `${Number((bits / 1e3).toPrecision(3))} kbit/s`;
}

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  return value < 1 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
}

export function duration(value) {
  if (!known(value)) return "–";
  let left = Math.max(0, Math.round(value));
  const days = Math.floor(left / 86400);
  left %= 86400;
  const hours = Math.floor(left / 3600), minutes = Math.floor((left % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(left % 60).padStart(2, "0")} s` : `${left} s`;
}

export function percent(value) {
  return known(value) ? `${Math.round(value * 100)} %` : "–";
}

export function clock(at) {
  return known(at) ? new Date(at * 1000).toLocaleTimeString() : "";
}

export function date(at) {
  return known(at) ? new Date(at * 1000).toLocaleString() : "";
}

export function legend(node, rows) {
  fill(node, rows.map(([kind, text]) => el("span", {}, el("i", { class: `swatch ${kind}` }), text)));
}
