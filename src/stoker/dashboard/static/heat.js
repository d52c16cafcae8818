// Heat map of slots over time. Several slots that share a pixel row show the worst value; no data has its own colour.

import { css, download, el, formatNumber, formatTime, replace, tableDetails } from "./dom.js";
import { timeTicks } from "./chart.js";

const HEAT_LEFT = 116, HEAT_RIGHT = 10, HEAT_BOTTOM = 22;
// The worst rows are drawn this high, however many rows there are.
const TOP_ROWS = 12, TOP_HEIGHT = 14, TOP_GAP = 6;
// Cividis, from good (dark) to bad (bright): readable with every kind of colour vision.
const STOPS = [[0, 32, 76], [40, 61, 107], [87, 93, 109], [124, 123, 120], [166, 157, 117], [211, 193, 99], [255, 233, 69]];

function heatColor(share) {
  const at = Math.max(0, Math.min(1, share)) * (STOPS.length - 1);
  const i = Math.min(STOPS.length - 2, Math.floor(at));
  return STOPS[i].map((value, channel) => Math.round(value + (STOPS[i + 1][channel] - value) * (at - i)));
}

function parseColor(text) {
  const value = Number.parseInt(text.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// The pixel of each cell: ImageData is written as 32-bit words.
function makePalette(isLowBad) {
  const bytes = new Uint8ClampedArray(256 * 4);
  for (let cell = 0; cell < 255; cell++) bytes.set([...heatColor(isLowBad ? 1 - cell / 254 : cell / 254), 255], cell * 4);
  bytes.set([...parseColor(css("--none")), 255], 255 * 4);
  return new Uint32Array(bytes.buffer);
}

function decodeCells(text) {
  const letters = atob(text);
  const cells = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) cells[i] = letters.charCodeAt(i);
  return cells;
}

export class HeatMap {
  constructor(view, { onRow } = {}) {
    this.view = view;
    this.data = null;
    this.selected = -1;
    this.onRow = onRow || (() => {});
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Heat map" });
    this.readout = el("div", { class: "legend", role: "status" });
    this.scaleCanvas = el("canvas", { width: "160", height: "1", "aria-hidden": "true" });
    this.low = el("span"); this.high = el("span");
    this.node = el("section", { class: "panel chart", "aria-label": "Slots over time" },
      el("div", { class: "chart-head" }, el("h2", {}, "Every slot over time"), el("div", { class: "tools" },
        el("button", { type: "button", "aria-label": "Save the heat map as PNG", onclick: () => this.canvas.toBlob((blob) => download("slots.png", blob)) }, "PNG"))),
      this.readout, this.canvas,
      el("div", { class: "row spread" }, el("div", { class: "scale" }, this.low, this.scaleCanvas, this.high),
        el("span", { class: "small quiet" }, el("i", { class: "swatch", "aria-hidden": "true" }), "no data")),
      tableDetails("Slots", () => this.tableRows()));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.unsubscribe = view.subscribe((what) => what === "cursor" && this.drawOverlay());
    this.addEvents();
  }

  close() { this.unsubscribe(); this.observer.disconnect(); }

  set(data) {
    this.data = data;
    this.cells = decodeCells(data.cells);
    const gaps = data.rows.filter((_, row) => this.cells[(row + 1) * data.bins - 1] === 255).length;
    const shown = data.rows.length < data.total_rows ? `the worst ${data.rows.length.toLocaleString("en-US")} of ` : "";
    this.summary = `${data.title} of ${shown}${data.total_rows.toLocaleString("en-US")} ${data.total_rows === 1 ? "row" : "rows"}, worst first; ${gaps} without recent data`;
    this.canvas.setAttribute("aria-label", `${this.summary}. Arrow keys choose a row and a time.`);
    this.low.textContent = formatNumber(data.is_low_bad ? data.high : data.low, data.unit);
    this.high.textContent = formatNumber(data.is_low_bad ? data.low : data.high, data.unit);
    const context = this.scaleCanvas.getContext("2d");
    for (let x = 0; x < 160; x++) { context.fillStyle = `rgb(${heatColor(x / 159)})`; context.fillRect(x, 0, 1, 1); }
    this.draw();
  }

  value(row, bin) {
    const cell = this.cells[row * this.data.bins + bin];
    return cell === 255 ? null : this.data.low + (cell / 254) * (this.data.high - this.data.low);
  }

  tableRows() {
    if (!this.data) return [["slot"], []];
    const rows = this.data.rows.map((name, row) => {
      const known = [];
      for (let bin = 0; bin < this.data.bins; bin++) { const value = this.value(row, bin); if (value !== null) known.push(value); }
      const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
      const last = this.value(row, this.data.bins - 1);
      const gap = `${Math.round(100 * (1 - known.length / this.data.bins))}%`;
      return [name, formatNumber(mean, this.data.unit), last === null ? "no data" : formatNumber(last, this.data.unit), gap];
    });
    return [["slot", "#mean", "#last", "#no data"], rows];
  }

  height() { return Math.min(Math.max(this.data.rows.length * 14, 60), Math.max(360, window.innerHeight - 330)); }

  // The parts of the map: rows of the data, and where they are drawn. A long list begins with its worst rows, enlarged.
  sections(height) {
    const count = this.data.rows.length;
    if (count * TOP_HEIGHT <= height) return [{ first: 0, count, top: 0, height }];
    const top = TOP_ROWS * TOP_HEIGHT;
    return [{ first: 0, count: TOP_ROWS, top: 0, height: top }, { first: TOP_ROWS, count: count - TOP_ROWS, top: top + TOP_GAP, height: height - top - TOP_GAP }];
  }

  rowAt(y) {
    const part = this.plot.sections.findLast((one) => y >= one.top) || this.plot.sections[0];
    return part.first + Math.max(0, Math.min(part.count - 1, Math.floor(((y - part.top) / part.height) * part.count)));
  }

  // The rows of the data that share one row of pixels are reduced to the worst value; no data is the worst of all.
  pixels(begin, count, height, palette) {
    const { bins, is_low_bad: isLowBad } = this.data;
    const image = new ImageData(bins, height);
    const words = new Uint32Array(image.data.buffer);
    for (let y = 0; y < height; y++) {
      const first = begin + Math.floor((y * count) / height);
      const last = Math.max(first, begin + Math.ceil(((y + 1) * count) / height) - 1);
      for (let bin = 0; bin < bins; bin++) {
        let worst = this.cells[first * bins + bin];
        for (let row = first + 1; row <= last && worst !== 255; row++) {
          const cell = this.cells[row * bins + bin];
          if (cell === 255 || (isLowBad ? cell < worst : cell > worst)) worst = cell;
        }
        words[y * bins + bin] = palette[worst];
      }
    }
    return image;
  }

  draw() {
    if (!this.data || !this.canvas.clientWidth) return;
    const ratio = window.devicePixelRatio || 1;
    const height = this.data.rows.length ? this.height() : 60;
    this.canvas.style.height = `${height + HEAT_BOTTOM}px`;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round((height + HEAT_BOTTOM) * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const width = this.canvas.clientWidth - HEAT_LEFT - HEAT_RIGHT;
    this.plot = { width, height, sections: this.data.rows.length ? this.sections(height) : [] };
    if (!this.data.rows.length) {
      context.fillStyle = css("--quiet");
      context.fillText("no data", HEAT_LEFT, 30);
      replace(this.readout, this.summary);
      return;
    }
    context.imageSmoothingEnabled = false;
    const palette = makePalette(this.data.is_low_bad);
    for (const part of this.plot.sections) {
      const lines = Math.min(Math.floor(part.height), part.count);
      const small = new OffscreenCanvas(this.data.bins, lines);
      small.getContext("2d").putImageData(this.pixels(part.first, part.count, lines, palette), 0, 0);
      context.drawImage(small, HEAT_LEFT, part.top, width, part.height);
    }
    this.drawLabels(context, width, height);
    this.drawOverlay();
  }

  drawLabels(context, width, height) {
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.fillStyle = css("--quiet");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const part of this.plot.sections) {
      const step = Math.max(1, Math.ceil((13 * part.count) / part.height));
      for (let n = 0; n < part.count; n += step) {
        const y = part.top + Math.max(part.top ? 0 : 6, ((n + 0.5) / part.count) * part.height);
        context.fillText(this.data.rows[part.first + n].slice(0, 18), HEAT_LEFT - 6, y);
      }
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const t of timeTicks(this.data.since, this.data.until, width / 110)) {
      const x = HEAT_LEFT + ((t - this.data.since) / (this.data.until - this.data.since)) * width;
      if (x > HEAT_LEFT + 15 && x < HEAT_LEFT + width - 15) context.fillText(formatTime(t, this.data.until - this.data.since), x, height + 6);
    }
  }

  drawOverlay() {
    if (!this.data || !this.plot) return;
    const t = this.view.cursor;
    if (this.selected < 0 || t === null) { replace(this.readout, this.summary); return; }
    const bin = Math.floor(((t - this.data.since) / (this.data.until - this.data.since)) * this.data.bins);
    if (bin < 0 || bin >= this.data.bins) return;
    const value = this.value(this.selected, bin);
    replace(this.readout, el("strong", {}, this.data.rows[this.selected]), ` ${formatTime(t)} `,
      value === null ? "no data" : formatNumber(value, this.data.unit));
  }

  addEvents() {
    const choose = (event) => {
      if (!this.plot || !this.data.rows.length) return;
      const share = (event.offsetX - HEAT_LEFT) / this.plot.width;
      this.selected = this.rowAt(event.offsetY);
      this.view.setCursor(this.data.since + Math.max(0, Math.min(0.9999, share)) * (this.data.until - this.data.since));
    };
    let begin = null;
    this.canvas.addEventListener("pointermove", choose);
    this.canvas.addEventListener("pointerleave", () => this.view.setCursor(null));
    this.canvas.addEventListener("pointerdown", (event) => { begin = event.offsetX; });
    this.canvas.addEventListener("pointerup", (event) => {
      const at = (x) => this.data.since + ((x - HEAT_LEFT) / this.plot.width) * (this.data.until - this.data.since);
      if (begin !== null && Math.abs(event.offsetX - begin) > 6) this.view.zoom(Math.min(at(begin), at(event.offsetX)), Math.max(at(begin), at(event.offsetX)));
      else if (this.selected >= 0) this.onRow(this.data.rows[this.selected]);
      begin = null;
    });
    this.canvas.addEventListener("dblclick", () => this.view.reset());
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const [since, until] = this.view.range;
    const at = this.view.cursor ?? (since + until) / 2;
    const move = (rows) => { this.selected = Math.max(0, Math.min(this.data.rows.length - 1, this.selected + rows)); this.view.cursor = null; this.view.setCursor(at); };
    const actions = {
      ArrowUp: () => move(-1), ArrowDown: () => move(1),
      ArrowLeft: () => this.view.setCursor(Math.max(since, at - (until - since) / 100)),
      ArrowRight: () => this.view.setCursor(Math.min(until, at + (until - since) / 100)),
      "+": () => this.view.zoomBy(0.6, at), "-": () => this.view.zoomBy(1.6, at), Escape: () => this.view.reset(),
      Enter: () => this.selected >= 0 && this.onRow(this.data.rows[this.selected]),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }
}
