// One request's life, drawn: what happened to it when, a table of the events, and the figures of them all.

import { addCursor, makeCanvas, step, ticks } from "./canvas.js";
import { fill, h, legend, say } from "./dom.js";
import { count, counted, duration, percent, tick } from "./format.js";
import { section } from "./live.js";

/**
 * @typedef {{kind: string, start_s: number, end_s: number, step?: number, steps?: number, tokens?: number, blocks?: number}} Event
 * @typedef {{id: string, replica: number, number: number, state: string, finish: string | null, arrived_s: number,
 *   ended_s: number | null, prompt_tokens: number, cached_tokens: number, output_tokens: number, max_tokens: number,
 *   miss: string | null, events: Event[], num_dropped_events: number}} Life
 */

const HEIGHT = 74, TOP = 8, BOTTOM = 44;
/** The colour and the name of each kind of event. @type {Record<string, [string, string]>} */
const KINDS = {
  queued: ["wait", "Waited"],
  prompt: ["prompt", "Prompt"],
  decode: ["decode", "Decoded"],
  draft: ["draft", "Decoded with drafts"],
  preempted: ["bad", "Preempted"],
  swapped_out: ["bad", "Swapped out"],
  swapped_in: ["dim", "Swapped in"],
  restarted: ["bad", "Engine restarted"],
};
const kindOf = (/** @type {Event} */ event) => KINDS[event.kind] ?? ["dim", event.kind];
const HINT = "Point at a part, or move through them with the arrow keys.";

export function makeLife() {
  const title = h("h2", { class: "mono" }), facts = h("dl", { class: "facts-list" }), miss = h("p");
  const readout = h("p", { class: "readout" }, HINT), rows = h("tbody");
  let life = /** @type {Life | null} */ (null);
  let chosen = /** @type {number | null} */ (null);
  const canvas = makeCanvas({ label: "The request's life", height: () => HEIGHT, draw: (drawing) => life && drawLife(drawing, life, chosen) });
  addCursor(canvas.element, {
    label: "The request's life",
    size: () => life?.events.length ?? 0,
    find: (x) => (life ? eventAt(life, x / canvas.element.clientWidth) : null),
    move: (key, from) => step(key, from, life?.events.length ?? 0),
    describe: (index) => (life ? describe(life, life.events[index]) : ""),
    select: (index) => {
      chosen = index;
      say(readout, index === null || !life ? HINT : describe(life, life.events[index]));
      canvas.redraw();
    },
  });
  const heads = ["What", "At", "For", "Steps", "Tokens"].map((head, index) => h("th", { scope: "col", class: index ? "number" : "" }, head));
  const table = h("table", null, h("thead", null, h("tr", null, heads)), rows);
  const events = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of events" }, table);
  const key = legend([["wait", "waits"], ["prompt", "prompt"], ["decode", "decodes"], ["draft", "with drafts"], ["bad", "preempted"]]);
  const element = h(
    "article",
    { class: "screen" },
    section("Life", h("div", null, title, canvas.element, readout), key),
    h("div", { class: "columns" }, section("Events", events), section("Summary", h("div", null, facts, miss)))
  );
  return {
    element,
    /** @param {Life} given */
    set(given) {
      life = given;
      say(title, given.id);
      fill(facts, Object.entries(summary(given)).flatMap(([name, text]) => [h("dt", null, name), h("dd", null, text)]));
      miss.className = given.miss ? "readout" : "";
      say(miss, given.miss ?? "");
      fill(rows, given.events.map((event) => eventRow(given, event)));
      canvas.redraw();
    },
  };
}

/** @param {Life} life */
function summary(life) {
  const ended = life.ended_s ?? Date.now() / 1000;
  const first = life.events.find((event) => event.kind === "decode" || event.kind === "draft");
  const firstToken = first ? first.start_s - life.arrived_s : null;
  const decoding = first && life.output_tokens > 1 ? (ended - first.start_s) / (life.output_tokens - 1) : null;
  const waited = life.events.filter((event) => event.kind === "queued").reduce((all, event) => all + event.end_s - event.start_s, 0);
  return {
    State: life.finish ? `ended: ${life.finish}` : life.state,
    "In all": duration(ended - life.arrived_s),
    Waited: duration(waited),
    "First token after": duration(firstToken),
    "Between tokens": duration(decoding),
    Prompt: `${counted(life.prompt_tokens, "token")}, ${percent(life.prompt_tokens ? life.cached_tokens / life.prompt_tokens : 0)} from the cache`,
    Answer: `${count(life.output_tokens)} of at most ${counted(life.max_tokens, "token")}`,
    Engine: `replica ${life.replica}, request ${life.number}`,
    ...(life.num_dropped_events ? { "Left out": counted(life.num_dropped_events, "event") } : {}),
  };
}

/** @param {Life} life @param {Event} event */
function describe(life, event) {
  const parts = [`${kindOf(event)[1]} at ${duration(event.start_s - life.arrived_s)}`];
  if (event.end_s > event.start_s) parts.push(`for ${duration(event.end_s - event.start_s)}`);
  if (event.steps) parts.push(`${counted(event.steps, "step")} from step ${event.step}`);
  if (event.tokens) parts.push(counted(event.tokens, "token"));
  if (event.blocks) parts.push(counted(event.blocks, "block"));
  return `${parts.join(", ")}.`;
}

/** @param {Life} life @param {Event} event */
function eventRow(life, event) {
  const [color, name] = kindOf(event);
  const cells = [
    duration(event.start_s - life.arrived_s),
    event.end_s > event.start_s ? duration(event.end_s - event.start_s) : "",
    event.steps ? count(event.steps) : "",
    event.tokens ? count(event.tokens) : event.blocks ? counted(event.blocks, "block") : "",
  ];
  const kind = h("td", { class: "nowrap" }, h("i", { class: `key ${color} swatch` }), name);
  return h("tr", null, kind, cells.map((text) => h("td", { class: "number" }, text)));
}

/** @param {Life} life */
const spanOf = (life) => Math.max(1e-6, (life.ended_s ?? life.events.at(-1)?.end_s ?? life.arrived_s) - life.arrived_s);

/** @param {Life} life @param {number} share of the width */
function eventAt(life, share) {
  const at = life.arrived_s + share * spanOf(life);
  const index = life.events.findLastIndex((event) => event.start_s <= at);
  return index < 0 ? null : index;
}

/** @param {import("./canvas.js").Drawing} drawing @param {Life} life @param {number | null} chosen */
function drawLife({ pen, width, color }, life, chosen) {
  const span = spanOf(life), toX = (/** @type {number} */ at) => ((at - life.arrived_s) / span) * width;
  pen.fillStyle = color("free");
  pen.fillRect(0, TOP, width, BOTTOM - TOP);
  life.events.forEach((event, index) => {
    const x = toX(event.start_s), size = Math.max(event.end_s > event.start_s ? 1 : 3, toX(event.end_s) - x - 1);
    pen.fillStyle = color(kindOf(event)[0]);
    pen.globalAlpha = chosen === null || chosen === index ? 1 : 0.4;
    pen.fillRect(x, TOP - (event.end_s > event.start_s ? 0 : 5), size, BOTTOM - TOP + (event.end_s > event.start_s ? 0 : 10));
  });
  pen.globalAlpha = 1;
  pen.textBaseline = "top";
  for (const mark of ticks(span, Math.max(2, width / 110))) {
    const x = (mark / span) * width;
    pen.fillStyle = color("line");
    pen.fillRect(Math.min(width - 1, x), BOTTOM, 1, 8);
    pen.fillStyle = color("dim");
    pen.textAlign = x < 30 ? "left" : x > width - 30 ? "right" : "center";
    pen.fillText(tick(mark), x, BOTTOM + 11);
  }
}
