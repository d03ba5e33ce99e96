// A model's card: its charts, the same data as tables, slow devices, stages. The card of an idle model is closed.

import {button, empty, h, itemwise, replace, table} from "./dom.js";
import {count, digits, ms, share} from "./format.js";
import {Breakdown} from "./breakdown.js";
import {LatencyChart, colourVersions} from "./chart.js";
import {StageChart, stageTable} from "./stages.js";
import {momentOf} from "./timechart.js";

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const named = (words, all) => words.join(", ") + (all > words.length ? ` and ${count(all - words.length)} more` : "");

export class ModelCards {
  // Without `whole` (the page of one device), there is no comparison with other devices.
  constructor(app, {whole = true} = {}) {
    this.app = app;
    this.whole = whole;
    this.cards = new Map();
    this.list = h("div", {class: "models"});
    this.note = h("div");
    this.clocks = h("div");
    this.broken = h("div");
    this.element = h("div", null, this.list, this.broken, this.clocks, this.note);
  }

  show(curves) {
    const names = curves.models.map(({model}) => model);
    const others = names.join("\n") !== [...this.cards.keys()].join("\n");
    if (others || !names.length) {
      this.cards = new Map(
        names.map((name) => [name, this.cards.get(name) ?? new ModelCard(this.app, name, this.whole)]),
      );
      replace(
        this.list,
        names.length
          ? [...this.cards.values()].map(({element}) => element)
          : h(
              "section",
              {class: "card"},
              h("h2", null, "Latency"),
              empty(
                "No reports in this time",
                "Once a minute, each device reports the answers of its models. Choose a longer time above, or remove a filter.",
                this.app.fleet.heard && !this.app.fleet.sites.size && !this.app.filtered
                  ? "No device has connected yet."
                  : null,
              ),
            ),
      );
    }
    for (const model of curves.models) colourVersions(model, curves.numbers[model.model]);
    replace(
      this.broken,
      itemwise(
        curves.models,
        (model) => {
          this.cards.get(model.model).show(curves, model);
        },
        (words) => h("p", null, words),
      ),
    );
    this.app.noteStore(curves.newest_ms);
    replace(
      this.clocks,
      curves.unsynced_count
        ? h(
            "p",
            {class: "soft"},
            `Times of receipt, because the clock is not synchronized: ${named(curves.unsynced, curves.unsynced_count)}.`,
          )
        : "",
    );
    replace(
      this.note,
      curves.left_out.length
        ? h(
            "p",
            {class: "soft"},
            `${curves.left_out.length} more models: choose one above (${curves.left_out.slice(0, 8).join(", ")}${curves.left_out.length > 8 ? ", …" : ""}).`,
          )
        : "",
    );
    if (others && this.stages) this.showStages(this.stages);
    if (others && this.groups) this.showGroups(this.groups);
  }

  showStages(stages) {
    this.stages = stages;
    for (const [name, card] of this.cards)
      card.showStages(
        stages,
        stages.models.find(({model}) => model === name),
      );
  }

  showGroups(groups) {
    this.groups = groups;
    for (const [name, card] of this.cards)
      card.breakdown?.show(
        groups.models.find(({model}) => model === name),
        groups.by,
      );
  }
}

class ModelCard {
  constructor(app, name, whole) {
    Object.assign(this, {app, name, whole, id: `model-${name}`, opened: false});
    this.figures = h("dl", {class: "figures"});
    const zoom = (since_ms, until_ms) => app.zoom(since_ms, until_ms);
    this.chart = new LatencyChart(name, zoom);
    this.stageChart = new StageChart(name, zoom);
    this.toggle = button("Show as tables", () => this.flip(), {
      class: "plain",
      "aria-expanded": "false",
      "aria-controls": `${this.id}-table`,
    });
    this.tables = h("div", {id: `${this.id}-table`, hidden: true});
    this.note = h("p", {class: "soft small"});
    this.holes = h("p", {class: "holes small", hidden: true});
    this.stages = whole ? h("div", {class: "stages"}) : null;
    this.breakdown = whole ? new Breakdown(app, name) : null;
    this.files = h("div", {class: "files"});
    const open = () => {
      this.opened = !this.opened;
      this.show(this.curves, this.model);
    };
    this.opener = button("", open, {class: "plain"});
    this.body = h(
      "div",
      {id: `${this.id}-body`},
      this.figures,
      h(
        "div",
        {class: whole ? "model-body" : null},
        h("div", null, this.chart.element, this.stageChart.element, this.note),
        this.stages,
      ),
      this.tables,
      this.breakdown?.element,
      this.files,
    );
    this.element = h(
      "section",
      {class: "card model", "aria-labelledby": this.id},
      h("div", {class: "card-head"}, h("h2", {id: this.id}, name), h("div", null, this.opener, this.toggle)),
      this.holes,
      this.body,
    );
  }

  show(curves, model) {
    [this.curves, this.model] = [curves, model];
    const idle = !model.answered,
      closed = idle && !this.opened,
      missing = sum(model.missing);
    this.body.hidden = this.toggle.hidden = closed;
    this.opener.hidden = !idle;
    this.opener.textContent = closed ? "No request in this time: show" : "Hide";
    this.opener.setAttribute("aria-expanded", String(!closed));
    replace(
      this.holes,
      missing
        ? [
            h(
              "b",
              null,
              `${count(missing)} of ${count(missing + model.windows)} reports (${share(missing, missing + model.windows)}) missing`,
            ),
            `, from ${named(
              model.missing_devices.map(([device, number]) => `${device} (${count(number)})`),
              model.missing_devices_count,
            )}. The charts are hatched there.`,
          ]
        : "",
    );
    this.holes.hidden = !missing;
    if (closed) return;
    const figure = (name, value, kind) => h("div", {class: kind}, h("dt", null, name), h("dd", null, value)),
      {p99_target_ms, within_target} = model;
    replace(
      this.figures,
      figure("p50", ms(model.p50_ms)),
      figure("p95", ms(model.p95_ms)),
      figure("p99", ms(model.p99_ms)),
      figure("slowest", ms(model.max_ms)),
      figure("answered", count(model.answered)),
      figure("errors", share(model.errors, model.requests || model.answered)),
      p99_target_ms && !idle
        ? figure(
            `within ${ms(p99_target_ms)}, target 99 %`,
            `${(100 * within_target).toFixed(2)} %`,
            within_target < 0.99 ? "missed" : null,
          )
        : null,
    );
    replace(
      this.note,
      model.left_out.length
        ? `${model.left_out.length} older versions are not drawn: choose one above (${model.left_out.slice(-6).join(", ")}).`
        : "",
    );
    this.chart.show(curves, model);
    if (!this.tables.hidden) this.drawTables();
    const {app, name} = this,
      of = {model: name, ...app.view.own};
    replace(
      this.files,
      app.exports("latency", of, `${name} over time`, "Latency"),
      app.exports(
        "query",
        {...of, by: "model,version", step: `${curves.step_ms / 60_000}m`, buckets: "1"},
        `${name}'s histograms`,
        "Histograms",
      ),
      app.exports("stages", of, `${name}'s stages`, "Stages"),
    );
  }

  showStages(curves, model) {
    this.stageChart.show(curves, model);
    if (this.stages)
      replace(
        this.stages,
        stageTable(
          model?.versions ?? [],
          (version) => this.model?.versions.find((each) => each.version === version)?.series ?? 0,
        ),
      );
  }

  flip() {
    this.tables.hidden = !this.tables.hidden;
    this.toggle.setAttribute("aria-expanded", String(!this.tables.hidden));
    this.toggle.textContent = this.tables.hidden ? "Show as tables" : "Hide the tables";
    if (!this.tables.hidden) this.drawTables();
  }

  drawTables() {
    const {curves, model} = this,
      rows = [];
    for (let step = curves.steps - 1; step >= 0; step--) {
      if (model.missing[step])
        rows.push([momentOf(curves, step), "", "–", "–", "–", `${count(model.missing[step])} reports missing`]);
      for (const each of model.versions)
        if (each.counts[step])
          rows.push([
            momentOf(curves, step),
            each.version,
            digits(each.p50[step]),
            digits(each.p95[step]),
            digits(each.p99[step]),
            count(each.counts[step]),
          ]);
    }
    const bands = new Map();
    for (const [, row, number] of model.heat.cells) bands.set(row, (bands.get(row) ?? 0) + number);
    const edge = (row) => digits(2 ** (row / model.heat.rows_an_octave));
    replace(
      this.tables,
      table(
        "Latency by version, newest first",
        [["time"], ["version"], ["p50 ms", "n"], ["p95", "n"], ["p99", "n"], ["requests", "n"]],
        rows,
      ),
      table(
        "Requests by latency, whole time",
        [["from, ms"], ["to, ms", "n"], ["requests", "n"]],
        [...bands].sort(([a], [b]) => a - b).map(([row, number]) => [edge(row), edge(row + 1), count(number)]),
      ),
    );
  }
}
