// Logs: of one slot or merged, with search, follow and past attempts.

import { get, isStatic, runPath } from "./api.js";
import { el, formatTime, replace } from "./dom.js";

const MAX_LINES = 5000;

export async function showLogs(main, context, id, name = "", offset = "") {
  const { logs } = await get(runPath(id, "/logs"));
  const newest = Math.max(0, ...logs.map((log) => log.attempt));
  const choice = el("select", { "aria-label": "Log" }, el("option", { value: "" }, `All slots, attempt ${newest}`),
    logs.map((log) => el("option", { value: log.name }, `${log.slot}, attempt ${log.attempt}`)));
  if (logs.some((log) => log.name === name)) choice.value = name;
  const search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search in the logs", size: "28" });
  const follow = el("button", { type: "button", "aria-pressed": String(!offset), onclick: () => setFollow(follow.getAttribute("aria-pressed") !== "true") }, "Follow");
  const more = el("button", { type: "button", onclick: () => load(false) }, "Read on");
  const status = el("span", { class: "quiet small", role: "status" });
  const lines = el("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log lines", "aria-live": "off" });
  let positions = {}, shown = 0, serial = 0;
  replace(main, el("div", { class: "stack" }, el("div", { class: "row" }, el("h1", {}, "Logs"), choice, search, follow, more, status), el("div", { class: "panel" }, lines)));
  if (offset && choice.value) positions = { [choice.value]: Number(offset) };

  function setFollow(isOn) { follow.setAttribute("aria-pressed", String(isOn)); if (isOn) lines.scrollTop = lines.scrollHeight; }

  function lineNode(line) {
    const word = search.value.toLowerCase();
    const text = el("span");
    let rest = line.text;
    for (let at = word ? rest.toLowerCase().indexOf(word) : -1; at >= 0; at = rest.toLowerCase().indexOf(word)) {
      text.append(rest.slice(0, at), el("mark", {}, rest.slice(at, at + word.length)));
      rest = rest.slice(at + word.length);
    }
    text.append(rest);
    const isTarget = offset && line.log === name && line.offset === Number(offset);
    return el("div", { class: isTarget ? "target" : null }, el("time", {}, line.t ? formatTime(line.t) : "        "),
      choice.value ? null : el("span", { class: "slot" }, line.log.replace(/\.\d+\.log$/, "").replace(/-(\d+)$/, "/$1")), text);
  }

  async function load(isFirst) {
    const mine = serial;
    const names = choice.value || Object.keys(positions).join(",");
    const known = names.split(",").filter((one) => positions[one] !== undefined);
    const query = { logs: names, search: search.value, limit: 1000, offsets: known.length && known.length === names.split(",").length ? known.map((one) => positions[one]).join(",") : "", tail: isFirst };
    const page = await get(runPath(id, "/lines"), query);
    if (mine !== serial) return;
    positions = page.next;
    shown += page.lines.length;
    lines.append(...page.lines.map(lineNode));
    while (lines.childElementCount > MAX_LINES) lines.firstChild.remove();
    more.hidden = page.is_complete;
    status.textContent = `${shown} lines${search.value ? " match" : ""}`;
    if (follow.getAttribute("aria-pressed") === "true" && page.lines.length) lines.scrollTop = lines.scrollHeight;
    lines.querySelector(".target")?.scrollIntoView({ block: "center" });
  }

  function restart() {
    serial += 1;
    positions = {}; shown = 0; offset = "";
    lines.textContent = "";
    return load(!search.value);
  }

  let timer = null;
  choice.addEventListener("change", restart);
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(restart, 250); });
  await load(true);
  return isStatic ? () => {} : context.every(1000, () => (follow.getAttribute("aria-pressed") === "true" ? load(false) : null));
}
