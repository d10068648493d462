// The block map: a cell for every block of the cache, in the colour of the request that holds it.

import { addCursor, makeCanvas, step } from "./canvas.js";
import { fill, h } from "./dom.js";
import { count, counted } from "./format.js";
import { ownerPixels, toPixel } from "./owners.js";
import { CACHED, FREE, SHARED, nameOf } from "./replica.js";

/** @typedef {import("./replica.js").Replica} Replica */

const MAX_HEIGHT = 300, MAX_CELL = 14, GAP_FROM = 5;
const WORDS = ["free", "cached, held by no request", "in use", "shared by several requests"];

/** Cells of `size` pixels, each of which stands for `each` blocks. */
export function layOut(/** @type {number} */ blocks, /** @type {number} */ width, maxHeight = MAX_HEIGHT) {
  for (let size = MAX_CELL; size >= 1; size -= size > 2 ? 1 : 0.5) {
    const columns = Math.max(1, Math.floor(width / size)), rows = Math.max(1, Math.ceil(blocks / columns));
    if (rows * size <= maxHeight) return { size, columns, rows, each: 1 };
  }
  const columns = Math.max(1, Math.floor(width)), each = Math.ceil(blocks / (columns * maxHeight));
  return { size: 1, columns, rows: Math.ceil(blocks / each / columns), each };
}

/** @param {() => Replica | undefined} replicaOf @param {(id: string) => void} open */
export function makeBlockMap(replicaOf, open) {
  const image = document.createElement("canvas"), pixels = /** @type {CanvasRenderingContext2D} */ (image.getContext("2d"));
  const readout = h("p", { class: "readout" }, "Point at a block, or move through them with the arrow keys.");
  let grid = layOut(1, 1);
  let chosen = /** @type {number | null} */ (null);
  let highlighted = /** @type {number | null} */ (null);

  const canvas = makeCanvas({
    label: "Blocks of the cache",
    class: "blocks",
    height: (width) => {
      grid = layOut(Math.max(1, replicaOf()?.states.length ?? 1), width);
      return grid.rows * grid.size;
    },
    draw({ pen, width, color }) {
      const replica = replicaOf();
      if (!replica?.states.length) return;
      grid = layOut(replica.states.length, width);
      const { size, columns, rows } = grid;
      if (image.width !== columns || image.height !== rows) [image.width, image.height] = [columns, rows];
      pixels.putImageData(paintCells(replica, grid, highlighted, color), 0, 0);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(image, 0, 0, columns * size, rows * size);
      if (size >= GAP_FROM) drawGaps(pen, grid, color("panel"));
      if (chosen !== null) drawChosen(pen, grid, chosen, color("text"));
    },
  });

  function describe(/** @type {number} */ cell) {
    const replica = /** @type {Replica} */ (replicaOf());
    const first = cell * grid.each, block = strongest(replica.states, first, grid.each);
    const [state, owner] = [replica.states[block], replica.owners[block]];
    const last = Math.min(first + grid.each, replica.states.length);
    const name = grid.each === 1 ? `Block ${count(last)}` : `Blocks ${count(first + 1)} to ${count(last)}`;
    if (!owner) return `${name}: ${WORDS[state]}`;
    const row = replica.requests.get(owner);
    const held = row ? `, which holds ${counted(row.blocks, "block")}` : "";
    return `${name}: ${WORDS[state]}, ${state === SHARED ? "one of them " : "by "}${nameOf(row, owner)}${held}`;
  }

  addCursor(canvas.element, {
    label: "Blocks of the cache",
    size: () => Math.ceil((replicaOf()?.states.length ?? 0) / grid.each),
    find: (x, y) => {
      const column = Math.floor(x / grid.size), cell = Math.floor(y / grid.size) * grid.columns + column;
      return column < grid.columns && cell >= 0 && cell * grid.each < (replicaOf()?.states.length ?? 0) ? cell : null;
    },
    move: (key, from) => {
      if (key === "ArrowDown") return from + grid.columns;
      if (key === "ArrowUp") return from - grid.columns;
      return step(key, from, Math.ceil((replicaOf()?.states.length ?? 0) / grid.each), 10 * grid.columns);
    },
    describe,
    select: (cell) => {
      chosen = cell;
      const replica = replicaOf();
      const owner = cell === null || !replica ? 0 : replica.owners[strongest(replica.states, cell * grid.each, grid.each)];
      highlighted = owner || null;
      fill(readout, cell === null ? "Point at a block, or move through them with the arrow keys." : describe(cell));
      canvas.redraw();
    },
    open: (cell) => {
      const replica = replicaOf(), row = replica?.requests.get(replica.owners[strongest(replica.states, cell * grid.each, grid.each)]);
      if (row?.id) open(row.id);
    },
  });

  return {
    element: h("div", null, canvas.element, readout),
    redraw: canvas.redraw,
    paint: canvas.paint,
    /** Emphasize a request's blocks. @param {number | null} owner */
    highlight(owner) {
      highlighted = owner;
      canvas.redraw();
    },
  };
}

/**
 * Of the blocks of a cell, the one that is in use most. @param {Uint8Array} states @param {number} first
 * @param {number} each
 */
function strongest(states, first, each) {
  let best = first;
  for (let block = first + 1; block < Math.min(first + each, states.length); block++) {
    if (states[block] > states[best]) best = block;
  }
  return best;
}

/**
 * @param {Replica} replica @param {ReturnType<typeof layOut>} grid @param {number | null} highlighted
 * @param {(name: string) => string} color
 */
function paintCells(replica, grid, highlighted, color) {
  const { states, owners } = replica, { columns, rows, each } = grid;
  const image = new ImageData(columns, rows), cells = new Uint32Array(image.data.buffer);
  const quiet = highlighted === null ? 1 : 0.4;
  const free = toPixel(color("free")), cached = toPixel(color("cached"), quiet), shared = toPixel(color("text"), quiet * 0.75);
  const owner = ownerPixels(highlighted, (number) => replica.requests.get(number)?.own ?? true);
  const size = Math.ceil(states.length / each);
  for (let cell = 0; cell < size; cell++) {
    const block = each === 1 ? cell : strongest(states, cell * each, each), state = states[block];
    cells[cell] = state === FREE ? free : state === CACHED ? cached : state === SHARED ? shared : owner(owners[block]);
  }
  return image;
}

/** @param {CanvasRenderingContext2D} pen @param {ReturnType<typeof layOut>} grid @param {string} color */
function drawGaps(pen, { size, columns, rows }, color) {
  pen.fillStyle = color;
  for (let column = 1; column <= columns; column++) pen.fillRect(column * size - 1, 0, 1, rows * size);
  for (let row = 1; row <= rows; row++) pen.fillRect(0, row * size - 1, columns * size, 1);
}

/**
 * @param {CanvasRenderingContext2D} pen @param {ReturnType<typeof layOut>} grid @param {number} cell
 * @param {string} color
 */
function drawChosen(pen, { size, columns }, cell, color) {
  const x = (cell % columns) * size, y = Math.floor(cell / columns) * size;
  pen.strokeStyle = color;
  pen.lineWidth = 2;
  pen.strokeRect(x - 1, y - 1, size + 1, size + 1);
}
