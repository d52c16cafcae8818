// Compare runs: one scalar by step or by time, and every setting that differs.

import { get } from "./api.js";
import { TimeChart } from "./chart.js";
import { el, replace, table } from "./dom.js";
import { TimeView } from "./view.js";

const RUN_COLORS = ["--s1", "--s2", "--s3", "--s4", "--s6", "--s5"];

export async function showCompare(main, context, ids) {
  const scalar = el("select", { "aria-label": "Scalar" }), by = el("select", { "aria-label": "Compare by" }, el("option", { value: "step" }, "by step"), el("option", { value: "samples" }, "by samples"), el("option", { value: "time" }, "by time since the start"));
  const chartNode = el("div"), tableNode = el("section", { class: "panel", "aria-label": "Differences" });
  replace(main, el("div", { class: "stack" }, el("div", { class: "row" }, el("h1", {}, "Compare"), scalar, by), chartNode, tableNode));
  let chart = null;

  async function load() {
    const found = await get("/api/compare", { runs: ids, name: scalar.value || "loss", by: by.value });
    if (!scalar.options.length) {
      replace(scalar, found.scalars.map((name) => el("option", { value: name }, name)));
      if (found.scalars.includes("loss")) scalar.value = "loss";
    }
    const ends = found.curves.flatMap((curve) => [curve.x[0] ?? 0, curve.x.at(-1) ?? 1]);
    chart?.close();
    chart = new TimeChart(`${scalar.value || "loss"} ${by.selectedOptions[0].textContent}`, new TimeView(Math.min(...ends), Math.max(...ends)), { xIsTime: false, height: 340 });
    replace(chartNode, chart.node);
    chart.set(found.curves.map((curve, i) => ({ name: curve.run, color: RUN_COLORS[i % RUN_COLORS.length], t: curve.x, y: curve.y })));
    replace(tableNode, el("h2", {}, "Differences"), found.differences.length ? table(["setting", ...found.runs], found.differences.map((row) => [row.key, ...row.values]), { label: "Differences" })
      : el("p", { class: "quiet" }, "The job files and environments are equal"));
  }

  scalar.addEventListener("change", load);
  by.addEventListener("change", load);
  await load();
  return () => chart?.close();
}
