// Elements. Text from a model, a client or the server only ever becomes a text node: nothing here parses markup.

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Make an element. Attributes named `on...` are listeners; `class`, `aria-*` and the like are set as they are named;
 * a value of false or null leaves an attribute out.
 * @param {string} tag
 * @param {Record<string, any> | null} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...asNodes(children));
  return element;
}

/** Replace what an element contains. @param {Element} element @param {...(Child | Child[])} children */
export function fill(element, ...children) {
  element.replaceChildren(...asNodes(children));
}

/**
 * Set the text of an element, if it differs: screen readers announce what changes. @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {(Child | Child[])[]} children @returns {(Node | string)[]} */
function asNodes(children) {
  return children
    .flat()
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

/**
 * A row of named figures.
 * @param {string[]} names
 * @returns {{element: HTMLElement, set: (values: Record<string, string>) => void}}
 */
export function tiles(names) {
  const values = new Map(names.map((name) => [name, h("dd", null, "–")]));
  const element = h("dl", { class: "tiles" }, names.map((name) => h("div", null, h("dt", null, name), values.get(name))));
  return {
    element,
    set(given) {
      for (const [name, text] of Object.entries(given)) say(/** @type {HTMLElement} */ (values.get(name)), text);
    },
  };
}

/** What the colours of a drawing mean. @param {[string, string][]} entries pairs of a colour's name and a text */
export function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([name, text]) => h("li", null, h("i", { class: `key ${name}`, "aria-hidden": "true" }), text)));
}

/**
 * A labelled slider that shows its value.
 * @param {{label: string, min: number, max: number, value: number, step?: number, logarithmic?: boolean,
 *   show?: (value: number) => string, change: () => void}} options
 */
export function slider(options) {
  const { min, max, logarithmic } = options;
  const show = options.show ?? ((value) => value.toLocaleString("en"));
  const toPosition = (/** @type {number} */ value) => (logarithmic ? (1000 * Math.log(value / min)) / Math.log(max / min) : value);
  const toValue = (/** @type {number} */ at) => (logarithmic ? niceRound(min * (max / min) ** (at / 1000)) : at);
  const output = h("output", null, show(options.value));
  const input = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "range",
      min: logarithmic ? 0 : min,
      max: logarithmic ? 1000 : max,
      step: logarithmic ? 1 : (options.step ?? 1),
      value: toPosition(options.value),
      oninput: update,
    })
  );
  input.setAttribute("aria-valuetext", show(options.value));
  const slider = { element: h("label", { class: "slider" }, h("span", null, options.label), output, input), value: options.value };
  function update() {
    slider.value = toValue(Number(input.value));
    say(output, show(slider.value));
    input.setAttribute("aria-valuetext", show(slider.value));
    options.change();
  }
  return slider;
}

/** Two significant digits. @param {number} value */
function niceRound(value) {
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1);
  return unit >= 1 ? Math.round(value / unit) * unit : Number(value.toFixed(Math.ceil(-Math.log10(unit))));
}
