// The range of time and the cursor that all charts of a page share.

export class TimeView {
  constructor(since, until) {
    this.full = [since, Math.max(until, since + 1)];
    this.range = [...this.full];
    this.cursor = null;
    this.isLive = true;
    this.listeners = new Set();
  }

  get isZoomed() { return !this.isLive; }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  notify(what) { for (const listener of this.listeners) listener(what); }

  setCursor(t) {
    if (t === this.cursor) return;
    this.cursor = t;
    this.notify("cursor");
  }

  zoom(since, until) {
    const span = Math.max(until - since, 0.5);
    const [first, last] = this.full;
    if (span >= last - first) { this.reset(); return; }
    const begin = Math.min(Math.max(since, first), last - span);
    this.range = [begin, begin + span];
    this.isLive = false;
    this.notify("range");
  }

  zoomBy(factor, center = (this.range[0] + this.range[1]) / 2) {
    const [since, until] = this.range;
    this.zoom(center - (center - since) * factor, center + (until - center) * factor);
  }

  pan(share) {
    const shift = (this.range[1] - this.range[0]) * share;
    if (this.isZoomed) this.zoom(this.range[0] + shift, this.range[1] + shift);
  }

  reset() {
    this.range = [...this.full];
    this.isLive = true;
    this.notify("range");
  }

  extend(until) {
    if (until <= this.full[1]) return;
    this.full[1] = until;
    if (this.isLive) { this.range = [...this.full]; this.notify("extend"); }
  }
}
