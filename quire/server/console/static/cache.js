// Cache: the prefix tree. From left to right a prompt's tokens, from top to bottom its branches.

import { ApiError, json } from "./api.js";
import { addCursor, makeCanvas, step, ticks } from "./canvas.js";
import { fill, h, legend, say, tiles } from "./dom.js";
import { count, counted, percent } from "./format.js";
import { section } from "./live.js";
import { ownerColor } from "./owners.js";
import { live } from "./stream.js";

/**
 * @typedef {{node: number, parent: number | null, blocks: number, tokens: number, text: string | null, hits: number,
 *   requests: number[], in_use: boolean}} Node
 * @typedef {{replica: number, block_size: number, num_blocks: number, num_cached_blocks: number, num_free_blocks: number,
 *   prompt_tokens: number, cached_tokens: number, evicted_blocks: number, nodes: Node[], num_hidden: number,
 *   tenants: {own: boolean, tenant: string | null, blocks: number, hits: number}[]}} Cache
 * @typedef {{node: Node, start: number, end: number, row: number, rows: number}} Box a node in tokens and rows of leaves
 */

const REFRESH_MS = 1000, AXIS = 22, MAX_HEIGHT = 520, MAX_ROW = 26, MIN_ROW = 2;
const HINT = "Point at a part of the tree, or move through it with the arrow keys.";

/** @returns {import("./main.js").Screen} */
export function makeCache() {
  let replica = 0, isVisible = false, timer = 0;
  let cache = /** @type {Cache | null} */ (null);
  let boxes = /** @type {Box[]} */ ([]);
  let chosen = /** @type {number | null} */ (null);
  const totals = tiles(["Prompt tokens from the cache", "Blocks cached", "Blocks in the tree", "Blocks evicted", "Hits"]);
  const notice = h("p", { class: "empty", role: "status" });
  const readout = h("p", { class: "readout" }, HINT);
  const others = h("p", { class: "dim" });
  const chooser = h("div", { class: "tabs", role: "group", "aria-label": "Replicas", hidden: true });

  const canvas = makeCanvas({
    label: "The prefix tree",
    height: () => AXIS + rowsOf(boxes) * rowHeight(boxes),
    draw: (drawing) => drawTree(drawing, boxes, chosen),
  });
  addCursor(canvas.element, {
    label: "The prefix tree",
    size: () => boxes.length,
    find: (x, y) => boxAt(boxes, (x / canvas.element.clientWidth) * widest(boxes), (y - AXIS) / rowHeight(boxes)),
    move: (key, from) => neighbour(boxes, key, from),
    describe: (index) => describe(boxes[index]),
    select: (index) => {
      chosen = index;
      say(readout, index === null ? HINT : describe(boxes[index]));
      canvas.redraw();
    },
  });

  async function load() {
    clearTimeout(timer);
    try {
      cache = /** @type {Cache} */ (await json(`console/cache?replica=${replica}`));
      boxes = placeNodes(cache.nodes);
      say(notice, boxes.length ? "" : "No prompt is in the cache yet.");
      show(cache);
    } catch (error) {
      say(notice, error instanceof ApiError ? error.message : String(error));
    }
    canvas.element.hidden = readout.hidden = !boxes.length;
    if (isVisible) timer = setTimeout(load, REFRESH_MS);
  }

  /** @param {Cache} cache */
  function show(cache) {
    const foreign = cache.tenants.filter((tenant) => !tenant.own).reduce((all, tenant) => all + tenant.blocks, 0);
    totals.set({
      "Prompt tokens from the cache": percent(cache.prompt_tokens ? cache.cached_tokens / cache.prompt_tokens : 0),
      "Blocks cached": count(cache.num_cached_blocks),
      "Blocks in the tree": count(cache.nodes.reduce((all, node) => all + node.blocks, 0)),
      "Blocks evicted": count(cache.evicted_blocks),
      Hits: count(cache.tenants.reduce((all, tenant) => all + tenant.hits, 0)),
    });
    const hidden = cache.num_hidden ? `${counted(cache.num_hidden, "block")} in smaller nodes are left out. ` : "";
    say(others, hidden + (foreign ? `Other tenants have ${counted(foreign, "block")}.` : ""));
    showReplicas();
    canvas.redraw();
  }

  function showReplicas() {
    chooser.hidden = live.replicas.size < 2;
    if (chooser.hidden) return;
    const numbers = [...live.replicas.keys()].sort((a, b) => a - b);
    const button = (/** @type {number} */ number) =>
      h("button", { type: "button", "aria-pressed": String(number === replica), onclick: () => choose(number) }, `Replica ${number}`);
    fill(chooser, numbers.map(button));
  }

  /** @param {number} number */
  function choose(number) {
    replica = number;
    load();
  }

  const key = legend([["cached", "cached"], ["owners", "held by a request"]]);
  return {
    element: h(
      "div",
      { class: "screen" },
      h("header", null, h("h1", null, "Cache"), chooser),
      totals.element,
      section("Prefix tree", h("div", null, canvas.element, readout, notice, others), key)
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

/** Give every node its tokens and its rows: as many as it has leaves. @param {Node[]} nodes @returns {Box[]} */
export function placeNodes(nodes) {
  const known = new Set(nodes.map((node) => node.node));
  /** @type {Map<number | null, Node[]>} */
  const children = new Map();
  for (const node of nodes) {
    const parent = node.parent !== null && known.has(node.parent) ? node.parent : null;
    const siblings = children.get(parent);
    if (siblings) siblings.push(node);
    else children.set(parent, [node]);
  }
  /** @type {Box[]} */
  const boxes = [];
  /** @type {{box: Box, from: number}[]} */
  const open = [];
  const work = (children.get(null) ?? []).map((node) => ({ node, start: 0, depth: 0 })).reverse();
  let row = 0;
  while (work.length) {
    const { node, start, depth } = /** @type {{node: Node, start: number, depth: number}} */ (work.pop());
    open.length = depth;
    const box = { node, start, end: start + node.tokens, row, rows: 0 };
    boxes.push(box);
    open.push({ box, from: row });
    const below = children.get(node.node) ?? [];
    for (const child of below.toReversed()) work.push({ node: child, start: box.end, depth: depth + 1 });
    if (!below.length) {
      row += 1;
      for (const each of open) each.box.rows = row - each.from;
    }
  }
  return boxes;
}

/** @param {Box[]} boxes */
const rowsOf = (boxes) => Math.max(1, ...boxes.map((box) => box.row + box.rows));
/** @param {Box[]} boxes */
const widest = (boxes) => Math.max(1, ...boxes.map((box) => box.end));
/** @param {Box[]} boxes */
const rowHeight = (boxes) => Math.max(MIN_ROW, Math.min(MAX_ROW, MAX_HEIGHT / rowsOf(boxes)));

/** @param {Box[]} boxes @param {number} token @param {number} row */
function boxAt(boxes, token, row) {
  const index = boxes.findIndex((box) => token >= box.start && token < box.end && row >= box.row && row < box.row + box.rows);
  return index < 0 ? null : index;
}

/**
 * Right and left: deeper, and back; down and up: the next branch of the same depth. @param {Box[]} boxes
 * @param {string} key @param {number} from
 */
function neighbour(boxes, key, from) {
  const box = boxes[from];
  const child = boxes.findIndex((each) => each.node.parent === box.node.node);
  const parent = boxes.findIndex((each) => each.node.node === box.node.parent);
  if (key === "ArrowRight") return child < 0 ? from : child;
  if (key === "ArrowLeft") return parent < 0 ? from : parent;
  if (key === "ArrowDown") return from + Math.max(1, boxes.slice(from).findIndex((each) => each.row >= box.row + box.rows));
  return step(key, from, boxes.length);
}

/** @param {Box | undefined} box */
function describe(box) {
  if (!box) return "";
  const { node } = box;
  const held = node.requests.length ? `, held by ${node.requests.map((number) => `request ${number}`).join(", ")}` : "";
  const text = node.text ? ` “${node.text.replace(/\s+/g, " ")}”` : "";
  return `Tokens ${count(box.start)} to ${count(box.end)}: ${counted(node.blocks, "block")}, ${counted(node.hits, "hit")}${held}.${text}`;
}

/** @param {import("./canvas.js").Drawing} drawing @param {Box[]} boxes @param {number | null} chosen */
function drawTree({ pen, width, color }, boxes, chosen) {
  const most = widest(boxes), scale = width / most, size = rowHeight(boxes), gap = size > 6 ? 1 : 0;
  pen.textBaseline = "middle";
  for (const mark of ticks(most, Math.max(2, width / 120))) {
    pen.fillStyle = color("dim");
    pen.textAlign = mark * scale < 20 ? "left" : mark * scale > width - 30 ? "right" : "center";
    pen.fillText(mark ? counted(mark, "token") : "0", mark * scale, 8);
  }
  boxes.forEach((box, index) => {
    const x = box.start * scale, across = Math.max(1, box.node.tokens * scale - 1);
    const y = AXIS + box.row * size, down = Math.max(1, box.rows * size - gap);
    pen.fillStyle = box.node.requests.length ? ownerColor(box.node.requests[0]) : color("cached");
    pen.globalAlpha = chosen === null || chosen === index ? 1 : 0.5;
    pen.fillRect(x, y, across, down);
    pen.globalAlpha = 1;
    if (across > 60 && down > 13 && box.node.text) {
      pen.save();
      pen.beginPath();
      pen.rect(x, y, across - 6, down);
      pen.clip();
      pen.fillStyle = box.node.requests.length ? "#10141a" : color("text");
      pen.textAlign = "left";
      pen.fillText(box.node.text.replace(/\s+/g, " "), x + 7, y + down / 2 + 0.5);
      pen.restore();
    }
  });
}
