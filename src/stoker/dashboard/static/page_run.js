// One run: verdict, facts, goodput, charts on one time axis, marks.

import { get, isStatic, listen, runPath } from "./api.js";
import { TimeChart, describeSpan, markColor } from "./chart.js";
import { css, el, fact, formatDuration, formatMoney, formatNumber, formatPercent, formatTime, replace, table } from "./dom.js";
import { TimeView } from "./view.js";

const PART_NAMES = { loader_wait: "loader wait", h2d: "to device", compute: "compute", collective_wait: "collective", rest: "rest" };
const PART_COLORS = { compute: "--s1", h2d: "--s6", loader_wait: "--s2", collective_wait: "--s4", rest: "--s5" };
const STAGE_COLORS = { fetch: "--s4", read: "--s6", decode: "--s1", transform: "--s3" };
const GOODPUT = [["useful_s", "useful", "--s3"], ["input_wait_s", "input wait", "--s2"], ["communication_wait_s", "communication wait", "--s4"],
  ["checkpoint_s", "checkpoints", "--s6"], ["restart_s", "restarts", "--bad"], ["other_s", "start-up, validation, idle", "--s5"]];
const LOSSES = ["loss", "val_loss"], ACCURACIES = ["val_top1", "val_top5"];

const GROUPED = ["checkpoint", "bad_sample"];

// Checkpoints, or bad samples, that follow each other become one entry, that of the last.
function groupMarks(marks) {
  const groups = [];
  for (const mark of [...marks].sort((a, b) => a.t - b.t)) {
    const last = groups.at(-1);
    if (last && GROUPED.includes(mark.name) && last.mark.name === mark.name) { last.mark = mark; last.count += 1; }
    else groups.push({ mark, count: 1 });
  }
  return groups;
}

export async function showRun(main, context, id) {
  const detail = await get(runPath(id));
  const view = new TimeView(detail.since, detail.until);
  const csv = isStatic ? null : runPath(id, "/export.csv?table=scalar");
  const spanCsv = isStatic ? null : runPath(id, "/export.csv?table=span");
  const charts = {
    speed: new TimeChart("Throughput", view, { unit: "", csv, zero: true }),
    loss: new TimeChart("Loss", view, { csv }),
    accuracy: new TimeChart("Validation accuracy", view, { csv }),
    parts: new TimeChart("Step time", view, { unit: "s", kind: "stack", csv: spanCsv }),
    stages: new TimeChart("Data path, per sample", view, { unit: "s", kind: "stack", csv: spanCsv }),
  };
  const verdictNode = el("div"), goodputNode = el("section", { class: "panel", "aria-label": "Goodput" }), marksNode = el("section", { class: "panel", "aria-label": "Marks" });
  const range = el("span", { class: "quiet small", role: "status" });
  const liveButton = el("button", { type: "button", "aria-pressed": "true", onclick: () => view.reset() }, "Live");
  const others = el("select", { "aria-label": "Another scalar" }, el("option", { value: "" }, "Another scalar …"), detail.scalars.map((name) => el("option", { value: name }, name)));
  const extra = el("div", { class: "grid" });
  let state = detail, scalars = {}, marks = detail.marks, timer = null;

  replace(main, el("div", { class: "stack" }, verdictNode, goodputNode,
    el("div", { class: "row" }, liveButton, el("button", { type: "button", onclick: () => view.zoomBy(0.5) }, "Zoom in"), el("button", { type: "button", onclick: () => view.zoomBy(2) }, "Zoom out"), range, others,
      el("span", { class: "quiet small" }, "Drag to zoom, double-click to reset, Shift and arrows to pan")),
    el("div", { class: "grid" }, charts.speed.node, charts.loss.node, charts.parts.node, charts.stages.node, charts.accuracy.node), extra, marksNode,
    el("details", { class: "panel" }, el("summary", {}, "Job file"), el("pre", { class: "job", tabindex: "0" }, detail.job))));

  others.addEventListener("change", () => { if (others.value) addExtra(others.value); others.value = ""; });

  function addExtra(name) {
    if (charts[`extra ${name}`]) return;
    charts[`extra ${name}`] = new TimeChart(name, view, { csv });
    extra.append(charts[`extra ${name}`].node);
    load();
  }

  function line(name, color) {
    const one = scalars[name];
    return one ? { name, color, t: one.t, y: one.mean, low: one.t.length > 300 ? one.min : null, high: one.max } : { name, color, t: [], y: [] };
  }

  function drawScalars() {
    charts.speed.set([line("samples_per_s", "--s1")].map((one) => ({ ...one, name: "images/s" })), marks);
    charts.loss.set(LOSSES.map((name, i) => line(name, ["--s1", "--s2"][i])).filter((one, i) => !i || one.t.length), marks);
    charts.accuracy.set(ACCURACIES.map((name, i) => line(name, ["--s3", "--s6"][i])).filter((one) => one.t.length), marks);
    for (const [key, chart] of Object.entries(charts)) if (key.startsWith("extra ")) chart.set([line(key.slice(6), "--s1")], marks);
  }

  async function load() {
    const query = { bins: 600, since: view.isZoomed ? view.range[0] : undefined, until: view.isZoomed ? view.range[1] : undefined };
    const names = ["samples_per_s", ...LOSSES, ...ACCURACIES, ...Object.keys(charts).filter((key) => key.startsWith("extra ")).map((key) => key.slice(6))];
    const started = performance.now();
    const [lines, steps] = await Promise.all([get(runPath(id, "/scalars"), { ...query, names: names.join(",") }), get(runPath(id, "/steps"), { ...query, bins: 240 })]);
    scalars = structuredClone(lines.scalars);
    drawScalars();
    charts.parts.set(Object.keys(PART_COLORS).map((name) => ({ name: PART_NAMES[name], color: PART_COLORS[name], t: steps.parts.t, y: steps.parts[name] })), marks);
    charts.stages.set(Object.keys(STAGE_COLORS).map((name) => ({ name, color: STAGE_COLORS[name], t: steps.stages.t, y: steps.stages[name] })), marks);
    context.measure("zoom", performance.now() - started);
  }

  function drawState() {
    const run = state.run;
    const text = run.state === "failed" || run.state === "lost" ? run.message : run.verdict || run.message || "no verdict yet: too few steps";
    const [head, ...rest] = text.split(/: (.*)/s);
    replace(verdictNode, el("section", { class: "panel", "aria-label": "Verdict" },
      el("div", { class: "row spread" }, el("p", { class: "verdict" }, el("strong", {}, head), rest[0] ? `: ${rest[0]}` : ""), el("span", { class: `state ${run.state}` }, run.state)),
      state.remarks?.length ? el("ul", { class: "remarks small quiet" }, state.remarks.slice(0, 6).map((one) => el("li", {}, one))) : null,
      el("dl", { class: "facts" },
        fact("step", run.total_steps ? `${formatNumber(run.step)} of ${formatNumber(run.total_steps)}` : formatNumber(run.step), "step"),
        fact("epoch", run.epochs ? `${formatNumber(run.epoch)} of ${formatNumber(run.epochs)}` : formatNumber(run.epoch), "epoch"),
        fact("images/s", formatNumber(run.samples_per_s), "samples_per_s"), fact("loss", formatNumber(run.loss), "loss"),
        fact("top-1", formatPercent(run.val_top1), "val_top1"), fact("time per step", formatNumber(state.step_s, "s"), "step_s"), fact("elapsed", formatDuration(run.elapsed_s), "elapsed"),
        fact("left", formatDuration(run.eta_s), "eta"), fact("attempts", run.attempts, "attempts"), fact("slots", formatNumber(run.slots), "slots"))));
    drawGoodput();
  }

  function drawGoodput() {
    const parts = GOODPUT.map(([key, name, color]) => ({ name, color, seconds: state.goodput[key] }));
    const price = state.price_per_hour, total = (price * state.goodput.total_s) / 3600;
    const money = (seconds) => (price === null ? "" : `, ${formatMoney((price * seconds) / 3600, total)}`);
    const bar = el("div", { class: "bar-chart", role: "img", "aria-label": parts.map((part) => `${part.name} ${formatDuration(part.seconds)}${money(part.seconds)}`).join("; ") });
    const legend = el("div", { class: "legend" });
    for (const part of parts) {
      const piece = el("i", { title: `${part.name} ${formatDuration(part.seconds)}${money(part.seconds)}` });
      piece.style.flexGrow = String(part.seconds);
      piece.style.background = css(part.color);
      const key = el("i", { class: "key", "aria-hidden": "true" });
      key.style.background = css(part.color);
      if (part.seconds > 0) bar.append(piece);
      legend.append(el("span", {}, key, `${part.name} ${formatDuration(part.seconds)} (${formatPercent(state.goodput.total_s ? part.seconds / state.goodput.total_s : 0)})${money(part.seconds)}`));
    }
    const loss = state.restarts ? `${state.restarts} restart${state.restarts > 1 ? "s" : ""}: ${formatDuration(state.restart_idle_s)} without a step, ${formatNumber(state.repeated_steps)} steps repeated` : "";
    replace(goodputNode, el("div", { class: "row spread" }, el("div", { class: "row" }, el("h2", {}, `Goodput ${formatPercent(state.run.goodput)}`), price === null ? null : el("span", { class: "small quiet", "data-fact": "cost" }, `cost ${formatMoney(total)}, at ${formatMoney(price)} per hour for all slots`)), el("span", { class: "small quiet", "data-fact": "restarts" }, loss)), bar, legend);
  }

  function drawMarks() {
    const shown = groupMarks(marks).slice(-40).reverse();
    replace(marksNode, el("h2", {}, "Marks"), el("ul", { class: "marks" }, shown.map(({ mark, count }) => {
      const key = el("i", { class: "key", "aria-hidden": "true" });
      key.style.background = css(markColor(mark));
      return el("li", { "data-mark": mark.name }, el("time", {}, formatTime(mark.t)), el("b", {}, key, count > 1 ? `${count} ${mark.name}s` : mark.name), el("a", { href: `#/run/${id}/logs/${mark.log}/${mark.offset}` }, `${mark.slot} rank ${mark.rank}`), el("span", {}, mark.detail));
    })), state.stragglers?.length ? [el("h2", {}, "Stragglers"), table(["rank", "slot", "#× median", "cause"], state.stragglers.map((one) => [one.rank, one.slot, one.ratio.toFixed(2), PART_NAMES[one.part] || one.part]), { label: "Stragglers" })] : null);
  }

  function onUpdate(update) {
    if (update.is_reset) { context.reload(); return; }
    for (const row of update.scalars) {
      const one = (scalars[row.name] ??= { t: [], step: [], mean: [], min: [], max: [] });
      one.t.push(row.t); one.step.push(row.step);
      for (const key of ["mean", "min", "max"]) one[key].push(row.value);
    }
    marks = [...marks, ...update.marks].slice(-2000);
    state = { ...state, run: update.run };
    view.extend(update.run.last_event);
    drawState();
    if (update.marks.length) drawMarks();
    if (update.scalars.length || update.marks.length) drawScalars();
  }

  const unsubscribe = view.subscribe((what) => {
    if (what !== "range") return;
    liveButton.setAttribute("aria-pressed", String(view.isLive));
    range.textContent = view.isZoomed ? `${formatTime(view.range[0])} – ${formatTime(view.range[1])} (${describeSpan(view)})` : "";
    clearTimeout(timer);
    timer = setTimeout(load, 120);
  });
  drawState();
  drawMarks();
  await load();
  const stop = listen(id, onUpdate, context.setConnected);
  const refresh = context.every(5000, async () => {
    if (state.run.state !== "running" && state.run.state !== "pending") return;
    state = await get(runPath(id));
    drawState();
    if (view.isLive) await load();
  });
  return () => { stop(); refresh(); unsubscribe(); clearTimeout(timer); Object.values(charts).forEach((chart) => chart.close()); };
}
