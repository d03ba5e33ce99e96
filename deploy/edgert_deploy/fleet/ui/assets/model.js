// A model's card: its chart, the same as a table, and where the time goes.

import {empty, h, itemwise, replace, table} from "./dom.js";
import {count, digits, ms, share} from "./format.js";
import {LatencyChart, colourVersions, momentOf, seriesClass} from "./chart.js";

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const named = (words, all) => words.join(", ") + (all > words.length ? ` and ${count(all - words.length)} more` : "");

export class ModelCards {
  constructor(app, {stages = true} = {}) {
    this.app = app;
    this.withStages = stages;
    this.cards = new Map();
    this.list = h("div", {class: "models"});
    this.note = h("div");
    this.clocks = h("div");
    this.broken = h("div");
    this.element = h("div", null, this.list, this.broken, this.clocks, this.note);
  }

  show(curves) {
    const names = curves.models.map(({model}) => model);
    if (names.join("\n") !== [...this.cards.keys()].join("\n") || !names.length) {
      this.cards = new Map(names.map((name) => [name, this.cards.get(name) ?? new ModelCard(this.app, name, this.withStages)]));
      replace(this.list, names.length ? [...this.cards.values()].map(({element}) => element) : h("section", {class: "card"}, h("h2", null, "Latency"), empty(
        "No reports in this time",
        "Each device reports once a minute what its models answered. Choose a longer time above, or take a filter away.",
        this.app.fleet.heard && !this.app.fleet.sites.size && !this.app.filtered ? "No device was heard of yet, either." : null)));
    }
    for (const model of curves.models) colourVersions(model, curves.numbers[model.model]);
    replace(this.broken, itemwise(curves.models, (model) => { this.cards.get(model.model).show(curves, model); }, (words) => h("p", null, words)));
    this.app.noteStore(curves.newest_ms);
    replace(this.clocks, curves.unsynced_count ? h("p", {class: "soft"}, `Times of receipt, because the clock is not synchronised: ${named(curves.unsynced, curves.unsynced_count)}.`) : "");
    replace(this.note, curves.left_out.length ? h("p", {class: "soft"}, `${curves.left_out.length} more models: choose one above (${curves.left_out.slice(0, 8).join(", ")}${curves.left_out.length > 8 ? ", …" : ""}).`) : "");
    if (this.stages) this.showStages(this.stages);
  }

  showStages(stages) {
    this.stages = stages;
    for (const [name, card] of this.cards) card.showStages(stages.filter(({model}) => model === name));
  }
}

class ModelCard {
  constructor(app, name, withStages) {
    this.app = app;
    this.id = `model-${name}`;
    this.figures = h("dl", {class: "figures"});
    this.chart = new LatencyChart(name);
    this.toggle = h("button", {type: "button", class: "plain", "aria-expanded": "false", "aria-controls": `${this.id}-table`, onclick: () => this.flip()}, "Show as tables");
    this.tables = h("div", {id: `${this.id}-table`, hidden: true});
    this.note = h("p", {class: "soft small"});
    this.holes = h("p", {class: "holes small", hidden: true});
    this.stages = withStages ? h("div", {class: "stages"}) : null;
    this.element = h("section", {class: "card model", "aria-labelledby": this.id},
      h("div", {class: "card-head"}, h("h2", {id: this.id}, name), this.toggle), this.figures, this.holes,
      h("div", {class: withStages ? "model-body" : null}, h("div", null, this.chart.element, this.note, this.tables), this.stages));
  }

  show(curves, model) {
    [this.curves, this.model] = [curves, model];
    const figure = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));
    replace(this.figures, figure("p50", ms(model.p50_ms)), figure("p95", ms(model.p95_ms)), figure("p99", ms(model.p99_ms)), figure("slowest", ms(model.max_ms)),
      figure("answered", count(model.answered)), figure("errors", share(model.errors, model.requests || model.answered)));
    const missing = sum(model.missing);
    replace(this.holes, missing ? [h("b", null, `${count(missing)} of ${count(missing + model.windows)} reports (${share(missing, missing + model.windows)}) were sent and never came`), `, from ${named(model.missing_devices.map(([device, number]) => `${device} (${count(number)})`), model.missing_devices_count)}. The charts are hatched there.`] : "");
    this.holes.hidden = !missing;
    replace(this.note, model.left_out.length ? `${model.left_out.length} older versions are not drawn: choose one above (${model.left_out.slice(-6).join(", ")}).` : "");
    this.chart.show(curves, model);
    if (!this.tables.hidden) this.drawTables();
  }

  flip() {
    this.tables.hidden = !this.tables.hidden;
    this.toggle.setAttribute("aria-expanded", String(!this.tables.hidden));
    this.toggle.textContent = this.tables.hidden ? "Show as tables" : "Hide the tables";
    if (!this.tables.hidden) this.drawTables();
  }

  drawTables() {
    const {curves, model} = this, rows = [];
    for (let step = curves.steps - 1; step >= 0; step--) {
      if (model.missing[step]) rows.push([momentOf(curves, step), "", "–", "–", "–", `${count(model.missing[step])} reports missing`]);
      for (const each of model.versions)
        if (each.counts[step]) rows.push([momentOf(curves, step), each.version, digits(each.p50[step]), digits(each.p95[step]), digits(each.p99[step]), count(each.counts[step])]);
    }
    const bands = new Map();
    for (const [, row, number] of model.heat.cells) bands.set(row, (bands.get(row) ?? 0) + number);
    const edge = (row) => digits(2 ** (row / model.heat.rows_an_octave));
    replace(this.tables,
      table("Latency by version, newest first", [["time"], ["version"], ["p50 ms", "n"], ["p95", "n"], ["p99", "n"], ["requests", "n"]], rows),
      table("Requests by latency, whole time", [["from, ms"], ["to, ms", "n"], ["requests", "n"]], [...bands].sort(([a], [b]) => a - b).map(([row, number]) => [edge(row), edge(row + 1), count(number)])));
  }

  showStages(found) {
    if (!this.stages) return;
    const shown = found.slice(-3), devices = shown.reduce((sum, each) => sum + each.devices, 0);
    const heading = h("h3", null, "Where the time goes");
    if (!shown.length) return replace(this.stages, heading, empty("No stages yet", "They come with each device's next report, within a minute."));
    const most = Math.max(...shown.flatMap(({stages}) => stages.map(({slowest_ms}) => slowest_ms)), 1e-9);
    const names = shown[0].stages.map(({stage}) => stage).filter((_, i) => shown.some(({stages}) => stages[i].slowest_ms > 0));
    const series = (version) => this.model?.versions.find((each) => each.version === version)?.series ?? 0;
    replace(this.stages, heading,
      h("p", {class: "soft small"}, `p99 of each stage in the last window of ${devices === 1 ? "one device" : `${devices} devices`}: bar, the middle device; line, the slowest.`),
      h("table", {class: "stage-table"}, h("caption", {class: "hidden"}, "p99 of each stage by version, ms"),
        h("thead", {class: "hidden"}, h("tr", null, ["stage", "version", "", "middle, slowest"].map((title) => h("th", {scope: "col"}, title || "bar")))),
        h("tbody", null, names.flatMap((name) => shown.map(({version, stages}, i) => {
          const said = stages.find(({stage}) => stage === name);
          return h("tr", {class: i === 0 ? "first" : null}, h("th", {scope: "row"}, i === 0 ? name : h("span", {class: "hidden"}, name)),
            h("td", {class: "version"}, version),
            h("td", {class: "bars"}, h("span", {class: `stage-bar ${seriesClass(series(version))}`}, h("i", {style: {width: `${100 * said.middle_ms / most}%`}}), h("b", {style: {left: `${100 * said.slowest_ms / most}%`}}))),
            h("td", {class: "n"}, digits(said.middle_ms), h("span", {class: "soft"}, " / "), said.slowest_ms === null ? "–" : h("a", {href: this.app.deviceLink(said.site, said.device), title: `the slowest: ${said.site}/${said.device}`, "aria-label": `${digits(said.slowest_ms)} ms, the slowest: ${said.site}/${said.device}`}, digits(said.slowest_ms))));
        })))));
  }
}
