// The fleet by site: a tile each, a cell a device. Cells are painted, as ten thousand elements would be too many.

import {colour, empty, h, replace} from "./dom.js";
import {STATES, WORST_FIRST, glyph, online, shares} from "./states.js";

const TILES_MAX = 60;
const GAP = 2;
const SHAPES_FROM = 8; // a smaller cell shows its colour alone

const cellSize = (devices) => devices <= 30 ? 22 : devices <= 80 ? 16 : devices <= 300 ? 12 : devices <= 1000 ? 8 : devices <= 4000 ? 5 : 4;

export class FleetMap {
  constructor(go) {
    this.go = go; // (site, device) opens the device
    this.tiles = new Map();
    this.all = false;
    this.grid = h("ul", {class: "tiles"});
    this.legend = h("ul", {class: "legend", "aria-label": "States"},
      Object.entries(STATES).map(([letter, {name, words}]) => h("li", {title: words}, glyph(letter), name)));
    this.more = h("p");
    this.element = h("div", null, this.grid, this.more, this.legend);
    this.resized = new ResizeObserver((entries) => entries.forEach(({target}) => this.tiles.get(target.dataset.site)?.paint()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.tiles.forEach((tile) => tile.paint()));
  }

  show(fleet, siteLink, emptyWords) {
    const sites = [...fleet.sites.values()];
    const shown = this.all ? sites : sites.slice(0, TILES_MAX);
    const names = shown.map(({site}) => site).join("\n") || emptyWords[0];
    if (names !== this.names) {
      this.names = names;
      this.resized.disconnect();
      this.tiles = new Map(shown.map((site) => [site.site, new Tile(site, siteLink, this.go)]));
      replace(this.grid, [...this.tiles.values()].map(({element}) => element));
      this.tiles.forEach(({canvas}) => this.resized.observe(canvas.parentElement));
      const hidden = sites.length - shown.length;
      replace(this.more, hidden ? h("button", {type: "button", onclick: () => { this.all = true; this.names = null; this.show(fleet, siteLink, emptyWords); }}, `Show ${hidden} more sites`) : "");
      if (!sites.length) replace(this.grid, h("li", {class: "none"}, empty(...emptyWords)));
    }
    for (const site of shown) this.tiles.get(site.site).show(site);
  }
}

class Tile {
  constructor({site}, siteLink, go) {
    this.canvas = h("canvas", {role: "img"});
    this.title = h("a", {href: siteLink(site), "data-keep": true}, site);
    this.words = h("p", {class: "tile-words"});
    this.shares = h("div");
    this.element = h("li", {class: "tile"}, h("h3", null, this.title), this.words, h("div", {class: "cells", "data-site": site}, this.canvas), this.shares);
    this.canvas.addEventListener("pointermove", (event) => { this.canvas.title = this.nameAt(event) ?? ""; });
    this.canvas.addEventListener("click", (event) => {
      const number = this.numberAt(event);
      if (number !== null) go(site, this.site.devices[number]);
    });
  }

  show(site) {
    if (this.site && this.site.devices === site.devices && this.states === site.states) return;
    [this.site, this.states] = [site, site.states];
    const counts = {};
    for (const letter of site.states) counts[STATES[letter].name] = (counts[STATES[letter].name] ?? 0) + 1;
    const said = WORST_FIRST.slice(0, -1).filter((letter) => counts[STATES[letter].name]).map((letter) => `${counts[STATES[letter].name]} ${STATES[letter].name}`);
    replace(this.words, h("b", null, `${online(counts)}`), ` of ${site.devices.length} online`, said.length ? h("span", {class: "soft"}, `, ${said.join(", ")}`) : "");
    this.canvas.setAttribute("aria-label", `${site.site}: ${online(counts)} of ${site.devices.length} online${said.length ? `, ${said.join(", ")}` : ""}`);
    replace(this.shares, shares(counts));
    this.paint();
  }

  paint() {
    const width = this.canvas.parentElement?.clientWidth;
    if (!width || !this.site) return;
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
    const [column, row] = [Math.floor((event.clientX - box.left) / this.step), Math.floor((event.clientY - box.top) / this.step)];
    const number = row * this.columns + column;
    return column < this.columns && number < this.states.length ? number : null;
  }

  nameAt(event) {
    const number = this.numberAt(event);
    return number === null ? null : `${this.site.devices[number]}: ${STATES[this.states[number]].name}`;
  }
}
