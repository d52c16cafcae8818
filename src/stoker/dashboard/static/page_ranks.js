// Ranks: where each stands, and the stacks of all.

import { get, isStatic, post, runPath } from "./api.js";
import { el, formatDuration, formatNumber, formatPercent, formatTime, pluralize, replace, table } from "./dom.js";

export function rankTable(ranks, isActive) {
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
    count.textContent = `${pluralize(ranks.length, "rank")} of attempt ${detail.run.attempts - 1}, ${pluralize(detail.stragglers.length, "straggler")}`;
    stacks.button.hidden = !isActive;
    replace(body, ranks.length ? rankTable(ranks, isActive) : el("p", { class: "empty" }, "No rank has sent a heartbeat yet"));
  }
  await refresh();
  return context.every(2000, refresh);
}
