// The page: its address selects the view, and one stream of events delivers the data.

import {button, empty, h, replace, select} from "./dom.js";
import {Feed} from "./feed.js";
import {ago, moment} from "./format.js";
import {Overview} from "./overview.js";
import {DevicePage, Devices, Events, RolloutsPage} from "./lists.js";
import {Period, fixed, periodTools} from "./period.js";
import {BREAKDOWNS} from "./breakdown.js";

const PAGES = {
  "": ["Overview", Overview],
  devices: ["Devices", Devices],
  events: ["Events", Events],
  rollouts: ["Rollouts", RolloutsPage],
};
const FILTERS = {site: "All sites", model: "All models", version: "All versions", profile: "All profiles"};
const STORE_OLD_MS = 150_000; // two and a half windows of 60 s
const KEPT = [...Object.keys(FILTERS), "period", "from", "to", "by"];

class App {
  constructor() {
    this.main = document.querySelector("#main");
    this.fleet = {sites: new Map(), counts: {}, per_s: 0, words: {}, revisions: {}, at_ms: Date.now(), heard: false};
    this.skew_ms = 0;
    addEventListener("popstate", () => this.open());
    document.addEventListener("click", (event) => this.clicked(event));
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.view?.refresh();
    });
    setInterval(() => {
      if (!document.hidden) this.view?.refresh();
    }, 20_000);
    this.open(true);
  }

  get params() {
    return new URLSearchParams(location.search);
  }
  get period() {
    return new Period(this.params);
  }
  get by() {
    return BREAKDOWNS[this.params.get("by")] ? this.params.get("by") : (this.compared ?? "device");
  }
  get filtered() {
    return Object.keys(FILTERS).some((name) => this.params.get(name));
  }
  get now_ms() {
    return Date.now() + this.skew_ms;
  }

  // The parameters of the address that every page has, and `more`.
  query(more = {}) {
    const kept = new URLSearchParams(
      KEPT.filter((name) => this.params.get(name)).map((name) => [name, this.params.get(name)]),
    );
    for (const [name, value] of Object.entries(more)) value ? kept.set(name, value) : kept.delete(name);
    const text = kept.toString();
    return text ? `?${text}` : "";
  }

  link(path, more) {
    return path + this.query(more);
  }
  deviceLink(site, device) {
    return this.link(`/device/${encodeURIComponent(site)}/${encodeURIComponent(device)}`);
  }

  async ask(what, more = {}) {
    const response = await fetch(`/api/v1/${what}${this.query(more)}`);
    const value = response.headers.get("Content-Type")?.startsWith("application/json")
      ? await response.json()
      : {error: {message: await response.text()}};
    if (value.error) throw new Error(value.error.message);
    return value;
  }

  // A Feed of the answers of `ask`. `more` may be a function that returns the parameters.
  feed(what, more, show, container, every_ms) {
    return new Feed(() => this.ask(what, typeof more === "function" ? more() : more), show, container, every_ms);
  }

  // Links to the same answer as files. `about` describes them to a screen reader.
  exports(what, more, about, title = "") {
    const file = (format) =>
      h(
        "a",
        {
          href: `/api/v1/${what}${this.query({...more, format})}`,
          download: `edgert-${what}.${format}`,
          "aria-label": `${about} as ${format.toUpperCase()}`,
          "data-key": `${about}-${what}-${format}`,
        },
        format.toUpperCase(),
      );
    return h("span", {class: "export small"}, title, " ", file("csv"), " ", file("json"));
  }

  zoom(since_ms, until_ms) {
    this.set(fixed(since_ms, until_ms));
  }

  go(address, {quiet = false, replaces = false} = {}) {
    history[replaces ? "replaceState" : "pushState"](null, "", address);
    this.open(false, quiet);
  }

  // Change parameters of the address, and keep the focus.
  set(words, {replaces = false} = {}) {
    const params = this.params;
    for (const [name, value] of Object.entries(words)) value ? params.set(name, value) : params.delete(name);
    if (!("page" in words)) params.delete("page");
    this.go(`${location.pathname}${params.size ? `?${params}` : ""}`, {quiet: true, replaces});
  }

  clicked(event) {
    const link = event.target.closest?.("a[href]");
    if (
      !link ||
      event.defaultPrevented ||
      event.button ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      link.origin !== location.origin ||
      link.hash ||
      link.download
    )
      return;
    event.preventDefault();
    this.go(link.getAttribute("href") === "/" ? this.link("/") : link.href);
  }

  open(first = false, quiet = false) {
    const [name, site, device] = location.pathname.split("/").slice(1).map(decodeURIComponent);
    const key = location.pathname;
    this.drawNav(name);
    this.drawFilters();
    this.drawPeriod();
    this.listen();
    if (key !== this.key) {
      this.key = key;
      this.view?.close();
      const View = name === "device" ? DevicePage : PAGES[name]?.[1];
      this.datesOpen = false;
      this.view = View ? new View(this, site, device) : new Nowhere();
      this.main.replaceChildren(this.view.element);
      document.title = `${this.view.title} · EdgeRT fleet`;
      if (!first && !quiet) {
        this.main.focus({preventScroll: true});
        scrollTo(0, 0);
      }
      if (this.fleet.heard) this.view.changed();
    } else if (this.fleet.heard) this.view.changed();
    this.view.refresh(true);
  }

  drawNav(here) {
    replace(
      document.querySelector("#nav"),
      h(
        "ul",
        null,
        Object.entries(PAGES).map(([name, [title]]) =>
          h(
            "li",
            null,
            h(
              "a",
              {href: this.link(`/${name}`), "aria-current": name === here ? "page" : null, "data-key": `nav-${name}`},
              title,
            ),
          ),
        ),
      ),
    );
  }

  drawFilters() {
    const form = document.querySelector("#filters"),
      words = this.fleet.words;
    const page = location.pathname.split("/")[1];
    form.hidden = page === "rollouts";
    // A device has one site and one profile; they stay in the address, so that the way back keeps them.
    const selects = Object.entries(FILTERS)
      .filter(([name]) => page !== "device" || name === "model" || name === "version")
      .map(([name, all]) => {
        const chosen = this.params.get(name) ?? "";
        const offered = [...new Set([...(words[name] ?? []), ...(chosen ? [chosen] : [])])];
        const props = {"data-key": `filter-${name}`, onchange: (event) => this.set({[name]: event.target.value})};
        return select(name, chosen, [["", all], ...offered.map((word) => [word, word])], props, chosen ? "set" : null);
      });
    const clear = this.filtered
      ? button("Clear", () => this.set(Object.fromEntries(Object.keys(FILTERS).map((name) => [name, ""]))), {
          class: "plain",
          "data-key": "clear",
        })
      : null;
    const here = page + location.search,
      drawn = JSON.stringify([words, here]);
    // Do not redraw a list that the user has open when a device is added.
    if (
      drawn === this.drawnFilters ||
      (here === this.drawnFor && form.contains(document.activeElement) && document.activeElement.matches("select"))
    )
      return;
    [this.drawnFilters, this.drawnFor] = [drawn, here];
    const chosen = selects.filter((each) => each.classList.contains("set")).length;
    // On a phone, only the chosen filters show until the button is pressed.
    const more = button(
      chosen ? `Filters (${chosen})` : "Filters",
      (event) => event.target.setAttribute("aria-expanded", String(form.classList.toggle("open"))),
      {class: "phone", "data-key": "filters", "aria-expanded": String(form.classList.contains("open"))},
    );
    replace(form, more, selects, clear);
  }

  drawPeriod() {
    const place = document.querySelector("#period");
    place.hidden = ["rollouts", "devices"].includes(location.pathname.split("/")[1]);
    replace(place, periodTools(this));
  }

  // --- the stream -------------------------------------------------------------------------

  listen() {
    const words = Object.keys(FILTERS)
      .filter((name) => this.params.get(name))
      .map((name) => [name, this.params.get(name)]);
    const address = `/api/v1/live?${new URLSearchParams(words)}`;
    if (address === this.address) return;
    this.address = address;
    this.source?.close();
    const source = (this.source = new EventSource(address));
    source.addEventListener("open", () => this.pulse("live"));
    source.addEventListener("error", () => {
      this.pulse("lost");
      // After a refusal, the browser does not connect an event source again, so this does.
      if (source.readyState === EventSource.CLOSED)
        setTimeout(() => {
          if (this.source === source) {
            this.address = null;
            this.listen();
          }
        }, 5000);
    });
    source.addEventListener("fleet", (event) => this.take(JSON.parse(event.data), true));
    source.addEventListener("change", (event) => this.take(JSON.parse(event.data), false));
  }

  take(said, whole) {
    const before = this.fleet.revisions;
    this.skew_ms = said.at_ms - Date.now();
    const {sites, changed, ...rest} = said;
    Object.assign(this.fleet, rest, {heard: true});
    if (whole) this.fleet.sites = new Map(sites.map((site) => [site.site, site]));
    const bySite = Map.groupBy ? Map.groupBy(changed ?? [], ([site]) => site) : grouped(changed ?? []);
    for (const [name, changes] of bySite) {
      const site = this.fleet.sites.get(name),
        letters = [...site.states];
      for (const [, number, letter] of changes) letters[number] = letter;
      this.fleet.sites.set(name, {...site, states: letters.join("")});
    }
    this.drawFilters();
    this.drawTrouble();
    this.view?.changed();
    if (JSON.stringify(before) !== JSON.stringify(said.revisions) || whole || changed?.length) this.view?.refresh();
  }

  // If the store gets no new reports, every curve is old, although the broker is live.
  noteStore(newest_ms) {
    this.newest_ms = newest_ms;
    this.drawTrouble();
    this.pulse(this.heartbeat);
  }

  get storeAge() {
    return this.newest_ms && this.now_ms - this.newest_ms > STORE_OLD_MS ? ago(this.newest_ms, this.now_ms) : "";
  }

  drawTrouble() {
    const place = document.querySelector("#trouble"),
      {trouble, refused, last_refusal} = this.fleet,
      {storeAge} = this;
    const words =
      storeAge && !trouble
        ? [
            h("b", null, `The newest report in the store came ${storeAge}: curves and events end there.`),
            "Check that edgert fleet record runs and reaches the broker and the store.",
          ]
        : trouble
          ? [h("b", null, "The broker cannot be reached: the states are those of the last messages."), trouble]
          : refused
            ? `${refused} ${refused === 1 ? "message was" : "messages were"} not understood; the last: ${last_refusal}`
            : "";
    const said = trouble || storeAge || String(refused);
    if (said === this.troubleSaid) return;
    this.troubleSaid = said;
    place.hidden = !words;
    replace(place, words);
  }

  pulse(state) {
    const pulse = document.querySelector("#pulse"),
      old = this.storeAge;
    if (!state) return; // the stream has not begun
    this.heartbeat = state;
    pulse.className = `pulse ${old ? "lost" : state}`;
    pulse.textContent = state === "lost" ? "connection lost, trying again" : old ? `live, curves end ${old}` : "live";
    pulse.title = this.newest_ms ? `the newest report in the store: ${moment(this.newest_ms)}` : "";
  }
}

class Nowhere {
  title = "Not found";
  element = h(
    "div",
    null,
    h("h1", null, "There is no such page"),
    empty("Check the address", h("a", {href: "/"}, "Go to the overview")),
  );
  changed() {}
  refresh() {}
  close() {}
}

function grouped(changes) {
  const found = new Map();
  for (const change of changes) found.set(change[0], [...(found.get(change[0]) ?? []), change]);
  return found;
}

new App();
