// Data: the samples of the epoch, bad samples with their thumbnails, the cache, and the shard of each rank.

import { get, runPath } from "./api.js";
import { css, el, fact, formatDuration, formatNumber, formatPercent, replace, table } from "./dom.js";
import { rankTable } from "./page_ranks.js";

const EPOCH_PARTS = [["seen", "--accent"], ["bad", "--bad"]];

function epochPanel(data) {
  const bad = Math.min(data.bad || 0, data.seen || 0);
  const counts = { seen: (data.seen || 0) - bad, bad };
  const bar = el("div", { class: "bar-chart", role: "img", "aria-label": data.samples ? `${formatPercent(data.seen / data.samples)} of the epoch seen, ${formatNumber(data.bad)} samples bad` : "samples of the epoch are not known" });
  for (const [name, color] of EPOCH_PARTS) {
    const piece = el("i");
    piece.style.background = css(color);
    piece.style.width = data.samples ? `${(100 * counts[name]) / data.samples}%` : "0";
    if (counts[name]) piece.style.minWidth = "2px";
    bar.append(piece);
  }
  return el("section", { class: "panel", "aria-label": "Epoch" }, el("h2", {}, "This epoch"), bar,
    el("dl", { class: "facts" }, fact("seen", formatNumber(data.seen), "seen"), fact("left", formatNumber(data.left), "left_samples"), fact("bad", formatNumber(data.bad), "bad"), fact("samples", formatNumber(data.samples), "samples"),
      fact("epoch", data.epochs ? `${formatNumber(data.epoch)} of ${formatNumber(data.epochs)}` : formatNumber(data.epoch), "data_epoch"), fact("global batch", formatNumber(data.global_batch), "global_batch")),
    el("p", { class: "small quiet source" }, [["train", data.train], ["val", data.val]].filter(([, url]) => url).map(([name, url]) => el("span", {}, `${name}: ${url}`))));
}

function cachePanel(cache) {
  const lookups = cache ? cache.hits + cache.misses : 0;
  return el("section", { class: "panel", "aria-label": "Cache" }, el("h2", {}, "Disk cache"),
    cache ? el("dl", { class: "facts" }, fact("hit rate", lookups ? formatPercent(cache.hits / lookups) : "–", "cache_hit_rate"), fact("hits", formatNumber(cache.hits), "cache_hits"), fact("misses", formatNumber(cache.misses), "cache_misses"), fact("fetched", formatNumber(cache.fetched_bytes, "B"), "cache_fetched"))
      : el("p", { class: "small quiet" }, "No rank has reported a disk cache"));
}

function loaderPanel(stages) {
  const total = Object.values(stages).reduce((sum, seconds) => sum + seconds, 0);
  return el("section", { class: "panel", "aria-label": "Loader" }, el("h2", {}, "Where the loader's threads spend their time"),
    table(["stage", "#thread time", "#share"], Object.entries(stages).map(([stage, seconds]) => [stage, formatDuration(seconds), formatPercent(total ? seconds / total : 0)]), { label: "Loader stages" }));
}

async function fillThumbnail(frame, id, sample) {
  const note = (text) => el("span", { class: "small quiet" }, text);
  try {
    const { image, reason } = await get(runPath(id, "/thumbnail"), { sample: sample.number });
    if (image) replace(frame, el("img", { src: image, alt: `Thumbnail of the sample at byte ${sample.offset}${reason ? ", incomplete" : ""}` }));
    else replace(frame, note(reason === sample.reason ? "nothing can be decoded" : reason));
  } catch (error) {
    replace(frame, note(error.message));
  }
}

function sampleCard(id, sample) {
  const frame = el("div", { class: "thumbnail" });
  fillThumbnail(frame, id, sample);
  const shard = sample.shard.split("/").at(-1) || "unknown shard";
  return el("li", { "data-sample": sample.number }, frame, el("div", {}, el("b", { title: sample.shard }, shard), el("span", { class: "small" }, sample.reason),
    el("span", { class: "small quiet" }, `byte ${formatNumber(sample.offset)}, epoch ${sample.epoch}, `, el("a", { href: `#/run/${id}/logs/${sample.log}/${sample.log_offset}` }, `${sample.slot} rank ${sample.rank}`))));
}

export async function showData(main, context, id) {
  const body = el("div", { class: "stack" }), cards = new Map(), list = el("ul", { class: "samples" });
  const badPanel = el("section", { class: "panel", "aria-label": "Bad samples" });
  replace(main, body);
  function drawBad(samples) {
    for (const sample of samples) {
      const key = `${sample.number} ${sample.shard} ${sample.offset}`;
      if (!cards.has(key)) { cards.set(key, sampleCard(id, sample)); list.prepend(cards.get(key)); }
    }
    replace(badPanel, el("h2", {}, "Bad samples"), samples.length ? list : el("p", { class: "small quiet" }, "No rank has reported a bad sample"));
  }
  async function refresh() {
    const [data, detail] = await Promise.all([get(runPath(id, "/data")), get(runPath(id))]);
    drawBad([...data.bad_samples].reverse());
    replace(body, el("h1", {}, "Data"), epochPanel(data), el("div", { class: "grid" }, cachePanel(data.cache), loaderPanel(data.stages)), badPanel,
      el("section", { class: "panel", "aria-label": "Shards" }, el("h2", {}, "The shard that each rank reads"), rankTable(data.ranks, ["running", "pending"].includes(detail.run.state))));
  }
  await refresh();
  return context.every(5000, refresh);
}
