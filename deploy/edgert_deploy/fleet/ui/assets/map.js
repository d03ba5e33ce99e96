// The fleet by site: one tile per site, one cell per device. Cells of a small site show names. Cells of a larger site
// are painted, because ten thousand elements would be too many; the pointer and the arrow keys show their names.

import {button, colour, empty, h, replace} from "./dom.js";
import {STATES, WORST_FIRST, glyph, online, shares} from "./states.js";

const TILES_MAX = 60;
const NAMED_MAX = 12; // devices of a site whose cells show names
const GAP = 2;
const SHAPES_FROM = 8; // a smaller cell shows only its colour

const cellSize = (devices) =>
  devices <= 30 ? 22 : devices <= 80 ? 16 : devices <= 300 ? 12 : devices <= 1000 ? 8 : devices <= 4000 ? 5 : 4;

export class FleetMap {
  // `link` is the address of a device, `go` opens an address.
  constructor(link, go) {
    Object.assign(this, {link, go});
    this.tiles = new Map();
    this.all = false;
    this.grid = h("ul", {class: "tiles"});
    this.legend = h(
      "ul",
      {class: "legend", "aria-label": "States"},
      Object.entries(STATES).map(([letter, {name, words}]) => h("li", {title: words}, glyph(letter), name)),
    );
    this.more = h("p");
    this.element = h("div", null, this.grid, this.more, this.legend);
    this.resized = new ResizeObserver((entries) =>
      entries.forEach(({target}) => this.tiles.get(target.dataset.site)?.paint()),
    );
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      this.tiles.forEach((tile) => tile.paint()),
    );
  }

  show(fleet, siteLink, emptyWords) {
    const sites = [...fleet.sites.values()];
    const shown = this.all || sites.length <= TILES_MAX ? sites : worstSites(sites);
    const names = shown.map(({site}) => site).join("\n") || emptyWords[0];
    if (names !== this.names) {
      this.names = names;
      this.resized.disconnect();
      this.tiles = new Map(shown.map((site) => [site.site, new Tile(site, this.link, this.go)]));
      replace(
        this.grid,
        [...this.tiles.values()].map(({element}) => element),
      );
      this.tiles.forEach(({canvas}) => this.resized.observe(canvas.parentElement));
      const hidden = sites.length - shown.length;
      replace(
        this.more,
        hidden
          ? button(`Show ${hidden} more sites`, () => {
              this.all = true;
              this.names = null;
              this.show(fleet, siteLink, emptyWords);
            })
          : "",
      );
      if (!sites.length) replace(this.grid, h("li", {class: "none"}, empty(...emptyWords)));
    }
    for (const site of shown) this.tiles.get(site.site).show(site, siteLink(site.site));
  }
}

// The sites with the worst devices, by name.
function worstSites(sites) {
  const rank = ({states}) => WORST_FIRST.findIndex((letter) => states.includes(letter));
  return [...sites]
    .sort((a, b) => rank(a) - rank(b))
    .slice(0, TILES_MAX)
    .sort((a, b) => (a.site < b.site ? -1 : 1));
}

class Tile {
  constructor({site}, link, go) {
    Object.assign(this, {link, go, chosen: null});
    this.canvas = h("canvas", {role: "img"});
    this.tip = h("a", {class: "tip", hidden: true, tabindex: "-1", href: "/"});
    this.title = h("a", {href: "/", "data-keep": true}, site);
    this.words = h("p", {class: "tile-words"});
    this.shares = h("div");
    this.told = h("p", {class: "hidden", "aria-live": "polite"});
    this.names = h("ul", {class: "names", hidden: true});
    this.cells = h(
      "div",
      {
        class: "cells",
        "data-site": site,
        tabindex: "0",
        role: "group",
        "aria-label": `${site}: the arrow keys move from device to device, Enter opens one`,
        onkeydown: (event) => this.key(event),
        onblur: () => this.choose(null),
        onpointerleave: () => this.choose(null),
      },
      this.canvas,
      this.tip,
    );
    this.element = h(
      "li",
      {class: "tile"},
      h("h3", null, this.title),
      this.words,
      this.cells,
      this.names,
      this.told,
      this.shares,
    );
    this.canvas.addEventListener(
      "pointermove",
      (event) => event.pointerType === "mouse" && this.choose(this.numberAt(event)),
    );
    this.canvas.addEventListener("click", (event) => this.click(event));
  }

  // A touch screen cannot point: the first touch shows the device's name, which is a link.
  click(event) {
    const number = this.numberAt(event),
      touched = event.pointerType === "touch" && number !== this.chosen;
    this.choose(number);
    if (number !== null && !touched) this.go(this.tip.getAttribute("href"));
  }

  key(event) {
    const last = this.states.length - 1,
      at = this.chosen ?? -1;
    if (event.key === "Enter" && this.chosen !== null) return this.go(this.tip.getAttribute("href"));
    if (event.key === "Escape") return this.choose(null);
    const to = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at - this.columns,
      ArrowDown: at + this.columns,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(to, 0), last));
    this.told.textContent = this.tip.textContent;
  }

  choose(number) {
    this.chosen = number;
    this.tip.hidden = number === null;
    if (number === null) return;
    const name = this.site.devices[number],
      x = (number % this.columns) * this.step,
      y = (Math.floor(number / this.columns) + 1) * this.step;
    replace(this.tip, glyph(this.states[number]), ` ${name}: ${STATES[this.states[number]].name}`);
    this.tip.href = this.link(this.site.site, name);
    this.tip.style.setProperty("top", `${y + 2}px`);
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.setProperty("left", `${Math.max(0, Math.min(x, room))}px`);
  }

  show(site, address) {
    if (this.site?.devices === site.devices && this.states === site.states && this.address === address) return;
    Object.assign(this, {site, states: site.states, address});
    this.title.href = address;
    const counts = {};
    for (const letter of site.states) counts[STATES[letter].name] = (counts[STATES[letter].name] ?? 0) + 1;
    const said = WORST_FIRST.slice(0, -1)
      .filter((letter) => counts[STATES[letter].name])
      .map((letter) => `${counts[STATES[letter].name]} ${STATES[letter].name}`);
    replace(
      this.words,
      h("b", null, `${online(counts)}`),
      ` of ${site.devices.length} online`,
      said.length ? h("span", {class: "soft"}, `, ${said.join(", ")}`) : "",
    );
    this.canvas.setAttribute(
      "aria-label",
      `${site.site}: ${online(counts)} of ${site.devices.length} online${said.length ? `, ${said.join(", ")}` : ""}`,
    );
    replace(this.shares, shares(counts));
    const named = site.devices.length <= NAMED_MAX;
    [this.names.hidden, this.cells.hidden] = [!named, named];
    if (named)
      replace(
        this.names,
        site.devices.map((name, i) =>
          h(
            "li",
            null,
            h(
              "a",
              {
                href: this.link(site.site, name),
                title: STATES[site.states[i]].words,
                "data-key": `map/${site.site}/${name}`,
              },
              glyph(site.states[i]),
              h("span", null, name),
              h("span", {class: "hidden"}, STATES[site.states[i]].name),
            ),
          ),
        ),
      );
    else this.paint();
  }

  paint() {
    const width = this.canvas.parentElement?.clientWidth;
    if (!width || !this.site) return;
    if (this.chosen !== null) this.choose(this.chosen < this.states.length ? this.chosen : null);
    const size = cellSize(this.states.length);
    const gap = size > 5 ? GAP : 1;
    this.columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
    this.step = size + gap;
    const height = Math.ceil(this.states.length / this.columns) * this.step;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, {width: width * ratio, height: height * ratio});
    Object.assign(this.canvas.style, {width: `${width}px`, height: `${height}px`});
    const pen = this.canvas.getContext("2d");
    const scale = size / 12;
    for (const letter of new Set(this.states)) {
      pen.fillStyle = colour(`--${STATES[letter].name}`);
      const shape = new Path2D(STATES[letter].shape);
      for (let i = this.states.indexOf(letter); i >= 0; i = this.states.indexOf(letter, i + 1)) {
        const [x, y] = [(i % this.columns) * this.step, Math.floor(i / this.columns) * this.step];
        if (size < SHAPES_FROM) {
          pen.setTransform(ratio, 0, 0, ratio, 0, 0);
          pen.fillRect(x, y, size, size);
        } else {
          pen.setTransform(ratio * scale, 0, 0, ratio * scale, x * ratio, y * ratio);
          pen.fill(shape, "evenodd");
        }
      }
    }
  }

  numberAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [column, row] = [
      Math.floor((event.clientX - box.left) / this.step),
      Math.floor((event.clientY - box.top) / this.step),
    ];
    const number = row * this.columns + column;
    return column < this.columns && number < this.states.length ? number : null;
  }
}
