// A model's latency over time: percentiles by version, requests, and a heat-map of the histogram, on one time axis.

import {colour, h, head, replace, s} from "./dom.js";
import {clock, count, digits, ms} from "./format.js";
import {RIGHT, TimeChart, logAxis, logTicks, momentOf, runs, stepWords, tickWords} from "./timechart.js";

const TOP = 26,
  LINES = 210,
  VOLUME = 38,
  HEAT = 150,
  GAP = 26;
const PERCENTILES = ["p99", "p95", "p50"];

const SERIES = 6;
export const seriesClass = (number) => `series-${number}`;

// A version keeps its colour under every filter. Of two shown versions with one colour, the later gets a free one.
export function colourVersions(model, numbers) {
  const taken = new Set();
  model.versions.forEach((each, i) => {
    let series = (numbers?.[each.version] ?? i) % SERIES;
    while (taken.has(series) && taken.size < SERIES) series = (series + 1) % SERIES;
    taken.add(series);
    each.series = series;
  });
}

export class LatencyChart extends TimeChart {
  constructor(label, zoom) {
    super(`${label}: latency over time`, zoom);
    this.canvas = h("canvas", {class: "heat", "aria-hidden": "true"});
    this.stage.prepend(this.canvas);
    this.readout = h("div", {class: "readout"});
    this.element = h("div", {class: "chart"}, this.readout, this.stage, this.told);
  }

  show(curves, model) {
    this.model = model;
    this.showSteps(curves);
  }

  paint(plot) {
    const volumeTop = TOP + LINES + GAP,
      heatTop = volumeTop + VOLUME + GAP,
      bottom = heatTop + HEAT;
    this.paintHeat(plot, heatTop);
    return {
      top: TOP,
      bottom,
      nodes: [
        this.holes(plot, bottom),
        this.lines(plot),
        this.volume(plot, volumeTop),
        this.heatAxis(plot, heatTop),
        this.marks(plot, bottom),
      ],
    };
  }

  summary() {
    const said = this.model.versions.map(
      (each) => `${each.version}: p50 ${ms(each.p50_ms)}, p95 ${ms(each.p95_ms)}, p99 ${ms(each.p99_ms)}`,
    );
    const target = this.model.p99_target_ms ? [`p99 target ${ms(this.model.p99_target_ms)}`] : [];
    const deployed = this.model.marks.map(({version, at_ms}) => `${version} first reported at ${clock(at_ms)}`);
    return `${this.label}. ${[...said, ...target, ...deployed].join(". ")}`;
  }

  // Steps in which reports are missing are hatched.
  holes(plot, bottom) {
    const {steps} = this.curves,
      wide = plot.width / steps,
      id = `hatch-${this.label.replace(/[^A-Za-z0-9]/g, "-")}`;
    const hatch = s(
      "pattern",
      {id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
      s("line", {class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6}),
    );
    const stretches = runs(this.model.missing.map((number) => number || null));
    if (!stretches.length) return s("g");
    return s(
      "g",
      null,
      s("defs", null, hatch),
      stretches.map((run) =>
        s("rect", {
          class: "hole",
          x: plot.x + run[0] * wide,
          y: TOP,
          width: run.length * wide,
          height: bottom - TOP,
          fill: `url(#${id})`,
        }),
      ),
    );
  }

  lines(plot) {
    const target = this.model.p99_target_ms;
    const values = this.model.versions.flatMap((each) => [...each.p50, ...each.p99]).filter((value) => value > 0);
    if (!values.length)
      return s("text", {x: plot.x, y: TOP + 20, class: "tick"}, "no request was answered in this time");
    const [y, axis] = logAxis(target ? [...values, target] : values, plot, TOP, LINES);
    const last = {};
    const drawn = this.model.versions.map((version) => {
      const group = s("g", {class: seriesClass(version.series)});
      for (const run of runs(version.p99)) {
        const upper = run.map((step) => `${this.x(step)},${y(version.p99[step])}`),
          lower = [...run].reverse().map((step) => `${this.x(step)},${y(version.p50[step])}`);
        group.append(s("polygon", {class: "band", points: [...upper, ...lower].join(" ")}));
      }
      for (const name of PERCENTILES) {
        for (const run of runs(version[name])) {
          const points = run.map((step) => [this.x(step), y(version[name][step])]);
          group.append(
            points.length > 1
              ? s("polyline", {class: `line ${name}`, points: points.join(" ")})
              : s("circle", {class: `dot ${name}`, cx: points[0][0], cy: points[0][1], r: name === "p99" ? 3.5 : 2.5}),
          );
          const end = points.at(-1);
          if (!last[name] || end[0] >= last[name][0]) last[name] = [...end, version.series];
        }
      }
      return group;
    });
    const goal = target
      ? s(
          "g",
          {class: "target"},
          s("line", {x1: plot.x, x2: plot.x + plot.width, y1: y(target), y2: y(target)}),
          s("text", {x: plot.x + 4, y: y(target) - 4}, `p99 target ${ms(target)}`),
        )
      : null;
    return s("g", null, axis, drawn, goal, endLabels(last, plot));
  }

  volume(plot, top) {
    const {curves, model} = this;
    const totals = Array.from({length: curves.steps}, (_, step) =>
      model.versions.reduce((sum, each) => sum + each.counts[step], 0),
    );
    const most = Math.max(...totals, 1),
      wide = Math.max(1, plot.width / curves.steps - 1);
    const bars = s("g");
    totals.forEach((_, step) => {
      let y = top + VOLUME;
      model.versions.forEach((version) => {
        const height = (version.counts[step] / most) * VOLUME;
        y -= height;
        if (height)
          bars.append(
            s("rect", {
              class: `bar ${seriesClass(version.series)}${curves.since_ms + (step + 1) * curves.step_ms > curves.now_ms ? " partial" : ""}`,
              x: this.x(step) - wide / 2,
              y,
              width: wide,
              height: Math.max(height, 1),
            }),
          );
      });
    });
    return s(
      "g",
      null,
      s("text", {class: "tick", x: plot.x, y: top - 7}, `requests a ${stepWords(curves.step_ms)}`),
      s("text", {class: "tick", x: plot.x - 6, y: top + 9, "text-anchor": "end"}, count(most)),
      s("line", {class: "grid", x1: plot.x, x2: plot.x + plot.width, y1: top + VOLUME, y2: top + VOLUME}),
      bars,
    );
  }

  heatAxis(plot, top) {
    const {first_row, rows, rows_an_octave} = this.model.heat;
    const label = s("text", {class: "tick", x: plot.x, y: top - 7}, "all requests by latency, ms");
    if (!rows) return label;
    const from = 2 ** (first_row / rows_an_octave),
      to = 2 ** ((first_row + rows) / rows_an_octave);
    const y = (value) => top + HEAT - ((Math.log2(value) * rows_an_octave - first_row) / rows) * HEAT;
    return s(
      "g",
      null,
      label,
      logTicks(from, to, 5).map((value) =>
        s(
          "text",
          {
            class: "tick",
            x: plot.x - 6,
            y: Math.min(Math.max(y(value) + 4, top + 9), top + HEAT),
            "text-anchor": "end",
          },
          tickWords(value),
        ),
      ),
    );
  }

  paintHeat(plot, top) {
    const {heat} = this.model,
      ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, {width: Math.round(plot.width * ratio), height: Math.round(HEAT * ratio)});
    Object.assign(this.canvas.style, {
      left: `${plot.x}px`,
      top: `${top}px`,
      width: `${plot.width}px`,
      height: `${HEAT}px`,
    });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = colour("--heat-0");
    pen.fillRect(0, 0, plot.width, HEAT);
    const ramp = [1, 2, 3, 4, 5].map((n) => rgb(colour(`--heat-${n}`)));
    const most = Math.max(...heat.cells.map(([, , number]) => number), 1);
    const wide = plot.width / this.curves.steps,
      high = HEAT / Math.max(heat.rows, 1);
    for (const [step, row, number] of heat.cells) {
      pen.fillStyle = mix(ramp, Math.sqrt(number / most));
      const left = Math.floor(step * wide),
        bottom = HEAT - (row - heat.first_row) * high;
      pen.fillRect(left, bottom - high, Math.ceil((step + 1) * wide) - left, high + 0.5);
    }
  }

  marks(plot, bottom) {
    const {since_ms, step_ms, steps} = this.curves;
    let free = -Infinity;
    return this.model.marks.map(({version, at_ms}) => {
      const series = this.model.versions.find((each) => each.version === version)?.series ?? 0;
      const at = plot.x + ((at_ms - since_ms) / (steps * step_ms)) * plot.width;
      const words = `${version} begins`,
        wide = words.length * 6.6;
      const left = at + 4 + wide > plot.x + plot.width + RIGHT ? at - 4 - wide : at + 4;
      const shown = left > free;
      if (shown) free = left + wide;
      return s(
        "g",
        {class: `mark ${seriesClass(series)}`},
        s("line", {x1: at, x2: at, y1: 6, y2: bottom}),
        shown ? s("text", {x: left, y: 14}, words) : null,
      );
    });
  }

  words() {
    const said = this.model.versions
      .filter((each) => each.counts[this.cursor])
      .map(
        (each) =>
          `${each.version}: p50 ${ms(each.p50[this.cursor])}, p95 ${ms(each.p95[this.cursor])}, p99 ${ms(each.p99[this.cursor])}`,
      );
    const missing = this.model.missing[this.cursor];
    return `${momentOf(this.curves, this.cursor)}. ${said.join(". ") || "no requests"}${missing ? `. ${count(missing)} reports missing` : ""}`;
  }

  // The legend, with the figures of the step under the cursor, or of the whole period.
  read() {
    const {curves, model, cursor} = this;
    const when = cursor === null ? "whole time" : momentOf(curves, cursor);
    const rows = model.versions.map((each) => {
      const said =
        cursor === null ? PERCENTILES.map((name) => each[`${name}_ms`]) : PERCENTILES.map((name) => each[name][cursor]);
      return h(
        "tr",
        null,
        h("th", {scope: "row"}, h("i", {class: `swatch ${seriesClass(each.series)}`}), each.version || "no version"),
        [...said].reverse().map((value) => h("td", {class: "n"}, digits(value))),
        h("td", {class: "n"}, count(cursor === null ? each.answered : each.counts[cursor])),
      );
    });
    replace(
      this.readout,
      h(
        "table",
        null,
        h("caption", {class: "hidden"}, `Percentiles by version, ${when}`),
        head(
          h("th", {scope: "col"}, when),
          ["p50 ms", "p95", "p99", "requests"].map((name) => h("th", {scope: "col", class: "n"}, name)),
        ),
        h("tbody", null, rows),
      ),
    );
  }
}

function endLabels(last, plot) {
  let y = -Infinity;
  return PERCENTILES.filter((name) => last[name]).map((name) => {
    y = Math.max(last[name][1] + 4, y + 13);
    return s(
      "text",
      {class: `end ${seriesClass(last[name][2])}`, x: Math.min(last[name][0] + 6, plot.x + plot.width + 6), y},
      name,
    );
  });
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function mix(ramp, share) {
  const at = Math.min(share, 1) * (ramp.length - 1),
    i = Math.min(Math.floor(at), ramp.length - 2);
  return `rgb(${ramp[i].map((value, n) => Math.round(value + (ramp[i + 1][n] - value) * (at - i))).join(" ")})`;
}
