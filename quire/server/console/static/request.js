// One request's life: its queue, the chunks of its prompt, its answer, preemptions, and what the cache had of it.

import { ApiError, json } from "./api.js";
import { addCursor, makeCanvas, step, ticks } from "./canvas.js";
import { fill, h, legend, say } from "./dom.js";
import { count, counted, duration, percent, tick } from "./format.js";
import { section } from "./live.js";
import { live } from "./stream.js";

/**
 * @typedef {{kind: string, start_s: number, end_s: number, step?: number, steps?: number, tokens?: number, blocks?: number}} Event
 * @typedef {{id: string, replica: number, number: number, state: string, finish: string | null, arrived_s: number,
 *   ended_s: number | null, prompt_tokens: number, cached_tokens: number, output_tokens: number, max_tokens: number,
 *   miss: string | null, events: Event[], num_dropped_events: number}} Life
 */

const REFRESH_MS = 500;
const HEIGHT = 74, TOP = 8, BOTTOM = 44;
const COLORS = { queued: "wait", prompt: "prompt", decode: "decode", draft: "draft", preempted: "bad", swapped_out: "bad", swapped_in: "dim", restarted: "bad" };
const WORDS = { queued: "Waited", prompt: "Prompt", decode: "Decoded", draft: "Decoded with drafts", preempted: "Preempted", swapped_out: "Swapped out", swapped_in: "Swapped in", restarted: "Engine restarted" };
const HINT = "Point at a part, or move through them with the arrow keys.";

/** @returns {import("./main.js").Screen} */
export function makeRequest() {
  const input = /** @type {HTMLInputElement} */ (h("input", { id: "request-id", type: "text", class: "mono", autocomplete: "off", spellcheck: "false", placeholder: "x-request-id" }));
  const lookup = h("form", { class: "lookup", onsubmit: submit }, h("label", { class: "grow" }, h("span", { class: "visually-hidden" }, "Request id"), input), h("button", { type: "submit" }, "Show"));
  const recent = h("p", { class: "facts" });
  const lives = h("div", { class: "screen" });
  const notice = h("p", { class: "empty", role: "status" });
  const element = h("div", { class: "screen" }, h("header", null, h("h1", null, "Request")), lookup, recent, notice, lives);
  /** @type {Map<string, ReturnType<typeof makeLife>>} */
  let shown = new Map();
  let wanted = "", timer = 0, isVisible = false;

  function submit(/** @type {SubmitEvent} */ event) {
    event.preventDefault();
    if (input.value.trim()) location.hash = `#request/${encodeURIComponent(input.value.trim())}`;
  }

  function showRecent() {
    const rows = [...live.replicas.values()].flatMap((replica) => [...replica.requests.values()]).filter((row) => row.id);
    const newest = rows.sort((a, b) => b.arrived_s - a.arrived_s).slice(0, 6);
    const links = newest.map((row) => h("a", { class: "mono", href: `#request/${encodeURIComponent(/** @type {string} */ (row.id))}` }, row.id));
    fill(recent, links.length ? "Now in the engine:" : "", links);
  }

  async function load() {
    clearTimeout(timer);
    const id = wanted;
    if (!id || !isVisible) return;
    try {
      const { requests } = await json(`console/requests/${encodeURIComponent(id)}`);
      if (id !== wanted) return;
      showLives(requests);
      if (requests.some((/** @type {Life} */ each) => each.state !== "ended")) timer = setTimeout(load, REFRESH_MS);
    } catch (error) {
      if (id !== wanted) return;
      fill(lives);
      shown.clear();
      say(notice, error instanceof ApiError ? error.message : String(error));
    }
  }

  /** @param {Life[]} requests */
  function showLives(requests) {
    say(notice, "");
    const kept = new Map(requests.map((each) => [each.id, shown.get(each.id) ?? makeLife()]));
    if ([...kept.keys()].join() !== [...shown.keys()].join()) fill(lives, [...kept.values()].map((life) => life.element));
    shown = kept;
    for (const each of requests) kept.get(each.id)?.set(each);
  }

  return {
    element,
    show(argument) {
      isVisible = true;
      showRecent();
      if (argument !== wanted) {
        wanted = input.value = argument;
        fill(lives);
        shown.clear();
      }
      say(notice, wanted ? "" : "Choose a request on the Live screen, or enter the x-request-id of a response. Lives are recorded while a console is open.");
      load();
    },
    hide() {
      isVisible = false;
      clearTimeout(timer);
    },
  };
}

function makeLife() {
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
  const table = h("table", null, h("thead", null, h("tr", null, ["What", "At", "For", "Steps", "Tokens"].map((head, index) => h("th", { scope: "col", class: index ? "number" : "" }, head)))), rows);
  const key = legend([["wait", "waits"], ["prompt", "prompt"], ["decode", "decodes"], ["draft", "with drafts"], ["bad", "preempted"]]);
  const element = h("article", { class: "screen" }, section("Life", h("div", null, title, canvas.element, readout), key), h("div", { class: "columns" }, section("Events", h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of events" }, table)), section("Summary", h("div", null, facts, miss))));
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
  const parts = [`${WORDS[/** @type {keyof typeof WORDS} */ (event.kind)] ?? event.kind} at ${duration(event.start_s - life.arrived_s)}`];
  if (event.end_s > event.start_s) parts.push(`for ${duration(event.end_s - event.start_s)}`);
  if (event.steps) parts.push(`${counted(event.steps, "step")} from step ${event.step}`);
  if (event.tokens) parts.push(counted(event.tokens, "token"));
  if (event.blocks) parts.push(counted(event.blocks, "block"));
  return `${parts.join(", ")}.`;
}

/** @param {Life} life @param {Event} event */
function eventRow(life, event) {
  const color = COLORS[/** @type {keyof typeof COLORS} */ (event.kind)] ?? "dim";
  const cells = [
    duration(event.start_s - life.arrived_s),
    event.end_s > event.start_s ? duration(event.end_s - event.start_s) : "",
    event.steps ? count(event.steps) : "",
    event.tokens ? count(event.tokens) : event.blocks ? counted(event.blocks, "block") : "",
  ];
  return h("tr", null, h("td", { class: "nowrap" }, h("i", { class: `key ${color} swatch` }), WORDS[/** @type {keyof typeof WORDS} */ (event.kind)] ?? event.kind), cells.map((text) => h("td", { class: "number" }, text)));
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
    pen.fillStyle = color(COLORS[/** @type {keyof typeof COLORS} */ (event.kind)] ?? "dim");
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
