// A Gantt chart: a row for each request, from its arrival to its last token, with a measured run laid over it.

import { addCursor, makeCanvas, step, ticks } from "./canvas.js";
import { h, say } from "./dom.js";
import { duration, tick } from "./format.js";

/**
 * @typedef {[number, number | null, number, number]} Span arrival, start of its first step, first token, end
 * @typedef {{firstS?: number, endS?: number}} Measured
 */

const ROW = 9, LEFT = 4, AXIS = 22;
const HINT = "Point at a request, or use the arrow keys.";

/** @param {string} label */
export function makeGantt(label) {
  const readout = h("p", { class: "readout" }, HINT);
  /** @type {Span[]} */
  let spans = [];
  /** @type {Measured[]} */
  let measured = [];
  let endS = 1;
  let chosen = /** @type {number | null} */ (null);
  const canvas = makeCanvas({
    label,
    height: () => Math.max(1, spans.length) * ROW + AXIS,
    draw: (drawing) => draw(drawing, spans, measured, endS, chosen),
  });
  addCursor(canvas.element, {
    label,
    size: () => spans.length,
    find: (_, y) => (y < spans.length * ROW ? Math.floor(y / ROW) : null),
    move: (key, from) => step(key, from, spans.length),
    describe: (index) => describe(index, spans[index], measured[index]),
    select: (index) => {
      chosen = index;
      say(readout, index === null ? HINT : describe(index, spans[index], measured[index]));
      canvas.redraw();
    },
  });
  return {
    element: h("div", null, canvas.element, readout),
    /** @param {Span[]} given @param {number} end the end of the axis: charts side by side have the same */
    set(given, end) {
      spans = given;
      endS = end;
      canvas.redraw();
    },
    /** @param {Measured[]} given */
    overlay(given) {
      measured = given;
      canvas.redraw();
    },
  };
}

/** @param {number} index @param {Span | undefined} span @param {Measured | undefined} measured */
function describe(index, span, measured) {
  if (!span) return "";
  const [arrival, start, first, end] = span;
  const times = (/** @type {number} */ firstS, /** @type {number} */ endS) =>
    `first token after ${duration(firstS - arrival)}, end after ${duration(endS - arrival)}.`;
  const waits = `Request ${index + 1}: arrives at ${duration(arrival)}, waits ${duration((start ?? first) - arrival)}`;
  const real = measured?.endS !== undefined ? ` Measured: ${times(measured.firstS ?? measured.endS, measured.endS)}` : "";
  return `${waits}, ${times(first, end)}${real}`;
}

/**
 * @param {import("./canvas.js").Drawing} drawing @param {Span[]} spans @param {Measured[]} measured
 * @param {number} endS @param {number | null} chosen
 */
function draw({ pen, width, color }, spans, measured, endS, chosen) {
  const toX = (/** @type {number} */ at) => LEFT + (at / endS) * (width - LEFT - 2);
  const bottom = spans.length * ROW;
  drawTimes(pen, width, bottom, endS, toX, color);
  spans.forEach(([arrival, start, first, end], index) => {
    const y = index * ROW;
    pen.globalAlpha = chosen === null || chosen === index ? 1 : 0.4;
    /** @type {[string, number, number, number][]} */
    const parts = [["wait", arrival, start ?? first, 3], ["prompt", start ?? first, first, ROW - 2], ["decode", first, end, ROW - 2]];
    for (const [name, from, to, tall] of parts) {
      pen.fillStyle = color(name);
      pen.fillRect(toX(from), y + (ROW - 1 - tall) / 2, Math.max(0.75, toX(to) - toX(from)), tall);
    }
    const real = measured[index];
    if (real) drawMeasured(pen, real, y, toX, color("text"));
  });
  pen.globalAlpha = 1;
}

/**
 * A line from the measured first token to the measured end. @param {CanvasRenderingContext2D} pen
 * @param {Measured} real @param {number} y @param {(at: number) => number} toX @param {string} color
 */
function drawMeasured(pen, real, y, toX, color) {
  pen.fillStyle = color;
  if (real.firstS === undefined) return;
  const x = toX(real.firstS);
  pen.fillRect(x - 1, y, 2, ROW - 1);
  if (real.endS === undefined) return;
  pen.fillRect(x, y + (ROW - 2) / 2, toX(real.endS) - x, 1);
  pen.fillRect(toX(real.endS) - 1, y, 2, ROW - 1);
}

/**
 * @param {CanvasRenderingContext2D} pen @param {number} width @param {number} bottom @param {number} endS
 * @param {(at: number) => number} toX @param {(name: string) => string} color
 */
function drawTimes(pen, width, bottom, endS, toX, color) {
  pen.textBaseline = "top";
  for (const mark of ticks(endS, Math.max(2, width / 90))) {
    const x = toX(mark);
    pen.fillStyle = color("line");
    pen.fillRect(x, 0, 1, bottom + 4);
    pen.fillStyle = color("dim");
    pen.textAlign = x < 20 ? "left" : x > width - 24 ? "right" : "center";
    pen.fillText(tick(mark), x, bottom + 8);
  }
}
