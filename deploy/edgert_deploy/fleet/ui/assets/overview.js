// The first page: how many, where, how fast, what needs a look, what happened, how far rollouts are.

import {code, empty, h, replace} from "./dom.js";
import {count} from "./format.js";
import {Feed} from "./feed.js";
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
    this.map = new FleetMap((site, device) => app.go(app.deviceLink(site, device)));
    this.models = new ModelCards(app);
    this.attention = h("div");
    this.events = h("div");
    this.rollouts = h("div");
    const card = (id, title, link, body) => h("section", {class: "card", "aria-labelledby": id}, h("div", {class: "card-head"}, h("h2", {id}, title), this.links[id] = h("a", {href: link}, "All")), body);
    this.links = {};
    this.element = h("div", {class: "overview"}, h("h1", {class: "hidden"}, "The fleet now"), this.tally,
      h("div", {class: "two"}, h("section", {class: "card map", "aria-labelledby": "map"}, h("div", {class: "card-head"}, h("h2", {id: "map"}, "Fleet by site"), this.links.map = h("a", {href: "/devices"}, "All devices")), this.map.element),
        card("attention", "Needs a look", "/devices", this.attention)),
      this.models.element,
      h("div", {class: "two even"}, card("events", "Events", "/events", this.events), card("rollouts", "Rollouts", "/rollouts", this.rollouts)));
    this.feeds = [
      new Feed(() => app.ask("latency"), (said) => this.models.show(said), this.models.list, 3000),
      new Feed(() => app.ask("stages"), ({now}) => this.models.showStages(now), h("div"), 3000),
      new Feed(() => app.ask("devices", {state: "attention"}), (said) => this.showAttention(said), this.attention),
      new Feed(() => app.ask("events"), ({events}) => replace(this.events, eventList(app, events.slice(0, FEW))), this.events),
      new Feed(() => app.ask("rollouts"), ({rollouts}) => replace(this.rollouts, rolloutList(app, rollouts.slice(0, 3))), this.rollouts),
    ];
  }

  changed() {
    const {app} = this, {counts, sites, per_s} = app.fleet;
    const devices = Object.values(counts).reduce((sum, each) => sum + each, 0);
    const tile = (name, value, words, href) => h("div", null, h("dt", null, name), h("dd", null, href ? h("a", {href, "data-key": name}, value) : value, words ? h("span", {class: "soft"}, ` ${words}`) : null));
    replace(this.tally, tile("answering", count(online(counts)), `of ${count(devices)}`, app.link("/devices")),
      tile("requests a second", per_s === null ? "–" : per_s >= 100 ? count(per_s) : per_s.toFixed(1)),
      ["alarmed", "behind", "stale", "lost"].map((state) => h("div", {class: counts[state] ? `has ${state}` : "none"}, h("dt", null, badge(state)), h("dd", null, h("a", {href: app.link("/devices", {state}), "data-key": state}, count(counts[state] ?? 0))))));
    this.map.show(app.fleet, (site) => app.link("/", {site}), app.filtered ? [
      "No device fits", "Take a filter away: a device fits where it reports the model, or the version, that is chosen.",
    ] : [
      "No device was heard of yet",
      h("span", null, "Give a device this broker: ", code("edgert bootstrap DEVICE --broker HOST"), "."),
      "It shows up here as soon as it connects; its latency follows within a minute.",
    ]);
    this.links.map.href = app.link("/devices");
    this.links.attention.href = app.link("/devices", {state: "attention"});
    this.links.events.href = app.link("/events");
    this.links.rollouts.href = app.link("/rollouts");
  }

  showAttention({devices, total}) {
    replace(this.attention, devices.length ? [deviceTable(this.app, devices.slice(0, FEW), {short: true}), total > FEW ? h("p", {class: "soft small"}, `and ${count(total - FEW)} more`) : null]
      : this.app.fleet.sites.size ? empty("Everything reports", "Devices that become stale, fall behind or raise an alarm are listed here.") : empty("No device, no trouble", "Devices that become stale, fall behind or raise an alarm are listed here."));
  }

  refresh(now) { this.feeds.forEach((feed) => feed.poke(now)); }
  close() { this.feeds.forEach((feed) => feed.close()); }
}
