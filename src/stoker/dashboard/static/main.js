// The router: which page is shown, the theme, and the state of the connection.

import { embeddedRun, isStatic, traffic } from "./api.js";
import { el, replace } from "./dom.js";
import { showCompare } from "./page_compare.js";
import { showLogs } from "./page_logs.js";
import { showData } from "./page_data.js";
import { showRanks } from "./page_ranks.js";
import { showRun } from "./page_run.js";
import { showRuns } from "./page_runs.js";
import { showSlots } from "./page_slots.js";

const RUN_PAGES = [["", "Run", showRun], ["slots", "Slots", showSlots], ["ranks", "Ranks", showRanks], ["data", "Data", showData], ["logs", "Logs", showLogs]];
const mainNode = document.getElementById("main"), tabsNode = document.getElementById("tabs"), connectionNode = document.getElementById("connection");
let leave = () => {}, visit = 0;
const timings = {};
window.stokerMeasures = { timings, traffic };

const context = {
  go: (hash) => { location.hash = hash; },
  reload: () => route(),
  setConnected: (isOpen) => { connectionNode.textContent = isOpen ? "live" : "reconnecting …"; },
  measure: (name, ms) => { (timings[name] ??= []).push(ms); },
  every: (ms, action) => {
    if (isStatic) return () => {};
    const timer = setInterval(() => Promise.resolve(action()).catch((error) => { connectionNode.textContent = error.message; }), ms);
    return () => clearInterval(timer);
  },
};

function drawTabs(id, page) {
  const link = (hash, text, isCurrent) => el("a", { href: hash, "aria-current": isCurrent ? "page" : null }, text);
  const runs = isStatic ? [] : [link("#/runs", "Runs", !id && page === "runs")];
  const ofRun = id ? [el("span", { class: "crumb", title: id }, id), ...RUN_PAGES.map(([key, text]) => link(`#/run/${id}${key ? `/${key}` : ""}`, text, page === key))] : [];
  replace(tabsNode, runs, ofRun);
}

async function route() {
  const mine = ++visit;
  leave();
  leave = () => {};
  connectionNode.textContent = "";
  const [, kind, ...words] = location.hash.split("/").map(decodeURIComponent);
  const id = kind === "run" ? words[0] : isStatic ? embeddedRun : null;
  const page = kind === "run" || isStatic ? words[1] || "" : kind || "runs";
  drawTabs(id, page);
  document.title = id ? `${id} – Stoker` : "Stoker";
  try {
    const entry = RUN_PAGES.find(([key]) => key === page);
    const done = id && entry ? await entry[2](mainNode, context, id, ...words.slice(2))
      : kind === "compare" ? await showCompare(mainNode, context, words[0] || "") : await showRuns(mainNode, context);
    if (mine === visit) leave = done || leave;
    else done?.();
  } catch (error) {
    if (mine === visit) replace(mainNode, el("p", { class: "empty", role: "alert" }, error.message));
  }
  timings.ready ??= [performance.now()];
  mainNode.dataset.ready = String(visit);
}

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  window.dispatchEvent(new Event("resize"));
}

const darkQuery = matchMedia("(prefers-color-scheme: dark)");
let storedTheme = null;
try { storedTheme = localStorage.getItem("theme"); } catch { /* a file opened from disk may have no storage */ }
applyTheme(storedTheme || (darkQuery.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", name); } catch { /* as above */ }
  applyTheme(name);
  route();
});
window.addEventListener("hashchange", () => { route(); mainNode.focus(); });
route();
