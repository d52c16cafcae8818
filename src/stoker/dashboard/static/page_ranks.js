// Ranks and data: where each rank stands, and what the run has read of its dataset.

import { get, isStatic, post, runPath } from "./api.js";
import { css, el, fact, formatDuration, formatNumber, formatPercent, formatTime, replace, table } from "./dom.js";

function rankTable(ranks, isActive) {
  const now = Date.now() / 1000;
  const fastest = Math.max(...ranks.map((rank) => rank.step ?? 0));
  return table(["#rank", "slot", "#step", "#behind", "shard", "#sample", "#heartbeat", "#own time per step", "#waits for input", "remark"],
    ranks.map((rank) => [rank.rank, rank.slot, formatNumber(rank.step), rank.step === null ? "–" : formatNumber(fastest - rank.step), rank.shard || "–", rank.sample < 0 ? "–" : formatNumber(rank.sample),
      isActive ? `${formatDuration(Math.max(0, now - rank.t))} ago` : "–", formatNumber(rank.own_step_s, "s"), formatPercent(rank.loader_wait), rank.straggler]), { label: "Ranks" });
}

// The stacks stay on the page until the next request; the table above is drawn again meanwhile.
function stacksPanel(id) {
  const text = el("pre", { class: "job stacks", tabindex: "0", "aria-label": "Stacks of all ranks" });
  const panel = el("section", { class: "panel", "aria-label": "Stacks", hidden: true }, el("h2", {}, "Stacks"), text);
  const status = el("span", { class: "quiet small", role: "status", "data-fact": "stacks" });
  const button = el("button", { type: "button", onclick: ask }, "Show stacks");
  async function ask() {
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");  // `disabled` would drop the focus
    status.className = "quiet small";
    status.textContent = "asking the supervisor …";
    try {
      const stacks = await post(runPath(id, "/stacks"));
      text.textContent = stacks.text;
      status.textContent = `as of ${formatTime(Date.now() / 1000)}${stacks.is_cut ? ", cut" : ""}`;
      panel.hidden = false;
    } catch (error) {
      status.className = "bad small";
      status.textContent = error.message;
    }
    button.setAttribute("aria-disabled", "false");
  }
  return { button, status, panel };
}

export async function showRanks(main, context, id) {
  const body = el("div", { class: "panel" });
  const count = el("span", { class: "quiet small" });
  const stacks = stacksPanel(id);
  replace(main, el("div", { class: "stack" }, el("div", { class: "row" }, el("h1", {}, "Ranks"), count, isStatic ? null : [stacks.button, stacks.status]), body, stacks.panel));
  async function refresh() {
    const [{ ranks }, detail] = await Promise.all([get(runPath(id, "/ranks")), get(runPath(id))]);
    const isActive = ["running", "pending"].includes(detail.run.state);
    count.textContent = `${ranks.length} ranks of attempt ${detail.run.attempts - 1}, ${detail.stragglers.length} stragglers`;
    stacks.button.hidden = !isActive;
    replace(body, ranks.length ? rankTable(ranks, isActive) : el("p", { class: "empty" }, "No rank has sent a heartbeat yet"));
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
