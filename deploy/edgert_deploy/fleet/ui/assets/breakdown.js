// The slow devices, profiles or sites of a model: each beside the rest of the model, the slowest first.

import {button, h, replace, table} from "./dom.js";
import {count, digits, share} from "./format.js";

export const BREAKDOWNS = {device: "devices", profile: "profiles", site: "sites"};
const FEW = 8;
const FAR = 2; // times the rest: the factor that makes a device slow

export class Breakdown {
  constructor(app, name) {
    Object.assign(this, {app, name, all: false});
    this.tools = h("div", {class: "card-head"});
    this.list = h("div");
    this.element = h("div", {class: "breakdown"}, this.tools, this.list);
  }

  // `model` is undefined if it answered no request; `by` is the kind of its groups.
  show(model, by) {
    Object.assign(this, {model, by});
    const {app, name} = this;
    replace(
      this.tools,
      h("h3", null, "Slow groups"),
      h(
        "div",
        {class: "segments", role: "group", "aria-label": `${name} by`},
        Object.entries(BREAKDOWNS).map(([key, title]) =>
          button(
            title,
            () => {
              app.set({by: key});
              this.show(this.model, this.by);
            },
            {"data-key": `by-${name}-${key}`, "aria-pressed": String(key === app.by)},
          ),
        ),
      ),
      app.exports("breakdown", {by: app.by, model: name}, `${name} by ${app.by}`),
    );
    const groups = model?.groups ?? [];
    if (groups.length < 2)
      return replace(
        this.list,
        h(
          "p",
          {class: "soft small"},
          groups.length
            ? `Only one ${by} answered requests, so there is nothing to compare.`
            : "No request was answered in this time.",
        ),
      );
    const shown = this.all ? groups : groups.slice(0, FEW),
      targeted = groups[0].within_target !== undefined;
    const columns = [
      [by],
      ["p99 ms", "n"],
      ["the rest", "n"],
      ["times", "n"],
      ...(targeted ? [["in target", "n"]] : []),
      ["p50", "n"],
      ["requests", "n"],
      ["errors", "n"],
      ["missing", "n"],
    ];
    replace(
      this.list,
      table(
        `p99 compared with all other ${BREAKDOWNS[by]}, the slowest first`,
        columns,
        shown.map((each) => [
          this.link(by, each),
          digits(each.p99_ms),
          digits(each.rest_p99_ms),
          h(
            "span",
            {class: each.distance > FAR ? "far" : null},
            each.distance === null ? "–" : each.distance.toFixed(1),
          ),
          ...(targeted ? [each.within_target === null ? "–" : share(each.within_target, 1)] : []),
          digits(each.p50_ms),
          count(each.answered),
          share(each.errors, each.answered + each.errors),
          each.missing ? count(each.missing) : "0",
        ]),
      ),
      this.more(groups.length, model.groups_count),
    );
  }

  link(by, each) {
    if (by !== "device")
      return h("a", {href: this.app.link("/", {[by]: each[by]}), "data-key": `${this.name}/${each[by]}`}, each[by]);
    return [
      h(
        "a",
        {href: this.app.deviceLink(each.site, each.device), "data-key": `${this.name}/${each.site}/${each.device}`},
        each.device,
      ),
      h("span", {class: "soft small block"}, `${each.site} · ${each.profile}`),
    ];
  }

  more(given, total) {
    if (total <= FEW) return null;
    const words =
      this.all && total > given ? `The table shows the ${given} slowest of ${count(total)}; the CSV file has all.` : "";
    return h(
      "p",
      {class: "small"},
      button(
        this.all ? "Show few" : `Show ${Math.min(given, total)} of ${count(total)}`,
        () => {
          this.all = !this.all;
          this.show(this.model, this.by);
        },
        {class: "plain", "data-key": `all-${this.name}`},
      ),
      h("span", {class: "soft"}, words),
    );
  }
}
