// Ranks and data: where each rank stands, and what the run has read of its dataset.

import { get, runPath } from "./api.js";
import { css, el, fact, formatDuration, formatNumber, formatPercent, replace, table } from "./dom.js";

function rankTable(ranks, isActive) {
  const now = Date.now() / 1000;
  const fastest = Math.max(...ranks.map((rank) => rank.step ?? 0));
  return table(["#rank", "slot", "#step", "#behind", "shard", "#sample", "#heartbeat", "#own time per step", "#waits for input", "remark"],
    ranks.map((rank) => [rank.rank, rank.slot, formatNumber(rank.step), rank.step === null ? "–" : formatNumber(fastest - rank.step), rank.shard || "–", rank.sample < 0 ? "–" : formatNumber(rank.sample),
      isActive ? `${formatDuration(Math.max(0, now - rank.t))} ago` : "–", formatNumber(rank.own_step_s, "s"), formatPercent(rank.loader_wait), rank.straggler]), { label: "Ranks" });
}

export async function showRanks(main, context, id) {
  const body = el("div", { class: "panel" });
  const count = el("span", { class: "quiet small" });
  replace(main, el("div", { class: "stack" }, el("div", { class: "row" }, el("h1", {}, "Ranks"), count, el("span", { class: "quiet small" }, `Stacks of all ranks: stoker job stacks ${id}`)), body));
  async function refresh() {
    const [{ ranks }, detail] = await Promise.all([get(runPath(id, "/ranks")), get(runPath(id))]);
    count.textContent = `${ranks.length} ranks of attempt ${detail.run.attempts - 1}, ${detail.stragglers.length} stragglers`;
    replace(body, ranks.length ? rankTable(ranks, ["running", "pending"].includes(detail.run.state)) : el("p", { class: "empty" }, "No rank has sent a heartbeat yet"));
  }
  await refresh();
  return context.every(2000, refresh);
}

export async function showData(main, context, id) {
  const body = el("div", { class: "stack" });
  replace(main, body);
  async function refresh() {
    const [data, detail] = await Promise.all([get(runPath(id, "/data")), get(runPath(id))]);
    const total = Object.values(data.stages).reduce((sum, seconds) => sum + seconds, 0);
    const share = data.samples ? data.seen / data.samples : 0;
    const bar = el("div", { class: "bar-chart", role: "img", "aria-label": `${formatPercent(share)} of the epoch seen` });
    const piece = el("i");
    piece.style.background = css("--accent");
    piece.style.width = `${100 * share}%`;
    bar.append(piece);
    replace(body, el("h1", {}, "Data"), el("section", { class: "panel", "aria-label": "Epoch" }, el("h2", {}, "This epoch"), bar,
      el("dl", { class: "facts" }, fact("seen", formatNumber(data.seen), "seen"), fact("left", formatNumber(data.left), "left_samples"), fact("samples", formatNumber(data.samples), "samples"),
        fact("epoch", data.epochs ? `${formatNumber(data.epoch)} of ${formatNumber(data.epochs)}` : formatNumber(data.epoch), "data_epoch"), fact("global batch", formatNumber(data.global_batch), "global_batch")),
      el("p", { class: "small quiet" }, `train: ${data.train || "–"}`), el("p", { class: "small quiet" }, `val: ${data.val || "–"}`)),
    el("section", { class: "panel", "aria-label": "Loader" }, el("h2", {}, "Where the loader's threads spend their time"),
      table(["stage", "#thread time", "#share"], Object.entries(data.stages).map(([stage, seconds]) => [stage, formatDuration(seconds), formatPercent(total ? seconds / total : 0)]), { label: "Loader stages" })),
    el("section", { class: "panel", "aria-label": "Shards" }, el("h2", {}, "The shard that each rank reads"), rankTable(data.ranks, ["running", "pending"].includes(detail.run.state))));
  }
  await refresh();
  return context.every(5000, refresh);
}
