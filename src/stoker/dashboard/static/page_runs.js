// The list of runs: filter, sort, choose several to compare.

import { get } from "./api.js";
import { el, formatDuration, formatMoney, formatNumber, formatPercent, formatTime, replace } from "./dom.js";

const COLUMNS = [
  ["", null], ["run", (r) => r.id], ["state", (r) => r.state], ["started", (r) => r.began, 1], ["elapsed", (r) => r.elapsed_s, 1],
  ["progress", (r) => (r.total_steps ? r.step / r.total_steps : -1), 1], ["left", (r) => r.eta_s ?? Infinity, 1],
  ["images/s", (r) => r.samples_per_s ?? -1, 1], ["loss", (r) => r.loss ?? Infinity, 1], ["top-1", (r) => r.val_top1 ?? -1, 1],
  ["goodput", (r) => r.goodput ?? -1, 1], ["cost", (r) => r.cost ?? -1, 1], ["verdict", (r) => r.bound_by],
];

const COST = COLUMNS.findIndex(([name]) => name === "cost");

export async function showRuns(main, context) {
  const filter = el("input", { type: "search", placeholder: "Filter by name, state or verdict", "aria-label": "Filter runs", size: "34" });
  const compare = el("button", { type: "button", disabled: true }, "Compare");
  const count = el("span", { class: "quiet small", role: "status" });
  const target = el("span", { class: "quiet small", "data-fact": "target" });
  const body = el("tbody");
  const chosen = new Set();
  let runs = [], sort = [3, -1];
  const heads = COLUMNS.map(([name, key, numeric], i) => el("th", { scope: "col", class: numeric ? "number" : null },
    key ? el("button", { type: "button", onclick: () => { sort = [i, sort[0] === i ? -sort[1] : 1]; draw(); } }, name) : el("span", { class: "hidden" }, "compare")));
  replace(main, el("div", { class: "stack" },
    el("div", { class: "row" }, el("h1", {}, "Runs"), target, filter, compare, count),
    el("div", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body))));
  compare.addEventListener("click", () => context.go(`#/compare/${[...chosen].join(",")}`));
  filter.addEventListener("input", draw);

  const hasCost = () => runs.some((run) => run.cost !== null);

  function draw() {
    heads[COST].hidden = !hasCost();
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => words.every((word) => `${run.id} ${run.state} ${run.verdict} ${run.message}`.toLowerCase().includes(word)));
    const key = COLUMNS[sort[0]][1];
    shown.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * sort[1]);
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === sort[0] ? (sort[1] > 0 ? "ascending" : "descending") : "none"));
    count.textContent = `${shown.length} of ${runs.length}`;
    replace(body, shown.length ? shown.map(row) : el("tr", {}, el("td", { colspan: COLUMNS.length, class: "empty" }, "No runs. Start one with: stoker job run")));
  }

  function row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.id}` });
    box.checked = chosen.has(run.id);
    box.addEventListener("change", () => { if (box.checked) chosen.add(run.id); else chosen.delete(run.id); compare.disabled = chosen.size < 2; });
    const number = (text) => el("td", { class: "number" }, text);
    const progress = run.total_steps ? `${formatNumber(run.step)} / ${formatNumber(run.total_steps)}` : formatNumber(run.step);
    return el("tr", { "data-run": run.id }, el("td", {}, box), el("td", {}, el("a", { href: `#/run/${run.id}` }, run.id)),
      el("td", {}, el("span", { class: `state ${run.state}` }, run.state)), number(formatTime(run.began, 1e6)), number(formatDuration(run.elapsed_s)),
      number(progress), number(formatDuration(run.eta_s)), number(formatNumber(run.samples_per_s)), number(formatNumber(run.loss)),
      number(formatPercent(run.val_top1)), number(formatPercent(run.goodput)), el("td", { class: "number", hidden: !hasCost() }, formatMoney(run.cost)), el("td", { class: "clip rest", title: run.message || run.verdict }, run.state === "failed" ? run.message : run.verdict || "–"));
  }

  async function refresh() {
    const answer = await get("/api/runs");
    runs = answer.runs;
    target.textContent = answer.target ? `followed on ${answer.target}` : "";
    draw();
  }

  await refresh();
  return context.every(5000, refresh);
}
