// The lists: devices with the page of one device, events, rollouts.

import {button, code, empty, h, head, itemwise, replace, select, table} from "./dom.js";
import {ago, bytes, count, digits, lasting, moment} from "./format.js";
import {ModelCards} from "./model.js";
import {STATES, badge} from "./states.js";

const SORTS = {state: "worst first", device: "by name", p99: "slowest first", since: "newest change first"};

const when = (app, at_ms) =>
  at_ms ? h("time", {datetime: new Date(at_ms).toISOString(), title: moment(at_ms)}, ago(at_ms, app.now_ms)) : "–";

export function deviceTable(app, devices, {short = false} = {}) {
  const heading = (words, type) => h("th", {scope: "col", class: type}, words);
  return h(
    "div",
    {class: "scroll", tabindex: "0", role: "region", "aria-label": short ? "Devices that need attention" : "Devices"},
    h(
      "table",
      {class: "devices"},
      head(
        heading("device"),
        heading("state"),
        short ? null : heading("models", "wide"),
        short ? null : heading("p99 ms", "n"),
        heading(short ? "since" : "since, or heard"),
      ),
      h(
        "tbody",
        null,
        itemwise(
          devices,
          (each) =>
            h(
              "tr",
              null,
              h(
                "th",
                {scope: "row"},
                h(
                  "a",
                  {href: app.deviceLink(each.site, each.device), "data-key": `${each.site}/${each.device}`},
                  each.device,
                ),
                h("span", {class: "soft small block"}, each.site),
              ),
              h("td", null, badge(each.state), each.why ? h("span", {class: "soft small block why"}, each.why) : null),
              short
                ? null
                : h(
                    "td",
                    {class: "wide"},
                    each.models.length
                      ? each.models.map(({model, version}) =>
                          h("span", {class: "chip"}, model, " ", h("b", null, version)),
                        )
                      : h("span", {class: "soft"}, "none"),
                  ),
              short
                ? null
                : h(
                    "td",
                    {class: "n"},
                    each.models.length
                      ? digits(
                          each.models.reduce(
                            (most, {p99_ms}) => (p99_ms === null ? most : Math.max(most, p99_ms)),
                            null,
                          ),
                        )
                      : "–",
                  ),
              h("td", {class: "since"}, when(app, each.since_ms)),
            ),
          (words) => h("tr", null, h("td", {colspan: "5"}, words)),
        ),
      ),
    ),
  );
}

export function eventList(app, events) {
  if (!events.length)
    return empty(
      "No event in this time",
      "Alarms, crashes, new versions and rollbacks appear here when devices report them.",
    );
  const bad = /alarm_raised|_alarm$|crashed|quarantined|no_room|degraded|rolled_back/;
  return h(
    "ol",
    {class: "events"},
    itemwise(events, (each) => {
      const told = [
        each.model && `${each.model}${each.model_version ? ` ${each.model_version}` : ""}`,
        each.alarm && `${each.alarm} ${digits(each.value)}, limit ${digits(each.limit)}`,
        each.reason,
      ].filter(Boolean);
      return h(
        "li",
        null,
        h("span", {class: `kind ${bad.test(each.event) ? "bad" : ""}`}, String(each.event).replaceAll("_", " ")),
        h(
          "a",
          {
            href: app.deviceLink(each.site, each.device),
            "data-key": `${each.site}/${each.device}/${each.boot}/${each.seq}`,
          },
          `${each.site}/${each.device}`,
        ),
        h("span", {class: "told"}, told.join(" · ")),
        h("span", {class: "soft small"}, when(app, each.at_ms)),
      );
    }),
  );
}

export function rolloutList(app, rollouts, {full = false} = {}) {
  if (!rollouts.length)
    return empty(
      "No rollout on this host yet",
      h(
        "span",
        null,
        code("edgert deploy BUNDLE all --canary 1 --wave 10%,100%"),
        " starts a rollout; its progress appears here.",
      ),
    );
  return h(
    "ul",
    {class: "rollouts"},
    itemwise(rollouts, (each) => {
      const wave = each.waves.findIndex(({left, failed}) => left || failed);
      const total = `${each.devices} ${each.devices === 1 ? "device" : "devices"}`;
      const failed = each.failed_count ? `, ${each.failed_count} failed` : "";
      const words = `${each.took} of ${total} kept it${failed}`;
      const waves = wave < 0 ? `${each.waves.length} waves` : `wave ${wave + 1} of ${each.waves.length}`;
      return h(
        "li",
        null,
        h(
          "div",
          {class: "card-head"},
          h(full ? "h2" : "h3", null, `${each.model} ${each.version}`),
          h("span", {class: `pill ${each.state.replace(" ", "-")}`}, each.state),
        ),
        h(
          "div",
          {class: "progress", role: "img", "aria-label": `${words}, in ${each.waves.length} waves`},
          each.waves.map(({devices, took, failed, left}) =>
            h(
              "span",
              {class: "wave", style: {"flex-grow": String(devices)}},
              [
                ["took", took],
                ["failed", failed],
                ["left", left],
              ].map(([name, number]) => (number ? h("i", {class: name, style: {"flex-grow": String(number)}}) : null)),
            ),
          ),
        ),
        h(
          "p",
          {class: "small"},
          words,
          h(
            "span",
            {class: "soft"},
            `; ${each.waves.length === 1 ? "one wave" : waves}, started `,
            when(app, each.started_ms),
          ),
        ),
        each.reason ? h("p", {class: "small"}, each.reason) : null,
        full && each.failed.length
          ? table(
              `Failed devices${each.failed_count > each.failed.length ? `, the first ${each.failed.length}` : ""}`,
              [["device"], ["result"], ["why"]],
              each.failed.map(({device, result, error}) => [device, result, error ? error.message : "–"]),
            )
          : null,
        full
          ? h(
              "p",
              {class: "small soft"},
              ["stopped", "cut off", "done"].includes(each.state) && each.took < each.devices
                ? h("span", null, "Continue: ", code(`edgert rollout resume ${each.id}`))
                : code(each.id),
            )
          : null,
      );
    }),
  );
}

export function channelTable(channels) {
  if (!channels.length)
    return empty(
      "No device follows a channel",
      h("span", null, code("edgert bootstrap --follow"), " lets a device fetch releases from a registry itself."),
    );
  return h(
    "div",
    null,
    table(
      "Releases of channels, as devices report them",
      [
        ["channel"],
        ["release"],
        ["kept", "n"],
        ["on trial", "n"],
        ["rolled back", "n"],
        ["rolled back by command", "n"],
        ["stale", "n"],
      ],
      channels.map(({channel, model, version, kept, on_trial, rolled_back, rolled_back_by_command, stale}) => [
        channel,
        `${model} ${version}`,
        count(kept),
        count(on_trial),
        count(rolled_back),
        count(rolled_back_by_command),
        count(stale),
      ]),
    ),
    channels
      .filter(({failed}) => failed.length)
      .map(({model, version, rolled_back, failed}) =>
        table(
          `Devices that rolled back or refused ${model} ${version}${rolled_back > failed.length ? `, the first ${failed.length}` : ""}`,
          [["device"], ["why"]],
          failed.map(({site, device, reason}) => [`${site}/${device}`, reason || "–"]),
        ),
      ),
  );
}

class Page {
  changed() {}
  refresh(now) {
    this.feeds.forEach((feed) => feed.poke(now));
  }
  close() {
    this.feeds.forEach((feed) => feed.close());
  }
}

export class Devices extends Page {
  title = "Devices";

  constructor(app) {
    super();
    this.app = app;
    this.list = h("div");
    this.tools = h("form", {
      class: "tools",
      "aria-label": "Which devices",
      onsubmit: (event) => event.preventDefault(),
    });
    this.pager = h("nav", {class: "pager", "aria-label": "Pages of the list"});
    this.status = h("p", {class: "soft", role: "status"});
    this.element = h(
      "div",
      null,
      h("h1", null, "Devices"),
      h("div", {class: "card"}, this.tools, this.status, this.list, this.pager),
    );
    this.words = () => Object.fromEntries(["state", "q", "sort"].map((name) => [name, app.params.get(name)]));
    this.feeds = [
      app.feed(
        "devices",
        () => ({...this.words(), page: app.params.get("page")}),
        (said) => this.show(said),
        this.list,
      ),
    ];
    this.drawTools();
  }

  changed() {
    this.drawTools();
  }

  drawTools() {
    const {app} = this,
      state = app.params.get("state") ?? "",
      {counts} = app.fleet;
    const states = {
      "": "all states",
      attention: "needs attention",
      ...Object.fromEntries(Object.values(STATES).map(({name}) => [name, `${name} (${count(counts[name] ?? 0)})`])),
    };
    const drawn = JSON.stringify([states, app.params.toString()]);
    if (
      drawn === this.drawn ||
      (this.tools.contains(document.activeElement) && document.activeElement.matches("input"))
    )
      return;
    this.drawn = drawn;
    const choice = (key, label, options, chosen) =>
      select(label, chosen, Object.entries(options), {
        "data-key": key,
        onchange: (event) => app.set({[key]: event.target.value}),
      });
    replace(
      this.tools,
      h(
        "label",
        {class: "search"},
        h("span", {class: "hidden"}, "Part of a name"),
        h("input", {
          type: "search",
          placeholder: "Part of a name",
          value: app.params.get("q") ?? "",
          "data-key": "q",
          oninput: (event) => this.search(event.target.value),
        }),
      ),
      choice("state", "State", states, state),
      choice("sort", "Order", SORTS, app.params.get("sort") ?? "state"),
    );
  }

  search(text) {
    clearTimeout(this.typed);
    this.typed = setTimeout(() => this.app.set({q: text}, {replaces: true}), 250);
  }

  show({devices, total, page, pages}) {
    const {app} = this;
    replace(
      this.status,
      `${count(total)} ${total === 1 ? "device" : "devices"} `,
      app.exports("devices", this.words(), "the devices"),
    );
    replace(
      this.list,
      devices.length
        ? deviceTable(app, devices)
        : empty(
            "No device matches",
            "Remove a filter or the search. Devices appear as soon as they connect to the broker.",
          ),
    );
    const turn = (to, words) =>
      button(words, () => app.set({page: to > 1 ? String(to) : ""}), {
        "data-key": words,
        disabled: to < 1 || to > pages,
      });
    replace(
      this.pager,
      pages > 1
        ? [turn(page - 1, "Previous"), h("span", null, `${page} of ${count(pages)}`), turn(page + 1, "Next")]
        : "",
    );
  }
}

export class Events extends Page {
  title = "Events";

  constructor(app) {
    super();
    this.app = app;
    this.tools = h("div", {class: "tools"});
    this.list = h("div");
    this.element = h("div", null, h("h1", null, "Events"), h("div", {class: "card"}, this.tools, this.list));
    this.feeds = [
      app.feed(
        "events",
        () => ({event: app.params.get("event")}),
        (said) => this.show(said),
        this.list,
      ),
    ];
  }

  show({events, more, types}) {
    const {app} = this,
      chosen = app.params.get("event") ?? "",
      offered = {...types, ...(chosen && !types[chosen] ? {[chosen]: 0} : {})};
    if (!this.tools.contains(document.activeElement))
      replace(
        this.tools,
        select(
          "Type of event",
          chosen,
          [
            ["", "all types"],
            ...Object.entries(offered).map(([name, number]) => [
              name,
              `${name.replaceAll("_", " ")} (${count(number)})`,
            ]),
          ],
          {
            "data-key": "event",
            onchange: (event) => {
              event.target.blur();
              app.set({event: event.target.value});
            },
          },
        ),
        app.exports("events", {event: chosen}, "the events"),
      );
    replace(
      this.list,
      eventList(app, events),
      more ? h("p", {class: "soft"}, "Older events are not listed: choose a shorter time, a type or a site.") : null,
    );
  }
}

export class RolloutsPage extends Page {
  title = "Rollouts";

  constructor(app) {
    super();
    this.list = h("div");
    this.channels = h("div");
    this.element = h(
      "div",
      null,
      h("h1", null, "Rollouts"),
      h("div", {class: "card"}, h("p", {class: "soft"}, app.exports("rollouts", {}, "the rollouts")), this.list),
      h(
        "div",
        {class: "card"},
        h("h2", null, "Channels"),
        h("p", {class: "soft"}, app.exports("channels", {}, "the channels")),
        this.channels,
      ),
    );
    this.feeds = [
      app.feed("channels", {}, ({channels}) => replace(this.channels, channelTable(channels)), this.channels),
      app.feed("rollouts", {}, ({rollouts}) => replace(this.list, rolloutList(app, rollouts, {full: true})), this.list),
    ];
  }
}

export class DevicePage extends Page {
  constructor(app, site, device) {
    super();
    Object.assign(this, {app, site, name: device, title: device});
    this.head = h("div", {class: "device-head"});
    this.about = h("div");
    this.models = new ModelCards(app, {whole: false});
    this.events = h("div");
    this.element = h(
      "div",
      null,
      h("h1", null, h("span", {class: "soft"}, `${site} / `), device),
      this.head,
      this.models.element,
      h(
        "div",
        {class: "halves"},
        h(
          "section",
          {class: "card", "aria-labelledby": "about"},
          h(
            "div",
            {class: "card-head"},
            h("h2", {id: "about"}, "Facts"),
            h(
              "a",
              {
                class: "export small",
                href: `/api/v1/device?${new URLSearchParams({site, device, format: "json"})}`,
                download: "edgert-device.json",
                "aria-label": "the device as JSON",
              },
              "JSON",
            ),
          ),
          this.about,
        ),
        h(
          "section",
          {class: "card", "aria-labelledby": "its-events"},
          h("h2", {id: "its-events"}, "Events"),
          this.events,
        ),
      ),
    );
    const own = (this.own = {site, device, profile: ""});
    this.feeds = [
      app.feed("device", own, (said) => this.show(said), this.head),
      app.feed("latency", own, (said) => this.models.show(said), this.models.list, 3000),
      app.feed("stages", own, (said) => this.models.showStages(said), h("div"), 20_000),
      app.feed("events", own, ({events}) => replace(this.events, eventList(app, events.slice(0, 30))), this.events),
    ];
  }

  show(said) {
    const {sys, info, deploy} = said;
    replace(
      this.head,
      h(
        "p",
        null,
        badge(said.state),
        " ",
        said.why ? `${said.why}, ` : "",
        ["alarmed", "slow", "behind"].includes(said.state) ? "since " : "last heard ",
        when(this.app, said.since_ms),
      ),
    );
    const facts = [
      ["profile", said.profile],
      ["EdgeRT", info.edgert],
      ["machine", info.machine],
      ["processors", sys.cpus],
      ["up for", sys.uptime_s && lasting(sys.uptime_s)],
      ["load, 1 min", sys.load_1m !== undefined ? digits(sys.load_1m) : null],
      ["memory free", sys.mem_available_bytes && bytes(sys.mem_available_bytes)],
      ["disk free", sys.disk_free_bytes && bytes(sys.disk_free_bytes)],
      ["temperature", sys.temp_c !== undefined ? `${digits(sys.temp_c)} °C` : null],
      ["throttled", sys.throttled === undefined ? null : sys.throttled ? "yes" : "no"],
      [
        "clock",
        sys.clock_synced === undefined ? null : sys.clock_synced ? "follows a time source" : "not synchronized",
      ],
      ["waiting in its spool", sys.spool_rows !== undefined ? `${count(sys.spool_rows)} messages` : null],
      ["lost by its spool", sys.spool_lost_total ? `${count(sys.spool_lost_total)} messages` : null],
      ...Object.entries(deploy)
        .filter(([name]) => name.endsWith("_active"))
        .map(([name, version]) => {
          const model = name.slice(0, -7);
          const state = deploy[`${model}_state`];
          return state
            ? [`slots of ${model}`, `${version} live, ${deploy[`${model}_spare`] ?? "none"} spare, ${state}`]
            : [model, version];
        }),
    ].filter(([, value]) => value !== undefined && value !== null && value !== "");
    replace(
      this.about,
      h(
        "dl",
        {class: "facts"},
        facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value)))),
      ),
      said.models.length
        ? table(
            "The last window, by the device's own figures",
            [
              ["model"],
              ["version"],
              ["requests/s", "n"],
              ["p50 ms", "n"],
              ["p99", "n"],
              ["batch", "n"],
              ["errors", "n"],
              ["memory", "n"],
            ],
            said.models.map((each) => [
              each.model,
              each.version,
              each.per_s === null ? "–" : digits(each.per_s),
              digits(each.p50_ms),
              digits(each.p99_ms),
              digits(each.batch_mean),
              count(each.errors),
              bytes(each.rss_bytes),
            ]),
          )
        : empty("No model reports yet", "Each model reports within a minute after it goes live."),
    );
  }
}
