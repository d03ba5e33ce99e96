// The shown period: the last minutes or days, or between two times; buttons for earlier, later, wider, and fixed.

import {button, h} from "./dom.js";
import {duration_ms, isoMinute, localMinute, moment, zone} from "./format.js";

export const LENGTH = "1h";
const LENGTHS = {"15m": "15 min", "1h": "1 h", "24h": "24 h", "7d": "7 d"};
const MINUTE_MS = 60_000,
  LEAST_MS = 300_000;

// The period of an address: `period`, the length of time until now, or `from` and `to`. The server refuses an invalid one.
export class Period {
  constructor(params) {
    [this.length, this.from, this.to] = ["period", "from", "to"].map((name) => params.get(name) ?? "");
    this.fixed = Boolean(this.from || this.to);
    if (!this.fixed) this.length ||= LENGTH;
  }

  // The beginning and the end in ms; NaN if the address is invalid.
  bounds(now_ms) {
    return this.fixed ? [Date.parse(this.from), Date.parse(this.to)] : [now_ms - duration_ms(this.length), now_ms];
  }
}

// The parameters of the address for `since_ms` to `until_ms`, at least five minutes.
export function fixed(since_ms, until_ms) {
  const short = Math.max(0, LEAST_MS - (until_ms - since_ms)) / 2;
  return {period: "", from: isoMinute(since_ms - short), to: isoMinute(until_ms + short + 59_999)};
}

export function periodTools(app) {
  const {period} = app,
    [since_ms, until_ms] = period.bounds(app.now_ms),
    length = until_ms - since_ms,
    known = Number.isFinite(length);
  const lengths = {...LENGTHS, ...(period.fixed || LENGTHS[period.length] ? {} : {[period.length]: period.length})};
  const step = (key, words, title, act) =>
    button(words, act, {"data-key": key, title, "aria-label": title, disabled: !known});
  const half = Math.max(MINUTE_MS, Math.round(length / 2 / MINUTE_MS) * MINUTE_MS);
  // Each press moves by half of the period that is shown at that moment.
  const move = (earlier, later) => () => {
    const [from_ms, to_ms] = app.period.bounds(app.now_ms);
    app.set(fixed(from_ms + earlier * half, to_ms + later * half));
  };
  const timeInput = (key, label, at_ms) =>
    h("input", {
      type: "datetime-local",
      "aria-label": label,
      required: true,
      "data-key": key,
      value: known ? localMinute(at_ms) : "",
    });
  const from = timeInput("from", "From", since_ms);
  const to = timeInput("to", "To", until_ms);
  const dates = h(
    "form",
    {
      class: "dates",
      hidden: !app.datesOpen,
      onsubmit: (event) => {
        event.preventDefault();
        app.datesOpen = false;
        app.set({period: "", from: isoMinute(Date.parse(from.value)), to: isoMinute(Date.parse(to.value))});
      },
    },
    from,
    " to ",
    to,
    h("button", null, "Show"),
  );
  const opener = button(
    "From – to",
    () => {
      app.datesOpen = dates.hidden;
      dates.hidden = !app.datesOpen;
      opener.setAttribute("aria-expanded", String(app.datesOpen));
    },
    {"data-key": "dates", "aria-expanded": String(Boolean(app.datesOpen))},
  );
  return [
    h(
      "div",
      {class: "row"},
      h(
        "div",
        {class: "segments", role: "group", "aria-label": "Time"},
        Object.entries(lengths).map(([name, title]) =>
          button(title, () => app.set({period: name === LENGTH ? "" : name, from: "", to: ""}), {
            "data-key": `period-${name}`,
            "aria-pressed": String(name === period.length),
          }),
        ),
      ),
      h(
        "div",
        {class: "segments", role: "group", "aria-label": "Move in time"},
        step("earlier", "‹", "Earlier", move(-1, -1)),
        step("later", "›", "Later", move(1, 1)),
        step("wider", "–", "Zoom out", move(-1, 1)),
      ),
      opener,
      period.fixed
        ? null
        : button("Keep this time", move(0, 0), {
            "data-key": "keep",
            disabled: !known,
            title: "The address of the page then shows this period to everyone",
          }),
      h(
        "p",
        {class: "soft small"},
        period.fixed && known ? `${moment(since_ms).slice(0, -3)} to ${moment(until_ms).slice(0, -3)}, ` : "times in ",
        zone(),
      ),
    ),
    dates,
  ];
}
