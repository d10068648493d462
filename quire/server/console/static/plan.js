// Plan: the roofline of this machine, from the costs fitted to its own steps, with the steps of this session as dots.

import { ApiError, json } from "./api.js";
import { makeCanvas } from "./canvas.js";
import { h, legend, say, slider, tiles } from "./dom.js";
import { count, counted, duration, interval, percent, short } from "./format.js";
import { section } from "./live.js";
import { live } from "./stream.js";

/**
 * @typedef {{tokens: number, seconds: number, low_s: number, high_s: number, fixed_s: number, tokens_s: number, cache_s: number}} Point
 * @typedef {{machine: string, model: string, step_error: {median: number, p95: number}, context_tokens: number, max_len: number,
 *   max_requests: number, max_tokens_per_step: number, fitting_requests: number, decode: Point[], prompt: Point[]}} Plan
 */

const HEIGHT = 420, LEFT = 62, RIGHT = 16, TOP = 14, BOTTOM = 40;
const MAX_DOTS = 4000, REFRESH_MS = 10_000;
const CAUSES = /** @type {[keyof Point, string, string][]} */ ([
  ["fixed_s", "every step: weights are read once", "Reading the weights bounds it: more requests in a step cost little."],
  ["tokens_s", "arithmetic, for each token", "Arithmetic bounds it: more requests take proportionally longer."],
  ["cache_s", "keys and values are read", "Reading keys and values bounds it: shorter contexts or a smaller cache type help."],
]);

/** @returns {import("./main.js").Screen} */
export function makePlan() {
  let plan = /** @type {Plan | null} */ (null);
  let isVisible = false, timer = 0, number = 0;
  /** Tokens and seconds of the steps of this session. @type {{tokens: number, seconds: number, prompt: boolean}[]} */
  const dots = [];
  /** @type {Map<number, number>} the last step that is among the dots, by replica */
  const seen = new Map();
  const change = () => {
    clearTimeout(timer);
    timer = setTimeout(load, 60);
  };
  const context = slider({ label: "Tokens of context", min: 16, max: 8192, value: 512, logarithmic: true, change });
  const batch = slider({ label: "Requests in a step", min: 1, max: 256, value: 16, logarithmic: true, change: () => showFigures() });
  const figures = tiles(["Step", "Tokens/s, all", "Tokens/s, each", "90% range", "Requests that fit"]);
  const notice = h("p", { class: "notice", role: "status", hidden: true });
  const caption = h("p", { class: "dim" }), bound = h("p"), bar = h("div", { class: "parts", "aria-hidden": "true" }), parts = h("dl", { class: "facts-list" });
  const canvas = makeCanvas({ label: "Tokens a second over the tokens of a step, predicted and measured", height: () => HEIGHT, draw: (drawing) => plan && drawRoofline(drawing, plan, dots, batch.value) });

  async function load() {
    clearTimeout(timer);
    const mine = ++number;
    try {
      const most = plan?.max_len ?? live.engine.value?.max_len ?? Infinity;
      const found = await json(`console/plan?context_tokens=${Math.min(most, context.value)}`);
      if (mine !== number) return;
      plan = found;
      notice.hidden = true;
      say(caption, `${found.model} on ${found.machine}. Predictions are ${percent(found.step_error.median)} off in the median and ${percent(found.step_error.p95)} at the 95th percentile.`);
    } catch (error) {
      if (mine !== number) return;
      notice.hidden = false;
      say(notice, error instanceof ApiError ? error.message : String(error));
    }
    showFigures();
    if (isVisible) timer = setTimeout(load, REFRESH_MS); // served steps keep the costs fresh
  }

  function showFigures() {
    canvas.redraw();
    if (!plan) return;
    const size = Math.min(batch.value, plan.max_requests), point = interpolate(plan.decode, size);
    figures.set({
      Step: duration(point.seconds),
      "Tokens/s, all": short(size / point.seconds),
      "Tokens/s, each": short(1 / point.seconds),
      "90% range": interval(point.low_s, point.high_s),
      "Requests that fit": count(plan.fitting_requests),
    });
    const largest = CAUSES.reduce((a, b) => (point[a[0]] >= point[b[0]] ? a : b));
    const more = size > plan.fitting_requests ? ` The cache has room for ${counted(plan.fitting_requests, "request")} of this context only: the others would wait.` : "";
    say(bound, largest[2] + more);
    showParts(bar, parts, point);
  }

  function collect() {
    for (const [index, replica] of live.replicas) {
      const last = seen.get(index) ?? -1;
      const steps = replica.steps.filter((step) => step.step > last && step.seconds);
      for (const step of steps) dots.push({ tokens: step.prompt_tokens + step.decode_rows + step.draft_rows + step.draft_tokens, seconds: /** @type {number} */ (step.seconds), prompt: step.prompt_rows > 0 });
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
      h("div", { class: "columns even" }, section("Decoding", h("div", { class: "screen" }, h("div", { class: "controls" }, batch.element, context.element), figures.element)), section("What bounds it", h("div", { class: "screen" }, bound, bar, parts)))
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

/** The step of a size between those that were predicted. @param {Point[]} points @param {number} tokens @returns {Point} */
export function interpolate(points, tokens) {
  const after = Math.max(1, points.findIndex((point) => point.tokens >= tokens));
  const [a, b] = [points[after - 1], points[after] ?? points[after - 1]];
  const share = b.tokens === a.tokens ? 0 : Math.min(1, Math.max(0, (tokens - a.tokens) / (b.tokens - a.tokens)));
  const mix = (/** @type {keyof Point} */ name) => a[name] + share * (b[name] - a[name]);
  return { tokens, seconds: mix("seconds"), low_s: mix("low_s"), high_s: mix("high_s"), fixed_s: mix("fixed_s"), tokens_s: mix("tokens_s"), cache_s: mix("cache_s") };
}

/** @param {import("./canvas.js").Drawing} drawing @param {Plan} plan @param {{tokens: number, seconds: number, prompt: boolean}[]} dots @param {number} size */
function drawRoofline({ pen, width, color }, plan, dots, size) {
  const all = [...plan.decode, ...plan.prompt];
  const most = Math.max(...all.map((point) => point.tokens)), speeds = [...all.map((point) => point.tokens / point.seconds), ...dots.map((dot) => dot.tokens / dot.seconds)];
  const low = 0.7 * Math.min(...speeds), high = 1.6 * Math.max(...speeds);
  const toX = (/** @type {number} */ tokens) => LEFT + (Math.log(tokens) / Math.log(most)) * (width - LEFT - RIGHT);
  const toY = (/** @type {number} */ speed) => HEIGHT - BOTTOM - (Math.log(speed / low) / Math.log(high / low)) * (HEIGHT - TOP - BOTTOM);
  drawAxes(pen, width, most, low, high, toX, toY, color);
  drawBounds(pen, plan, toX, toY, color);
  pen.globalAlpha = 0.5;
  for (const dot of dots) {
    pen.fillStyle = color(dot.prompt ? "prompt" : "decode");
    pen.beginPath();
    pen.arc(toX(Math.max(1, dot.tokens)), toY(Math.max(low, dot.tokens / dot.seconds)), 2.5, 0, 7);
    pen.fill();
  }
  pen.globalAlpha = 1;
  for (const [points, dash, name] of /** @type {[Point[], number[], string][]} */ ([[plan.decode, [], "decoding"], [plan.prompt, [5, 4], "one prompt"]])) {
    pen.strokeStyle = pen.fillStyle = color("text");
    pen.lineWidth = 1.6;
    pen.setLineDash(dash);
    pen.beginPath();
    for (const point of points) pen.lineTo(toX(point.tokens), toY(point.tokens / point.seconds));
    pen.stroke();
    pen.setLineDash([]);
    const last = points[points.length - 1];
    pen.textAlign = "right";
    pen.textBaseline = "top";
    pen.fillText(name, toX(last.tokens), toY(last.tokens / last.seconds) + 9);
  }
  const point = interpolate(plan.decode, Math.min(size, plan.max_requests));
  pen.fillStyle = color("accent");
  pen.beginPath();
  pen.arc(toX(point.tokens), toY(point.tokens / point.seconds), 5, 0, 7);
  pen.fill();
}

/** The two lines that no step is above: what is read for every step, and the arithmetic of each token.
 * @param {CanvasRenderingContext2D} pen @param {Plan} plan @param {(tokens: number) => number} toX @param {(speed: number) => number} toY @param {(name: string) => string} color */
function drawBounds(pen, plan, toX, toY, color) {
  const fixed = plan.prompt[0].fixed_s, last = plan.prompt[plan.prompt.length - 1];
  if (!last.tokens_s) return;
  const roof = (last.tokens - 1) / last.tokens_s, corner = Math.min(last.tokens, Math.max(1, roof * fixed));
  pen.strokeStyle = pen.fillStyle = color("dim");
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(toX(1), toY(1 / fixed));
  pen.lineTo(toX(corner), toY(corner / fixed));
  pen.lineTo(toX(last.tokens), toY(roof));
  pen.stroke();
  pen.textBaseline = "bottom";
  pen.textAlign = "right";
  pen.fillText("bound by arithmetic", toX(last.tokens), toY(roof) - 5);
  const [x, y] = [toX(Math.sqrt(corner)), toY(Math.sqrt(corner) / fixed)];
  pen.save();
  pen.translate(x, y);
  pen.rotate(Math.atan2(toY(2) - toY(1), toX(2) - toX(1)));
  pen.textAlign = "center";
  pen.fillText("bound by reading the weights", 0, -5);
  pen.restore();
}

/** 1, 2 and 5 times the powers of ten within a range. @param {number} low @param {number} high */
function decades(low, high) {
  const powers = Array.from({ length: 14 }, (_, index) => 10 ** (index - 2));
  return powers.flatMap((power) => [power, 2 * power, 5 * power]).filter((value) => value >= low && value <= high);
}

/** @param {CanvasRenderingContext2D} pen @param {number} width @param {number} most @param {number} low @param {number} high @param {(tokens: number) => number} toX @param {(speed: number) => number} toY @param {(name: string) => string} color */
function drawAxes(pen, width, most, low, high, toX, toY, color) {
  pen.lineWidth = 1;
  for (const speed of decades(low, high)) {
    pen.fillStyle = color("line");
    pen.fillRect(LEFT, toY(speed), width - LEFT - RIGHT, 1);
    pen.fillStyle = color("dim");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(short(speed), LEFT - 10, toY(speed));
  }
  for (let tokens = 1; tokens <= most; tokens *= width < 600 ? 8 : 2) {
    pen.fillStyle = color("line");
    pen.fillRect(toX(tokens), TOP, 1, HEIGHT - TOP - BOTTOM);
    pen.fillStyle = color("dim");
    pen.textAlign = "center";
    pen.textBaseline = "top";
    pen.fillText(count(tokens), toX(tokens), HEIGHT - BOTTOM + 7);
  }
  pen.fillText("tokens in a step", LEFT + (width - LEFT - RIGHT) / 2, HEIGHT - 16);
  pen.save();
  pen.translate(12, (HEIGHT - BOTTOM) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("tokens a second", 0, -6);
  pen.restore();
}
