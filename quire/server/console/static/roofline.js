// The drawing of the Plan screen: tokens a second over the tokens of a step, both logarithmic, as a roofline has them.

import { count, counted, percent, short } from "./format.js";

/**
 * @typedef {{tokens: number, seconds: number, low_s: number, high_s: number, fixed_s: number, tokens_s: number, cache_s: number}} Point
 * @typedef {{median: number, p95: number, served_steps: number, served_median: number | null}} StepError
 * @typedef {{machine: string, model: string, step_error: StepError, context_tokens: number, max_len: number,
 *   max_requests: number, max_tokens_per_step: number, fitting_requests: number, decode: Point[], prompt: Point[]}} Plan
 * @typedef {{tokens: number, seconds: number, prompt: boolean}} Dot a step that was measured
 */

export const ROOFLINE_HEIGHT = 420;
const HEIGHT = ROOFLINE_HEIGHT, LEFT = 62, RIGHT = 16, TOP = 14, BOTTOM = 40;

/** How far predicted steps are off. @param {StepError} error */
export function errorOf({ median, served_steps: steps, served_median: served }) {
  if (served !== null && steps) return `Predictions of the last ${counted(steps, "step")} were ${percent(served)} off in the median.`;
  return `Predictions are ${percent(median)} off in the median.`;
}

/**
 * The step of a size between those that were predicted. @param {Point[]} points @param {number} tokens
 * @returns {Point}
 */
export function interpolate(points, tokens) {
  const after = Math.max(1, points.findIndex((point) => point.tokens >= tokens));
  const [a, b] = [points[after - 1], points[after] ?? points[after - 1]];
  const share = b.tokens === a.tokens ? 0 : Math.min(1, Math.max(0, (tokens - a.tokens) / (b.tokens - a.tokens)));
  const mix = (/** @type {keyof Point} */ name) => a[name] + share * (b[name] - a[name]);
  const [seconds, low_s, high_s] = [mix("seconds"), mix("low_s"), mix("high_s")];
  return { tokens, seconds, low_s, high_s, fixed_s: mix("fixed_s"), tokens_s: mix("tokens_s"), cache_s: mix("cache_s") };
}

/** @param {import("./canvas.js").Drawing} drawing @param {Plan} plan @param {Dot[]} dots @param {number} size */
export function drawRoofline({ pen, width, color }, plan, dots, size) {
  const all = [...plan.decode, ...plan.prompt];
  const most = Math.max(...all.map((point) => point.tokens)), speeds = [...all, ...dots].map((each) => each.tokens / each.seconds);
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
 * @param {CanvasRenderingContext2D} pen @param {Plan} plan @param {(tokens: number) => number} toX
 * @param {(speed: number) => number} toY @param {(name: string) => string} color
 */
function drawBounds(pen, plan, toX, toY, color) {
  const fixed = plan.prompt[0].fixed_s, last = plan.prompt[plan.prompt.length - 1];
  const speeds = plan.prompt.filter((point) => point.tokens_s > 0 && point.tokens >= 16).map((point) => (point.tokens - 1) / point.tokens_s);
  if (!speeds.length) return;
  const roof = Math.max(...speeds), corner = Math.min(last.tokens, Math.max(1, roof * fixed));
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

/**
 * @param {CanvasRenderingContext2D} pen @param {number} width @param {number} most @param {number} low
 * @param {number} high @param {(tokens: number) => number} toX @param {(speed: number) => number} toY
 * @param {(name: string) => string} color
 */
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
