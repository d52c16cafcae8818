// Slots: a heat map of every slot or GPU, the quantiles over all of them, and a table.

import { get, runPath } from "./api.js";
import { TimeChart } from "./chart.js";
import { el, formatNumber, formatPercent, formatTime, replace, table } from "./dom.js";
import { HeatMap } from "./heat.js";
import { TimeView } from "./view.js";

const MAX_SLOTS = 300;

export async function showSlots(main, context, id) {
  const detail = await get(runPath(id));
  const view = new TimeView(detail.since, detail.until);
  const choice = el("select", { "aria-label": "Metric" }, detail.metrics.map((one) => el("option", { value: one.name }, one.title)));
  const chosen = el("div", { class: "small quiet", role: "status" }, "Choose a row for its log");
  const heat = new HeatMap(view, { onRow: (name) => context.go(`#/run/${id}/logs/${name.split(" ")[0].replace("/", "-")}.${detail.run.attempts - 1}.log/`) });
  const bands = new TimeChart("All slots: lowest to highest, 10–90%, median", view, { height: 130 });
  const rowsNode = el("section", { class: "panel", "aria-label": "Slots" });
  let timer = null, controller = null;
  replace(main, el("div", { class: "stack" }, el("div", { class: "row" }, el("h1", {}, "Slots"), choice,
    el("button", { type: "button", onclick: () => view.zoomBy(0.5) }, "Zoom in"), el("button", { type: "button", onclick: () => view.pan(-0.5) }, "◀"), el("button", { type: "button", onclick: () => view.pan(0.5) }, "▶"),
    el("button", { type: "button", onclick: () => view.reset() }, "Whole run"), chosen), heat.node, bands.node, rowsNode));
  main.querySelectorAll(".row button")[1].setAttribute("aria-label", "Pan left");
  main.querySelectorAll(".row button")[2].setAttribute("aria-label", "Pan right");

  async function load() {
    controller?.abort();
    controller = new AbortController();
    const started = performance.now();
    const zoomed = view.isZoomed ? { since: view.range[0], until: view.range[1] } : {};
    let found;
    try {
      found = await get(runPath(id, "/heat"), { metric: choice.value, bins: 240, ...zoomed }, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      throw error;
    }
    heat.set(found);
    const step = (found.until - found.since) / found.bins;
    const t = Array.from({ length: found.bins }, (_, i) => found.since + (i + 0.5) * step);
    bands.unit = found.unit;
    bands.set([{ name: "lowest", color: "--s5", t, y: found.bands.min, low: found.bands.min, high: found.bands.max },
      { name: "median", color: "--s1", t, y: found.bands.p50, low: found.bands.p10, high: found.bands.p90 }], detail.marks);
    context.measure("slots", performance.now() - started);
  }

  const unsubscribe = view.subscribe((what) => { if (what === "range") { clearTimeout(timer); timer = setTimeout(load, 60); } });
  choice.addEventListener("change", load);
  const [{ slots }] = await Promise.all([get(runPath(id, "/slots"), { limit: MAX_SLOTS }), load()]);
  replace(rowsNode, table(["slot", "state", "machine", "#last profile", "#GPU", "#GPU memory", "#CPU", "#available memory", "#free cache disk"],
    slots.slice(0, MAX_SLOTS).map((slot) => [slot.slot, slot.state, slot.machine.slice(0, 12), slot.is_silent ? `silent since ${formatTime(slot.last_profile)}` : formatTime(slot.last_profile), formatNumber(slot.gpu_util_pct, "%"), formatPercent(slot.gpu_memory),
      formatNumber(slot.cpu_pct, "%"), formatNumber(slot.mem_available, "B"), formatNumber(slot.cache_disk_free, "B")]), { label: "Slots" }));
  return () => { unsubscribe(); heat.close(); bands.close(); clearTimeout(timer); };
}
