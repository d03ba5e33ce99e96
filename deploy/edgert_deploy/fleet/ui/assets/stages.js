// The stages of a model's requests: over time, and of each version.

import {empty, h, replace, s} from "./dom.js";
import {count, digits, ms, share as percent} from "./format.js";
import {seriesClass} from "./chart.js";
import {TimeChart, logAxis, momentOf, runs} from "./timechart.js";

const TOP = 22,
  LINES = 130;
const LEAST_MS = 0.001; // a shorter time is drawn as this
const ORDER = ["decode", "preprocess", "cache", "queue", "engine", "postprocess", "encode"];
const stageClass = (stage) => seriesClass(Math.max(ORDER.indexOf(stage), 0));

export class StageChart extends TimeChart {
  constructor(name, zoom) {
    super(`${name}: p50 and p99 of each stage over time`, zoom);
    this.readout = h("ul", {class: "legend"});
    this.caption = h("p", {class: "soft small"});
    this.element = h(
      "div",
      {class: "chart", hidden: true},
      h("h3", null, "Stages over time"),
      this.caption,
      this.readout,
      this.stage,
      this.told,
    );
  }

  // `model` is undefined if no report has stages.
  show(curves, model) {
    this.model = model && {...model, stages: model.stages.filter(({p99}) => p99.some((value) => value > 0))};
    this.element.hidden = !this.model?.stages.length;
    if (!this.element.hidden) this.showSteps(curves);
  }

  paint(plot) {
    const {stages} = this.model,
      floor = (value) => (value === null ? null : Math.max(value, LEAST_MS));
    const [y, axis] = logAxis(
      stages
        .flatMap((each) => [...each.p50, ...each.p99])
        .filter((value) => value !== null)
        .map(floor),
      plot,
      TOP,
      LINES,
    );
    const line = (kind, values) =>
      runs(values).map((run) => {
        const points = run.map((step) => [this.x(step), y(floor(values[step]))]);
        return points.length > 1
          ? s("polyline", {class: `line ${kind}`, points: points.join(" ")})
          : s("circle", {class: "dot", cx: points[0][0], cy: points[0][1], r: 2.5});
      });
    const drawn = stages.map((each) =>
      s("g", {class: stageClass(each.stage)}, line("p50", each.p50), line("p95", each.p99)),
    );
    return {top: TOP, bottom: TOP + LINES, nodes: [axis, drawn]};
  }

  // The step under the pointer, else the newest step with a reading.
  get step() {
    return this.cursor ?? Math.max(...this.model.stages.map(({p99}) => p99.findLastIndex((value) => value !== null)));
  }

  summary() {
    return `${this.label}. ${this.words()}`;
  }

  words() {
    const {step} = this;
    return `${momentOf(this.curves, step)}. ${this.model.stages.map((each) => `${each.stage} p50 ${ms(each.p50[step])}, p99 ${ms(each.p99[step])}`).join(". ")}`;
  }

  read() {
    const {step} = this;
    this.caption.textContent = `Each stage of all requests, ms, at ${momentOf(this.curves, step)}. Dots: p50; line: p99.`;
    replace(
      this.readout,
      this.model.stages.map((each) =>
        h(
          "li",
          null,
          h("i", {class: `swatch ${stageClass(each.stage)}`}),
          each.stage,
          h("span", {class: "soft"}, digits(each.p50[step]), "/"),
          h("b", null, digits(each.p99[step])),
        ),
      ),
    );
  }
}

// `versions` has the stages of each version over the whole period, `series` a version's colour. Bars are logarithmic.
export function stageTable(versions, series) {
  const shown = versions.slice(-3);
  const heading = h("h3", null, "Time by stage");
  const readings = shown
    .flatMap(({stages}) => stages.flatMap(({p50_ms, p99_ms}) => [p50_ms, p99_ms]))
    .filter((value) => value > 0);
  if (!readings.length)
    return [
      heading,
      empty(
        "No stages in this time",
        "Stages come with the next report of each device, within a minute. Devices with an older EdgeRT report no stages.",
      ),
    ];
  const most = readings.reduce((a, b) => Math.max(a, b), LEAST_MS),
    least = readings.reduce((a, b) => Math.min(a, b), most) / 2;
  const wide = (value) =>
    value > 0 ? `${(100 * Math.log(Math.max(value, LEAST_MS) / least)) / Math.log(most / least)}%` : "0%";
  const of = ({stages}, name) => stages.find(({stage, p99_ms}) => stage === name && p99_ms > 0);
  return [
    heading,
    h(
      "p",
      {class: "soft small"},
      "Each stage of all requests in this time: its share of their time; bar, p50; line, p99. Bars are logarithmic.",
    ),
    h(
      "table",
      {class: "stage-table"},
      h("caption", {class: "hidden"}, "Share, p50 and p99 of each stage by version"),
      h(
        "thead",
        {class: "hidden"},
        h(
          "tr",
          null,
          ["stage", "version", "share", "bar", "p50, p99, ms"].map((title) => h("th", {scope: "col"}, title)),
        ),
      ),
      h(
        "tbody",
        null,
        ORDER.flatMap((name) =>
          shown
            .filter((each) => of(each, name))
            .map((each, i) => {
              const {share, answered, p50_ms, p99_ms} = of(each, name);
              return h(
                "tr",
                {class: i === 0 ? "first" : null, title: `${count(answered)} requests`},
                h("th", {scope: "row"}, i === 0 ? name : h("span", {class: "hidden"}, name)),
                h("td", {class: "version"}, each.version),
                h("td", {class: "n"}, percent(share, 1)),
                h(
                  "td",
                  {class: "bars"},
                  h(
                    "span",
                    {class: `stage-bar ${seriesClass(series(each.version))}`},
                    h("i", {style: {width: wide(p50_ms)}}),
                    h("b", {style: {left: wide(p99_ms)}}),
                  ),
                ),
                h("td", {class: "n"}, digits(p50_ms), h("span", {class: "soft"}, " / "), digits(p99_ms)),
              );
            }),
        ),
      ),
    ),
  ];
}
