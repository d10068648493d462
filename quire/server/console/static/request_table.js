// The table of requests: those that run, then those that wait, each with the reason. Rows are kept while their request is there.

import { h, say } from "./dom.js";
import { count, counted, duration, tick } from "./format.js";
import { ownerColor } from "./owners.js";
import { nameOf, phaseOf } from "./replica.js";

/** @typedef {import("./replica.js").Replica} Replica @typedef {import("./replica.js").Row} Row */

const MAX_WAITING = 40;
const STATES = { prompt: "prompt", decode: "decoding", waiting: "waiting", held: "held", preempted: "preempted" };
const HEADS = ["Request", "State", "Progress", "Prompt", "Cached", "Output", "Drafts", "Blocks", "Since", "Why it waits"];
const NUMBERS = new Set(["Prompt", "Cached", "Output", "Drafts", "Blocks", "Since"]);

/** @param {(number: number | null) => void} highlight */
export function makeRequestTable(highlight) {
  const body = h("tbody", { role: "rowgroup" });
  const more = h("p", { class: "dim readout", hidden: true });
  const empty = h("p", { class: "empty" }, "No request runs or waits. Send one from Chat, or with any client.");
  const heads = HEADS.map((text) => h("th", { scope: "col", class: NUMBERS.has(text) ? "number" : "", role: "columnheader" }, text));
  const table = h("table", { class: "requests", role: "table" }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)), body);
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of requests", hidden: true }, table);
  /** @type {Map<number, ReturnType<typeof makeRow>>} */
  let rows = new Map();

  /** @param {Replica} replica */
  function update(replica) {
    const waiting = replica.waiting, shown = [...replica.running, ...waiting.slice(0, MAX_WAITING)];
    const kept = new Map();
    for (const request of shown) {
      const row = rows.get(request.number) ?? makeRow(highlight);
      row.set(request, replica.timeS);
      kept.set(request.number, row);
    }
    rows = kept;
    const elements = shown.map((request) => kept.get(request.number).element);
    if (elements.length !== body.children.length || elements.some((element, index) => element !== body.children[index])) {
      place(body, elements);
    }
    const hidden = replica.numWaiting - Math.min(waiting.length, MAX_WAITING);
    more.hidden = hidden <= 0;
    say(more, `${counted(hidden, "more request waits", "more requests wait")} behind them.`);
    empty.hidden = shown.length > 0;
    scroll.hidden = shown.length === 0;
  }
  return { element: h("div", null, scroll, more, empty), update };
}

/**
 * Put elements in order, moving none that is in its place: the one with the focus keeps it. @param {Element} parent
 * @param {Element[]} elements
 */
function place(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, index) => {
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
}

/** @param {(number: number | null) => void} highlight */
function makeRow(highlight) {
  const swatch = h("span", { class: "swatch" }), link = h("a", { class: "mono" }), name = h("span", { class: "dim" });
  const state = h("span", { class: "state" }), progress = makeProgress(), why = h("td", { class: "why", role: "cell" });
  const cell = (/** @type {string} */ kind) => h("td", { class: `number ${kind}`, role: "cell" });
  const [prompt, cached, output, drafts, blocks, since] = ["less", "less", "output", "less", "less", "since"].map(cell);
  let number = 0;
  const choose = () => highlight(number), leave = () => highlight(null);
  const element = h(
    "tr",
    { role: "row", onpointerenter: choose, onfocusin: choose, onpointerleave: leave, onfocusout: leave },
    h("td", { class: "nowrap", role: "cell" }, swatch, link, name),
    h("td", { role: "cell" }, state),
    h("td", { class: "parts-cell", role: "cell" }, progress.element),
    prompt, cached, output, drafts, blocks, since, why
  );

  /** @param {Row} row @param {number} nowS */
  function set(row, nowS) {
    number = row.number;
    const phase = phaseOf(row);
    swatch.style.background = row.blocks && row.own ? ownerColor(row.number) : "";
    link.hidden = !row.id;
    name.hidden = Boolean(row.id);
    if (row.id) {
      say(link, shorten(row.id));
      link.setAttribute("href", `#request/${encodeURIComponent(row.id)}`);
      link.title = row.id;
    } else say(name, `another tenant's (${row.number})`);
    state.className = `state ${phase === "decode" ? "running" : phase}`;
    say(state, STATES[/** @type {keyof typeof STATES} */ (phase)] ?? phase);
    progress.set(row);
    say(prompt, count(row.prompt_tokens));
    say(cached, row.wait && !row.cached_tokens ? "" : count(row.cached_tokens));
    say(output, `${count(row.output_tokens)} of ${count(row.max_tokens)}`);
    say(drafts, row.drafted_tokens ? `${count(row.accepted_tokens)} of ${count(row.drafted_tokens)}` : "");
    say(blocks, row.swapped_blocks ? `${count(row.blocks)} + ${count(row.swapped_blocks)} on the host` : count(row.blocks));
    say(since, duration(Math.max(0, nowS - row.arrived_s)));
    say(why, reason(row));
  }
  return { element, set };
}

/** @param {Row} row */
function reason(row) {
  const parts = [];
  if (row.wait) {
    parts.push(row.wait.sentence);
    if (row.wait.estimate_s) parts.push(`About ${tick(row.wait.estimate_s)}.`);
  }
  if (row.preemptions) parts.push(`Preempted ${row.preemptions === 1 ? "once" : `${row.preemptions} times`}.`);
  if (row.beams > 1) parts.push(`${counted(row.beams, "beam")}.`);
  return parts.join(" ");
}

/** An id's beginning and end. @param {string} id */
export function shorten(id) {
  return id.length > 18 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id;
}

/** A bar of the prompt (cached, computed, to be computed) and the answer. */
function makeProgress() {
  const parts = ["cached", "prompt", "free", "decode", "free"].map((kind) => h("i", { class: `key ${kind}` }));
  const element = h("span", { class: "progress", "aria-hidden": "true" }, parts);
  return {
    element,
    /** @param {Row} row */
    set(row) {
      const computed = Math.min(row.computed_tokens, row.prompt_tokens), cached = Math.min(row.cached_tokens, computed);
      const left = Math.max(0, row.max_tokens - row.output_tokens);
      const sizes = [cached, computed - cached, row.prompt_tokens - computed, row.output_tokens, left];
      parts.forEach((part, index) => {
        part.style.flexGrow = String(sizes[index]);
        part.hidden = !sizes[index];
      });
    },
  };
}
