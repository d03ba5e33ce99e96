// Shared by charts over time: the time axis, a cursor for pointer and arrow keys, and a marked range to zoom into.

import {h, replace, s} from "./dom.js";
import {clock, date, day, moment} from "./format.js";

export const LEFT = 46,
  RIGHT = 34,
  AXIS = 22;
const DRAG_PX = 8; // less is a click
const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 240, 360, 720, 1440, 2880, 10_080, 20_160, 43_200, 86_400];

export class TimeChart {
  // `zoom` receives the two times (ms) of a marked range.
  constructor(label, zoom) {
    Object.assign(this, {label, zoom, cursor: null, anchor: null});
    this.drawing = h("div", {class: "drawing"});
    this.stage = h(
      "div",
      {
        class: "stage",
        tabindex: "0",
        role: "group",
        "aria-label": `${label}; the arrow keys move in time, with Shift they select a period, Enter zooms into it`,
        onkeydown: (event) => this.key(event),
        onpointerdown: (event) => this.press(event),
        onpointermove: (event) => this.point(event),
        onpointerup: () => this.release(),
        onpointercancel: () => this.drop(),
        onpointerleave: () => this.down_x === undefined && this.move(null),
        onblur: () => {
          this.drop();
          this.move(null);
        },
      },
      this.drawing,
    );
    // Changes only after keys: each new report would interrupt a screen reader.
    this.told = h("p", {class: "hidden", "aria-live": "polite"});
    new ResizeObserver(() => this.draw()).observe(this.stage);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `curves` has since_ms, step_ms and steps. A subclass has `paint`, `summary`, `words` and `read`.
  showSteps(curves) {
    this.curves = curves;
    if (this.cursor >= curves.steps) this.cursor = null;
    this.draw();
    this.read();
  }

  draw() {
    const width = this.stage.clientWidth;
    if (!width || !this.curves) return;
    const plot = (this.plot = {x: LEFT, width: width - LEFT - RIGHT});
    this.x = (step) => plot.x + ((step + 0.5) / this.curves.steps) * plot.width;
    const {top, bottom, nodes} = this.paint(plot);
    this.marked = s("rect", {class: "marked", y: top, height: bottom - top, x: 0, width: 0});
    this.rule = s("line", {class: "cursor", y1: top - 6, y2: bottom, x1: -9, x2: -9});
    replace(
      this.drawing,
      s(
        "svg",
        {
          viewBox: `0 0 ${width} ${bottom + AXIS}`,
          width,
          height: bottom + AXIS,
          role: "img",
          "aria-label": this.summary(),
        },
        nodes,
        timeAxis(this.curves, plot, top, bottom),
        this.marked,
        this.rule,
      ),
    );
    this.place();
  }

  place() {
    if (!this.rule) return;
    const x = this.cursor === null ? -9 : this.x(this.cursor),
      wide = this.plot.width / this.curves.steps;
    this.rule.setAttribute("x1", x);
    this.rule.setAttribute("x2", x);
    const stretch = this.stretch();
    this.marked.setAttribute("x", stretch ? this.plot.x + stretch[0] * wide : 0);
    this.marked.setAttribute("width", stretch ? (stretch[1] - stretch[0] + 1) * wide : 0);
  }

  // The first and the last marked step, if there are any.
  stretch() {
    return this.anchor === null || this.cursor === null
      ? null
      : [Math.min(this.anchor, this.cursor), Math.max(this.anchor, this.cursor)];
  }

  key(event) {
    const last = this.curves.steps - 1,
      at = this.cursor ?? last + 1;
    if (event.key === "Enter" && this.anchor !== null) return this.finish();
    if (event.key === "Escape") return this.drop();
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.anchor = event.shiftKey ? (this.anchor ?? Math.min(at, last)) : null;
    this.move(Math.min(Math.max(to, 0), last));
    this.place();
    this.told.textContent =
      this.anchor === null
        ? this.words()
        : `${momentOf(this.curves, this.stretch()[0])} to ${momentOf(this.curves, this.stretch()[1] + 1)}, Enter zooms`;
  }

  stepAt(event) {
    const box = this.stage.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left - this.plot.x) / this.plot.width) * this.curves.steps);
  }

  press(event) {
    if (event.button || !this.plot) return;
    this.down_x = event.clientX;
    this.down = Math.min(Math.max(this.stepAt(event), 0), this.curves.steps - 1);
    this.stage.setPointerCapture(event.pointerId);
    this.point(event);
  }

  point(event) {
    if (!this.plot) return;
    let step = this.stepAt(event);
    if (this.down_x !== undefined) {
      step = Math.min(Math.max(step, 0), this.curves.steps - 1);
      if (Math.abs(event.clientX - this.down_x) > DRAG_PX) this.anchor = this.down;
    }
    this.move(step >= 0 && step < this.curves.steps ? step : null);
    if (this.anchor !== null) this.place();
  }

  release() {
    this.down_x = undefined;
    if (this.anchor !== null) this.finish();
  }

  finish() {
    const [first, last] = this.stretch(),
      {since_ms, step_ms} = this.curves;
    this.drop();
    this.zoom(since_ms + first * step_ms, since_ms + (last + 1) * step_ms);
  }

  drop() {
    this.down_x = undefined;
    this.anchor = null;
    this.place();
  }

  move(step) {
    if (step === this.cursor) return;
    this.cursor = step;
    this.place();
    this.read();
  }
}

function timeAxis({since_ms, step_ms, steps}, plot, top, bottom) {
  const until_ms = since_ms + steps * step_ms,
    room = Math.max(2, Math.floor(plot.width / 80));
  const every =
    (MINUTES.find((minutes) => (until_ms - since_ms) / 60_000 / minutes <= room) ?? MINUTES.at(-1)) * 60_000;
  const zone = new Date(since_ms).getTimezoneOffset() * 60_000;
  const words = every < 86_400_000 ? clock : until_ms - since_ms > 8 * 86_400_000 ? date : day;
  const ticks = [];
  for (let at = Math.ceil((since_ms - zone) / every) * every + zone; at < until_ms; at += every) ticks.push(at);
  const x = (at) => plot.x + ((at - since_ms) / (until_ms - since_ms)) * plot.width;
  return ticks.map((at) => [
    s("line", {class: "grid time", x1: x(at), x2: x(at), y1: top, y2: bottom + 4}),
    s("text", {class: "tick", x: x(at), y: bottom + 17, "text-anchor": "middle"}, words(at)),
  ]);
}

// A logarithmic axis over `values` (all above 0), from `top` over `height` px: an outlier does not flatten the rest.
export function logAxis(values, plot, top, height) {
  const low = Math.log2(values.reduce((a, b) => Math.min(a, b))) - 0.15,
    high = Math.max(Math.log2(values.reduce((a, b) => Math.max(a, b))) + 0.15, low + 1);
  const y = (value) =>
    top + (1 - (Math.min(Math.max(Math.log2(Math.max(value, 1e-9)), low), high) - low) / (high - low)) * height;
  const grid = logTicks(2 ** low, 2 ** high).map((value) => [
    s("line", {class: "grid", x1: plot.x, x2: plot.x + plot.width, y1: y(value), y2: y(value)}),
    s("text", {class: "tick", x: plot.x - 6, y: y(value) + 4, "text-anchor": "end"}, tickWords(value)),
  ]);
  return [y, s("g", null, s("text", {class: "tick", x: plot.x - 6, y: top - 10, "text-anchor": "end"}, "ms"), grid)];
}

export const momentOf = (curves, step) => moment(curves.since_ms + step * curves.step_ms).slice(0, -3);
export const stepWords = (step_ms) =>
  step_ms >= 3_600_000
    ? step_ms === 3_600_000
      ? "hour"
      : `${step_ms / 3_600_000} h`
    : step_ms === 60_000
      ? "minute"
      : `${step_ms / 60_000} min`;
export const tickWords = (value) => (value >= 1000 ? `${value / 1000} s` : String(Number(value.toPrecision(2))));

// The steps with values, as ranges without a gap.
export function runs(values) {
  const found = [];
  values.forEach((value, step) => {
    if (value === null) return;
    if (found.length && found.at(-1).at(-1) === step - 1) found.at(-1).push(step);
    else found.push([step]);
  });
  return found;
}

// 1, 2 and 5 times powers of ten between the two; fewer if these are too many.
export function logTicks(low, high, most = 7) {
  const of = (factors) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of factors)
        if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(factor * 10 ** power);
    return found;
  };
  const choices = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1]].map(of);
  return (
    choices.find((ticks) => ticks.length <= most) ??
    choices.at(-1).filter((_, i, all) => i % Math.ceil(all.length / most) === 0)
  );
}
