// Charts on a canvas: lines, bands and stacked areas over time, with marks, a shared cursor and keyboard control.

import { css, download, el, formatDuration, formatNumber, formatTime, replace, tableDetails } from "./dom.js";

const LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 22;

export class TimeChart {
  // series: [{name, color, t, y, low?, high?}]; kind: "line" or "stack".
  constructor(title, view, { unit = "", kind = "line", height = 180, xIsTime = true, csv = null, zero = false } = {}) {
    Object.assign(this, { title, view, unit, kind, height, xIsTime, zero });
    this.series = [];
    this.marks = [];
    this.breaks = [];
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.legend = el("div", { class: "legend" });
    const tools = el("div", { class: "tools" },
      el("button", { type: "button", "aria-label": `${title}: save as PNG`, onclick: () => this.savePng() }, "PNG"),
      csv ? el("a", { href: csv, class: "small", "aria-label": `${title}: download as CSV` }, "CSV") : null);
    this.node = el("section", { class: "panel chart", "aria-label": title },
      el("div", { class: "chart-head" }, el("h2", {}, title), tools), this.legend, this.canvas,
      tableDetails(title, () => this.tableRows()));
    this.unsubscribe = view.subscribe((what) => (what === "cursor" ? this.drawCursor() : this.draw()));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.addPointer();
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  close() { this.unsubscribe(); this.observer.disconnect(); }

  set(series, marks = this.marks) {
    this.series = series;
    this.marks = marks;
    this.breaks = marks.filter((mark) => mark.name === "start").map((mark) => mark.t).sort((a, b) => a - b);
    const names = series.filter((one) => one.y.length).map((one) => `${one.name} ${this.format(lastKnown(one.y))}`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${names.join(", ") || "no data"}. Arrow keys move the cursor, plus and minus zoom.`);
    this.draw();
  }

  format(value) { return formatNumber(value, this.unit); }

  formatX(x) {
    return this.xIsTime ? formatTime(x, this.view.range[1] - this.view.range[0]) : formatNumber(x);
  }

  tableRows() {
    const longest = this.series.reduce((best, one) => (one.t.length > best.length ? one.t : best), []);
    const heads = [this.xIsTime ? "time" : "x", ...this.series.map((one) => `#${one.name}`)];
    const rows = longest.map((t) => [this.formatX(t), ...this.series.map((one) => this.format(valueAt(one, t)))]);
    return [heads, rows];
  }

  layout() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(this.height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
    }
    const [since, until] = this.view.range;
    const plot = { left: LEFT, right: width - RIGHT, top: TOP, bottom: this.height - BOTTOM };
    const [low, high] = this.valueRange(since, until);
    this.scale = {
      ...plot, low, high, ratio,
      x: (t) => plot.left + ((t - since) / (until - since)) * (plot.right - plot.left),
      t: (x) => since + ((x - plot.left) / (plot.right - plot.left)) * (until - since),
      y: (v) => plot.bottom - ((v - low) / (high - low || 1)) * (plot.bottom - plot.top),
    };
    return this.scale;
  }

  valueRange(since, until) {
    let low = Infinity, high = -Infinity;
    const add = (value) => { if (value !== null && value !== undefined) { low = Math.min(low, value); high = Math.max(high, value); } };
    if (this.kind === "stack") {
      low = 0;
      const first = this.series[0];
      first?.t.forEach((t, i) => { if (t >= since && t <= until) add(sumAt(this.series, i)); });
    } else {
      for (const one of this.series) one.t.forEach((t, i) => {
        if (t < since || t > until) return;
        add((one.low || one.y)[i]);
        add((one.high || one.y)[i]);
      });
    }
    if (!Number.isFinite(high)) return [0, 1];
    if (this.zero || this.kind === "stack") low = Math.min(0, low);
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.zero || this.kind === "stack" ? low : low - pad, high + pad];
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const scale = this.layout();
    const context = this.canvas.getContext("2d");
    context.setTransform(scale.ratio, 0, 0, scale.ratio, 0, 0);
    context.clearRect(0, 0, this.canvas.clientWidth, this.height);
    this.drawAxes(context, scale);
    context.save();
    context.beginPath();
    context.rect(scale.left, scale.top, scale.right - scale.left, scale.bottom - scale.top);
    context.clip();
    if (this.kind === "stack") this.drawStack(context, scale);
    else for (const one of this.series) drawLine(context, scale, one, this.breaks);
    this.drawMarks(context, scale);
    context.restore();
    if (!this.series.some((one) => one.y.some((value) => value !== null))) {
      context.fillStyle = css("--quiet");
      context.textAlign = "center";
      context.fillText("no data", (scale.left + scale.right) / 2, this.height / 2);
    }
    this.image = null;
    this.drawCursor();
  }

  drawAxes(context, scale) {
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.strokeStyle = css("--grid");
    context.fillStyle = css("--quiet");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(scale.low, scale.high, 4)) {
      const y = Math.round(scale.y(value)) + 0.5;
      line(context, scale.left, y, scale.right, y);
      context.fillText(this.format(value), scale.left - 7, y);
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    const [since, until] = this.view.range;
    const stops = this.xIsTime ? timeTicks(since, until, (scale.right - scale.left) / 110) : ticks(since, until, 6);
    for (const t of stops) {
      const x = scale.x(t);
      if (x > scale.left + 15 && x < scale.right - 15) context.fillText(this.formatX(t), x, scale.bottom + 6);
    }
  }

  drawStack(context, scale) {
    const first = this.series[0];
    if (!first) return;
    const points = first.t.map((_, i) => i).filter((i) => this.series.some((one) => one.y[i] !== null));
    const step = first.t.length > 1 ? first.t[1] - first.t[0] : 1;
    let base = points.map(() => 0);
    for (const one of this.series) {
      const top = points.map((i, n) => base[n] + (one.y[i] || 0));
      context.fillStyle = css(one.color);
      for (const run of runsOf(points, first.t, step * 12)) {
        context.beginPath();
        for (const n of run) context.lineTo(scale.x(first.t[points[n]]), scale.y(top[n]));
        for (const n of [...run].reverse()) context.lineTo(scale.x(first.t[points[n]]), scale.y(base[n]));
        if (run.length === 1) context.rect(scale.x(first.t[points[run[0]]]) - 1, scale.y(top[run[0]]), 2, scale.y(base[run[0]]) - scale.y(top[run[0]]));
        context.fill();
      }
      base = top;
    }
  }

  drawMarks(context, scale) {
    for (const mark of this.marks) {
      const x = Math.round(scale.x(mark.t)) + 0.5;
      if (x < scale.left || x > scale.right) continue;
      context.strokeStyle = css(markColor(mark));
      line(context, x, mark.name === "checkpoint" ? scale.bottom - 6 : scale.top, x, scale.bottom);
    }
  }

  drawCursor() {
    const scale = this.scale;
    if (!scale) return;
    const context = this.canvas.getContext("2d");
    if (this.image) {
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      context.drawImage(this.image, 0, 0);
      context.setTransform(scale.ratio, 0, 0, scale.ratio, 0, 0);
    } else {
      this.image = new OffscreenCanvas(this.canvas.width, this.canvas.height);
      this.image.getContext("2d").drawImage(this.canvas, 0, 0);
    }
    const t = this.view.cursor;
    const at = t === null ? this.view.range[1] : t;
    if (t !== null) {
      const x = Math.round(scale.x(t)) + 0.5;
      context.strokeStyle = css("--quiet");
      line(context, x, scale.top, x, scale.bottom);
    }
    const shown = t === null ? [] : [el("span", {}, this.formatX(at))];
    for (const one of this.series) {
      const key = el("i", { class: "key", "aria-hidden": "true" });
      key.style.background = css(one.color);
      const value = t === null ? lastKnown(one.y) : valueAt(one, at);
      shown.push(el("span", {}, key, `${one.name} ${this.format(value)}`));
    }
    const near = t === null ? null : this.marks.find((mark) => Math.abs(scale.x(mark.t) - scale.x(t)) < 4);
    if (near) shown.push(el("span", { class: "bad" }, `${near.name} ${near.detail}`.slice(0, 90)));
    replace(this.legend, shown);
  }

  addPointer() {
    let begin = null;
    const position = (event) => this.scale.t(event.offsetX);
    this.canvas.addEventListener("pointermove", (event) => this.scale && this.view.setCursor(position(event)));
    this.canvas.addEventListener("pointerleave", () => this.view.setCursor(null));
    this.canvas.addEventListener("pointerdown", (event) => { begin = event.offsetX; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", (event) => {
      if (begin !== null && Math.abs(event.offsetX - begin) > 6) {
        const [a, b] = [this.scale.t(begin), this.scale.t(event.offsetX)];
        this.view.zoom(Math.min(a, b), Math.max(a, b));
      }
      begin = null;
    });
    this.canvas.addEventListener("dblclick", () => this.view.reset());
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.shiftKey) this.view.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
      else this.view.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, position(event));
    }, { passive: false });
  }

  onKey(event) {
    const [since, until] = this.view.range;
    const at = this.view.cursor ?? (since + until) / 2;
    const step = (until - since) / 100;
    const actions = {
      ArrowLeft: () => (event.shiftKey ? this.view.pan(-0.2) : this.view.setCursor(Math.max(since, at - step))),
      ArrowRight: () => (event.shiftKey ? this.view.pan(0.2) : this.view.setCursor(Math.min(until, at + step))),
      "+": () => this.view.zoomBy(0.6, at), "=": () => this.view.zoomBy(0.6, at), "-": () => this.view.zoomBy(1.6, at),
      Escape: () => { this.view.setCursor(null); this.view.reset(); },
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }

  savePng() {
    const copy = document.createElement("canvas");
    copy.width = this.canvas.width;
    copy.height = this.canvas.height;
    const context = copy.getContext("2d");
    context.fillStyle = css("--panel");
    context.fillRect(0, 0, copy.width, copy.height);
    context.drawImage(this.canvas, 0, 0);
    copy.toBlob((blob) => download(`${this.title.replaceAll(/\W+/g, "-")}.png`, blob));
  }
}

export function markColor(mark) {
  if (mark.name === "exit") return mark.numbers?.code ? "--bad" : "--s5";
  return { start: "--s3", resume: "--s2", checkpoint: "--s5", end: "--s3", validation: "--s1", stop: "--s5" }[mark.name] || "--bad";
}

// A line ends where the run was restarted: what is between was not measured.
function drawLine(context, scale, one, breaks) {
  context.lineWidth = 1.5;
  const color = css(one.color);
  if (one.low) {
    context.fillStyle = color;
    context.globalAlpha = 0.18;
    context.beginPath();
    const known = one.t.map((_, i) => i).filter((i) => one.low[i] !== null);
    for (const i of known) context.lineTo(scale.x(one.t[i]), scale.y(one.high[i]));
    for (const i of known.reverse()) context.lineTo(scale.x(one.t[i]), scale.y(one.low[i]));
    context.fill();
    context.globalAlpha = 1;
  }
  context.strokeStyle = color;
  context.lineJoin = "round";
  context.beginPath();
  let isDown = false, next = 0;
  one.t.forEach((t, i) => {
    const value = one.y[i];
    for (; next < breaks.length && breaks[next] <= t; next++) isDown = false;
    if (value === null || value === undefined) { isDown = false; return; }
    if (isDown) context.lineTo(scale.x(t), scale.y(value));
    else { context.moveTo(scale.x(t), scale.y(value)); isDown = true; }
  });
  context.stroke();
  if (one.y.filter((value) => value !== null).length < 40) {
    context.fillStyle = color;
    one.t.forEach((t, i) => { if (one.y[i] !== null) { context.beginPath(); context.arc(scale.x(t), scale.y(one.y[i]), 2.2, 0, 7); context.fill(); } });
  }
  context.lineWidth = 1;
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

function runsOf(points, t, gap) {
  const runs = [];
  points.forEach((i, n) => {
    if (n && t[i] - t[points[n - 1]] <= gap) runs.at(-1).push(n);
    else runs.push([n]);
  });
  return runs;
}

function sumAt(series, i) { return series.reduce((sum, one) => sum + (one.y[i] || 0), 0); }

function lastKnown(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

export function valueAt(one, t) {
  let low = 0, high = one.t.length - 1, best = null;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (one.t[middle] <= t) { best = middle; low = middle + 1; } else high = middle - 1;
  }
  if (best === null) best = 0;
  if (best + 1 < one.t.length && one.t[best + 1] - t < t - one.t[best]) best += 1;
  return one.y[best] ?? null;
}

export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) || rough;
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) values.push(Number(value.toPrecision(12)));
  return values;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

export function timeTicks(since, until, count) {
  const rough = (until - since) / Math.max(2, count);
  const step = TIME_STEPS.find((one) => one >= rough) || rough;
  const offset = new Date(since * 1000).getTimezoneOffset() * 60;
  const values = [];
  for (let t = Math.ceil((since - offset) / step) * step + offset; t <= until; t += step) values.push(t);
  return values;
}

export function describeSpan(view) { return formatDuration(view.range[1] - view.range[0]); }
