// The states of a device. Each has a colour and a shape, so that it is recognizable without colour.

import {h, s} from "./dom.js";

// In a box of 12 by 12, filled by the even-odd rule.
const SQUARE = "M1 3a2 2 0 0 1 2-2h6a2 2 0 0 1 2 2v6a2 2 0 0 1-2 2H3a2 2 0 0 1-2-2z";
export const STATES = {
  o: {name: "online", words: "reports, newest version", shape: SQUARE},
  w: {
    name: "slow",
    words: "p99 over its target, or twice its baseline",
    shape: "M1.5 1h9v2.2L7.6 6l2.9 2.8V11h-9V8.8L4.4 6 1.5 3.2z",
  },
  b: {name: "behind", words: "an older version, or late reports", shape: `${SQUARE}M2.6 2.6h6.8v3.4H2.6z`},
  a: {name: "alarmed", words: "reports, with an alarm", shape: "M6 .6 11.8 11.2H.2z"},
  s: {name: "stale", words: "online, but sends nothing", shape: `${SQUARE}M2.8 2.8h6.4v6.4H2.8z`},
  l: {
    name: "lost",
    words: "its connection broke",
    shape: "M2.4 .8 6 4.4 9.6 .8l1.6 1.6L7.6 6l3.6 3.6-1.6 1.6L6 7.6l-3.6 3.6L.8 9.6 4.4 6 .8 2.4z",
  },
  f: {name: "offline", words: "stopped", shape: "M6 3.2a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6z"},
};
export const LETTER = Object.fromEntries(Object.entries(STATES).map(([letter, {name}]) => [name, letter]));
export const WORST_FIRST = ["l", "f", "s", "a", "w", "b", "o"];

// The number of devices that are connected and report, in any state.
export const online = (counts) =>
  (counts.online ?? 0) + (counts.behind ?? 0) + (counts.slow ?? 0) + (counts.alarmed ?? 0);

export function glyph(letter) {
  const {name, shape} = STATES[letter];
  return s(
    "svg",
    {class: `glyph ${name}`, viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true"},
    s("path", {d: shape, "fill-rule": "evenodd"}),
  );
}

export const badge = (name) => h("span", {class: `badge ${name}`}, glyph(LETTER[name]), name);

// A bar with a part for each state that a device has.
export function shares(counts) {
  return h(
    "div",
    {class: "shares", "aria-hidden": "true"},
    [...WORST_FIRST].reverse().map((letter) => {
      const {name} = STATES[letter];
      return counts[name] ? h("i", {class: name, style: {"flex-grow": String(counts[name])}}) : null;
    }),
  );
}
