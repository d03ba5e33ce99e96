// The first page: the number of devices, the map, latencies, problems, events, rollouts.

import {code, empty, h, replace} from "./dom.js";
import {count} from "./format.js";
import {FleetMap} from "./map.js";
import {ModelCards} from "./model.js";
import {deviceTable, eventList, rolloutList} from "./lists.js";
import {badge, online} from "./states.js";

const FEW = 6;

export class Overview {
  title = "Overview";

  constructor(app) {
    this.app = app;
    this.tally = h("dl", {class: "tally"});
    this.map = new FleetMap(
      (site, device) => app.deviceLink(site, device),
      (address) => app.go(address),
    );
    this.models = new ModelCards(app);
    this.compared = h("div"); // the reason why devices cannot be compared
    this.attention = h("div");
    this.events = h("div");
    this.rollouts = h("div");
    this.links = {};
    this.files = {};
    const card = (id, title, link, body) =>
      h(
        "section",
        {class: "card", "aria-labelledby": id},
        h(
          "div",
          {class: "card-head"},
          h("h2", {id}, title),
          h("span", null, (this.files[id] = h("span")), " ", (this.links[id] = h("a", {href: link}, "All"))),
        ),
        body,
      );
    this.element = h(
      "div",
      {class: "overview"},
      h("h1", {class: "hidden"}, "The fleet now"),
      this.tally,
      h(
        "div",
        {class: "two"},
        h(
          "section",
          {class: "card map", "aria-labelledby": "map"},
          h(
            "div",
            {class: "card-head"},
            h("h2", {id: "map"}, "Fleet by site"),
            (this.links.map = h("a", {href: "/devices"}, "All devices")),
          ),
          this.map.element,
        ),
        card("attention", "Needs attention", "/devices", this.attention),
      ),
      h("div", {class: "cards"}, this.models.element, this.compared),
      h(
        "div",
        {class: "two even"},
        card("events", "Events", "/events", this.events),
        card("rollouts", "Rollouts", "/rollouts", this.rollouts),
      ),
    );
    this.feeds = [
      app.feed("latency", {}, (said) => this.showLatency(said), this.models.list, 3000),
      app.feed("devices", {state: "attention"}, (said) => this.showAttention(said), this.attention),
      app.feed("events", {}, ({events}) => replace(this.events, eventList(app, events.slice(0, FEW))), this.events),
      app.feed(
        "rollouts",
        {},
        ({rollouts}) => replace(this.rollouts, rolloutList(app, rollouts.slice(0, 3))),
        this.rollouts,
      ),
    ];
    // Request these after the curves: they cost more, and users look at the curves first.
    this.later = [
      app.feed("stages", {}, (said) => this.models.showStages(said), h("div"), 20_000),
      app.feed(
        "breakdown",
        {},
        (said) => {
          app.compared = said.by;
          this.compared.replaceChildren();
          this.models.showGroups(said);
        },
        this.compared,
        20_000,
      ),
    ];
  }

  changed() {
    const {app} = this,
      {counts, per_s} = app.fleet;
    const devices = Object.values(counts).reduce((sum, each) => sum + each, 0);
    const tile = (name, value, words, href) =>
      h(
        "div",
        null,
        h("dt", null, name),
        h(
          "dd",
          null,
          href ? h("a", {href, "data-key": name}, value) : value,
          words ? h("span", {class: "soft"}, ` ${words}`) : null,
        ),
      );
    replace(
      this.tally,
      tile("answering", count(online(counts)), `of ${count(devices)}`, app.link("/devices")),
      tile("requests a second", per_s === null ? "–" : per_s >= 100 ? count(per_s) : per_s.toFixed(1)),
      ["lost", "stale", "alarmed", "slow", "behind"].map((state) =>
        h(
          "div",
          {class: counts[state] ? `has ${state}` : "none"},
          h("dt", null, badge(state)),
          h("dd", null, h("a", {href: app.link("/devices", {state}), "data-key": state}, count(counts[state] ?? 0))),
        ),
      ),
    );
    this.map.show(
      app.fleet,
      (site) => app.link("/", {site}),
      app.filtered
        ? ["No device matches", "Remove a filter. The page shows a device if it reports the chosen model and version."]
        : [
            "No device has connected yet",
            h("span", null, "Give a device this broker: ", code("edgert bootstrap DEVICE --broker HOST"), "."),
            "The device appears here as soon as it connects. Its latency follows within a minute.",
          ],
    );
    replace(this.files.attention, app.exports("devices", {state: "attention"}, "devices that need attention"));
    replace(this.files.events, app.exports("events", {}, "the events"));
    replace(this.files.rollouts, app.exports("rollouts", {}, "the rollouts"));
    this.links.map.href = app.link("/devices");
    this.links.attention.href = app.link("/devices", {state: "attention"});
    this.links.events.href = app.link("/events");
    this.links.rollouts.href = app.link("/rollouts");
  }

  // During a rollout, hundreds of devices are behind: they share one line, below the few that are lost.
  showAttention({devices, total}) {
    const {app} = this,
      {behind = 0} = app.fleet.counts,
      buried = behind > FEW;
    const shown = devices.filter(({state}) => !buried || state !== "behind").slice(0, FEW),
      more = total - (buried ? behind : 0) - shown.length;
    replace(
      this.attention,
      devices.length
        ? [
            shown.length ? deviceTable(app, shown, {short: true}) : null,
            more > 0 ? h("p", {class: "soft small"}, `and ${count(more)} more`) : null,
            buried
              ? h(
                  "p",
                  {class: "small summary"},
                  badge("behind"),
                  " ",
                  h(
                    "a",
                    {href: app.link("/devices", {state: "behind"}), "data-key": "all-behind"},
                    `${count(behind)} devices`,
                  ),
                  " with an older version or late reports",
                )
              : null,
          ]
        : app.fleet.sites.size
          ? empty(
              "All devices report",
              "Devices that become stale, slow, fall behind or raise an alarm are listed here.",
            )
          : empty(
              "No device needs attention",
              "Devices that become stale, slow, fall behind or raise an alarm are listed here.",
            ),
    );
  }

  showLatency(said) {
    this.models.show(said);
    this.later.forEach((feed) => feed.poke(this.asksAnew));
    this.asksAnew = false;
  }

  refresh(now) {
    this.asksAnew ||= now;
    this.feeds.forEach((feed) => feed.poke(now));
  }

  close() {
    [...this.feeds, ...this.later].forEach((feed) => feed.close());
  }
}
