// Build elements, and format numbers. Text from runs becomes text nodes only, never markup.

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(node, ...children) {
  node.textContent = "";
  append(node, children);
}

const UNITS = ["", "Ki", "Mi", "Gi", "Ti", "Pi"];

export function formatNumber(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "B" || unit === "B/s") {
    let power = 0;
    for (; Math.abs(value) >= 1024 && power < UNITS.length - 1; power++) value /= 1024;
    return `${value >= 100 || power === 0 ? value.toFixed(0) : value.toPrecision(3)} ${UNITS[power]}${unit}`;
  }
  const size = Math.abs(value);
  if (unit === "s" && size < 1e-7) return "0 s";
  if (unit === "s" && size < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  let text;
  if (size >= 1e6) text = `${(value / 1e6).toPrecision(3)}M`;
  else if (size >= 1000 || Number.isInteger(value)) text = Math.round(value).toLocaleString("en-US");
  else if (size >= 100) text = value.toFixed(0);
  else if (size !== 0 && size < 0.001) text = value.toExponential(3);
  else text = String(Number(value.toPrecision(4)));
  if (unit === "s" && size < 1 && size > 0) return `${Number((value * 1000).toPrecision(3))} ms`;
  return unit ? `${text}${unit === "%" || unit === "/s" ? "" : " "}${unit}` : text;
}

export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 9.95) return `${seconds.toFixed(1)}s`;
  const total = Math.round(seconds);
  if (total < 60) return `${total}s`;
  if (total < 3600) return `${Math.floor(total / 60)}m${String(total % 60).padStart(2, "0")}s`;
  if (total < 172800) return `${Math.floor(total / 3600)}h${String(Math.floor((total % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(total / 86400)}d${Math.floor((total % 86400) / 3600)}h`;
}

export function formatTime(t, span = 0) {
  if (!t) return "–";
  const date = new Date(t * 1000);
  const clock = date.toLocaleTimeString("en-GB");
  return span > 86400 ? `${date.toLocaleDateString("en-CA").slice(5)} ${clock.slice(0, 5)}` : clock;
}

export function formatPercent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function pluralize(count, noun) {
  return `${formatNumber(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function formatMoney(amount, total = amount) {
  if (amount === null || amount === undefined) return "–";
  const digits = total > 0 && total < 1 ? 4 : 2;  // the parts of a total have as many as the total
  return amount.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function fact(label, value, key) {
  return el("div", {}, el("dt", {}, label), el("dd", { "data-fact": key, title: String(value) }, value));
}

export function table(heads, rows, { label, rowClass } = {}) {
  const numeric = heads.map((head) => head.startsWith("#"));
  const head = heads.map((text, i) => el("th", { scope: "col", class: numeric[i] ? "number" : null }, text.replace("#", "")));
  const body = rows.map((row) => el("tr", { class: rowClass ? rowClass(row) : null },
    row.map((cell, i) => el("td", { class: numeric[i] ? "number" : null }, cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label || "table" },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

export function tableDetails(label, makeRows) {
  const details = el("details", {}, el("summary", {}, "Table"));
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    details.querySelector(".scroll")?.remove();
    const [heads, rows] = makeRows();
    details.append(table(heads, rows.slice(0, 500), { label }));
  });
  return details;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
