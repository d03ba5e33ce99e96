// Where the time of a model's requests goes: each stage over time, and by version in the last window.

import {empty, h, replace, s} from "./dom.js";
import {digits, ms} from "./format.js";
import {seriesClass} from "./chart.js";
import {TimeChart, logAxis, momentOf, runs} from "./timechart.js";

const TOP = 22, LINES = 130;
const LEAST_MS = 0.001; // a shorter time is drawn as this
const ORDER = ["decode", "preprocess", "cache", "queue", "engine", "postprocess", "encode"];
const stageClass = (stage) => seriesClass(Math.max(ORDER.indexOf(stage), 0));
const some = (values) => values.some((value) => value > 0);

export class StageChart extends TimeChart {
  constructor(app, name, zoom) {
    super(`${name}: p99 of each stage over time`, zoom);
    this.app = app;
    this.readout = h("ul", {class: "legend"});
    this.caption = h("p", {class: "soft small"});
    this.element = h("div", {class: "chart", hidden: true}, h("h3", null, "Stages over time"), this.caption, this.readout, this.stage, this.told);
  }

  // `model` is undefined where no report has stages.
  show(curves, model) {
    this.model = model && {...model, stages: model.stages.filter(({middle_ms, slowest_ms}) => some(middle_ms) || some(slowest_ms))};
    this.element.hidden = !this.model?.stages.length;
    if (!this.element.hidden) this.showSteps(curves);
  }

  paint(plot) {
    const {stages} = this.model, floor = (value) => value === null ? null : Math.max(value, LEAST_MS);
    const [y, axis] = logAxis(stages.flatMap((each) => [...each.middle_ms, ...each.slowest_ms]).filter((value) => value !== null).map(floor), plot, TOP, LINES);
    const line = (kind, values) => runs(values).map((run) => {
      const points = run.map((step) => [this.x(step), y(floor(values[step]))]);
      return points.length > 1 ? s("polyline", {class: `line ${kind}`, points: points.join(" ")}) : s("circle", {class: "dot", cx: points[0][0], cy: points[0][1], r: 2.5});
    });
    const drawn = stages.map((each) => s("g", {class: stageClass(each.stage)}, this.model.devices > 1 ? line("slowest", each.slowest_ms) : null, line("p95", each.middle_ms)));
    return {top: TOP, bottom: TOP + LINES, nodes: [axis, drawn]};
  }

  // The newest step with a reading, where no step is pointed at.
  get step() { return this.cursor ?? Math.max(...this.model.stages.map(({middle_ms}) => middle_ms.findLastIndex((value) => value !== null))); }

  summary() { return `${this.label}. ${this.words()}`; }

  words() {
    const {step} = this;
    return `${momentOf(this.curves, step)}. ${this.model.stages.map((each) => `${each.stage} ${ms(each.middle_ms[step])}, slowest ${ms(each.slowest_ms[step])}`).join(". ")}`;
  }

  read() {
    const {step, app} = this, {devices, of_devices, stages} = this.model, alone = devices === 1;
    const fleet = devices < of_devices ? `${devices} of ${of_devices} devices, a sample` : `${devices} devices`;
    this.caption.textContent = `p99 of each stage, ms, at ${momentOf(this.curves, step)}${alone ? "" : `. Line: the middle one of ${fleet}; dots: the slowest of them`}.`;
    const slowest = (each) => each.slowest_device[step] ? [h("span", {class: "soft"}, "/"), h("a", {href: app.deviceLink(...each.slowest_device[step].split("/")), title: `the slowest: ${each.slowest_device[step]}`, "aria-label": `${each.stage}: ${digits(each.slowest_ms[step])} ms, the slowest: ${each.slowest_device[step]}`}, digits(each.slowest_ms[step]))] : null;
    replace(this.readout, stages.map((each) => h("li", null, h("i", {class: `swatch ${stageClass(each.stage)}`}), each.stage, h("b", null, digits(each.middle_ms[step])), alone ? null : slowest(each))));
  }
}

// `found` are the stages of each version in the last window, `series` is a version's colour. Bars are logarithmic.
export function stageTable(app, found, series) {
  const shown = found.slice(-3), devices = shown.reduce((sum, each) => sum + each.devices, 0);
  const heading = h("h3", null, "Where the time goes");
  if (!shown.length) return [heading, empty("No stages yet", "They come with each device's next report, within a minute.")];
  const readings = shown.flatMap(({stages}) => stages.flatMap(({middle_ms, slowest_ms}) => [middle_ms, slowest_ms])).filter((value) => value > 0);
  const most = readings.reduce((a, b) => Math.max(a, b), LEAST_MS), least = readings.reduce((a, b) => Math.min(a, b), most) / 2;
  const wide = (value) => value > 0 ? `${100 * Math.log(Math.max(value, LEAST_MS) / least) / Math.log(most / least)}%` : "0%";
  const names = shown[0].stages.map(({stage}) => stage).filter((_, i) => shown.some(({stages}) => stages[i].slowest_ms > 0));
  return [heading,
    h("p", {class: "soft small"}, `p99 of each stage in the last window of ${devices === 1 ? "one device" : `${devices} devices`}: bar, the middle device; line, the slowest. Bars are logarithmic.`),
    h("table", {class: "stage-table"}, h("caption", {class: "hidden"}, "p99 of each stage by version, ms"),
      h("thead", {class: "hidden"}, h("tr", null, ["stage", "version", "bar", "middle, slowest"].map((title) => h("th", {scope: "col"}, title)))),
      h("tbody", null, names.flatMap((name) => shown.map(({version, stages}, i) => {
        const said = stages.find(({stage}) => stage === name);
        return h("tr", {class: i === 0 ? "first" : null}, h("th", {scope: "row"}, i === 0 ? name : h("span", {class: "hidden"}, name)),
          h("td", {class: "version"}, version),
          h("td", {class: "bars"}, h("span", {class: `stage-bar ${seriesClass(series(version))}`}, h("i", {style: {width: wide(said.middle_ms)}}), h("b", {style: {left: wide(said.slowest_ms)}}))),
          h("td", {class: "n"}, digits(said.middle_ms), h("span", {class: "soft"}, " / "), said.slowest_ms === null ? "–" : h("a", {href: app.deviceLink(said.site, said.device), title: `the slowest: ${said.site}/${said.device}`, "aria-label": `${digits(said.slowest_ms)} ms, the slowest: ${said.site}/${said.device}`}, digits(said.slowest_ms))));
      }))))];
}
