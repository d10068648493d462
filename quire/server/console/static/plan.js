// Plan: the roofline of this machine, from the costs fitted to its own steps, with the steps of this session as dots.

import { json } from "./api.js";
import { makeCanvas } from "./canvas.js";
import { h, legend, say, slider, tiles } from "./dom.js";
import { count, counted, duration, interval, percent, short } from "./format.js";
import { section } from "./live.js";
import { ROOFLINE_HEIGHT, drawRoofline, errorOf, interpolate } from "./roofline.js";
import { live } from "./stream.js";

/** @typedef {import("./roofline.js").Point} Point @typedef {import("./roofline.js").Plan} Plan @typedef {import("./roofline.js").Dot} Dot */

const MAX_DOTS = 4000, REFRESH_MS = 10_000, MISSING_MS = 2000;
const CAUSES = /** @type {[keyof Point, string, string][]} */ ([
  ["fixed_s", "every step: weights, and the host", "What every step takes bounds it, reading the weights above all: more requests in a step cost little."],
  ["tokens_s", "arithmetic, for each token", "Arithmetic bounds it: more requests take proportionally longer."],
  ["cache_s", "keys and values are read", "Reading keys and values bounds it: shorter contexts or a smaller cache type help."],
]);

/** @returns {import("./main.js").Screen} */
export function makePlan() {
  let plan = /** @type {Plan | null} */ (null);
  let isVisible = false, timer = 0, number = 0;
  /** The steps of this session. @type {Dot[]} */
  const dots = [];
  /** @type {Map<number, number>} the last step that is among the dots, by replica */
  const seen = new Map();
  const change = () => {
    clearTimeout(timer);
    timer = setTimeout(load, 60);
  };
  const context = slider({ label: "Tokens of context", min: 16, max: 8192, value: 512, logarithmic: true, change });
  const batch = slider({ label: "Requests in a step", min: 1, max: 256, value: 16, logarithmic: true, change: () => showFigures() });
  const figures = tiles(["Step", "Tokens/s, all", "Tokens/s, each", "Requests that fit"]);
  const notice = h("p", { class: "notice", role: "status", hidden: true });
  const caption = h("p", { class: "dim" }), bound = h("p");
  const bar = h("div", { class: "parts", "aria-hidden": "true" }), parts = h("dl", { class: "facts-list" });
  const canvas = makeCanvas({
    label: "Tokens a second over the tokens of a step, predicted and measured",
    height: () => ROOFLINE_HEIGHT,
    draw: (drawing) => plan && drawRoofline(drawing, plan, dots, batch.value),
  });

  async function load() {
    clearTimeout(timer);
    const mine = ++number;
    try {
      const engine = await live.refreshEngine();
      if (engine.no_profile) throw new Error(engine.no_profile);
      const found = await json(`console/plan?context_tokens=${Math.min(engine.max_len, context.value)}`);
      if (mine !== number) return;
      plan = found;
      notice.hidden = true;
      say(caption, `${found.model} on ${found.machine}. ${errorOf(found.step_error)}`);
    } catch (error) {
      if (mine !== number) return;
      notice.hidden = false;
      say(notice, /** @type {Error} */ (error).message);
    }
    showFigures();
    if (isVisible) timer = setTimeout(load, plan ? REFRESH_MS : MISSING_MS); // served steps keep the costs fresh
  }

  function showFigures() {
    canvas.redraw();
    if (!plan) return;
    const size = Math.min(batch.value, plan.max_requests), point = interpolate(plan.decode, size);
    figures.set({
      Step: duration(point.seconds),
      "Tokens/s, all": short(size / point.seconds),
      "Tokens/s, each": short(1 / point.seconds),
      "Requests that fit": count(plan.fitting_requests),
    });
    const largest = CAUSES.reduce((a, b) => (point[a[0]] >= point[b[0]] ? a : b));
    const range = `The step takes ${interval(point.low_s, point.high_s)}, the 5th to the 95th percentile of the fits.`;
    const room = `The cache has room for ${counted(plan.fitting_requests, "request")} of this context only: the others would wait.`;
    say(bound, `${largest[2]} ${range}${size > plan.fitting_requests ? ` ${room}` : ""}`);
    showParts(bar, parts, point);
  }

  function collect() {
    for (const [index, replica] of live.replicas) {
      const last = seen.get(index) ?? -1;
      const steps = replica.steps.filter((step) => step.step > last && step.seconds);
      for (const step of steps) {
        const tokens = step.prompt_tokens + step.decode_rows + step.draft_rows + step.draft_tokens;
        dots.push({ tokens, seconds: /** @type {number} */ (step.seconds), prompt: step.prompt_rows > 0 });
      }
      const newest = replica.steps.at(-1)?.step;
      if (newest !== undefined) seen.set(index, newest);
    }
    if (dots.length > MAX_DOTS) dots.splice(0, dots.length - MAX_DOTS);
    if (isVisible) canvas.redraw();
  }
  live.changed.watch(collect);

  const key = legend([["prompt", "steps with a prompt"], ["decode", "decoding steps"], ["line", "predicted"]]);
  return {
    element: h(
      "div",
      { class: "screen" },
      h("header", null, h("h1", null, "Plan"), caption),
      notice,
      section("Roofline", canvas.element, key),
      h(
        "div",
        { class: "columns even" },
        section("Decoding", h("div", { class: "screen" }, h("div", { class: "controls" }, batch.element, context.element), figures.element)),
        section("What bounds it", h("div", { class: "screen" }, bound, bar, parts))
      )
    ),
    show() {
      isVisible = true;
      load();
    },
    hide() {
      isVisible = false;
      clearTimeout(timer);
    },
  };
}

/** @param {HTMLElement} bar @param {HTMLElement} list @param {Point} point */
function showParts(bar, list, point) {
  const kinds = { fixed_s: "cached", tokens_s: "prompt", cache_s: "draft" };
  bar.replaceChildren(...CAUSES.map(([name]) => {
    const part = h("i", { class: `key ${kinds[/** @type {keyof typeof kinds} */ (name)]}` });
    part.style.flexGrow = String((1000 * point[name]) / point.seconds);
    return part;
  }));
  list.replaceChildren(...CAUSES.flatMap(([name, text]) => [
    h("dt", null, h("i", { class: `key swatch ${kinds[/** @type {keyof typeof kinds} */ (name)]}` }), text),
    h("dd", { class: "number" }, `${duration(point[name])} · ${percent(point[name] / point.seconds)}`),
  ]));
}
