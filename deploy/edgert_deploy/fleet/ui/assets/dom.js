// Elements without markup: everything that a device sends becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

const shown = (children) =>
  children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, said] of Object.entries(value)) element.style.setProperty(key, said);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// Replace the content by `children`, and keep the focus.
export function replace(container, ...children) {
  const focused = container.contains(document.activeElement) ? document.activeElement : null;
  const key = focused?.dataset.key ?? focused?.getAttribute("href") ?? focused?.id;
  container.replaceChildren(...shown(children));
  if (focused && key && !container.contains(focused)) {
    const same = [...container.querySelectorAll("a, button, [tabindex], input, select")].find(
      (each) => (each.dataset.key ?? each.getAttribute("href") ?? each.id) === key,
    );
    same?.focus({preventScroll: true});
  }
}

// The value of a colour named in style.css, for painting on a canvas.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A button that does not send a form.
export const button = (words, onclick, props) => h("button", {type: "button", onclick, ...props}, words);

// A list of choices [value, title] with a hidden label.
export const select = (label, chosen, choices, props, type = null) =>
  h(
    "label",
    {class: type},
    h("span", {class: "hidden"}, label),
    h(
      "select",
      props,
      choices.map(([value, title]) => h("option", {value, selected: value === chosen}, title)),
    ),
  );

// The first row of a table.
export const head = (...cells) => h("thead", null, h("tr", null, cells));

// A plain table. `columns`: [heading, "n" for numbers]; a cell is text or an element.
export function table(caption, columns, rows) {
  const kind = (i) => columns[i][1] || null;
  return h(
    "div",
    {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    h(
      "table",
      null,
      h("caption", null, caption),
      head(columns.map(([title, type]) => h("th", {scope: "col", class: type || null}, title))),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            null,
            row.map((cell, i) => h(i ? "td" : "th", {class: kind(i), scope: i ? null : "row"}, cell)),
          ),
        ),
      ),
    ),
  );
}

export function empty(title, ...words) {
  return h(
    "div",
    {class: "empty"},
    h("p", {class: "empty-title"}, title),
    words.map((each) => h("p", null, each)),
  );
}

// Draw each of `items`. If one fails, `place` makes an element with the error, and the others are drawn.
export function itemwise(items, draw, place = (words) => h("li", null, words)) {
  return items.map((item, i) => {
    try {
      return draw(item, i);
    } catch (error) {
      return place(
        h("span", {class: "soft"}, `This cannot be shown: ${String(error?.message ?? error).slice(0, 200)}`),
      );
    }
  });
}

export const code = (text) => h("code", null, text);
