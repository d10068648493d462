// The last steps: above, the tokens of each by kind of row; below, how long it took and what was predicted.

import { addCursor, makeCanvas, step as nextItem, ticks } from "./canvas.js";
import { fill, h } from "./dom.js";
import { counted, duration, tick } from "./format.js";

/** @typedef {import("./replica.js").Step} Step */

const BAR = 7, LEFT = 56, HEIGHT = 196, UPPER = 104, LOWER_TOP = 128, LOWER_BOTTOM = 190;
const HINT = "Point at a step, or move through them with the arrow keys.";

/** @param {() => Step[]} stepsOf */
export function makeSteps(stepsOf) {
  const readout = h("p", { class: "readout" }, HINT);
  let visible = /** @type {Step[]} */ ([]);
  let left = LEFT; // of the first bar: the newest is at the right edge
  let chosen = /** @type {number | null} */ (null); // a step's number: the bars move on
  const canvas = makeCanvas({
    label: "The last steps",
    height: () => HEIGHT,
    draw({ pen, width, color }) {
      visible = stepsOf().slice(-Math.max(1, Math.floor((width - LEFT) / BAR)));
      if (!visible.length) return;
      left = width - visible.length * BAR;
      drawTokens(pen, visible, width, left, color, chosen);
      drawSeconds(pen, visible, width, left, color);
      if (chosen !== null && visible.length && chosen < visible[0].step) chosen = null;
    },
  });
  addCursor(canvas.element, {
    label: "The last steps",
    size: () => visible.length,
    find: (x) => {
      const index = Math.floor((x - left) / BAR);
      return index >= 0 && index < visible.length ? index : null;
    },
    start: () => visible.length - 1,
    move: (key, from) => nextItem(key, from, visible.length),
    describe: (index) => (visible[index] ? describe(visible[index]) : ""),
    select: (index) => {
      chosen = index === null ? null : (visible[index]?.step ?? null);
      fill(readout, index === null || !visible[index] ? HINT : describe(visible[index]));
      canvas.redraw();
    },
  });
  return { element: h("div", null, canvas.element, readout), redraw: canvas.redraw };
}

/** @param {Step} step */
function describe(step) {
  const parts = [
    step.prompt_rows && `${counted(step.prompt_rows, "prompt chunk")} of ${counted(step.prompt_tokens, "token")}`,
    step.decode_rows && counted(step.decode_rows, "decoding row"),
    step.draft_rows && `${counted(step.draft_rows, "row")} with ${counted(step.draft_tokens, "draft")}`,
    step.admitted && `${step.admitted} admitted`,
    step.preempted && `${step.preempted} preempted`,
    step.failed && "failed",
  ].filter(Boolean);
  const predicted = step.predicted_s === null ? "" : `, predicted ${duration(step.predicted_s)}`;
  return `Step ${step.step}: ${duration(step.seconds)}${predicted}. ${parts.join(", ") || "No rows"}.`;
}

/**
 * Tokens of a step by kind, in the order in which they are stacked. @param {Step} step @returns {[string, number][]}
 */
function kinds(step) {
  return [
    ["decode", step.decode_rows],
    ["draft", step.draft_rows + step.draft_tokens],
    ["prompt", step.prompt_tokens],
  ];
}

const total = (/** @type {Step} */ step) => kinds(step).reduce((sum, [, tokens]) => sum + tokens, 0);

/**
 * @param {CanvasRenderingContext2D} pen @param {Step[]} steps @param {number} width @param {number} left
 * @param {(name: string) => string} color @param {number | null} chosen
 */
function drawTokens(pen, steps, width, left, color, chosen) {
  const most = Math.max(4, ...steps.map(total));
  // The square root keeps sixteen decoded tokens visible beside a chunk of a thousand.
  const height = (/** @type {number} */ tokens) => (Math.sqrt(tokens / most) * (UPPER - 12));
  const marks = [...new Set([most, Math.round(most / 4), Math.round(most / 25)])].filter((mark) => mark > 0);
  drawAxis(pen, width, color, marks.map((mark) => [UPPER - height(mark), String(mark)]), UPPER);
  steps.forEach((step, index) => {
    const x = left + index * BAR, all = total(step);
    let y = UPPER;
    for (const [kind, tokens] of kinds(step)) {
      const part = all ? (height(all) * tokens) / all : 0;
      pen.fillStyle = color(step.failed ? "bad" : kind);
      pen.globalAlpha = chosen === null || chosen === step.step ? 1 : 0.45;
      pen.fillRect(x, y - part, BAR - 2, part);
      y -= part;
    }
    if (step.preempted) {
      pen.fillStyle = color("bad");
      pen.fillRect(x, UPPER + 2, BAR - 2, 3);
    }
  });
  pen.globalAlpha = 1;
}

/**
 * @param {CanvasRenderingContext2D} pen @param {Step[]} steps @param {number} width @param {number} left
 * @param {(name: string) => string} color
 */
function drawSeconds(pen, steps, width, left, color) {
  const most = Math.max(1e-4, ...steps.map((step) => Math.max(step.seconds ?? 0, step.predicted_s ?? 0)));
  const height = (/** @type {number} */ seconds) => (seconds / most) * (LOWER_BOTTOM - LOWER_TOP);
  drawAxis(pen, width, color, ticks(most, 2).slice(1).map((mark) => [LOWER_BOTTOM - height(mark), tick(mark)]), LOWER_BOTTOM);
  steps.forEach((step, index) => {
    const x = left + index * BAR;
    pen.fillStyle = color("cached");
    pen.fillRect(x, LOWER_BOTTOM - height(step.seconds ?? 0), BAR - 2, height(step.seconds ?? 0));
    if (step.predicted_s !== null) {
      pen.fillStyle = color("text");
      pen.fillRect(x, LOWER_BOTTOM - height(step.predicted_s) - 1, BAR - 2, 2);
    }
  });
}

/**
 * @param {CanvasRenderingContext2D} pen @param {number} width @param {(name: string) => string} color
 * @param {[number, string][]} marks @param {number} base
 */
function drawAxis(pen, width, color, marks, base) {
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [y, text] of [...marks, /** @type {[number, string]} */ ([base, "0"])]) {
    pen.fillStyle = color("line");
    pen.fillRect(LEFT, Math.round(y) - 0.5, width - LEFT, 1);
    pen.fillStyle = color("dim");
    pen.fillText(text, LEFT - 8, y);
  }
}
